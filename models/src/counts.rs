//! Parameter counts and floating-point work computed from a config alone.

use std::fmt;

/// Parameters of a model by part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParamCount {
    /// Part and its parameters, in the order in which a token meets them.
    pub parts: Vec<(&'static str, u64)>,
    /// Parameters of the routed experts that one token does not use.
    pub idle: u64,
}

impl ParamCount {
    /// Adds `count` parameters to a part.
    pub fn add(&mut self, part: &'static str, count: u64) {
        match self.parts.iter_mut().find(|(name, _)| *name == part) {
            Some((_, total)) => *total += count,
            None if count > 0 => self.parts.push((part, count)),
            None => {}
        }
    }

    /// All parameters; a tied matrix counts once.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, count)| count).sum()
    }

    /// Parameters that take part in the computation of one token.
    pub fn active(&self) -> u64 {
        self.total() - self.idle
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
