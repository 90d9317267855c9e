//! From `config.json` to a model family.

use std::path::Path;

use burn_moe::checkpoint::{ConfigJson, WeightMap};
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::ParamCount;
use crate::json::{CommonConfig, Fields};
use crate::nemotron_h::{self, LayerKind, NemotronHConfig};
use crate::qwen3_moe::{self, Qwen3MoeConfig};

/// Known families: `model_type` and `architectures` entry.
pub const FAMILIES: [(&str, &str); 2] = [
    (NemotronHConfig::MODEL_TYPE, NemotronHConfig::ARCHITECTURE),
    (Qwen3MoeConfig::MODEL_TYPE, Qwen3MoeConfig::ARCHITECTURE),
];

/// The config of any known family.
#[derive(Debug, Clone, PartialEq)]
pub enum AutoConfig {
    NemotronH(NemotronHConfig),
    Qwen3Moe(Qwen3MoeConfig),
}

/// What a model can do, for programs that must decide before they run it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Routed experts per MoE layer, with the config field that holds the number; None for a dense model.
    pub routed_experts: Option<(&'static str, usize)>,
    /// Blocks with a router.
    pub moe_blocks: usize,
    /// The config switches an auxiliary load-balancing loss on.
    pub aux_loss: bool,
    /// A correction bias shifts the choice of experts and can be moved by load statistics.
    pub router_bias: bool,
    /// Input and output embedding are one matrix.
    pub tied_embeddings: bool,
    /// Longest sequence, for models whose positions end somewhere.
    pub max_positions: Option<usize>,
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
        match family(raw)? {
            NemotronHConfig::MODEL_TYPE => NemotronHConfig::parse(raw).map(Self::NemotronH),
            _ => Qwen3MoeConfig::parse(raw).map(Self::Qwen3Moe),
        }
    }

    /// Value of `model_type`.
    pub fn model_type(&self) -> &'static str {
        match self {
            Self::NemotronH(_) => NemotronHConfig::MODEL_TYPE,
            Self::Qwen3Moe(_) => Qwen3MoeConfig::MODEL_TYPE,
        }
    }

    /// Value of `architectures`.
    pub fn architecture(&self) -> &'static str {
        match self {
            Self::NemotronH(_) => NemotronHConfig::ARCHITECTURE,
            Self::Qwen3Moe(_) => Qwen3MoeConfig::ARCHITECTURE,
        }
    }

    /// Token ids and dtype.
    pub fn common(&self) -> &CommonConfig {
        match self {
            Self::NemotronH(c) => &c.common,
            Self::Qwen3Moe(c) => &c.common,
        }
    }

    /// The file as read, unknown fields included.
    pub fn raw(&self) -> &Map<String, Value> {
        match self {
            Self::NemotronH(c) => &c.raw,
            Self::Qwen3Moe(c) => &c.raw,
        }
    }

    /// Vocabulary size V.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::NemotronH(c) => c.vocab_size,
            Self::Qwen3Moe(c) => c.vocab_size,
        }
    }

    /// Names of the weights in the files.
    pub fn weight_map(&self) -> WeightMap {
        match self {
            Self::NemotronH(_) => nemotron_h::weight_map(),
            Self::Qwen3Moe(_) => qwen3_moe::weight_map(),
        }
    }

    /// Parameters by part, from the config alone.
    pub fn parameters(&self) -> ParamCount {
        match self {
            Self::NemotronH(c) => c.parameters(),
            Self::Qwen3Moe(c) => c.parameters(),
        }
    }

    /// Operations per token of one training step over sequences of `seq` tokens (forward and backward, recomputation not
    /// counted).
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        match self {
            Self::NemotronH(c) => c.flops_per_token(seq),
            Self::Qwen3Moe(c) => c.flops_per_token(seq),
        }
    }

    /// What the model can do.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Self::NemotronH(c) => {
                let moe_blocks = c.count(LayerKind::Moe);
                Capabilities {
                    routed_experts: (moe_blocks > 0).then_some(("n_routed_experts", c.moe.router.num_experts)),
                    moe_blocks,
                    aux_loss: false,
                    router_bias: moe_blocks > 0,
                    tied_embeddings: false,
                    max_positions: None,
                }
            }
            Self::Qwen3Moe(c) => {
                let moe_blocks = c.num_sparse_layers();
                Capabilities {
                    routed_experts: (moe_blocks > 0).then_some(("num_experts", c.num_experts)),
                    moe_blocks,
                    aux_loss: c.aux_loss().is_some(),
                    router_bias: false,
                    tied_embeddings: c.tie_word_embeddings,
                    max_positions: Some(c.max_position_embeddings),
                }
            }
        }
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

/// `model_type` of the family a config belongs to.
fn family(raw: &Map<String, Value>) -> Result<&'static str> {
    let fields = Fields::new(raw);
    let architectures = fields.list(&["architectures"])?.unwrap_or_default();
    let listed = |architecture: &str| architectures.iter().any(|a| a.as_str() == Some(architecture));
    let by_architecture = FAMILIES.iter().find(|(_, architecture)| listed(architecture));
    let Some(model_type) = fields.text(&["model_type"])? else {
        return match (by_architecture, architectures.first()) {
            (Some((family, _)), _) => Ok(*family),
            (None, Some(first)) => Err(unknown(
                "architectures",
                first.as_str().unwrap_or_default(),
                FAMILIES.map(|(_, a)| a),
            )),
            (None, None) => Err(unknown("model_type", "", FAMILIES.map(|(t, _)| t))),
        };
    };
    let Some((family, _)) = FAMILIES.iter().find(|(known, _)| *known == model_type) else {
        return Err(unknown("model_type", model_type, FAMILIES.map(|(t, _)| t)));
    };
    // The family is known, but the checkpoint holds another head (classification, reward, ..).
    match architectures.first() {
        Some(first) if by_architecture.is_none() => Err(unknown(
            "architectures",
            first.as_str().unwrap_or_default(),
            FAMILIES.map(|(_, a)| a),
        )),
        _ => Ok(*family),
    }
}

fn unknown<const N: usize>(field: &str, found: &str, known: [&str; N]) -> Error {
    let nearest = known
        .iter()
        .min_by_key(|name| edit_distance(name, found))
        .filter(|name| 4 * edit_distance(name, found) <= 3 * name.len().max(found.len()));
    let hint = nearest.map_or_else(String::new, |name| format!("; nearest: \"{name}\""));
    Error::config(
        field,
        if found.is_empty() {
            "nothing".into()
        } else {
            format!("\"{found}\"")
        },
        format!("a known model: {}{hint}", known.map(|name| format!("\"{name}\"")).join(", ")),
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
            (r#"{"model_type": "bert"}"#, vec!["\"bert\"", "\"nemotron_h\", \"qwen3_moe\""]),
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
        for round in 0..6000 {
            let original = ConfigJson::parse("config.json", texts[round % 2].into()).unwrap();
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
