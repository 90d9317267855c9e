//! Settings of a training run.

use serde::{Deserialize, Serialize};

use super::{Recompute, Schedule};
use crate::error::{Error, Result};
use crate::loss::AuxScaling;
use crate::optim::{AdamWConfig, RouterBiasConfig};

/// A step holds all of its micro-batches at once.
const MAX_MICRO_BATCHES: usize = 1 << 16;

/// Settings of [`super::Trainer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerConfig {
    /// Optimizer steps of the whole run, counted from its first start.
    pub steps: u64,
    /// Micro-batches per optimizer step (gradient accumulation).
    pub micro_batches: usize,
    pub schedule: Schedule,
    pub optimizer: AdamWConfig,
    /// Bound of the global gradient norm; None: no clipping.
    pub max_grad_norm: Option<f64>,
    pub recompute: Recompute,
    /// Update every segment (head, block, embedding) as soon as its backward pass is done and release its gradients, so that the
    /// gradients of one segment exist at a time instead of those of the whole model. The update is the same, with these differences:
    ///
    /// - It needs one micro-batch a step.
    /// - The norm of the whole gradient is known only at the end, so `max_grad_norm` bounds by a running norm (see
    ///   [`crate::optim::running_clip_factor`]); none does not clip.
    /// - A step whose loss is not finite changes nothing, as otherwise. If a gradient is not finite, the segments whose backward
    ///   passes came before it are updated already; the error names them.
    pub optimizer_in_backward: bool,
    /// How the auxiliary loss of the model's config adds up over micro-batches and ranks.
    pub aux_scaling: AuxScaling,
    /// Router z-loss coefficient; 0: off.
    pub z_loss: f64,
    /// Balance the experts through their selection bias; None: off.
    pub router_bias: Option<RouterBiasConfig>,
    /// Route evenly regardless of the logits (benchmarks only).
    pub force_balanced: bool,
    /// Deal the optimizer state over the ranks that hold the same parameter (ZeRO stage 1): the same update with a share of the
    /// memory. Without several ranks it changes nothing.
    pub shard_optimizer: bool,
    /// Peak of one device in TFLOP/s, which the reported MFU is relative to; None: no MFU.
    pub peak_tflops: Option<f64>,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            micro_batches: 1,
            schedule: Schedule::default(),
            optimizer: AdamWConfig::default(),
            max_grad_norm: Some(1.0),
            recompute: Recompute::default(),
            optimizer_in_backward: false,
            aux_scaling: AuxScaling::default(),
            z_loss: 0.0,
            router_bias: None,
            force_balanced: false,
            shard_optimizer: true,
            peak_tflops: None,
        }
    }
}

impl TrainerConfig {
    /// Checks every field that can be checked without a model.
    pub fn validate(&self) -> Result<()> {
        if self.micro_batches == 0 || self.micro_batches > MAX_MICRO_BATCHES {
            let expected = format!("1 to {MAX_MICRO_BATCHES}");
            return Err(Error::config("micro_batches", self.micro_batches, expected));
        }
        if self.optimizer_in_backward && self.micro_batches != 1 {
            let expected = "1 with `optimizer_in_backward`: gradients of several micro-batches would have to be kept";
            return Err(Error::config("micro_batches", self.micro_batches, expected));
        }
        self.schedule.validate(self.steps)?;
        self.optimizer.validate()?;
        if let Some(max) = self.max_grad_norm
            && !(max.is_finite() && max > 0.0)
        {
            return Err(Error::config("max_grad_norm", max, "a positive number, or none"));
        }
        if !(self.z_loss.is_finite() && self.z_loss >= 0.0) {
            return Err(Error::config("z_loss", self.z_loss, "a number of at least 0"));
        }
        if let Some(peak) = self.peak_tflops
            && !(peak.is_finite() && peak > 0.0)
        {
            return Err(Error::config("peak_tflops", peak, "a positive number, or none"));
        }
        if self.recompute == Recompute::KeepEvery(0) {
            return Err(Error::config("recompute.keep_every", 0, "at least 1 (or `all`)"));
        }
        if self.recompute == Recompute::First(0) {
            return Err(Error::config("recompute.first", 0, "at least 1 (or `none`)"));
        }
        match &self.router_bias {
            Some(router_bias) => router_bias.validate(),
            None => Ok(()),
        }
    }
}
