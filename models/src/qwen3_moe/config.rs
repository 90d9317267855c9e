//! `config.json` of Qwen3-MoE.
//!
//! Fields without effect, kept only for the round trip: `max_window_layers`; `sliding_window` while
//! `use_sliding_window` is false; `intermediate_size` while every layer is sparse.

use burn_moe::checkpoint::WeightMap;
use burn_moe::layers::RopeConfig;
use burn_moe::model::AuxLossSettings;
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::{FLOPS_PER_WEIGHT, ParamCount, attention_score_flops};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields, MAX_LAYERS};
use crate::rope::parse_rope;

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen3MoeConfig {
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
    pub num_experts: usize,
    pub num_experts_per_tok: usize,
    pub norm_topk_prob: bool,
    /// Layer i is sparse when `(i + 1) % decoder_sparse_step == 0` and it is not listed in `mlp_only_layers`.
    pub decoder_sparse_step: usize,
    pub mlp_only_layers: Vec<usize>,
    pub rms_norm_eps: f64,
    pub attention_bias: bool,
    pub rope: RopeConfig,
    pub max_position_embeddings: usize,
    /// Every layer sees the last `sliding_window` tokens only.
    pub sliding_window: Option<usize>,
    pub tie_word_embeddings: bool,
    pub router_aux_loss_coef: f64,
    /// Switches the auxiliary loss on.
    pub output_router_logits: bool,
    pub initializer_range: f64,
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl Qwen3MoeConfig {
    /// Value of `model_type`.
    pub const MODEL_TYPE: &'static str = "qwen3_moe";
    /// Value in `architectures`.
    pub const ARCHITECTURE: &'static str = "Qwen3MoeForCausalLM";
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
        let vocab_size = f.size(&["vocab_size"], 151_936)?;
        let hidden_size = f.size(&["hidden_size"], 2048)?;
        let num_hidden_layers = f.size(&["num_hidden_layers"], 24)?;
        if num_hidden_layers > MAX_LAYERS {
            return Err(Error::config(
                "num_hidden_layers",
                num_hidden_layers,
                format!("at most {MAX_LAYERS}"),
            ));
        }
        let num_attention_heads = f.size(&["num_attention_heads"], 32)?;
        let num_key_value_heads = f.size(&["num_key_value_heads"], 4)?;
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(Error::config(
                "num_key_value_heads",
                num_key_value_heads,
                format!("a divisor of num_attention_heads = {num_attention_heads}"),
            ));
        }
        let head_dim = match f.count_or_none(&["head_dim"])? {
            Some(0) => return Err(Error::config("head_dim", 0, "at least 1")),
            Some(d) => d,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => {
                return Err(Error::config(
                    "head_dim",
                    "nothing",
                    format!("a value: hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_attention_heads}"),
                ));
            }
        };
        f.no_dropout("attention_dropout")?;
        f.choice(&["hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        let max_position_embeddings = f.size(&["max_position_embeddings"], 32_768)?;
        let config = Self {
            common: CommonConfig::parse(&f)?,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            intermediate_size: f.size(&["intermediate_size"], 6144)?,
            moe_intermediate_size: f.size(&["moe_intermediate_size"], 768)?,
            num_experts: f.count(&["num_experts", "num_local_experts"], 128)?,
            num_experts_per_tok: f.size(&["num_experts_per_tok"], 8)?,
            norm_topk_prob: f.flag(&["norm_topk_prob"], false)?,
            decoder_sparse_step: f.size(&["decoder_sparse_step"], 1)?,
            mlp_only_layers: mlp_only_layers(&f, num_hidden_layers)?,
            rms_norm_eps: f.positive(&["rms_norm_eps"], 1e-6)?,
            attention_bias: f.flag(&["attention_bias"], false)?,
            rope: parse_rope(raw, head_dim, max_position_embeddings, 10_000.0)?,
            max_position_embeddings,
            sliding_window: sliding_window(&f)?,
            tie_word_embeddings: f.flag(&["tie_word_embeddings"], false)?,
            router_aux_loss_coef: f.finite(&["router_aux_loss_coef"], 0.001)?,
            output_router_logits: f.flag(&["output_router_logits"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            raw: raw.clone(),
        };
        if let Some(pad) = config.common.pad_token_id.filter(|&id| id as usize >= vocab_size) {
            return Err(Error::config(
                "pad_token_id",
                pad,
                format!("below vocab_size = {vocab_size}, or null"),
            ));
        }
        if config.num_sparse_layers() > 0 && config.num_experts_per_tok > config.num_experts {
            return Err(Error::config(
                "num_experts_per_tok",
                config.num_experts_per_tok,
                format!("at most num_experts = {}", config.num_experts),
            ));
        }
        config.parameters().check()?;
        Ok(config)
    }

    /// Whether a layer has experts.
    pub fn is_sparse(&self, layer: usize) -> bool {
        self.num_experts > 0 && !self.mlp_only_layers.contains(&layer) && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }

    /// Number of layers with experts.
    pub fn num_sparse_layers(&self) -> usize {
        (0..self.num_hidden_layers).filter(|&i| self.is_sparse(i)).count()
    }

    /// The auxiliary loss, when it is switched on and a layer has a router.
    pub fn aux_loss(&self) -> Option<AuxLossSettings> {
        (self.output_router_logits && self.num_sparse_layers() > 0).then_some(AuxLossSettings {
            coefficient: self.router_aux_loss_coef,
            num_experts: self.num_experts,
            top_k: self.num_experts_per_tok,
        })
    }

    /// Parameters by part.
    pub fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let (h, v, d) = (n(self.hidden_size), n(self.vocab_size), n(self.head_dim));
        let (q, kv) = (n(self.num_attention_heads) * d, n(self.num_key_value_heads) * d);
        let mut count = ParamCount::default();
        count.add("embeddings", v * h);
        for layer in 0..self.num_hidden_layers {
            let bias = if self.attention_bias { q + 2 * kv + h } else { 0 };
            count.add("norms", 2 * h + 2 * d);
            count.add("attention", 2 * (q + kv) * h + bias);
            if self.is_sparse(layer) {
                let (e, one) = (n(self.num_experts), 3 * n(self.moe_intermediate_size) * h);
                count.add("router", e * h);
                count.add("routed experts", e * one);
                count.add_idle(e.saturating_sub(n(self.num_experts_per_tok)) * one);
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
        let h = self.hidden_size as f64;
        let heads = (self.num_attention_heads + self.num_key_value_heads) * self.head_dim;
        let sparse = self.num_sparse_layers();
        let experts = sparse as f64 * (self.num_experts_per_tok * self.moe_intermediate_size) as f64;
        let dense = (self.num_hidden_layers - sparse) as f64 * self.intermediate_size as f64;
        let layers = self.num_hidden_layers as f64;
        let weights = h * (layers * 2.0 * heads as f64 + 3.0 * (experts + dense) + self.vocab_size as f64);
        FLOPS_PER_WEIGHT * weights + layers * attention_score_flops(seq, self.num_attention_heads, self.head_dim)
    }
}

impl FamilyConfig for Qwen3MoeConfig {
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
        super::weight_map()
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
            routed_experts: (moe_blocks > 0).then_some(("num_experts", self.num_experts)),
            moe_blocks,
            aux_loss: self.aux_loss().is_some(),
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

/// Numbers past the last layer have no effect and are dropped.
fn mlp_only_layers(f: &Fields<'_>, num_layers: usize) -> Result<Vec<usize>> {
    let items = f.list(&["mlp_only_layers"])?.unwrap_or_default();
    let layer = |(place, item): (usize, &Value)| {
        item.as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| Error::config(format!("mlp_only_layers[{place}]"), item, "a layer number"))
    };
    let mut layers = items.iter().enumerate().map(layer).collect::<Result<Vec<_>>>()?;
    layers.retain(|&l| l < num_layers);
    layers.sort_unstable();
    layers.dedup();
    Ok(layers)
}

fn sliding_window(f: &Fields<'_>) -> Result<Option<usize>> {
    if !f.flag(&["use_sliding_window"], false)? {
        return Ok(None);
    }
    if f.contains("sliding_window") && f.get(&["sliding_window"])?.is_none() {
        return Ok(None);
    }
    f.size(&["sliding_window"], 4096).map(Some)
}

#[cfg(test)]
mod tests {
    use burn_moe::layers::RopeKind;

    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<Qwen3MoeConfig> {
        Qwen3MoeConfig::parse(&map(text))
    }

    const QWEN3_30B: &str = r#"{"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": true,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": null}"#;

    #[test]
    fn published_models_have_their_published_sizes() {
        let count = parse(QWEN3_30B).unwrap().parameters();
        assert_eq!((count.total() as f64 / 1e7).round(), 3053.0, "{count}");
        assert_eq!((count.active() as f64 / 1e8).round(), 34.0, "{count}");
        let large = parse(
            r#"{"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "head_dim": 128,
                "intermediate_size": 12288, "moe_intermediate_size": 1536}"#,
        )
        .unwrap()
        .parameters();
        assert_eq!((large.total() as f64 / 1e7).round(), 23509.0, "{large}");
    }

    #[test]
    fn flops_of_the_30b_model_match_the_published_count() {
        let flops = parse(QWEN3_30B).unwrap().flops_per_token(4096);
        assert!((flops / 23.006e9 - 1.0).abs() < 5e-5, "{flops}");
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let c = parse("{}").unwrap();
        assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (151_936, 2048, 24));
        assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.head_dim), (32, 4, 64));
        assert_eq!((c.intermediate_size, c.moe_intermediate_size), (6144, 768));
        assert_eq!((c.num_experts, c.num_experts_per_tok, c.norm_topk_prob), (128, 8, false));
        assert_eq!((c.decoder_sparse_step, c.mlp_only_layers.len()), (1, 0));
        assert_eq!((c.rms_norm_eps, c.attention_bias, c.tie_word_embeddings), (1e-6, false, false));
        assert_eq!((c.rope.theta, &c.rope.kind, c.rope.dim), (10_000.0, &RopeKind::Default, 64));
        assert_eq!((c.max_position_embeddings, c.sliding_window), (32_768, None));
        assert_eq!((c.router_aux_loss_coef, c.aux_loss()), (0.001, None));
    }

    #[test]
    fn aliases_windows_and_dense_layers() {
        let c = parse(
            r#"{"num_local_experts": 16, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3, 99],
                "use_sliding_window": true, "output_router_logits": true}"#,
        )
        .unwrap();
        assert_eq!(c.num_experts, 16);
        let sparse: Vec<usize> = (0..6).filter(|&i| c.is_sparse(i)).collect();
        assert_eq!(sparse, [1, 5]);
        assert_eq!(c.sliding_window, Some(4096));
        assert_eq!(c.aux_loss().unwrap().num_experts, 16);
        assert_eq!(
            parse(r#"{"use_sliding_window": true, "sliding_window": null}"#)
                .unwrap()
                .sliding_window,
            None
        );
        assert_eq!(parse(r#"{"sliding_window": 7}"#).unwrap().sliding_window, None);
        assert_eq!(
            parse(r#"{"use_sliding_window": true, "sliding_window": 7}"#)
                .unwrap()
                .sliding_window,
            Some(7)
        );
        // Without experts every layer is dense, and the router counts do not matter.
        assert_eq!(parse(r#"{"num_experts": 0}"#).unwrap().num_sparse_layers(), 0);
    }

    #[test]
    fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
        for (text, parts) in [
            (
                r#"{"num_experts": 4, "num_experts_per_tok": 5}"#,
                ["num_experts_per_tok", "5", "num_experts = 4"],
            ),
            (
                r#"{"num_experts": 4, "num_local_experts": 8}"#,
                ["`num_experts`", "`num_local_experts`", "8"],
            ),
            (r#"{"hidden_act": "gelu"}"#, ["hidden_act", "gelu", "silu"]),
            (
                r#"{"num_attention_heads": 30}"#,
                ["num_key_value_heads", "4", "num_attention_heads = 30"],
            ),
            (
                r#"{"num_attention_heads": 12, "hidden_size": 100}"#,
                ["head_dim", "hidden_size = 100", "num_attention_heads = 12"],
            ),
            (r#"{"num_hidden_layers": 100000}"#, ["num_hidden_layers", "100000", "4096"]),
            (r#"{"mlp_only_layers": [1, -1]}"#, ["mlp_only_layers[1]", "-1", "layer number"]),
            (r#"{"attention_dropout": 0.5}"#, ["attention_dropout", "0.5", "0"]),
            (
                r#"{"vocab_size": 10, "pad_token_id": 10}"#,
                ["pad_token_id", "10", "vocab_size = 10"],
            ),
            (r#"{"head_dim": 7}"#, ["head_dim", "7", "even"]),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }
}
