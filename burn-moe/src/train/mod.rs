//! Training.
//!
//! [`forward_backward`] runs one micro-batch through a model, segment by segment; [`Trainer`] is the loop around it.

mod backend;
mod checkpoint;
mod config;
mod in_backward;
mod interrupt;
#[cfg(feature = "train")]
pub mod learner;
mod metrics;
mod schedule;
mod segment;
mod source;
mod state;
mod step;
mod trainer;
mod update;

pub use backend::{TrainBackend, TrainableLm};
pub use checkpoint::{SavePlan, latest_checkpoint, remove_checkpoint};
pub use config::TrainerConfig;
pub use interrupt::Interrupt;
pub use metrics::{ExpertLoad, StepReport};
pub use schedule::{Decay, Schedule};
pub use segment::{Recompute, Segment, SegmentHook, no_hook};
pub use source::{BatchSource, RepeatSource, SaveModel};
pub use state::{STATE_DIR, TrainerState};
pub use step::{MicroBatchStats, StepSettings, evaluate, forward_backward};
pub use trainer::{RunEnd, Trainer};
