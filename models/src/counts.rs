//! Parameter counts and floating-point work computed from a config alone.

use std::fmt;

use burn_moe::{Error, Result};

/// Most parameters a config may ask for, a thousand times the largest published model.
const MAX_PARAMETERS: u64 = 1 << 50;

fn saturate(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Parameters of a model by part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParamCount {
    /// Part and its parameters, in the order in which a token meets them.
    pub parts: Vec<(&'static str, u64)>,
    /// Parameters of the routed experts that one token does not use.
    pub idle: u64,
}

impl ParamCount {
    /// Adds `count` parameters to a part. Counts saturate: a config may be hostile.
    pub(crate) fn add(&mut self, part: &'static str, count: u128) {
        let count = saturate(count);
        match self.parts.iter_mut().find(|(name, _)| *name == part) {
            Some((_, total)) => *total = total.saturating_add(count),
            None if count > 0 => self.parts.push((part, count)),
            None => {}
        }
    }

    /// Adds `count` parameters of which a token uses none.
    pub(crate) fn add_idle(&mut self, count: u128) {
        self.idle = self.idle.saturating_add(saturate(count));
    }

    /// Refuses models that no machine holds, so that shapes and sizes can be multiplied without care.
    pub(crate) fn check(&self) -> Result<()> {
        if self.total() <= MAX_PARAMETERS {
            return Ok(());
        }
        Err(Error::config(
            "config.json",
            format!("sizes that multiply to {} parameters", self.total()),
            format!("at most {MAX_PARAMETERS}: check the widths, counts and the number of layers"),
        ))
    }

    /// All parameters; a tied matrix counts once.
    pub fn total(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// Parameters that take part in the computation of one token.
    pub fn active(&self) -> u64 {
        self.total().saturating_sub(self.idle)
    }
}

impl fmt::Display for ParamCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (part, count) in &self.parts {
            writeln!(f, "{part:<16} {count:>16}")?;
        }
        writeln!(f, "{:<16} {:>16}", "total", self.total())?;
        write!(f, "{:<16} {:>16}", "active per token", self.active())
    }
}

/// Floating-point operations per weight and token of one training step: a multiply-add is 2, the backward costs twice
/// the forward. Recomputation is never counted.
pub const FLOPS_PER_WEIGHT: f64 = 6.0;

/// Operations per token of causal scores and values over sequences of `seq` tokens: on average half of the keys are seen.
pub fn attention_score_flops(seq: usize, heads: usize, head_dim: usize) -> f64 {
    FLOPS_PER_WEIGHT * seq as f64 * (heads * head_dim) as f64
}
