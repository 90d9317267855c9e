//! Tiny models of every family, built from a config text.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_moe::backend::{Device, Train};
use burn_moe::batch::HostBatch;
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions};

/// All four mixers, experts at a latent width, weights large enough that every layer matters.
pub const NEMOTRON_H: &str = r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-MEM*", "vocab_size": 50,
    "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "mamba_num_heads": 4,
    "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7, "conv_kernel": 3, "chunk_size": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 9, "moe_latent_size": 8, "moe_shared_expert_intermediate_size": 11,
    "intermediate_size": 13, "initializer_range": 0.3}"#;

/// Sparse and dense layers, window, scaled positions.
pub const QWEN3_MOE: &str = r#"{"model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7, "intermediate_size": 9, "mlp_only_layers": [1], "norm_topk_prob": true,
    "use_sliding_window": true, "sliding_window": 5, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "initializer_range": 0.3}"#;

/// Compressed queries, scaled positions, a dense layer, groups of experts, shared experts.
pub const DEEPSEEK_V3: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "num_attention_heads": 3, "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 7, "intermediate_size": 9, "n_shared_experts": 2, "initializer_range": 0.3,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16}}"#;
/// Sliding and full layers, gated shared expert, biases.
pub const QWEN2_MOE: &str = r#"{"model_type": "qwen2_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7, "shared_expert_intermediate_size": 5, "intermediate_size": 9, "mlp_only_layers": [1],
    "use_sliding_window": true, "sliding_window": 5, "initializer_range": 0.3}"#;

/// A window in every layer.
pub const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 7, "sliding_window": 5, "initializer_range": 0.3}"#;

/// Norms over all heads, clipped queries, keys and values.
pub const OLMOE: &str = r#"{"model_type": "olmoe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 7, "clip_qkv": 0.7,
    "initializer_range": 0.3}"#;

/// Scaled positions, biases everywhere.
pub const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 9, "attention_bias": true, "mlp_bias": true,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16}, "initializer_range": 0.3}"#;

/// The upper layers slide; tied embeddings.
pub const QWEN2: &str = r#"{"model_type": "qwen2", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 9, "use_sliding_window": true,
    "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": true, "initializer_range": 0.3}"#;

/// Norms of query and key heads.
pub const QWEN3: &str = r#"{"model_type": "qwen3", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 9, "initializer_range": 0.3}"#;

/// A window in every layer.
pub const MISTRAL: &str = r#"{"model_type": "mistral", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 9, "sliding_window": 5,
    "initializer_range": 0.3}"#;

/// Models with four routed experts.
pub const SPARSE: &[&str] = &[NEMOTRON_H, QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, DEEPSEEK_V3, GLM4_MOE, GPT_OSS];
/// Models without experts.
pub const DENSE: &[&str] = &[LLAMA, QWEN2, QWEN3, MISTRAL];

/// Half of each head rotated, biases, a dense layer, shared experts.
pub const GLM4_MOE: &str = r#"{"model_type": "glm4_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": true, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 7, "intermediate_size": 9, "n_shared_experts": 2,
    "initializer_range": 0.3}"#;

/// Sinks, sliding and full layers, YaRN, biases everywhere.
pub const GPT_OSS: &str = r#"{"model_type": "gpt_oss", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 7, "sliding_window": 3, "initializer_range": 0.3}"#;

/// A model with the initial values of seed 1.
pub fn model(config: &AutoConfig) -> AutoModelForCausalLm<Train> {
    let options = FromConfigOptions {
        seed: 1,
        ..Default::default()
    };
    AutoModelForCausalLm::from_config(config, &options, &Device::default()).expect("a valid config")
}

/// One row of tokens, every one of them a label.
pub fn row(ids: &[i32], doc_start: Option<Vec<i32>>) -> HostBatch {
    HostBatch {
        batch: 1,
        seq: ids.len(),
        input_ids: ids.to_vec(),
        labels: ids.to_vec(),
        doc_start,
        ..Default::default()
    }
}

/// Gradient of every parameter that has one, by module path.
pub fn gradients<B: AutodiffBackend, M: Module<B>>(model: &M, grads: &B::Gradients) -> BTreeMap<String, Vec<f32>> {
    struct Visitor<'a, B: AutodiffBackend> {
        grads: &'a B::Gradients,
        path: Vec<String>,
        found: BTreeMap<String, Vec<f32>>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Visitor<'_, B> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = param.val().grad(self.grads) {
                let values = grad.into_data().convert::<f32>().into_vec().expect("f32");
                self.found.insert(self.path.join("."), values);
            }
        }
    }
    let mut visitor = Visitor::<B> {
        grads,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}
