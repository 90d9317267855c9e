//! `config.json` of DeepSeek-V3, DeepSeek-V2, Moonlight, Kimi K2 and GLM-4.7-Flash.
//!
//! Fields without effect, kept only for the round trip: `head_dim` and `qk_head_dim` (they follow from the other sizes),
//! `aux_loss_alpha` and `seq_aux` (transformers trains without an auxiliary loss), `num_nextn_predict_layers` and
//! `num_mtp_layers` (prediction layers are carried through), `ep_size`, `pretraining_tp`; in V2 `n_group` and `topk_group`
//! while `topk_method` is "greedy". Of `quantization_config` only the block size has an effect: which weights are quantised is
//! known by their names in the files, and training works on the decoded values.

use burn_ep_backend::{GroupScore, RouterDesc};
use burn_moe::checkpoint::WeightMap;
use burn_moe::layers::RopeConfig;
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::{FLOPS_PER_WEIGHT, ParamCount};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields};
use crate::rope::{parse_partial_rope, parse_rope, score_factor};
use crate::router::{GroupedDefaults, check_grouped, grouped_sigmoid, num_experts};

/// Which model of the family, by `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// Softmax router without correction bias.
    V2,
    /// Sigmoid router with correction bias.
    V3,
    /// V3 under the name that Kimi K2 uses.
    KimiK2,
    /// V3 with a list of layer types (GLM-4.7-Flash).
    Glm4MoeLite,
}

/// What transformers takes for missing fields.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    q_lora_rank: usize,
    qk_nope_head_dim: usize,
    v_head_dim: usize,
    intermediate_size: usize,
    moe_intermediate_size: usize,
    n_shared_experts: usize,
    first_k_dense_replace: usize,
    rms_norm_eps: f64,
    max_position_embeddings: usize,
}

impl Generation {
    fn defaults(self) -> Defaults {
        match self {
            Self::V3 | Self::KimiK2 => Defaults {
                vocab_size: 129_280,
                hidden_size: 7168,
                num_hidden_layers: 61,
                num_attention_heads: 128,
                q_lora_rank: 1536,
                qk_nope_head_dim: 128,
                v_head_dim: 128,
                intermediate_size: 18_432,
                moe_intermediate_size: 2048,
                n_shared_experts: 1,
                first_k_dense_replace: 3,
                rms_norm_eps: 1e-6,
                max_position_embeddings: 4096,
            },
            Self::V2 => Defaults {
                vocab_size: 102_400,
                hidden_size: 4096,
                num_hidden_layers: 32,
                num_attention_heads: 32,
                intermediate_size: 11_008,
                moe_intermediate_size: 1407,
                n_shared_experts: 2,
                first_k_dense_replace: 0,
                max_position_embeddings: 2048,
                ..Self::V3.defaults()
            },
            Self::Glm4MoeLite => Defaults {
                vocab_size: 154_880,
                hidden_size: 2048,
                num_hidden_layers: 47,
                num_attention_heads: 20,
                q_lora_rank: 768,
                qk_nope_head_dim: 192,
                v_head_dim: 256,
                intermediate_size: 10_240,
                moe_intermediate_size: 1536,
                n_shared_experts: 1,
                first_k_dense_replace: 1,
                rms_norm_eps: 1e-5,
                max_position_embeddings: 202_752,
            },
        }
    }
}

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct DeepseekV3Config {
    pub common: CommonConfig,
    pub generation: Generation,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// Width of the compressed queries; None: queries from one matrix.
    pub q_lora_rank: Option<usize>,
    /// Width of the compressed keys and values.
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    /// Inner width of dense layers.
    pub intermediate_size: usize,
    /// Inner width of an expert.
    pub moe_intermediate_size: usize,
    /// Shared experts, computed as one dense layer.
    pub n_shared_experts: usize,
    pub router: RouterDesc,
    /// Which layers have experts.
    pub sparse_layers: Vec<bool>,
    /// Epsilon of the norms of hidden states; those of the compressed vectors have 1e-6.
    pub rms_norm_eps: f64,
    pub attention_bias: bool,
    /// Bias of dense and shared layers (V2).
    pub mlp_bias: bool,
    pub rope: RopeConfig,
    /// Rotary channels are adjacent pairs; otherwise two halves.
    pub rope_interleave: bool,
    /// Factor on the attention scores.
    pub score_scale: f64,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub initializer_range: f64,
    /// Rows and columns of an FP8 block.
    pub weight_block_size: [usize; 2],
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl DeepseekV3Config {
    /// Checkpoints that the family reads.
    pub const NAMES: &'static [(&'static str, &'static str)] = &[
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("deepseek_v2", "DeepseekV2ForCausalLM"),
        ("kimi_k2", "DeepseekV3ForCausalLM"),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    ];

    pub(crate) fn parse_as(model_type: &'static str, raw: &Map<String, Value>) -> Result<Self> {
        Self::parse(
            raw,
            match model_type {
                "deepseek_v2" => Generation::V2,
                "kimi_k2" => Generation::KimiK2,
                "glm4_moe_lite" => Generation::Glm4MoeLite,
                _ => Generation::V3,
            },
        )
    }

    /// Reads and checks a config.
    ///
    /// # Errors
    /// Names the first field whose value cannot be honoured, with what was found and what is expected.
    pub fn parse(raw: &Map<String, Value>, generation: Generation) -> Result<Self> {
        let f = Fields::new(raw);
        let v2 = generation == Generation::V2;
        let defaults = generation.defaults();
        let num_hidden_layers = f.num_hidden_layers(defaults.num_hidden_layers)?;
        let vocab_size = f.size(&["vocab_size"], defaults.vocab_size)?;
        let num_attention_heads = f.size(&["num_attention_heads"], defaults.num_attention_heads)?;
        if let Some(heads) = f.count_or_none(&["num_key_value_heads"])?.filter(|&n| n != num_attention_heads) {
            return Err(Error::config(
                "num_key_value_heads",
                heads,
                format!("num_attention_heads = {num_attention_heads}: every head has its own keys and values"),
            ));
        }
        let qk_nope_head_dim = f.size(&["qk_nope_head_dim"], defaults.qk_nope_head_dim)?;
        let qk_rope_head_dim = f.size(&["qk_rope_head_dim"], 64)?;
        if !qk_rope_head_dim.is_multiple_of(2) {
            return Err(Error::config(
                "qk_rope_head_dim",
                qk_rope_head_dim,
                "an even number: rotary embedding turns pairs of channels",
            ));
        }
        f.no_dropout("attention_dropout")?;
        f.choice(&["hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        let max_position_embeddings = f.size(&["max_position_embeddings"], defaults.max_position_embeddings)?;
        let rope = match generation {
            // GLM reads the factor with every kind, and then turns pairs that are not there unless it is 1.
            Generation::Glm4MoeLite => parse_partial_rope(raw, qk_rope_head_dim, 1.0, max_position_embeddings, 10_000.0)?,
            _ => parse_rope(raw, qk_rope_head_dim, max_position_embeddings, 10_000.0)?,
        };
        if rope.dim != qk_rope_head_dim {
            return Err(Error::config(
                "partial_rotary_factor",
                rope.dim as f64 / qk_rope_head_dim as f64,
                "1: the channels with positions are counted by qk_rope_head_dim",
            ));
        }
        let config = Self {
            common: CommonConfig::parse_quantised(&f)?,
            generation,
            vocab_size,
            hidden_size: f.size(&["hidden_size"], defaults.hidden_size)?,
            num_hidden_layers,
            num_attention_heads,
            q_lora_rank: q_lora_rank(&f, defaults.q_lora_rank)?,
            kv_lora_rank: f.size(&["kv_lora_rank"], 512)?,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim: f.size(&["v_head_dim"], defaults.v_head_dim)?,
            intermediate_size: f.size(&["intermediate_size"], defaults.intermediate_size)?,
            moe_intermediate_size: f.size(&["moe_intermediate_size"], defaults.moe_intermediate_size)?,
            n_shared_experts: f.count(&["n_shared_experts"], defaults.n_shared_experts)?,
            router: match generation {
                Generation::V2 => router_v2(&f)?,
                Generation::V3 | Generation::KimiK2 => grouped_sigmoid(
                    &f,
                    GroupedDefaults {
                        experts: 256,
                        top_k: 8,
                        groups: 8,
                        top_groups: 4,
                        scale: 2.5,
                    },
                )?,
                Generation::Glm4MoeLite => grouped_sigmoid(
                    &f,
                    GroupedDefaults {
                        experts: 64,
                        top_k: 4,
                        groups: 1,
                        top_groups: 1,
                        scale: 1.8,
                    },
                )?,
            },
            sparse_layers: sparse_layers(&f, generation, num_hidden_layers, defaults.first_k_dense_replace)?,
            rms_norm_eps: f.positive(&["rms_norm_eps"], defaults.rms_norm_eps)?,
            attention_bias: f.flag(&["attention_bias"], false)?,
            mlp_bias: v2 && f.flag(&["mlp_bias"], false)?,
            // V2 has no such field: its channels are always pairs.
            rope_interleave: v2 || f.flag(&["rope_interleave"], true)?,
            score_scale: ((qk_nope_head_dim + qk_rope_head_dim) as f64).powf(-0.5) * score_factor(raw, &rope)?,
            rope,
            max_position_embeddings,
            tie_word_embeddings: f.flag(&["tie_word_embeddings"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            weight_block_size: weight_block_size(&f)?,
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
        self.sparse_layers.get(layer).copied().unwrap_or(false)
    }

    /// Number of layers with experts.
    pub fn num_sparse_layers(&self) -> usize {
        self.sparse_layers.iter().filter(|sparse| **sparse).count()
    }

    /// Inner width of all shared experts together.
    pub fn shared_width(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// Whether routers have a correction bias.
    pub fn has_correction_bias(&self) -> bool {
        self.generation != Generation::V2
    }

    /// Parameters by part.
    pub fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let bias = |rows: u128, on: bool| if on { rows } else { 0 };
        let (h, v) = (n(self.hidden_size), n(self.vocab_size));
        let mut count = ParamCount::default();
        count.add("embeddings", v * h);
        for layer in 0..self.num_hidden_layers {
            let compressed = n(self.kv_lora_rank) + n(self.qk_rope_head_dim);
            let on = self.attention_bias;
            count.add("norms", 2 * h + n(self.kv_lora_rank) + n(self.q_lora_rank.unwrap_or(0)));
            count.add("attention", self.attention_weights() + bias(compressed + h, on));
            count.add("attention", bias(n(self.q_lora_rank.unwrap_or(0)), on));
            if self.is_sparse(layer) {
                let (e, one) = (n(self.router.num_experts), 3 * n(self.moe_intermediate_size) * h);
                let shared = n(self.n_shared_experts) * n(self.moe_intermediate_size);
                count.add("router", e * h + bias(e, self.has_correction_bias()));
                count.add("routed experts", e * one);
                count.add_idle(e.saturating_sub(n(self.router.top_k)) * one);
                count.add("shared experts", 3 * shared * h + bias(2 * shared + h, self.mlp_bias && shared > 0));
            } else {
                let i = n(self.intermediate_size);
                count.add("dense mlp", 3 * i * h + bias(2 * i + h, self.mlp_bias));
            }
        }
        count.add("norms", h);
        if !self.tie_word_embeddings {
            count.add("head", v * h);
        }
        count
    }

    /// Weights of the matrices of one attention layer.
    fn attention_weights(&self) -> u128 {
        let n = |x: usize| x as u128;
        let (h, heads) = (n(self.hidden_size), n(self.num_attention_heads));
        let (nope, rope, value) = (n(self.qk_nope_head_dim), n(self.qk_rope_head_dim), n(self.v_head_dim));
        let (query, kv) = (heads * (nope + rope), n(self.kv_lora_rank));
        let queries = match self.q_lora_rank {
            Some(rank) => n(rank) * (h + query),
            None => query * h,
        };
        queries + (kv + rope) * h + heads * (nope + value) * kv + heads * value * h
    }

    /// Operations per token of one training step over sequences of `seq` tokens: 6 per weight used (router not counted),
    /// causal attention halved.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let (h, layers) = (self.hidden_size as f64, self.num_hidden_layers as f64);
        let sparse = self.num_sparse_layers() as f64;
        let experts = (self.router.top_k + self.n_shared_experts) as f64 * self.moe_intermediate_size as f64;
        let mlp = sparse * experts + (layers - sparse) * self.intermediate_size as f64;
        let weights = layers * self.attention_weights() as f64 + 3.0 * h * mlp + h * self.vocab_size as f64;
        // Scores over query and key heads, then values: half of each is masked.
        let widths = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim;
        let scores = FLOPS_PER_WEIGHT * seq as f64 * (self.num_attention_heads * widths) as f64 / 2.0;
        FLOPS_PER_WEIGHT * weights + layers * scores
    }
}

impl FamilyConfig for DeepseekV3Config {
    fn model_type(&self) -> &'static str {
        match self.generation {
            Generation::V2 => "deepseek_v2",
            Generation::V3 => "deepseek_v3",
            Generation::KimiK2 => "kimi_k2",
            Generation::Glm4MoeLite => "glm4_moe_lite",
        }
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
        super::weight_map(self.num_hidden_layers, self.weight_block_size)
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
            router_bias: moe_blocks > 0 && self.has_correction_bias(),
            tied_embeddings: self.tie_word_embeddings,
            max_positions: Some(self.max_position_embeddings),
            quantized_load: &["fp8"],
            export: &[ExportLayout::PerExpert, ExportLayout::Stacked, ExportLayout::Quantised],
            ..Capabilities::default()
        }
    }

    fn tied_mut(&mut self) -> Option<&mut bool> {
        Some(&mut self.tie_word_embeddings)
    }
}

/// `null` means queries from one matrix, a missing field the default.
fn q_lora_rank(f: &Fields<'_>, default: usize) -> Result<Option<usize>> {
    match f.count_or_none(&["q_lora_rank"])? {
        Some(0) => Err(Error::config(
            "q_lora_rank",
            0,
            "at least 1, or null for queries without compression",
        )),
        None if !f.contains("q_lora_rank") => Ok(Some(default)),
        rank => Ok(rank),
    }
}

/// FP8 in blocks is the one quantisation that is read.
fn weight_block_size(f: &Fields<'_>) -> Result<[usize; 2]> {
    let Some(config) = f.object(&["quantization_config"])? else {
        return Ok([128, 128]);
    };
    let inner = Fields::inner(config, "quantization_config.");
    match inner.text(&["quant_method"])? {
        Some("fp8") => {}
        other => {
            return Err(Error::config(
                "quantization_config.quant_method",
                other.map_or_else(|| "nothing".to_string(), |name| format!("\"{name}\"")),
                "\"fp8\", or no quantization_config",
            ));
        }
    }
    inner.choice(&["fmt"], (), &[("e4m3", ())])?;
    let sizes = inner.list(&["weight_block_size"])?.unwrap_or_default();
    let size = |value: &Value| value.as_u64().filter(|n| (1..=1 << 16).contains(n));
    match sizes {
        [rows, columns] if size(rows).is_some() && size(columns).is_some() => {
            Ok([rows, columns].map(|value| size(value).unwrap_or_default() as usize))
        }
        other => Err(Error::config(
            "quantization_config.weight_block_size",
            format!("{other:?}"),
            "two sizes, as in [128, 128]",
        )),
    }
}

/// The first layers are dense, then every `moe_layer_freq`-th one is sparse; GLM may list them instead.
fn sparse_layers(f: &Fields<'_>, generation: Generation, layers: usize, first: usize) -> Result<Vec<bool>> {
    let listed = match generation {
        Generation::Glm4MoeLite => f.list(&["mlp_layer_types"])?,
        _ => None,
    };
    let Some(types) = listed else {
        let (first, step) = (f.count(&["first_k_dense_replace"], first)?, f.size(&["moe_layer_freq"], 1)?);
        return Ok((0..layers).map(|layer| layer >= first && layer.is_multiple_of(step)).collect());
    };
    if types.len() != layers {
        return Err(Error::config(
            "mlp_layer_types",
            format!("{} entries", types.len()),
            format!("one for each of num_hidden_layers = {layers}"),
        ));
    }
    let sparse = |(place, kind): (usize, &Value)| match kind.as_str() {
        Some("sparse") => Ok(true),
        Some("dense") => Ok(false),
        _ => Err(Error::config(format!("mlp_layer_types[{place}]"), kind, "\"sparse\" or \"dense\"")),
    };
    types.iter().enumerate().map(sparse).collect()
}

/// Softmax scores; the choice is limited to groups with `topk_method = "group_limited_greedy"`.
fn router_v2(f: &Fields<'_>) -> Result<RouterDesc> {
    f.choice(&["scoring_func"], (), &[("softmax", ())])?;
    // transformers ignores the field, the authors' code divides and then leaves the scale out: no published model sets it.
    if f.flag(&["norm_topk_prob"], false)? {
        return Err(Error::config("norm_topk_prob", true, "false: DeepSeek-V2 does not renormalise"));
    }
    let limited = f.choice(&["topk_method"], false, &[("greedy", false), ("group_limited_greedy", true)])?;
    let required = |name: &str| match f.get(&[name])? {
        Some(_) => f.size(&[name], 1),
        None => Err(Error::config(name, "nothing", "a number")),
    };
    let (groups, top_groups) = if limited {
        (required("n_group")?, required("topk_group")?)
    } else {
        (1, 1)
    };
    Ok(RouterDesc {
        scale: f.positive(&["routed_scaling_factor"], 1.0)? as f32,
        groups,
        top_groups,
        group_score: GroupScore::Best,
        ..RouterDesc::softmax(num_experts(f, 64)?, required("num_experts_per_tok")?, false)
    })
}
