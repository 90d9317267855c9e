//! The time of every kernel: `BURN_MOE_PROFILE=FILE`.
//!
//! CubeCL's own profiler waits for the device before and after every launch, writes a line for each to FILE, and a table at every
//! synchronisation. What it does not see, the library products on a stream of ours, is timed in the same way and goes to
//! `FILE.products`. A step is several times slower then, the times of its kernels are those without the waiting, apart from about
//! ten microseconds each. `benches/kernel_table.py` adds them up.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};

/// Where the profile goes; None: there is none.
pub fn file() -> Option<&'static PathBuf> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        std::env::var_os("BURN_MOE_PROFILE")
            .filter(|file| !file.is_empty())
            .map(PathBuf::from)
    };
    FILE.get_or_init(find).as_ref()
}

/// Name of a raw kernel in the profile: its entry, the blocks, and how many bytes its buffers have, which says how fast it could be if it
/// moved each of them once. Kernels of one name and size share the text, which stays for the life of the process.
pub fn label(entry: &'static str, grid: u32, bytes: u64) -> &'static str {
    static LABELS: OnceLock<Mutex<HashSet<&'static str>>> = OnceLock::new();
    let label = format!("{entry} grid {grid} bytes {bytes}");
    let mut labels = LABELS
        .get_or_init(Default::default)
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    match labels.get(label.as_str()) {
        Some(known) => known,
        None => {
            let kept: &'static str = label.leak();
            labels.insert(kept);
            kept
        }
    }
}

/// Runs work that CubeCL's profiler does not see, with the device idle before and after, and notes its time.
pub fn timed(device: &CudaDevice, name: &str, work: impl FnOnce() + Send) {
    let client = <CudaRuntime as Runtime>::client(device);
    let Some(file) = file() else { return work() };
    match client.profile(work, name) {
        Ok(((), duration)) => {
            let duration = cubecl_common::future::block_on(duration.resolve()).duration();
            let path = file.with_extension(match file.extension() {
                Some(extension) => format!("{}.products", extension.display()),
                None => "products".to_string(),
            });
            let line = format!("| {duration:?} | {name}\n");
            let written = OpenOptions::new().create(true).append(true).open(&path);
            if let Err(error) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
                tracing::warn!(?path, ?error, "the profile cannot be written");
            }
        }
        Err(error) => tracing::error!(?error, name, "a product could not be profiled"),
    }
}
