//! Names of the weights in the files.

use burn_moe::checkpoint::{Rule, WeightMap};

/// Published files name everything `backbone.`, files of transformers sometimes `model.`; each expert is its own pair of
/// matrices, without a gate. Multi-token-prediction weights are carried through unread.
pub fn weight_map() -> WeightMap {
    let experts = |projection: &str| {
        let stacked = format!("layers.{{layer}}.mixer.experts.{projection}");
        let single = format!("{{base}}layers.{{layer}}.mixer.experts.{{expert}}.{projection}.weight");
        Rule::experts(&stacked)
            .stored_as([single.as_str()], [])
            .stored_as([format!("{{base}}{stacked}").as_str()], [])
    };
    WeightMap::new(["backbone.", "model."])
        .rule(experts("up_proj"))
        .rule(experts("down_proj"))
        .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .carry("mtp.{path}")
        // The biases are large with small differences, which bf16 destroys; the other two are fp32 in published files.
        .keep_fp32("layers.{layer}.mixer.gate.e_score_correction_bias")
        .keep_fp32("layers.{layer}.mixer.A_log")
        .keep_fp32("layers.{layer}.mixer.D")
}
