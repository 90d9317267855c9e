//! `config.json` of GLM-4-MoE.
//!
//! Fields without effect, kept only for the round trip: `num_nextn_predict_layers` and `num_mtp_layers` (prediction layers are
//! carried through), `pretraining_tp`. transformers rotates an odd number of channels as the next even one; here it is refused.

use burn_ep_backend::RouterDesc;
use burn_moe::Result;
use burn_moe::checkpoint::WeightMap;
use burn_moe::layers::RopeConfig;
use serde_json::{Map, Value};

use crate::counts::{FLOPS_PER_WEIGHT, ParamCount, attention_score_flops};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields, check_key_value_heads};
use crate::rope::parse_partial_rope;
use crate::router::{GroupedDefaults, check_grouped, grouped_sigmoid};

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Glm4MoeConfig {
    pub common: CommonConfig,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// Inner width of dense layers.
    pub intermediate_size: usize,
    /// Inner width of an expert.
    pub moe_intermediate_size: usize,
    /// Shared experts, computed as one dense layer.
    pub n_shared_experts: usize,
    pub router: RouterDesc,
    /// Layers before this one are dense.
    pub first_k_dense_replace: usize,
    pub rms_norm_eps: f64,
    /// Bias of queries, keys and values.
    pub attention_bias: bool,
    /// RMSNorm of every query and key head.
    pub use_qk_norm: bool,
    /// Its `dim` is the rotated part of a head.
    pub rope: RopeConfig,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub initializer_range: f64,
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl Glm4MoeConfig {
    /// Value of `model_type`.
    pub const MODEL_TYPE: &'static str = "glm4_moe";
    /// Value in `architectures`.
    pub const ARCHITECTURE: &'static str = "Glm4MoeForCausalLM";
    /// Checkpoints that the family reads.
    pub const NAMES: &'static [(&'static str, &'static str)] = &[(Self::MODEL_TYPE, Self::ARCHITECTURE)];

    pub(crate) fn parse_as(_model_type: &'static str, raw: &Map<String, Value>) -> Result<Self> {
        Self::parse(raw)
    }

    /// Reads and checks a config.
    ///
    /// # Errors
    /// Names the first field whose value cannot be honoured, with what was found and what is expected.
    pub fn parse(raw: &Map<String, Value>) -> Result<Self> {
        let f = Fields::new(raw);
        let num_hidden_layers = f.num_hidden_layers(46)?;
        let (vocab_size, hidden_size) = (f.size(&["vocab_size"], 151_552)?, f.size(&["hidden_size"], 4096)?);
        let num_attention_heads = f.size(&["num_attention_heads"], 96)?;
        let num_key_value_heads = f.size(&["num_key_value_heads"], 8)?;
        check_key_value_heads(num_attention_heads, num_key_value_heads)?;
        let head_dim = f.size(&["head_dim"], hidden_size / num_attention_heads)?;
        f.no_dropout("attention_dropout")?;
        f.choice(&["hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        let max_position_embeddings = f.size(&["max_position_embeddings"], 131_072)?;
        let config = Self {
            common: CommonConfig::parse(&f)?,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            intermediate_size: f.size(&["intermediate_size"], 10_944)?,
            moe_intermediate_size: f.size(&["moe_intermediate_size"], 1408)?,
            n_shared_experts: f.count(&["n_shared_experts"], 1)?,
            router: grouped_sigmoid(
                &f,
                GroupedDefaults {
                    experts: 128,
                    top_k: 8,
                    groups: 1,
                    top_groups: 1,
                    scale: 1.0,
                },
            )?,
            first_k_dense_replace: f.count(&["first_k_dense_replace"], 1)?,
            rms_norm_eps: f.positive(&["rms_norm_eps"], 1e-5)?,
            attention_bias: f.flag(&["attention_bias"], false)?,
            use_qk_norm: f.flag(&["use_qk_norm"], false)?,
            rope: parse_partial_rope(raw, head_dim, 0.5, max_position_embeddings, 10_000.0)?,
            max_position_embeddings,
            tie_word_embeddings: f.flag(&["tie_word_embeddings"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            raw: raw.clone(),
        };
        config.common.check_padding(vocab_size)?;
        if config.num_sparse_layers() > 0 {
            check_grouped(&config.router)?;
        }
        config.parameters().check()?;
        Ok(config)
    }

    /// Whether a layer has experts.
    pub fn is_sparse(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
    }

    /// Number of layers with experts.
    pub fn num_sparse_layers(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.first_k_dense_replace)
    }

    /// Inner width of all shared experts together.
    pub fn shared_width(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// Parameters by part.
    pub fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let (h, v, d) = (n(self.hidden_size), n(self.vocab_size), n(self.head_dim));
        let (q, kv) = (n(self.num_attention_heads) * d, n(self.num_key_value_heads) * d);
        let mut count = ParamCount::default();
        count.add("embeddings", v * h);
        for layer in 0..self.num_hidden_layers {
            count.add("norms", 2 * h + if self.use_qk_norm { 2 * d } else { 0 });
            count.add("attention", 2 * (q + kv) * h + if self.attention_bias { q + 2 * kv } else { 0 });
            if self.is_sparse(layer) {
                let (e, one) = (n(self.router.num_experts), 3 * n(self.moe_intermediate_size) * h);
                count.add("router", e * h + e);
                count.add("routed experts", e * one);
                count.add_idle(e.saturating_sub(n(self.router.top_k)) * one);
                count.add("shared experts", n(self.n_shared_experts) * one);
            } else {
                count.add("dense mlp", 3 * n(self.intermediate_size) * h);
            }
        }
        count.add("norms", h);
        if !self.tie_word_embeddings {
            count.add("head", v * h);
        }
        count
    }

    /// Operations per token of one training step over sequences of `seq` tokens: 6 per weight used (router not counted),
    /// causal attention halved.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let (h, layers) = (self.hidden_size as f64, self.num_hidden_layers as f64);
        let heads = (self.num_attention_heads + self.num_key_value_heads) * self.head_dim;
        let sparse = self.num_sparse_layers() as f64;
        let experts = (self.router.top_k + self.n_shared_experts) as f64 * self.moe_intermediate_size as f64;
        let mlp = sparse * experts + (layers - sparse) * self.intermediate_size as f64;
        let weights = h * (layers * 2.0 * heads as f64 + 3.0 * mlp + self.vocab_size as f64);
        FLOPS_PER_WEIGHT * weights + layers * attention_score_flops(seq, self.num_attention_heads, self.head_dim)
    }
}

impl FamilyConfig for Glm4MoeConfig {
    fn model_type(&self) -> &'static str {
        Self::MODEL_TYPE
    }

    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn raw(&self) -> &Map<String, Value> {
        &self.raw
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn weight_map(&self) -> WeightMap {
        super::weight_map(self.num_hidden_layers)
    }

    fn parameters(&self) -> ParamCount {
        self.parameters()
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        self.flops_per_token(seq)
    }

    fn capabilities(&self) -> Capabilities {
        let moe_blocks = self.num_sparse_layers();
        Capabilities {
            routed_experts: (moe_blocks > 0).then_some(("n_routed_experts", self.router.num_experts)),
            moe_blocks,
            router_bias: moe_blocks > 0,
            tied_embeddings: self.tie_word_embeddings,
            max_positions: Some(self.max_position_embeddings),
            export: &[ExportLayout::PerExpert, ExportLayout::Stacked],
            ..Capabilities::default()
        }
    }

    fn tied_mut(&mut self) -> Option<&mut bool> {
        Some(&mut self.tie_word_embeddings)
    }
}

#[cfg(test)]
mod tests {
    use burn_ep_backend::RouterScore;

    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<Glm4MoeConfig> {
        Glm4MoeConfig::parse(&map(text))
    }

    /// On the model cards: GLM-4.5 355B with 32B active, GLM-4.5-Air 106B with 12B active.
    #[test]
    fn published_models_have_their_published_sizes() {
        let air = parse(r#"{"head_dim": 128, "attention_bias": true}"#).unwrap().parameters();
        assert_eq!((air.total() as f64 / 1e8).round(), 1069.0, "{air}");
        assert!((air.active() as f64 / 1e9 - 13.5).abs() < 0.5, "{air}");
        let large = parse(
            r#"{"head_dim": 128, "attention_bias": true, "use_qk_norm": true, "hidden_size": 5120, "intermediate_size": 12288,
                "moe_intermediate_size": 1536, "num_hidden_layers": 92, "n_routed_experts": 160, "first_k_dense_replace": 3,
                "routed_scaling_factor": 2.5}"#,
        )
        .unwrap()
        .parameters();
        assert!((large.total() as f64 / 1e9 - 352.8).abs() < 1.0, "{large}");
        assert!((large.active() as f64 / 1e9 - 33.0).abs() < 1.0, "{large}");
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let c = parse(r#"{"head_dim": 128}"#).unwrap();
        assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (151_552, 4096, 46));
        assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.rope.dim), (96, 8, 64));
        assert_eq!(
            (c.intermediate_size, c.moe_intermediate_size, c.n_shared_experts),
            (10_944, 1408, 1)
        );
        assert_eq!((c.router.num_experts, c.router.top_k, c.router.groups), (128, 8, 1));
        assert_eq!(
            (c.router.score, c.router.renormalize, c.router.scale),
            (RouterScore::Sigmoid, true, 1.0)
        );
        assert_eq!((c.first_k_dense_replace, c.num_sparse_layers()), (1, 45));
        assert_eq!((c.attention_bias, c.use_qk_norm, c.tie_word_embeddings), (false, false, false));
        assert_eq!((c.rms_norm_eps, c.max_position_embeddings, c.rope.theta), (1e-5, 131_072, 10_000.0));
        // Without the field a head is a share of the hidden width.
        assert_eq!(parse(r#"{"hidden_size": 3072}"#).unwrap().head_dim, 32);
    }

    #[test]
    fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
        for (text, parts) in [
            (
                r#"{"num_key_value_heads": 7}"#,
                ["num_key_value_heads", "7", "num_attention_heads = 96"],
            ),
            (
                r#"{"head_dim": 8, "n_routed_experts": 4}"#,
                ["num_experts_per_tok", "8", "n_routed_experts = 4"],
            ),
            (r#"{"head_dim": 8, "n_group": 3}"#, ["n_group", "3", "n_routed_experts = 128"]),
            (
                r#"{"head_dim": 8, "scoring_func": "softmax"}"#,
                ["scoring_func", "softmax", "sigmoid"],
            ),
            (r#"{"hidden_act": "gelu"}"#, ["hidden_act", "gelu", "silu"]),
            (r#"{"attention_dropout": 0.5}"#, ["attention_dropout", "0.5", "0"]),
            (
                r#"{"head_dim": 128, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "su"}}"#,
                ["rope_type", "su", "yarn"],
            ),
            (r#"{"head_dim": 6}"#, ["partial_rotary_factor", "0.5", "6 channels"]),
            (
                r#"{"head_dim": 128, "quantization_config": {"quant_method": "compressed-tensors"}}"#,
                ["quantization_config", "compressed-tensors", "bf16"],
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }
}
