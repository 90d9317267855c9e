//! Shared pieces of the example programs: where the shipped assets are, common arguments, and the progress line.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use burn_moe::train::{Recompute, StepReport};
use burn_moe::{Error, Result};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// A file or folder shipped with the examples; `BURN_MOE_ASSETS` names their folder where the sources are not at hand.
pub fn asset(name: &str) -> PathBuf {
    match std::env::var_os("BURN_MOE_ASSETS") {
        Some(folder) => PathBuf::from(folder).join(name),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets")).join(name),
    }
}

/// Accepts the name of the backend this program was built for; another one needs another build.
pub fn check_backend(name: &str) -> Result<()> {
    let built = burn_moe::backend::NAME;
    let other = match built {
        "flex" => "for `cuda` build with `--features cuda`",
        _ => "for `flex` (CPU) build without `--features cuda`",
    };
    if name == built {
        return Ok(());
    }
    Err(Error::config(
        "--backend",
        name,
        format!("`{built}`, the backend of this build; {other}"),
    ))
}

/// `none`, `all`, `every-second`, or the number of blocks to recompute, counted from the first.
pub fn recompute(text: &str) -> std::result::Result<Recompute, String> {
    match text {
        "none" | "0" => Ok(Recompute::None),
        "all" => Ok(Recompute::All),
        "every-second" => Ok(Recompute::KeepEvery(2)),
        number => number
            .parse()
            .map(Recompute::First)
            .map_err(|_| "expected none, all, every-second or a number of blocks".into()),
    }
}

/// Warnings of the library on stderr; `RUST_LOG` chooses otherwise.
pub fn log_warnings() {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::WARN.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}

/// `println!` that lets the program go on when nobody reads its output any more (`| head`): a run must still save.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// One line per step: rewritten in place on a terminal, every tenth step as a line of its own elsewhere.
#[derive(Debug)]
pub struct ProgressLine {
    total: u64,
    live: bool,
}

impl ProgressLine {
    /// For a run of `total` steps.
    pub fn new(total: u64) -> Self {
        Self {
            total,
            live: std::io::stdout().is_terminal(),
        }
    }

    /// Shows a step.
    pub fn show(&self, report: &StepReport) {
        let last = report.step == self.total;
        if self.live {
            let mut out = std::io::stdout();
            let _ = write!(out, "\r\x1b[2K{}/{} {report}", report.step, self.total).and_then(|()| out.flush());
        } else if last || report.step == 1 || report.step.is_multiple_of(10) {
            say!("{report}");
        }
    }

    /// Leaves the line, so that other output starts on its own.
    pub fn finish(&self) {
        if self.live {
            say!("");
        }
    }
}
