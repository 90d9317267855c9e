//! Names of the weights in the files.

use burn_moe::checkpoint::{Rule, Step, WeightMap};

use super::config::SparseKind;

/// Published files hold three matrices per expert; in memory gate and up are one stack, gate rows first. The stacked names
/// are those of transformers 5.
pub fn weight_map(kind: SparseKind) -> WeightMap {
    let map = WeightMap::new(["model."]);
    let map = match kind {
        SparseKind::Mixtral => mixtral(map),
        SparseKind::Qwen3Moe | SparseKind::Qwen2Moe | SparseKind::Olmoe => qwen(map),
    };
    map.rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
}

fn qwen(map: WeightMap) -> WeightMap {
    map.rule(
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
}

/// `w1` is the gate, `w3` up and `w2` down.
fn mixtral(map: WeightMap) -> WeightMap {
    map.rule(
        Rule::experts("layers.{layer}.mlp.experts.gate_up_proj")
            .stored_as(
                [
                    "{base}layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
                    "{base}layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
                ],
                [Step::Concat { axis: 1 }],
            )
            .stored_as(
                [
                    "{base}layers.{layer}.mlp.experts.{expert}.w1.weight",
                    "{base}layers.{layer}.mlp.experts.{expert}.w3.weight",
                ],
                [Step::Concat { axis: 1 }],
            )
            .stored_as(["{base}layers.{layer}.mlp.experts.gate_up_proj"], [])
            .stored_as(["{base}layers.{layer}.block_sparse_moe.experts.gate_up_proj"], []),
    )
    .rule(
        Rule::experts("layers.{layer}.mlp.experts.down_proj")
            .stored_as(["{base}layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"], [])
            .stored_as(["{base}layers.{layer}.mlp.experts.{expert}.w2.weight"], [])
            .stored_as(["{base}layers.{layer}.mlp.experts.down_proj"], [])
            .stored_as(["{base}layers.{layer}.block_sparse_moe.experts.down_proj"], []),
    )
    .rule(
        Rule::tensor("layers.{layer}.mlp.gate.weight")
            .stored_as(["{base}layers.{layer}.block_sparse_moe.gate.weight"], [])
            .stored_as(["{base}layers.{layer}.mlp.gate.weight"], []),
    )
}
