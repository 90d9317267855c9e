//! From gradients to new parameters.
//!
//! [`GradStore`] collects gradients segment by segment.

mod grad_store;
mod params;

pub use grad_store::GradStore;
pub use params::{ParamInfo, ParamTable, PathStack};
