//! Names of the weights in the files.

use burn_moe::checkpoint::{QuantFormat, Rule, Step, WeightMap};
use serde_json::json;

/// Matrices that published FP8 files hold quantised, beside those of the routed experts.
const QUANTISED: [&str; 12] = [
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
];

/// Published files hold three matrices per expert, in bf16 or in FP8 blocks of `block` rows and columns; in memory gate and up
/// are one stack, gate rows first. Layers behind the last of `num_hidden_layers` predict further tokens (multi-token
/// prediction): they are carried through unread, as are the rotary frequencies that some older files hold.
pub fn weight_map(num_hidden_layers: usize, block: [usize; 2]) -> WeightMap {
    let format = QuantFormat::Fp8 {
        rows: block[0],
        columns: block[1],
    };
    let fp8 = Step::Dequantise(format);
    let expert = |name: &str| format!("{{base}}layers.{{layer}}.mlp.experts.{{expert}}.{name}");
    let (gate, up, down) = (expert("gate_proj.weight"), expert("up_proj.weight"), expert("down_proj.weight"));
    let scales = |name: &str| format!("{name}_scale_inv");
    let mut map = WeightMap::new(["model."])
        .rule(
            Rule::experts("layers.{layer}.mlp.experts.gate_up_proj")
                .stored_as([gate.as_str(), up.as_str()], [Step::Concat { axis: 1 }])
                .stored_as(["{base}layers.{layer}.mlp.experts.gate_up_proj"], [])
                .stored_as(
                    [gate.as_str(), &scales(&gate), up.as_str(), &scales(&up)],
                    [fp8, Step::Concat { axis: 1 }],
                ),
        )
        .rule(
            Rule::experts("layers.{layer}.mlp.experts.down_proj")
                .stored_as([down.as_str()], [])
                .stored_as(["{base}layers.{layer}.mlp.experts.down_proj"], [])
                .stored_as([down.as_str(), &scales(&down)], [fp8]),
        );
    for matrix in QUANTISED {
        let target = format!("layers.{{layer}}.{matrix}.weight");
        let stored = format!("{{base}}{target}");
        map = map.rule(
            Rule::tensor(&target)
                .stored_as([stored.as_str()], [])
                .stored_as([stored.as_str(), &scales(&stored)], [fp8]),
        );
    }
    map.rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
        .carry_from("model.layers.{layer}.{path}", "layer", num_hidden_layers)
        .carry("model.layers.{layer}.self_attn.rotary_emb.inv_freq")
        .carry_quantised("{path}.weight", "{path}.weight_scale_inv", format)
        .quantization_config(json!({
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        }))
        // Large values with small differences, which bf16 destroys.
        .keep_fp32("layers.{layer}.mlp.gate.e_score_correction_bias")
}
