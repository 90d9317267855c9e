//! Progress bar with bytes and time, on stderr, hidden when that is no terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `total` bytes; hidden unless `shown`.
pub(crate) fn bytes_bar(shown: bool, action: &'static str, total: u64) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {elapsed} (eta {eta})");
    let bar = ProgressBar::new(total).with_message(action);
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
