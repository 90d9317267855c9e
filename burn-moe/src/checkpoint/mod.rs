//! Hugging Face checkpoints: from a folder to a module and back.
//!
//! A load takes five steps: find the files (`index.rs`), map them and check their headers (`source.rs`, `header.rs`), plan
//! which tensors make up which parameter by the table of `mapping.rs` (`plan.rs`, `binding.rs`), report what does not fit
//! (`report.rs`), then place one
//! parameter at a time (`load.rs`), whose parts several threads read and convert (`read.rs`, `transform.rs`, `cast.rs`, `quantise/`). A
//! save runs the same table backwards (`write.rs`).

mod binding;
mod cast;
mod files;
mod header;
#[cfg(feature = "hub")]
pub mod hub;
mod index;
mod json;
mod layout;
mod load;
mod mapping;
mod pattern;
mod plan;
mod progress;
mod quantise;
mod read;
mod report;
mod shard;
mod source;
mod transform;
mod write;

pub use files::{check_writable, is_checkpoint_file, is_weight_file};
pub use json::{ConfigJson, as_f64, from_f64};
pub use load::{LoadOptions, inspect, load};
pub use mapping::{Layout, Rule, WeightMap};
pub use pattern::{Captures, Pattern};
pub use quantise::QuantFormat;
pub use report::{LoadReport, LoadedTensor, MismatchedTensor, MissingTensor, UnusedTensor};
pub use shard::EpRank;
pub use source::{CheckpointSource, TensorInfo, TieState};
pub use transform::{HostTensor, Step, backward, backward_shapes, forward, forward_shape};
pub use write::{SaveOptions, SaveReport, save};
