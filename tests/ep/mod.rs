//! Expert parallelism gives the results of one rank.
//!
//! Ranks are threads with a [`LocalCommunicator`].

mod layer;

use std::thread;
use std::time::Duration;

use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};

/// Runs `f` on `world` ranks at once; results in rank order. A rank that fails ends the others within seconds.
pub fn on_ranks<T: Send>(world: usize, f: impl Fn(EpGroup) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = LocalCommunicator::group(world)
            .into_iter()
            .map(|comm| {
                let ep = EpGroup::new(CommHandle::new(comm.with_timeout(Duration::from_secs(10))));
                scope.spawn(|| f(ep))
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Largest difference, relative to the largest expected value.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    let worst = found
        .iter()
        .zip(expected)
        .map(|(f, e)| (f64::from(*f) - f64::from(*e)).abs())
        .fold(0.0f64, |m, d| if d.is_nan() { f64::NAN } else { m.max(d) });
    if worst == 0.0 { 0.0 } else { worst / scale }
}
