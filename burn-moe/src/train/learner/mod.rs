//! Burn's `Learner` on the segmented step.
//!
//! [`learner`] turns a model and a [`TrainerConfig`] into a `burn_train::Learner`, ready for `SupervisedTraining`. One item
//! of its data loaders is the list of micro-batches of one optimizer step, so that the loss is normalised over all of them.

mod metrics;
mod model;
mod optimizer;

use burn::module::Module;
use burn_train::{Interrupter, Learner, LearningComponentsMarker};

pub use metrics::{ExpertLoadMetric, LearnerOutput, StepValue, TokensPerSecondMetric, ValueMetric};
pub use model::{Failure, LearnerModel, LearnerSettings};
pub use optimizer::{AdamWRecord, LearnerOptimizer, LearnerSchedule};

use super::{TrainBackend, TrainableLm, TrainerConfig};
use crate::error::{Error, Result};
use crate::optim::{AdamW, ParamTable, freeze};

/// The learner of [`learner`].
pub type CausalLmLearner<B, M> = Learner<LearningComponentsMarker<B, LearnerSchedule, LearnerModel<B, M>, LearnerOptimizer<B>>>;

/// A learner with our optimizer and schedule, and a place where its first error is kept, because Burn's training loop
/// cannot return one: pass the same `interrupter` to `SupervisedTraining::with_interrupter`, so that an error ends the
/// training, and look into [`Failure::take`] afterwards.
pub fn learner<B: TrainBackend, M: TrainableLm<B> + 'static>(
    model: M,
    config: &TrainerConfig,
    interrupter: Interrupter,
) -> Result<(CausalLmLearner<B, M>, Failure)> {
    config.validate()?;
    if config.router_bias.is_some() {
        return Err(Error::config(
            "router_bias",
            "some",
            "none: the learner has no place for it, use `Trainer`",
        ));
    }
    if config.optimizer_in_backward {
        let expected = "false: the learner updates the model after its backward passes, use `Trainer`";
        return Err(Error::config("optimizer_in_backward", true, expected));
    }
    if config.micro_batches != 1 {
        return Err(Error::config(
            "micro_batches",
            config.micro_batches,
            "1: with the learner, each item of the data loader lists the micro-batches of a step",
        ));
    }
    let failure = Failure::new(interrupter);
    let model = LearnerModel::new(model, LearnerSettings::new(config), failure.clone());
    let optimizer = AdamW::new(config.optimizer.clone(), ParamTable::new::<B, _>(&model))?;
    let model = freeze::<B, _>(model, optimizer.groups());
    let schedule = LearnerSchedule::new(config.schedule, config.steps);
    let optimizer = LearnerOptimizer::new(optimizer, ParamTable::new::<B, _>(&model), device(&model), failure.clone());
    Ok((Learner::new(model, optimizer, schedule), failure))
}

fn device<B: burn::tensor::backend::Backend, M: Module<B>>(module: &M) -> B::Device {
    module.devices().into_iter().next().unwrap_or_default()
}
