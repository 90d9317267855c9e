//! Published sizes with their true widths; the number of layers and of experts can be cut to what fits.

use burn_moe::{Error, Result};
use serde_json::{Map, Value, json};

use crate::AutoConfig;

/// A named size of a family.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    pub name: &'static str,
    config: fn() -> Value,
    /// Field that holds the number of routed experts; None for dense models.
    experts: Option<&'static str>,
}

const fn preset(name: &'static str, config: fn() -> Value, experts: Option<&'static str>) -> Preset {
    Preset { name, config, experts }
}

/// Every preset. The `tiny` ones run on a CPU in seconds.
pub const PRESETS: [Preset; 10] = [
    preset("qwen3_30b_a3b", qwen3_30b_a3b, Some("num_experts")),
    preset("nemotron3_nano", nemotron3_nano, Some("n_routed_experts")),
    preset("nemotron3_ultra", nemotron3_ultra, Some("n_routed_experts")),
    preset("gpt_oss_20b", gpt_oss_20b, Some("num_local_experts")),
    preset("deepseek_v3", deepseek_v3, Some("n_routed_experts")),
    preset("qwen3_8b", qwen3_8b, None),
    preset("tiny_qwen3_moe", tiny_qwen3_moe, Some("num_experts")),
    preset("tiny_nemotron_h", tiny_nemotron_h, Some("n_routed_experts")),
    preset("tiny_gpt_oss", tiny_gpt_oss, Some("num_local_experts")),
    preset("tiny_deepseek_v3", tiny_deepseek_v3, Some("n_routed_experts")),
];

impl Preset {
    /// The preset of a name.
    ///
    /// # Errors
    /// An unknown name, with the known ones.
    pub fn find(name: &str) -> Result<Self> {
        PRESETS.into_iter().find(|preset| preset.name == name).ok_or_else(|| {
            let known = PRESETS.map(|preset| preset.name).join(", ");
            Error::config("--preset", name, format!("one of {known}"))
        })
    }

    /// Its config with the first `layers` layers and `experts` routed experts; None keeps the published number.
    ///
    /// # Errors
    /// More layers than the model has, experts for a dense model, or numbers that its config refuses.
    pub fn config(self, layers: Option<usize>, experts: Option<usize>) -> Result<AutoConfig> {
        let Value::Object(mut fields) = (self.config)() else {
            unreachable!("every preset is an object")
        };
        if let Some(layers) = layers {
            cut_layers(&mut fields, layers)?;
        }
        match (experts, self.experts) {
            (Some(experts), Some(field)) => drop(fields.insert(field.into(), experts.into())),
            (Some(experts), None) => {
                let expected = format!("nothing: {} has no routed experts", self.name);
                return Err(Error::config("--experts", experts, expected));
            }
            (None, _) => {}
        }
        fields.insert("dtype".into(), "bfloat16".into());
        AutoConfig::from_text(Value::Object(fields).to_string())
    }
}

fn cut_layers(fields: &mut Map<String, Value>, layers: usize) -> Result<()> {
    let pattern = fields.get("hybrid_override_pattern").and_then(Value::as_str).map(str::to_owned);
    let published = match &pattern {
        Some(pattern) => pattern.len(),
        None => fields["num_hidden_layers"].as_u64().unwrap_or_default() as usize,
    };
    if layers == 0 || layers > published {
        return Err(Error::config(
            "--layers",
            layers,
            format!("1 to {published}, the layers of the model"),
        ));
    }
    if let Some(pattern) = pattern {
        fields.insert("hybrid_override_pattern".into(), pattern[..layers].into());
    }
    fields.insert("num_hidden_layers".into(), layers.into());
    // A model of few layers keeps one with experts: its last.
    if let Some(dense) = fields.get("first_k_dense_replace").and_then(Value::as_u64) {
        fields.insert("first_k_dense_replace".into(), dense.min(layers as u64 - 1).into());
    }
    Ok(())
}

fn qwen3_30b_a3b() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": true, "decoder_sparse_step": 1, "rope_theta": 1e6,
        "tie_word_embeddings": false
    })
}

fn nemotron3_nano() -> Value {
    json!({
        "model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 2688, "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 2, "mamba_num_heads": 64, "mamba_head_dim": 64,
        "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "intermediate_size": 1856,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
        "n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2"
    })
}

/// Without the layers that predict further tokens; the number of groups is not published and taken from the smaller models.
fn nemotron3_ultra() -> Value {
    json!({
        "model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 8192, "num_hidden_layers": 108,
        "hybrid_override_pattern": concat!(
            "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*",
            "EMEMEMEME"
        ),
        "num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 2, "mamba_num_heads": 256, "mamba_head_dim": 64,
        "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "intermediate_size": 5120,
        "moe_intermediate_size": 5120, "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10_240,
        "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0,
        "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2"
    })
}

fn gpt_oss_20b() -> Value {
    json!({
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "attention_bias": true,
        "num_local_experts": 32, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096
        },
        "tie_word_embeddings": false
    })
}

fn qwen3_8b() -> Value {
    json!({
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": false
    })
}

fn tiny_qwen3_moe() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": true
    })
}

fn tiny_nemotron_h() -> Value {
    json!({
        "model_type": "nemotron_h", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 7,
        "hybrid_override_pattern": "ME*MEM-", "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 32,
        "intermediate_size": 96, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5
    })
}

fn tiny_gpt_oss() -> Value {
    json!({
        "model_type": "gpt_oss", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 512, "rope_theta": 150_000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 128
        }
    })
}

/// With the true head sizes, since they choose the kernel of the attention.
fn tiny_deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 512, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes() {
        for (name, total) in [
            ("qwen3_30b_a3b", 3053.0),
            ("nemotron3_nano", 3158.0),
            ("gpt_oss_20b", 2091.0),
            ("deepseek_v3", 67103.0),
            ("qwen3_8b", 819.0),
        ] {
            let config = Preset::find(name).unwrap().config(None, None).unwrap();
            assert_eq!((config.parameters().total() as f64 / 1e7).round(), total, "{name}");
        }
    }

    #[test]
    fn layers_and_experts_are_cut() {
        let qwen = Preset::find("qwen3_30b_a3b").unwrap().config(Some(8), Some(16)).unwrap();
        let AutoConfig::Sparse(c) = &qwen else { panic!("{qwen:?}") };
        assert_eq!((c.decoder.num_hidden_layers, c.num_experts), (8, 16));
        let nano = Preset::find("nemotron3_nano").unwrap().config(Some(14), None).unwrap();
        let AutoConfig::NemotronH(c) = &nano else { panic!("{nano:?}") };
        assert_eq!((c.layers.len(), c.moe.router.num_experts), (14, 128));
        let error = Preset::find("qwen3_8b").unwrap().config(None, Some(4)).unwrap_err().to_string();
        assert!(error.contains("--experts"), "{error}");
        for preset in PRESETS {
            preset.config(Some(1), None).unwrap();
            for layers in [0, 1000] {
                assert!(preset.config(Some(layers), None).unwrap_err().to_string().contains("--layers"));
            }
        }
        let error = Preset::find("qwen").unwrap_err().to_string();
        assert!(error.contains("qwen3_30b_a3b") && error.contains("tiny_nemotron_h"), "{error}");
    }
}
