//! Names of the weights in the files.

use burn_moe::checkpoint::{QuantFormat, Rule, Step, WeightMap};
use serde_json::json;

/// Experts are stacked in the files. Plain files hold them `[E, in, out]`, MXFP4 files `[E, out, in]` as blocks with scales;
/// the names tell which. In memory they are `[E, out, in]`. Gate and up alternate in all of them.
pub fn weight_map() -> WeightMap {
    let experts = |projection: &str| {
        let target = format!("layers.{{layer}}.mlp.experts.{projection}");
        let [plain, blocks, scales] = ["", "_blocks", "_scales"].map(|suffix| format!("{{base}}{target}{suffix}"));
        Rule::experts(&target)
            .stored_as([plain.as_str()], [Step::Transpose { axes: (1, 2) }])
            .stored_as([blocks.as_str(), scales.as_str()], [Step::Dequantise(QuantFormat::Mxfp4)])
    };
    let bias = |projection: &str| {
        let target = format!("layers.{{layer}}.mlp.experts.{projection}_bias");
        Rule::experts(&target).stored_as([format!("{{base}}{target}").as_str()], [])
    };
    WeightMap::new(["model."])
        .rule(experts("gate_up_proj"))
        .rule(experts("down_proj"))
        .rule(bias("gate_up_proj"))
        .rule(bias("down_proj"))
        .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
        // As in the published files: everything but the two expert matrices is plain.
        .quantization_config(json!({
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
            ],
            "quant_method": "mxfp4"
        }))
}
