//! The training loop.
//!
//! One step: forward and backward of every micro-batch, sum over ranks, global norm, clip, AdamW (`update.rs`; or AdamW in the
//! backward, `in_backward.rs`), router bias. The model is moved through the update, so that parameters change in place.

use std::path::Path;
use std::time::Instant;

use burn_ep_backend::comm::EpGroup;

use super::checkpoint::write_folder;
use super::metrics::{ExpertLoad, StepReport};
use super::state::{TrainerState, read_tensors, write_state};
use super::{BatchSource, Interrupt, SaveModel, SavePlan, TrainBackend, TrainableLm, TrainerConfig};
use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::loss::label_scale;
use crate::optim::{AdamW, ParamTable, Shards, check_router_bias, freeze, update_router_bias};

/// Why [`Trainer::run`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// All steps are done.
    Finished,
    /// Somebody asked to stop; a later run can resume.
    Interrupted,
    /// The data ended before the steps did.
    OutOfData,
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer<B: TrainBackend, M> {
    /// Always there between steps; taken while an update moves it.
    pub(super) model: Option<M>,
    pub(super) config: TrainerConfig,
    pub(super) device: B::Device,
    pub(super) optimizer: AdamW<B::InnerBackend>,
    pub(super) table: ParamTable,
    pub(super) ep: Option<EpGroup>,
    pub(super) step: u64,
    tokens: u64,
    /// Of the last step in which it was measured.
    pub(super) update_seconds: f64,
    /// Of the gradient, after the last step; None before the first and where nothing is clipped by it.
    pub(super) running_norm: Option<f64>,
}

impl<B: TrainBackend, M: TrainableLm<B>> Trainer<B, M> {
    /// Prepares training. `ep` is this rank's place in the mesh over which the model's experts are spread; None when all are here.
    ///
    /// Fails when a setting is out of range, a name pattern matches nothing, or nothing is left to train.
    pub fn new(model: M, config: TrainerConfig, device: B::Device, ep: Option<EpGroup>) -> Result<Self> {
        config.validate()?;
        let several = ep.as_ref().filter(|ep| config.shard_optimizer && ep.world_size() > 1);
        let shards = several.map(|ep| Shards::new(ep.clone()));
        let optimizer = AdamW::new(config.optimizer.clone(), ParamTable::new(&model))?.with_shards(shards);
        let model = freeze(model, optimizer.groups());
        let table = ParamTable::new(&model);
        if table.trainable().next().is_none() {
            return Err(Error::config(
                "optimizer.groups",
                "every parameter frozen",
                "at least one trainable parameter",
            ));
        }
        if let Some(router_bias) = &config.router_bias {
            check_router_bias(&table, router_bias)?;
        }
        if config.optimizer_in_backward {
            match config.max_grad_norm {
                Some(max_grad_norm) => tracing::warn!(max_grad_norm, "optimizer in the backward: gradients are clipped by a running norm"),
                None => tracing::info!("optimizer in the backward: gradients are not clipped"),
            }
        }
        Ok(Self {
            model: Some(model),
            config,
            device,
            optimizer,
            table,
            ep,
            step: 0,
            tokens: 0,
            update_seconds: 0.0,
            running_norm: None,
        })
    }

    /// The model.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the model is only away inside a step")
    }

    /// Ends training and returns the model.
    pub fn into_model(self) -> M {
        self.model.expect("the model is only away inside a step")
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Tokens seen, over all ranks.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The model's parameters.
    pub fn parameters(&self) -> &ParamTable {
        &self.table
    }

    /// The optimizer with its state.
    pub fn optimizer(&self) -> &AdamW<B::InnerBackend> {
        &self.optimizer
    }

    /// Trains until the configured number of steps is reached, the data ends, or `interrupt` asks to stop; calls `on_step`
    /// after every step. With `save`, writes checkpoints as planned and one at the end, whatever ended the run.
    pub fn run(
        &mut self,
        source: &mut dyn BatchSource,
        interrupt: &Interrupt,
        save: Option<(&SavePlan, &dyn SaveModel<M>)>,
        on_step: &mut dyn FnMut(&StepReport),
    ) -> Result<RunEnd> {
        let result = self.run_steps(source, interrupt, save, on_step);
        self.abort_on_error(result)
    }

    fn run_steps(
        &mut self,
        source: &mut dyn BatchSource,
        interrupt: &Interrupt,
        save: Option<(&SavePlan, &dyn SaveModel<M>)>,
        on_step: &mut dyn FnMut(&StepReport),
    ) -> Result<RunEnd> {
        if let Some((plan, _)) = save {
            plan.validate()?;
        }
        let mut saved_at = None;
        let (end, position) = loop {
            let position = source.position()?;
            if self.any_rank(interrupt.requested())? {
                break (RunEnd::Interrupted, position);
            }
            if self.step >= self.config.steps {
                break (RunEnd::Finished, position);
            }
            let mut micro_batches = Vec::with_capacity(self.config.micro_batches);
            while micro_batches.len() < self.config.micro_batches
                && let Some(batch) = source.next_batch()?
            {
                micro_batches.push(batch);
            }
            if self.any_rank(micro_batches.len() < self.config.micro_batches)? {
                break (RunEnd::OutOfData, position);
            }
            let report = self.train_step(&micro_batches)?;
            on_step(&report);
            if let Some((plan, save_model)) = save
                && plan.every.is_some_and(|every| self.step.is_multiple_of(every))
            {
                self.save(&plan.checkpoint(self.step), save_model, source.position()?)?;
                saved_at = Some(self.step);
                self.prune(plan)?;
            }
        };
        if let Some((plan, save_model)) = save
            && saved_at != Some(self.step)
        {
            self.save(&plan.checkpoint(self.step), save_model, position)?;
            self.prune(plan)?;
        }
        Ok(end)
    }

    /// One optimizer step over the given micro-batches of this rank. On an error the parameters are unchanged, except that
    /// [`TrainerConfig::optimizer_in_backward`] may have updated some of them, which the error then says, and unless another
    /// rank was lost while new parameters were gathered.
    pub fn train_step(&mut self, micro_batches: &[HostBatch]) -> Result<StepReport> {
        let result = self.step_inner(micro_batches);
        self.abort_on_error(result)
    }

    fn step_inner(&mut self, micro_batches: &[HostBatch]) -> Result<StepReport> {
        let start = Instant::now();
        if micro_batches.is_empty() {
            return Err(Error::config("micro_batches", 0, "at least 1"));
        }
        let labels: usize = micro_batches.iter().map(HostBatch::num_label_tokens).sum();
        let tokens: usize = micro_batches.iter().map(HostBatch::tokens).sum();
        let mut counts = [labels as f64, tokens as f64];
        self.all_reduce(&mut counts)?;
        let [labels, tokens] = counts;

        let step = self.step + 1;
        let lr = self.config.schedule.lr(self.step, self.config.steps);
        let (totals, grad_norm) = match self.config.optimizer_in_backward {
            true => self.update_in_backward(micro_batches, labels, lr)?,
            false => self.update_after_backward(micro_batches, labels, lr)?,
        };
        if let Some(router_bias) = &self.config.router_bias {
            // The clone shares all buffers but the biases'.
            let model = update_router_bias(self.model().clone(), &totals.load, router_bias, self.optimizer.groups())?;
            self.model = Some(model);
        }
        let loss = totals.cross_entropy * label_scale(labels);

        if step == 1 {
            let uniform = (self.model().vocab_size() as f64).ln();
            tracing::info!(loss, uniform, "first loss, next to that of a uniform guess");
        }
        self.step = step;
        self.tokens += tokens as u64;
        let expert_load = totals.load.into_iter().enumerate();
        let seconds = start.elapsed().as_secs_f64();
        let ranks = self.ep.as_ref().map_or(1, EpGroup::world_size) as f64;
        // The attention part of the work depends on the length of the rows.
        let flops = self.model().flops_per_token(micro_batches[0].seq);
        let tflops = flops.map(|flops| flops * tokens / seconds.max(1e-9) / 1e12);
        Ok(StepReport {
            step,
            loss,
            balance_loss: totals.balance,
            z_loss: totals.z,
            grad_norm,
            lr,
            tokens: tokens as u64,
            label_tokens: labels as u64,
            seconds,
            update_seconds: self.update_seconds,
            tflops,
            mfu: tflops.zip(self.config.peak_tflops).map(|(tflops, peak)| tflops / peak / ranks),
            memory: B::device_memory(&self.device),
            expert_load: expert_load
                .filter_map(|(block, counts)| Some(ExpertLoad { block, counts: counts? }))
                .collect(),
        })
    }

    /// Writes model and training state to `dir`, which appears complete or not at all. Every rank calls it. `data` is the
    /// position of the next micro-batch.
    pub fn save(&self, dir: &Path, save_model: &dyn SaveModel<M>, data: serde_json::Value) -> Result<()> {
        let mut state = TrainerState::new(self.step, self.tokens, data, self.config.clone(), &self.optimizer, &self.table);
        state.running_norm = self.running_norm;
        write_folder(dir, self.ep.as_ref(), |dir| {
            save_model.save(self.model(), dir)?;
            write_state(dir, &state, &self.optimizer, &self.table, self.ep.as_ref())
        })
    }

    /// Continues the run that wrote `dir`: step count, optimizer state and data position. The weights are the caller's part,
    /// since the trainer was made from a model (load it from the same folder). Changed settings are reported in the log.
    pub fn resume(&mut self, dir: &Path, source: &mut dyn BatchSource) -> Result<()> {
        let state = TrainerState::read(dir)?;
        if state.step > self.config.steps {
            return Err(Error::config(
                "steps",
                self.config.steps,
                format!("at least the {} steps that {} has behind it", state.step, dir.display()),
            ));
        }
        if state.config != self.config {
            tracing::warn!(saved = ?state.config, now = ?self.config, "resuming with other settings");
        }
        read_tensors(dir, &state, &mut self.optimizer, &self.table, self.ep.as_ref(), &self.device)?;
        source.restore(&state.data)?;
        self.step = state.step;
        self.tokens = state.tokens;
        self.running_norm = state.running_norm.filter(|_| self.clips_by_running_norm());
        Ok(())
    }

    fn prune(&self, plan: &SavePlan) -> Result<()> {
        match self.ep.as_ref().is_none_or(|ep| ep.world_rank() == 0) {
            true => plan.prune(),
            false => Ok(()),
        }
    }

    fn all_reduce(&self, values: &mut [f64]) -> Result<()> {
        match self.ep.as_ref().filter(|ep| ep.world_size() > 1) {
            Some(ep) => Ok(ep.world().get().all_reduce_sum_f64(values)?),
            None => Ok(()),
        }
    }

    /// True on every rank when `flag` is true on any: all must take the same way.
    fn any_rank(&self, flag: bool) -> Result<bool> {
        let mut count = [f64::from(u8::from(flag))];
        self.all_reduce(&mut count)?;
        Ok(count[0] > 0.0)
    }

    /// Lets the other ranks end with an error instead of waiting for this one.
    fn abort_on_error<T>(&self, result: Result<T>) -> Result<T> {
        if let (Err(error), Some(ep)) = (&result, &self.ep) {
            ep.world().get().abort(&error.to_string());
        }
        result
    }
}
