//! Counting sort of routed slots, row gather and weighted combine.

use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::numeric::{Real, dense, dims, float_tensor, int_tensor, wide, with_real};
use super::slice::ints;
use crate::backend::ExpertOrderPrim;

/// Stable counting sort of the slots by expert.
///
/// # Panics
/// If an id lies outside `0..num_experts`.
pub(crate) fn sort_by_expert(ids_tk: FlexTensor, num_experts: usize) -> ExpertOrderPrim<Flex> {
    let ids: Vec<usize> = ints(&ids_tk)
        .into_iter()
        .map(|id| match usize::try_from(id) {
            Ok(expert) if expert < num_experts => expert,
            _ => panic!("sort_by_expert: expert id {id} is outside 0..{num_experts}"),
        })
        .collect();
    let mut offsets = vec![0i32; num_experts + 1];
    for &expert in &ids {
        offsets[expert + 1] += 1;
    }
    for expert in 0..num_experts {
        offsets[expert + 1] += offsets[expert];
    }
    let mut next = offsets.clone();
    let mut slots = vec![0i32; ids.len()];
    let mut positions = vec![0i32; ids.len()];
    for (slot, &expert) in ids.iter().enumerate() {
        let position = next[expert];
        next[expert] += 1;
        slots[position as usize] = slot as i32;
        positions[slot] = position;
    }
    let r = ids.len();
    ExpertOrderPrim {
        slots_r: int_tensor(slots, [r]),
        positions_r: int_tensor(positions, [r]),
        offsets_e1: int_tensor(offsets, [num_experts + 1]),
    }
}

/// `rows[r] = x[slots[r] / K]`.
pub(crate) fn permute(x_td: FlexTensor, order: &ExpertOrderPrim<Flex>, top_k: usize) -> FlexTensor {
    let dtype = x_td.dtype();
    with_real!(dtype, A => {
        let x = dense(x_td);
        let [_, d] = dims(&x);
        let slots = ints(&order.slots_r);
        let rows = gather_tokens::<A>(&wide(&x), d, &slots, top_k);
        float_tensor(rows, [slots.len(), d], dtype)
    })
}

/// `out[t] = sum_j weights[t, j] * rows[positions[t*K + j]]`.
pub(crate) fn unpermute(rows_rd: FlexTensor, order: &ExpertOrderPrim<Flex>, weights_tk: Option<FlexTensor>, top_k: usize) -> FlexTensor {
    let dtype = rows_rd.dtype();
    with_real!(dtype, A => {
        let rows = dense(rows_rd);
        let [_, d] = dims(&rows);
        let positions = ints(&order.positions_r);
        let weights = weights_tk.map(dense);
        let weights = weights.as_ref().map(wide::<A>);
        let out = combine_rows::<A>(&wide(&rows), d, &positions, weights.as_deref(), top_k);
        float_tensor(out, [positions.len() / top_k, d], dtype)
    })
}

/// Gradients of [`unpermute`]: rows (their dtype) and weights (their dtype).
pub(crate) fn unpermute_backward(
    grad_td: FlexTensor,
    rows_rd: FlexTensor,
    order: &ExpertOrderPrim<Flex>,
    weights_tk: Option<FlexTensor>,
    top_k: usize,
) -> (FlexTensor, Option<FlexTensor>) {
    let dtype = rows_rd.dtype();
    with_real!(dtype, A => {
        let (grad, rows) = (dense(grad_td), dense(rows_rd));
        let [r, d] = dims(&rows);
        let (slots, positions) = (ints(&order.slots_r), ints(&order.positions_r));
        let (grad_wide, rows_wide) = (wide::<A>(&grad), wide::<A>(&rows));
        let mut grad_rows = gather_tokens::<A>(&grad_wide, d, &slots, top_k);
        let Some(weights) = weights_tk.map(dense) else {
            return (float_tensor(grad_rows, [r, d], dtype), None);
        };
        let weights_wide = wide::<A>(&weights);
        grad_rows.par_chunks_mut(d.max(1)).zip(&slots).for_each(|(row, &slot)| {
            let weight = weights_wide[slot as usize];
            row.iter_mut().for_each(|v| *v *= weight);
        });
        let grad_weights: Vec<A> = positions
            .par_iter()
            .enumerate()
            .map(|(slot, &position)| {
                let token = slot / top_k;
                A::dot(&grad_wide[token * d..(token + 1) * d], row(&rows_wide, d, position))
            })
            .collect();
        let grad_weights = float_tensor(grad_weights, [positions.len() / top_k, top_k], weights.dtype());
        (float_tensor(grad_rows, [r, d], dtype), Some(grad_weights))
    })
}

/// Rows of `x [T, d]` in slot order: row i is `x[slots[i] / K]`.
pub(crate) fn gather_tokens<A: Real>(x_td: &[A], d: usize, slots: &[i64], top_k: usize) -> Vec<A> {
    let mut rows = vec![A::zero(); slots.len() * d];
    rows.par_chunks_mut(d.max(1))
        .with_min_len(16)
        .zip(slots)
        .for_each(|(out, &slot)| out.copy_from_slice(row(x_td, d, slot / top_k as i64)));
    rows
}

/// Weighted sum of each token's rows: `[R, d]` to `[T, d]`.
pub(crate) fn combine_rows<A: Real>(rows_rd: &[A], d: usize, positions: &[i64], weights_tk: Option<&[A]>, top_k: usize) -> Vec<A> {
    let mut out = vec![A::zero(); positions.len() / top_k * d];
    out.par_chunks_mut(d.max(1)).with_min_len(16).enumerate().for_each(|(token, out)| {
        for slot in token * top_k..(token + 1) * top_k {
            let row = row(rows_rd, d, positions[slot]);
            match weights_tk {
                Some(weights) => out.iter_mut().zip(row).for_each(|(o, &v)| *o += weights[slot] * v),
                None => out.iter_mut().zip(row).for_each(|(o, &v)| *o += v),
            }
        }
    });
    out
}

fn row<A>(rows: &[A], d: usize, index: i64) -> &[A] {
    let index = index as usize;
    &rows[index * d..(index + 1) * d]
}
