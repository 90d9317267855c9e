//! Rows per expert: one cube an expert looks through all ids, without atomics.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{PLANE, ROW_UNITS, dense_f32};
use super::reduce::team_sum;

/// One cube an expert: rows with its id, weighted by the mask of their token.
#[cube(launch_unchecked)]
fn count_kernel(
    ids: &Tensor<i32>,
    mask: &Tensor<f32>,
    out: &mut Tensor<f32>,
    rows: usize,
    top_k: usize,
    #[comptime] masked: bool,
    #[comptime] planes: usize,
) {
    let expert = i32::cast_from(CUBE_POS);
    let mut count = f32::new(0.0);
    let mut row = UNIT_POS as usize;
    while row < rows {
        if ids[row] == expert {
            if comptime!(masked) {
                count += mask[row / top_k];
            } else {
                count += 1.0;
            }
        }
        row += CUBE_DIM as usize;
    }
    let total = team_sum(count, planes);
    if UNIT_POS == 0 {
        out[CUBE_POS] = total;
    }
}

/// Whether the counting kernel takes these ids.
pub fn supports(ids_tk: &CudaTensor) -> bool {
    ids_tk.dtype == DType::I32 && ids_tk.shape().num_elements() > 0
}

/// See [`crate::MoeBackend::count_experts`].
pub fn count(ids_tk: CudaTensor, mask_t: Option<CudaTensor>, num_experts: usize) -> CudaTensor {
    let ids_tk = dense(ids_tk);
    let [tokens, top_k] = ids_tk.shape().dims::<2>();
    let out = empty(&ids_tk, &[num_experts], DType::F32);
    let masked = mask_t.is_some();
    let mask = mask_t.map_or_else(|| out.clone(), dense_f32);
    // SAFETY: one cube for each of `num_experts` elements of `out`; ids hold `tokens * top_k` and the mask `tokens` elements,
    // where there is one.
    unsafe {
        count_kernel::launch_unchecked(
            &ids_tk.client.clone(),
            CubeCount::Static(num_experts as u32, 1, 1),
            CubeDim::new_1d(ROW_UNITS),
            ids_tk.into_tensor_arg(),
            mask.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            tokens * top_k,
            top_k,
            masked,
            (ROW_UNITS / PLANE) as usize,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn count_kernel_compiles_for_sm_90a() {
        for masked in [false, true] {
            compile(ROW_UNITS, |b| {
                let (ids, mask, out) = (input(b), input(b), output(b));
                let (rows, top_k) = (scalar::<usize>(b), scalar::<usize>(b));
                count_kernel::expand(&mut b.scope, ids, mask, out, rows, top_k, masked, 8);
            });
        }
    }
}
