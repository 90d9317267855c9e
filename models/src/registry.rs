//! From `config.json` to a model family.

use std::path::Path;

use burn_moe::checkpoint::{ConfigJson, WeightMap};
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::ParamCount;
use crate::deepseek_v3::DeepseekV3Config;
use crate::dense::DenseConfig;
use crate::family::{Capabilities, FamilyConfig};
use crate::glm4_moe::Glm4MoeConfig;
use crate::gpt_oss::GptOssConfig;
use crate::json::{CommonConfig, Fields};
use crate::nemotron_h::NemotronHConfig;
use crate::sparse::SparseConfig;

/// A row of [`FAMILIES`].
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `model_type` and `architectures` entry of every kind of checkpoint the family reads.
    pub names: &'static [(&'static str, &'static str)],
    parse: fn(&'static str, &Map<String, Value>) -> Result<AutoConfig>,
}

/// Writes [`AutoConfig`] and [`FAMILIES`] from one line per family.
macro_rules! families {
    ($($variant:ident($config:ident)),+ $(,)?) => {
        /// The config of any known family.
        #[derive(Debug, Clone, PartialEq)]
        pub enum AutoConfig {
            $($variant($config)),+
        }

        /// Known families.
        pub const FAMILIES: &[Family] = &[$(Family {
            names: $config::NAMES,
            parse: |model_type, raw| $config::parse_as(model_type, raw).map(AutoConfig::$variant),
        }),+];

        impl AutoConfig {
            fn family(&self) -> &dyn FamilyConfig {
                match self {
                    $(Self::$variant(config) => config),+
                }
            }

            fn family_mut(&mut self) -> &mut dyn FamilyConfig {
                match self {
                    $(Self::$variant(config) => config),+
                }
            }
        }
    };
}

families! {
    GptOss(GptOssConfig),
    NemotronH(NemotronHConfig),
    Sparse(SparseConfig),
    Dense(DenseConfig),
    DeepseekV3(DeepseekV3Config),
    Glm4Moe(Glm4MoeConfig),
}

impl AutoConfig {
    /// Reads `config.json` of a checkpoint folder, or the file itself.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() {
            path.join("config.json")
        } else {
            path.to_path_buf()
        };
        Self::from_json(&ConfigJson::read(&file)?)
    }

    /// Reads the text of a `config.json`.
    pub fn from_text(text: impl Into<String>) -> Result<Self> {
        Self::from_json(&ConfigJson::parse("config.json", text.into())?)
    }

    /// The family named by `model_type` or, without it, by `architectures`, and its checked settings.
    ///
    /// # Errors
    /// An unknown family (with the known ones and the nearest), or a field whose value cannot be honoured.
    pub fn from_json(json: &ConfigJson) -> Result<Self> {
        let raw = json.fields();
        let (family, model_type) = find(raw)?;
        (family.parse)(model_type, raw)
    }

    /// Value of `model_type`.
    pub fn model_type(&self) -> &'static str {
        self.family().model_type()
    }

    /// Value of `architectures`.
    pub fn architecture(&self) -> &'static str {
        let model_type = self.model_type();
        let (_, architecture) = names()
            .find(|(known, _)| *known == model_type)
            .expect("a config of a listed family");
        architecture
    }

    /// Token ids and dtype.
    pub fn common(&self) -> &CommonConfig {
        self.family().common()
    }

    /// The file as read, unknown fields included.
    pub fn raw(&self) -> &Map<String, Value> {
        self.family().raw()
    }

    /// Vocabulary size V.
    pub fn vocab_size(&self) -> usize {
        self.family().vocab_size()
    }

    /// Names of the weights in the files.
    pub fn weight_map(&self) -> WeightMap {
        self.family().weight_map()
    }

    /// Parameters by part, from the config alone.
    pub fn parameters(&self) -> ParamCount {
        self.family().parameters()
    }

    /// Operations per token of one training step over sequences of `seq` tokens (forward and backward, recomputation not
    /// counted).
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        self.family().flops_per_token(seq)
    }

    /// What the model can do.
    pub fn capabilities(&self) -> Capabilities {
        self.family().capabilities()
    }

    /// Gives input and output embedding a matrix each; false when they had one each already.
    pub(crate) fn untie(&mut self) -> bool {
        self.family_mut().tied_mut().is_some_and(std::mem::take)
    }

    /// Fails unless the experts of every layer divide evenly over `size` ranks.
    pub fn check_expert_parallel(&self, size: usize) -> Result<()> {
        match self.capabilities().routed_experts {
            Some((field, experts)) if size == 0 || !experts.is_multiple_of(size) => Err(Error::config(
                field,
                experts,
                format!("a multiple of the expert-parallel size {size}"),
            )),
            _ => Ok(()),
        }
    }
}

/// `model_type` and architecture of everything that is known.
fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    FAMILIES.iter().flat_map(|family| family.names.iter().copied())
}

/// The family a config belongs to and the `model_type` that decided.
fn find(raw: &Map<String, Value>) -> Result<(&'static Family, &'static str)> {
    let fields = Fields::new(raw);
    let architectures = fields.list(&["architectures"])?.unwrap_or_default();
    let first = architectures.first().map(|a| a.as_str().unwrap_or_default());
    let listed = |architecture: &str| architectures.iter().any(|a| a.as_str() == Some(architecture));
    let by_architecture = names().find(|(_, architecture)| listed(architecture));
    let no_architecture = |found| unknown("architectures", found, names().map(|(_, a)| a));
    let model_type = match (fields.text(&["model_type"])?, by_architecture, first) {
        (Some(model_type), _, _) => model_type,
        (None, Some((model_type, _)), _) => model_type,
        (None, None, Some(first)) => return Err(no_architecture(first)),
        (None, None, None) => return Err(unknown("model_type", "", names().map(|(t, _)| t))),
    };
    let known = FAMILIES.iter().find_map(|family| {
        let (known, _) = family.names.iter().find(|(known, _)| *known == model_type)?;
        Some((family, *known))
    });
    match (known, first) {
        (None, _) => Err(unknown("model_type", model_type, names().map(|(t, _)| t))),
        // The family is known, but the checkpoint holds another head (classification, reward, ..).
        (Some(_), Some(first)) if by_architecture.is_none() => Err(no_architecture(first)),
        (Some(found), _) => Ok(found),
    }
}

fn unknown(field: &str, found: &str, known: impl Iterator<Item = &'static str>) -> Error {
    let known: Vec<&str> = known.collect();
    let nearest = known
        .iter()
        .min_by_key(|name| edit_distance(name, found))
        .filter(|name| 4 * edit_distance(name, found) <= 3 * name.len().max(found.len()));
    let hint = nearest.map_or_else(String::new, |name| format!("; nearest: \"{name}\""));
    let known: Vec<String> = known.iter().map(|name| format!("\"{name}\"")).collect();
    Error::config(
        field,
        if found.is_empty() {
            "nothing".into()
        } else {
            format!("\"{found}\"")
        },
        format!("a known model: {}{hint}", known.join(", ")),
    )
}

/// Levenshtein distance, on the first 64 characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_found_by_type_or_architecture() {
        let nemotron = AutoConfig::from_text(r#"{"model_type": "nemotron_h"}"#).unwrap();
        assert_eq!(nemotron.architecture(), "NemotronHForCausalLM");
        let qwen = AutoConfig::from_text(r#"{"architectures": ["Qwen3MoeForCausalLM"]}"#).unwrap();
        assert_eq!(qwen.model_type(), "qwen3_moe");
    }

    #[test]
    fn unknown_models_list_the_known_ones_and_the_nearest() {
        for (text, parts) in [
            (
                r#"{"model_type": "qwen3moe"}"#,
                vec!["model_type", "\"qwen3moe\"", "nearest: \"qwen3_moe\"", "\"nemotron_h\""],
            ),
            (
                r#"{"model_type": "bert"}"#,
                vec!["\"bert\"", "\"nemotron_h\"", "\"olmoe\"", "\"llama\""],
            ),
            (
                r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForSequenceClassification"]}"#,
                vec!["architectures", "Classification", "nearest: \"Qwen3MoeForCausalLM\""],
            ),
            (
                r#"{"architectures": ["NemotronHForCausalLm"]}"#,
                vec!["nearest: \"NemotronHForCausalLM\""],
            ),
            ("{}", vec!["model_type", "nothing"]),
        ] {
            let error = AutoConfig::from_text(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
        let far = AutoConfig::from_text(r#"{"model_type": "bert"}"#).unwrap_err().to_string();
        assert!(!far.contains("nearest"), "{far}");
    }

    #[test]
    fn experts_must_divide_over_the_ranks() {
        let config = AutoConfig::from_text(r#"{"model_type": "qwen3_moe", "num_experts": 63}"#).unwrap();
        let error = config.check_expert_parallel(8).unwrap_err().to_string();
        assert!(
            error.contains("num_experts") && error.contains("63") && error.contains("size 8"),
            "{error}"
        );
        assert!(config.check_expert_parallel(9).is_ok());
    }

    /// Thousands of damaged configs: fields removed, and given values of every type and size. Each is refused with an error or
    /// gives a config whose model can be built and counted; nothing panics and nothing is allocated.
    #[test]
    fn damaged_configs_never_panic() {
        use burn_moe::backend::Infer;
        use rand::rngs::StdRng;
        use rand::{Rng, SeedableRng};

        use crate::AutoModelForCausalLm;

        let texts = [
            r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "vocab_size": 50, "hidden_size": 12,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "mamba_num_heads": 4, "mamba_head_dim": 5,
                "n_groups": 2, "ssm_state_size": 7, "conv_kernel": 3, "chunk_size": 4, "n_routed_experts": 4,
                "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 9, "moe_latent_size": 8,
                "time_step_limit": [0.0, Infinity], "time_step_min": 0.001, "layers_block_type": null,
                "moe_shared_expert_intermediate_size": 11, "intermediate_size": 13, "dtype": "bfloat16",
                "architectures": ["NemotronHForCausalLM"], "eos_token_id": [2, 11], "use_bias": true}"#,
            r#"{"model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 7, "intermediate_size": 9, "mlp_only_layers": [1], "decoder_sparse_step": 1,
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 4}, "rope_theta": 10000.0,
                "use_sliding_window": true, "sliding_window": 5, "pad_token_id": 3, "rms_norm_eps": 1e-6}"#,
            r#"{"model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
                "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
                "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 5,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 2,
                "moe_intermediate_size": 7, "intermediate_size": 9, "rope_scaling": {"type": "yarn", "factor": 4.0,
                "mscale_all_dim": 1.0}, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#,
            r#"{"model_type": "qwen2_moe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9, "intermediate_size": 9, "qkv_bias": false,
                "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 2,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"]}"#,
            r#"{"model_type": "olmoe", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3,
                "num_key_value_heads": null, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 7,
                "clip_qkv": 8.0, "norm_topk_prob": true, "eos_token_id": null, "pad_token_id": 1}"#,
            r#"{"model_type": "mixtral", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3,
                "num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
                "intermediate_size": 7, "sliding_window": null, "router_jitter_noise": 0.0, "bos_token_id": 1}"#,
            r#"{"model_type": "qwen2", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3,
                "num_key_value_heads": 1, "head_dim": null, "intermediate_size": 7, "max_window_layers": 1,
                "use_sliding_window": true, "sliding_window": 4, "tie_word_embeddings": true, "max_position_embeddings": 64}"#,
            r#"{"model_type": "gpt_oss", "vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 4,
                "num_experts_per_tok": 2, "intermediate_size": 7, "sliding_window": 5, "swiglu_limit": 7.0,
                "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 3,
                "quantization_config": {"quant_method": "mxfp4"},
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": false}}"#,
        ];
        #[rustfmt::skip]
        let strange = [
            "null", "true", "false", "0", "1", "2", "3", "7", "-1", "1.5", "1e300", "-1e300", "16777216", "16777217",
            "18446744073709551615", "9223372036854775808", "NaN", "Infinity", "-Infinity", r#""x""#, r#""silu""#, "[]", "[1]",
            "[null, {}]", "[[0, 1]]", "{}", r#"{"__float__": "NaN"}"#, r#"{"__float__": 3}"#, r#"{"rope_type": "yarn"}"#,
            r#"{"type": "longrope", "long_factor": [1], "short_factor": []}"#, r#"["moe", "mamba"]"#, r#""MMMM""#,
        ];
        let value = |text: &str| ConfigJson::parse("value", format!(r#"{{"v": {text}}}"#)).unwrap().fields()["v"].clone();
        let strange: Vec<Value> = strange.iter().map(|text| value(text)).collect();

        let mut rng = StdRng::seed_from_u64(0);
        let (mut refused, mut accepted) = (0, 0);
        for round in 0..18_000 {
            let original = ConfigJson::parse("config.json", texts[round % texts.len()].into()).unwrap();
            let mut fields = original.fields().clone();
            for _ in 0..rng.random_range(1..4) {
                let key = fields.keys().nth(rng.random_range(0..fields.len())).unwrap().clone();
                if rng.random_range(0..8) == 0 {
                    fields.remove(&key);
                } else {
                    fields.insert(key, strange[rng.random_range(0..strange.len())].clone());
                }
            }
            let json = ConfigJson::from_fields(fields);
            let built = AutoConfig::from_json(&json).and_then(|config| {
                config.parameters().total();
                config.flops_per_token(4096);
                config.check_expert_parallel(2)?;
                config.weight_map().validate()?;
                AutoModelForCausalLm::<Infer>::from_config(&config, &Default::default(), &Default::default())
            });
            match built {
                Ok(_) => accepted += 1,
                Err(Error::Config { field, .. }) => {
                    assert!(!field.is_empty());
                    refused += 1;
                }
                Err(other) => panic!("{}: {other}", json.to_text()),
            }
        }
        assert!(refused > 1000 && accepted > 500, "{refused} refused, {accepted} accepted");
    }

    #[test]
    fn edit_distances() {
        for (a, b, d) in [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0), ("ab", "ba", 2)] {
            assert_eq!(edit_distance(a, b), d);
        }
    }
}
