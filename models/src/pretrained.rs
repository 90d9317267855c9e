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
        json.remove("torch_dtype");
        json.set("dtype", dtype_name(self.dtype()));
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

fn dtype_name(dtype: FloatDType) -> &'static str {
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
    if let AutoConfig::Qwen3Moe(config) = config
        && config.tie_word_embeddings
        && source.tie_state(&map) == TieState::Different
    {
        tracing::warn!("`tie_word_embeddings` is true, but the checkpoint stores two different matrices: they stay separate");
        config.tie_word_embeddings = false;
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
