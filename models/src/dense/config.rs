//! `config.json` of the dense families. What they share is read in `../decoder.rs`, where the fields without effect are
//! listed.

use burn_moe::Result;
use burn_moe::checkpoint::WeightMap;
use serde_json::{Map, Value};

use crate::counts::{FLOPS_PER_WEIGHT, ParamCount};
use crate::decoder::{DecoderConfig, DecoderFamily, QkNormKind, Switch, WindowRule};
use crate::family::{Capabilities, FamilyConfig};
use crate::json::{CommonConfig, Fields};

/// A dense family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseKind {
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
}

/// Where a family differs from the others; `intermediate_size` is a default.
struct Row {
    kind: DenseKind,
    model_type: &'static str,
    intermediate_size: usize,
    mlp_bias: Switch,
    decoder: DecoderFamily,
}

const LLAMA: DecoderFamily = DecoderFamily {
    vocab_size: 32_000,
    hidden_size: 4096,
    num_hidden_layers: 32,
    num_attention_heads: 32,
    num_key_value_heads: None,
    head_dim: None,
    max_position_embeddings: 2048,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
    pad_token_id: None,
    qkv_bias: Switch::Field("attention_bias", false),
    o_bias: Switch::Field("attention_bias", false),
    qk_norm: QkNormKind::None,
    clips_qkv: false,
    window: WindowRule::Never,
};

const QWEN2: DecoderFamily = DecoderFamily {
    vocab_size: 151_936,
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    qkv_bias: Switch::On,
    o_bias: Switch::Off,
    window: WindowRule::SwitchedUpper,
    ..LLAMA
};

/// The differences of the families, in one table.
const ROWS: [Row; 4] = [
    Row {
        kind: DenseKind::Llama,
        model_type: "llama",
        intermediate_size: 11_008,
        mlp_bias: Switch::Field("mlp_bias", false),
        decoder: LLAMA,
    },
    Row {
        kind: DenseKind::Qwen2,
        model_type: "qwen2",
        intermediate_size: 22_016,
        mlp_bias: Switch::Off,
        decoder: QWEN2,
    },
    Row {
        kind: DenseKind::Qwen3,
        model_type: "qwen3",
        intermediate_size: 22_016,
        mlp_bias: Switch::Off,
        decoder: DecoderFamily {
            head_dim: Some(128),
            qkv_bias: Switch::Field("attention_bias", false),
            o_bias: Switch::Field("attention_bias", false),
            qk_norm: QkNormKind::Head,
            ..QWEN2
        },
    },
    Row {
        kind: DenseKind::Mistral,
        model_type: "mistral",
        intermediate_size: 14_336,
        mlp_bias: Switch::Off,
        decoder: DecoderFamily {
            num_key_value_heads: Some(8),
            max_position_embeddings: 131_072,
            qkv_bias: Switch::Off,
            o_bias: Switch::Off,
            window: WindowRule::Always(Some(4096)),
            ..LLAMA
        },
    },
];

impl DenseKind {
    fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.kind == self).expect("a row for every kind")
    }
}

/// A parsed `config.json`, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseConfig {
    pub kind: DenseKind,
    pub decoder: DecoderConfig,
    /// Inner width of the feed-forward.
    pub intermediate_size: usize,
    pub mlp_bias: bool,
}

impl DenseConfig {
    /// Checkpoints that the family reads: `model_type` and architecture.
    pub const NAMES: &'static [(&'static str, &'static str)] = &[
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("mistral", "MistralForCausalLM"),
    ];

    /// Reads and checks a config of the family called `model_type`.
    ///
    /// # Errors
    /// Names the first field whose value cannot be honoured, with what was found and what is expected.
    pub(crate) fn parse_as(model_type: &'static str, raw: &Map<String, Value>) -> Result<Self> {
        let row = ROWS.iter().find(|row| row.model_type == model_type).expect("a row for every name");
        let f = Fields::new(raw);
        let config = Self {
            kind: row.kind,
            decoder: DecoderConfig::parse(raw, &row.decoder)?,
            intermediate_size: f.size(&["intermediate_size"], row.intermediate_size)?,
            mlp_bias: row.mlp_bias.read(&f)?,
        };
        FamilyConfig::parameters(&config).check()?;
        Ok(config)
    }
}

impl FamilyConfig for DenseConfig {
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
        super::weight_map()
    }

    fn parameters(&self) -> ParamCount {
        let (h, inner) = (self.decoder.hidden_size as u128, self.intermediate_size as u128);
        let bias = if self.mlp_bias { 2 * inner + h } else { 0 };
        let mut count = ParamCount::default();
        count.add("embeddings", self.decoder.embedding());
        for _ in 0..self.decoder.num_hidden_layers {
            self.decoder.count_layer(&mut count);
            count.add("dense mlp", 3 * inner * h + bias);
        }
        count.add("norms", h);
        if !self.decoder.tie_word_embeddings {
            count.add("head", self.decoder.embedding());
        }
        count
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        let d = &self.decoder;
        let mlp = 3.0 * d.hidden_size as f64 * d.num_hidden_layers as f64 * self.intermediate_size as f64;
        FLOPS_PER_WEIGHT * (d.weights_per_token() + mlp) + d.score_flops(seq)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tied_embeddings: self.decoder.tie_word_embeddings,
            max_positions: Some(self.decoder.max_position_embeddings),
            ..Capabilities::default()
        }
    }

    fn tied_mut(&mut self) -> Option<&mut bool> {
        Some(&mut self.decoder.tie_word_embeddings)
    }
}

#[cfg(test)]
mod tests {
    use burn_moe::layers::RopeKind;

    use super::*;
    use crate::json::tests::map;

    fn parse(model_type: &'static str, text: &str) -> Result<DenseConfig> {
        DenseConfig::parse_as(model_type, &map(text))
    }

    #[test]
    fn every_name_has_a_row() {
        for (model_type, architecture) in DenseConfig::NAMES {
            let config = parse(model_type, "{}").unwrap();
            assert_eq!(config.model_type(), *model_type);
            assert!(architecture.to_lowercase().starts_with(model_type));
        }
        assert_eq!(DenseConfig::NAMES.len(), ROWS.len());
    }

    /// V, H, I, L, query heads, key heads, head size, tied, parameters: sizes of published models.
    #[test]
    fn published_models_have_their_published_sizes() {
        #[rustfmt::skip]
        let models = [
            ("llama", [32_000, 4096, 11_008, 32, 32, 32, 128], false, 6_738_415_616u64),
            ("llama", [128_256, 4096, 14_336, 32, 32, 8, 128], false, 8_030_261_248),
            ("llama", [128_256, 8192, 28_672, 80, 64, 8, 128], false, 70_553_706_496),
            ("llama", [128_256, 2048, 8192, 16, 32, 8, 64], true, 1_235_814_400),
            ("qwen2", [151_936, 896, 4864, 24, 14, 2, 64], true, 494_032_768),
            ("qwen2", [152_064, 3584, 18_944, 28, 28, 4, 128], false, 7_615_616_512),
            ("qwen3", [151_936, 1024, 3072, 28, 16, 8, 128], true, 596_049_920),
            ("qwen3", [151_936, 5120, 25_600, 64, 64, 8, 128], false, 32_762_123_264),
            ("mistral", [32_768, 4096, 14_336, 32, 32, 8, 128], false, 7_248_023_552),
        ];
        for (model_type, [v, h, i, l, q, kv, d], tied, expected) in models {
            let text = format!(
                r#"{{"vocab_size": {v}, "hidden_size": {h}, "intermediate_size": {i}, "num_hidden_layers": {l},
                    "num_attention_heads": {q}, "num_key_value_heads": {kv}, "head_dim": {d}, "tie_word_embeddings": {tied}}}"#
            );
            let count = parse(model_type, &text).unwrap().parameters();
            assert_eq!(count.total(), expected, "{model_type} {text}\n{count}");
            assert_eq!(count.active(), expected);
        }
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let sizes = |t| {
            let c = parse(t, "{}").unwrap();
            let d = &c.decoder;
            let heads = [d.num_attention_heads, d.num_key_value_heads, d.head_dim];
            ([d.vocab_size, d.hidden_size, c.intermediate_size, d.num_hidden_layers], heads)
        };
        assert_eq!(sizes("llama"), ([32_000, 4096, 11_008, 32], [32, 32, 128]));
        assert_eq!(sizes("qwen2"), ([151_936, 4096, 22_016, 32], [32, 32, 128]));
        assert_eq!(sizes("qwen3"), ([151_936, 4096, 22_016, 32], [32, 32, 128]));
        assert_eq!(sizes("mistral"), ([32_000, 4096, 14_336, 32], [32, 8, 128]));

        let c = |t| parse(t, "{}").unwrap();
        let positions = DenseConfig::NAMES.iter().map(|(t, _)| c(t).decoder.max_position_embeddings);
        assert_eq!(positions.collect::<Vec<_>>(), [2048, 32_768, 32_768, 131_072]);
        let biases = DenseConfig::NAMES.iter().map(|(t, _)| (c(t).decoder.qkv_bias, c(t).decoder.o_bias));
        assert_eq!(
            biases.collect::<Vec<_>>(),
            [(false, false), (true, false), (false, false), (false, false)]
        );
        let norms = DenseConfig::NAMES.iter().map(|(t, _)| c(t).decoder.qk_norm != QkNormKind::None);
        assert_eq!(norms.collect::<Vec<_>>(), [false, false, true, false]);
        let eos = DenseConfig::NAMES.iter().map(|(t, _)| c(t).decoder.common.eos_token_ids.len());
        assert_eq!(eos.collect::<Vec<_>>(), [1, 0, 0, 1]);
        for (t, _) in DenseConfig::NAMES {
            let d = c(t).decoder;
            assert_eq!((d.rms_norm_eps, d.rope.theta, d.tie_word_embeddings), (1e-6, 10_000.0, false));
            assert_eq!(d.sliding_window, (*t == "mistral").then_some(4096), "{t}");
        }
        // Null is not the same as missing.
        assert_eq!(
            parse("mistral", r#"{"num_key_value_heads": null}"#)
                .unwrap()
                .decoder
                .num_key_value_heads,
            32
        );
        assert_eq!(
            parse("qwen3", r#"{"head_dim": null, "hidden_size": 1024}"#)
                .unwrap()
                .decoder
                .head_dim,
            32
        );
        assert!(
            parse("llama", r#"{"eos_token_id": null}"#)
                .unwrap()
                .decoder
                .common
                .eos_token_ids
                .is_empty()
        );
    }

    #[test]
    fn windows_by_layer() {
        let slides = |t, text: &str| -> Vec<usize> {
            let c = parse(t, &format!(r#"{{"num_hidden_layers": 4, {text}}}"#)).unwrap().decoder;
            (0..4)
                .filter(|&i| c.attention(i, burn_moe::layers::Init::Zeros).window.is_some())
                .collect()
        };
        assert_eq!(slides("qwen2", r#""use_sliding_window": true, "max_window_layers": 2"#), [2, 3]);
        assert!(slides("qwen3", r#""sliding_window": 8, "max_window_layers": 0"#).is_empty());
        assert!(
            slides(
                "qwen3",
                r#""use_sliding_window": true, "sliding_window": null, "max_window_layers": 0"#
            )
            .is_empty()
        );
        let types = r#""layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]"#;
        assert_eq!(slides("qwen3", &format!(r#""use_sliding_window": true, {types}"#)), [0, 3]);
        assert_eq!(slides("mistral", r#""sliding_window": 8"#), [0, 1, 2, 3]);
        assert!(slides("mistral", r#""sliding_window": null"#).is_empty());
        assert!(slides("llama", r#""sliding_window": 8"#).is_empty());
        // A list that says what happens anyway, as transformers 5 writes it.
        let full = r#""layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]"#;
        assert!(slides("qwen2", full).is_empty());
    }

    #[test]
    fn rotary_settings_in_both_spellings() {
        let old = parse(
            "llama",
            r#"{"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#,
        )
        .unwrap();
        let new = parse(
            "llama",
            r#"{"max_position_embeddings": 131072, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3",
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#,
        )
        .unwrap();
        assert_eq!(old.decoder.rope, new.decoder.rope);
        assert!(matches!(old.decoder.rope.kind, RopeKind::Llama3 { factor: 8.0, .. }));
    }

    #[test]
    fn contradictions_and_unsupported_values_name_the_field_and_both_values() {
        for (model_type, text, parts) in [
            ("llama", r#"{"hidden_act": "gelu"}"#, ["hidden_act", "gelu", "silu"]),
            (
                "llama",
                r#"{"num_key_value_heads": 5}"#,
                ["num_key_value_heads", "5", "num_attention_heads = 32"],
            ),
            ("llama", r#"{"attention_dropout": 0.1}"#, ["attention_dropout", "0.1", "0"]),
            ("qwen3", r#"{"head_dim": 7}"#, ["head_dim", "7", "even"]),
            (
                "qwen2",
                r#"{"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}"#,
                ["layer_types[0]", "sliding_attention", "full_attention"],
            ),
            (
                "qwen2",
                r#"{"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}"#,
                ["layer_types[0]", "chunked_attention", "sliding_attention"],
            ),
            (
                "qwen3",
                r#"{"num_hidden_layers": 2, "layer_types": []}"#,
                ["layer_types", "0 entries", "num_hidden_layers = 2"],
            ),
            (
                "mistral",
                r#"{"num_hidden_layers": 1, "layer_types": ["full_attention"]}"#,
                ["layer_types[0]", "full_attention", "sliding_attention"],
            ),
            ("mistral", r#"{"sliding_window": 0}"#, ["sliding_window", "0", "at least 1"]),
            (
                "llama",
                r#"{"vocab_size": 10, "pad_token_id": 10}"#,
                ["pad_token_id", "10", "vocab_size = 10"],
            ),
            (
                "llama",
                r#"{"quantization_config": {"quant_method": "awq"}}"#,
                ["quantization_config", "awq", "no quantisation"],
            ),
        ] {
            let error = parse(model_type, text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{model_type} {text}: {error}");
        }
    }
}
