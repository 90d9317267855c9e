//! Which experts live on which rank.

use std::ops::Range;

use super::CommHandle;
use crate::error::{OpError, Result};

/// An expert-parallel group: this rank holds a contiguous, equal share of every layer's experts.
#[derive(Clone, Debug)]
pub struct EpGroup {
    comm: CommHandle,
}

impl EpGroup {
    /// Group over all ranks of `comm`.
    pub fn new(comm: CommHandle) -> Self {
        Self { comm }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.get().rank()
    }

    /// Number of ranks the experts are spread over.
    pub fn size(&self) -> usize {
        self.comm.get().world()
    }

    /// Communicator of the group.
    pub fn comm(&self) -> &CommHandle {
        &self.comm
    }

    /// Experts of this rank; fails unless `num_experts` is a multiple of the group size.
    pub fn local_experts(&self, num_experts: usize) -> Result<Range<usize>> {
        let size = self.size();
        if num_experts == 0 || !num_experts.is_multiple_of(size) {
            return Err(OpError::Setting {
                op: "expert parallelism",
                field: "num_experts",
                found: num_experts.to_string(),
                expected: format!("a positive multiple of the expert-parallel size {size}"),
            });
        }
        let share = num_experts / size;
        Ok(self.rank() * share..(self.rank() + 1) * share)
    }
}
