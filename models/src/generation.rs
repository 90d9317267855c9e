//! `generation_config.json`: how the publisher of a checkpoint means it to be sampled.

use std::path::Path;

use burn_moe::checkpoint::ConfigJson;
use burn_moe::generate::GenerateOptions;
use burn_moe::{Error, Result};
use serde_json::{Map, Value, json};

use crate::json::Fields;

/// Name of the file.
const FILE: &str = "generation_config.json";
/// What transformers samples among when the file says nothing.
const DEFAULT_TOP_K: usize = 50;

/// Fields that choose another text than the ones read here, with the values at which they do nothing.
fn neutral_values() -> [(&'static str, Vec<Value>); 31] {
    let off = || vec![json!(false)];
    let one = || vec![json!(1.0)];
    let zero = || vec![json!(0.0)];
    let empty = || vec![json!([])];
    [
        ("num_beams", one()),
        ("num_beam_groups", one()),
        ("num_return_sequences", one()),
        ("diversity_penalty", zero()),
        ("penalty_alpha", zero()),
        ("dola_layers", empty()),
        ("use_mtp", off()),
        ("top_h", vec![]),
        ("typical_p", one()),
        ("epsilon_cutoff", zero()),
        ("eta_cutoff", zero()),
        ("encoder_repetition_penalty", one()),
        ("no_repeat_ngram_size", zero()),
        ("encoder_no_repeat_ngram_size", zero()),
        ("min_length", zero()),
        ("min_new_tokens", zero()),
        ("max_time", vec![]),
        ("stop_strings", empty()),
        ("bad_words_ids", empty()),
        ("forced_bos_token_id", vec![]),
        ("forced_eos_token_id", vec![]),
        ("exponential_decay_length_penalty", vec![]),
        ("suppress_tokens", empty()),
        ("begin_suppress_tokens", empty()),
        ("sequence_bias", empty()),
        ("token_healing", off()),
        ("guidance_scale", one()),
        ("watermarking_config", vec![]),
        ("constraints", empty()),
        ("force_words_ids", empty()),
        ("prompt_lookup_num_tokens", vec![]),
    ]
}

/// Fields that do not change the text, or only with a field of [`neutral_values`].
const WITHOUT_EFFECT: [&str; 35] = [
    "_commit_hash",
    "_from_model_config",
    "transformers_version",
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "low_memory",
    "prefill_chunk_size",
    "renormalize_logits",
    "remove_invalid_values",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "early_stopping",
    "length_penalty",
    "return_legacy_cache",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "speculation_type",
];

/// Fields that are read.
const READ: [&str; 9] = [
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "eos_token_id",
    "max_new_tokens",
    "max_length",
];

/// Sampling settings of a checkpoint, with the defaults of transformers for what its file leaves out.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Sample; otherwise the best token is taken and the next four have no effect.
    pub do_sample: bool,
    pub temperature: f64,
    /// 0: among all.
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    /// Also of greedy generation.
    pub repetition_penalty: f64,
    pub eos_token_ids: Vec<i32>,
    /// Most tokens to add.
    pub max_new_tokens: Option<usize>,
    /// Most tokens of prompt and answer; without effect beside `max_new_tokens`.
    pub max_length: Option<usize>,
}

impl GenerationConfig {
    /// The file in `folder`; None when there is none.
    ///
    /// # Errors
    /// A file that cannot be read, values out of range, and settings that would give another text and are not honoured (beam
    /// search, for example), each by name.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        match path.exists() {
            true => Self::from_fields(ConfigJson::read(&path)?.fields()).map(Some),
            false => Ok(None),
        }
    }

    /// The fields of a file.
    ///
    /// # Errors
    /// As [`GenerationConfig::from_folder`].
    pub fn from_fields(map: &Map<String, Value>) -> Result<Self> {
        refuse_others(map)?;
        let fields = Fields::new(map);
        let config = Self {
            do_sample: fields.flag(&["do_sample"], false)?,
            temperature: fields.finite(&["temperature"], 1.0)?,
            top_k: fields.count(&["top_k"], DEFAULT_TOP_K)?,
            top_p: fields.finite(&["top_p"], 1.0)?,
            min_p: fields.finite(&["min_p"], 0.0)?,
            repetition_penalty: fields.finite(&["repetition_penalty"], 1.0)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            max_new_tokens: fields.count_or_none(&["max_new_tokens"])?,
            max_length: fields.count_or_none(&["max_length"])?,
        };
        if config.do_sample && config.temperature == 0.0 {
            let expected = "a positive number beside `do_sample`: true";
            return Err(Error::config("temperature", 0.0, expected));
        }
        config.options().validate()?;
        Ok(config)
    }

    /// These settings for [`burn_moe::generate::generate`]; the limit is `max_new_tokens` where the file has it.
    pub fn options(&self) -> GenerateOptions {
        let base = GenerateOptions {
            repetition_penalty: self.repetition_penalty,
            stop_tokens: self.eos_token_ids.clone(),
            ..GenerateOptions::default()
        };
        let limited = GenerateOptions {
            max_new_tokens: self.max_new_tokens.unwrap_or(base.max_new_tokens),
            ..base
        };
        if !self.do_sample {
            return limited;
        }
        GenerateOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            ..limited
        }
    }

    /// Most tokens to add to a prompt of so many, by the file; None when it does not say.
    pub fn limit(&self, prompt: usize) -> Option<usize> {
        self.max_new_tokens.or(self.max_length.map(|length| length.saturating_sub(prompt)))
    }
}

/// Settings that somebody asks for in place of the file's, e.g. on a command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationOverrides {
    /// 0 makes the generation greedy, a positive number makes it sample.
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_new_tokens: Option<usize>,
}

impl GenerationOverrides {
    /// Options for a prompt of `prompt` tokens, and one line that says what was taken from where. Without a file the best
    /// token is taken, 128 times at most.
    ///
    /// # Errors
    /// A value out of range, and a sampling setting for a generation that is greedy.
    pub fn resolve(&self, file: Option<&GenerationConfig>, prompt: usize) -> Result<(GenerateOptions, String)> {
        let mut options = file.map_or_else(GenerateOptions::default, GenerationConfig::options);
        options.temperature = self.temperature.unwrap_or(options.temperature);
        let greedy = options.temperature == 0.0;
        let given = [
            ("top_k", self.top_k.is_some()),
            ("top_p", self.top_p.is_some()),
            ("min_p", self.min_p.is_some()),
        ];
        if let Some((name, _)) = given.iter().find(|(_, given)| greedy && *given) {
            return Err(Error::config(
                *name,
                "a value",
                "none, or a temperature above 0: the best token is always taken",
            ));
        }
        if greedy {
            let neutral = GenerateOptions::default();
            (options.top_k, options.top_p, options.min_p) = (neutral.top_k, neutral.top_p, neutral.min_p);
        }
        options.top_k = self.top_k.unwrap_or(options.top_k);
        options.top_p = self.top_p.unwrap_or(options.top_p);
        options.min_p = self.min_p.unwrap_or(options.min_p);
        options.repetition_penalty = self.repetition_penalty.unwrap_or(options.repetition_penalty);
        let limit = self.max_new_tokens.or_else(|| file.and_then(|file| file.limit(prompt)));
        options.max_new_tokens = limit.unwrap_or(options.max_new_tokens);
        options.validate()?;

        let neutral = GenerateOptions::default();
        let line = |name: &str, value: f64, given: bool, neutral: f64| {
            let from = match (given, value == neutral) {
                (true, _) => "given",
                (false, true) => "default",
                (false, false) => FILE,
            };
            format!("{name} {value} ({from})")
        };
        let mut taken = match greedy {
            true => vec![line("greedy, temperature", 0.0, self.temperature.is_some(), 0.0)],
            false => vec![
                line("temperature", options.temperature, self.temperature.is_some(), neutral.temperature),
                line("top_k", options.top_k as f64, self.top_k.is_some(), neutral.top_k as f64),
                line("top_p", options.top_p, self.top_p.is_some(), neutral.top_p),
                line("min_p", options.min_p, self.min_p.is_some(), neutral.min_p),
            ],
        };
        let (penalty, penalty_given) = (options.repetition_penalty, self.repetition_penalty.is_some());
        taken.push(line("repetition_penalty", penalty, penalty_given, neutral.repetition_penalty));
        let (most, most_given) = (options.max_new_tokens as f64, self.max_new_tokens.is_some());
        taken.push(line("at most", most, most_given, neutral.max_new_tokens as f64) + " tokens");
        Ok((options, taken.join(", ")))
    }
}

fn refuse_others(map: &Map<String, Value>) -> Result<()> {
    let neutral = neutral_values();
    for (name, value) in map {
        if value.is_null() || READ.contains(&name.as_str()) || WITHOUT_EFFECT.contains(&name.as_str()) {
            continue;
        }
        let Some((_, allowed)) = neutral.iter().find(|(known, _)| known == name) else {
            tracing::warn!("{FILE}: `{name}` is not known and has no effect");
            continue;
        };
        let same = |a: &Value| match (a.as_f64(), value.as_f64()) {
            (Some(a), Some(b)) => a == b,
            // Empty lists and objects alike.
            _ => a == value || (a == &json!([]) && value == &json!({})),
        };
        if !allowed.iter().any(same) {
            let expected = match allowed.first() {
                Some(value) => format!("null or {value}: the setting is not supported"),
                None => "null: the setting is not supported".to_string(),
            };
            return Err(Error::config(name.as_str(), value, expected));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<GenerationConfig> {
        let value: Value = serde_json::from_str(text).unwrap();
        GenerationConfig::from_fields(value.as_object().unwrap())
    }

    /// The forms in which the families are published.
    #[test]
    fn published_files_are_read() {
        // Qwen3-30B-A3B
        let qwen = parse(
            r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
                "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}"#,
        )
        .unwrap();
        let options = qwen.options();
        assert_eq!((options.temperature, options.top_k, options.top_p), (0.6, 20, 0.95));
        assert_eq!((options.stop_tokens, options.max_new_tokens), (vec![151_645, 151_643], 128));
        // Llama 3: nothing about top-k, for which transformers has a default.
        let llama = parse(r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}"#).unwrap();
        assert_eq!(
            (llama.options().top_k, llama.limit(96), llama.limit(5000)),
            (50, Some(4000), Some(0))
        );
        // Greedy: the sampling settings have no effect, the penalty has.
        let greedy = parse(r#"{"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 2048}"#).unwrap();
        let options = greedy.options();
        assert_eq!((options.temperature, options.top_p, options.top_k), (0.0, 1.0, 0));
        assert_eq!((options.repetition_penalty, options.max_new_tokens), (1.05, 2048));
    }

    #[test]
    fn what_is_given_wins_over_the_file() {
        let file = parse(r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 100}"#).unwrap();
        let given = GenerationOverrides {
            top_p: Some(0.5),
            repetition_penalty: Some(1.2),
            ..Default::default()
        };
        let (options, text) = given.resolve(Some(&file), 30).unwrap();
        assert_eq!((options.temperature, options.top_k, options.top_p), (0.6, 20, 0.5));
        assert_eq!((options.repetition_penalty, options.max_new_tokens), (1.2, 70));
        assert!(
            text.contains("top_k 20 (generation_config.json)") && text.contains("top_p 0.5 (given)"),
            "{text}"
        );

        let greedy = GenerationOverrides {
            temperature: Some(0.0),
            max_new_tokens: Some(7),
            ..Default::default()
        };
        let (options, text) = greedy.resolve(Some(&file), 30).unwrap();
        assert_eq!(
            (options.temperature, options.top_k, options.top_p, options.max_new_tokens),
            (0.0, 0, 1.0, 7)
        );
        assert!(text.starts_with("greedy"), "{text}");

        let lost = GenerationOverrides {
            top_k: Some(5),
            ..Default::default()
        };
        assert!(lost.resolve(None, 1).unwrap_err().to_string().contains("top_k"));
        let hot = GenerationOverrides {
            temperature: Some(0.7),
            ..lost
        };
        let (options, text) = hot.resolve(None, 1).unwrap();
        assert_eq!((options.temperature, options.top_k, options.max_new_tokens), (0.7, 5, 128));
        assert!(text.contains("top_p 1 (default)"), "{text}");
        let bad = GenerationOverrides { top_p: Some(2.0), ..hot };
        assert!(bad.resolve(None, 1).unwrap_err().to_string().contains("top_p"));
    }

    #[test]
    fn other_settings_are_refused_by_name_unless_they_do_nothing() {
        for (name, value) in [
            ("num_beams", "4"),
            ("typical_p", "0.9"),
            ("no_repeat_ngram_size", "3"),
            ("stop_strings", r#"["end"]"#),
            ("suppress_tokens", "[1]"),
            ("guidance_scale", "1.5"),
            ("watermarking_config", "{}"),
            ("temperature", r#""hot""#),
            ("top_p", "1.5"),
            ("min_p", "-1"),
            ("repetition_penalty", "0"),
            ("top_k", "-1"),
        ] {
            let text = format!(r#"{{"do_sample": true, "{name}": {value}}}"#);
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(name), "{text}: {error}");
        }
        assert!(
            parse(r#"{"do_sample": true, "temperature": 0}"#)
                .unwrap_err()
                .to_string()
                .contains("temperature")
        );
        let neutral = r#"{"num_beams": 1, "typical_p": 1.0, "min_length": 0, "stop_strings": null, "bad_words_ids": [],
            "sequence_bias": {}, "guidance_scale": 1, "use_mtp": false, "length_penalty": 2.0, "my_field": 3}"#;
        parse(neutral).unwrap();
        for (name, _) in neutral_values() {
            assert!(!WITHOUT_EFFECT.contains(&name) && !READ.contains(&name), "{name} is listed twice");
        }
    }
}
