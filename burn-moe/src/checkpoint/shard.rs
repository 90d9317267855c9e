//! Which experts a rank reads and writes.

use std::ops::Range;

/// The experts of one stacked parameter that a rank holds: an equal, contiguous share of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertShare {
    /// Experts of this rank.
    pub local: Range<usize>,
    /// Experts of all ranks.
    pub total: usize,
}

/// Place of this process in the expert-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpRank {
    /// `0..size`.
    pub rank: usize,
    /// Ranks the experts are spread over.
    pub size: usize,
}

impl Default for EpRank {
    fn default() -> Self {
        Self { rank: 0, size: 1 }
    }
}

impl EpRank {
    /// The share of a parameter of which this rank's module holds `held` experts.
    pub(crate) fn share(self, held: usize) -> ExpertShare {
        ExpertShare {
            local: self.rank * held..(self.rank + 1) * held,
            total: self.size.saturating_mul(held),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_experts_once() {
        let shares: Vec<_> = (0..4).map(|rank| EpRank { rank, size: 4 }.share(2)).collect();
        assert!(shares.iter().all(|s| s.total == 8));
        assert_eq!(
            shares.iter().flat_map(|s| s.local.clone()).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        assert_eq!(EpRank::default().share(3), ExpertShare { local: 0..3, total: 3 });
    }
}
