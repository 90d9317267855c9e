//! `config.json` of the decoders with softmax-routed experts. What they share with the dense ones is read in
//! `../decoder.rs`, where most fields without effect are listed. Here: `intermediate_size` of Qwen2-MoE and Qwen3-MoE
//! while every layer is sparse.

use burn_moe::checkpoint::WeightMap;
use burn_moe::model::AuxLossSettings;
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::counts::{FLOPS_PER_WEIGHT, ParamCount};
use crate::decoder::{DecoderConfig, DecoderFamily, QkNormKind, Switch, WindowRule};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields};

/// A family with softmax-routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SparseKind {
    Qwen3Moe,
    Qwen2Moe,
    Mixtral,
    Olmoe,
}

/// Where a family differs from the others; the numbers are defaults.
struct Row {
    kind: SparseKind,
    model_type: &'static str,
    /// Number of experts, and the name that published files give it.
    experts: (&'static str, usize),
    num_experts_per_tok: usize,
    /// Field of the experts' inner width.
    expert_width: (&'static str, usize),
    /// Inner width of dense layers; None: every layer is sparse.
    dense_width: Option<usize>,
    /// Inner width of the gated shared expert.
    shared_width: Option<usize>,
    norm_topk_prob: Switch,
    router_aux_loss_coef: f64,
    decoder: DecoderFamily,
}

const QWEN3: DecoderFamily = DecoderFamily {
    vocab_size: 151_936,
    hidden_size: 2048,
    num_hidden_layers: 24,
    num_attention_heads: 32,
    num_key_value_heads: Some(4),
    head_dim: None,
    max_position_embeddings: 32_768,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    bos_token_id: None,
    eos_token_id: None,
    pad_token_id: None,
    qkv_bias: Switch::Field("attention_bias", false),
    o_bias: Switch::Field("attention_bias", false),
    qk_norm: QkNormKind::Head,
    clips_qkv: false,
    window: WindowRule::Switched,
};

/// The differences of the families, in one table.
const ROWS: [Row; 4] = [
    Row {
        kind: SparseKind::Qwen3Moe,
        model_type: "qwen3_moe",
        experts: ("num_experts", 128),
        num_experts_per_tok: 8,
        expert_width: ("moe_intermediate_size", 768),
        dense_width: Some(6144),
        shared_width: None,
        norm_topk_prob: Switch::Field("norm_topk_prob", false),
        router_aux_loss_coef: 0.001,
        decoder: QWEN3,
    },
    Row {
        kind: SparseKind::Qwen2Moe,
        model_type: "qwen2_moe",
        experts: ("num_experts", 60),
        num_experts_per_tok: 4,
        expert_width: ("moe_intermediate_size", 1408),
        dense_width: Some(5632),
        shared_width: Some(5632),
        norm_topk_prob: Switch::Field("norm_topk_prob", false),
        router_aux_loss_coef: 0.001,
        decoder: DecoderFamily {
            num_attention_heads: 16,
            num_key_value_heads: Some(16),
            qkv_bias: Switch::Field("qkv_bias", true),
            o_bias: Switch::Off,
            qk_norm: QkNormKind::None,
            window: WindowRule::SwitchedAlternate,
            ..QWEN3
        },
    },
    Row {
        kind: SparseKind::Mixtral,
        model_type: "mixtral",
        experts: ("num_local_experts", 8),
        num_experts_per_tok: 2,
        expert_width: ("intermediate_size", 14_336),
        dense_width: None,
        shared_width: None,
        norm_topk_prob: Switch::On,
        router_aux_loss_coef: 0.001,
        decoder: DecoderFamily {
            vocab_size: 32_000,
            hidden_size: 4096,
            num_hidden_layers: 32,
            num_key_value_heads: Some(8),
            max_position_embeddings: 131_072,
            rms_norm_eps: 1e-5,
            rope_theta: 1e6,
            bos_token_id: Some(1),
            eos_token_id: Some(2),
            qkv_bias: Switch::Off,
            o_bias: Switch::Off,
            qk_norm: QkNormKind::None,
            window: WindowRule::Always(None),
            ..QWEN3
        },
    },
    Row {
        kind: SparseKind::Olmoe,
        model_type: "olmoe",
        experts: ("num_experts", 64),
        num_experts_per_tok: 8,
        expert_width: ("intermediate_size", 2048),
        dense_width: None,
        shared_width: None,
        norm_topk_prob: Switch::Field("norm_topk_prob", false),
        router_aux_loss_coef: 0.01,
        decoder: DecoderFamily {
            vocab_size: 50_304,
            num_hidden_layers: 16,
            num_attention_heads: 16,
            num_key_value_heads: None,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            eos_token_id: Some(50_279),
            pad_token_id: Some(1),
            qk_norm: QkNormKind::Full,
            clips_qkv: true,
            window: WindowRule::Never,
            ..QWEN3
        },
    },
];

impl SparseKind {
    fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.kind == self).expect("a row for every kind")
    }
}

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseConfig {
    pub kind: SparseKind,
    pub decoder: DecoderConfig,
    /// Inner width of dense layers; not used when every layer is sparse.
    pub intermediate_size: usize,
    /// Inner width of an expert.
    pub moe_intermediate_size: usize,
    /// Inner width of the gated shared expert.
    pub shared_intermediate_size: Option<usize>,
    pub num_experts: usize,
    pub num_experts_per_tok: usize,
    pub norm_topk_prob: bool,
    /// Layer i is sparse when `(i + 1) % decoder_sparse_step == 0` and it is not listed in `mlp_only_layers`.
    pub decoder_sparse_step: usize,
    pub mlp_only_layers: Vec<usize>,
    pub router_aux_loss_coef: f64,
    /// Switches the auxiliary loss on.
    pub output_router_logits: bool,
}

impl SparseConfig {
    /// Checkpoints that the family reads: `model_type` and architecture.
    pub const NAMES: &'static [(&'static str, &'static str)] = &[
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("qwen2_moe", "Qwen2MoeForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("olmoe", "OlmoeForCausalLM"),
    ];

    /// Reads and checks a config of the family called `model_type`.
    ///
    /// # Errors
    /// Names the first field whose value cannot be honoured, with what was found and what is expected.
    pub(crate) fn parse_as(model_type: &'static str, raw: &Map<String, Value>) -> Result<Self> {
        let row = ROWS.iter().find(|row| row.model_type == model_type).expect("a row for every name");
        let f = Fields::new(raw);
        let decoder = DecoderConfig::parse(raw, &row.decoder)?;
        let layers = decoder.num_hidden_layers;
        if row.kind == SparseKind::Mixtral && f.finite(&["router_jitter_noise"], 0.0)? != 0.0 {
            return Err(Error::config(
                "router_jitter_noise",
                f.finite(&["router_jitter_noise"], 0.0)?,
                "0: noise on the router's input is not supported",
            ));
        }
        let num_experts = f.count(&["num_experts", "num_local_experts"], row.experts.1)?;
        // Only families with dense layers read the fields that place them, or do without experts.
        let mixed = row.dense_width.is_some();
        if !mixed && num_experts == 0 {
            return Err(Error::config(row.experts.0, 0, "at least 1"));
        }
        let config = Self {
            kind: row.kind,
            intermediate_size: match row.dense_width {
                Some(default) => f.size(&["intermediate_size"], default)?,
                None => 0,
            },
            moe_intermediate_size: f.size(&[row.expert_width.0], row.expert_width.1)?,
            shared_intermediate_size: match row.shared_width {
                Some(default) => Some(f.size(&["shared_expert_intermediate_size"], default)?),
                None => None,
            },
            num_experts,
            num_experts_per_tok: f.size(&["num_experts_per_tok"], row.num_experts_per_tok)?,
            norm_topk_prob: row.norm_topk_prob.read(&f)?,
            decoder_sparse_step: if mixed { f.size(&["decoder_sparse_step"], 1)? } else { 1 },
            mlp_only_layers: if mixed { mlp_only_layers(&f, layers)? } else { Vec::new() },
            router_aux_loss_coef: f.finite(&["router_aux_loss_coef"], row.router_aux_loss_coef)?,
            output_router_logits: f.flag(&["output_router_logits"], false)?,
            decoder,
        };
        if config.num_sparse_layers() > 0 && config.num_experts_per_tok > config.num_experts {
            return Err(Error::config(
                "num_experts_per_tok",
                config.num_experts_per_tok,
                format!("at most {} = {}", row.experts.0, config.num_experts),
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
        (0..self.decoder.num_hidden_layers).filter(|&i| self.is_sparse(i)).count()
    }

    /// The auxiliary loss, when it is switched on and a layer has a router.
    pub fn aux_loss(&self) -> Option<AuxLossSettings> {
        (self.output_router_logits && self.num_sparse_layers() > 0).then_some(AuxLossSettings {
            coefficient: self.router_aux_loss_coef,
            num_experts: self.num_experts,
            top_k: self.num_experts_per_tok,
        })
    }
}

impl FamilyConfig for SparseConfig {
    fn model_type(&self) -> &'static str {
        self.kind.row().model_type
    }

    fn common(&self) -> &CommonConfig {
        &self.decoder.common
    }

    fn raw(&self) -> &Map<String, Value> {
        &self.decoder.raw
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size
    }

    fn weight_map(&self) -> WeightMap {
        super::weight_map(self.kind)
    }

    fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let h = n(self.decoder.hidden_size);
        let mut count = ParamCount::default();
        count.add("embeddings", self.decoder.embedding());
        for layer in 0..self.decoder.num_hidden_layers {
            self.decoder.count_layer(&mut count);
            if self.is_sparse(layer) {
                let (e, one) = (n(self.num_experts), 3 * n(self.moe_intermediate_size) * h);
                count.add("router", e * h);
                count.add("routed experts", e * one);
                count.add_idle(e.saturating_sub(n(self.num_experts_per_tok)) * one);
                if let Some(width) = self.shared_intermediate_size {
                    count.add("shared expert", 3 * n(width) * h + h);
                }
            } else {
                count.add("dense mlp", 3 * n(self.intermediate_size) * h);
            }
        }
        count.add("norms", h);
        if !self.decoder.tie_word_embeddings {
            count.add("head", self.decoder.embedding());
        }
        count
    }

    /// 6 operations per weight used (routers and the gate of the shared expert not counted), causal attention halved.
    fn flops_per_token(&self, seq: usize) -> f64 {
        let d = &self.decoder;
        let sparse = self.num_sparse_layers();
        let per_sparse = (self.num_experts_per_tok * self.moe_intermediate_size) as f64;
        let shared = self.shared_intermediate_size.unwrap_or(0) as f64;
        let dense = (d.num_hidden_layers - sparse) as f64 * self.intermediate_size as f64;
        let mlps = 3.0 * d.hidden_size as f64 * (sparse as f64 * (per_sparse + shared) + dense);
        FLOPS_PER_WEIGHT * (d.weights_per_token() + mlps) + d.score_flops(seq)
    }

    fn capabilities(&self) -> Capabilities {
        let moe_blocks = self.num_sparse_layers();
        Capabilities {
            routed_experts: (moe_blocks > 0).then_some((self.kind.row().experts.0, self.num_experts)),
            moe_blocks,
            aux_loss: self.aux_loss().is_some(),
            tied_embeddings: self.decoder.tie_word_embeddings,
            max_positions: Some(self.decoder.max_position_embeddings),
            export: &[ExportLayout::PerExpert, ExportLayout::Stacked],
            ..Capabilities::default()
        }
    }

    fn tied_mut(&mut self) -> Option<&mut bool> {
        Some(&mut self.decoder.tie_word_embeddings)
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

#[cfg(test)]
mod tests {
    use burn_moe::layers::RopeKind;

    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<SparseConfig> {
        SparseConfig::parse_as("qwen3_moe", &map(text))
    }

    fn parse_as(model_type: &'static str, text: &str) -> Result<SparseConfig> {
        SparseConfig::parse_as(model_type, &map(text))
    }

    #[test]
    fn every_name_has_a_row() {
        for (model_type, architecture) in SparseConfig::NAMES {
            assert_eq!(parse_as(model_type, "{}").unwrap().model_type(), *model_type);
            let plain = model_type.replace('_', "");
            assert!(architecture.to_lowercase().starts_with(&plain));
        }
        assert_eq!(SparseConfig::NAMES.len(), ROWS.len());
    }

    #[test]
    fn published_relatives_have_their_published_sizes() {
        for (model_type, text, total, active) in [
            // Mixtral-8x7B, Mixtral-8x22B, Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, OLMoE-1B-7B.
            ("mixtral", r#"{}"#, 46_702_792_704u64, 12.9e9),
            (
                "mixtral",
                r#"{"vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
                    "num_attention_heads": 48}"#,
                140_630_071_296,
                39.2e9,
            ),
            ("qwen2_moe", r#"{}"#, 14_315_784_192, 2.69e9),
            (
                "qwen2_moe",
                r#"{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
                    "shared_expert_intermediate_size": 20480}"#,
                57_408_658_944,
                14.2e9,
            ),
            ("olmoe", r#"{"intermediate_size": 1024}"#, 6_919_161_856, 1.28e9),
        ] {
            let count = parse_as(model_type, text).unwrap().parameters();
            assert_eq!(count.total(), total, "{model_type} {text}\n{count}");
            let error = (count.active() as f64 / active - 1.0).abs();
            assert!(error < 0.01, "{model_type} {text}\n{count}");
        }
    }

    #[test]
    fn defaults_of_the_relatives_are_those_of_the_reference() {
        let sizes = |t| {
            let c = parse_as(t, "{}").unwrap();
            let d = &c.decoder;
            (
                [d.vocab_size, d.hidden_size, d.num_hidden_layers, d.max_position_embeddings],
                [d.num_attention_heads, d.num_key_value_heads, d.head_dim],
                [c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size],
            )
        };
        assert_eq!(sizes("qwen2_moe"), ([151_936, 2048, 24, 32_768], [16, 16, 128], [60, 4, 1408]));
        assert_eq!(sizes("mixtral"), ([32_000, 4096, 32, 131_072], [32, 8, 128], [8, 2, 14_336]));
        assert_eq!(sizes("olmoe"), ([50_304, 2048, 16, 4096], [16, 16, 128], [64, 8, 2048]));
        let c = |t| parse_as(t, "{}").unwrap();
        let (qwen2, mixtral, olmoe) = (c("qwen2_moe"), c("mixtral"), c("olmoe"));
        assert_eq!((qwen2.intermediate_size, qwen2.shared_intermediate_size), (5632, Some(5632)));
        assert_eq!(
            (qwen2.norm_topk_prob, mixtral.norm_topk_prob, olmoe.norm_topk_prob),
            (false, true, false)
        );
        assert_eq!((qwen2.decoder.qkv_bias, qwen2.decoder.o_bias), (true, false));
        assert_eq!((mixtral.decoder.rms_norm_eps, mixtral.decoder.rope.theta), (1e-5, 1e6));
        assert_eq!((olmoe.decoder.rms_norm_eps, olmoe.router_aux_loss_coef), (1e-5, 0.01));
        assert_eq!(
            (olmoe.decoder.common.pad_token_id, &olmoe.decoder.common.eos_token_ids[..]),
            (Some(1), &[50_279][..])
        );
        assert_eq!(mixtral.decoder.sliding_window, None);
        assert_eq!(
            parse_as("mixtral", r#"{"sliding_window": 8}"#).unwrap().decoder.sliding_window,
            Some(8)
        );
        assert_eq!(parse_as("mixtral", r#"{"num_experts": 16}"#).unwrap().num_experts, 16);
        assert_eq!(mixtral.capabilities().routed_experts, Some(("num_local_experts", 8)));
    }

    #[test]
    fn windows_of_qwen2_moe_are_every_other_layer_below_a_limit() {
        let text = r#"{"num_hidden_layers": 6, "use_sliding_window": true, "max_window_layers": 3}"#;
        assert_eq!(
            parse_as("qwen2_moe", text).unwrap().decoder.slides,
            [true, false, true, false, false, false]
        );
    }

    #[test]
    fn what_the_relatives_do_not_support_is_refused() {
        for (model_type, text, parts) in [
            ("mixtral", r#"{"router_jitter_noise": 0.1}"#, ["router_jitter_noise", "0.1", "0"]),
            (
                "mixtral",
                r#"{"num_experts_per_tok": 9}"#,
                ["num_experts_per_tok", "9", "num_local_experts = 8"],
            ),
            ("mixtral", r#"{"num_local_experts": 0}"#, ["num_local_experts", "0", "at least 1"]),
            ("olmoe", r#"{"clip_qkv": -1}"#, ["clip_qkv", "-1", "more than 0"]),
            ("olmoe", r#"{"head_dim": 64}"#, ["head_dim", "64", "2048 / 16"]),
        ] {
            let error = parse_as(model_type, text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{model_type} {text}: {error}");
        }
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
        assert_eq!(
            (c.decoder.vocab_size, c.decoder.hidden_size, c.decoder.num_hidden_layers),
            (151_936, 2048, 24)
        );
        assert_eq!(
            (c.decoder.num_attention_heads, c.decoder.num_key_value_heads, c.decoder.head_dim),
            (32, 4, 64)
        );
        assert_eq!((c.intermediate_size, c.moe_intermediate_size), (6144, 768));
        assert_eq!((c.num_experts, c.num_experts_per_tok, c.norm_topk_prob), (128, 8, false));
        assert_eq!((c.decoder_sparse_step, c.mlp_only_layers.len()), (1, 0));
        assert_eq!(
            (c.decoder.rms_norm_eps, c.decoder.o_bias, c.decoder.tie_word_embeddings),
            (1e-6, false, false)
        );
        assert_eq!(
            (c.decoder.rope.theta, &c.decoder.rope.kind, c.decoder.rope.dim),
            (10_000.0, &RopeKind::Default, 64)
        );
        assert_eq!((c.decoder.max_position_embeddings, c.decoder.sliding_window), (32_768, None));
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
        assert_eq!(c.decoder.sliding_window, Some(4096));
        assert_eq!(c.aux_loss().unwrap().num_experts, 16);
        assert_eq!(
            parse(r#"{"use_sliding_window": true, "sliding_window": null}"#)
                .unwrap()
                .decoder
                .sliding_window,
            None
        );
        assert_eq!(parse(r#"{"sliding_window": 7}"#).unwrap().decoder.sliding_window, None);
        assert_eq!(
            parse(r#"{"use_sliding_window": true, "sliding_window": 7}"#)
                .unwrap()
                .decoder
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
