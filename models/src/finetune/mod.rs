//! Supervised fine-tuning from a Hugging Face folder to a Hugging Face folder: the main program as a library call.
//!
//! [`Finetune::prepare`] refuses everything that can be refused before weights are read: settings, an unwritable output,
//! the tokenizer, every line of the data. [`Finetune::run`] loads the model (one thread or process per expert-parallel rank), trains,
//! and leaves the result in the output folder.

mod output;
mod run;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::FloatDType;
use burn_ep_backend::comm::Launch;

use burn_moe::backend::Transport;
use burn_moe::data::{ChatTemplate, Conversation, Dataset, EncodeOptions, Layout, Tokenizer, TooLong};
use burn_moe::train::{StepReport, TrainerConfig};
use burn_moe::{Error, Result};

use crate::AutoConfig;
use crate::sizing::{MemoryPlan, MemorySettings};

pub use run::FinetuneReport;

/// Settings of a fine-tuning run.
#[derive(Debug, Clone)]
pub struct FinetuneConfig {
    /// Checkpoint folder.
    pub model: PathBuf,
    /// JSON lines, see [`Dataset::from_jsonl`].
    pub data: PathBuf,
    /// Output folder: the fine-tuned model, and `checkpoint-<step>` folders to resume from.
    pub output: PathBuf,
    /// Continue from the newest checkpoint in the output folder.
    pub resume: bool,
    /// Delete checkpoints of an earlier run in the output folder; otherwise they are an error.
    pub overwrite: bool,
    /// Save after every so many steps, besides the end of the run and interrupts.
    pub save_every: Option<u64>,
    /// Rows per micro-batch over all ranks.
    pub batch: usize,
    /// Most tokens per row.
    pub seq: usize,
    /// Padding or packing.
    pub layout: Layout,
    /// What happens to documents longer than `seq`.
    pub too_long: TooLong,
    /// Seed of the data order.
    pub seed: u64,
    /// Ranks that share the experts. Without a launcher they are threads of this process. Under one (torchrun, srun, mpirun) the
    /// processes of the job are the ranks: 1 stands for all of them, a divisor of their number makes replicas of the experts.
    pub ep: usize,
    /// How tensors travel between the processes of a job.
    pub transport: Transport,
    /// Longest wait for the other processes at the start.
    pub rendezvous: Duration,
    /// A question that the model answers before and after training.
    pub question: Option<String>,
    /// Most tokens of an answer.
    pub max_new_tokens: usize,
    /// Steps, optimizer, schedule, recomputation.
    pub trainer: TrainerConfig,
}

impl FinetuneConfig {
    /// A new run with the defaults of [`TrainerConfig`]: 8 padded rows of at most 2048 tokens per micro-batch, longer documents
    /// refused, one rank, no question.
    pub fn new(model: impl Into<PathBuf>, data: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            data: data.into(),
            output: output.into(),
            resume: false,
            overwrite: false,
            save_every: None,
            batch: 8,
            seq: 2048,
            layout: Layout::default(),
            too_long: TooLong::default(),
            seed: 0,
            ep: 1,
            transport: Transport::default(),
            rendezvous: Duration::from_secs(300),
            question: None,
            max_new_tokens: 64,
            trainer: TrainerConfig::default(),
        }
    }
}

/// What happens in a run, for progress output.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// What a rank will need, before anything is loaded.
    Memory(&'a MemoryPlan),
    /// The model is loaded.
    Loaded {
        /// Parameters of the whole model.
        parameters: u64,
        /// Those that take part in the computation of one token.
        active: u64,
        /// Step at which training continues; 0 for a new run.
        step: u64,
    },
    /// The model's answer to the question, before or after training.
    Answer {
        /// After training.
        trained: bool,
        /// The question.
        question: &'a str,
        /// Decoded without special tokens.
        answer: &'a str,
    },
    /// An optimizer step is done.
    Step(&'a StepReport),
}

/// A checked run.
#[derive(Debug, Clone)]
pub struct Finetune {
    config: FinetuneConfig,
    /// The other processes of the job, if there are any.
    launch: Option<Launch>,
    /// Checkpoint to resume.
    resumed: Option<PathBuf>,
    tokenizer: Tokenizer,
    data: Arc<Dataset>,
    /// The question as tokens.
    prompt: Option<Vec<i32>>,
    /// Longest sequence the model can take.
    max_positions: usize,
}

impl Finetune {
    /// Checks the settings, reads tokenizer and data, and prepares the output folder.
    pub fn prepare(config: FinetuneConfig) -> Result<Self> {
        Self::prepare_as(config, Launch::from_env()?)
    }

    /// [`Finetune::prepare`] as one process of the job `launch`.
    pub fn prepare_as(mut config: FinetuneConfig, launch: Option<Launch>) -> Result<Self> {
        config.trainer.validate()?;
        if config.ep == 0 {
            return Err(Error::config("ep", 0, "at least 1"));
        }
        let launch = launch.filter(|launch| launch.world > 1);
        let mut ranks = config.ep;
        if let Some(Launch { world, .. }) = launch {
            ranks = world;
            if config.ep == 1 {
                config.ep = world;
            }
            if !world.is_multiple_of(config.ep) {
                let expected = format!("a divisor of the {world} processes of the job, or 1 for all of them");
                return Err(Error::config("ep", config.ep, expected));
            }
        }
        if config.seq < 2 {
            return Err(Error::config("seq", config.seq, "at least 2 (a token and its successor)"));
        }
        if config.batch == 0 || !config.batch.is_multiple_of(ranks) {
            let expected = format!("a positive multiple of the {ranks} ranks");
            return Err(Error::config("batch", config.batch, expected));
        }
        let resumed = output::check(&config)?;
        let model = AutoConfig::from_file(config.model.join("config.json"))?;
        if let Some(checkpoint) = &resumed
            && AutoConfig::from_file(checkpoint.join("config.json"))? != model
        {
            let expected = format!("the model that {} was trained from", checkpoint.display());
            return Err(Error::config("model", config.model.display(), expected));
        }
        model.check_expert_parallel(config.ep)?;
        let max_positions = model.capabilities().max_positions.unwrap_or(usize::MAX);
        if config.seq > max_positions {
            let expected = format!("at most the model's {max_positions} positions");
            return Err(Error::config("seq", config.seq, expected));
        }

        let tokenizer = Tokenizer::from_folder(&config.model)?;
        let template = ChatTemplate::from_folder(&config.model, &tokenizer)?;
        let options = EncodeOptions {
            max_len: config.seq,
            too_long: config.too_long,
            vocab_size: model.vocab_size(),
        };
        let data = Dataset::from_jsonl(&config.data, &tokenizer, template.as_ref(), &options)?;
        let prompt = match (&config.question, &template) {
            (None, _) => None,
            (Some(question), Some(template)) => {
                let message = serde_json::json!({"role": "user", "content": question});
                Some(Conversation::new(vec![message], None)?.encode_prompt(&tokenizer, template)?)
            }
            (Some(question), None) => Some(tokenizer.encode(question, true)?.ids),
        };
        if let Some(prompt) = prompt.as_ref().filter(|prompt| prompt.len() >= max_positions) {
            let expected = format!("fewer than the model's {max_positions} positions");
            return Err(Error::config("question", format!("{} tokens", prompt.len()), expected));
        }
        Ok(Self {
            config,
            launch,
            resumed,
            tokenizer,
            data: Arc::new(data),
            prompt,
            max_positions,
        })
    }

    /// The settings.
    pub fn config(&self) -> &FinetuneConfig {
        &self.config
    }

    /// Whether this process speaks for the job: it alone reports progress.
    pub fn is_first(&self) -> bool {
        self.launch.as_ref().is_none_or(|launch| launch.rank == 0)
    }

    /// Memory of each rank.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`].
    pub fn memory_plan(&self, model: &AutoConfig) -> Result<MemoryPlan> {
        let config = &self.config;
        let world = self.launch.as_ref().map_or(config.ep, |launch| launch.world);
        let settings = MemorySettings {
            dtype: model.common().dtype.unwrap_or(FloatDType::F32),
            optimizer: Some(config.trainer.optimizer.clone()),
            micro_batches: config.trainer.micro_batches,
            recompute: config.trainer.recompute,
            world,
            ep: config.ep,
            shard_optimizer: config.trainer.shard_optimizer,
            gradients_kept: !config.trainer.optimizer_in_backward,
            ..MemorySettings::new(config.batch / world, config.seq)
        };
        MemoryPlan::new(model, &settings)
    }

    /// The encoded data set.
    pub fn data(&self) -> &Dataset {
        &self.data
    }
}
