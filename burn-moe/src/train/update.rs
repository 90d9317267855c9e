//! The update of a step after its backward passes.

use std::time::Instant;

use burn::tensor::{DType, Tensor, TensorData};
use burn_ep_backend::CrossEntropyDesc;

use super::metrics::{StepSums, StepTotals};
use super::{StepSettings, TrainBackend, TrainableLm, Trainer, forward_backward, no_hook};
use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::loss::label_scale;
use crate::optim::{GradStore, clip_factor, clip_scale};

/// Steps from one measurement of the update's part of the time to the next.
const UPDATE_TIME_EVERY: u64 = 50;

/// What a refused step leaves behind.
pub(super) const UNCHANGED: &str = "the parameters are unchanged";

impl<B: TrainBackend, M: TrainableLm<B>> Trainer<B, M> {
    /// Forward, backward and update, one after the other.
    pub(super) fn update_after_backward(&mut self, micro_batches: &[HostBatch], labels: f64, lr: f64) -> Result<(StepTotals, f64)> {
        let (mut grads, sums) = self.gradients(micro_batches, labels)?;
        let timed = (self.step + 1) % UPDATE_TIME_EVERY == 1;
        if timed {
            self.sync()?;
        }
        let start = Instant::now();
        self.optimizer.check(&grads)?;
        let result = match self.ep.as_ref().is_some_and(|ep| ep.world_size() > 1) {
            true => self.update_after_reading(&mut grads, sums, labels, lr)?,
            false => self.update_and_read(&mut grads, sums, labels, lr)?,
        };
        if timed {
            self.sync()?;
            self.update_seconds = start.elapsed().as_secs_f64();
        }
        Ok(result)
    }

    /// Settings of the micro-batches of a step.
    pub(super) fn step_settings(&self, micro_batches: usize, labels: f64) -> StepSettings {
        StepSettings {
            label_scale: label_scale(labels),
            micro_batch_weight: 1.0 / micro_batches as f64,
            recompute: self.config.recompute,
            aux_scaling: self.config.aux_scaling,
            z_loss: self.config.z_loss,
            ep: self.ep.clone(),
            force_balanced: self.config.force_balanced,
            cross_entropy: CrossEntropyDesc::default(),
        }
    }

    /// Gradients of the whole step, summed over micro-batches and ranks, and this rank's loss sums.
    fn gradients(&self, micro_batches: &[HostBatch], labels: f64) -> Result<(GradStore<B::InnerBackend>, StepSums<B::InnerBackend>)> {
        let settings = self.step_settings(micro_batches.len(), labels);
        let mut grads = GradStore::new();
        let mut sums = StepSums::new();
        for batch in micro_batches {
            sums.add(forward_backward::<B, M>(
                self.model(),
                batch,
                &self.device,
                &settings,
                &mut grads,
                &mut no_hook,
            )?);
        }
        self.optimizer.reduce(&mut grads, &self.table, self.ep.as_ref(), &self.device)?;
        Ok((grads, sums))
    }

    /// The update of one rank: queued without waiting for the device, then one read tells what happened. A step whose loss or
    /// norm is not finite has changed nothing.
    fn update_and_read(
        &mut self,
        grads: &mut GradStore<B::InnerBackend>,
        sums: StepSums<B::InnerBackend>,
        labels: f64,
        lr: f64,
    ) -> Result<(StepTotals, f64)> {
        let squares = grads.squares(self.table.entries().iter().map(|info| info.id));
        let scale = squares.clone().zip(sums.all_losses());
        let scale = scale.map(|(squares, loss)| clip_scale(squares, loss, self.config.max_grad_norm));
        self.update(grads, lr, scale);
        let (totals, squares) = sums.totals(None, squares)?;
        let grad_norm = squares.iter().sum::<f64>().sqrt();
        self.check_totals(&totals, labels, grad_norm, UNCHANGED)
            .inspect_err(|_| self.optimizer.undo_step_count(0))?;
        Ok((totals, grad_norm))
    }

    /// The update in a group: all ranks must know the sums over the group before any of them moves.
    fn update_after_reading(
        &mut self,
        grads: &mut GradStore<B::InnerBackend>,
        sums: StepSums<B::InnerBackend>,
        labels: f64,
        lr: f64,
    ) -> Result<(StepTotals, f64)> {
        let (totals, _) = sums.totals(self.ep.as_ref(), None)?;
        let grad_norm = self.optimizer.norm(grads, &self.table, self.ep.as_ref())?;
        self.check_totals(&totals, labels, grad_norm, UNCHANGED)?;
        let factor = self.config.max_grad_norm.map_or(1.0, |max| clip_factor(grad_norm, max));
        let scale = Tensor::from_data(TensorData::new(vec![factor as f32], [1]), (&self.device, DType::F32));
        self.update(grads, lr, (factor != 1.0).then_some(scale));
        // Gathering the new weights may have failed.
        super::segment::check(self.ep.as_ref())?;
        Ok((totals, grad_norm))
    }

    /// `state` says what a step that is refused leaves behind.
    pub(super) fn check_totals(&self, totals: &StepTotals, labels: f64, grad_norm: f64, state: &str) -> Result<()> {
        let numbers = [
            ("loss", totals.cross_entropy * label_scale(labels)),
            ("balance loss", totals.balance.unwrap_or(0.0)),
            ("z-loss", totals.z.unwrap_or(0.0)),
            ("gradient norm", grad_norm),
        ];
        let Some((what, value)) = numbers.into_iter().find(|(_, value)| !value.is_finite()) else {
            return Ok(());
        };
        let why = format!("{what} is {value}; {state}. Lower the learning rate, or look at this step's data");
        Err(Error::Training { step: self.step + 1, why })
    }

    fn sync(&self) -> Result<()> {
        B::sync(&self.device).map_err(|error| Error::Training {
            step: self.step + 1,
            why: format!("the device reports: {error}"),
        })
    }

    /// AdamW; what can fail was checked before.
    fn update(&mut self, grads: &mut GradStore<B::InnerBackend>, lr: f64, scale: Option<Tensor<B::InnerBackend, 1>>) {
        if let Some(model) = self.model.take() {
            self.model = Some(self.optimizer.step_checked::<B, M>(model, grads, lr, scale));
        }
    }
}
