//! Next-token cross entropy, normalised by the global number of label tokens.

use burn::tensor::{Int, Tensor};
use burn_ep_backend::comm::CommHandle;
use burn_ep_backend::{CrossEntropyDesc, MoeBackend, ops};

use crate::batch::HostBatch;
use crate::error::Result;
use crate::model::Head;

/// Sum over the counted rows of `-log p(label)`, fp32 `[1]`. `labels_t` `[T]` are already shifted (row t holds the token
/// that position t predicts).
pub fn token_cross_entropy<B: MoeBackend>(head: Head<B>, labels_t: Tensor<B, 1, Int>, desc: &CrossEntropyDesc) -> Result<Tensor<B, 1>> {
    Ok(ops::linear_cross_entropy(head.hidden_td, head.weight_vd, labels_t, desc)?)
}

/// Label tokens of one optimizer step: all micro-batches of all ranks of `comm`.
pub fn label_tokens(micro_batches: &[HostBatch], comm: Option<&CommHandle>) -> Result<f64> {
    let mut count = [micro_batches.iter().map(HostBatch::num_label_tokens).sum::<usize>() as f64];
    if let Some(comm) = comm {
        comm.get().all_reduce_sum_f64(&mut count)?;
    }
    Ok(count[0])
}

/// Factor of every label token's cross entropy: one over their global count, 0 when there are none.
pub fn label_scale(label_tokens: f64) -> f64 {
    if label_tokens > 0.0 { label_tokens.recip() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_shifted_labels_of_all_micro_batches() {
        let batch = |labels: &[i32]| HostBatch {
            batch: 1,
            seq: labels.len(),
            input_ids: vec![0; labels.len()],
            labels: labels.to_vec(),
            ..HostBatch::default()
        };
        // The first label of a row is never a target.
        let micro = [batch(&[5, 6, -100, 7]), batch(&[5, -100, -100, -100])];
        assert_eq!(label_tokens(&micro, None).unwrap(), 2.0);
        assert_eq!(label_scale(2.0), 0.5);
        assert_eq!(label_scale(0.0), 0.0);
    }
}
