//! Hugging Face checkpoints: from a folder to a module and back.
//!
//! A load takes five steps: read the index (`index.rs`), map the files (`source.rs`), plan which tensors make up which
//! parameter (`plan.rs`, by the table of `mapping.rs`), check names and shapes and report (`report.rs`), then read, convert
//! and place one parameter at a time (`load.rs`). A save runs the same table backwards (`write.rs`).

mod json;
mod mapping;
mod pattern;
mod transform;

pub use json::{ConfigJson, as_f64, from_f64};
pub use mapping::{Layout, Rule, WeightMap};
pub use pattern::{Captures, Pattern};
pub use transform::{HostTensor, Step, backward, backward_shapes, forward, forward_shape};
