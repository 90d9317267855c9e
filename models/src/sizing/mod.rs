//! How much memory and time a job takes, computed from a config before anything is loaded.
//!
//! - [`MemoryPlan`]: bytes of one rank by what they are for.
//! - [`JobPlan`]: bytes exchanged and time of a step on a cluster.

mod job;
mod layers;
mod memory;

pub use job::{Cluster, JobPlan, JobSettings, Traffic};
pub use memory::{MemoryPlan, MemorySettings};
