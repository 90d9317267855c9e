//! Products of rows grouped by expert, any widths and float types: the portable path of `kernels/hopper/gemm.rs`.
//!
//! Offsets stay on the device: the grid covers all rows, and a cube walks through the experts that own rows of its tile.
//! fp32 multiplies in fp32; bf16 and fp16 use the matrix units with fp32 sums.

use burn_backend::{DType, TensorMetadata};
use burn_cubecl::kernel::cast;
use cubecl::cmma;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{PLANE, addresses, matrix_dims};
use super::permute::expert_of_row;

/// Rows and columns of a tile of the result.
const TILE: usize = 64;
/// Units of a cube: 16 x 16 with 4 x 4 results each, or 8 planes with 16 x 32 each.
const UNITS: u32 = 256;
/// Side of a matrix that the matrix units multiply.
const MMA: usize = 16;

/// Reduction steps that lie in shared memory at a time.
const fn depth_of(cores: bool) -> usize {
    if cores { 32 } else { 16 }
}

/// Elements from one row of a tile in shared memory to the next: 16-byte rows for the matrix units, else an odd number, so
/// that 16 units read 16 banks.
const fn pitch_of(cores: bool) -> usize {
    if cores { 40 } else { 17 }
}

/// `tile[i, k] = data[base + (origin + i) * row_stride + (k0 + k) * stride]`, zero unless the row lies in `first..last` and
/// the reduction index before `end`.
#[cube]
fn load<T: Float, S: Float>(
    data: &Tensor<T>,
    tile: &mut SharedMemory<S>,
    base: usize,
    origin: usize,
    first: usize,
    last: usize,
    row_stride: usize,
    k0: usize,
    end: usize,
    stride: usize,
    #[comptime] rows_contiguous: bool,
    #[comptime] cores: bool,
) {
    let depth = comptime!(depth_of(cores));
    let pitch = comptime!(pitch_of(cores));
    #[unroll]
    for step in 0..comptime!(TILE * depth / UNITS as usize) {
        let at = UNIT_POS as usize + step * UNITS as usize;
        let mut i = at / depth;
        let mut k = at % depth;
        if comptime!(rows_contiguous) {
            i = at % TILE;
            k = at / TILE;
        }
        let row = origin + i;
        let mut value = S::new(0.0);
        if row >= first && row < last && k0 + k < end {
            value = S::cast_from(data[base + row * row_stride + (k0 + k) * stride]);
        }
        tile[i * pitch + k] = value;
    }
}

/// Sums of the 4 x 4 results of a unit: rows `UNIT_POS / 16 + 16 i`, columns `UNIT_POS % 16 + 16 j`.
#[cube]
fn multiply<S: Float>(left: &SharedMemory<S>, right: &SharedMemory<S>, sums: &mut Array<f32>) {
    let pitch = comptime!(pitch_of(false));
    let (row, column) = (UNIT_POS as usize / 16 * pitch, UNIT_POS as usize % 16 * pitch);
    for k in 0..comptime!(depth_of(false)) {
        let mut a = Array::<f32>::new(4usize);
        let mut b = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            a[i] = f32::cast_from(left[row + i * 16 * pitch + k]);
            b[i] = f32::cast_from(right[column + i * 16 * pitch + k]);
        }
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                sums[i * 4 + j] = fma(a[i], b[j], sums[i * 4 + j]);
            }
        }
    }
}

/// The same with the matrix units: a plane owns 16 rows and two blocks of 16 columns.
#[cube]
fn multiply_cores<S: Float>(left: &SharedMemory<S>, right: &SharedMemory<S>, sums: &cmma::Matrix<f32>, more_sums: &cmma::Matrix<f32>) {
    let pitch = comptime!(pitch_of(true));
    let plane = (UNIT_POS / PLANE) as usize;
    let (row, column) = (plane / 2 * MMA * pitch, plane % 2 * 2 * MMA * pitch);
    let size = comptime!(TILE * pitch_of(true));
    #[unroll]
    for step in 0..comptime!(depth_of(true) / MMA) {
        let k = step * MMA;
        let a = cmma::Matrix::<S>::from_slice(
            cmma::MatrixIdent::A,
            MMA,
            MMA,
            MMA,
            cmma::MatrixLayout::RowMajor,
            &left.slice(row + k, size),
            comptime!(pitch as u32),
        );
        let b = cmma::Matrix::<S>::from_slice(
            cmma::MatrixIdent::B,
            MMA,
            MMA,
            MMA,
            cmma::MatrixLayout::ColMajor,
            &right.slice(column + k, size),
            comptime!(pitch as u32),
        );
        cmma::execute::<S, S, f32, f32>(&a, &b, sums, sums);
        let b = cmma::Matrix::<S>::from_slice(
            cmma::MatrixIdent::B,
            MMA,
            MMA,
            MMA,
            cmma::MatrixLayout::ColMajor,
            &right.slice(column + MMA * pitch + k, size),
            comptime!(pitch as u32),
        );
        cmma::execute::<S, S, f32, f32>(&a, &b, more_sums, more_sums);
    }
}

#[cube]
fn zero_sums() -> cmma::Matrix<f32> {
    cmma::Matrix::<f32>::from_value(cmma::MatrixIdent::Accumulator, MMA, MMA, MMA, cmma::MatrixLayout::Undefined, 0.0)
}

/// Where the two operands of a tile lie; see [`load`].
#[derive(CubeType, Clone, Copy)]
struct Tile {
    /// Rows of the left operand that count, and the first row of the tile.
    left_first: usize,
    left_last: usize,
    left_origin: usize,
    left_row_stride: usize,
    left_stride: usize,
    right_base: usize,
    right_last: usize,
    right_origin: usize,
    right_row_stride: usize,
    right_stride: usize,
    /// Range of the reduction.
    start: usize,
    end: usize,
    /// Start of the result and distance of its rows.
    out_base: usize,
    out_stride: usize,
}

/// One tile of the result: sum over k of left[row, k] right[column, k], written where the row counts.
#[cube]
fn tile_product<T: Float, S: Float>(
    left: &Tensor<T>,
    right: &Tensor<T>,
    out: &mut Tensor<T>,
    tile: Tile,
    #[comptime] left_rows_contiguous: bool,
    #[comptime] right_rows_contiguous: bool,
    #[comptime] cores: bool,
) {
    let size = comptime!(TILE * pitch_of(cores));
    let mut a = SharedMemory::<S>::new(size);
    let mut b = SharedMemory::<S>::new(size);
    let mut sums = Array::<f32>::new(16usize);
    let (c0, c1) = (zero_sums(), zero_sums());
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0;
    }
    let mut k = tile.start;
    while k < tile.end {
        load::<T, S>(
            left,
            &mut a,
            0usize,
            tile.left_origin,
            tile.left_first,
            tile.left_last,
            tile.left_row_stride,
            k,
            tile.end,
            tile.left_stride,
            left_rows_contiguous,
            cores,
        );
        load::<T, S>(
            right,
            &mut b,
            tile.right_base,
            tile.right_origin,
            0usize,
            tile.right_last,
            tile.right_row_stride,
            k,
            tile.end,
            tile.right_stride,
            right_rows_contiguous,
            cores,
        );
        sync_cube();
        if comptime!(cores) {
            multiply_cores::<S>(&a, &b, &c0, &c1);
        } else {
            multiply::<S>(&a, &b, &mut sums);
        }
        sync_cube();
        k += comptime!(depth_of(cores));
    }
    let (row, column) = (UNIT_POS as usize / 16, UNIT_POS as usize % 16);
    if comptime!(cores) {
        let mut stage = SharedMemory::<f32>::new(comptime!(TILE * TILE));
        let plane = (UNIT_POS / PLANE) as usize;
        let at = plane / 2 * MMA * TILE + plane % 2 * 2 * MMA;
        let all = comptime!(TILE * TILE);
        cmma::store(
            &mut stage.slice_mut(at, all),
            &c0,
            comptime!(TILE as u32),
            cmma::MatrixLayout::RowMajor,
        );
        cmma::store(
            &mut stage.slice_mut(at + MMA, all),
            &c1,
            comptime!(TILE as u32),
            cmma::MatrixLayout::RowMajor,
        );
        sync_cube();
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                sums[i * 4 + j] = stage[(row + i * 16) * TILE + column + j * 16];
            }
        }
        // the next tile of this cube writes there
        sync_cube();
    }
    #[unroll]
    for i in 0..4usize {
        let r = tile.left_origin + row + i * 16;
        #[unroll]
        for j in 0..4usize {
            let c = tile.right_origin + column + j * 16;
            if r >= tile.left_first && r < tile.left_last && c < tile.right_last {
                out[tile.out_base + r * tile.out_stride + c] = T::cast_from(sums[i * 4 + j]);
            }
        }
    }
}

/// `out[r, column] = sum over k of rows[r, k] weight[e, column, k]`, or `weight[e, k, column]` if `transposed`. A cube has 64
/// rows (x) and 64 columns (y). Rows past the last group become zero.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rows_kernel<T: Float, S: Float>(
    rows: &Tensor<T>,
    weight: &Tensor<T>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<T>,
    count: usize,
    columns: usize,
    depth: usize,
    #[comptime] transposed: bool,
    #[comptime] cores: bool,
    #[define(T)] _dtype: StorageType,
    #[define(S)] _shared: StorageType,
) {
    let first = CUBE_POS_X as usize * TILE;
    let last = min(first + TILE, count);
    let column = CUBE_POS_Y as usize * TILE;
    let mut row_stride = depth;
    let mut stride = 1usize;
    if comptime!(transposed) {
        row_stride = 1usize;
        stride = columns;
    }
    let experts = offsets.shape(0) - 1;
    let mut e = expert_of_row(offsets, first);
    // `offsets` has one element more than there are experts
    while e < experts && (offsets[e] as usize) < last {
        let lo = max(offsets[e] as usize, first);
        let hi = min(offsets[e + 1] as usize, last);
        if lo < hi {
            let tile = Tile {
                left_first: lo,
                left_last: hi,
                left_origin: first,
                left_row_stride: depth,
                left_stride: 1usize,
                right_base: e * columns * depth,
                right_last: columns,
                right_origin: column,
                right_row_stride: row_stride,
                right_stride: stride,
                start: 0usize,
                end: depth,
                out_base: 0usize,
                out_stride: columns,
            };
            tile_product::<T, S>(rows, weight, out, tile, false, transposed, cores);
        }
        e += 1;
    }
    let end = offsets[experts] as usize;
    let mut at = UNIT_POS as usize;
    while at < TILE * TILE {
        let (r, c) = (first + at / TILE, column + at % TILE);
        if r >= end && r < last && c < columns {
            out[r * columns + c] = T::new(0.0);
        }
        at += UNITS as usize;
    }
}

/// `out[e, m, n] = sum over the rows r of expert e of grad[r, m] rows[r, n]`. A cube has 64 n (x) and 64 m (y) of one expert
/// (z).
#[cube(launch_unchecked, address_type = "dynamic")]
fn weight_kernel<T: Float, S: Float>(
    grad: &Tensor<T>,
    rows: &Tensor<T>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<T>,
    height: usize,
    width: usize,
    #[comptime] cores: bool,
    #[define(T)] _dtype: StorageType,
    #[define(S)] _shared: StorageType,
) {
    let expert = CUBE_POS_Z as usize;
    let tile = Tile {
        left_first: 0usize,
        left_last: height,
        left_origin: CUBE_POS_Y as usize * TILE,
        left_row_stride: 1usize,
        left_stride: height,
        right_base: 0usize,
        right_last: width,
        right_origin: CUBE_POS_X as usize * TILE,
        right_row_stride: 1usize,
        right_stride: width,
        start: offsets[expert] as usize,
        end: offsets[expert + 1] as usize,
        out_base: expert * height * width,
        out_stride: width,
    };
    tile_product::<T, S>(grad, rows, out, tile, true, true, cores);
}

/// Whether the kernels take these operands.
pub fn supports(lhs: &CudaTensor, rhs: &CudaTensor, offsets: &CudaTensor) -> bool {
    /// Most cubes along the second and third axis of a grid.
    const MAX_CUBES: usize = 65_535;
    let widths = lhs.shape().iter().skip(1).chain(rhs.shape().iter().skip(1)).copied().max();
    super::fits([lhs, rhs])
        && offsets.dtype == DType::I32
        && widths.is_some_and(|width| width.div_ceil(TILE) <= MAX_CUBES)
        && (2..=MAX_CUBES).contains(&offsets.shape().num_elements())
}

/// fp32 stays exact; the matrix units take 16-bit floats.
fn tensor_cores(dtype: DType) -> bool {
    dtype != DType::F32
}

/// `rows [R, In] x weight [E, Out, In]` to `[R, Out]`, or with `transposed` `[R, Out] x [E, Out, In]` to `[R, In]`.
pub fn grouped(rows: CudaTensor, weight: CudaTensor, offsets: CudaTensor, transposed: bool) -> CudaTensor {
    let weight = dense(cast(weight, rows.dtype));
    let (rows, offsets) = (dense(rows), dense(offsets));
    let [count, depth] = matrix_dims(&rows);
    let [_, d1, d2] = weight.shape().dims::<3>();
    let columns = if transposed { d2 } else { d1 };
    let out = empty(&rows, &[count, columns], rows.dtype);
    if count * columns == 0 {
        return out;
    }
    // SAFETY: the cubes cover `out`, every element of which is written; offsets do not exceed the rows; all tensors are dense.
    unsafe {
        rows_kernel::launch_unchecked(
            &rows.client.clone(),
            CubeCount::Static(count.div_ceil(TILE) as u32, columns.div_ceil(TILE) as u32, 1),
            CubeDim::new_1d(UNITS),
            addresses(&[&rows, &weight, &out]),
            rows.clone().into_tensor_arg(),
            weight.into_tensor_arg(),
            offsets.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            count,
            columns,
            depth,
            transposed,
            tensor_cores(rows.dtype),
            rows.dtype.into(),
            rows.dtype.into(),
        );
    }
    out
}

/// `grad [R, Out]`, `rows [R, In]` to `[E, Out, In]`; zeros for experts without rows.
pub fn grad_weight(grad: CudaTensor, rows: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    let rows = dense(cast(rows, grad.dtype));
    let (grad, offsets) = (dense(grad), dense(offsets));
    let ([_, height], [_, width]) = (matrix_dims(&grad), matrix_dims(&rows));
    let experts = offsets.shape().num_elements() - 1;
    let out = empty(&grad, &[experts, height, width], grad.dtype);
    if experts * height * width == 0 {
        return out;
    }
    // SAFETY: as in `grouped`.
    unsafe {
        weight_kernel::launch_unchecked(
            &grad.client.clone(),
            CubeCount::Static(width.div_ceil(TILE) as u32, height.div_ceil(TILE) as u32, experts as u32),
            CubeDim::new_1d(UNITS),
            addresses(&[&grad, &rows, &out]),
            grad.clone().into_tensor_arg(),
            rows.into_tensor_arg(),
            offsets.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            height,
            width,
            tensor_cores(grad.dtype),
            grad.dtype.into(),
            grad.dtype.into(),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn grouped_kernels_compile_for_sm_90a() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let cores = tensor_cores(dtype);
            for transposed in [false, true] {
                compile(UNITS, |b| {
                    use rows_kernel::{S, T};
                    b.scope.register_type::<T>(dtype.into());
                    b.scope.register_type::<S>(dtype.into());
                    let (rows, weight, offsets, out) = (input(b), input(b), input(b), output(b));
                    let (count, columns, depth) = (scalar::<usize>(b), scalar::<usize>(b), scalar::<usize>(b));
                    let (scope, dtype) = (&mut b.scope, dtype.into());
                    rows_kernel::expand::<T, S>(
                        scope, rows, weight, offsets, out, count, columns, depth, transposed, cores, dtype, dtype,
                    );
                });
            }
            compile(UNITS, |b| {
                use weight_kernel::{S, T};
                b.scope.register_type::<T>(dtype.into());
                b.scope.register_type::<S>(dtype.into());
                let (grad, rows, offsets, out) = (input(b), input(b), input(b), output(b));
                let (height, width) = (scalar::<usize>(b), scalar::<usize>(b));
                let (scope, dtype) = (&mut b.scope, dtype.into());
                weight_kernel::expand::<T, S>(scope, grad, rows, offsets, out, height, width, cores, dtype, dtype);
            });
        }
    }
}
