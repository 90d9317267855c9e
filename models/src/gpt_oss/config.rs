//! `config.json` of GPT-OSS.
//!
//! Fields without effect, kept only for the round trip: `experts_per_token`, `initial_context_length`; `sliding_window` while
//! no layer slides. `quantization_config` says how the files are packed; the weights are recognised by their names, and
//! training works on the dequantised values.

use burn_moe::checkpoint::WeightMap;
use burn_moe::layers::RopeConfig;
use burn_moe::model::AuxLossSettings;
use burn_moe::{Error, Result};
use serde_json::{Map, Value, json};

use super::model::LIMIT;
use crate::counts::{FLOPS_PER_WEIGHT, ParamCount};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields, check_key_value_heads};
use crate::rope::parse_rope;

/// What the attention of a layer sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerAttention {
    /// The last `sliding_window` tokens.
    Sliding,
    /// All tokens before.
    Full,
}

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct GptOssConfig {
    pub common: CommonConfig,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// Inner width of an expert.
    pub intermediate_size: usize,
    pub num_local_experts: usize,
    pub num_experts_per_tok: usize,
    /// One entry per layer.
    pub layer_types: Vec<LayerAttention>,
    /// Tokens that sliding layers see, the token itself included.
    pub sliding_window: usize,
    pub rms_norm_eps: f64,
    /// Biases of q, k, v and o; router and experts always have them.
    pub attention_bias: bool,
    pub rope: RopeConfig,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub router_aux_loss_coef: f64,
    /// Switches the auxiliary loss on.
    pub output_router_logits: bool,
    pub initializer_range: f64,
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl GptOssConfig {
    /// Value of `model_type`.
    pub const MODEL_TYPE: &'static str = "gpt_oss";
    /// Value in `architectures`.
    pub const ARCHITECTURE: &'static str = "GptOssForCausalLM";
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
        let vocab_size = f.size(&["vocab_size"], 201_088)?;
        let hidden_size = f.size(&["hidden_size"], 2880)?;
        let num_hidden_layers = f.num_hidden_layers(36)?;
        let num_attention_heads = f.size(&["num_attention_heads"], 64)?;
        let num_key_value_heads = f.size(&["num_key_value_heads"], 8)?;
        check_key_value_heads(num_attention_heads, num_key_value_heads)?;
        let head_dim = f.size(&["head_dim"], 64)?;
        let max_position_embeddings = f.size(&["max_position_embeddings"], 131_072)?;
        f.no_dropout("attention_dropout")?;
        f.choice(&["hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        constant_limit(&f)?;
        quant_method(&f)?;
        let config = Self {
            common: CommonConfig::parse_quantised(&f)?,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            intermediate_size: f.size(&["intermediate_size"], 2880)?,
            num_local_experts: f.size(&["num_local_experts", "num_experts"], 128)?,
            num_experts_per_tok: f.size(&["num_experts_per_tok"], 4)?,
            layer_types: layer_types(&f, num_hidden_layers)?,
            sliding_window: sliding_window(&f)?,
            rms_norm_eps: f.positive(&["rms_norm_eps"], 1e-5)?,
            attention_bias: f.flag(&["attention_bias"], true)?,
            rope: rope(raw, head_dim, max_position_embeddings)?,
            max_position_embeddings,
            tie_word_embeddings: f.flag(&["tie_word_embeddings"], false)?,
            router_aux_loss_coef: f.finite(&["router_aux_loss_coef"], 0.001)?,
            output_router_logits: f.flag(&["output_router_logits"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            raw: raw.clone(),
        };
        config.common.check_padding(vocab_size)?;
        if config.num_experts_per_tok > config.num_local_experts {
            let expected = format!("at most num_local_experts = {}", config.num_local_experts);
            return Err(Error::config("num_experts_per_tok", config.num_experts_per_tok, expected));
        }
        config.parameters().check()?;
        Ok(config)
    }

    /// The auxiliary loss, when it is switched on. Published files carry the coefficient 0.9 with the loss switched off.
    pub fn aux_loss(&self) -> Option<AuxLossSettings> {
        self.output_router_logits.then_some(AuxLossSettings {
            coefficient: self.router_aux_loss_coef,
            num_experts: self.num_local_experts,
            top_k: self.num_experts_per_tok,
        })
    }

    /// Parameters by part.
    pub fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let (h, v, d) = (n(self.hidden_size), n(self.vocab_size), n(self.head_dim));
        let (q, kv) = (n(self.num_attention_heads) * d, n(self.num_key_value_heads) * d);
        let (layers, e, inner) = (n(self.num_hidden_layers), n(self.num_local_experts), n(self.intermediate_size));
        let bias = if self.attention_bias { q + 2 * kv + h } else { 0 };
        let one = 3 * inner * h + 2 * inner + h;
        let mut count = ParamCount::default();
        count.add("embeddings", v * h);
        count.add("norms", layers * 2 * h + h);
        count.add("attention", layers * (2 * (q + kv) * h + bias + n(self.num_attention_heads)));
        count.add("router", layers * (e * h + e));
        count.add("routed experts", layers * e * one);
        count.add_idle(layers * e.saturating_sub(n(self.num_experts_per_tok)) * one);
        if !self.tie_word_embeddings {
            count.add("head", v * h);
        }
        count
    }

    /// Operations per token of one training step over sequences of `seq` tokens: 6 per weight used (router not counted),
    /// causal attention halved, sliding layers with the keys they see.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let h = self.hidden_size as f64;
        let heads = ((self.num_attention_heads + self.num_key_value_heads) * self.head_dim) as f64;
        let experts = (self.num_experts_per_tok * self.intermediate_size) as f64;
        let layers = self.num_hidden_layers as f64;
        let weights = h * (layers * (2.0 * heads + 3.0 * experts) + self.vocab_size as f64);
        // Twice the average number of visible keys: the sequence length without a window.
        let (s, w) = (seq as f64, self.sliding_window as f64);
        let keys = |kind: &LayerAttention| match kind {
            LayerAttention::Sliding if w < s => 2.0 * w - w * w / s,
            _ => s,
        };
        let scores = self.layer_types.iter().map(keys).sum::<f64>() * (self.num_attention_heads * self.head_dim) as f64;
        FLOPS_PER_WEIGHT * (weights + scores)
    }
}

impl FamilyConfig for GptOssConfig {
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
        Capabilities {
            routed_experts: Some(("num_local_experts", self.num_local_experts)),
            moe_blocks: self.num_hidden_layers,
            aux_loss: self.aux_loss().is_some(),
            tied_embeddings: self.tie_word_embeddings,
            max_positions: Some(self.max_position_embeddings),
            quantized_load: &["mxfp4"],
            export: &[ExportLayout::Stacked, ExportLayout::Quantised],
            ..Capabilities::default()
        }
    }

    fn tied_mut(&mut self) -> Option<&mut bool> {
        Some(&mut self.tie_word_embeddings)
    }
}

/// Alternating, a sliding layer first, unless the file lists them.
fn layer_types(f: &Fields<'_>, num_layers: usize) -> Result<Vec<LayerAttention>> {
    let Some(items) = f.list(&["layer_types"])? else {
        let kind = |layer: usize| match layer % 2 {
            0 => LayerAttention::Sliding,
            _ => LayerAttention::Full,
        };
        return Ok((0..num_layers).map(kind).collect());
    };
    if items.len() != num_layers {
        let expected = format!("num_hidden_layers = {num_layers}");
        return Err(Error::config("layer_types", format!("{} entries", items.len()), expected));
    }
    let kind = |(place, item): (usize, &Value)| match item.as_str() {
        Some("sliding_attention") => Ok(LayerAttention::Sliding),
        Some("full_attention") => Ok(LayerAttention::Full),
        _ => Err(Error::config(
            format!("layer_types[{place}]"),
            item,
            "\"sliding_attention\" or \"full_attention\"",
        )),
    };
    items.iter().enumerate().map(kind).collect()
}

fn sliding_window(f: &Fields<'_>) -> Result<usize> {
    if f.contains("sliding_window") && f.get(&["sliding_window"])?.is_none() {
        let expected = "a number of tokens: to switch the window off, list every layer as \"full_attention\" in layer_types";
        return Err(Error::config("sliding_window", "null", expected));
    }
    f.size(&["sliding_window"], 128)
}

/// A file that says nothing about rotary scaling means the YaRN settings of the published models.
fn rope(raw: &Map<String, Value>, head_dim: usize, max_positions: usize) -> Result<RopeConfig> {
    const THETA: f64 = 150_000.0;
    let f = Fields::new(raw);
    if f.get(&["rope_scaling"])?.is_some() || f.get(&["rope_parameters"])?.is_some() {
        return parse_rope(raw, head_dim, max_positions, THETA);
    }
    let mut raw = raw.clone();
    raw.insert(
        "rope_parameters".into(),
        json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
               "original_max_position_embeddings": 4096}),
    );
    parse_rope(&raw, head_dim, max_positions, THETA)
}

/// The clamp is a constant of the reference's model, which reads the field only in its inference kernels.
fn constant_limit(f: &Fields<'_>) -> Result<()> {
    let limit = f.finite(&["swiglu_limit"], f64::from(LIMIT))?;
    if limit == f64::from(LIMIT) {
        return Ok(());
    }
    Err(Error::config(
        "swiglu_limit",
        limit,
        format!("{LIMIT}: the clamp of this family is a constant"),
    ))
}

fn quant_method(f: &Fields<'_>) -> Result<()> {
    let Some(config) = f.object(&["quantization_config"])? else {
        return Ok(());
    };
    let inner = Fields::inner(config, "quantization_config.");
    match inner.text(&["quant_method"])? {
        Some("mxfp4") => Ok(()),
        other => Err(Error::config(
            "quantization_config.quant_method",
            other.map_or_else(|| "nothing".to_string(), |name| format!("\"{name}\"")),
            "\"mxfp4\", or no quantization_config",
        )),
    }
}

#[cfg(test)]
mod tests {
    use burn_moe::layers::RopeKind;

    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<GptOssConfig> {
        GptOssConfig::parse(&map(text))
    }

    /// The fields of the published 20b config that are read here.
    const SMALL: &str = r#"{"num_hidden_layers": 24, "num_local_experts": 32, "router_aux_loss_coef": 0.9,
        "experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0, "rope_theta": 150000,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                         "original_max_position_embeddings": 4096}}"#;

    #[test]
    fn published_models_have_their_published_sizes() {
        for (text, total, active) in [(SMALL, 2091.0, 361.0), ("{}", 11_683.0, 513.0)] {
            let count = parse(text).unwrap().parameters();
            let embeddings = 201_088 * 2880;
            assert_eq!((count.total() as f64 / 1e7).round(), total, "{count}");
            // The published number of active parameters leaves the input embedding out.
            assert_eq!(((count.active() - embeddings) as f64 / 1e7).round(), active, "{count}");
        }
    }

    /// Layer by layer, and key by key in attention.
    #[test]
    fn flops_count_the_keys_that_a_window_leaves() {
        let config = parse(SMALL).unwrap();
        for seq in [100usize, 4096] {
            let weights = 24u64 * (2880 * 64 * (64 + 16) + 64 * 64 * 2880 + 4 * 3 * 2880 * 2880) + 201_088 * 2880;
            let keys = |window: usize| (1..=seq).map(|i| i.min(window)).sum::<usize>() as f64 / seq as f64;
            // A score and a value per key and channel, 2 operations each, times 3 for forward and backward.
            let attention = 12.0 * (12.0 * keys(128) + 12.0 * keys(seq)) * 4096.0;
            let expected = 6.0 * weights as f64 + attention;
            let found = config.flops_per_token(seq);
            // The diagonal counts half.
            assert!((found / expected - 1.0).abs() < 2e-4, "{seq}: {found:e} {expected:e}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let c = parse("{}").unwrap();
        assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (201_088, 2880, 36));
        assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.head_dim), (64, 8, 64));
        assert_eq!((c.intermediate_size, c.num_local_experts, c.num_experts_per_tok), (2880, 128, 4));
        assert_eq!((c.rms_norm_eps, c.attention_bias, c.tie_word_embeddings), (1e-5, true, false));
        assert_eq!((c.sliding_window, c.max_position_embeddings), (128, 131_072));
        assert_eq!(
            c.layer_types[..3],
            [LayerAttention::Sliding, LayerAttention::Full, LayerAttention::Sliding]
        );
        assert_eq!((c.router_aux_loss_coef, c.aux_loss()), (0.001, None));
        assert_eq!(c.rope, parse(SMALL).unwrap().rope);
        let RopeKind::Yarn {
            truncate,
            attention_factor,
            ..
        } = c.rope.kind
        else {
            panic!("{:?}", c.rope)
        };
        assert!(!truncate && (attention_factor - 1.3465736).abs() < 1e-7 && c.rope.theta == 150_000.0);
    }

    /// Values computed with the reference.
    #[test]
    fn rotary_frequencies_are_those_of_the_published_models() {
        let freq = parse("{}").unwrap().rope.inv_freq(100);
        assert_eq!(freq.len(), 32);
        for (index, expected) in [
            (0, 1.0),
            (1, 0.68904431),
            (8, 0.050813275),
            (9, 0.031705696),
            (12, 0.0067949595),
            (17, 1.293187e-4),
            (18, 3.8308812e-5),
            (31, 3.0235114e-7),
        ] {
            let error = (f64::from(freq[index]) / expected - 1.0).abs();
            assert!(error < 3e-7, "[{index}] = {} expected {expected}", freq[index]);
        }
    }

    #[test]
    fn aliases_layer_types_and_plain_positions() {
        let c = parse(
            r#"{"num_experts": 16, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
                "output_router_logits": true, "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 7}}"#,
        )
        .unwrap();
        assert_eq!((c.num_local_experts, c.sliding_window), (16, 5));
        assert_eq!(c.layer_types, [LayerAttention::Full, LayerAttention::Sliding]);
        assert_eq!(c.aux_loss().unwrap().num_experts, 16);
        assert_eq!((&c.rope.kind, c.rope.theta), (&RopeKind::Default, 7.0));
        // A theta alone changes nothing else.
        let c = parse(r#"{"rope_theta": 10000.0}"#).unwrap();
        assert!(matches!(c.rope.kind, RopeKind::Yarn { .. }) && c.rope.theta == 10_000.0);
    }

    #[test]
    fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
        for (text, parts) in [
            (
                r#"{"num_local_experts": 4, "num_experts_per_tok": 5}"#,
                ["num_experts_per_tok", "5", "num_local_experts = 4"],
            ),
            (
                r#"{"num_local_experts": 4, "num_experts": 8}"#,
                ["`num_local_experts`", "`num_experts`", "8"],
            ),
            (r#"{"hidden_act": "gelu"}"#, ["hidden_act", "gelu", "silu"]),
            (r#"{"swiglu_limit": 5.0}"#, ["swiglu_limit", "5", "7"]),
            (
                r#"{"num_hidden_layers": 2, "layer_types": ["full_attention"]}"#,
                ["layer_types", "1 entries", "num_hidden_layers = 2"],
            ),
            (
                r#"{"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}"#,
                ["layer_types[0]", "chunked_attention", "sliding_attention"],
            ),
            (r#"{"sliding_window": null}"#, ["sliding_window", "null", "layer_types"]),
            (
                r#"{"quantization_config": {"quant_method": "fp8"}}"#,
                ["quantization_config.quant_method", "fp8", "mxfp4"],
            ),
            (
                r#"{"num_attention_heads": 30}"#,
                ["num_key_value_heads", "8", "num_attention_heads = 30"],
            ),
            (r#"{"head_dim": 7}"#, ["head_dim", "7", "even"]),
            (r#"{"attention_dropout": 0.5}"#, ["attention_dropout", "0.5", "0"]),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }
}
