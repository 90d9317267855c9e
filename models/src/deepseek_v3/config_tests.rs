//! Tests of `config.rs`.

use burn_moe::Result;
use burn_moe::layers::RopeKind;

use super::config::{DeepseekV3Config, Generation};
use crate::family::FamilyConfig;
use crate::json::tests::map;
use crate::registry::AutoConfig;

fn parse(text: &str) -> Result<DeepseekV3Config> {
    DeepseekV3Config::parse(&map(text), Generation::V3)
}

fn parse_v2(text: &str) -> Result<DeepseekV3Config> {
    DeepseekV3Config::parse(&map(text), Generation::V2)
}

const YARN: &str = r#""max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}"#;

#[test]
fn the_published_model_has_its_published_size_and_work() {
    let c = parse(&format!("{{{YARN}}}")).unwrap();
    let count = c.parameters();
    assert_eq!((count.total() as f64 / 1e7).round(), 67103.0, "{count}");
    assert_eq!((count.active() as f64 / 1e8).round(), 376.0, "{count}");
    let flops = c.flops_per_token(4096);
    assert!((flops / 249.8e9 - 1.0).abs() < 2e-4, "{flops}");
    assert!((c.score_scale - 0.135_233_78).abs() < 1e-8, "{}", c.score_scale);
    let inv_freq = c.rope.inv_freq(1);
    for (j, v) in [
        (0, 1.0),
        (10, 0.056_234_133),
        (16, 0.0055),
        (23, 3.333_803_6e-5),
        (31, 3.333_803_6e-6),
    ] {
        assert!((f64::from(inv_freq[j]) / v - 1.0).abs() < 3e-7, "{j}: {}", inv_freq[j]);
    }
    assert_eq!(c.rope.attention_factor(), 1.0);
}

/// Sizes on the model cards: V2 236B with 21B active, V2-Lite 15.7B with 2.4B (its embedding and head are not counted
/// in the 2.4B), Moonlight 16B, Kimi K2 1T with 32B.
#[test]
fn relatives_have_their_published_sizes() {
    let sizes = |text: &str| {
        let count = AutoConfig::from_text(text).unwrap().parameters();
        (count.total() as f64 / 1e9, count.active() as f64 / 1e9)
    };
    let (total, active) = sizes(
        r#"{"model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128,
            "num_key_value_heads": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
            "topk_method": "group_limited_greedy", "scoring_func": "softmax", "routed_scaling_factor": 16.0}"#,
    );
    assert!((total - 235.74).abs() < 0.01 && (active - 21.4).abs() < 0.2, "{total} {active}");
    let (total, active) = sizes(
        r#"{"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": null, "topk_method": "greedy"}"#,
    );
    assert!((total - 15.71).abs() < 0.01 && (active - 2.66).abs() < 0.05, "{total} {active}");
    let (total, active) = sizes(
        r#"{"model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": null,
            "vocab_size": 163840, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}"#,
    );
    assert!((total - 15.96).abs() < 0.01 && (active - 2.91).abs() < 0.05, "{total} {active}");
    // GLM-4.7-Flash: "30B-A3B", all fields at their defaults.
    let (total, active) = sizes(r#"{"model_type": "glm4_moe_lite"}"#);
    assert!((total - 29.94).abs() < 0.01 && (active - 3.9).abs() < 0.1, "{total} {active}");
    let (total, active) = sizes(
        r#"{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 64,
            "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 2.827}"#,
    );
    assert!((total - 1026.4).abs() < 0.5 && (active - 32.9).abs() < 0.3, "{total} {active}");
}

#[test]
fn defaults_are_those_of_the_reference() {
    let c = parse("{}").unwrap();
    assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (129_280, 7168, 61));
    assert_eq!((c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank), (128, Some(1536), 512));
    assert_eq!((c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim), (128, 64, 128));
    assert_eq!(
        (c.intermediate_size, c.moe_intermediate_size, c.n_shared_experts),
        (18_432, 2048, 1)
    );
    assert_eq!((c.router.num_experts, c.router.top_k, c.router.scale), (256, 8, 2.5));
    assert_eq!((c.router.groups, c.router.top_groups, c.router.renormalize), (8, 4, true));
    assert_eq!((c.num_sparse_layers(), c.rope_interleave, c.attention_bias), (58, true, false));
    assert_eq!((c.rope.theta, &c.rope.kind, c.rope.dim), (10_000.0, &RopeKind::Default, 64));
    assert_eq!((c.max_position_embeddings, c.rms_norm_eps), (4096, 1e-6));
    assert_eq!(c.score_scale, 192f64.powf(-0.5));

    let c = parse_v2(r#"{"num_experts_per_tok": 6}"#).unwrap();
    assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (102_400, 4096, 32));
    assert_eq!(
        (c.intermediate_size, c.moe_intermediate_size, c.n_shared_experts),
        (11_008, 1407, 2)
    );
    assert_eq!((c.router.num_experts, c.router.groups, c.router.renormalize), (64, 1, false));
    assert_eq!((c.num_sparse_layers(), c.max_position_embeddings, c.router.scale), (32, 2048, 1.0));
    assert!(!c.has_correction_bias() && !c.capabilities().router_bias);
}

#[test]
fn layers_are_dense_or_sparse() {
    let sparse = |text: &str| -> Vec<usize> {
        let c = parse(text).unwrap();
        (0..c.num_hidden_layers).filter(|&i| c.is_sparse(i)).collect()
    };
    assert_eq!(sparse(r#"{"num_hidden_layers": 6}"#), [3, 4, 5]);
    assert_eq!(
        sparse(r#"{"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}"#),
        [2, 4]
    );
    assert_eq!(sparse(r#"{"num_hidden_layers": 2, "first_k_dense_replace": 0}"#), [0, 1]);
    let listed = |text: &str| DeepseekV3Config::parse(&map(text), Generation::Glm4MoeLite).map(|c| c.sparse_layers);
    assert_eq!(listed(r#"{"num_hidden_layers": 3}"#).unwrap(), [false, true, true]);
    assert_eq!(
        listed(r#"{"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]}"#).unwrap(),
        [true, false]
    );
    for (types, part) in [(r#"["sparse"]"#, "1 entries"), (r#"["sparse", "moe"]"#, "mlp_layer_types[1]")] {
        let text = format!(r#"{{"num_hidden_layers": 2, "mlp_layer_types": {types}}}"#);
        assert!(listed(&text).unwrap_err().to_string().contains(part));
    }
    // A router that no layer uses is not checked.
    assert!(sparse(r#"{"num_hidden_layers": 2, "n_group": 7}"#).is_empty());
}

#[test]
fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
    for (text, parts) in [
        (
            r#"{"num_key_value_heads": 8}"#,
            ["num_key_value_heads", "8", "num_attention_heads = 128"],
        ),
        (r#"{"n_routed_experts": 4}"#, ["num_experts_per_tok", "8", "n_routed_experts = 4"]),
        (r#"{"n_group": 7}"#, ["n_group", "7", "n_routed_experts = 256"]),
        (r#"{"n_group": null}"#, ["n_group", "null", "1"]),
        (r#"{"topk_group": 9}"#, ["topk_group", "9", "n_group = 8"]),
        (r#"{"scoring_func": "softmax"}"#, ["scoring_func", "softmax", "sigmoid"]),
        (r#"{"topk_method": "greedy"}"#, ["topk_method", "greedy", "noaux_tc"]),
        (r#"{"moe_layer_freq": [0, 1]}"#, ["moe_layer_freq", "list", "whole number"]),
        (r#"{"hidden_act": "gelu"}"#, ["hidden_act", "gelu", "silu"]),
        (r#"{"q_lora_rank": 0}"#, ["q_lora_rank", "0", "null"]),
        (r#"{"qk_rope_head_dim": 7}"#, ["qk_rope_head_dim", "7", "even"]),
        (r#"{"attention_dropout": 0.5}"#, ["attention_dropout", "0.5", "0"]),
        (r#"{"num_hidden_layers": 100000}"#, ["num_hidden_layers", "100000", "4096"]),
        (
            r#"{"n_routed_experts": 8, "num_local_experts": 9}"#,
            ["`n_routed_experts`", "9", "8"],
        ),
        (
            r#"{"vocab_size": 10, "pad_token_id": 10}"#,
            ["pad_token_id", "10", "vocab_size = 10"],
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors"}}"#,
            ["quantization_config.quant_method", "compressed-tensors", "fp8"],
        ),
        (
            r#"{"quantization_config": {"quant_method": "fp8"}}"#,
            ["quantization_config.weight_block_size", "[]", "128"],
        ),
        (
            r#"{"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}"#,
            ["quantization_config.fmt", "e5m2", "e4m3"],
        ),
        (
            r#"{"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}"#,
            ["short_factor", "1 entries", "32"],
        ),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
    }
    for (text, parts) in [
        ("{}", ["num_experts_per_tok", "nothing", "number"]),
        (
            r#"{"num_experts_per_tok": 2, "topk_method": "group_limited_greedy"}"#,
            ["n_group", "nothing", "number"],
        ),
        (
            r#"{"num_experts_per_tok": 2, "topk_method": "noaux_tc"}"#,
            ["topk_method", "noaux_tc", "group_limited_greedy"],
        ),
        (
            r#"{"num_experts_per_tok": 2, "scoring_func": "sigmoid"}"#,
            ["scoring_func", "sigmoid", "softmax"],
        ),
        (
            r#"{"num_experts_per_tok": 2, "norm_topk_prob": true}"#,
            ["norm_topk_prob", "true", "false"],
        ),
    ] {
        let error = parse_v2(text).unwrap_err().to_string();
        assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
    }
}

#[test]
fn names_decide_the_generation() {
    let auto = |text: &str| AutoConfig::from_text(text).unwrap();
    let by_architecture = auto(r#"{"architectures": ["DeepseekV3ForCausalLM"]}"#);
    assert_eq!(by_architecture.model_type(), "deepseek_v3");
    let kimi = auto(r#"{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}"#);
    assert_eq!((kimi.model_type(), kimi.architecture()), ("kimi_k2", "DeepseekV3ForCausalLM"));
    // Multimodal and other attention: refused with the nearest known name.
    for text in [r#"{"model_type": "kimi_k25"}"#, r#"{"model_type": "deepseek_v32"}"#] {
        let error = AutoConfig::from_text(text).unwrap_err().to_string();
        assert!(error.contains("model_type") && error.contains("nearest"), "{error}");
    }
}
