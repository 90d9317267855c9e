//! Time whole training steps of a model with published widths and print one JSON line.
//!
//! ```text
//! cargo run --release --example benchmark -- --preset tiny_qwen3_moe --batch 2 --seq 128
//! cargo run --release --features cuda --example benchmark -- --preset qwen3_30b_a3b --layers 8 --batch 2
//! ```
//!
//! The work is `burn_moe_models::benchmark`; this file is its command line. `benches/compare.py` puts the numbers beside those
//! of transformers.

use std::path::PathBuf;

use burn::tensor::FloatDType;
use burn_moe::Result;
use burn_moe::train::Recompute;
use burn_moe_examples::{check_backend, log_warnings, recompute, say};
use burn_moe_models::benchmark::{BenchmarkConfig, BenchmarkOptimizer, H200_BF16_TFLOPS, run};
use clap::{Parser, ValueEnum};

#[derive(Clone, Copy, ValueEnum)]
enum Routing {
    /// As the router decides
    Real,
    /// Every expert the same number of rows
    Balanced,
}

#[derive(Clone, Copy, ValueEnum)]
enum OptimizerArg {
    None,
    /// AdamW, moments in the dtype of the parameters
    Adamw,
    /// The same, rounded stochastically
    AdamwStochastic,
    /// AdamW, 8-bit moments, parameters rounded stochastically
    #[value(name = "adamw-8bit")]
    Adamw8bit,
    /// AdamW, fp32 moments and fp32 copy of the parameters
    AdamwMaster,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    Bf16,
    Fp16,
    Fp32,
}

/// Time whole training steps on random tokens.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Size: qwen3_30b_a3b, nemotron3_nano, gpt_oss_20b, deepseek_v3, qwen3_8b, tiny_qwen3_moe, tiny_nemotron_h, tiny_gpt_oss or tiny_deepseek_v3
    #[arg(long, default_value = "qwen3_30b_a3b")]
    preset: String,
    /// First layers of the model [default: all]
    #[arg(long)]
    layers: Option<usize>,
    /// Routed experts per layer [default: as published]
    #[arg(long)]
    experts: Option<usize>,
    /// Rows per step
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens per row
    #[arg(long, default_value_t = 4096)]
    seq: usize,
    #[arg(long, value_enum, default_value = "real")]
    routing: Routing,
    /// Blocks whose activations are computed again in the backward pass: none, all, every-second, or a number, counted from the
    /// first block
    #[arg(long, default_value = "none", value_parser = recompute)]
    recompute: Recompute,
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: OptimizerArg,
    /// Update each part of the model in the backward pass: one block's gradients at a time in memory
    #[arg(long)]
    optimizer_in_backward: bool,
    /// Bound of the gradient norm; 0: no clipping. With --optimizer-in-backward it bounds a running norm
    #[arg(long, default_value_t = 1.0)]
    max_grad_norm: f64,
    /// Counted steps, of each loop
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Steps before the counted ones
    #[arg(long, default_value_t = 3)]
    warmup: usize,
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// Seed of weights and tokens
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 1e-5)]
    lr: f64,
    /// Load this checkpoint folder instead of drawing weights
    #[arg(long)]
    from_safetensors: Option<PathBuf>,
    /// Write the weights to this folder and load them from there, which measures loading
    #[arg(long)]
    write_safetensors: Option<PathBuf>,
    /// Train on these tokens (32-bit little-endian ids, batch * seq for each step) instead of one random batch
    #[arg(long)]
    tokens: Option<PathBuf>,
    /// Leave the steps without optimizer out
    #[arg(long)]
    skip_plain: bool,
    /// Peak in TFLOP/s that MFU is relative to [default: H200 SXM, dense bf16]
    #[arg(long, default_value_t = H200_BF16_TFLOPS, hide_default_value = true)]
    peak_tflops: f64,
    /// Backend: flex (CPU), or cuda in a build with `--features cuda` [default: what this build runs on]
    #[arg(long, default_value = burn_moe::backend::NAME, hide_default_value = true)]
    backend: String,
}

impl Args {
    fn config(self) -> Result<BenchmarkConfig> {
        check_backend(&self.backend)?;
        Ok(BenchmarkConfig {
            preset: self.preset,
            layers: self.layers,
            experts: self.experts,
            batch: self.batch,
            seq: self.seq,
            balanced: matches!(self.routing, Routing::Balanced),
            recompute: self.recompute,
            optimizer_in_backward: self.optimizer_in_backward,
            max_grad_norm: Some(self.max_grad_norm).filter(|max| *max != 0.0),
            optimizer: match self.optimizer {
                OptimizerArg::None => BenchmarkOptimizer::None,
                OptimizerArg::Adamw => BenchmarkOptimizer::Adamw,
                OptimizerArg::AdamwStochastic => BenchmarkOptimizer::AdamwStochastic,
                OptimizerArg::Adamw8bit => BenchmarkOptimizer::Adamw8bit,
                OptimizerArg::AdamwMaster => BenchmarkOptimizer::AdamwMaster,
            },
            steps: self.steps,
            warmup: self.warmup,
            dtype: match self.dtype {
                DtypeArg::Bf16 => FloatDType::BF16,
                DtypeArg::Fp16 => FloatDType::F16,
                DtypeArg::Fp32 => FloatDType::F32,
            },
            seed: self.seed,
            lr: self.lr,
            from_safetensors: self.from_safetensors,
            write_safetensors: self.write_safetensors,
            tokens: self.tokens,
            skip_plain: self.skip_plain,
            peak_tflops: self.peak_tflops,
        })
    }
}

fn main() -> std::process::ExitCode {
    log_warnings();
    let report = Args::parse()
        .config()
        .and_then(|config| run(&config, &mut |phase| eprintln!("{phase} ..")));
    match report {
        Ok(report) => {
            say!("{}", serde_json::to_string(&report).expect("numbers and names are JSON"));
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
