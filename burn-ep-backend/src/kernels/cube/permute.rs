//! Gather of token rows by expert order, weighted sum back, and their gradients. One cube per output row, no atomics.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty, mappable};
use super::launch::{PLANE, addresses, dense_f32, matrix_dims, row_units, vector_size};
use super::reduce::{team_sum, vector_sum};
use crate::MoeBackend;
use crate::backend::ExpertOrderPrim;

/// Rows of a cube of [`gather_kernel`]: loads of several rows are under way at once.
const ROWS: usize = 4;

/// [`ROWS`] consecutive rows a cube. `pitch`: from one row of `x` to the next.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<T: Float, N: Size>(
    x: &Tensor<Vector<T, N>>,
    slots: &Tensor<i32>,
    out: &mut Tensor<Vector<T, N>>,
    rows: usize,
    width: usize,
    pitch: usize,
    top_k: usize,
    #[define(T)] _dtype: StorageType,
) {
    let first = CUBE_POS * ROWS;
    let mut from = Array::<usize>::new(ROWS);
    #[unroll]
    for j in 0..ROWS {
        // the last cube copies its last row several times
        from[j] = slots[min(first + j, rows - 1)] as usize / top_k * pitch;
    }
    let mut i = UNIT_POS as usize;
    while i < width {
        let mut values = Array::<Vector<T, N>>::new(ROWS);
        #[unroll]
        for j in 0..ROWS {
            values[j] = x[from[j] + i];
        }
        #[unroll]
        for j in 0..ROWS {
            out[min(first + j, rows - 1) * width + i] = values[j];
        }
        i += CUBE_DIM as usize;
    }
}

/// Expert of a sorted row: the last one whose rows start at or before it. Rows past the end count as the last expert's.
#[cube]
pub fn expert_of_row(offsets: &Tensor<i32>, row: usize) -> usize {
    let mut low = 0usize;
    let mut high = offsets.shape(0) - 1;
    while low + 1 < high {
        let middle = (low + high) / 2;
        if offsets[middle] as usize <= row {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// One cube per token. `pitch`: from one of the `rows` to the next.
#[cube(launch_unchecked, address_type = "dynamic")]
fn combine_kernel<T: Float, N: Size>(
    rows: &Tensor<Vector<T, N>>,
    positions: &Tensor<i32>,
    weights: &Tensor<f32>,
    bias: &Tensor<Vector<f32, N>>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<Vector<T, N>>,
    width: usize,
    pitch: usize,
    #[comptime] top_k: usize,
    #[comptime] weighted: bool,
    #[comptime] biased: bool,
    #[define(T)] _dtype: StorageType,
) {
    let first = CUBE_POS * top_k;
    let mut expert = SharedMemory::<u32>::new(top_k);
    if comptime!(biased) {
        let mut j = UNIT_POS as usize;
        while j < top_k {
            expert[j] = u32::cast_from(expert_of_row(offsets, positions[first + j] as usize));
            j += CUBE_DIM as usize;
        }
        sync_cube();
    }
    let mut i = UNIT_POS as usize;
    while i < width {
        let mut sum = Vector::<f32, N>::new(0.0);
        for j in 0..top_k {
            let row = positions[first + j] as usize;
            let mut value = Vector::<f32, N>::cast_from(rows[row * pitch + i]);
            if comptime!(biased) {
                value += bias[expert[j] as usize * width + i];
            }
            if comptime!(weighted) {
                value *= Vector::<f32, N>::new(weights[first + j]);
            }
            sum += value;
        }
        out[CUBE_POS * width + i] = Vector::cast_from(sum);
        i += CUBE_DIM as usize;
    }
}

/// One cube per sorted row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn combine_backward_kernel<T: Float, N: Size>(
    grad: &Tensor<Vector<T, N>>,
    rows: &Tensor<Vector<T, N>>,
    slots: &Tensor<i32>,
    weights: &Tensor<f32>,
    grad_rows: &mut Tensor<Vector<T, N>>,
    grad_weights: &mut Tensor<f32>,
    width: usize,
    top_k: usize,
    #[comptime] planes: usize,
    #[define(T)] _dtype: StorageType,
) {
    let slot = slots[CUBE_POS] as usize;
    let (token, row) = (slot / top_k * width, CUBE_POS * width);
    let weight = Vector::<f32, N>::new(weights[slot]);
    let mut dot = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < width {
        let g = Vector::<f32, N>::cast_from(grad[token + i]);
        dot += g * Vector::<f32, N>::cast_from(rows[row + i]);
        grad_rows[row + i] = Vector::cast_from(g * weight);
        i += CUBE_DIM as usize;
    }
    let total = team_sum(vector_sum::<N>(dot), planes);
    if UNIT_POS == 0 {
        grad_weights[slot] = total;
    }
}

/// Whether the kernels of this file take the rows in this order.
pub fn supports<B>(rows: &CudaTensor, order: &ExpertOrderPrim<B>) -> bool
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let ints = [&order.slots_r, &order.positions_r, &order.offsets_e1];
    super::fits([rows]) && rows.shape().num_elements() > 0 && ints.iter().all(|t| t.dtype == DType::I32 && t.shape().num_elements() > 0)
}

/// A matrix that the kernels can read row by row, and the elements from one row to the next. CubeCL pads rows of uploads and
/// of eager outputs; copying them would cost more than the kernel.
fn pitched(x: CudaTensor) -> (CudaTensor, usize) {
    let x = mappable(x);
    let [rows, width] = matrix_dims(&x);
    let pitch = if rows > 1 { x.meta.strides()[0] } else { width };
    (x, pitch)
}

/// See [`MoeBackend::moe_permute`].
pub fn permute(x: CudaTensor, slots: CudaTensor, top_k: usize) -> CudaTensor {
    let ((x, pitch), slots) = (pitched(x), dense(slots));
    let [_, d] = matrix_dims(&x);
    let [r] = slots.shape().dims::<1>();
    let out = empty(&x, &[r, d], x.dtype);
    let vector = vector_size(x.dtype, d);
    let width = d / vector;
    // SAFETY: the cubes cover the rows of `slots`, which are below `T * top_k`; the rows of `x` lie `pitch` apart, the
    // other tensors are dense.
    unsafe {
        gather_kernel::launch_unchecked(
            &x.client.clone(),
            CubeCount::Static(r.div_ceil(ROWS) as u32, 1, 1),
            CubeDim::new_1d(row_units(width)),
            addresses(&[&x, &out]),
            vector,
            x.clone().into_tensor_arg(),
            slots.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            r,
            width,
            pitch / vector,
            top_k,
            x.dtype.into(),
        );
    }
    out
}

/// See [`MoeBackend::moe_unpermute`]; the bias `[E, D]` of each row's expert is added first.
pub fn unpermute(
    rows: CudaTensor,
    positions: CudaTensor,
    weights: Option<CudaTensor>,
    bias: Option<(CudaTensor, CudaTensor)>,
    top_k: usize,
) -> CudaTensor {
    let ((rows, pitch), positions) = (pitched(rows), dense(positions));
    let [r, d] = matrix_dims(&rows);
    let tokens = r / top_k;
    let out = empty(&rows, &[tokens, d], rows.dtype);
    let vector = vector_size(rows.dtype, d);
    let width = d / vector;
    let weighted = weights.is_some();
    let biased = bias.is_some();
    // An absent input is never read; any tensor stands in for it.
    let unread = empty(&rows, &[vector], DType::F32);
    let weights = weights.map_or_else(|| unread.clone(), dense_f32);
    let (bias, offsets) = bias.map_or_else(|| (unread, positions.clone()), |(bias, offsets)| (dense_f32(bias), dense(offsets)));
    // SAFETY: one cube per token; positions are below R; the rows lie `pitch` apart, the other tensors are dense.
    unsafe {
        combine_kernel::launch_unchecked(
            &rows.client.clone(),
            CubeCount::Static(tokens as u32, 1, 1),
            CubeDim::new_1d(row_units(width)),
            addresses(&[&rows, &bias]),
            vector,
            rows.clone().into_tensor_arg(),
            positions.into_tensor_arg(),
            weights.into_tensor_arg(),
            bias.into_tensor_arg(),
            offsets.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            width,
            pitch / vector,
            top_k,
            weighted,
            biased,
            rows.dtype.into(),
        );
    }
    out
}

/// See [`MoeBackend::moe_unpermute_backward`], with weights.
pub fn unpermute_backward(
    grad: CudaTensor,
    rows: CudaTensor,
    slots: CudaTensor,
    weights: CudaTensor,
    top_k: usize,
) -> (CudaTensor, CudaTensor) {
    let dtype = rows.dtype;
    let (grad, rows, slots) = (dense(burn_cubecl::kernel::cast(grad, dtype)), dense(rows), dense(slots));
    let ([r, d], weights_dtype) = (matrix_dims(&rows), weights.dtype);
    let (grad_rows, grad_weights) = (empty(&rows, &[r, d], dtype), empty(&rows, &[r / top_k, top_k], DType::F32));
    let vector = vector_size(dtype, d);
    let width = d / vector;
    let units = row_units(width);
    // SAFETY: one cube per sorted row; each slot occurs once, so every weight's gradient is written; all tensors are dense.
    unsafe {
        combine_backward_kernel::launch_unchecked(
            &rows.client.clone(),
            CubeCount::Static(r as u32, 1, 1),
            CubeDim::new_1d(units),
            addresses(&[&rows]),
            vector,
            grad.into_tensor_arg(),
            rows.into_tensor_arg(),
            slots.into_tensor_arg(),
            dense_f32(weights).into_tensor_arg(),
            grad_rows.clone().into_tensor_arg(),
            grad_weights.clone().into_tensor_arg(),
            width,
            top_k,
            (units / PLANE) as usize,
            dtype.into(),
        );
    }
    (grad_rows, burn_cubecl::kernel::cast(grad_weights, weights_dtype))
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn permute_kernels_compile_for_sm_90a() {
        for (dtype, vector) in [(DType::BF16, 8), (DType::BF16, 1), (DType::F32, 4), (DType::F16, 2)] {
            compile(256, |b| {
                use gather_kernel::{N, T};
                b.scope.register_type::<T>(dtype.into());
                b.scope.register_size::<N>(vector);
                let (x, slots, out) = (input(b), input(b), output(b));
                let [rows, width, pitch, top_k] = [(); 4].map(|()| scalar::<usize>(b));
                gather_kernel::expand::<T, N>(&mut b.scope, vector, x, slots, out, rows, width, pitch, top_k, dtype.into());
            });
            for (weighted, biased) in [(false, false), (true, false), (true, true)] {
                compile(256, |b| {
                    use combine_kernel::{N, T};
                    b.scope.register_type::<T>(dtype.into());
                    b.scope.register_size::<N>(vector);
                    let (rows, positions, weights, bias, offsets) = (input(b), input(b), input(b), input(b), input(b));
                    let (out, width, pitch) = (output(b), scalar::<usize>(b), scalar::<usize>(b));
                    let scope = &mut b.scope;
                    combine_kernel::expand::<T, N>(
                        scope,
                        vector,
                        rows,
                        positions,
                        weights,
                        bias,
                        offsets,
                        out,
                        width,
                        pitch,
                        6,
                        weighted,
                        biased,
                        dtype.into(),
                    );
                });
            }
            compile(256, |b| {
                use combine_backward_kernel::{N, T};
                b.scope.register_type::<T>(dtype.into());
                b.scope.register_size::<N>(vector);
                let (grad, rows, slots, weights) = (input(b), input(b), input(b), input(b));
                let (grad_rows, grad_weights) = (output(b), output(b));
                let (width, top_k) = (scalar::<usize>(b), scalar::<usize>(b));
                let scope = &mut b.scope;
                combine_backward_kernel::expand::<T, N>(
                    scope,
                    vector,
                    grad,
                    rows,
                    slots,
                    weights,
                    grad_rows,
                    grad_weights,
                    width,
                    top_k,
                    8,
                    dtype.into(),
                );
            });
        }
    }
}
