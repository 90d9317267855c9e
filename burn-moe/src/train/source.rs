//! Where batches come from and where checkpoints go, as the trainer sees it.

use std::path::Path;

use crate::batch::HostBatch;
use crate::error::Result;

/// A stream of micro-batches that knows its position.
pub trait BatchSource {
    /// This rank's next micro-batch; None at the end of the data.
    fn next_batch(&mut self) -> Result<Option<HostBatch>>;

    /// Position of the next micro-batch, for a checkpoint.
    fn position(&self) -> Result<serde_json::Value>;

    /// Continues at a saved position.
    fn restore(&mut self, position: &serde_json::Value) -> Result<()>;
}

/// The same micro-batches again and again (tests, overfitting on purpose).
#[derive(Debug, Clone)]
pub struct RepeatSource {
    batches: Vec<HostBatch>,
    next: usize,
}

impl RepeatSource {
    /// Cycles through `batches`; without any, the source is empty.
    pub fn new(batches: Vec<HostBatch>) -> Self {
        Self { batches, next: 0 }
    }
}

impl BatchSource for RepeatSource {
    fn next_batch(&mut self) -> Result<Option<HostBatch>> {
        if self.batches.is_empty() {
            return Ok(None);
        }
        let batch = self.batches[self.next % self.batches.len()].clone();
        self.next += 1;
        Ok(Some(batch))
    }

    fn position(&self) -> Result<serde_json::Value> {
        Ok(self.next.into())
    }

    fn restore(&mut self, position: &serde_json::Value) -> Result<()> {
        let next = position
            .as_u64()
            .ok_or_else(|| crate::Error::config("data", position, "a number of micro-batches"))?;
        self.next = next as usize;
        Ok(())
    }
}

/// Writes the model of a checkpoint.
pub trait SaveModel<M> {
    /// Writes `model` into the existing folder `dir`. In an expert-parallel group every rank calls it with its own model.
    fn save(&self, model: &M, dir: &Path) -> Result<()>;
}

impl<M, F: Fn(&M, &Path) -> Result<()>> SaveModel<M> for F {
    fn save(&self, model: &M, dir: &Path) -> Result<()> {
        self(model, dir)
    }
}
