//! Grouped products as one plain matmul per expert. Reads the offsets back to the host, which kernels never do.

use std::ops::Range;

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_tensor::{Int, Tensor};

use super::prim::{Times, primitive, tensor};
use crate::backend::MoeBackend;

/// See [`crate::MoeBackend::grouped_matmul`].
pub fn grouped_matmul<B: MoeBackend>(rows: FloatTensor<B>, weight: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    let weight_eoi = tensor::<B, 3>(weight);
    let out = weight_eoi.dims()[1];
    primitive(each_group(tensor(rows), offsets, out, |rows_ri, e| {
        let weight_oi = weight_of(&weight_eoi, e).cast(rows_ri.dtype());
        rows_ri.times(weight_oi.transpose())
    }))
}

/// See [`crate::MoeBackend::grouped_matmul_grad_rows`].
pub fn grad_rows<B: MoeBackend>(grad: FloatTensor<B>, weight: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    let weight_eoi = tensor::<B, 3>(weight);
    let inner = weight_eoi.dims()[2];
    primitive(each_group(tensor(grad), offsets, inner, |grad_ro, e| {
        let weight_oi = weight_of(&weight_eoi, e).cast(grad_ro.dtype());
        grad_ro.times(weight_oi)
    }))
}

/// See [`crate::MoeBackend::grouped_matmul_grad_weight`].
pub fn grad_weight<B: MoeBackend>(grad: FloatTensor<B>, rows: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    let (grad_ro, rows_ri) = (tensor::<B, 2>(grad), tensor::<B, 2>(rows));
    let ([r, out], inner) = (grad_ro.dims(), rows_ri.dims()[1]);
    let rows_ri = rows_ri.cast(grad_ro.dtype());
    let weights = group_ranges::<B>(offsets, r)
        .into_iter()
        .map(|group| {
            if group.is_empty() {
                return Tensor::zeros([1, out, inner], (&grad_ro.device(), grad_ro.dtype()));
            }
            let grad_no = grad_ro.clone().slice([group.clone()]);
            grad_no.transpose().times(rows_ri.clone().slice([group])).unsqueeze_dim(0)
        })
        .collect();
    primitive(Tensor::<B, 3>::cat(weights, 0))
}

/// `product(rows of expert e, e)` for every group, `[R, width]`; rows past the last group are zero.
fn each_group<B: MoeBackend>(
    rows_ri: Tensor<B, 2>,
    offsets: IntTensor<B>,
    width: usize,
    product: impl Fn(Tensor<B, 2>, usize) -> Tensor<B, 2>,
) -> Tensor<B, 2> {
    let r = rows_ri.dims()[0];
    let groups = group_ranges::<B>(offsets, r);
    let end = groups.last().map_or(0, |last| last.end);
    let mut parts: Vec<Tensor<B, 2>> = groups
        .into_iter()
        .enumerate()
        .filter(|(_, group)| !group.is_empty())
        .map(|(e, group)| product(rows_ri.clone().slice([group]), e))
        .collect();
    if end < r || parts.is_empty() {
        parts.push(Tensor::zeros([r - end, width], (&rows_ri.device(), rows_ri.dtype())));
    }
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
}

fn weight_of<B: MoeBackend>(weight_eoi: &Tensor<B, 3>, expert: usize) -> Tensor<B, 2> {
    weight_eoi.clone().narrow(0, expert, 1).squeeze_dim(0)
}

fn group_ranges<B: MoeBackend>(offsets: IntTensor<B>, rows: usize) -> Vec<Range<usize>> {
    crate::device::note_read();
    let offsets: Vec<usize> = Tensor::<B, 1, Int>::from_primitive(offsets)
        .into_data()
        .iter::<i64>()
        .map(|offset| usize::try_from(offset).unwrap_or(0).min(rows))
        .collect();
    let mut end = 0;
    offsets
        .windows(2)
        .map(|pair| {
            let start = pair[0].max(end);
            end = pair[1].max(start);
            start..end
        })
        .collect()
}
