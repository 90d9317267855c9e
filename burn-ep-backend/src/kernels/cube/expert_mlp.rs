//! The expert layer: gather, grouped product, activation, grouped product, weighted combine.

use burn_backend::DType;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{addresses, matrix_dims};
use super::{activation, permute};
use crate::MoeBackend;
use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim};
use crate::desc::ExpertActivation;

/// Columns and row lanes of a cube of [`sum_kernel`].
const COLUMNS: u32 = 32;
const LANES: u32 = 8;

/// Sum over the rows of each expert. One cube per expert (x) and 32 columns (y); 8 planes take every eighth row and are
/// added in a fixed order.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_kernel<T: Float>(
    rows: &Tensor<T>,
    slots: &Tensor<i32>,
    weights: &Tensor<f32>,
    offsets: &Tensor<i32>,
    out: &mut Tensor<f32>,
    width: usize,
    #[comptime] weighted: bool,
    #[define(T)] _dtype: StorageType,
) {
    let mut partial = SharedMemory::<f32>::new((COLUMNS * LANES) as usize);
    let column = (CUBE_POS_Y * COLUMNS + UNIT_POS_X) as usize;
    let end = offsets[CUBE_POS_X as usize + 1] as usize;
    let mut row = offsets[CUBE_POS_X as usize] as usize + UNIT_POS_Y as usize;
    let mut sum = f32::new(0.0);
    if column < width {
        while row < end {
            let mut value = f32::cast_from(rows[row * width + column]);
            if comptime!(weighted) {
                value *= weights[slots[row] as usize];
            }
            sum += value;
            row += LANES as usize;
        }
    }
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = f32::new(0.0);
        for lane in 0..LANES {
            total += partial[(lane * COLUMNS + UNIT_POS_X) as usize];
        }
        out[CUBE_POS_X as usize * width + column] = total;
    }
}

/// `[R, N]` to `[E, N]` fp32: sum over each expert's rows, each times its routing weight if given.
fn sum_by_expert(rows: CudaTensor, weights: Option<CudaTensor>, slots: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    let (rows, slots, offsets) = (dense(rows), dense(slots), dense(offsets));
    let [_, n] = matrix_dims(&rows);
    let experts = burn_backend::TensorMetadata::shape(&offsets).num_elements() - 1;
    let out = empty(&rows, &[experts, n], DType::F32);
    let weighted = weights.is_some();
    // Absent weights are never read; any tensor stands in for them.
    let weights = weights.map_or_else(|| empty(&rows, &[1], DType::F32), super::launch::dense_f32);
    // SAFETY: the cubes cover `out`, which they write; offsets do not exceed the rows; all tensors are dense.
    unsafe {
        sum_kernel::launch_unchecked(
            &rows.client.clone(),
            CubeCount::Static(experts as u32, n.div_ceil(COLUMNS as usize) as u32, 1),
            CubeDim::new_2d(COLUMNS, LANES),
            addresses(&[&rows, &out]),
            rows.clone().into_tensor_arg(),
            slots.into_tensor_arg(),
            weights.into_tensor_arg(),
            offsets.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            n,
            weighted,
            rows.dtype.into(),
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
    let down_bias = experts
        .down_bias
        .as_ref()
        .map(|bias| cast(sum_by_expert(grad.clone(), weights, slots(), offsets()), bias.dtype));
    let up_bias = experts
        .up_bias
        .as_ref()
        .map(|bias| cast(sum_by_expert(out.grad_up.clone(), None, slots(), offsets()), bias.dtype));
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
    fn sum_kernel_compiles_for_sm_90a() {
        for (dtype, weighted) in [(DType::BF16, true), (DType::F32, false)] {
            compile(COLUMNS * LANES, |b| {
                use sum_kernel::T;
                b.scope.register_type::<T>(dtype.into());
                let (rows, slots, weights, offsets) = (input(b), input(b), input(b), input(b));
                let (out, width) = (output(b), scalar::<usize>(b));
                sum_kernel::expand::<T>(&mut b.scope, rows, slots, weights, offsets, out, width, weighted, dtype.into());
            });
        }
    }
}
