//! The optimizer in the backward: every segment is updated when its gradients are final, and they are released.
//!
//! Parameters with several places in the model (tied embeddings) wait for the last segment, where their sum is final. Sums over
//! ranks are taken segment by segment. On one rank nothing is read: factor and finiteness of a segment stay on the device, and the
//! factor of everything after a loss or gradient that is not finite is not finite either, which makes those updates do nothing.

use burn::tensor::{DType, Tensor, TensorData};
use burn_ep_backend::comm::EpGroup;

use super::metrics::{StepSums, StepTotals};
use super::step::{SegmentSink, forward_backward_into};
use super::update::UNCHANGED;
use super::{Segment, TrainBackend, TrainableLm, Trainer};
use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::optim::{AdamW, GradStore, ParamTable, running_clip_factor, running_norm, scale_of_norm, sum_squares};

/// A segment whose update is queued.
struct Done {
    segment: Segment,
    /// Updated parameters before this segment.
    updated_before: usize,
}

/// Takes gradients and turns them into updates.
struct InBackward<'a, B: TrainBackend, M> {
    /// Always there between segments.
    model: Option<M>,
    optimizer: &'a mut AdamW<B::InnerBackend>,
    table: &'a ParamTable,
    device: &'a B::Device,
    ep: Option<&'a EpGroup>,
    /// Number of this step, for errors.
    step: u64,
    lr: f64,
    max_grad_norm: Option<f64>,
    running_norm: Option<f64>,
    /// Gradients of the present segment.
    grads: GradStore<B::InnerBackend>,
    /// Gradients that later segments add to.
    held: GradStore<B::InnerBackend>,
    /// Sum of all losses `[1]`.
    loss: Option<Tensor<B::InnerBackend, 1>>,
    done: Vec<Done>,
    /// Square of the gradient norm up to and with each segment in `done`, `[1]` each; with several ranks only the sum, here.
    squares: Vec<Tensor<B::InnerBackend, 1>>,
    square_over_ranks: f64,
}

impl<B: TrainBackend, M: TrainableLm<B>> SegmentSink<B, M> for InBackward<'_, B, M> {
    fn model(&self) -> &M {
        self.model.as_ref().expect("the model is only away inside an update")
    }

    fn losses(&mut self, losses: Vec<Tensor<B::InnerBackend, 1>>) {
        let wide = losses.into_iter().map(|loss| loss.cast(DType::F32));
        self.loss = wide.reduce(|sum, loss| sum + loss);
    }

    fn finish(&mut self, segment: Segment, mut gradients: B::Gradients) -> Result<()> {
        let last = segment == Segment::Embedding;
        if last {
            std::mem::swap(&mut self.grads, &mut self.held);
        }
        let model = self.model.as_ref().expect("the model is only away inside an update");
        let ids = self.grads.collect::<B, M>(model, &mut gradients);
        drop(gradients);
        if !last {
            let shared = |id: &&_| self.table.get(**id).is_some_and(|info| !info.aliases.is_empty());
            for id in ids.iter().filter(shared) {
                self.grads.transfer(*id, &mut self.held);
            }
        }
        let scale = match self.ep {
            Some(ep) => {
                self.optimizer.reduce(&mut self.grads, self.table, Some(ep), self.device)?;
                self.scale_over_ranks(segment, ep)?
            }
            None => self.scale_on_device(),
        };
        if self.grads.is_empty() {
            return Ok(());
        }
        self.optimizer.check(&self.grads)?;
        self.done.push(Done {
            segment,
            updated_before: self.optimizer.updated(),
        });
        if let Some(model) = self.model.take() {
            self.model = Some(self.optimizer.step_segment::<B, M>(model, &mut self.grads, self.lr, scale));
        }
        // Gathering new weights from their shares may have failed.
        super::segment::check(self.ep)
    }
}

impl<B: TrainBackend, M: TrainableLm<B>> InBackward<'_, B, M> {
    /// Factor of this segment's gradients, not finite if anything so far is not; None without gradients.
    fn scale_on_device(&mut self) -> Option<Tensor<B::InnerBackend, 1>> {
        let squares = self.grads.squares(self.table.entries().iter().map(|info| info.id))?;
        let mut square = sum_squares(squares);
        if let Some(before) = self.squares.last() {
            square = before.clone() + square;
        }
        self.squares.push(square.clone());
        let loss = self.loss.clone().unwrap_or_else(|| square.zeros_like());
        Some(scale_of_norm(square.sqrt(), loss, self.max_grad_norm, self.running_norm))
    }

    /// The same factor on every rank; None is 1.
    fn scale_over_ranks(&mut self, segment: Segment, ep: &EpGroup) -> Result<Option<Tensor<B::InnerBackend, 1>>> {
        let norm = self.optimizer.norm(&self.grads, self.table, Some(ep))?;
        self.square_over_ranks += norm * norm;
        let norm = self.square_over_ranks.sqrt();
        if !norm.is_finite() {
            return Err(Error::Training {
                step: self.step,
                why: refused(segment, &self.done, norm),
            });
        }
        let factor = self
            .max_grad_norm
            .map_or(1.0, |max| running_clip_factor(self.running_norm, norm, max));
        let scale = || Tensor::from_data(TensorData::new(vec![factor as f32], [1]), (self.device, DType::F32));
        Ok((factor != 1.0).then(scale))
    }
}

/// Why a step was refused, and what it leaves behind.
fn refused(bad: Segment, updated: &[Done], norm: f64) -> String {
    format!(
        "gradient norm of the {bad} is {norm}; {}. Lower the learning rate, or look at this step's data",
        left_behind(updated)
    )
}

fn left_behind(updated: &[Done]) -> String {
    let names = match updated {
        [] => return UNCHANGED.into(),
        [only] => only.segment.to_string(),
        [first, .., last] => format!("{} to {}", first.segment, last.segment),
    };
    format!("with the optimizer in the backward, the update of the {names} was done before and stays: go back to a checkpoint")
}

impl<B: TrainBackend, M: TrainableLm<B>> Trainer<B, M> {
    /// Whether `max_grad_norm` bounds the running norm.
    pub(super) fn clips_by_running_norm(&self) -> bool {
        self.config.optimizer_in_backward && self.config.max_grad_norm.is_some()
    }

    /// Forward, and backward with the update of each segment behind its backward pass.
    pub(super) fn update_in_backward(&mut self, micro_batches: &[HostBatch], labels: f64, lr: f64) -> Result<(StepTotals, f64)> {
        let [batch] = micro_batches else {
            let expected = "1 with `optimizer_in_backward`: gradients of several micro-batches would have to be kept";
            return Err(Error::config("micro_batches", micro_batches.len(), expected));
        };
        let settings = self.step_settings(1, labels);
        self.optimizer.begin_step();
        let ep = self.ep.as_ref().filter(|ep| ep.world_size() > 1);
        let mut sink = InBackward {
            model: self.model.take(),
            optimizer: &mut self.optimizer,
            table: &self.table,
            device: &self.device,
            ep,
            step: self.step + 1,
            lr,
            max_grad_norm: self.config.max_grad_norm,
            running_norm: self.running_norm,
            grads: GradStore::new(),
            held: GradStore::new(),
            loss: None,
            done: Vec::new(),
            squares: Vec::new(),
            square_over_ranks: 0.0,
        };
        let stats = forward_backward_into(&mut sink, batch, &self.device, &settings);
        let InBackward {
            model,
            done,
            squares,
            square_over_ranks,
            ..
        } = sink;
        self.model = model;
        let mut sums = StepSums::new();
        sums.add(stats?);

        let squares = (!squares.is_empty()).then(|| Tensor::cat(squares, 0));
        let (totals, squares) = sums.totals(ep, squares)?;
        // A loss that is not finite stopped all updates; a gradient those from its segment on.
        if let Err(error) = self.check_totals(&totals, labels, 0.0, UNCHANGED) {
            self.optimizer.undo_step_count(0);
            return Err(error);
        }
        if let Some(bad) = squares.iter().position(|square| !square.is_finite()) {
            self.optimizer.undo_step_count(done[bad].updated_before);
            return Err(Error::Training {
                step: self.step + 1,
                why: refused(done[bad].segment, &done[..bad], squares[bad].sqrt()),
            });
        }
        let norm = squares.last().map_or(square_over_ranks, |square| *square).sqrt();
        if self.clips_by_running_norm() {
            self.running_norm = Some(running_norm(self.running_norm, norm));
        }
        Ok((totals, norm))
    }
}
