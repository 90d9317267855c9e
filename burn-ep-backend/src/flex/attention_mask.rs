//! Which keys each query sees: causality, window and documents as one range per query, padding as a flag per key.

use std::ops::Range;

use burn_flex::Flex;

use super::slice::{bools, ints};
use crate::backend::AttentionMaskPrim;
use crate::desc::AttentionDesc;

/// Which keys each query sees.
pub(super) struct Visible {
    /// `[B, Sq]`: keys by causality, window and document.
    ranges: Vec<Range<usize>>,
    /// `[B, Skv]`; empty when every key may be seen.
    keys: Vec<bool>,
    sq: usize,
    skv: usize,
}

impl Visible {
    pub(super) fn new([batch, sq, skv]: [usize; 3], mask: &AttentionMaskPrim<Flex>, desc: &AttentionDesc) -> Self {
        let doc_start_bs = mask.doc_start_bs.as_ref().map(ints);
        let mut ranges = vec![0..0; batch * sq];
        for (b, ranges) in ranges.chunks_mut(sq.max(1)).enumerate() {
            // First row of the next document, walking backwards; only needed when later keys are visible.
            let mut next_doc = skv;
            for (i, range) in ranges.iter_mut().enumerate().rev() {
                let row = i + skv - sq;
                let doc = doc_start_bs.as_ref().map_or(0, |doc| doc[b * sq + i].max(0) as usize);
                let window_start = desc.window.map_or(0, |window| (row + 1).saturating_sub(window));
                let end = if desc.causal { row + 1 } else { next_doc };
                *range = doc.max(window_start).min(end)..end;
                if doc == row {
                    next_doc = row;
                }
            }
        }
        Self {
            ranges,
            keys: mask.key_visible_bs.as_ref().map_or(Vec::new(), bools),
            sq,
            skv,
        }
    }

    pub(super) fn range(&self, b: usize, i: usize) -> Range<usize> {
        self.ranges[b * self.sq + i].clone()
    }

    /// Smallest range that holds everything a block of queries sees.
    pub(super) fn union(&self, b: usize, queries: Range<usize>) -> Range<usize> {
        let seen = queries.map(|i| self.range(b, i)).filter(|range| !range.is_empty());
        seen.reduce(|all, range| all.start.min(range.start)..all.end.max(range.end))
            .unwrap_or(0..0)
    }

    /// Whether the padding mask shows key j.
    pub(super) fn key(&self, b: usize, j: usize) -> bool {
        self.keys.get(b * self.skv + j).is_none_or(|&visible| visible)
    }

    /// Whether there is no padding mask.
    pub(super) fn all_keys(&self) -> bool {
        self.keys.is_empty()
    }
}
