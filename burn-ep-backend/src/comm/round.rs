//! Rounds of a group: who called what, and the parts that wait to be taken.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::error::Result;

/// Everything a group shares, under one lock.
#[derive(Debug)]
pub(super) struct State {
    /// Rounds that some rank has not left yet, by sequence number.
    pub(super) rounds: BTreeMap<u64, Round>,
    pub(super) ranks: Vec<RankState>,
    /// Why the group has ended.
    pub(super) failure: Option<String>,
}

impl State {
    pub(super) fn refuse_failed(&self) -> Result<(), String> {
        match &self.failure {
            Some(why) => Err(format!("the group has ended: {why}")),
            None => Ok(()),
        }
    }

    pub(super) fn describe(&self, rank: usize) -> String {
        match self.ranks[rank].last {
            Some((sequence, call)) => format!("rank {rank} (its last operation: {sequence}, {call})"),
            None => format!("rank {rank} (it has not called any operation)"),
        }
    }
}

/// Where a rank is.
#[derive(Debug, Clone, Default)]
pub(super) struct RankState {
    /// Sequence number of this rank's next operation.
    pub(super) next: u64,
    pub(super) last: Option<(u64, Call)>,
    /// How it went away, once it has.
    pub(super) gone: Option<String>,
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
