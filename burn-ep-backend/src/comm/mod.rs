//! Expert-parallel communication.
//!
//! One trait, [`Communicator`], for every transport. Payloads at this level are host bytes: threads of one process
//! ([`LocalCommunicator`]) and processes ([`TcpCommunicator`]) on any backend. Device transports (`cuda/`) stand on one of these:
//! they answer the trait through it and carry tensors themselves, when a backend finds them behind a [`CommHandle`].

#[cfg(feature = "cuda")]
pub mod cuda;
mod group;
mod hub;
mod launch;
mod local;
mod ranks;
mod rendezvous;
mod round;
mod tcp;

use std::sync::{Arc, Mutex};

pub use group::EpGroup;
pub use launch::{DEFAULT_PORT, Launch};
pub use local::LocalCommunicator;
pub use ranks::Ranks;
pub use rendezvous::{Agreement, rendezvous};
pub use tcp::TcpCommunicator;

use crate::error::{OpError, Result};

/// Who sends how many rows to whom. Blocks are ordered by rank; both sides know the counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangePlan {
    /// Rows this rank sends to each rank.
    pub send: Vec<usize>,
    /// Rows this rank receives from each rank.
    pub recv: Vec<usize>,
}

impl ExchangePlan {
    /// The way back: what was received is sent.
    pub fn reversed(&self) -> Self {
        Self {
            send: self.recv.clone(),
            recv: self.send.clone(),
        }
    }
}

/// Collective operations between the ranks of one group. Every rank calls the same sequence of operations.
///
/// A rank that fails must call [`Communicator::abort`], so that the others end with an error instead of waiting.
pub trait Communicator: Send + Sync + std::fmt::Debug + std::any::Any {
    /// This rank, `0..world`.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// `send[i]` goes to rank i; the result holds what each rank sent here, in rank order.
    fn all_to_all(&self, send: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>>;
    /// Every rank's bytes, in rank order.
    fn all_gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;
    /// Element-wise sum over ranks, in rank order, so that every rank gets the same bits.
    fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()>;
    /// Element-wise sum of doubles, in rank order (losses, squared norms, counts).
    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<()>;
    /// Returns when every rank has arrived.
    fn barrier(&self) -> Result<()>;
    /// Make every pending and future operation of the job fail with `why`, in every group.
    fn abort(&self, why: &str);
    /// Why the job has ended, once it has.
    fn failure(&self) -> Option<String>;
    /// [`Communicator::failure`], or which rank is no longer there: a device operation that waits for it will not end.
    fn lost(&self) -> Option<String>;
    /// Whether the ranks are threads of one process, which autodiff makes wait for each other (see the training step).
    fn in_process(&self) -> bool;
    /// A communicator of some ranks of the job (not of this group), this one among them. Groups may work at the same time, and
    /// asking for the same ranks again gives the same group. It must not outlive the communicator it came from.
    fn subgroup(&self, ranks: Ranks) -> Result<Arc<dyn Communicator>>;
}

/// Shared communicator plus the first error that happened where none could be returned (a backward step).
#[derive(Clone, Debug)]
pub struct CommHandle {
    inner: Arc<dyn Communicator>,
    poison: Arc<Mutex<Option<OpError>>>,
}

impl CommHandle {
    /// Wrap a communicator.
    pub fn new(inner: impl Communicator) -> Self {
        Self {
            inner: Arc::new(inner),
            poison: Arc::default(),
        }
    }

    /// A handle of some ranks of the job, see [`Communicator::subgroup`]. Errors remembered by one are those of both.
    pub fn subgroup(&self, ranks: Ranks) -> Result<Self> {
        Ok(Self {
            inner: self.inner.subgroup(ranks)?,
            poison: self.poison.clone(),
        })
    }

    /// The communicator behind this handle.
    pub fn get(&self) -> &dyn Communicator {
        &*self.inner
    }

    /// Remember an error that could not be returned, and abort the group.
    pub fn poison(&self, error: OpError) {
        self.inner.abort(&error.to_string());
        let mut slot = self.poison.lock().unwrap_or_else(|e| e.into_inner());
        slot.get_or_insert(error);
    }

    /// The first remembered error, or why the job has ended. Call it after every backward.
    pub fn check(&self) -> Result<()> {
        if let Some(error) = &*self.poison.lock().unwrap_or_else(|e| e.into_inner()) {
            return Err(error.clone());
        }
        match self.inner.failure() {
            Some(why) => Err(OpError::Comm {
                rank: self.inner.rank(),
                world: self.inner.world(),
                op: "group",
                why,
            }),
            None => Ok(()),
        }
    }
}
