//! Grouped products: one task per tile of rows (or of weight rows), all experts in parallel.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::groups::{group_ranges, row_tiles, split_rows, weight_tiles};
use super::matrix::{Matrix, product};
use super::numeric::{Real, dense, dims, float_tensor, wide, wide_range, with_real};

/// `out[r] = rows[r] · weight[e]^T`, dtype of the rows.
pub(crate) fn grouped_matmul(rows_ri: FlexTensor, weight_eoi: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
    let [_, out, _] = dims(&weight_eoi);
    with_real!(rows_ri.dtype(), A => rows_times_weight::<A>(rows_ri, weight_eoi, &offsets_e1, out, true))
}

/// `out[r] = grad[r] · weight[e]`, dtype of the gradient.
pub(crate) fn grad_rows(grad_ro: FlexTensor, weight_eoi: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
    let [_, _, inner] = dims(&weight_eoi);
    with_real!(grad_ro.dtype(), A => rows_times_weight::<A>(grad_ro, weight_eoi, &offsets_e1, inner, false))
}

/// `out[e] = grad_e^T · rows_e`, dtype of the gradient.
pub(crate) fn grad_weight(grad_ro: FlexTensor, rows_ri: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
    with_real!(grad_ro.dtype(), A => weight_gradient::<A>(grad_ro, rows_ri, &offsets_e1))
}

fn rows_times_weight<A: Real>(rows: FlexTensor, weight: FlexTensor, offsets_e1: &FlexTensor, width: usize, transpose: bool) -> FlexTensor {
    let (rows, weight) = (dense(rows), dense(weight));
    let [r, inner] = dims(&rows);
    let [_, weight_rows, weight_cols] = dims(&weight);
    let tiles = row_tiles(&group_ranges(offsets_e1, r));
    let mut out = vec![A::zero(); r * width];
    let parts = split_rows(&mut out, width, &tiles);
    let rows_wide = wide::<A>(&rows);
    tiles.par_iter().zip(parts).for_each(|(tile, out)| {
        let size = weight_rows * weight_cols;
        let weight = wide_range::<A>(&weight, tile.expert * size..(tile.expert + 1) * size);
        let weight = Matrix::new(&weight, weight_rows, weight_cols, weight_cols);
        let weight = if transpose { weight.t() } else { weight };
        let rows = &rows_wide[tile.rows.start * inner..tile.rows.end * inner];
        product(out, Matrix::new(rows, tile.rows.len(), inner, inner), weight);
    });
    float_tensor(out, [r, width], rows.dtype())
}

fn weight_gradient<A: Real>(grad: FlexTensor, rows: FlexTensor, offsets_e1: &FlexTensor) -> FlexTensor {
    let (grad, rows) = (dense(grad), dense(rows));
    let [r, out_rows] = dims(&grad);
    let [_, inner] = dims(&rows);
    let groups = group_ranges(offsets_e1, r);
    let mut out = vec![A::zero(); groups.len() * out_rows * inner];
    let (grad_wide, rows_wide) = (wide::<A>(&grad), wide::<A>(&rows));
    weight_tiles(&mut out, &groups, out_rows, inner).into_par_iter().for_each(|tile| {
        let group = &groups[tile.expert];
        let columns = tile.out.len() / inner;
        let grad = &grad_wide[group.start * out_rows + tile.first..group.end * out_rows];
        let rows = &rows_wide[group.start * inner..group.end * inner];
        let grad = Matrix::new(grad, group.len(), columns, out_rows);
        product(tile.out, grad.t(), Matrix::new(rows, group.len(), inner, inner));
    });
    float_tensor(out, [groups.len(), out_rows, inner], grad.dtype())
}
