//! The meeting place of a group's ranks, whatever carries their parts.
//!
//! Every operation is a round: each rank posts its part without blocking, waits until all parts are there, and takes
//! what is addressed to it. A rank that is ahead may post its next rounds while others still wait in this one.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Ranks;
use super::round::{Call, Part, Round, State};
use crate::error::{OpError, Result};

/// How long a rank waits for the others unless told otherwise. A rank that fails or ends is noticed at once, so this only
/// bounds hangs; it must be longer than the longest work that one rank does alone, such as writing a checkpoint.
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Rounds of the groups of one job. Ranks that are threads share one hub; a process has a hub of its own, into which a reader
/// thread for each peer posts what arrives.
#[derive(Debug)]
pub(super) struct Hub {
    world: usize,
    /// Whether all members of a group take their results from this hub, or only one.
    shared: bool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Hub {
    pub(super) fn new(world: usize, shared: bool) -> Arc<Self> {
        Arc::new(Self {
            world,
            shared,
            state: Mutex::new(State {
                channels: HashMap::new(),
                gone: vec![None; world],
                failure: None,
            }),
            changed: Condvar::new(),
        })
    }

    pub(super) fn world(&self) -> usize {
        self.world
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside the lock leaves at worst an unfinished round, which the timeout reports.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Puts the part of member `index` of `group` into its next round and returns the number of that round, or why it may not.
    pub(super) fn post(&self, group: Ranks, index: usize, call: Call, part: Part) -> Result<u64, String> {
        let mut state = self.lock();
        state.refuse_failed()?;
        let channel = state.channel(group);
        let member = &mut channel.members[index];
        let sequence = member.next;
        member.next += 1;
        member.last = Some((sequence, call));
        let round = channel.rounds.entry(sequence).or_insert_with(|| Round {
            call,
            opened_by: index,
            parts: (0..group.len).map(|_| None).collect(),
            taken: 0,
        });
        if round.call != call {
            return Err(format!(
                "operation {sequence}: rank {} called {call} while rank {} called {}",
                group.member(index),
                group.member(round.opened_by),
                round.call
            ));
        }
        round.parts[index] = Some(part);
        if round.missing().is_empty() {
            self.changed.notify_all();
        }
        Ok(sequence)
    }

    /// Number of the round that member `index` of `group` posts next.
    pub(super) fn next(&self, group: Ranks, index: usize) -> Result<u64, String> {
        let mut state = self.lock();
        state.refuse_failed()?;
        Ok(state.channel(group).members[index].next)
    }

    /// Waits until round `sequence` is complete and takes the share of member `index` from every part, in the group's order.
    pub(super) fn take(&self, group: Ranks, index: usize, sequence: u64, timeout: Duration) -> Result<Vec<Part>, String> {
        let mut state = self.lock();
        let deadline = Instant::now() + timeout;
        loop {
            state.refuse_failed()?;
            let missing = state.channel(group).rounds[&sequence].missing();
            if missing.is_empty() {
                break;
            }
            if let Some(gone) = missing.iter().find(|&&i| state.gone[group.member(i)].is_some()) {
                let how = state.gone[group.member(*gone)].clone().unwrap_or_default();
                return Err(format!("operation {sequence}: {} {how}", state.describe(group, *gone)));
            }
            let now = Instant::now();
            if now >= deadline {
                let who: Vec<String> = missing.iter().map(|&i| state.describe(group, i)).collect();
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
        let takers = if self.shared { group.len } else { 1 };
        let rounds = &mut state.channel(group).rounds;
        let round = rounds.get_mut(&sequence).expect("a round lives until every rank has taken from it");
        let parts = round.parts.iter_mut().map(|p| p.as_mut().expect("complete").share(index)).collect();
        round.taken += 1;
        if round.taken == takers {
            rounds.remove(&sequence);
        }
        Ok(parts)
    }

    /// Ends all groups for the first reason given.
    pub(super) fn end(&self, why: impl FnOnce() -> String) {
        self.lock().failure.get_or_insert_with(why);
        self.changed.notify_all();
    }

    /// `rank` will post nothing more; `how` completes the sentence "rank 3 ..".
    pub(super) fn leave(&self, rank: usize, how: &str) {
        self.lock().gone[rank].get_or_insert_with(|| how.to_string());
        self.changed.notify_all();
    }

    /// Why the job has ended, waiting for `patience` in case the news is still on its way.
    pub(super) fn failure(&self, patience: Duration) -> Option<String> {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, patience, |state| state.failure.is_none())
            .unwrap_or_else(|e| e.into_inner());
        state.failure.clone()
    }
}

impl Hub {
    /// Why no operation of all ranks can be done any more.
    pub(super) fn lost(&self) -> Option<String> {
        let state = self.lock();
        let gone = || {
            state
                .gone
                .iter()
                .enumerate()
                .find_map(|(rank, how)| how.as_ref().map(|how| format!("rank {rank} {how}")))
        };
        state.failure.clone().or_else(gone)
    }
}

/// Carries the parts of one rank to ranks that do not share its hub.
pub(super) trait Wire: Send + Sync + std::fmt::Debug {
    /// Sends every other member of `group` its share of `part`, which afterwards holds only what this rank keeps.
    fn send(&self, group: Ranks, sequence: u64, call: Call, part: &mut Part) -> Result<(), String>;
    /// Tells every peer that the group has ended.
    fn send_end(&self, why: &str);
}

/// One rank in one group at its hub: the operations of [`Communicator`](super::Communicator), whatever the wire.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) group: Ranks,
    /// Number of this rank in the group.
    pub(super) index: usize,
    pub(super) timeout: Duration,
    pub(super) hub: Arc<Hub>,
    /// None among threads of one process.
    pub(super) wire: Option<Arc<dyn Wire>>,
}

impl Member {
    pub(super) fn world(&self) -> usize {
        self.group.len
    }

    /// This rank in the job.
    pub(super) fn rank(&self) -> usize {
        self.group.member(self.index)
    }

    /// The same rank in a smaller group, with the ranks of the job.
    pub(super) fn subgroup(&self, ranks: Ranks) -> Result<Subgroup> {
        let index = ranks.check(self.rank(), self.hub.world())?;
        Ok(Subgroup {
            member: Self {
                group: ranks,
                index,
                ..self.clone()
            },
        })
    }

    fn round(&self, call: Call, mut part: Part) -> Result<Vec<Part>> {
        let (group, index) = (self.group, self.index);
        let exchanged = match &self.wire {
            None => self.hub.post(group, index, call, part),
            // The own part is posted last: until then no round can be complete, and nothing waits for it here.
            Some(wire) => self
                .hub
                .next(group, index)
                .and_then(|sequence| wire.send(group, sequence, call, &mut part))
                .and_then(|()| self.hub.post(group, index, call, part)),
        };
        exchanged
            .and_then(|sequence| self.hub.take(group, index, sequence, self.timeout))
            .map_err(|why| self.fail(call, why))
    }

    /// Ends the group: the others must not wait for a rank that gave up.
    fn fail(&self, call: Call, why: String) -> OpError {
        let error = OpError::Comm {
            rank: self.rank(),
            world: self.hub.world(),
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
            let why = format!("rank {} has {} payloads for {} ranks", self.rank(), send.len(), self.world());
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
        let why = format!("rank {} aborted the group: {why}", self.rank());
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
                self.member.index
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

            fn failure(&self) -> Option<String> {
                self.member.hub.failure(std::time::Duration::ZERO)
            }

            fn lost(&self) -> Option<String> {
                self.member.hub.lost()
            }

            fn in_process(&self) -> bool {
                self.member.wire.is_none()
            }

            fn subgroup(&self, ranks: $crate::comm::Ranks) -> $crate::error::Result<std::sync::Arc<dyn $crate::comm::Communicator>> {
                Ok(std::sync::Arc::new(self.member.subgroup(ranks)?))
            }
        }
    };
}
pub(super) use communicate_as_member;

/// Some ranks of a job. Its end is that of the communicator it came from.
#[derive(Debug)]
pub(super) struct Subgroup {
    member: Member,
}

communicate_as_member!(Subgroup);

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
