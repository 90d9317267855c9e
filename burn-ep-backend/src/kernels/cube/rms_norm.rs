//! RMSNorm: one cube per row.

use burn_backend::TensorMetadata;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::ROW_UNITS;
use super::reduce::cube_sum;
use crate::desc::{NormDesc, NormRounding};

#[cube(launch_unchecked)]
fn forward_kernel<T: Float, W: Float>(
    x: &Tensor<T>,
    weight: &Tensor<W>,
    out: &mut Tensor<T>,
    width: usize,
    eps: f32,
    #[comptime] planes: usize,
    #[comptime] round_before_weight: bool,
    #[define(T, W)] _dtypes: [StorageType; 2],
) {
    let base = CUBE_POS * width;
    let mut squares = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < width {
        let v = f32::cast_from(x[base + i]);
        squares += v * v;
        i += CUBE_DIM as usize;
    }
    let mean = cube_sum(squares, planes) / f32::cast_from(width);
    let scale = f32::inverse_sqrt(mean + eps);
    let mut i = UNIT_POS as usize;
    while i < width {
        let y = f32::cast_from(x[base + i]) * scale;
        let w = f32::cast_from(weight[i]);
        if comptime!(round_before_weight) {
            out[base + i] = T::cast_from(w * f32::cast_from(T::cast_from(y)));
        } else {
            out[base + i] = T::cast_from(w * y);
        }
        i += CUBE_DIM as usize;
    }
}

/// Rows are dealt round-robin to the cubes; each cube keeps its own fp32 sum of the weight gradient.
#[cube(launch_unchecked)]
fn backward_kernel<T: Float, W: Float>(
    grad: &Tensor<T>,
    x: &Tensor<T>,
    weight: &Tensor<W>,
    grad_x: &mut Tensor<T>,
    grad_w_parts: &mut Tensor<f32>,
    rows: usize,
    width: usize,
    eps: f32,
    #[comptime] planes: usize,
    #[define(T, W)] _dtypes: [StorageType; 2],
) {
    let part = CUBE_POS * width;
    let mut i = UNIT_POS as usize;
    while i < width {
        grad_w_parts[part + i] = 0.0;
        i += CUBE_DIM as usize;
    }
    let mut row = CUBE_POS;
    while row < rows {
        let base = row * width;
        let mut squares = f32::new(0.0);
        let mut dot = f32::new(0.0);
        let mut i = UNIT_POS as usize;
        while i < width {
            let v = f32::cast_from(x[base + i]);
            let g = f32::cast_from(grad[base + i]) * f32::cast_from(weight[i]);
            squares += v * v;
            dot += g * v;
            i += CUBE_DIM as usize;
        }
        let n = f32::cast_from(width);
        let scale = f32::inverse_sqrt(cube_sum(squares, planes) / n + eps);
        let along = cube_sum(dot, planes) / n * scale * scale;
        let mut i = UNIT_POS as usize;
        while i < width {
            let v = f32::cast_from(x[base + i]);
            let g = f32::cast_from(grad[base + i]);
            grad_x[base + i] = T::cast_from(scale * (g * f32::cast_from(weight[i]) - v * along));
            grad_w_parts[part + i] += g * v * scale;
            i += CUBE_DIM as usize;
        }
        row += CUBE_COUNT;
    }
}

fn rows_and_width(x: &CudaTensor) -> (usize, usize) {
    let shape = x.shape();
    let width = shape.iter().last().copied().unwrap_or(1);
    (shape.num_elements() / width.max(1), width)
}

fn planes(x: &CudaTensor) -> usize {
    (ROW_UNITS / x.client.properties().hardware.plane_size_max) as usize
}

/// See [`crate::MoeBackend::rms_norm`].
pub fn rms_norm(x: CudaTensor, weight: CudaTensor, desc: &NormDesc) -> CudaTensor {
    let (x, weight) = (dense(x), dense(weight));
    let (rows, width) = rows_and_width(&x);
    let out = empty(&x, &x.shape().iter().copied().collect::<Vec<_>>(), x.dtype);
    if rows == 0 {
        return out;
    }
    let client = x.client.clone();
    let dtypes = [x.dtype.into(), weight.dtype.into()];
    let planes = planes(&x);
    // SAFETY: one cube per row of `width` elements; all three tensors are dense with that width.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(ROW_UNITS),
            x.into_tensor_arg(),
            weight.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            width,
            desc.eps,
            planes,
            desc.rounding == NormRounding::Llama,
            dtypes,
        );
    }
    out
}
