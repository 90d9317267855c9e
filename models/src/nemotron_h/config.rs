//! `config.json` of Nemotron-H.
//!
//! Fields without effect, kept only for the round trip: `attention_bias`, `sliding_window`, `rope_theta`,
//! `partial_rotary_factor`, `max_position_embeddings` (attention has neither bias nor window nor positions), `expand`,
//! `mamba_proj_bias`, `n_shared_experts` (always one shared layer), `norm_eps`, `residual_in_fp32`, `hidden_dropout`,
//! `moe_shared_expert_overlap`, `use_mamba_kernels`, `mamba_ssm_cache_dtype`, `num_logits_to_keep`,
//! `tie_word_embeddings` (the family has no tied matrix), and everything about multi-token prediction.

use burn_ep_backend::{GroupScore, RouterDesc, RouterScore};
use burn_moe::checkpoint::WeightMap;
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use super::schedule::{LayerKind, parse_schedule};
use crate::counts::{FLOPS_PER_WEIGHT, ParamCount, attention_score_flops};
use crate::family::{Capabilities, ExportLayout, FamilyConfig};
use crate::json::{CommonConfig, Fields, check_key_value_heads, float_pair};
use crate::router::check_grouped;

/// Settings of the Mamba-2 layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MambaSettings {
    pub num_heads: usize,
    pub head_dim: usize,
    pub n_groups: usize,
    pub state_size: usize,
    pub conv_kernel: usize,
    pub conv_bias: bool,
    /// Bias of the input and the output projection.
    pub proj_bias: bool,
    /// Chunk of the scan; without effect on the result.
    pub chunk_size: usize,
    /// Range from which the initial step sizes are drawn, and their least value.
    pub time_step_min: f64,
    pub time_step_max: f64,
    pub time_step_floor: f64,
    /// Clamp of the step size at run time.
    pub time_step_limit: (f64, f64),
}

/// Settings of the mixture-of-experts layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSettings {
    pub router: RouterDesc,
    /// Inner width of a routed expert.
    pub intermediate_size: usize,
    /// Inner width of the shared expert.
    pub shared_intermediate_size: usize,
    /// Width at which the routed experts work, when it is not the hidden width.
    pub latent_size: Option<usize>,
}

/// Switches that reproduce known defects of the transformers implementation (release 5.17.0), for parity tests. They are
/// not part of `config.json`; the default is the behaviour of the published models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parity {
    /// Clamp the step size to `(time_step_min, infinity)` instead of `time_step_limit`: transformers takes an
    /// initialisation constant for a floor in training and prefill.
    pub dt_floor: bool,
    /// Reset Mamba-2 state and convolution at document starts. Off, they leak from one packed document into the next,
    /// as in the pure tensor path of transformers.
    pub mamba_document_reset: bool,
}

impl Default for Parity {
    fn default() -> Self {
        Self {
            dt_floor: false,
            mamba_document_reset: true,
        }
    }
}

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct NemotronHConfig {
    pub common: CommonConfig,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub layers: Vec<LayerKind>,
    pub norm_eps: f64,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub mamba: MambaSettings,
    pub moe: MoeSettings,
    /// Inner width of dense layers.
    pub intermediate_size: usize,
    /// Bias of shared, dense and latent matrices.
    pub mlp_bias: bool,
    pub initializer_range: f64,
    pub rescale_prenorm_residual: bool,
    pub parity: Parity,
    /// The file as read, unknown fields included.
    pub raw: Map<String, Value>,
}

impl NemotronHConfig {
    /// Value of `model_type`.
    pub const MODEL_TYPE: &'static str = "nemotron_h";
    /// Value in `architectures`.
    pub const ARCHITECTURE: &'static str = "NemotronHForCausalLM";
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
        let vocab_size = f.size(&["vocab_size"], 131_072)?;
        let layers = parse_schedule(raw)?;
        f.no_dropout("attention_dropout")?;
        f.choice(&["mlp_hidden_act"], (), &[("relu2", ())])?;
        f.choice(&["mamba_hidden_act"], (), &[("silu", ()), ("swish", ())])?;
        let config = Self {
            common: CommonConfig::parse(&f)?,
            vocab_size,
            hidden_size: f.size(&["hidden_size"], 4096)?,
            norm_eps: f.positive(&["layer_norm_epsilon"], 1e-5)?,
            num_attention_heads: f.size(&["num_attention_heads"], 32)?,
            num_key_value_heads: f.size(&["num_key_value_heads"], 8)?,
            head_dim: f.size(&["head_dim"], 128)?,
            mamba: parse_mamba(&f)?,
            moe: parse_moe(&f, layers.contains(&LayerKind::Moe))?,
            intermediate_size: f.size(&["intermediate_size"], 21_504)?,
            mlp_bias: f.flag(&["mlp_bias"], false)?,
            initializer_range: f.positive(&["initializer_range"], 0.02)?,
            rescale_prenorm_residual: f.flag(&["rescale_prenorm_residual"], true)?,
            parity: Parity::default(),
            layers,
            raw: raw.clone(),
        };
        check_key_value_heads(config.num_attention_heads, config.num_key_value_heads)?;
        config.parameters().check()?;
        Ok(config)
    }

    /// Number of blocks of a kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|k| **k == kind).count()
    }

    /// Width at which routed experts work.
    pub fn expert_width(&self) -> usize {
        self.moe.latent_size.unwrap_or(self.hidden_size)
    }

    /// Bounds of the step size at run time.
    pub fn dt_bounds(&self) -> (f64, f64) {
        if self.parity.dt_floor {
            (self.mamba.time_step_min, f64::INFINITY)
        } else {
            self.mamba.time_step_limit
        }
    }

    /// Parameters by part.
    pub fn parameters(&self) -> ParamCount {
        let n = |x: usize| x as u128;
        let (h, v) = (n(self.hidden_size), n(self.vocab_size));
        let bias = |rows: u128, on: bool| if on { rows } else { 0 };
        let mut count = ParamCount::default();
        count.add("embeddings", v * h);
        for kind in &self.layers {
            count.add("norms", h);
            match kind {
                LayerKind::Mamba => {
                    let m = &self.mamba;
                    let inner = n(m.num_heads) * n(m.head_dim);
                    let channels = inner + 2 * n(m.n_groups) * n(m.state_size);
                    let projected = inner + channels + n(m.num_heads);
                    let conv = channels * n(m.conv_kernel) + bias(channels, m.conv_bias);
                    let projections = (projected + inner) * h + bias(projected + h, m.proj_bias);
                    count.add("mamba", projections + conv + 3 * n(m.num_heads) + inner);
                }
                LayerKind::Attention => {
                    let (q, kv) = (n(self.num_attention_heads), n(self.num_key_value_heads));
                    count.add("attention", 2 * (q + kv) * n(self.head_dim) * h);
                }
                LayerKind::Moe => {
                    let m = &self.moe;
                    let (e, k, l) = (n(m.router.num_experts), n(m.router.top_k), n(self.expert_width()));
                    let one = 2 * n(m.intermediate_size) * l;
                    let shared = n(m.shared_intermediate_size);
                    count.add("router", e * h + e);
                    count.add("routed experts", e * one);
                    count.add_idle(e.saturating_sub(k) * one);
                    count.add("shared experts", 2 * shared * h + bias(shared + h, self.mlp_bias));
                    if m.latent_size.is_some() {
                        count.add("latent", 2 * l * h + bias(l + h, self.mlp_bias));
                    }
                }
                LayerKind::Mlp => {
                    let i = n(self.intermediate_size);
                    count.add("dense mlp", 2 * i * h + bias(i + h, self.mlp_bias));
                }
            }
        }
        count.add("norms", h);
        count.add("head", v * h);
        count
    }

    /// Operations per token of one training step over sequences of `seq` tokens: 6 per weight used, causal attention
    /// halved, and 21 per channel and state of the scan.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let (h, m) = (self.hidden_size as f64, &self.mamba);
        let inner = (m.num_heads * m.head_dim) as f64;
        let mut weights = h * self.vocab_size as f64;
        let mut other = 0.0;
        for kind in &self.layers {
            match kind {
                LayerKind::Mamba => {
                    let projected = 2.0 * inner + 2.0 * (m.n_groups * m.state_size) as f64 + m.num_heads as f64;
                    weights += h * (projected + inner);
                    other += 21.0 * inner * m.state_size as f64;
                }
                LayerKind::Attention => {
                    let heads = self.num_attention_heads + self.num_key_value_heads;
                    weights += 2.0 * h * (heads * self.head_dim) as f64;
                    other += attention_score_flops(seq, self.num_attention_heads, self.head_dim);
                }
                LayerKind::Moe => {
                    let moe = &self.moe;
                    let routed = moe.router.top_k as f64 * self.expert_width() as f64 * moe.intermediate_size as f64;
                    weights += 2.0 * routed + 2.0 * h * moe.shared_intermediate_size as f64 + h * moe.router.num_experts as f64;
                    if let Some(latent) = moe.latent_size {
                        weights += 2.0 * h * latent as f64;
                    }
                }
                LayerKind::Mlp => weights += 2.0 * h * self.intermediate_size as f64,
            }
        }
        FLOPS_PER_WEIGHT * weights + other
    }
}

fn parse_mamba(f: &Fields<'_>) -> Result<MambaSettings> {
    let num_heads = f.size(&["mamba_num_heads"], 128)?;
    let n_groups = f.size(&["n_groups", "mamba_n_groups"], 8)?;
    if !num_heads.is_multiple_of(n_groups) {
        return Err(Error::config(
            "n_groups",
            n_groups,
            format!("a divisor of mamba_num_heads = {num_heads}"),
        ));
    }
    let conv_kernel = f.size(&["conv_kernel", "mamba_d_conv"], 4)?;
    if !(2..=64).contains(&conv_kernel) {
        return Err(Error::config("conv_kernel", conv_kernel, "2 to 64 taps"));
    }
    let time_step_min = f.positive(&["time_step_min", "mamba_dt_min"], 0.001)?;
    let time_step_max = f.positive(&["time_step_max", "mamba_dt_max"], 0.1)?;
    if time_step_min > time_step_max {
        return Err(Error::config(
            "time_step_min",
            time_step_min,
            format!("at most time_step_max = {time_step_max}"),
        ));
    }
    let time_step_limit = float_pair(f, &["time_step_limit", "mamba_dt_limit"], (0.0, f64::INFINITY))?;
    if !(time_step_limit.0 >= 0.0 && time_step_limit.0 <= time_step_limit.1) {
        return Err(Error::config(
            "time_step_limit",
            format!("{time_step_limit:?}"),
            "two numbers from 0 to infinity, the smaller first",
        ));
    }
    Ok(MambaSettings {
        num_heads,
        head_dim: f.size(&["mamba_head_dim"], 64)?,
        n_groups,
        state_size: f.size(&["ssm_state_size"], 128)?,
        conv_kernel,
        conv_bias: f.flag(&["use_conv_bias", "mamba_conv_bias"], true)?,
        proj_bias: f.flag(&["use_bias"], false)?,
        chunk_size: f.size(&["chunk_size", "mamba_chunk_size"], 128)?,
        time_step_min,
        time_step_max,
        time_step_floor: f.positive(&["time_step_floor", "mamba_dt_init_floor"], 1e-4)?,
        time_step_limit,
    })
}

fn parse_moe(f: &Fields<'_>, used: bool) -> Result<MoeSettings> {
    let num_experts = f.size(&["n_routed_experts", "num_local_experts"], 8)?;
    let top_k = f.size(&["num_experts_per_tok"], 2)?;
    let groups = f.size(&["n_group"], 1)?;
    let top_groups = f.size(&["topk_group"], 1)?;
    let settings = MoeSettings {
        router: RouterDesc {
            num_experts,
            top_k,
            score: RouterScore::Sigmoid,
            renormalize: f.flag(&["norm_topk_prob"], true)?,
            scale: f.positive(&["routed_scaling_factor"], 1.0)? as f32,
            groups,
            top_groups,
            group_score: GroupScore::TwoBest,
            force_balanced: false,
        },
        intermediate_size: f.size(&["moe_intermediate_size"], 7688)?,
        shared_intermediate_size: f.size(&["moe_shared_expert_intermediate_size"], 7688)?,
        latent_size: f.count_or_none(&["moe_latent_size"])?,
    };
    if settings.latent_size == Some(0) {
        return Err(Error::config("moe_latent_size", 0, "at least 1, or null for experts at full width"));
    }
    if used {
        check_grouped(&settings.router)?;
    }
    Ok(settings)
}

impl FamilyConfig for NemotronHConfig {
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
        let moe_blocks = self.count(LayerKind::Moe);
        Capabilities {
            routed_experts: (moe_blocks > 0).then_some(("n_routed_experts", self.moe.router.num_experts)),
            moe_blocks,
            router_bias: moe_blocks > 0,
            export: &[ExportLayout::PerExpert, ExportLayout::Stacked],
            ..Capabilities::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<NemotronHConfig> {
        NemotronHConfig::parse(&map(text))
    }

    fn nano() -> NemotronHConfig {
        parse(
            r#"{"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
                "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "intermediate_size": 1856}"#,
        )
        .unwrap()
    }

    #[test]
    fn published_nano_has_its_published_size() {
        let config = nano();
        assert_eq!(config.layers.len(), 52);
        assert_eq!(
            [LayerKind::Mamba, LayerKind::Moe, LayerKind::Attention].map(|k| config.count(k)),
            [23, 23, 6]
        );
        let count = config.parameters();
        assert_eq!((count.total() as f64 / 1e7).round(), 3158.0, "{count}");
        assert!((3.0e9..3.7e9).contains(&(count.active() as f64)), "{count}");
    }

    /// 19.721 GFLOP per token at 4096 is the published count, which takes the query and output matrices as D x D; the
    /// true ones are D x 4096.
    #[test]
    fn flops_of_nano_match_the_published_count_up_to_the_head_size() {
        let config = nano();
        let (h, width) = (2688.0, 32.0 * 128.0);
        let per_layer = |w: f64| 6.0 * (2.0 * h * w + 2.0 * h * w * 2.0 / 32.0 + 4096.0 * w);
        let published = config.flops_per_token(4096) - 6.0 * (per_layer(width) - per_layer(h));
        assert!((published / 19.721e9 - 1.0).abs() < 5e-5, "{published}");
    }

    #[test]
    fn super_and_ultra_have_their_published_sizes() {
        let large = |pattern: &str, rest: &str| {
            parse(&format!(
                r#"{{"hybrid_override_pattern": "{pattern}", "num_key_value_heads": 2, "head_dim": 128, "mamba_head_dim": 64,
                    "n_routed_experts": 512, "num_experts_per_tok": 22, {rest}}}"#
            ))
            .unwrap()
            .parameters()
        };
        let count = large(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            r#""hidden_size": 4096, "num_attention_heads": 32, "mamba_num_heads": 128, "moe_intermediate_size": 2688,
               "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376"#,
        );
        assert_eq!((count.total() as f64 / 1e7).round(), 12067.0, "{count}");
        let count = large(
            "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            r#""hidden_size": 8192, "num_attention_heads": 64, "mamba_num_heads": 256, "moe_intermediate_size": 5120,
               "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240"#,
        );
        assert_eq!((count.total() as f64 / 1e8).round(), 5493.0, "{count}");
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let c = parse("{}").unwrap();
        assert_eq!((c.vocab_size, c.hidden_size, c.norm_eps), (131_072, 4096, 1e-5));
        assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.head_dim), (32, 8, 128));
        assert_eq!((c.mamba.num_heads, c.mamba.head_dim, c.mamba.n_groups), (128, 64, 8));
        assert_eq!((c.mamba.state_size, c.mamba.conv_kernel, c.mamba.chunk_size), (128, 4, 128));
        assert!(c.mamba.conv_bias && !c.mamba.proj_bias && !c.mlp_bias && c.rescale_prenorm_residual);
        assert_eq!(c.mamba.time_step_limit, (0.0, f64::INFINITY));
        assert_eq!((c.moe.router.num_experts, c.moe.router.top_k, c.moe.router.scale), (8, 2, 1.0));
        assert!(c.moe.router.renormalize);
        assert_eq!((c.moe.intermediate_size, c.moe.shared_intermediate_size), (7688, 7688));
        assert_eq!((c.moe.latent_size, c.intermediate_size), (None, 21_504));
    }

    #[test]
    fn aliases_read_like_the_names_they_stand_for() {
        let c = parse(
            r#"{"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": false, "mamba_chunk_size": 16,
                "mamba_dt_min": 0.01, "mamba_dt_max": 0.2, "mamba_dt_init_floor": 0.003,
                "mamba_dt_limit": [0.0, {"__float__": "Infinity"}], "num_local_experts": 4}"#,
        )
        .unwrap();
        let m = &c.mamba;
        assert_eq!((m.n_groups, m.conv_kernel, m.conv_bias, m.chunk_size), (2, 3, false, 16));
        assert_eq!((m.time_step_min, m.time_step_max, m.time_step_floor), (0.01, 0.2, 0.003));
        assert_eq!(c.moe.router.num_experts, 4);
        let legacy = parse(r#"{"time_step_limit": [0.5, Infinity]}"#).unwrap();
        assert_eq!(legacy.dt_bounds(), (0.5, f64::INFINITY));
        let floor = NemotronHConfig {
            parity: Parity {
                dt_floor: true,
                ..Parity::default()
            },
            ..legacy
        };
        assert_eq!(floor.dt_bounds(), (0.001, f64::INFINITY));
    }

    #[test]
    fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
        for (text, parts) in [
            (
                r#"{"n_routed_experts": 4, "num_experts_per_tok": 5}"#,
                ["num_experts_per_tok", "5", "n_routed_experts = 4"],
            ),
            (r#"{"n_group": 3}"#, ["n_group", "3", "n_routed_experts = 8"]),
            (r#"{"n_group": 8}"#, ["n_group", "8", "at most 4"]),
            (r#"{"n_group": 2, "topk_group": 3}"#, ["topk_group", "3", "n_group = 2"]),
            (
                r#"{"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}"#,
                ["num_experts_per_tok", "3", "2 experts"],
            ),
            (r#"{"mlp_hidden_act": "gelu"}"#, ["mlp_hidden_act", "gelu", "relu2"]),
            (r#"{"mamba_hidden_act": "relu"}"#, ["mamba_hidden_act", "relu", "silu"]),
            (r#"{"attention_dropout": 0.1}"#, ["attention_dropout", "0.1", "0"]),
            (
                r#"{"num_key_value_heads": 5}"#,
                ["num_key_value_heads", "5", "num_attention_heads = 32"],
            ),
            (r#"{"n_groups": 7}"#, ["n_groups", "7", "mamba_num_heads = 128"]),
            (r#"{"conv_kernel": 1}"#, ["conv_kernel", "1", "2 to 64"]),
            (r#"{"time_step_limit": [2, 1]}"#, ["time_step_limit", "(2.0, 1.0)", "smaller first"]),
            (r#"{"hidden_size": 1e18}"#, ["hidden_size", "1e+18", "whole number"]),
            (
                r#"{"hidden_size": 16000000, "moe_intermediate_size": 16000000, "n_routed_experts": 16000000}"#,
                ["config.json", "parameters", "at most"],
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }

    #[test]
    fn a_router_that_no_layer_uses_is_not_checked() {
        assert!(parse(r#"{"hybrid_override_pattern": "M*-", "n_routed_experts": 1, "num_experts_per_tok": 2}"#).is_ok());
    }
}
