//! A causal language model as Burn's `TrainStep` and `InferenceStep`.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::module::{AutodiffModule, Module, ModuleDisplay};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_ep_backend::MoeBackend;
use burn_train::{InferenceStep, Interrupter, TrainOutput, TrainStep};

use super::super::metrics::{ExpertLoad, StepSums};
use super::super::{Recompute, StepSettings, TrainBackend, TrainableLm, TrainerConfig, evaluate, forward_backward, no_hook};
use super::{LearnerOutput, device};
use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::loss::{AuxScaling, label_scale, label_tokens};
use crate::model::CausalLm;
use crate::optim::{GradStore, ParamTable, clip_factor, global_norm};

/// The first error of a training that cannot return errors.
#[derive(Debug, Clone, Default)]
pub struct Failure {
    slot: Arc<Mutex<Option<Error>>>,
    interrupter: Option<Shared>,
}

/// `Interrupter` without `Debug`.
#[derive(Clone)]
struct Shared(Interrupter);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupter")
    }
}

impl Failure {
    /// An error will stop the training through `interrupter`.
    pub fn new(interrupter: Interrupter) -> Self {
        Self {
            slot: Arc::default(),
            interrupter: Some(Shared(interrupter)),
        }
    }

    /// The first error, if there was one.
    pub fn take(&self) -> Option<Error> {
        self.slot.lock().unwrap_or_else(|e| e.into_inner()).take()
    }

    pub(super) fn set(&self, error: Error) {
        tracing::error!(%error, "training stops");
        if let Some(Shared(interrupter)) = &self.interrupter {
            interrupter.stop(Some(&error.to_string()));
        }
        self.slot.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
    }
}

/// Settings of [`LearnerModel`], taken from a [`TrainerConfig`].
#[derive(Debug, Clone, PartialEq)]
pub struct LearnerSettings {
    recompute: Recompute,
    aux_scaling: AuxScaling,
    z_loss: f64,
    max_grad_norm: Option<f64>,
    force_balanced: bool,
}

impl LearnerSettings {
    /// The part of `config` that the model's step needs.
    pub fn new(config: &TrainerConfig) -> Self {
        Self {
            recompute: config.recompute,
            aux_scaling: config.aux_scaling,
            z_loss: config.z_loss,
            max_grad_norm: config.max_grad_norm,
            force_balanced: config.force_balanced,
        }
    }
}

/// A causal language model for Burn's learner.
#[derive(Module, Debug)]
pub struct LearnerModel<B: Backend, M: Module<B>> {
    /// The model itself.
    pub model: M,
    #[module(skip)]
    settings: LearnerSettings,
    #[module(skip)]
    failure: Failure,
    #[module(skip)]
    _backend: PhantomData<B>,
}

impl<B: Backend, M: Module<B>> LearnerModel<B, M> {
    /// Wraps `model`; errors of its steps go to `failure`.
    pub fn new(model: M, settings: LearnerSettings, failure: Failure) -> Self {
        Self {
            model,
            settings,
            failure,
            _backend: PhantomData,
        }
    }
}

impl<B: TrainBackend, M: TrainableLm<B>> LearnerModel<B, M> {
    fn gradients(&self, micro_batches: &[HostBatch]) -> Result<(GradStore<B::InnerBackend>, LearnerOutput)> {
        let start = Instant::now();
        let labels = label_tokens(micro_batches, None)?;
        let settings = StepSettings {
            micro_batch_weight: 1.0 / micro_batches.len().max(1) as f64,
            recompute: self.settings.recompute,
            aux_scaling: self.settings.aux_scaling,
            z_loss: self.settings.z_loss,
            force_balanced: self.settings.force_balanced,
            ..StepSettings::new(labels)
        };
        let device = device::<B, M>(&self.model);
        let mut grads = GradStore::new();
        let mut sums = StepSums::new();
        for batch in micro_batches {
            sums.add(forward_backward::<B, M>(
                &self.model,
                batch,
                &device,
                &settings,
                &mut grads,
                &mut no_hook,
            )?);
        }
        let (totals, _) = sums.totals(None, None)?;
        let loads = totals.load.into_iter().enumerate();
        let output = LearnerOutput {
            loss: totals.cross_entropy * label_scale(labels),
            label_tokens: labels as usize,
            tokens: micro_batches.iter().map(HostBatch::tokens).sum(),
            seconds: start.elapsed().as_secs_f64(),
            worst_load: loads
                .filter_map(|(block, counts)| Some(ExpertLoad { block, counts: counts? }.max_over_mean()))
                .reduce(f64::max),
        };
        if !output.loss.is_finite() {
            return Err(Error::Training {
                step: 0,
                why: format!("loss is {}; this item's gradients are dropped", output.loss),
            });
        }
        Ok((grads, output))
    }
}

impl<B: TrainBackend, M: TrainableLm<B>> TrainStep for LearnerModel<B, M> {
    /// The micro-batches of one optimizer step.
    type Input = Vec<HostBatch>;
    type Output = LearnerOutput;

    fn step(&self, micro_batches: Self::Input) -> TrainOutput<Self::Output> {
        match self.gradients(&micro_batches) {
            Ok((grads, item)) => TrainOutput {
                grads: grads.into_gradients_params(),
                item,
            },
            Err(error) => {
                self.failure.set(error);
                TrainOutput {
                    grads: GradientsParams::new(),
                    item: LearnerOutput::failed(),
                }
            }
        }
    }

    fn optimize<AB, O>(self, optim: &mut O, lr: f64, mut grads: GradientsParams) -> Self
    where
        AB: AutodiffBackend,
        O: Optimizer<Self, AB>,
        Self: AutodiffModule<AB>,
    {
        let Some(max_norm) = self.settings.max_grad_norm else {
            return optim.step(lr, self, grads);
        };
        let table = ParamTable::new::<AB, Self>(&self);
        let mut store = GradStore::<AB::InnerBackend>::from_gradients_params(&mut grads, &table);
        match global_norm(&store, &table, None) {
            Ok(norm) if norm.is_finite() => {
                store.scale(clip_factor(norm, max_norm));
                optim.step(lr, self, store.into_gradients_params())
            }
            Ok(norm) => {
                let why = format!("gradient norm is {norm}; the parameters are unchanged");
                self.failure.set(Error::Training { step: 0, why });
                self
            }
            Err(error) => {
                self.failure.set(error);
                self
            }
        }
    }
}

impl<B: MoeBackend, M: CausalLm<B> + ModuleDisplay> InferenceStep for LearnerModel<B, M> {
    /// Micro-batches, as in training.
    type Input = Vec<HostBatch>;
    type Output = LearnerOutput;

    fn step(&self, micro_batches: Self::Input) -> Self::Output {
        let start = Instant::now();
        let device = device::<B, M>(&self.model);
        let (mut sum, mut labels) = (0.0, 0);
        for batch in &micro_batches {
            match evaluate(&self.model, batch, &device, None) {
                Ok((loss, count)) => {
                    sum += loss;
                    labels += count;
                }
                Err(error) => {
                    self.failure.set(error);
                    return LearnerOutput::failed();
                }
            }
        }
        LearnerOutput {
            loss: sum * label_scale(labels as f64),
            label_tokens: labels,
            tokens: micro_batches.iter().map(HostBatch::tokens).sum(),
            seconds: start.elapsed().as_secs_f64(),
            worst_load: None,
        }
    }
}
