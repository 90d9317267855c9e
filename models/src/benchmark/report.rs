//! The numbers of a benchmark run.

use burn::tensor::FloatDType;
use burn_ep_backend::DeviceMemory;
use serde::{Serialize, Serializer};

use super::BenchmarkConfig;
use crate::AutoConfig;
use crate::sizing::MemoryPlan;

/// Times of one kind of step, and the speeds of its median.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timing {
    pub median_ms: f64,
    pub min_ms: f64,
    pub tokens_per_second: f64,
    /// By the count of [`AutoConfig::flops_per_token`]; recomputation is not counted.
    pub tflops: f64,
    /// `tflops` over the named peak.
    pub mfu: f64,
}

/// How fast a checkpoint was read, headers and checks included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Loading {
    /// Bytes of the parameters as loaded.
    pub bytes: u64,
    pub seconds: f64,
    pub gb_per_second: f64,
}

impl Loading {
    pub(super) fn new(bytes: u64, seconds: f64) -> Self {
        Self {
            bytes,
            seconds,
            gb_per_second: bytes as f64 / seconds / 1e9,
        }
    }
}

/// Result of [`super::run`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchmarkReport {
    /// Version of this crate.
    pub version: &'static str,
    pub backend: &'static str,
    pub model_type: &'static str,
    pub parameters: u64,
    pub active_parameters: u64,
    pub tokens_per_step: usize,
    pub gflop_per_token: f64,
    /// Whole steps; None without an optimizer.
    pub step: Option<Timing>,
    /// Forward and backward only; None when left out.
    pub without_optimizer: Option<Timing>,
    /// Until a step without optimizer was handed to the device whole, in milliseconds (median): the device waits for the host where
    /// this is more than the step takes.
    pub queued_ms: Option<f64>,
    /// Over the counted whole steps (without an optimizer: over the other loop); None where the backend cannot tell.
    pub memory: Option<DeviceMemory>,
    /// What [`MemoryPlan`] foresaw, in GiB.
    pub planned_gib: f64,
    /// `peak_used` and `peak_reserved` in GiB.
    pub peak_gib: Option<[f64; 2]>,
    /// Memory in use after the first and after the last counted whole step, in GiB: equal where steps return what they take.
    pub used_gib: Option<[f64; 2]>,
    /// Loss of every whole step, warm-up included.
    pub losses: Vec<f64>,
    /// From the start to a model with all weights on the device.
    pub ready_seconds: f64,
    /// Of both warm-ups; kernels are compiled and tuned in the first.
    pub warmup_seconds: f64,
    pub loading: Option<Loading>,
    pub settings: BenchmarkConfig,
}

/// Times of one loop of steps.
pub(super) struct Loop {
    pub warmup_seconds: f64,
    /// Of every counted step.
    pub seconds: Vec<f64>,
}

/// What [`super::run`] measured.
pub(super) struct Measured {
    pub plan: MemoryPlan,
    pub ready_seconds: f64,
    pub loading: Option<Loading>,
    pub whole: Option<Loop>,
    pub plain: Option<Loop>,
    /// Seconds until each counted step of `plain` was handed to the device.
    pub queued: Vec<f64>,
    pub memory: Option<DeviceMemory>,
    /// After every counted whole step, in bytes.
    pub used: Vec<u64>,
    pub losses: Vec<f64>,
}

impl BenchmarkReport {
    pub(super) fn new(settings: &BenchmarkConfig, config: &AutoConfig, measured: Measured) -> Self {
        let count = config.parameters();
        let flops_per_token = config.flops_per_token(settings.seq);
        let tokens = settings.batch * settings.seq;
        let timing = |steps: Loop| timing(steps.seconds, tokens as f64, flops_per_token, settings.peak_tflops);
        let warmup_seconds = [&measured.whole, &measured.plain]
            .into_iter()
            .flatten()
            .map(|steps| steps.warmup_seconds)
            .sum();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            backend: burn_moe::backend::NAME,
            model_type: config.model_type(),
            parameters: count.total(),
            active_parameters: count.active(),
            tokens_per_step: tokens,
            gflop_per_token: flops_per_token / 1e9,
            step: measured.whole.map(timing),
            without_optimizer: measured.plain.map(timing),
            queued_ms: median(measured.queued).map(|seconds| seconds * 1e3),
            memory: measured.memory,
            planned_gib: measured.plan.total() as f64 / f64::from(1 << 30),
            peak_gib: measured
                .memory
                .map(|memory| [memory.peak_used, memory.peak_reserved].map(|bytes| bytes as f64 / f64::from(1 << 30))),
            used_gib: Option::zip(measured.used.first(), measured.used.last())
                .map(|(first, last)| [*first, *last].map(|bytes| bytes as f64 / f64::from(1 << 30))),
            losses: measured.losses,
            ready_seconds: measured.ready_seconds,
            warmup_seconds,
            loading: measured.loading,
            settings: settings.clone(),
        }
    }
}

/// The upper one of two in the middle; None of nothing.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn timing(mut seconds: Vec<f64>, tokens: f64, flops_per_token: f64, peak_tflops: f64) -> Timing {
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens_per_second = tokens / median;
    let tflops = tokens_per_second * flops_per_token / 1e12;
    Timing {
        median_ms: median * 1e3,
        min_ms: seconds[0] * 1e3,
        tokens_per_second,
        tflops,
        mfu: tflops / peak_tflops,
    }
}

pub(super) fn dtype_name<S: Serializer>(dtype: &FloatDType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(crate::pretrained::dtype_name(*dtype))
}
