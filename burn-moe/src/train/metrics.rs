//! What one optimizer step reports.

use std::fmt;

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::{DeviceMemory, MoeBackend};
use serde::{Deserialize, Serialize};

use super::MicroBatchStats;
use crate::error::Result;

/// Rows per expert of one block in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Index of the block.
    pub block: usize,
    /// Unmasked rows of each expert, over all micro-batches and ranks.
    pub counts: Vec<f64>,
}

impl ExpertLoad {
    /// Busiest expert over the mean; 1 is perfect balance, E is one expert doing everything. 0 without rows.
    pub fn max_over_mean(&self) -> f64 {
        let total: f64 = self.counts.iter().sum();
        if total == 0.0 {
            return 0.0;
        }
        self.counts.iter().copied().fold(0.0, f64::max) * self.counts.len() as f64 / total
    }
}

/// One optimizer step in numbers. Losses are over all micro-batches and ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// 1 for the first step.
    pub step: u64,
    /// Cross entropy per label token, in nats.
    pub loss: f64,
    /// Balance loss without coefficient, mean over micro-batches; None when the model has none.
    pub balance_loss: Option<f64>,
    /// Router z-loss without coefficient; None when switched off.
    pub z_loss: Option<f64>,
    /// Norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens, padding included, over all ranks.
    pub tokens: u64,
    /// Tokens that counted towards the loss, over all ranks.
    pub label_tokens: u64,
    /// Wall time of the step, optimizer included.
    pub seconds: f64,
    /// Part of it after the backward pass: norm, clipping, optimizer. Telling the two apart makes the host wait for the device
    /// between them, so it is measured in every 50th step, the first included, and repeated in the others.
    pub update_seconds: f64,
    /// Floating-point work of a second in TFLOP/s, all ranks together, by [`CausalLm::flops_per_token`]; None where the model
    /// does not count it.
    ///
    /// [`CausalLm::flops_per_token`]: crate::model::CausalLm::flops_per_token
    pub tflops: Option<f64>,
    /// `tflops` over the peak in the trainer's settings and the number of ranks; None without a peak.
    pub mfu: Option<f64>,
    /// Device memory of this rank at the end of the step, with its peaks; None where the backend cannot tell.
    pub memory: Option<DeviceMemory>,
    /// Load of every block with routed experts.
    pub expert_load: Vec<ExpertLoad>,
}

impl StepReport {
    /// Tokens per second over all ranks, optimizer included.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }

    /// Tokens per second over all ranks without the optimizer's part.
    pub fn tokens_per_second_without_update(&self) -> f64 {
        self.tokens as f64 / (self.seconds - self.update_seconds).max(1e-9)
    }

    /// Worst [`ExpertLoad::max_over_mean`] of all blocks; None without routed experts.
    pub fn worst_load(&self) -> Option<f64> {
        self.expert_load.iter().map(ExpertLoad::max_over_mean).reduce(f64::max)
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} loss {:.4}", self.step, self.loss)?;
        if let Some(balance) = self.balance_loss {
            write!(f, " balance {balance:.3}")?;
        }
        if let Some(z) = self.z_loss {
            write!(f, " z {z:.3}")?;
        }
        write!(
            f,
            " grad {:.3} lr {:.2e} {:.0} tokens/s",
            self.grad_norm,
            self.lr,
            self.tokens_per_second()
        )?;
        if let Some(mfu) = self.mfu {
            write!(f, " MFU {:.1} %", 100.0 * mfu)?;
        }
        if let Some(memory) = self.memory {
            write!(f, " peak {:.1} GiB", memory.peak_used as f64 / f64::from(1 << 30))?;
        }
        match self.worst_load() {
            Some(load) => write!(f, " load {load:.2}x"),
            None => Ok(()),
        }
    }
}

/// Loss terms of a step while its micro-batches run.
#[derive(Debug)]
pub(super) struct StepSums<B: MoeBackend> {
    cross_entropy: Option<Tensor<B, 1>>,
    load: Vec<Option<Tensor<B, 1>>>,
    balance: Option<Tensor<B, 1>>,
    z: Option<Tensor<B, 1>>,
    micro_batches: usize,
}

/// Host values of [`StepSums`], over all ranks.
#[derive(Debug)]
pub(super) struct StepTotals {
    pub cross_entropy: f64,
    /// Per block.
    pub load: Vec<Option<Vec<f64>>>,
    /// Means over micro-batches (over ranks too, where each has its own).
    pub balance: Option<f64>,
    pub z: Option<f64>,
}

impl<B: MoeBackend> StepSums<B> {
    pub fn new() -> Self {
        Self {
            cross_entropy: None,
            load: Vec::new(),
            balance: None,
            z: None,
            micro_batches: 0,
        }
    }

    pub fn add(&mut self, stats: MicroBatchStats<B>) {
        let plus = |old: Option<Tensor<B, 1>>, new: Tensor<B, 1>| match old {
            Some(old) => old + new,
            None => new,
        };
        self.cross_entropy = Some(plus(self.cross_entropy.take(), stats.cross_entropy_sum));
        self.load.resize(stats.expert_load.len(), None);
        for (sum, new) in self.load.iter_mut().zip(stats.expert_load) {
            if let Some(new) = new {
                *sum = Some(plus(sum.take(), new));
            }
        }
        for (sum, new) in [(&mut self.balance, stats.balance), (&mut self.z, stats.z_loss)] {
            if let Some(new) = new {
                *sum = Some(plus(sum.take(), new));
            }
        }
        self.micro_batches += 1;
    }

    /// The sum of all losses so far, `[1]`: not finite when one of them is not. None before the first micro-batch.
    pub fn all_losses(&self) -> Option<Tensor<B, 1>> {
        let wide = |loss: &Tensor<B, 1>| loss.clone().cast(FloatDType::F32);
        let losses = [&self.cross_entropy, &self.balance, &self.z].into_iter().flatten().map(wide);
        losses.reduce(|sum, loss| sum + loss)
    }

    /// Reads the sums from the device, all in one transfer, and adds them up over ranks. `local` comes along in that transfer
    /// and is returned as it is.
    pub fn totals(self, ep: Option<&EpGroup>, local: Option<Tensor<B, 1>>) -> Result<(StepTotals, Vec<f64>)> {
        let widths: Vec<Option<usize>> = self.load.iter().map(|l| l.as_ref().map(|l| l.dims()[0])).collect();
        let losses = [self.cross_entropy, self.balance, self.z];
        let present = losses.each_ref().map(Option::is_some);
        let count = local.as_ref().map_or(0, |local| local.dims()[0]);
        let parts = local
            .into_iter()
            .chain(losses.into_iter().flatten())
            .chain(self.load.into_iter().flatten());
        let mut parts: Vec<Tensor<B, 1>> = parts.collect();
        if parts.iter().any(|part| part.dtype() == DType::F64) {
            parts = parts.into_iter().map(|part| part.cast(FloatDType::F64)).collect();
        }
        let mut local: Vec<f64> = match parts.is_empty() {
            true => Vec::new(),
            false => Tensor::cat(parts, 0).into_data().iter::<f64>().collect(),
        };
        let mut values = local.split_off(count);
        let mut world = 1.0;
        if let Some(all) = ep.map(|ep| ep.world().get()).filter(|all| all.world() > 1) {
            all.all_reduce_sum_f64(&mut values)?;
            world = all.world() as f64;
        }
        let mut values = values.into_iter();
        let [cross_entropy, balance, z] = present.map(|present| present.then(|| values.next().unwrap_or(f64::NAN)));
        let mean = |sum: f64| sum / self.micro_batches as f64 / world;
        let totals = StepTotals {
            cross_entropy: cross_entropy.unwrap_or(0.0),
            load: widths
                .into_iter()
                .map(|width| width.map(|width| values.by_ref().take(width).collect()))
                .collect(),
            balance: balance.map(mean),
            z: z.map(mean),
        };
        Ok((totals, local))
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn load_is_one_when_balanced_and_e_when_collapsed() {
        let load = |counts: &[f64]| ExpertLoad {
            block: 0,
            counts: counts.to_vec(),
        };
        assert_eq!(load(&[3.0, 3.0, 3.0, 3.0]).max_over_mean(), 1.0);
        assert_eq!(load(&[8.0, 0.0, 0.0, 0.0]).max_over_mean(), 4.0);
        assert_eq!(load(&[0.0, 0.0]).max_over_mean(), 0.0);
    }

    #[test]
    fn sums_run_over_micro_batches_and_keep_blocks_apart() {
        let tensor = |v: &[f32]| Tensor::<Flex, 1>::from_floats(v, &Default::default());
        let mut sums = StepSums::<Flex>::new();
        for i in [1.0, 2.0] {
            sums.add(MicroBatchStats {
                cross_entropy_sum: tensor(&[10.0 * i]),
                balance: Some(tensor(&[i])),
                z_loss: None,
                expert_load: vec![Some(tensor(&[i, 0.0])), None, Some(tensor(&[1.0, 2.0, 3.0]))],
            });
        }
        let local = tensor(&[7.0, 8.0]);
        let (totals, local) = sums.totals(None, Some(local)).unwrap();
        assert_eq!(local, [7.0, 8.0]);
        assert_eq!(totals.cross_entropy, 30.0);
        assert_eq!(totals.balance, Some(1.5));
        assert_eq!(totals.z, None);
        assert_eq!(totals.load, [Some(vec![3.0, 0.0]), None, Some(vec![2.0, 4.0, 6.0])]);
    }
}
