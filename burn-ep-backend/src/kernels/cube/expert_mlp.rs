//! The expert layer: gather, grouped product, activation, grouped product, weighted combine.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::column_sums::column_sums;
use super::launch::{PLANE, addresses, matrix_dims, vector_size};
use super::permute::expert_of_row;
use super::reduce::vector_sum;
use super::{activation, permute};
use crate::MoeBackend;
use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim};
use crate::desc::ExpertActivation;

/// Column vectors and row lanes of a cube of [`sum_kernel`].
const COLUMNS: u32 = 32;
const LANES: u32 = 8;
/// Parts into which an expert's rows are cut, so that one expert with most of the rows is not summed by a few cubes only.
const SLICES: usize = 8;

/// Sums over one of [`SLICES`] parts of the rows of an expert, `[SLICES, E, N]`. One cube per expert (x), 32 vectors of
/// columns (y) and slice (z); 8 planes take every eighth row and are added in a fixed order. With `tokens`, row r is row
/// `slots[r] / top_k`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_kernel<T: Float, N: Size>(
    rows: &Tensor<Vector<T, N>>,
    slots: &Tensor<i32>,
    weights: &Tensor<f32>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<Vector<f32, N>>,
    width: usize,
    top_k: usize,
    #[comptime] tokens: bool,
    #[comptime] weighted: bool,
    #[define(T)] _dtype: StorageType,
) {
    let mut partial = SharedMemory::<Vector<f32, N>>::new((COLUMNS * LANES) as usize);
    let column = (CUBE_POS_Y * COLUMNS + UNIT_POS_X) as usize;
    let start = offsets[CUBE_POS_X as usize] as usize;
    let end = offsets[CUBE_POS_X as usize + 1] as usize;
    let length = (end - start) / SLICES + 1;
    let first = start + CUBE_POS_Z as usize * length;
    let last = min(first + length, end);
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < width {
        let mut row = first + UNIT_POS_Y as usize;
        while row < last {
            let mut from = row;
            if comptime!(tokens) {
                from = slots[row] as usize / top_k;
            }
            let mut value = Vector::<f32, N>::cast_from(rows[from * width + column]);
            if comptime!(weighted) {
                value *= Vector::<f32, N>::new(weights[slots[row] as usize]);
            }
            sum += value;
            row += LANES as usize;
        }
    }
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = Vector::<f32, N>::new(0.0);
        for lane in 0..LANES {
            total += partial[(lane * COLUMNS + UNIT_POS_X) as usize];
        }
        out[(CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X) as usize * width + column] = total;
    }
}

/// One plane per slot: sum of the partial sums of its row, plus `<grad, bias>` (if `biased`).
#[cube(launch_unchecked, address_type = "dynamic")]
fn weight_parts_kernel<T: Float, N: Size>(
    parts: &Tensor<f32>,
    positions: &Tensor<i32>,
    grad: &Tensor<Vector<T, N>>,
    bias: &Tensor<Vector<f32, N>>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<f32>,
    rows: usize,
    tiles: usize,
    width: usize,
    top_k: usize,
    #[comptime] biased: bool,
    #[define(T)] _dtype: StorageType,
) {
    let slot = CUBE_POS * LANES as usize + UNIT_POS_Y as usize;
    if slot < rows {
        let row = positions[slot] as usize;
        let mut sum = f32::new(0.0);
        let mut i = UNIT_POS_X as usize;
        while i < tiles {
            sum += parts[row * tiles + i];
            i += PLANE as usize;
        }
        if comptime!(biased) {
            let bias_base = expert_of_row(offsets, row) * width;
            let token = slot / top_k * width;
            let mut dot = Vector::<f32, N>::new(0.0);
            let mut i = UNIT_POS_X as usize;
            while i < width {
                dot += Vector::<f32, N>::cast_from(grad[token + i]) * bias[bias_base + i];
                i += PLANE as usize;
            }
            sum += vector_sum::<N>(dot);
        }
        let total = plane_sum(sum);
        if UNIT_POS_X == 0 {
            out[slot] = total;
        }
    }
}

/// Which rows belong to which expert.
pub struct GroupRows {
    /// `[R]`.
    pub slots: CudaTensor,
    /// `[E + 1]`.
    pub offsets: CudaTensor,
    pub top_k: usize,
}

/// `[R, N]` to `[E, N]` in `dtype`: fp32 sum over each expert's rows.
pub fn sum_rows(rows: CudaTensor, groups: &GroupRows, dtype: DType) -> CudaTensor {
    sum_by_expert(rows, None, groups, false, dtype)
}

/// `[T, N]` to `[E, N]` in `dtype`: fp32 sum over the tokens of each expert, each times its routing weight if given.
pub fn sum_tokens(tokens: CudaTensor, weights: Option<CudaTensor>, groups: &GroupRows, dtype: DType) -> CudaTensor {
    sum_by_expert(tokens, weights, groups, true, dtype)
}

fn sum_by_expert(rows: CudaTensor, weights: Option<CudaTensor>, groups: &GroupRows, tokens: bool, dtype: DType) -> CudaTensor {
    let [rows, slots, offsets] = [rows, groups.slots.clone(), groups.offsets.clone()].map(dense);
    let [_, n] = matrix_dims(&rows);
    let experts = offsets.shape().num_elements() - 1;
    let parts = empty(&rows, &[SLICES, experts, n], DType::F32);
    let vector = vector_size(rows.dtype, n);
    let width = n / vector;
    let weighted = weights.is_some();
    // Absent weights are never read; any tensor stands in for them.
    let weights = weights.map_or_else(|| empty(&rows, &[1], DType::F32), super::launch::dense_f32);
    let client = rows.client.clone();
    // SAFETY: the cubes cover `parts`, which they write; offsets do not exceed the rows; all tensors are dense.
    unsafe {
        sum_kernel::launch_unchecked(
            &client,
            CubeCount::Static(experts as u32, width.div_ceil(COLUMNS as usize) as u32, SLICES as u32),
            CubeDim::new_2d(COLUMNS, LANES),
            addresses(&[&rows, &parts]),
            vector,
            rows.clone().into_tensor_arg(),
            slots.into_tensor_arg(),
            weights.into_tensor_arg(),
            offsets.into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            width,
            groups.top_k,
            tokens,
            weighted,
            rows.dtype.into(),
        );
    }
    column_sums(parts, &[experts, n], dtype)
}

/// Gradient `[T, K]` fp32 of the routing weights from partial sums `[R, tiles]` of `<grad_act, act>` in sorted order, and
/// `<grad, bias>` with the down bias `[E, D]` (and the offsets).
pub fn sum_weight_parts(
    parts: CudaTensor,
    grad: CudaTensor,
    positions: CudaTensor,
    bias: Option<(CudaTensor, CudaTensor)>,
    top_k: usize,
) -> CudaTensor {
    let [parts, grad, positions] = [parts, grad, positions].map(dense);
    let ([rows, tiles], [_, d]) = (matrix_dims(&parts), matrix_dims(&grad));
    let out = empty(&grad, &[rows / top_k, top_k], DType::F32);
    let vector = vector_size(grad.dtype, d);
    let biased = bias.is_some();
    // An absent bias is never read; any tensors stand in for it.
    let (bias, offsets) = match bias {
        Some((bias, offsets)) => (super::launch::dense_f32(bias), dense(offsets)),
        None => (empty(&grad, &[vector], DType::F32), positions.clone()),
    };
    // SAFETY: one plane per slot, which writes its element; positions are below R; all tensors are dense.
    unsafe {
        weight_parts_kernel::launch_unchecked(
            &grad.client.clone(),
            CubeCount::Static(rows.div_ceil(LANES as usize) as u32, 1, 1),
            CubeDim::new_2d(PLANE, LANES),
            addresses(&[&parts, &grad, &bias]),
            vector,
            parts.into_tensor_arg(),
            positions.into_tensor_arg(),
            grad.clone().into_tensor_arg(),
            bias.into_tensor_arg(),
            offsets.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            rows,
            tiles,
            d / vector,
            top_k,
            biased,
            grad.dtype.into(),
        );
    }
    out
}

/// See [`MoeBackend::expert_mlp`]; inputs as [`permute::supports`] says.
pub fn expert_mlp<B>(
    x: CudaTensor,
    order: &ExpertOrderPrim<B>,
    weights: Option<CudaTensor>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpPrim<B>
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let offsets = || order.offsets_e1.clone();
    let rows = permute::permute(x, order.slots_r.clone(), top_k);
    let up = B::grouped_matmul(rows, experts.up.clone(), offsets());
    let [up_rf, act] = activation::forward(up, experts.up_bias.clone(), offsets(), activation);
    let y = B::grouped_matmul(act, experts.down.clone(), offsets());
    let bias = experts.down_bias.clone().map(|bias| (bias, offsets()));
    ExpertMlpPrim {
        out_td: permute::unpermute(y, order.positions_r.clone(), weights, bias, top_k),
        up_rf,
    }
}

/// See [`MoeBackend::expert_mlp_backward`] and the reference on the gradient of the routing weights.
///
/// The gradient of the down weight is the product of unweighted gradients with weighted activations: one rounding less
/// and no weighted copy of width D.
pub fn expert_mlp_backward<B>(
    grad: CudaTensor,
    x: CudaTensor,
    up: CudaTensor,
    order: &ExpertOrderPrim<B>,
    weights: Option<CudaTensor>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpGrads<B>
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    use burn_cubecl::kernel::cast;

    let dtype = x.dtype;
    let (slots, offsets) = (|| order.slots_r.clone(), || order.offsets_e1.clone());
    let grad = permute::permute(cast(grad, dtype), slots(), top_k);
    let grad_act = B::grouped_matmul_grad_rows(grad.clone(), experts.down.clone(), offsets());
    let input = activation::Backward {
        up,
        grad_act,
        grad: grad.clone(),
        slots: slots(),
        offsets: offsets(),
        weights: weights.clone(),
        down_bias: experts.down_bias.clone(),
    };
    let out = activation::backward(input, activation);
    let weights_tk = weights.as_ref().zip(out.grad_weights).map(|(weights, grad)| {
        let [t, k] = matrix_dims(weights);
        cast(B::float_reshape(grad, [t, k].into()), weights.dtype)
    });
    let groups = GroupRows {
        slots: slots(),
        offsets: offsets(),
        top_k,
    };
    let down_bias = experts
        .down_bias
        .as_ref()
        .map(|bias| sum_by_expert(grad.clone(), weights, &groups, false, bias.dtype));
    let up_bias = experts
        .up_bias
        .as_ref()
        .map(|bias| sum_rows(out.grad_up.clone(), &groups, bias.dtype));
    let down = B::grouped_matmul_grad_weight(grad, out.weighted_act, offsets());
    let rows = permute::permute(x, slots(), top_k);
    let up = B::grouped_matmul_grad_weight(out.grad_up.clone(), rows, offsets());
    let grad_rows = B::grouped_matmul_grad_rows(out.grad_up, experts.up.clone(), offsets());
    ExpertMlpGrads {
        x_td: permute::unpermute(grad_rows, order.positions_r.clone(), None, None, top_k),
        weights_tk,
        up: cast(up, experts.up.dtype),
        up_bias,
        down: cast(down, experts.down.dtype),
        down_bias,
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn expert_kernels_compile_for_sm_90a() {
        for (dtype, vector, tokens, weighted) in [
            (DType::BF16, 8, true, true),
            (DType::BF16, 1, false, false),
            (DType::F32, 4, false, true),
        ] {
            compile(COLUMNS * LANES, |b| {
                use sum_kernel::{N, T};
                b.scope.register_type::<T>(dtype.into());
                b.scope.register_size::<N>(vector);
                let (rows, slots, weights, offsets) = (input(b), input(b), input(b), input(b));
                let (out, width, top_k) = (output(b), scalar::<usize>(b), scalar::<usize>(b));
                let scope = &mut b.scope;
                sum_kernel::expand::<T, N>(
                    scope,
                    vector,
                    rows,
                    slots,
                    weights,
                    offsets,
                    out,
                    width,
                    top_k,
                    tokens,
                    weighted,
                    dtype.into(),
                );
            });
        }
        for (dtype, vector, biased) in [(DType::BF16, 8, true), (DType::BF16, 8, false), (DType::BF16, 1, true)] {
            compile(PLANE * LANES, |b| {
                use weight_parts_kernel::{N, T};
                b.scope.register_type::<T>(dtype.into());
                b.scope.register_size::<N>(vector);
                let (parts, positions, grad, bias, offsets) = (input(b), input(b), input(b), input(b), input(b));
                let out = output(b);
                let (rows, tiles, width, top_k) = (scalar::<usize>(b), scalar::<usize>(b), scalar::<usize>(b), scalar::<usize>(b));
                let scope = &mut b.scope;
                weight_parts_kernel::expand::<T, N>(
                    scope,
                    vector,
                    parts,
                    positions,
                    grad,
                    bias,
                    offsets,
                    out,
                    rows,
                    tiles,
                    width,
                    top_k,
                    biased,
                    dtype.into(),
                );
            });
        }
    }
}
