//! One model type for all families.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::ParamBuilder;
use burn_moe::model::{AuxLossSettings, BlockOutput, CausalLm, Head, LayerCache, ModelInput};

use crate::deepseek_v3::DeepseekV3;
use crate::dense::DenseDecoder;
use crate::family::{Capabilities, FamilyConfig};
use crate::glm4_moe::Glm4Moe;
use crate::gpt_oss::GptOss;
use crate::nemotron_h::NemotronH;
use crate::registry::AutoConfig;
use crate::sparse::SparseDecoder;

/// Writes [`AutoModelForCausalLm`] and everything that depends on the family from one line per family.
macro_rules! families {
    ($($variant:ident($model:ident)),+ $(,)?) => {
        /// A causal language model of any known family.
        // A program holds one; the size of the variants does not matter.
        #[allow(clippy::large_enum_variant)]
        #[derive(Module, Debug)]
        pub enum AutoModelForCausalLm<B: MoeBackend> {
            $($variant($model<B>)),+
        }

        impl<B: MoeBackend> AutoModelForCausalLm<B> {
            fn build(config: &AutoConfig, pb: &ParamBuilder<B>) -> Result<Self> {
                Ok(match config {
                    $(AutoConfig::$variant(config) => Self::$variant($model::new(config, pb)?)),+
                })
            }

            /// The config the model was built from.
            pub fn config(&self) -> AutoConfig {
                match self {
                    $(Self::$variant(model) => AutoConfig::$variant(model.config().clone())),+
                }
            }

            /// Dtype of the residual stream.
            pub fn dtype(&self) -> FloatDType {
                match self {
                    $(Self::$variant(model) => model.dtype()),+
                }
            }
        }

        impl<B: MoeBackend> CausalLm<B> for AutoModelForCausalLm<B> {
            fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>> {
                match self {
                    $(Self::$variant(model) => model.prepare(batch, past, device)),+
                }
            }

            fn num_blocks(&self) -> usize {
                match self {
                    $(Self::$variant(model) => model.num_blocks()),+
                }
            }

            fn vocab_size(&self) -> usize {
                match self {
                    $(Self::$variant(model) => model.vocab_size()),+
                }
            }

            fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
                match self {
                    $(Self::$variant(model) => model.embed(input)),+
                }
            }

            fn block(
                &self,
                index: usize,
                x_bsd: Tensor<B, 3>,
                input: &ModelInput<B>,
                replay: Option<&Tensor<B, 2, Int>>,
                cache: Option<&mut LayerCache<B>>,
            ) -> Result<BlockOutput<B>> {
                match self {
                    $(Self::$variant(model) => model.block(index, x_bsd, input, replay, cache)),+
                }
            }

            fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>> {
                match self {
                    $(Self::$variant(model) => model.head(x_bsd)),+
                }
            }

            fn flops_per_token(&self, seq: usize) -> Option<f64> {
                match self {
                    $(Self::$variant(model) => Some(model.config().flops_per_token(seq))),+
                }
            }

            fn aux_loss(&self) -> Option<AuxLossSettings> {
                match self {
                    $(Self::$variant(model) => model.aux_loss()),+
                }
            }
        }
    };
}

families! {
    GptOss(GptOss),
    NemotronH(NemotronH),
    Sparse(SparseDecoder),
    Dense(DenseDecoder),
    DeepseekV3(DeepseekV3),
    Glm4Moe(Glm4Moe),
}

/// How to build a model without a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct FromConfigOptions {
    /// Dtype of the parameters; None: the config's, or fp32 when it names none.
    pub dtype: Option<FloatDType>,
    /// Seed of the initial values.
    pub seed: u64,
    /// Hold only this rank's experts.
    pub ep: Option<EpGroup>,
}

impl<B: MoeBackend> AutoModelForCausalLm<B> {
    /// A model with the family's initial values. They are drawn when they are first read, so building is free, and depend on
    /// the seed alone: any number of ranks holds slices of the same model.
    ///
    /// # Errors
    /// When the experts do not divide evenly over the ranks.
    pub fn from_config(config: &AutoConfig, options: &FromConfigOptions, device: &B::Device) -> Result<Self> {
        if let Some(ep) = &options.ep {
            config.check_expert_parallel(ep.size())?;
        }
        let dtype = options.dtype.or(config.common().dtype).unwrap_or(FloatDType::F32);
        let pb = ParamBuilder::new(device, dtype).with_seed(options.seed).with_ep(options.ep.clone());
        Self::build(config, &pb)
    }

    /// What the model can do.
    pub fn capabilities(&self) -> Capabilities {
        self.config().capabilities()
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{ModuleVisitor, Param};
    use burn::tensor::backend::Backend;
    use burn_moe::backend::Infer;

    use super::*;

    /// Every name of every family, with the fields that have no default.
    fn smallest_configs() -> impl Iterator<Item = (&'static str, &'static str, AutoConfig)> {
        let names = crate::FAMILIES.iter().flat_map(|family| family.names);
        names.map(|(model_type, architecture)| {
            let names = format!(r#""model_type": "{model_type}", "architectures": ["{architecture}"]"#);
            let config = AutoConfig::from_text(format!(r#"{{{names}, "num_experts_per_tok": 2, "head_dim": 128}}"#));
            (*model_type, *architecture, config.unwrap())
        })
    }

    /// Every family says what it can do, and it fits the model.
    #[test]
    fn capabilities_fit_the_family() {
        use crate::ExportLayout;
        for (model_type, architecture, config) in smallest_configs() {
            assert_eq!((config.model_type(), config.architecture()), (model_type, architecture));
            let can = config.capabilities();
            assert!(can.packing && !can.export.is_empty(), "{model_type}");
            assert_eq!(can.expert_parallel(), can.moe_blocks > 0, "{model_type}");
            assert_eq!(can.export[0] == ExportLayout::Plain, !can.expert_parallel(), "{model_type}");
        }
    }

    /// Shapes and names of all parameters, none of them drawn.
    #[derive(Default)]
    struct Shapes {
        path: Vec<String>,
        found: Vec<(String, Vec<usize>)>,
    }

    impl<B: Backend> ModuleVisitor<B> for Shapes {
        fn enter_module(&mut self, name: &str, container: &str) {
            // Enum variants are not part of checkpoint names.
            self.path.push(if container.starts_with("Enum:") {
                String::new()
            } else {
                name.into()
            });
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            assert!(!param.is_initialized());
            let names: Vec<&str> = self.path.iter().map(String::as_str).filter(|n| !n.is_empty()).collect();
            self.found.push((names.join("."), param.lazy_shape().to_vec()));
        }
    }

    fn shapes(text: &str) -> (AutoConfig, Vec<(String, Vec<usize>)>) {
        let config = AutoConfig::from_text(text).unwrap();
        let model = AutoModelForCausalLm::<Infer>::from_config(&config, &Default::default(), &Default::default()).unwrap();
        let mut shapes = Shapes::default();
        model.visit(&mut shapes);
        (config, shapes.found)
    }

    const NEMOTRON: &str = r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-E", "vocab_size": 50,
        "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 5, "mamba_num_heads": 6,
        "mamba_head_dim": 3, "n_groups": 2, "ssm_state_size": 7, "conv_kernel": 3, "n_routed_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 9, "moe_shared_expert_intermediate_size": 11,
        "intermediate_size": 13"#;
    const QWEN: &str = r#"{"model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7, "intermediate_size": 9, "mlp_only_layers": [1]"#;

    const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
        "first_k_dense_replace": 1, "num_attention_heads": 3, "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2, "v_head_dim": 5, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 7, "intermediate_size": 9, "n_shared_experts": 2"#;
    const RELATIVE: &str = r#""vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 1, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 9"#;
    const DENSE: &str = r#""vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 9"#;

    const GLM: &str = r#"{"model_type": "glm4_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7, "intermediate_size": 9, "n_shared_experts": 2"#;
    const GPT: &str = r#"{"model_type": "gpt_oss", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 2,
        "intermediate_size": 7"#;

    #[test]
    fn counts_from_the_config_are_those_of_the_module() {
        for text in [
            format!("{NEMOTRON}}}"),
            format!(r#"{NEMOTRON}, "moe_latent_size": 4, "mlp_bias": true, "use_bias": true, "use_conv_bias": false}}"#),
            format!("{QWEN}}}"),
            format!(r#"{QWEN}, "attention_bias": true, "tie_word_embeddings": true}}"#),
            format!("{DEEPSEEK}}}"),
            format!(r#"{DEEPSEEK}, "attention_bias": true, "tie_word_embeddings": true}}"#),
            format!("{GLM}}}"),
            format!(r#"{GLM}, "attention_bias": true, "use_qk_norm": true, "tie_word_embeddings": true}}"#),
            format!(r#"{DEEPSEEK}, "attention_bias": true, "mlp_bias": true}}"#)
                .replace("deepseek_v3", "deepseek_v2")
                .replace(r#""q_lora_rank": 7"#, r#""q_lora_rank": null"#),
            format!(r#"{{"model_type": "qwen2_moe", {RELATIVE}, "moe_intermediate_size": 7, "mlp_only_layers": [1]}}"#),
            format!(r#"{{"model_type": "qwen2_moe", {RELATIVE}, "decoder_sparse_step": 2, "qkv_bias": false}}"#),
            format!(r#"{{"model_type": "mixtral", {RELATIVE}, "tie_word_embeddings": true}}"#),
            format!(r#"{{"model_type": "olmoe", {RELATIVE}, "attention_bias": true}}"#),
            format!(r#"{{"model_type": "llama", {DENSE}}}"#),
            format!(r#"{{"model_type": "llama", {DENSE}, "attention_bias": true, "mlp_bias": true}}"#),
            format!(r#"{{"model_type": "qwen2", {DENSE}, "tie_word_embeddings": true}}"#),
            format!(r#"{{"model_type": "qwen3", {DENSE}, "attention_bias": true}}"#),
            format!(r#"{{"model_type": "mistral", {DENSE}}}"#),
            format!("{GPT}}}"),
            format!(r#"{GPT}, "attention_bias": false, "tie_word_embeddings": true}}"#),
        ] {
            let (config, shapes) = shapes(&text);
            let real: usize = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            let count = config.parameters();
            assert_eq!(count.total(), real as u64, "{text}\n{count}");
            let experts: u64 = shapes
                .iter()
                .filter(|(name, _)| name.contains(".experts."))
                .map(|(_, shape)| shape.iter().product::<usize>() as u64)
                .sum();
            // Two of five experts are active; a dense model has none.
            assert_eq!(count.total() - count.active(), experts / 5 * 3, "{text}");
        }
    }

    #[test]
    fn module_paths_are_the_names_of_the_checkpoint() {
        let (_, found) = shapes(&format!(r#"{NEMOTRON}, "moe_latent_size": 4}}"#));
        let shape = |name: &str| found.iter().find(|(n, _)| n == name).map(|(_, s)| s.as_slice());
        for (name, expected) in [
            ("embeddings.weight", &[50, 12][..]),
            ("layers.0.norm.weight", &[12]),
            // 2 * 18 inner + 2 * 2 * 7 + 6 heads
            ("layers.0.mixer.in_proj.weight", &[70, 12]),
            ("layers.0.mixer.conv1d.weight", &[46, 1, 3]),
            ("layers.0.mixer.conv1d.bias", &[46]),
            ("layers.0.mixer.A_log", &[6]),
            ("layers.0.mixer.D", &[6]),
            ("layers.0.mixer.dt_bias", &[6]),
            ("layers.0.mixer.norm.weight", &[18]),
            ("layers.0.mixer.out_proj.weight", &[12, 18]),
            ("layers.1.mixer.gate.weight", &[5, 12]),
            ("layers.1.mixer.gate.e_score_correction_bias", &[5]),
            ("layers.1.mixer.experts.up_proj", &[5, 9, 4]),
            ("layers.1.mixer.experts.down_proj", &[5, 4, 9]),
            ("layers.1.mixer.shared_experts.up_proj.weight", &[11, 12]),
            ("layers.1.mixer.fc1_latent_proj.weight", &[4, 12]),
            ("layers.1.mixer.fc2_latent_proj.weight", &[12, 4]),
            ("layers.2.mixer.q_proj.weight", &[15, 12]),
            ("layers.2.mixer.o_proj.weight", &[12, 15]),
            ("layers.3.mixer.down_proj.weight", &[12, 13]),
            ("norm_f.weight", &[12]),
            ("lm_head.weight", &[50, 12]),
        ] {
            assert_eq!(shape(name), Some(expected), "{name}");
        }
        let (_, found) = shapes(&format!("{QWEN}}}"));
        let shape = |name: &str| found.iter().find(|(n, _)| n == name).map(|(_, s)| s.as_slice());
        for (name, expected) in [
            ("embed_tokens.weight", &[40, 12][..]),
            ("layers.0.input_layernorm.weight", &[12]),
            ("layers.0.self_attn.k_proj.weight", &[12, 12]),
            ("layers.0.self_attn.q_norm.weight", &[6]),
            ("layers.0.mlp.gate.weight", &[5, 12]),
            ("layers.0.mlp.experts.gate_up_proj", &[5, 14, 12]),
            ("layers.0.mlp.experts.down_proj", &[5, 12, 7]),
            ("layers.1.mlp.gate_proj.weight", &[9, 12]),
            ("layers.1.post_attention_layernorm.weight", &[12]),
            ("norm.weight", &[12]),
        ] {
            assert_eq!(shape(name), Some(expected), "{name}");
        }
        let (_, found) = shapes(&format!("{DEEPSEEK}}}"));
        let shape = |name: &str| found.iter().find(|(n, _)| n == name).map(|(_, s)| s.as_slice());
        for (name, expected) in [
            ("layers.0.self_attn.q_a_proj.weight", &[7, 12][..]),
            ("layers.0.self_attn.q_a_layernorm.weight", &[7]),
            ("layers.0.self_attn.q_b_proj.weight", &[18, 7]),
            ("layers.0.self_attn.kv_a_proj_with_mqa.weight", &[8, 12]),
            ("layers.0.self_attn.kv_a_layernorm.weight", &[6]),
            ("layers.0.self_attn.kv_b_proj.weight", &[27, 6]),
            ("layers.0.self_attn.o_proj.weight", &[12, 15]),
            ("layers.0.mlp.gate_proj.weight", &[9, 12]),
            ("layers.1.mlp.gate.e_score_correction_bias", &[5]),
            ("layers.1.mlp.experts.gate_up_proj", &[5, 14, 12]),
            ("layers.1.mlp.shared_experts.down_proj.weight", &[12, 14]),
        ] {
            assert_eq!(shape(name), Some(expected), "{name}");
        }
        let (_, found) = shapes(&format!("{GPT}}}"));
        let shape = |name: &str| found.iter().find(|(n, _)| n == name).map(|(_, s)| s.as_slice());
        for (name, expected) in [
            ("layers.0.self_attn.sinks", &[4][..]),
            ("layers.0.self_attn.o_proj.bias", &[12]),
            ("layers.2.mlp.router.weight", &[5, 12]),
            ("layers.2.mlp.router.bias", &[5]),
            // In memory `[out, in]`; the files have `[in, out]`.
            ("layers.2.mlp.experts.gate_up_proj", &[5, 14, 12]),
            ("layers.2.mlp.experts.gate_up_proj_bias", &[5, 14]),
            ("layers.2.mlp.experts.down_proj", &[5, 12, 7]),
            ("layers.2.mlp.experts.down_proj_bias", &[5, 12]),
            ("lm_head.weight", &[40, 12]),
        ] {
            assert_eq!(shape(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn weight_tables_are_well_formed() {
        for (_, _, config) in smallest_configs() {
            config.weight_map().validate().unwrap();
        }
    }

    fn values<const D: usize>(param: &Param<Tensor<Infer, D>>) -> Vec<f32> {
        param.val().into_data().convert::<f32>().into_vec().unwrap()
    }

    fn deviation(values: &[f32]) -> f64 {
        (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn initial_values_follow_the_family() {
        let text = format!("{NEMOTRON}}}").replace(
            r#""hidden_size": 12"#,
            r#""hidden_size": 120, "initializer_range": 0.05, "dtype": "bfloat16""#,
        );
        let config = AutoConfig::from_text(text).unwrap();
        let model = AutoModelForCausalLm::<Infer>::from_config(&config, &Default::default(), &Default::default()).unwrap();
        assert_eq!(model.dtype(), FloatDType::BF16);
        let AutoModelForCausalLm::NemotronH(model) = model else {
            panic!("{config:?}")
        };
        use crate::nemotron_h::Mixer;
        let (Mixer::Mamba(mamba), Mixer::Moe(moe)) = (&model.layers[0].mixer, &model.layers[1].mixer) else {
            panic!("the pattern begins with ME")
        };
        assert_eq!(values(&mamba.A_log), [1, 2, 3, 4, 5, 6].map(|i| (i as f32).ln()));
        assert_eq!(values(&mamba.D), [1.0; 6]);
        assert_eq!(mamba.A_log.val().dtype(), burn::tensor::DType::F32);
        for x in values(&mamba.dt_bias) {
            assert!((0.00098..0.102).contains(&f64::from(x).exp().ln_1p()), "{x}");
        }
        // U(-1/sqrt(18), 1/sqrt(18)) / sqrt(5 layers).
        let bound = (1.0f64 / (18.0 * 5.0)).sqrt();
        let out = values(&mamba.out_proj.weight);
        assert!(out.iter().all(|v| f64::from(v.abs()) <= bound * 1.004));
        assert!((deviation(&out) / (bound / 3f64.sqrt()) - 1.0).abs() < 0.05);
        for (name, values) in [
            ("embeddings", values(&model.embeddings.weight)),
            ("in_proj", values(&mamba.in_proj.weight)),
            ("experts", values(&moe.experts.down_proj)),
            ("head", values(&model.lm_head.weight)),
        ] {
            let relative = deviation(&values) / 0.05;
            assert!(
                (relative - 1.0).abs() < 4.0 / (2.0 * values.len() as f64).sqrt(),
                "{name}: {relative}"
            );
        }
        assert!(values(&moe.gate.e_score_correction_bias.clone().unwrap()).iter().all(|v| *v == 0.0));
        assert_eq!(values(&model.norm_f.weight), [1.0; 120]);
    }

    #[test]
    fn seeds_decide_the_weights_and_ranks_hold_slices_of_one_model() {
        use burn_ep_backend::comm::{CommHandle, LocalCommunicator};
        let config = AutoConfig::from_text(format!("{QWEN}}}").replace(r#""num_experts": 5"#, r#""num_experts": 6"#)).unwrap();
        let experts = |seed: u64, ep: Option<EpGroup>| {
            let options = FromConfigOptions {
                seed,
                ep,
                ..Default::default()
            };
            let model = AutoModelForCausalLm::<Infer>::from_config(&config, &options, &Default::default()).unwrap();
            let AutoModelForCausalLm::Sparse(model) = model else {
                panic!("{config:?}")
            };
            let burn_moe::layers::FeedForward::Moe(moe) = &model.layers[2].mlp else {
                panic!("layer 2 is sparse")
            };
            values(&moe.experts.down_proj)
        };
        let whole = experts(1, None);
        assert_eq!(whole, experts(1, None));
        assert_ne!(whole, experts(2, None));
        let slices: Vec<f32> = LocalCommunicator::group(3)
            .into_iter()
            .flat_map(|comm| experts(1, Some(EpGroup::new(CommHandle::new(comm)))))
            .collect();
        assert_eq!(whole, slices);
    }
}
