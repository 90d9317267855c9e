//! Documents to rows: padding and packing.

use super::chat::Document;
use crate::batch::{HostBatch, IGNORE_INDEX};
use crate::error::{Error, Result};

/// How documents share the rows of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Layout {
    /// One document per row, padded to the longest of the batch.
    #[default]
    PadToLongest,
    /// One document per row, padded to the sequence length: every batch has the same shape.
    PadToMax,
    /// As many documents per row as fit. Attention, convolution and scan restart at every document.
    Packed,
}

impl Layout {
    /// One batch out of rows of documents. `seq` is the sequence length that no row may exceed.
    pub fn collate(self, rows: &[Vec<&Document>], seq: usize, pad_id: i32) -> Result<HostBatch> {
        let row_len = |row: &Vec<&Document>| row.iter().map(|d| d.len()).sum::<usize>();
        let longest = rows.iter().map(row_len).max().unwrap_or(0);
        if longest == 0 || longest > seq {
            return Err(Error::batch("seq", longest, format!("rows of 1 to {seq} tokens")));
        }
        if self == Self::Packed {
            return Ok(pack(rows, seq, pad_id));
        }
        if let Some(row) = rows.iter().find(|row| row.len() != 1) {
            return Err(Error::batch("documents", row.len(), "one per row in a padded batch"));
        }
        let seq = if self == Self::PadToMax { seq } else { longest };
        Ok(pad(rows.iter().map(|row| row[0]), seq, pad_id))
    }
}

/// Rows of one document each; padding on the right is masked and has no labels.
fn pad<'a>(documents: impl Iterator<Item = &'a Document>, seq: usize, pad_id: i32) -> HostBatch {
    let mut batch = HostBatch {
        seq,
        ..HostBatch::default()
    };
    let mut real = Vec::new();
    for document in documents {
        batch.batch += 1;
        append(&mut batch, &mut real, document);
        fill(&mut batch, &mut real, pad_id);
    }
    batch.attention_mask = real.contains(&false).then_some(real);
    batch
}

/// Rows of several documents; positions restart in each, and the padding after the last is a masked document of its own.
fn pack(rows: &[Vec<&Document>], seq: usize, pad_id: i32) -> HostBatch {
    let mut batch = HostBatch {
        batch: rows.len(),
        seq,
        ..HostBatch::default()
    };
    let (mut real, mut positions, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let mut start = 0;
        for document in row {
            append(&mut batch, &mut real, document);
            positions.extend(0..document.len() as i32);
            starts.extend(std::iter::repeat_n(start as i32, document.len()));
            start += document.len();
        }
        fill(&mut batch, &mut real, pad_id);
        positions.extend(0..(seq - start) as i32);
        starts.extend(std::iter::repeat_n(start as i32, seq - start));
    }
    batch.attention_mask = real.contains(&false).then_some(real);
    batch.position_ids = Some(positions);
    batch.doc_start = Some(starts);
    batch
}

fn append(batch: &mut HostBatch, real: &mut Vec<bool>, document: &Document) {
    batch.input_ids.extend(&document.ids);
    let first = batch.labels.len();
    batch.labels.extend(&document.labels);
    // Else the last token of the document before would be asked to predict this one.
    if let Some(label) = batch.labels.get_mut(first) {
        *label = IGNORE_INDEX;
    }
    real.resize(batch.input_ids.len(), true);
}

/// Pads to the end of the row.
fn fill(batch: &mut HostBatch, real: &mut Vec<bool>, pad_id: i32) {
    let end = batch.input_ids.len().next_multiple_of(batch.seq);
    batch.input_ids.resize(end, pad_id);
    batch.labels.resize(end, IGNORE_INDEX);
    real.resize(end, false);
}

/// First fit: every item goes into the first row with room for it, rows in the order in which they were opened.
/// Returns item indices per row. Items longer than `capacity` are the caller's to refuse; here they get rows of their own.
pub fn first_fit(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    // Room per row as a max tree: leaf `leaves + r` is row r, every node holds the most room below it. Rows not opened
    // yet have full room, so the search always ends at the first unopened row at the latest.
    let leaves = lengths.len().next_power_of_two();
    let mut room = vec![capacity; 2 * leaves];
    let mut rows: Vec<Vec<usize>> = Vec::new();
    for (item, &length) in lengths.iter().enumerate() {
        let needed = length.min(capacity);
        let mut node = 1;
        while node < leaves {
            node = if room[2 * node] >= needed { 2 * node } else { 2 * node + 1 };
        }
        let row = node - leaves;
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(item);
        room[node] -= needed;
        while node > 1 {
            node /= 2;
            room[node] = room[2 * node].max(room[2 * node + 1]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: i32 = IGNORE_INDEX;

    fn document(ids: &[i32]) -> Document {
        Document::new(ids.to_vec(), |_| true)
    }

    #[test]
    fn padding_masks_and_ignores() {
        let (a, b) = (document(&[5, 6, 7]), document(&[8, 9]));
        let batch = Layout::PadToLongest.collate(&[vec![&a], vec![&b]], 8, 0).unwrap();
        assert_eq!((batch.batch, batch.seq), (2, 3));
        assert_eq!(batch.input_ids, [5, 6, 7, 8, 9, 0]);
        assert_eq!(batch.labels, [X, 6, 7, X, 9, X]);
        assert_eq!(batch.attention_mask, Some(vec![true, true, true, true, true, false]));
        assert_eq!((&batch.position_ids, &batch.doc_start), (&None, &None));
        let fixed = Layout::PadToMax.collate(&[vec![&a]], 4, 1).unwrap();
        assert_eq!(fixed.input_ids, [5, 6, 7, 1]);
        let full = Layout::PadToLongest.collate(&[vec![&a]], 8, 0).unwrap();
        assert_eq!(full.attention_mask, None);
    }

    #[test]
    fn packed_documents_restart_and_do_not_predict_each_other() {
        let (a, b, c) = (document(&[5, 6, 7]), document(&[8, 9]), document(&[3, 4, 5, 6, 7]));
        let batch = Layout::Packed.collate(&[vec![&a, &b], vec![&c]], 6, 0).unwrap();
        assert_eq!(batch.input_ids, [5, 6, 7, 8, 9, 0, 3, 4, 5, 6, 7, 0]);
        assert_eq!(batch.labels, [X, 6, 7, X, 9, X, X, 4, 5, 6, 7, X]);
        assert_eq!(batch.position_ids, Some(vec![0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 0]));
        assert_eq!(batch.doc_start, Some(vec![0, 0, 0, 3, 3, 5, 0, 0, 0, 0, 0, 5]));
        let mask = batch.attention_mask.as_ref().unwrap();
        assert_eq!(mask.iter().filter(|real| !**real).count(), 2);
        assert!(!mask[5] && !mask[11]);
        // Token 7 ends document a and must not be asked for 8.
        assert_eq!(batch.shifted_labels(), [6, 7, X, 9, X, X, 4, 5, 6, 7, X, X]);
        batch.validate(10).unwrap();
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let a = document(&[5, 6, 7]);
        let error = Layout::Packed.collate(&[vec![&a, &a]], 5, 0).unwrap_err().to_string();
        assert!(error.contains("found 6") && error.contains("1 to 5"), "{error}");
        assert!(Layout::PadToMax.collate(&[vec![&a, &a]], 8, 0).is_err());
        assert!(Layout::PadToLongest.collate(&[], 8, 0).is_err());
    }

    #[test]
    fn first_fit_equals_a_linear_search() {
        assert_eq!(first_fit(&[3, 4, 2, 1, 5], 6), [vec![0, 2, 3], vec![1], vec![4]]);
        assert_eq!(first_fit(&[6, 6], 6), [vec![0], vec![1]]);
        assert!(first_fit(&[], 6).is_empty());
        let lengths: Vec<usize> = (0..500_usize).map(|i| 1 + (i * 7919 + i * i * 31) % 97).collect();
        let mut naive: Vec<(usize, Vec<usize>)> = Vec::new();
        for (i, &len) in lengths.iter().enumerate() {
            match naive.iter_mut().find(|(used, _)| used + len <= 100) {
                Some((used, items)) => {
                    *used += len;
                    items.push(i);
                }
                None => naive.push((len, vec![i])),
            }
        }
        let naive: Vec<Vec<usize>> = naive.into_iter().map(|(_, items)| items).collect();
        assert_eq!(first_fit(&lengths, 100), naive);
    }
}
