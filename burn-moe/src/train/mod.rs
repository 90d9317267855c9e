//! Training.
//!
//! [`forward_backward`] runs one micro-batch through a model, segment by segment.

mod backend;
mod segment;
mod step;

pub use backend::{TrainBackend, TrainableLm};
pub use segment::{Recompute, Segment, SegmentHook, no_hook};
pub use step::{MicroBatchStats, StepSettings, evaluate, forward_backward};
