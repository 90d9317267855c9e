//! Fine-tune a mixture-of-experts checkpoint on chat data: Hugging Face folder in, Hugging Face folder out.
//!
//! ```text
//! cargo run --release --example finetune_nemotron
//! cargo run --release --example finetune_nemotron -- --model <folder or org/name> --data my.jsonl --output out/mine
//! ```
//!
//! Without arguments it trains the shipped tiny Nemotron-H on the shipped questions about units of measurement. The work is
//! `burn_moe_models::finetune`; this file is its command line.

use std::path::PathBuf;
use std::process::ExitCode;

use burn_moe::Result;
use burn_moe::backend::Transport;
use burn_moe::checkpoint::hub::{HubOptions, locate};
use burn_moe::data::{Layout, TooLong};
use burn_moe::optim::{AdamWConfig, MomentDType};
use burn_moe::train::{Decay, Interrupt, Recompute, RunEnd, Schedule, TrainerConfig};
use burn_moe_examples::{ProgressLine, asset, check_backend, log_warnings, recompute, say};
use burn_moe_models::finetune::{Event, Finetune, FinetuneConfig};
use clap::{Parser, ValueEnum};

#[derive(Clone, Copy, ValueEnum)]
enum DecayArg {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, ValueEnum)]
enum MomentsArg {
    Fp32,
    /// The dtype of the parameter
    Param,
    /// 8-bit codes with a scale for every 256 elements
    #[value(name = "8bit")]
    Block8,
}

/// Fine-tune a mixture-of-experts language model on chat data.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder, or org/name on the Hugging Face Hub [default: the shipped tiny Nemotron-H]
    #[arg(long)]
    model: Option<String>,
    /// Branch, tag or commit on the Hub
    #[arg(long, requires = "model")]
    revision: Option<String>,
    /// JSON lines with `messages`, `prompt` and `completion`, or `text` [default: the shipped questions]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Output folder [default: out/finetune_nemotron, overwritten]
    #[arg(long)]
    output: Option<PathBuf>,
    /// Continue from the newest checkpoint in the output folder
    #[arg(long)]
    resume: bool,
    /// Replace the checkpoints and weights that are in the output folder
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Optimizer steps
    #[arg(long, default_value_t = 400)]
    steps: u64,
    /// Rows per micro-batch, over all ranks
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Micro-batches per optimizer step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Most tokens per row
    #[arg(long, default_value_t = 128)]
    seq: usize,
    /// Several documents per row instead of padding
    #[arg(long)]
    packing: bool,
    /// Cut documents that are too long instead of refusing them
    #[arg(long)]
    truncate: bool,
    /// Peak learning rate
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Learning rate after the warm-up
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: DecayArg,
    /// Warm-up steps [default: a twentieth of the steps]
    #[arg(long)]
    warmup: Option<u64>,
    /// Save every so many steps, besides the end
    #[arg(long)]
    save_every: Option<u64>,
    /// Blocks whose activations are computed again in the backward pass: none, all, every-second, or a number, counted from the
    /// first block; without a value all
    #[arg(long, default_value = "none", num_args = 0..=1, default_missing_value = "all", value_parser = recompute)]
    recompute: Recompute,
    /// What the optimizer keeps of each parameter
    #[arg(long, value_enum, default_value = "fp32")]
    moments: MomentsArg,
    /// No fp32 copy of bf16 parameters; they are rounded stochastically instead
    #[arg(long)]
    no_master_weights: bool,
    /// Update each part of the model in the backward pass: one block's gradients at a time in memory. The gradient norm is then
    /// bounded by a running norm
    #[arg(long)]
    optimizer_in_backward: bool,
    /// Ranks that share the experts: threads of this process; among the processes that torchrun, srun or mpirun started, 1 means
    /// all of them, a divisor of their number makes replicas
    #[arg(long, default_value_t = 1)]
    ep: usize,
    /// How tensors travel between processes: auto, nccl (a build with `--features nccl`), peer (GPUs of one
    /// host) or host
    #[arg(long, default_value = "auto")]
    transport: Transport,
    /// Seed of the data order
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Question to answer before and after training
    #[arg(long, default_value = "How many kilograms are in half a tonne?")]
    question: String,
    /// Backend: flex (CPU), or cuda in a build with `--features cuda` [default: what this build runs on]
    #[arg(long, default_value = burn_moe::backend::NAME, hide_default_value = true)]
    backend: String,
}

impl Args {
    fn config(self) -> Result<FinetuneConfig> {
        check_backend(&self.backend)?;
        let decay = match self.schedule {
            DecayArg::Constant => Decay::Constant,
            DecayArg::Linear => Decay::Linear,
            DecayArg::Cosine => Decay::Cosine,
        };
        let model = match self.model {
            Some(model) => {
                let hub = HubOptions {
                    revision: self.revision,
                    progress: true,
                    ..HubOptions::default()
                };
                locate(&model, &hub)?
            }
            None => asset("tiny-nemotron-h"),
        };
        let overwrite = self.overwrite || (self.output.is_none() && !self.resume);
        let data = self.data.unwrap_or_else(|| asset("instructions.jsonl"));
        let output = self.output.unwrap_or_else(|| "out/finetune_nemotron".into());
        Ok(FinetuneConfig {
            overwrite,
            resume: self.resume,
            save_every: self.save_every,
            batch: self.batch,
            seq: self.seq,
            layout: if self.packing { Layout::Packed } else { Layout::PadToLongest },
            too_long: if self.truncate { TooLong::Truncate } else { TooLong::Error },
            seed: self.seed,
            ep: self.ep,
            transport: self.transport,
            question: Some(self.question).filter(|q| !q.is_empty()),
            trainer: TrainerConfig {
                steps: self.steps,
                micro_batches: self.accumulation,
                schedule: Schedule {
                    lr: self.lr,
                    decay,
                    warmup_steps: self.warmup.unwrap_or(self.steps / 20),
                    ..Schedule::default()
                },
                recompute: self.recompute,
                optimizer_in_backward: self.optimizer_in_backward,
                optimizer: AdamWConfig {
                    moments: match self.moments {
                        MomentsArg::Fp32 => MomentDType::F32,
                        MomentsArg::Param => MomentDType::Param,
                        MomentsArg::Block8 => MomentDType::Block8,
                    },
                    master_weights: !self.no_master_weights,
                    stochastic_rounding: self.no_master_weights,
                    ..AdamWConfig::default()
                },
                ..TrainerConfig::default()
            },
            ..FinetuneConfig::new(model, data, output)
        })
    }
}

fn run(args: Args) -> Result<ExitCode> {
    let finetune = Finetune::prepare(args.config()?)?;
    let interrupt = Interrupt::on_signals()?;
    let first = finetune.is_first();
    if first {
        say!("data: {}", finetune.data().report());
    }
    let progress = ProgressLine::new(finetune.config().trainer.steps);
    let report = finetune.run(&interrupt, |event| match event {
        Event::Memory(plan) => say!("{plan}"),
        Event::Loaded { parameters, active, step } => {
            say!("model: {parameters} parameters, {active} active per token; starting after step {step}");
        }
        Event::Answer { trained, question, answer } => {
            progress.finish();
            say!(
                "{} training\n  Q: {question}\n  A: {answer}",
                if trained { "after" } else { "before" }
            );
        }
        Event::Step(report) => progress.show(report),
    })?;
    if first {
        progress.finish();
        if let Some((early, late)) = report.first_and_last_loss() {
            say!("loss {early:.4} -> {late:.4}, mean of the first and the last tenth of the steps");
        }
        say!("saved {}", finetune.config().output.display());
    }
    if report.end == RunEnd::Interrupted {
        if first {
            say!("interrupted after step {}; continue with --resume", report.step);
        }
        return Ok(ExitCode::from(130)); // 128 + SIGINT, as shells report it
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    log_warnings();
    match run(Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
