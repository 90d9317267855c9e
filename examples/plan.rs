//! What a job would need and how fast it would be, on paper: memory of each GPU, bytes exchanged in a step, tokens per second.
//!
//! ```text
//! cargo run --release --example plan -- --preset qwen3_30b_a3b --gpus 8 --ep 8
//! cargo run --release --example plan -- --preset nemotron3_ultra --gpus 128 --ep 64 --rows 2 --recompute
//! cargo run --release --example plan -- --model path/to/checkpoint --gpus 16 --ep 8 --network 25
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use burn_moe::Result;
use burn_moe::optim::{AdamWConfig, MomentDType};
use burn_moe::train::Recompute;
use burn_moe_examples::say;
use burn_moe_models::AutoConfig;
use burn_moe_models::benchmark::Preset;
use burn_moe_models::sizing::{Cluster, JobPlan, JobSettings, MemorySettings};
use clap::{Parser, ValueEnum};

/// Optimizer state of a parameter.
#[derive(Clone, Copy, ValueEnum)]
enum Optimizer {
    /// fp32 moments and an fp32 copy of the weights
    Master,
    /// Moments in the dtype of the parameters
    Param,
    /// 8-bit moments
    Eight,
}

/// Plan a fine-tuning job.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Published size: qwen3_30b_a3b, nemotron3_nano, nemotron3_ultra, gpt_oss_20b, deepseek_v3, ..
    #[arg(long, default_value = "qwen3_30b_a3b", conflicts_with = "model")]
    preset: String,
    /// Checkpoint folder or config.json instead
    #[arg(long)]
    model: Option<PathBuf>,
    /// GPUs of the job
    #[arg(long, default_value_t = 8)]
    gpus: usize,
    /// GPUs of one host
    #[arg(long, default_value_t = 8)]
    node: usize,
    /// GPUs that share the experts [default: all]
    #[arg(long)]
    ep: Option<usize>,
    /// Rows of a micro-batch on each GPU
    #[arg(long, default_value_t = 1)]
    rows: usize,
    /// Micro-batches per step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Tokens per row
    #[arg(long, default_value_t = 4096)]
    seq: usize,
    /// Compute activations again in the backward pass
    #[arg(long)]
    recompute: bool,
    #[arg(long, value_enum, default_value = "param")]
    optimizer: Optimizer,
    /// Every rank keeps the whole optimizer state
    #[arg(long)]
    no_shards: bool,
    /// Memory of a GPU in GB
    #[arg(long, default_value_t = 141.0)]
    memory: f64,
    /// Dense bf16 peak of a GPU in TFLOP/s
    #[arg(long, default_value_t = 989.5)]
    peak: f64,
    /// Part of the peak that products reach
    #[arg(long, default_value_t = 0.5)]
    efficiency: f64,
    /// GB/s of a GPU each way inside a host
    #[arg(long, default_value_t = 257.0)]
    nvlink: f64,
    /// GB/s of a GPU each way to other hosts
    #[arg(long, default_value_t = 45.0)]
    network: f64,
}

fn run(args: &Args) -> Result<()> {
    let config = match &args.model {
        Some(path) => AutoConfig::from_file(path)?,
        None => Preset::find(&args.preset)?.config(None, None)?,
    };
    let (master_weights, moments) = match args.optimizer {
        Optimizer::Master => (true, MomentDType::F32),
        Optimizer::Param => (false, MomentDType::Param),
        Optimizer::Eight => (false, MomentDType::Block8),
    };
    let memory = MemorySettings {
        optimizer: Some(AdamWConfig {
            master_weights,
            moments,
            ..AdamWConfig::default()
        }),
        micro_batches: args.accumulation,
        recompute: if args.recompute { Recompute::All } else { Recompute::None },
        ep: args.ep.unwrap_or(args.gpus),
        shard_optimizer: !args.no_shards,
        ..MemorySettings::new(args.rows, args.seq)
    };
    let cluster = Cluster {
        node: args.node,
        memory: (args.memory * 1e9) as u64,
        peak: args.peak * 1e12,
        efficiency: args.efficiency,
        node_bandwidth: args.nvlink * 1e9,
        network_bandwidth: args.network * 1e9,
        ..Cluster::h200(args.gpus)
    };
    let plan = JobPlan::new(&config, &cluster, &JobSettings { memory, with_update: true })?;
    let name = args.model.as_ref().map_or(args.preset.clone(), |path| path.display().to_string());
    let billions = |n: u64| n as f64 / 1e9;
    let count = config.parameters();
    say!(
        "{name}: {:.1} billion parameters, {:.1} billion for a token",
        billions(count.total()),
        billions(count.active())
    );
    say!("{plan}");
    Ok(())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
