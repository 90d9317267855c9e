//! Sums of the columns of a matrix of fp32 parts in a fixed order: the last stage of weight gradients.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};

/// Units of a cube that share a column when there are rows enough.
const LANES: usize = 32;

#[cube(launch_unchecked, address_type = "u64")]
fn column_sums_kernel<O: Float>(
    parts: &Tensor<f32>,
    out: &mut Tensor<O>,
    rows: usize,
    columns: usize,
    #[comptime] width: usize,
    #[comptime] lanes: usize,
    #[define(O)] _dtype: StorageType,
) {
    let across = UNIT_POS_X as usize;
    let lane = UNIT_POS_Y as usize;
    let column = CUBE_POS * width + across;
    let mut sum = f32::new(0.0);
    if column < columns {
        let mut row = lane;
        while row < rows {
            sum += parts[row * columns + column];
            row += lanes;
        }
    }
    if comptime!(lanes > 1) {
        let mut partial = SharedMemory::<f32>::new(width * lanes);
        partial[lane * width + across] = sum;
        sync_cube();
        if lane == 0 {
            #[unroll]
            for other in 1..lanes {
                sum += partial[other * width + across];
            }
        }
    }
    if lane == 0 && column < columns {
        out[column] = O::cast_from(sum);
    }
}

/// Width of a cube and units that share a column.
fn deal(rows: usize) -> (usize, usize) {
    if rows >= LANES { (32, LANES) } else { (256, 1) }
}

/// `parts [R, ..]` in fp32, summed over R, in `dtype` and the shape `shape`.
pub fn column_sums(parts: CudaTensor, shape: &[usize], dtype: DType) -> CudaTensor {
    let parts = dense(parts);
    let columns = shape.iter().product::<usize>();
    let rows = parts.shape().num_elements() / columns.max(1);
    let out = empty(&parts, shape, dtype);
    if columns == 0 {
        return out;
    }
    let (width, lanes) = deal(rows);
    let client = parts.client.clone();
    // SAFETY: the parts hold `rows` rows of `columns` numbers, `out` one; both are dense, and the cubes cover the columns.
    unsafe {
        column_sums_kernel::launch_unchecked(
            &client,
            CubeCount::Static(columns.div_ceil(width) as u32, 1, 1),
            CubeDim::new_2d(width as u32, lanes as u32),
            parts.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            rows,
            columns,
            width,
            lanes,
            dtype.into(),
        );
    }
    out
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;

    let source = |rows: usize| {
        let (width, lanes) = deal(rows);
        let mut p = Parameters::new();
        let (parts, out) = (p.input::<f32>(), p.output::<bf16>());
        let [rows, columns] = [(); 2].map(|()| p.scalar::<usize>());
        let dtype = bf16::as_type_native_unchecked().storage_type();
        column_sums_kernel::expand::<bf16>(&mut p.0.scope, parts, out, rows, columns, width, lanes, dtype);
        p.source("column_sums", CubeDim::new_2d(width as u32, lanes as u32))
    };
    vec![source(2), source(1000)]
}
