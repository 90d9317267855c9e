//! Names of the weights in the files.

use burn_moe::checkpoint::{Rule, WeightMap};

/// Names on disk and in memory are the same. Files of the first Llama generation also hold the rotary frequencies, which are
/// computed.
pub fn weight_map() -> WeightMap {
    WeightMap::new(["model."])
        .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
        .carry("model.layers.{layer}.self_attn.rotary_emb.inv_freq")
}
