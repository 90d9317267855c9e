//! Sums of squares of many tensors: one pass over each, then one launch that adds up the parts in a fixed order.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::fits;
use super::launch::{PLANE, ROW_UNITS, addresses, vector_size};
use super::reduce::{team_sum, vector_sum};

/// Cubes for each tensor, whatever its size: the order of the sum is then the same on every device.
const CUBES: usize = 512;

#[cube(launch_unchecked, address_type = "dynamic")]
fn part_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    parts: &mut Tensor<f32>,
    vectors: usize,
    row: usize,
    #[comptime] planes: usize,
    #[define(F)] _dtype: StorageType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut i = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    while i < vectors {
        let value = Vector::<f32, N>::cast_from(x[i]);
        sum += value * value;
        i += step;
    }
    let total = team_sum(vector_sum(sum), planes);
    if UNIT_POS == 0 {
        parts[row * CUBE_COUNT + CUBE_POS] = total;
    }
}

/// One cube a tensor.
#[cube(launch_unchecked)]
fn total_kernel(parts: &Tensor<f32>, out: &mut Tensor<f32>, #[comptime] parts_each: usize, #[comptime] planes: usize) {
    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < parts_each {
        sum += parts[CUBE_POS * parts_each + i];
        i += CUBE_DIM as usize;
    }
    let total = team_sum(sum, planes);
    if UNIT_POS == 0 {
        out[CUBE_POS] = total;
    }
}

/// Whether the kernels read these tensors.
pub fn supports(tensors: &[CudaTensor]) -> bool {
    !tensors.is_empty() && fits(tensors) && tensors.iter().all(|tensor| tensor.shape().num_elements() > 0)
}

/// See [`crate::MoeBackend::squared_norms`].
pub fn squared_norms(tensors: Vec<CudaTensor>) -> CudaTensor {
    let planes = (ROW_UNITS / PLANE) as usize;
    let rows = tensors.len();
    let parts = empty(&tensors[0], &[rows * CUBES], DType::F32);
    let client = parts.client.clone();
    for (row, tensor) in tensors.into_iter().enumerate() {
        // The order of the elements does not matter, so a transposed view of a whole buffer needs no copy.
        let aligned = tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
        let whole = aligned && tensor.is_contiguous_buffer() && tensor.is_nonoverlapping();
        let tensor = if whole { tensor } else { dense(tensor) };
        let n = tensor.shape().num_elements();
        let vector = vector_size(tensor.dtype, n);
        let address = addresses(&[&tensor]);
        let dtype = tensor.dtype.into();
        // SAFETY: the tensor holds `n` elements without gaps, read as vectors whose size divides `n`; `parts` holds `CUBES`
        // sums for each of `rows` tensors.
        unsafe {
            part_kernel::launch_unchecked(
                &client,
                CubeCount::Static(CUBES as u32, 1, 1),
                CubeDim::new_1d(ROW_UNITS),
                address,
                vector,
                tensor.into_tensor_arg(),
                parts.clone().into_tensor_arg(),
                n / vector,
                row,
                planes,
                dtype,
            );
        }
    }
    let out = empty(&parts, &[rows], DType::F32);
    // SAFETY: one cube for each of `rows` rows of `CUBES` parts.
    unsafe {
        total_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(ROW_UNITS),
            parts.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            CUBES,
            planes,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn norm_kernels_compile_for_sm_90a() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            compile(ROW_UNITS, |b| {
                use part_kernel::{F, N};
                b.scope.register_type::<F>(dtype.into());
                b.scope.register_size::<N>(vector_size(dtype, 8));
                let (x, parts) = (input(b), output(b));
                let (vectors, row) = (scalar::<usize>(b), scalar::<usize>(b));
                part_kernel::expand::<F, N>(&mut b.scope, vector_size(dtype, 8), x, parts, vectors, row, 8, dtype.into());
            });
        }
        compile(ROW_UNITS, |b| {
            let (parts, out) = (input(b), output(b));
            total_kernel::expand(&mut b.scope, parts, out, CUBES, 8);
        });
    }
}
