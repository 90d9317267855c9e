//! Expert-parallel communication.
//!
//! One trait, [`Communicator`], for every transport. Payloads at this level are host bytes, which serves threads in one
//! process on any backend; device transports are reached by downcasting [`CommHandle`] inside a backend's own
//! `exchange_rows`.

mod group;
mod hub;
mod launch;
mod local;
mod rendezvous;
mod round;
mod tcp;

use std::sync::{Arc, Mutex};

pub use group::EpGroup;
pub use launch::{DEFAULT_PORT, Launch};
pub use local::LocalCommunicator;
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
    /// Make every pending and future operation of the group fail with `why`.
    fn abort(&self, why: &str);
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

    /// The first remembered error, if any. Call it after every backward.
    pub fn check(&self) -> Result<()> {
        match &*self.poison.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}
