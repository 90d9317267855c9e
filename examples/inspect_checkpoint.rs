//! Print what is in a checkpoint and whether it would load: family, parameter counts, mapping and load report, from config
//! and headers alone. No weights are read and no model is allocated, so a checkpoint of any size takes a moment. With `--load`
//! the weights are loaded as well, and the line at the end says how fast.
//!
//!     cargo run --release --example inspect_checkpoint -- path/to/folder
//!     cargo run --release --example inspect_checkpoint -- org/name --offline
//!     cargo run --release --example inspect_checkpoint -- path/to/folder --load

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::backend::Backend;
use burn_ep_backend::MoeBackend;
use burn_moe::Error;
use burn_moe::backend::{Device, Infer};
use burn_moe::checkpoint::hub::{HubOptions, locate};
use burn_moe_examples::{asset, log_warnings, say};
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};
use clap::Parser;

#[derive(Parser)]
#[command(about = "Print family, parameter counts, mapping and load report of a checkpoint")]
struct Args {
    /// Folder, or `org/name` on the Hugging Face Hub [default: the tiny Nemotron-H shipped with the examples].
    model: Option<String>,
    /// Branch, tag or commit on the Hub.
    #[arg(long)]
    revision: Option<String>,
    /// Folder of downloaded repositories.
    #[arg(long)]
    cache_dir: Option<PathBuf>,
    /// Use downloaded repositories only.
    #[arg(long)]
    offline: bool,
    /// List every parameter with its shape and dtype.
    #[arg(long)]
    tensors: bool,
    /// Load the weights too, so many times, and print speed and host memory.
    #[arg(long, value_name = "TIMES", num_args = 0..=1, default_missing_value = "1")]
    load: Option<usize>,
}

fn main() {
    log_warnings();
    if let Err(error) = inspect(&Args::parse()) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn inspect(args: &Args) -> burn_moe::Result<()> {
    let hub = HubOptions {
        revision: args.revision.clone(),
        cache_dir: args.cache_dir.clone(),
        offline: args.offline.then_some(true),
        progress: true,
        ..HubOptions::default()
    };
    let dir = match &args.model {
        Some(model) => locate(model, &hub)?,
        None => asset("tiny-nemotron-h"),
    };
    let (config, report) = AutoModelForCausalLm::<Infer>::inspect(&dir, &FromPretrainedOptions::default(), &Device::default())?;

    say!("family: {} ({})", config.model_type(), config.architecture());
    say!("\nparameters\n{}", config.parameters());
    say!("\nmapping (parameter <- stored names)");
    for line in report.mapping() {
        say!("  {line}");
    }
    say!("\nload report\n{report}");
    if args.tensors {
        for tensor in &report.loaded {
            say!("{:<60} {:?} {} (stored {})", tensor.path, tensor.shape, tensor.dtype, tensor.stored);
        }
    }
    if !report.is_exact() {
        return Err(Error::Mismatch("the checkpoint does not fit the model; see the load report".into()));
    }
    say!("It loads.");
    for _ in 0..args.load.unwrap_or(0) {
        load(&dir)?;
    }
    Ok(())
}

/// Loads the weights onto the device of this build and says how fast that was. The device itself is started before.
fn load(dir: &Path) -> burn_moe::Result<()> {
    let device = Device::default();
    let sync = || {
        Infer::sync(&device).map_err(|error| Error::Training {
            step: 0,
            why: format!("the device reports: {error}"),
        })
    };
    Infer::prepare_device(&device);
    sync()?;
    let before = memory_mib("VmRSS");
    let start = Instant::now();
    let loaded = AutoModelForCausalLm::<Infer>::from_pretrained(dir, &FromPretrainedOptions::default(), &device)?;
    sync()?;
    let (seconds, gigabytes) = (start.elapsed().as_secs_f64(), loaded.report.bytes as f64 / 1e9);
    say!(
        "{gigabytes:.2} GB in {seconds:.2} s to {}: {:.2} GB/s; host memory {} MiB before, {} MiB at most, {} MiB of its own after",
        burn_moe::backend::NAME,
        gigabytes / seconds,
        before,
        memory_mib("VmHWM"),
        memory_mib("RssAnon"),
    );
    Ok(())
}

/// A line of `/proc/self/status`; 0 where there is none.
fn memory_mib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
