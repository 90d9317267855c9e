//! Rounds of a group: who called what, and the parts that wait to be taken.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use super::Ranks;
use crate::error::Result;

/// Everything the ranks of a job share, under one lock.
#[derive(Debug)]
pub(super) struct State {
    /// Operations of each set of ranks that has had one.
    pub(super) channels: HashMap<Ranks, Channel>,
    /// How each rank went away, once it has.
    pub(super) gone: Vec<Option<String>>,
    /// Why the job has ended: a failure in one group ends all.
    pub(super) failure: Option<String>,
}

impl State {
    pub(super) fn refuse_failed(&self) -> Result<(), String> {
        match &self.failure {
            Some(why) => Err(format!("the group has ended: {why}")),
            None => Ok(()),
        }
    }

    pub(super) fn channel(&mut self, group: Ranks) -> &mut Channel {
        self.channels.entry(group).or_insert_with(|| Channel {
            rounds: BTreeMap::new(),
            members: vec![MemberState::default(); group.len],
        })
    }

    /// Member `index` of `group` and where it is.
    pub(super) fn describe(&self, group: Ranks, index: usize) -> String {
        let rank = group.member(index);
        match self.channels.get(&group).and_then(|channel| channel.members[index].last) {
            Some((sequence, call)) => format!("rank {rank} (its last operation: {sequence}, {call})"),
            None => format!("rank {rank} (it has not called any operation)"),
        }
    }
}

/// Operations of one set of ranks.
#[derive(Debug)]
pub(super) struct Channel {
    /// Rounds that some member has not left yet, by sequence number.
    pub(super) rounds: BTreeMap<u64, Round>,
    pub(super) members: Vec<MemberState>,
}

/// Where a member is.
#[derive(Debug, Clone, Default)]
pub(super) struct MemberState {
    /// Sequence number of its next operation.
    pub(super) next: u64,
    pub(super) last: Option<(u64, Call)>,
}

/// One operation of the group.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) call: Call,
    pub(super) opened_by: usize,
    pub(super) parts: Vec<Option<Part>>,
    /// Ranks that have taken their result.
    pub(super) taken: usize,
}

impl Round {
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&r| self.parts[r].is_none()).collect()
    }
}

/// What all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) op: &'static str,
    /// Values reduced.
    pub(super) len: Option<usize>,
}

impl Call {
    pub(super) fn new(op: &'static str) -> Self {
        Self { op, len: None }
    }

    pub(super) fn reduce(op: &'static str, len: usize) -> Self {
        Self { op, len: Some(len) }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.len {
            Some(len) => write!(f, "{} of {len} values", self.op),
            None => f.write_str(self.op),
        }
    }
}

/// What one rank gives to a round.
#[derive(Debug)]
pub(super) enum Part {
    Nothing,
    /// One payload for each rank.
    ForEach(Vec<Vec<u8>>),
    /// A payload that was meant for one rank.
    ForOne(Vec<u8>),
    ForAll(Arc<Vec<u8>>),
    F32(Arc<Vec<f32>>),
    F64(Arc<Vec<f64>>),
}

impl Part {
    /// The share of `rank`: moved out when it is for that rank alone.
    pub(super) fn share(&mut self, rank: usize) -> Self {
        match self {
            Self::Nothing => Self::Nothing,
            Self::ForEach(payloads) => Self::ForOne(std::mem::take(&mut payloads[rank])),
            Self::ForOne(bytes) => Self::ForOne(std::mem::take(bytes)),
            Self::ForAll(bytes) => Self::ForAll(bytes.clone()),
            Self::F32(values) => Self::F32(values.clone()),
            Self::F64(values) => Self::F64(values.clone()),
        }
    }

    pub(super) fn bytes(&mut self) -> Vec<u8> {
        match self {
            Self::ForOne(bytes) => std::mem::take(bytes),
            Self::ForAll(bytes) => bytes.to_vec(),
            _ => Vec::new(),
        }
    }
}
