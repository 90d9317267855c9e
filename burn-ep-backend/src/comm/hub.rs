//! The meeting place of a group's ranks, whatever carries their parts.
//!
//! Every operation is a round: each rank posts its part without blocking, waits until all parts are there, and takes
//! what is addressed to it. A rank that is ahead may post its next rounds while others still wait in this one.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::round::{Call, Part, RankState, Round, State};
use crate::error::{OpError, Result};

/// How long a rank waits for the others unless told otherwise. A rank that fails or ends is noticed at once, so this only
/// bounds hangs; it must be longer than the longest work that one rank does alone, such as writing a checkpoint.
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Rounds of one group. Ranks that are threads share one hub; a process has a hub of its own, into which a reader thread for
/// each peer posts what arrives.
#[derive(Debug)]
pub(super) struct Hub {
    world: usize,
    /// Ranks that take their results from this hub.
    takers: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Hub {
    pub(super) fn new(world: usize, takers: usize) -> Arc<Self> {
        Arc::new(Self {
            world,
            takers,
            state: Mutex::new(State {
                rounds: BTreeMap::new(),
                ranks: vec![RankState::default(); world],
                failure: None,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside the lock leaves at worst an unfinished round, which the timeout reports.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Puts the part of `rank` into its next round and returns the number of that round, or why it may not.
    pub(super) fn post(&self, rank: usize, call: Call, part: Part) -> Result<u64, String> {
        let mut state = self.lock();
        state.refuse_failed()?;
        let sequence = state.ranks[rank].next;
        state.ranks[rank].next += 1;
        state.ranks[rank].last = Some((sequence, call));
        let world = self.world;
        let round = state.rounds.entry(sequence).or_insert_with(|| Round {
            call,
            opened_by: rank,
            parts: (0..world).map(|_| None).collect(),
            taken: 0,
        });
        if round.call != call {
            return Err(format!(
                "operation {sequence}: rank {rank} called {call} while rank {} called {}",
                round.opened_by, round.call
            ));
        }
        round.parts[rank] = Some(part);
        if round.missing().is_empty() {
            self.changed.notify_all();
        }
        Ok(sequence)
    }

    /// Number of the round that `rank` posts next.
    pub(super) fn next(&self, rank: usize) -> Result<u64, String> {
        let state = self.lock();
        state.refuse_failed()?;
        Ok(state.ranks[rank].next)
    }

    /// Waits until round `sequence` is complete and takes the share of `rank` from every part, in rank order.
    pub(super) fn take(&self, rank: usize, sequence: u64, timeout: Duration) -> Result<Vec<Part>, String> {
        let mut state = self.lock();
        let deadline = Instant::now() + timeout;
        loop {
            state.refuse_failed()?;
            let missing = state.rounds[&sequence].missing();
            if missing.is_empty() {
                break;
            }
            if let Some(gone) = missing.iter().find(|&&r| state.ranks[r].gone.is_some()) {
                let how = state.ranks[*gone].gone.clone().unwrap_or_default();
                return Err(format!("operation {sequence}: {} {how}", state.describe(*gone)));
            }
            let now = Instant::now();
            if now >= deadline {
                let who: Vec<String> = missing.iter().map(|&r| state.describe(r)).collect();
                return Err(format!(
                    "operation {sequence}: waited {timeout:?} for {}; a rank that fails must abort the group, and all ranks must call the same operations",
                    who.join(", ")
                ));
            }
            state = self
                .changed
                .wait_timeout(state, deadline - now)
                .unwrap_or_else(|e| e.into_inner())
                .0;
        }
        let round = state
            .rounds
            .get_mut(&sequence)
            .expect("a round lives until every rank has taken from it");
        let parts = round.parts.iter_mut().map(|p| p.as_mut().expect("complete").share(rank)).collect();
        round.taken += 1;
        if round.taken == self.takers {
            state.rounds.remove(&sequence);
        }
        Ok(parts)
    }

    /// Ends the group for the first reason given.
    pub(super) fn end(&self, why: impl FnOnce() -> String) {
        self.lock().failure.get_or_insert_with(why);
        self.changed.notify_all();
    }

    /// `rank` will post nothing more; `how` completes the sentence "rank 3 ..".
    pub(super) fn leave(&self, rank: usize, how: &str) {
        self.lock().ranks[rank].gone.get_or_insert_with(|| how.to_string());
        self.changed.notify_all();
    }

    /// Why the group has ended, waiting for `patience` in case the news is still on its way.
    pub(super) fn failure(&self, patience: Duration) -> Option<String> {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, patience, |state| state.failure.is_none())
            .unwrap_or_else(|e| e.into_inner());
        state.failure.clone()
    }
}

/// Carries the parts of one rank to ranks that do not share its hub.
pub(super) trait Wire: Send + Sync + std::fmt::Debug {
    /// Sends every peer its share of `part`, which afterwards holds only what this rank keeps.
    fn send(&self, sequence: u64, call: Call, part: &mut Part) -> Result<(), String>;
    /// Tells every peer that the group has ended.
    fn send_end(&self, why: &str);
}

/// One rank at its hub: the operations of [`Communicator`](super::Communicator), whatever the wire.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) timeout: Duration,
    pub(super) hub: Arc<Hub>,
    /// None among threads of one process.
    pub(super) wire: Option<Box<dyn Wire>>,
}

impl Member {
    pub(super) fn world(&self) -> usize {
        self.hub.world
    }

    fn round(&self, call: Call, mut part: Part) -> Result<Vec<Part>> {
        let exchanged = match &self.wire {
            None => self.hub.post(self.rank, call, part),
            // The own part is posted last: until then no round can be complete, and nothing waits for it here.
            Some(wire) => self
                .hub
                .next(self.rank)
                .and_then(|sequence| wire.send(sequence, call, &mut part))
                .and_then(|()| self.hub.post(self.rank, call, part)),
        };
        exchanged
            .and_then(|sequence| self.hub.take(self.rank, sequence, self.timeout))
            .map_err(|why| self.fail(call, why))
    }

    /// Ends the group: the others must not wait for a rank that gave up.
    fn fail(&self, call: Call, why: String) -> OpError {
        let error = OpError::Comm {
            rank: self.rank,
            world: self.world(),
            op: call.op,
            why,
        };
        let text = error.to_string();
        if let Some(wire) = &self.wire {
            wire.send_end(&text);
        }
        self.hub.end(|| text);
        error
    }

    pub(super) fn all_to_all(&self, send: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let call = Call::new("all_to_all");
        if send.len() != self.world() {
            let why = format!("rank {} has {} payloads for {} ranks", self.rank, send.len(), self.world());
            return Err(self.fail(call, why));
        }
        Ok(self.round(call, Part::ForEach(send))?.iter_mut().map(Part::bytes).collect())
    }

    pub(super) fn all_gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let parts = self.round(Call::new("all_gather"), Part::ForAll(Arc::new(bytes)));
        Ok(parts?.iter_mut().map(Part::bytes).collect())
    }

    pub(super) fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()> {
        let part = Part::F32(Arc::new(values.to_vec()));
        let parts = self.round(Call::reduce("all_reduce_sum", values.len()), part)?;
        sum_in_rank_order(values, parts.iter().map(|p| if let Part::F32(v) = p { v.as_slice() } else { &[] }));
        Ok(())
    }

    pub(super) fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<()> {
        let part = Part::F64(Arc::new(values.to_vec()));
        let parts = self.round(Call::reduce("all_reduce_sum_f64", values.len()), part)?;
        sum_in_rank_order(values, parts.iter().map(|p| if let Part::F64(v) = p { v.as_slice() } else { &[] }));
        Ok(())
    }

    pub(super) fn barrier(&self) -> Result<()> {
        self.round(Call::new("barrier"), Part::Nothing).map(drop)
    }

    pub(super) fn abort(&self, why: &str) {
        let why = format!("rank {} aborted the group: {why}", self.rank);
        if let Some(wire) = &self.wire {
            wire.send_end(&why);
        }
        self.hub.end(|| why);
    }
}

/// The operations of a struct that holds a [`Member`] named `member`.
macro_rules! communicate_as_member {
    ($name:ty) => {
        impl $crate::comm::Communicator for $name {
            fn rank(&self) -> usize {
                self.member.rank
            }

            fn world(&self) -> usize {
                self.member.world()
            }

            fn all_to_all(&self, send: Vec<Vec<u8>>) -> $crate::error::Result<Vec<Vec<u8>>> {
                self.member.all_to_all(send)
            }

            fn all_gather(&self, bytes: Vec<u8>) -> $crate::error::Result<Vec<Vec<u8>>> {
                self.member.all_gather(bytes)
            }

            fn all_reduce_sum(&self, values: &mut [f32]) -> $crate::error::Result<()> {
                self.member.all_reduce_sum(values)
            }

            fn all_reduce_sum_f64(&self, values: &mut [f64]) -> $crate::error::Result<()> {
                self.member.all_reduce_sum_f64(values)
            }

            fn barrier(&self) -> $crate::error::Result<()> {
                self.member.barrier()
            }

            fn abort(&self, why: &str) {
                self.member.abort(why);
            }
        }
    };
}
pub(super) use communicate_as_member;

/// `out = parts[0] + parts[1] + ..`: the same order, hence the same bits, on every rank.
fn sum_in_rank_order<'a, T: Copy + std::ops::AddAssign + 'a>(out: &mut [T], mut parts: impl Iterator<Item = &'a [T]>) {
    if let Some(first) = parts.next() {
        out.copy_from_slice(first);
    }
    for part in parts {
        for (sum, value) in out.iter_mut().zip(part) {
            *sum += *value;
        }
    }
}
