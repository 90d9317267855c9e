//! Sets of ranks that work together.

use std::fmt;

use crate::error::{OpError, Result};

/// Evenly spaced ranks of a job, `first, first + step, ..`: all groups of a mesh have this form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ranks {
    pub first: usize,
    pub step: usize,
    pub len: usize,
}

impl Ranks {
    /// The ranks `0..world`.
    pub fn all(world: usize) -> Self {
        Self {
            first: 0,
            step: 1,
            len: world,
        }
    }

    /// Rank in the job of member `index`.
    pub fn member(self, index: usize) -> usize {
        self.first + index * self.step
    }

    /// Number of `rank` among the members; None when it is none of them.
    pub fn index_of(self, rank: usize) -> Option<usize> {
        let offset = rank.checked_sub(self.first)?;
        let index = offset / self.step.max(1);
        (index < self.len && self.member(index) == rank).then_some(index)
    }

    /// Checks that the set has members, all below `world`, and that `rank` is one of them.
    pub(crate) fn check(self, rank: usize, world: usize) -> Result<usize> {
        let inside = self.step > 0 && self.len > 0 && self.len <= world && self.member(self.len - 1) < world;
        let index = inside.then(|| self.index_of(rank)).flatten();
        index.ok_or_else(|| OpError::Setting {
            op: "communicator",
            field: "ranks",
            found: self.to_string(),
            expected: format!("ranks below {world}, this one ({rank}) among them"),
        })
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.len, self.step) {
            (0, _) => f.write_str("no rank"),
            (1, _) => write!(f, "rank {}", self.first),
            (_, 1) => write!(f, "ranks {} to {}", self.first, self.member(self.len - 1)),
            (_, step) => write!(f, "ranks {} to {} in steps of {step}", self.first, self.member(self.len - 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_by_rank() {
        let every_third = Ranks { first: 1, step: 3, len: 3 };
        assert_eq!([0, 1, 2].map(|i| every_third.member(i)), [1, 4, 7]);
        assert_eq!(
            [0, 1, 2, 4, 7, 10].map(|r| every_third.index_of(r)),
            [None, Some(0), None, Some(1), Some(2), None]
        );
        assert_eq!(every_third.check(4, 8).unwrap(), 1);
        for (rank, world) in [(2, 8), (4, 7)] {
            let error = every_third.check(rank, world).unwrap_err().to_string();
            assert!(
                error.contains("ranks 1 to 7 in steps of 3") && error.contains(&format!("below {world}")),
                "{error}"
            );
        }
    }
}
