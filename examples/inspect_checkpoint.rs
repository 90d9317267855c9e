//! Print what is in a checkpoint and whether it would load: family, parameter counts, mapping and load report, from config
//! and headers alone. No weights are read and no model is allocated, so a checkpoint of any size takes a moment.
//!
//!     cargo run --release --example inspect_checkpoint -- path/to/folder
//!     cargo run --release --example inspect_checkpoint -- org/name --offline

use std::path::PathBuf;

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
    if report.is_exact() {
        say!("It loads.");
        Ok(())
    } else {
        Err(Error::Mismatch("the checkpoint does not fit the model; see the load report".into()))
    }
}
