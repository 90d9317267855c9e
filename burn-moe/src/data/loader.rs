//! The endless, resumable stream of batches.
//!
//! Epoch after epoch, the documents are shuffled (and packed) and their rows follow one another without a gap: a batch may
//! take the last rows of one epoch and the first of the next, so no row is dropped and every rank makes the same number of
//! steps. The position counts rows over all ranks, so that a run may resume on another number of ranks as long as the
//! global batch stays the same.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::batch::{Layout, first_fit};
use super::chat::Document;
use super::jsonl::Dataset;
use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::train::BatchSource;

/// Tokens of the largest micro-batch over all ranks.
const MAX_BATCH_TOKENS: usize = 1 << 26;

/// Shape and order of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Rows per rank and batch.
    pub batch: usize,
    /// Most tokens per row.
    pub seq: usize,
    /// Padding or packing.
    pub layout: Layout,
    /// Shuffle anew in every epoch; else file order.
    pub shuffle: bool,
    /// Seed of the shuffling.
    pub seed: u64,
    /// Token id of padding.
    pub pad_id: i32,
    /// This data-parallel rank.
    pub rank: usize,
    /// Number of data-parallel ranks.
    pub world: usize,
}

impl LoaderOptions {
    /// Shuffled, padded to the longest row, one rank.
    pub fn new(batch: usize, seq: usize) -> Self {
        Self {
            batch,
            seq,
            layout: Layout::default(),
            shuffle: true,
            seed: 0,
            pad_id: 0,
            rank: 0,
            world: 1,
        }
    }
}

/// Where the stream is; part of a training checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// Epoch of the next row, from 0.
    pub epoch: u64,
    /// Rows of that epoch already used, over all ranks.
    pub index: u64,
    /// Seed of the shuffling.
    pub seed: u64,
    /// Hash of the data set and of the settings that decide its rows.
    pub fingerprint: u64,
}

/// Batches of one rank.
#[derive(Debug, Clone)]
pub struct Loader {
    data: Arc<Dataset>,
    options: LoaderOptions,
    position: DataPosition,
    /// Documents of every row of the current epoch.
    rows: Vec<Vec<usize>>,
}

impl Loader {
    /// Starts at the first row of epoch 0. Refuses options that no batch could satisfy and documents longer than a row.
    pub fn new(data: Arc<Dataset>, options: LoaderOptions) -> Result<Self> {
        if options.batch == 0 {
            return Err(Error::config("batch", 0, "at least 1"));
        }
        if options.rank >= options.world {
            return Err(Error::config(
                "rank",
                options.rank,
                format!("below the world size {}", options.world),
            ));
        }
        if let Some((i, document)) = data.documents().iter().enumerate().find(|(_, d)| d.len() > options.seq) {
            let found = format!("{}, but document {i} has {} tokens", options.seq, document.len());
            return Err(Error::config("seq", found, "at least the length of the longest document"));
        }
        // What a batch allocates; beyond this a setting is a slip, and would take the machine down before any error.
        let row = match options.layout {
            Layout::PadToLongest => data.documents().iter().map(Document::len).max().unwrap_or(0),
            Layout::PadToMax | Layout::Packed => options.seq,
        };
        let rows = options.batch.saturating_mul(options.world);
        if rows.saturating_mul(row) > MAX_BATCH_TOKENS {
            let found = format!("{rows} rows of {row} tokens");
            return Err(Error::config(
                "batch",
                found,
                format!("at most {MAX_BATCH_TOKENS} tokens; lower `batch` or `seq`"),
            ));
        }
        let mut fingerprint = data.fingerprint() ^ u64::from(options.shuffle);
        if options.layout == Layout::Packed {
            fingerprint = mix(fingerprint ^ options.seq as u64);
        }
        let position = DataPosition {
            epoch: 0,
            index: 0,
            seed: options.seed,
            fingerprint,
        };
        let rows = epoch_rows(&data, &options, 0);
        Ok(Self {
            data,
            options,
            position,
            rows,
        })
    }

    /// The next batch of this rank. Never ends.
    pub fn next_batch(&mut self) -> Result<HostBatch> {
        let LoaderOptions {
            batch,
            seq,
            layout,
            pad_id,
            rank,
            world,
            ..
        } = self.options;
        let mine = rank * batch..(rank + 1) * batch;
        let mut picked: Vec<Vec<usize>> = Vec::with_capacity(batch);
        for i in 0..batch * world {
            if self.position.index == self.rows.len() as u64 {
                self.position.epoch += 1;
                self.position.index = 0;
                self.rows = epoch_rows(&self.data, &self.options, self.position.epoch);
            }
            if mine.contains(&i) {
                picked.push(self.rows[self.position.index as usize].clone());
            }
            self.position.index += 1;
        }
        let documents = self.data.documents();
        let rows: Vec<Vec<_>> = picked.iter().map(|row| row.iter().map(|&d| &documents[d]).collect()).collect();
        layout.collate(&rows, seq, pad_id)
    }

    /// Position of the next batch.
    pub fn position(&self) -> DataPosition {
        self.position
    }

    /// Continues at a saved position. Refuses one of another data set, seed or packing, where it would mean other rows.
    pub fn restore(&mut self, position: DataPosition) -> Result<()> {
        if position.seed != self.options.seed {
            return Err(Error::config(
                "seed",
                self.options.seed,
                format!("{} as in the checkpoint", position.seed),
            ));
        }
        if position.fingerprint != self.position.fingerprint {
            return Err(Error::config(
                "data",
                format!("fingerprint {:016x}", self.position.fingerprint),
                format!(
                    "{:016x}: the checkpoint was trained on other data or with another packing; \
                     start a new run from its weights instead of resuming",
                    position.fingerprint
                ),
            ));
        }
        let rows = epoch_rows(&self.data, &self.options, position.epoch);
        if position.index > rows.len() as u64 {
            return Err(Error::config(
                "position.index",
                position.index,
                format!("at most {} rows", rows.len()),
            ));
        }
        self.rows = rows;
        self.position = position;
        Ok(())
    }

    /// Batches after which `epochs` epochs have been seen, the last one rounded up.
    pub fn batches_in_epochs(&self, epochs: u64) -> u64 {
        let rows: u64 = (0..epochs).map(|e| epoch_rows(&self.data, &self.options, e).len() as u64).sum();
        rows.div_ceil((self.options.batch * self.options.world) as u64)
    }

    /// The documents behind the stream.
    pub fn dataset(&self) -> &Dataset {
        &self.data
    }
}

impl BatchSource for Loader {
    fn next_batch(&mut self) -> Result<Option<HostBatch>> {
        Loader::next_batch(self).map(Some)
    }

    fn position(&self) -> Result<serde_json::Value> {
        serde_json::to_value(self.position).map_err(|e| Error::config("position", e, "plain JSON"))
    }

    fn restore(&mut self, position: &serde_json::Value) -> Result<()> {
        let parsed =
            DataPosition::deserialize(position).map_err(|e| Error::config("position", format!("{position} ({e})"), "a data position"))?;
        Loader::restore(self, parsed)
    }
}

/// Documents of every row of an epoch: a function of data, options and epoch alone, so that a resumed run gets the same.
fn epoch_rows(data: &Dataset, options: &LoaderOptions, epoch: u64) -> Vec<Vec<usize>> {
    let documents = data.documents();
    let mut order: Vec<usize> = (0..documents.len()).collect();
    if options.shuffle {
        shuffle(&mut order, mix(options.seed) ^ mix(!epoch));
    }
    if options.layout != Layout::Packed {
        return order.into_iter().map(|d| vec![d]).collect();
    }
    let lengths: Vec<usize> = order.iter().map(|&d| documents[d].len()).collect();
    let packed = first_fit(&lengths, options.seq);
    packed.into_iter().map(|row| row.into_iter().map(|i| order[i]).collect()).collect()
}

/// Fisher-Yates. The generator is spelled out because checkpoints rely on it: a library may change its own.
fn shuffle(items: &mut [usize], seed: u64) {
    let mut state = seed;
    for last in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The high word of the product is uniform in 0..=last up to a bias of 2^-64 * last.
        let pick = (u128::from(mix(state)) * (last as u128 + 1)) >> 64;
        items.swap(last, pick as usize);
    }
}

/// Output function of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Document;

    /// Document i is `[i, i, ..]`, so that a batch shows which documents it holds.
    fn data(lengths: &[usize]) -> Arc<Dataset> {
        let documents = lengths
            .iter()
            .enumerate()
            .map(|(i, &len)| Document::new(vec![i as i32; len], |_| true));
        Arc::new(Dataset::from_documents(documents.collect()).unwrap())
    }

    fn options(batch: usize, rank: usize, world: usize) -> LoaderOptions {
        LoaderOptions {
            rank,
            world,
            seed: 7,
            ..LoaderOptions::new(batch, 8)
        }
    }

    fn first_tokens(batch: &HostBatch) -> Vec<i32> {
        batch.input_ids.chunks(batch.seq).map(|row| row[0]).collect()
    }

    #[test]
    fn every_epoch_shows_every_document_once_in_another_order() {
        let mut loader = Loader::new(data(&[3; 10]), options(5, 0, 1)).unwrap();
        let mut epoch = || {
            let mut seen = first_tokens(&loader.next_batch().unwrap());
            seen.extend(first_tokens(&loader.next_batch().unwrap()));
            seen
        };
        let (first, second) = (epoch(), epoch());
        assert_ne!(first, second);
        for mut order in [first, second] {
            order.sort();
            assert_eq!(order, Vec::from_iter(0..10));
        }
        assert_eq!(loader.batches_in_epochs(3), 6);
    }

    #[test]
    fn ranks_split_the_batch_of_one_rank() {
        let data = data(&[3; 7]);
        let mut whole = Loader::new(data.clone(), options(4, 0, 1)).unwrap();
        let mut ranks: Vec<Loader> = (0..2).map(|r| Loader::new(data.clone(), options(2, r, 2)).unwrap()).collect();
        for _ in 0..5 {
            let split: Vec<i32> = ranks.iter_mut().flat_map(|r| first_tokens(&r.next_batch().unwrap())).collect();
            assert_eq!(first_tokens(&whole.next_batch().unwrap()), split);
        }
        assert_eq!(ranks[0].position(), whole.position());
    }

    #[test]
    fn restore_continues_across_epochs_and_rank_counts() {
        for layout in [Layout::PadToLongest, Layout::Packed] {
            let data = data(&[3, 5, 2, 8, 4, 4, 1 + 1]);
            let with = |batch, rank, world| LoaderOptions {
                layout,
                ..options(batch, rank, world)
            };
            let mut through = Loader::new(data.clone(), with(2, 0, 1)).unwrap();
            for _ in 0..5 {
                through.next_batch().unwrap();
            }
            let saved = serde_json::to_string(&through.position()).unwrap();
            let position: DataPosition = serde_json::from_str(&saved).unwrap();
            let mut resumed = Loader::new(data.clone(), with(2, 0, 1)).unwrap();
            resumed.restore(position).unwrap();
            let mut second_rank = Loader::new(data.clone(), with(1, 1, 2)).unwrap();
            second_rank.restore(position).unwrap();
            for _ in 0..7 {
                let expected = through.next_batch().unwrap();
                assert_eq!(resumed.next_batch().unwrap(), expected);
                let row = second_rank.next_batch().unwrap();
                assert_eq!(row.input_ids[0], expected.input_ids[expected.seq]);
            }
        }
    }

    #[test]
    fn the_order_is_pinned() {
        // Recorded once: a change here breaks the resuming of every checkpoint written before it.
        let mut order: Vec<usize> = (0..8).collect();
        shuffle(&mut order, 42);
        assert_eq!(order, shuffled_by_hand(42));
    }

    /// The same shuffle from its description: swap position i, from the last down, with floor(u * (i + 1)) for the
    /// SplitMix64 stream u in [0, 1).
    fn shuffled_by_hand(seed: u64) -> Vec<usize> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_add(0x9e3779b97f4a7c15);
            let a = (state ^ (state >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
            let b = (a ^ (a >> 27)).wrapping_mul(0x94d049bb133111eb);
            b ^ (b >> 31)
        };
        let mut items: Vec<usize> = (0..8).collect();
        for i in (1..8).rev() {
            let j = (next() as f64 / 2f64.powi(64) * (i + 1) as f64) as usize;
            items.swap(i, j);
        }
        items
    }

    #[test]
    fn wrong_options_and_foreign_positions_are_refused() {
        let data = data(&[3, 5]);
        let error = Loader::new(data.clone(), LoaderOptions::new(1, 4)).unwrap_err().to_string();
        assert!(error.contains("seq") && error.contains("document 1 has 5 tokens"), "{error}");
        assert!(Loader::new(data.clone(), options(0, 0, 1)).is_err());
        assert!(Loader::new(data.clone(), options(1, 2, 2)).is_err());
        for (batch, seq, layout) in [
            (usize::MAX, 8, Layout::PadToLongest),
            (1, usize::MAX, Layout::Packed),
            (1 << 20, 1 << 20, Layout::PadToMax),
        ] {
            let huge = LoaderOptions {
                layout,
                ..LoaderOptions::new(batch, seq)
            };
            let error = Loader::new(data.clone(), huge).unwrap_err().to_string();
            assert!(error.contains("`batch`") && error.contains("at most"), "{error}");
        }

        let mut loader = Loader::new(data.clone(), options(1, 0, 1)).unwrap();
        let position = loader.position();
        let error = loader.restore(DataPosition { seed: 8, ..position }).unwrap_err().to_string();
        assert!(error.contains("`seed`") && error.contains('8'), "{error}");
        let other = Loader::new(super::tests::data(&[3, 5, 2]), options(1, 0, 1)).unwrap().position();
        assert!(loader.restore(other).unwrap_err().to_string().contains("other data"));
        assert!(loader.restore(DataPosition { index: 3, ..position }).is_err());
        assert_eq!(loader.position(), position);
    }
}
