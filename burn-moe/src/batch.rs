//! One micro-batch on the host, before it becomes tensors.

use crate::error::{Error, Result};

/// Label that does not count towards the loss.
pub const IGNORE_INDEX: i32 = -100;

/// Token rows with labels, in the conventions of Hugging Face: `labels[t]` is the token at t itself (the loss shifts), or
/// [`IGNORE_INDEX`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostBatch {
    /// Rows.
    pub batch: usize,
    /// Tokens per row.
    pub seq: usize,
    /// `batch * seq` token ids.
    pub input_ids: Vec<i32>,
    /// `batch * seq` labels, not shifted.
    pub labels: Vec<i32>,
    /// `batch * seq`, true for real tokens. None: all real.
    pub attention_mask: Option<Vec<bool>>,
    /// `batch * seq`. None: 0, 1, 2, .. in every row.
    pub position_ids: Option<Vec<i32>>,
    /// `batch * seq`: row index at which each token's document starts. None: one document per row.
    pub doc_start: Option<Vec<i32>>,
}

impl HostBatch {
    /// Tokens in the batch, padding included.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Target of every position: the next token's label, [`IGNORE_INDEX`] at the end of each row.
    pub fn shifted_labels(&self) -> Vec<i32> {
        let mut targets = Vec::with_capacity(self.labels.len());
        for row in self.labels.chunks(self.seq.max(1)) {
            targets.extend_from_slice(&row[1..]);
            targets.push(IGNORE_INDEX);
        }
        targets
    }

    /// Positions that count towards the loss.
    pub fn num_label_tokens(&self) -> usize {
        self.shifted_labels().iter().filter(|&&l| l != IGNORE_INDEX).count()
    }

    /// Position of every token.
    pub fn positions(&self) -> Vec<i32> {
        match &self.position_ids {
            Some(p) => p.clone(),
            None => (0..self.batch).flat_map(|_| 0..self.seq as i32).collect(),
        }
    }

    /// Checks lengths, ids and labels against the vocabulary.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        let n = self.tokens();
        let lengths = [
            ("input_ids", self.input_ids.len()),
            ("labels", self.labels.len()),
            ("attention_mask", self.attention_mask.as_ref().map_or(n, Vec::len)),
            ("position_ids", self.position_ids.as_ref().map_or(n, Vec::len)),
            ("doc_start", self.doc_start.as_ref().map_or(n, Vec::len)),
        ];
        for (field, len) in lengths {
            if len != n {
                return Err(Error::batch(
                    field,
                    len,
                    format!("batch * seq = {} * {} = {n} entries", self.batch, self.seq),
                ));
            }
        }
        if n == 0 {
            return Err(Error::batch("input_ids", 0, "at least one token"));
        }
        let range = 0..vocab_size as i64;
        if let Some((i, id)) = self.input_ids.iter().enumerate().find(|(_, id)| !range.contains(&i64::from(**id))) {
            return Err(Error::batch(
                "input_ids",
                format!("{id} at index {i}"),
                format!("a token id below vocab_size = {vocab_size}"),
            ));
        }
        if let Some((i, label)) = self
            .labels
            .iter()
            .enumerate()
            .find(|(_, l)| **l != IGNORE_INDEX && !range.contains(&i64::from(**l)))
        {
            return Err(Error::batch(
                "labels",
                format!("{label} at index {i}"),
                format!("-100 or a token id below vocab_size = {vocab_size}"),
            ));
        }
        if let Some(starts) = &self.doc_start {
            for (i, start) in starts.iter().enumerate() {
                if *start < 0 || *start as usize > i % self.seq {
                    return Err(Error::batch(
                        "doc_start",
                        format!("{start} at index {i}"),
                        format!("0 to {} (the token's index in its row)", i % self.seq),
                    ));
                }
            }
        }
        Ok(())
    }
}
