//! The mesh of a job: which ranks share the experts, and which hold the same ones.
//!
//! ```text
//! world = replicas x ep, ep innermost        ep 4, world 8:
//!                                            rank 0 1 2 3 | 4 5 6 7     ep groups (rows)
//!                                            experts A B C D | A B C D  replicas: 0 and 4, 1 and 5, ..
//! ```
//!
//! Every rank has its own part of the batch. Routed experts are spread over a row and repeated in every row; everything else
//! is the same on all ranks.

use std::ops::Range;

use super::{CommHandle, Ranks};
use crate::error::{OpError, Result};

/// This rank's place in the mesh. It holds a contiguous, equal share of every layer's experts.
#[derive(Clone, Debug)]
pub struct EpGroup {
    world: CommHandle,
    ep: CommHandle,
    replicas: CommHandle,
}

impl EpGroup {
    /// Experts spread over all ranks of `comm`, no replicas.
    pub fn new(comm: CommHandle) -> Self {
        let rank = comm.get().rank();
        let alone = Ranks {
            first: rank,
            step: 1,
            len: 1,
        };
        let replicas = comm.subgroup(alone).expect("a rank is in the group of itself");
        Self {
            world: comm.clone(),
            ep: comm,
            replicas,
        }
    }

    /// Experts spread over every `ep` consecutive ranks of `comm`.
    ///
    /// # Errors
    /// A world that is no multiple of `ep`, with both numbers.
    pub fn mesh(comm: CommHandle, ep: usize) -> Result<Self> {
        let (rank, world) = (comm.get().rank(), comm.get().world());
        if ep == 0 || !world.is_multiple_of(ep) {
            return Err(OpError::Setting {
                op: "expert parallelism",
                field: "ep",
                found: ep.to_string(),
                expected: format!("a positive divisor of the {world} ranks of the job"),
            });
        }
        let row = Ranks {
            first: rank / ep * ep,
            step: 1,
            len: ep,
        };
        let column = Ranks {
            first: rank % ep,
            step: ep,
            len: world / ep,
        };
        Ok(Self {
            ep: comm.subgroup(row)?,
            replicas: comm.subgroup(column)?,
            world: comm,
        })
    }

    /// This rank among those that share the experts.
    pub fn rank(&self) -> usize {
        self.ep.get().rank()
    }

    /// Number of ranks the experts are spread over.
    pub fn size(&self) -> usize {
        self.ep.get().world()
    }

    /// Communicator of the ranks that share the experts.
    pub fn comm(&self) -> &CommHandle {
        &self.ep
    }

    /// Communicator of all ranks of the job.
    pub fn world(&self) -> &CommHandle {
        &self.world
    }

    /// This rank among all of the job.
    pub fn world_rank(&self) -> usize {
        self.world.get().rank()
    }

    /// Number of ranks of the job.
    pub fn world_size(&self) -> usize {
        self.world.get().world()
    }

    /// Communicator of the ranks that hold the same experts as this one.
    pub fn replicas(&self) -> &CommHandle {
        &self.replicas
    }

    /// Whether this rank is the one that speaks for its experts: the first of its replicas.
    pub fn is_first_replica(&self) -> bool {
        self.replicas.get().rank() == 0
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::LocalCommunicator;

    #[test]
    fn the_mesh_has_ep_innermost() {
        let places: Vec<_> = LocalCommunicator::group(8)
            .into_iter()
            .map(|comm| {
                let mesh = EpGroup::mesh(CommHandle::new(comm), 4).unwrap();
                let replica = mesh.replicas().get();
                (
                    mesh.rank(),
                    mesh.size(),
                    replica.rank(),
                    replica.world(),
                    mesh.local_experts(8).unwrap(),
                )
            })
            .collect();
        assert_eq!(places[1], (1, 4, 0, 2, 2..4));
        assert_eq!(places[6], (2, 4, 1, 2, 4..6));
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused_with_both_numbers() {
        for (world, ep) in [(8, 3), (2, 4), (2, 0)] {
            let comm = CommHandle::new(LocalCommunicator::group(world).remove(0));
            let error = EpGroup::mesh(comm, ep).unwrap_err().to_string();
            assert!(
                error.contains(&format!("`ep` is {ep}")) && error.contains(&format!("the {world} ranks")),
                "{error}"
            );
        }
        let comm = CommHandle::new(LocalCommunicator::group(8).remove(0));
        let error = EpGroup::new(comm).local_experts(63).unwrap_err().to_string();
        assert!(error.contains("63") && error.contains("size 8"), "{error}");
    }
}
