//! What the attention decoders share: the settings of everything but the feed-forward, and how families differ in them.
//! `dense/` and `sparse/` add the feed-forward.
//!
//! Fields without effect: `use_cache`, `pretraining_tp`; `attention_bias` where the family's biases are fixed (Qwen2,
//! Qwen2-MoE, Mistral, Mixtral); `sliding_window` of families without windows (Llama, OLMoE) and while
//! `use_sliding_window` is false; `max_window_layers` where `layer_types` is given.

use burn_moe::layers::{AttentionConfig, Init, QkNorm, RopeConfig};
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::{ParamCount, attention_score_flops};
use crate::json::{CommonConfig, Fields, check_key_value_heads};
use crate::rope::parse_rope;

/// A truth value that a family fixes or reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    On,
    Off,
    /// Field and default.
    Field(&'static str, bool),
}

impl Switch {
    /// The value in a config.
    pub fn read(self, f: &Fields<'_>) -> Result<bool> {
        match self {
            Self::On => Ok(true),
            Self::Off => Ok(false),
            Self::Field(name, default) => f.flag(&[name], default),
        }
    }
}

/// Which layers see the last `sliding_window` tokens only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// None.
    Never,
    /// All, unless the field is null (Mistral, Mixtral). Value without the field.
    Always(Option<usize>),
    /// All, once `use_sliding_window` is on (Qwen3-MoE).
    Switched,
    /// Once it is on: those of `layer_types`, or from `max_window_layers` upwards (Qwen2, Qwen3).
    SwitchedUpper,
    /// Once it is on: those of `layer_types`, or every other one from layer 0 below `max_window_layers` (Qwen2-MoE).
    SwitchedAlternate,
}

/// Kind of q/k norm; the epsilon is that of the other norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormKind {
    None,
    Head,
    Full,
}

/// What a family's config has when a field is missing, and where its attention differs.
#[derive(Debug, Clone, Copy)]
pub struct DecoderFamily {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// None: as many as query heads, which `null` means in every family.
    pub num_key_value_heads: Option<usize>,
    /// None: hidden size over query heads.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub bos_token_id: Option<i32>,
    pub eos_token_id: Option<i32>,
    pub pad_token_id: Option<i32>,
    /// Biases of q, k and v.
    pub qkv_bias: Switch,
    /// Bias of the output projection.
    pub o_bias: Switch,
    pub qk_norm: QkNormKind,
    /// `clip_qkv` is read.
    pub clips_qkv: bool,
    pub window: WindowRule,
}

/// Settings of everything but the feed-forward, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    pub common: CommonConfig,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub qk_norm: QkNormKind,
    pub clip_qkv: Option<f64>,
    pub rope: RopeConfig,
    pub max_position_embeddings: usize,
    /// Tokens that a sliding layer sees.
    pub sliding_window: Option<usize>,
    /// Whether each layer slides.
    pub slides: Vec<bool>,
    pub tie_word_embeddings: bool,
    pub initializer_range: f64,
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl DecoderConfig {
    /// Reads and checks the shared fields.
    ///
    /// # Errors
    /// Names the first field whose value cannot be honoured, with what was found and what is expected.
    pub fn parse(raw: &Map<String, Value>, family: &DecoderFamily) -> Result<Self> {
        let f = Fields::new(raw);
        let vocab_size = f.size(&["vocab_size"], family.vocab_size)?;
        let hidden_size = f.size(&["hidden_size"], family.hidden_size)?;
        let num_hidden_layers = f.num_hidden_layers(family.num_hidden_layers)?;
        let num_attention_heads = f.size(&["num_attention_heads"], family.num_attention_heads)?;
        let num_key_value_heads = key_value_heads(&f, family, num_attention_heads)?;
        let head_dim = head_dim(&f, family, hidden_size, num_attention_heads)?;
        let rms_norm_eps = f.positive(&["rms_norm_eps"], family.rms_norm_eps)?;
        f.no_dropout("attention_dropout")?;
        f.choice(&["hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        let max_position_embeddings = f.size(&["max_position_embeddings"], family.max_position_embeddings)?;
        let clip_qkv = match f.get(&["clip_qkv"])? {
            Some(_) if family.clips_qkv => Some(f.positive(&["clip_qkv"], 1.0)?),
            _ => None,
        };
        let (sliding_window, slides) = windows(&f, family.window, num_hidden_layers)?;
        let common = common(&f, family)?;
        common.check_padding(vocab_size)?;
        Ok(Self {
            common,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps,
            qkv_bias: family.qkv_bias.read(&f)?,
            o_bias: family.o_bias.read(&f)?,
            qk_norm: family.qk_norm,
            clip_qkv,
            rope: parse_rope(raw, head_dim, max_position_embeddings, family.rope_theta)?,
            max_position_embeddings,
            sliding_window,
            slides,
            tie_word_embeddings: f.flag(&["tie_word_embeddings"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            raw: raw.clone(),
        })
    }

    /// The attention of a layer.
    pub fn attention(&self, layer: usize, init: Init) -> AttentionConfig {
        let eps = self.rms_norm_eps;
        AttentionConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            o_bias: self.o_bias,
            qk_norm: match self.qk_norm {
                QkNormKind::None => QkNorm::None,
                QkNormKind::Head => QkNorm::Head { eps },
                QkNormKind::Full => QkNorm::Full { eps },
            },
            clip_qkv: self.clip_qkv,
            sinks: false,
            window: self.sliding_window.filter(|_| self.slides[layer]),
            rotary: true,
            init,
        }
    }

    /// Row of the embedding that gets no gradient.
    pub fn padding_row(&self) -> Option<usize> {
        self.common.pad_token_id.map(|id| id as usize)
    }

    /// Adds norms and attention of one layer to a count.
    pub fn count_layer(&self, count: &mut ParamCount) {
        let n = |x: usize| x as u128;
        let (h, d) = (n(self.hidden_size), n(self.head_dim));
        let (q, kv) = (n(self.num_attention_heads) * d, n(self.num_key_value_heads) * d);
        let qk_norm = match self.qk_norm {
            QkNormKind::None => 0,
            QkNormKind::Head => 2 * d,
            QkNormKind::Full => q + kv,
        };
        let qkv_bias = if self.qkv_bias { q + 2 * kv } else { 0 };
        let o_bias = if self.o_bias { h } else { 0 };
        count.add("norms", 2 * h + qk_norm);
        count.add("attention", 2 * (q + kv) * h + qkv_bias + o_bias);
    }

    /// Parameters of the input embedding, the same number as in the head.
    pub fn embedding(&self) -> u128 {
        self.vocab_size as u128 * self.hidden_size as u128
    }

    /// Weights of attention and head that one token uses.
    pub fn weights_per_token(&self) -> f64 {
        let heads = (self.num_attention_heads + self.num_key_value_heads) as f64 * self.head_dim as f64;
        self.hidden_size as f64 * (self.num_hidden_layers as f64 * 2.0 * heads + self.vocab_size as f64)
    }

    /// Operations per token of the scores of all layers. A window is not subtracted.
    pub fn score_flops(&self, seq: usize) -> f64 {
        self.num_hidden_layers as f64 * attention_score_flops(seq, self.num_attention_heads, self.head_dim)
    }
}

/// `null` means a head of its own for every query head; a missing field has the family's default.
fn key_value_heads(f: &Fields<'_>, family: &DecoderFamily, num_attention_heads: usize) -> Result<usize> {
    let default = if f.contains("num_key_value_heads") {
        None
    } else {
        family.num_key_value_heads
    };
    let heads = f.size(&["num_key_value_heads"], default.unwrap_or(num_attention_heads))?;
    check_key_value_heads(num_attention_heads, heads)?;
    Ok(heads)
}

fn head_dim(f: &Fields<'_>, family: &DecoderFamily, hidden_size: usize, heads: usize) -> Result<usize> {
    let default = if f.contains("head_dim") { None } else { family.head_dim };
    match f.count_or_none(&["head_dim"])?.or(default) {
        Some(0) => Err(Error::config("head_dim", 0, "at least 1")),
        Some(d) if family.qk_norm == QkNormKind::Full && d.checked_mul(heads) != Some(hidden_size) => Err(Error::config(
            "head_dim",
            d,
            format!("hidden_size / num_attention_heads = {hidden_size} / {heads}: the norms of queries and keys have that width"),
        )),
        Some(d) => Ok(d),
        None if hidden_size.is_multiple_of(heads) => Ok(hidden_size / heads),
        None => Err(Error::config(
            "head_dim",
            "nothing",
            format!("a value: hidden_size = {hidden_size} is no multiple of num_attention_heads = {heads}"),
        )),
    }
}

/// Token ids with the family's defaults. Here `null` differs from a missing field: it means no token.
fn common(f: &Fields<'_>, family: &DecoderFamily) -> Result<CommonConfig> {
    let mut common = CommonConfig::parse(f)?;
    if !f.contains("bos_token_id") {
        common.bos_token_id = family.bos_token_id;
    }
    if !f.contains("eos_token_id") {
        common.eos_token_ids = family.eos_token_id.into_iter().collect();
    }
    if !f.contains("pad_token_id") {
        common.pad_token_id = family.pad_token_id;
    }
    Ok(common)
}

/// The window, and which layers see it.
fn windows(f: &Fields<'_>, rule: WindowRule, layers: usize) -> Result<(Option<usize>, Vec<bool>)> {
    let window = match rule {
        WindowRule::Never => None,
        WindowRule::Always(_) if f.contains("sliding_window") && f.get(&["sliding_window"])?.is_none() => None,
        WindowRule::Always(None) if !f.contains("sliding_window") => None,
        WindowRule::Always(default) => Some(f.size(&["sliding_window"], default.unwrap_or(1))?),
        WindowRule::Switched | WindowRule::SwitchedUpper | WindowRule::SwitchedAlternate => switched_window(f)?,
    };
    let max_window_layers = f.count(&["max_window_layers"], 28)?;
    let by_rule = |layer: usize| match rule {
        WindowRule::Never => false,
        WindowRule::Always(_) | WindowRule::Switched => true,
        WindowRule::SwitchedUpper => layer >= max_window_layers,
        WindowRule::SwitchedAlternate => layer.is_multiple_of(2) && layer < max_window_layers,
    };
    let slides: Vec<bool> = (0..layers).map(|layer| window.is_some() && by_rule(layer)).collect();
    let Some(listed) = layer_types(f, layers)? else {
        return Ok((window, slides));
    };
    let free = matches!(rule, WindowRule::SwitchedUpper | WindowRule::SwitchedAlternate) && window.is_some();
    // The reference ignores the list or has no window for it: what it says must then be what happens.
    match listed.iter().zip(&slides).position(|(a, b)| a != b) {
        Some(layer) if !free => Err(Error::config(
            format!("layer_types[{layer}]"),
            if listed[layer] {
                "\"sliding_attention\""
            } else {
                "\"full_attention\""
            },
            format!("\"{}\": that is what the other window fields of this family ask for", {
                if slides[layer] { "sliding_attention" } else { "full_attention" }
            }),
        )),
        _ => Ok((window, listed)),
    }
}

fn switched_window(f: &Fields<'_>) -> Result<Option<usize>> {
    if !f.flag(&["use_sliding_window"], false)? {
        return Ok(None);
    }
    if f.contains("sliding_window") && f.get(&["sliding_window"])?.is_none() {
        return Ok(None);
    }
    f.size(&["sliding_window"], 4096).map(Some)
}

/// True for layers with a window.
fn layer_types(f: &Fields<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(items) = f.list(&["layer_types"])? else {
        return Ok(None);
    };
    if items.len() != layers {
        return Err(Error::config(
            "layer_types",
            format!("{} entries", items.len()),
            format!("one per layer, num_hidden_layers = {layers}"),
        ));
    }
    let slides = |(place, item): (usize, &Value)| match item.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(Error::config(
            format!("layer_types[{place}]"),
            item,
            "\"full_attention\" or \"sliding_attention\" (other kinds are not supported)",
        )),
    };
    items.iter().enumerate().map(slides).collect::<Result<_>>().map(Some)
}
