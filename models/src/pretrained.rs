//! From a checkpoint folder to a model.

use std::path::Path;

use burn::tensor::FloatDType;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;
use burn_moe::Result;
#[cfg(feature = "hub")]
use burn_moe::checkpoint::hub::{self, HubOptions};
use burn_moe::checkpoint::{self, CheckpointSource, ConfigJson, EpRank, LoadOptions, LoadReport, SaveOptions, SaveReport, TieState};

use crate::auto::{AutoModelForCausalLm, FromConfigOptions};
use crate::generation::GenerationConfig;
use crate::json::Fields;
use crate::registry::AutoConfig;

/// How to load a checkpoint.
#[derive(Debug, Clone)]
pub struct FromPretrainedOptions {
    /// Dtype of the parameters; None: the config's, or as stored when it names none. Parameters that a family keeps in fp32
    /// stay in fp32.
    pub dtype: Option<FloatDType>,
    /// Hold only this rank's experts.
    pub ep: Option<EpGroup>,
    /// Refuse missing and unused tensors. Otherwise missing ones keep their initial values.
    pub strict: bool,
    /// Seed of the initial values of missing tensors.
    pub seed: u64,
    /// Accept NaN and infinite weights.
    pub allow_nonfinite: bool,
    /// Show a progress bar when stderr is a terminal.
    pub progress: bool,
    /// Where `org/name` is looked for when it is not a local folder.
    #[cfg(feature = "hub")]
    pub hub: HubOptions,
}

impl Default for FromPretrainedOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            ep: None,
            strict: true,
            seed: 0,
            allow_nonfinite: false,
            progress: false,
            #[cfg(feature = "hub")]
            hub: HubOptions::default(),
        }
    }
}

/// A loaded model and where it came from.
#[derive(Debug)]
pub struct Pretrained<B: MoeBackend> {
    pub model: AutoModelForCausalLm<B>,
    /// The opened checkpoint: saving writes its layout and carries its unread tensors through.
    pub source: CheckpointSource,
    /// What was loaded from where.
    pub report: LoadReport,
}

impl<B: MoeBackend> Pretrained<B> {
    /// How the publisher means the model to be sampled; None without a `generation_config.json`.
    ///
    /// # Errors
    /// See [`GenerationConfig::from_folder`].
    pub fn generation_config(&self) -> Result<Option<GenerationConfig>> {
        GenerationConfig::from_folder(self.source.dir())
    }

    /// Tokens that end a generated text: `eos_token_id` of `config.json` and of `generation_config.json`, which may name more.
    ///
    /// # Errors
    /// When `generation_config.json` is there but cannot be read.
    pub fn stop_tokens(&self) -> Result<Vec<i32>> {
        let mut tokens = self.model.config().common().eos_token_ids.clone();
        let path = self.source.dir().join("generation_config.json");
        if path.exists() {
            let json = ConfigJson::read(&path)?;
            tokens.extend(Fields::new(json.fields()).token_ids("eos_token_id")?);
        }
        tokens.sort_unstable();
        tokens.dedup();
        Ok(tokens)
    }
}

impl<B: MoeBackend> AutoModelForCausalLm<B> {
    /// Load a Hugging Face checkpoint: a local folder or, with the feature `hub`, a repository `org/name`, whose files are
    /// downloaded into the cache that other Hub clients share.
    ///
    /// # Errors
    /// In this order, each before anything of the next is read: damaged files and headers, an unknown family, a config that
    /// cannot be honoured or does not divide over the ranks, names and shapes that do not fit, weights that are not finite.
    pub fn from_pretrained(path: impl AsRef<Path>, options: &FromPretrainedOptions, device: &B::Device) -> Result<Pretrained<B>> {
        let source = open(path.as_ref(), options)?;
        let config = AutoConfig::from_json(source.config())?;
        Self::load(source, config, options, device)
    }

    /// Load the weights of an opened checkpoint into a model of `config`, which may differ from the one in the folder, e.g. in
    /// the parity switches of Nemotron-H.
    pub fn load(
        source: CheckpointSource,
        mut config: AutoConfig,
        options: &FromPretrainedOptions,
        device: &B::Device,
    ) -> Result<Pretrained<B>> {
        untie_if_stored_apart(&mut config, &source);
        let model = Self::from_config(&config, &from_config_options(&config, options), device)?;
        let (model, report) = checkpoint::load(model, &source, &config.weight_map(), &load_options(&config, options))?;
        Ok(Pretrained { model, source, report })
    }

    /// What [`AutoModelForCausalLm::from_pretrained`] would do, from config and headers alone: nothing is allocated. Names
    /// and shapes that do not fit are listed in the report.
    pub fn inspect(path: impl AsRef<Path>, options: &FromPretrainedOptions, device: &B::Device) -> Result<(AutoConfig, LoadReport)> {
        let source = open(path.as_ref(), options)?;
        let mut config = AutoConfig::from_json(source.config())?;
        untie_if_stored_apart(&mut config, &source);
        let model = Self::from_config(&config, &from_config_options(&config, options), device)?;
        let report = checkpoint::inspect(&model, &source, &config.weight_map(), &load_options(&config, options))?;
        Ok((config, report))
    }
}

impl<B: MoeBackend> AutoModelForCausalLm<B> {
    /// Write a Hugging Face folder. With `options.like`, names, layout, dtypes and unread tensors are those of the checkpoint
    /// the model came from; without, the family's published layout. The config is the model's own unless `options.config`
    /// or `options.like` gives one.
    ///
    /// # Errors
    /// When the folder cannot be written; the last good save in it is then still whole.
    pub fn save_pretrained(&self, dir: impl AsRef<Path>, options: &SaveOptions<'_>) -> Result<SaveReport> {
        let config = self.config();
        let map = config.weight_map();
        if options.like.is_some() || options.config.is_some() {
            return checkpoint::save(self, &map, dir, options);
        }
        let mut json = ConfigJson::from_fields(config.raw().clone());
        json.set("architectures", vec![config.architecture()]);
        json.set("model_type", config.model_type());
        // In the style of the file: `dtype` was `torch_dtype` before transformers 4.56.
        let legacy = config.raw().contains_key("torch_dtype") && !config.raw().contains_key("dtype");
        json.remove("torch_dtype");
        json.set(if legacy { "torch_dtype" } else { "dtype" }, dtype_name(self.dtype()));
        let options = SaveOptions {
            config: Some(&json),
            ..*options
        };
        checkpoint::save(self, &map, dir, &options)
    }
}

#[cfg(feature = "hub")]
fn open(path: &Path, options: &FromPretrainedOptions) -> Result<CheckpointSource> {
    // A path that is no text cannot be a repository.
    match path.to_str() {
        Some(name) => CheckpointSource::open(hub::locate(name, &options.hub)?),
        None => CheckpointSource::open(path),
    }
}

#[cfg(not(feature = "hub"))]
fn open(path: &Path, _options: &FromPretrainedOptions) -> Result<CheckpointSource> {
    CheckpointSource::open(path)
}

pub(crate) fn dtype_name(dtype: FloatDType) -> &'static str {
    match dtype {
        FloatDType::F64 => "float64",
        FloatDType::F32 | FloatDType::Flex32 => "float32",
        FloatDType::F16 => "float16",
        FloatDType::BF16 => "bfloat16",
    }
}

/// A file with two different matrices under a config that ties them keeps both; the config is saved as it came.
fn untie_if_stored_apart(config: &mut AutoConfig, source: &CheckpointSource) {
    let map = config.weight_map();
    if source.tie_state(&map) == TieState::Different && config.untie() {
        tracing::warn!("`tie_word_embeddings` is true, but the checkpoint stores two different matrices: they stay separate");
    }
}

fn dtype(config: &AutoConfig, options: &FromPretrainedOptions) -> Option<FloatDType> {
    options.dtype.or(config.common().dtype)
}

fn from_config_options(config: &AutoConfig, options: &FromPretrainedOptions) -> FromConfigOptions {
    FromConfigOptions {
        dtype: dtype(config, options),
        seed: options.seed,
        ep: options.ep.clone(),
    }
}

fn load_options(config: &AutoConfig, options: &FromPretrainedOptions) -> LoadOptions {
    LoadOptions {
        dtype: dtype(config, options).map(Into::into),
        strict: options.strict,
        allow_nonfinite: options.allow_nonfinite,
        ep: options.ep.as_ref().map_or_else(EpRank::default, |ep| EpRank {
            rank: ep.rank(),
            size: ep.size(),
        }),
        progress: options.progress,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::{Tensor, TensorData};
    use burn_moe::backend::{Device, Infer};

    use super::*;

    type Model = AutoModelForCausalLm<Infer>;

    const NEMOTRON: &str = r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "vocab_size": 20, "hidden_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "mamba_num_heads": 2, "mamba_head_dim": 4,
        "n_groups": 1, "ssm_state_size": 4, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "moe_shared_expert_intermediate_size": 5, "intermediate_size": 7, "eos_token_id": 2, "my_own_field": [1, 2]}"#;
    const QWEN: &str = r#"{"model_type": "qwen3_moe", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "tie_word_embeddings": true}"#;

    const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "intermediate_size": 6}"#;
    const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 6, "torch_dtype": "bfloat16", "rope_theta": 500.0}"#;
    const GPT: &str = r#"{"model_type": "gpt_oss", "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 2,
        "intermediate_size": 32}"#;

    fn build(text: &str, dtype: FloatDType) -> Model {
        let config = AutoConfig::from_text(text).unwrap();
        let options = FromConfigOptions {
            dtype: Some(dtype),
            seed: 4,
            ..Default::default()
        };
        Model::from_config(&config, &options, &Device::default()).unwrap()
    }

    fn load(dir: &Path) -> Pretrained<Infer> {
        Model::from_pretrained(dir, &Default::default(), &Device::default()).unwrap()
    }

    /// Values with their dtypes, by module path.
    fn tensors(model: &Model) -> BTreeMap<String, TensorData> {
        struct Visitor(Vec<String>, BTreeMap<String, TensorData>);
        impl ModuleVisitor<Infer> for Visitor {
            fn enter_module(&mut self, name: &str, _container: &str) {
                self.0.push(name.into());
            }
            fn exit_module(&mut self, _name: &str, _container: &str) {
                self.0.pop();
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Infer, D>>) {
                self.1.insert(self.0.join("."), param.val().into_data());
            }
        }
        let mut visitor = Visitor(Vec::new(), BTreeMap::new());
        model.visit(&mut visitor);
        visitor.1
    }

    #[test]
    fn a_model_from_a_config_is_saved_in_the_published_layout_and_comes_back_exactly() {
        for (text, single) in [
            (NEMOTRON, "backbone.layers.1.mixer.experts.2.up_proj.weight"),
            (QWEN, "model.layers.0.mlp.experts.2.gate_proj.weight"),
            (MIXTRAL, "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
            (LLAMA, "model.layers.0.mlp.gate_proj.weight"),
            (GPT, "model.layers.0.mlp.experts.gate_up_proj"),
        ] {
            for dtype in [FloatDType::F32, FloatDType::BF16] {
                let dir = tempfile::tempdir().unwrap();
                let model = build(text, dtype);
                model.save_pretrained(dir.path(), &Default::default()).unwrap();
                let loaded = load(dir.path());
                assert!(loaded.source.contains(single), "{:?}", loaded.source.names());
                assert!(loaded.report.is_exact(), "{}", loaded.report);
                assert_eq!(tensors(&loaded.model), tensors(&model));
                assert_eq!(loaded.model.dtype(), dtype);
            }
        }
    }

    #[test]
    fn the_written_config_keeps_unknown_fields_and_names_the_architecture() {
        let dir = tempfile::tempdir().unwrap();
        build(NEMOTRON, FloatDType::BF16)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let json = ConfigJson::read(&dir.path().join("config.json")).unwrap();
        assert_eq!(json.get("my_own_field"), Some(&serde_json::json!([1, 2])));
        assert_eq!(json.get("architectures"), Some(&serde_json::json!(["NemotronHForCausalLM"])));
        assert_eq!(json.get("dtype"), Some(&serde_json::json!("bfloat16")));
    }

    /// A config of transformers 4 stays one.
    #[test]
    fn the_written_config_keeps_its_style() {
        let dir = tempfile::tempdir().unwrap();
        build(LLAMA, FloatDType::F32)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let json = ConfigJson::read(&dir.path().join("config.json")).unwrap();
        assert_eq!(json.get("torch_dtype"), Some(&serde_json::json!("float32")));
        assert_eq!(json.get("rope_theta"), Some(&serde_json::json!(500.0)));
        assert_eq!((json.get("dtype"), json.get("rope_parameters")), (None, None));
    }

    #[test]
    fn the_dtype_can_be_chosen_but_some_parameters_stay_in_fp32() {
        let dir = tempfile::tempdir().unwrap();
        build(NEMOTRON, FloatDType::F32)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let options = FromPretrainedOptions {
            dtype: Some(FloatDType::BF16),
            ..Default::default()
        };
        let model = Model::from_pretrained(dir.path(), &options, &Device::default()).unwrap().model;
        assert_eq!(model.dtype(), FloatDType::BF16);
        let wide: Vec<String> = tensors(&model)
            .into_iter()
            .filter(|(_, data)| data.dtype == burn::tensor::DType::F32)
            .map(|(path, _)| path.rsplit('.').next().unwrap_or_default().to_string())
            .collect();
        assert_eq!(wide, ["A_log", "D", "e_score_correction_bias"]);
    }

    #[test]
    fn missing_tensors_keep_their_initial_values_when_that_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        build(QWEN, FloatDType::F32)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let text = QWEN.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
        std::fs::write(dir.path().join("config.json"), &text).unwrap();
        let strict = Model::from_pretrained(dir.path(), &Default::default(), &Device::default());
        assert!(strict.unwrap_err().to_string().contains("layers.1."));
        let options = FromPretrainedOptions {
            strict: false,
            seed: 4,
            ..Default::default()
        };
        let loaded = Model::from_pretrained(dir.path(), &options, &Device::default()).unwrap();
        assert!(!loaded.report.missing.is_empty());
        assert_eq!(tensors(&loaded.model), tensors(&build(&text, FloatDType::F32)));
    }

    /// Two different matrices under a config that ties them stay two, also after a save.
    #[test]
    fn matrices_stored_apart_are_not_tied() {
        let dir = tempfile::tempdir().unwrap();
        let untied = build(&QWEN.replace("true", "false"), FloatDType::F32);
        untied.save_pretrained(dir.path(), &Default::default()).unwrap();
        let path = dir.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        let tied_config = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
        assert_ne!(config, tied_config);
        std::fs::write(&path, &tied_config).unwrap();

        let loaded = load(dir.path());
        assert_eq!(tensors(&loaded.model), tensors(&untied));
        let out = tempfile::tempdir().unwrap();
        let options = SaveOptions {
            like: Some(&loaded.source),
            ..Default::default()
        };
        loaded.model.save_pretrained(out.path(), &options).unwrap();
        assert_eq!(std::fs::read_to_string(out.path().join("config.json")).unwrap(), tied_config);
        assert_eq!(tensors(&load(out.path()).model), tensors(&untied));
    }

    #[test]
    fn stop_tokens_come_from_both_configs() {
        let dir = tempfile::tempdir().unwrap();
        build(NEMOTRON, FloatDType::F32)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        assert_eq!(load(dir.path()).stop_tokens().unwrap(), [2]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [11, 2]}"#).unwrap();
        assert_eq!(load(dir.path()).stop_tokens().unwrap(), [2, 11]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": "end"}"#).unwrap();
        assert!(load(dir.path()).stop_tokens().unwrap_err().to_string().contains("eos_token_id"));
    }
}
