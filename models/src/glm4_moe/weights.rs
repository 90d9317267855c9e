//! Names of the weights in the files.

use burn_moe::checkpoint::{Rule, Step, WeightMap};

/// Published files hold three matrices per expert; in memory gate and up are one stack, gate rows first. Layers behind the
/// last of `num_hidden_layers` predict further tokens (multi-token prediction) and are carried through unread.
pub fn weight_map(num_hidden_layers: usize) -> WeightMap {
    WeightMap::new(["model."])
        .rule(
            Rule::experts("layers.{layer}.mlp.experts.gate_up_proj")
                .stored_as(
                    [
                        "{base}layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
                        "{base}layers.{layer}.mlp.experts.{expert}.up_proj.weight",
                    ],
                    [Step::Concat { axis: 1 }],
                )
                .stored_as(["{base}layers.{layer}.mlp.experts.gate_up_proj"], []),
        )
        .rule(
            Rule::experts("layers.{layer}.mlp.experts.down_proj")
                .stored_as(["{base}layers.{layer}.mlp.experts.{expert}.down_proj.weight"], [])
                .stored_as(["{base}layers.{layer}.mlp.experts.down_proj"], []),
        )
        .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
        .carry_from("model.layers.{layer}.{path}", "layer", num_hidden_layers)
        // Large values with small differences, which bf16 destroys.
        .keep_fp32("layers.{layer}.mlp.gate.e_score_correction_bias")
}
