//! The expert layer on the grouped kernel: rows are gathered while they are loaded, the activation and its backward run
//! behind the products (`kernels/hopper/gemm_experts.cuh`).
//!
//! Transient memory in bytes for R rows, beside the result: forward `2 R (F + D)` (activation and down product), backward
//! `2 R (F_up + F + D)` with `F_up = F * up_factor` (gradient of the up product, weighted activation, and one after the other
//! permuted gradient, permuted input, input gradient) and the weight gradients.

use burn_backend::{DType, TensorMetadata};
use burn_cubecl::kernel::cast;
use cubecl::server::TensorMapBinding;

use super::super::cube::launch::{dense_f32, matrix_dims};
use super::super::cube::{expert_mlp as portable, permute};
use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense, dense_map, mappable};
use super::gemm::{self, Config, Product, Sizes};
use super::queue_counter;
use crate::MoeBackend;
use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim};
use crate::desc::ExpertActivation;

/// How the kernel names an activation.
struct Epilogue {
    forward: u32,
    backward: u32,
    /// Parts of F columns in which the up product lies; 1 where gate and up alternate or there is no gate.
    halves: usize,
    alpha: f32,
    limit: f32,
}

impl Epilogue {
    fn of(activation: ExpertActivation) -> Self {
        let (number, halves, alpha, limit) = match activation {
            ExpertActivation::SwiGlu => (1, 2, 1.0, 0.0),
            ExpertActivation::Relu2 => (2, 1, 1.0, 0.0),
            ExpertActivation::ClampedSwiGlu { alpha, limit } => (3, 1, alpha, limit),
        };
        Self {
            forward: number,
            backward: number + 3,
            halves,
            alpha,
            limit,
        }
    }
}

/// Up product and activation, fused.
fn forward_config(activation: ExpertActivation, n: usize, bias: bool) -> Config {
    let config = Config::new(Product::Forward, n);
    Config {
        // gate and up of a column must lie in one tile, in pairs of 64 columns
        bn: if activation == ExpertActivation::Relu2 { config.bn } else { 256 },
        gather: true,
        epilogue: Epilogue::of(activation).forward,
        bias,
        ..config
    }
}

/// Gradient of the activation and its backward, fused.
fn backward_config(activation: ExpertActivation, f: usize, weighted: bool) -> Config {
    Config {
        gather: true,
        epilogue: Epilogue::of(activation).backward,
        weighted,
        ..Config::new(Product::GradRows, f)
    }
}

/// Whether the kernels take this layer: bf16 throughout, rows of 16 bytes, at least one row.
pub fn supports<B>(x: &CudaTensor, order: &ExpertOrderPrim<B>, experts: &ExpertWeightsPrim<B>) -> bool
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let [groups, d, f] = experts.down.shape().dims::<3>();
    permute::supports(x, order) && [x, &experts.up, &experts.down].into_iter().all(super::fits) && gemm::supports([d, f], groups)
}

/// `[rows, halves, width]`, 16 rows and 64 columns at a time.
fn row_map(tensor: &CudaTensor, rows: usize, halves: usize, width: usize) -> TensorMapBinding {
    dense_map(&tensor.handle, &[rows, halves, width], &[16, 1, 64], MapElem::Bf16)
}

/// Up product `[R, F_up]` (bias included) and activation `[R, F]` of `x [T, D]`; dense inputs, as [`supports`] says.
pub fn up(
    x: &CudaTensor,
    weight: CudaTensor,
    bias: Option<CudaTensor>,
    slots: &CudaTensor,
    offsets: &CudaTensor,
    top_k: usize,
    activation: ExpertActivation,
) -> [CudaTensor; 2] {
    let weight = mappable(weight);
    let [t, d] = matrix_dims(x);
    let [groups, f_up, _] = weight.shape().dims::<3>();
    let [r] = slots.shape().dims::<1>();
    let f = f_up / activation.up_factor();
    let (up, act) = (raw::empty(x, &[r, f_up], DType::BF16), raw::empty(x, &[r, f], DType::BF16));
    let bias = bias.map(|bias| dense_f32(bias).handle);
    let epilogue = Epilogue::of(activation);
    let config = forward_config(activation, f_up, bias.is_some());
    let maps = vec![
        dense_map(&x.handle, &[t, d], &[64, 64], MapElem::Bf16),
        gemm::weight_map(config, &weight),
        row_map(&up, r, epilogue.halves, f_up / epilogue.halves),
        row_map(&act, r, 1, f),
    ];
    let counter = queue_counter(x);
    let mut buffers = vec![&offsets.handle, &slots.handle];
    buffers.extend(&bias);
    buffers.push(&counter);
    let sizes = Sizes {
        groups,
        n: f_up / epilogue.halves,
        k: d,
        stride: d,
        top_k,
        alpha: epilogue.alpha,
        limit: epilogue.limit,
        ..Sizes::default()
    };
    gemm::launch(config, x, maps, &buffers, sizes);
    [up, act]
}

/// Results of [`activation_backward`].
pub struct ActivationGrads {
    /// `[R, F_up]`.
    pub up: CudaTensor,
    /// `[R, F]`: activation times routing weight.
    pub weighted_act: CudaTensor,
    /// `[R, column tiles]` fp32, whose sum over the tiles is `<grad_act, act>`.
    pub weight_parts: Option<CudaTensor>,
}

/// From `grad [T, D]` through the down product and the activation; dense inputs, as [`supports`] says.
pub fn activation_backward(
    grad: &CudaTensor,
    down: CudaTensor,
    up: CudaTensor,
    weights: Option<CudaTensor>,
    slots: &CudaTensor,
    offsets: &CudaTensor,
    top_k: usize,
    activation: ExpertActivation,
) -> ActivationGrads {
    let (down, up) = (mappable(down), dense(up));
    let [t, d] = matrix_dims(grad);
    let [groups, _, f] = down.shape().dims::<3>();
    let [r, f_up] = matrix_dims(&up);
    let epilogue = Epilogue::of(activation);
    let config = backward_config(activation, f, weights.is_some());
    let out = ActivationGrads {
        up: raw::empty(grad, &[r, f_up], DType::BF16),
        weighted_act: raw::empty(grad, &[r, f], DType::BF16),
        weight_parts: config.weighted.then(|| raw::empty(grad, &[r, f.div_ceil(config.bn)], DType::F32)),
    };
    let product = |tensor: &CudaTensor| row_map(tensor, r, epilogue.halves, f_up / epilogue.halves);
    let maps = vec![
        dense_map(&grad.handle, &[t, d], &[64, 64], MapElem::Bf16),
        gemm::weight_map(config, &down),
        product(&out.up),
        row_map(&out.weighted_act, r, 1, f),
        product(&up),
    ];
    let weights = weights.map(|weights| dense_f32(weights).handle);
    let counter = queue_counter(grad);
    let mut buffers = vec![&offsets.handle, &slots.handle];
    if let (Some(weights), Some(parts)) = (&weights, &out.weight_parts) {
        buffers.extend([weights, &parts.handle]);
    }
    buffers.push(&counter);
    let sizes = Sizes {
        groups,
        n: f,
        k: d,
        stride: d,
        top_k,
        alpha: epilogue.alpha,
        limit: epilogue.limit,
        ..Sizes::default()
    };
    gemm::launch(config, grad, maps, &buffers, sizes);
    out
}

/// See [`MoeBackend::expert_mlp`]; inputs as [`supports`] says.
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
    let [x, slots, offsets] = [x, order.slots_r.clone(), order.offsets_e1.clone()].map(dense);
    let [up_rf, act] = up(&x, experts.up.clone(), experts.up_bias.clone(), &slots, &offsets, top_k, activation);
    let y = gemm::grouped(Product::Forward, act, experts.down.clone(), offsets.clone());
    let bias = experts.down_bias.clone().map(|bias| (bias, offsets));
    ExpertMlpPrim {
        out_td: permute::unpermute(y, order.positions_r.clone(), weights, bias, top_k),
        up_rf,
    }
}

/// See [`MoeBackend::expert_mlp_backward`] and the reference on the gradient of the routing weights.
///
/// The gradient of the down weight is the product of unweighted gradients with weighted activations, which are rounded once
/// from fp32: one rounding less than in the plain path, which rounds activations and weighted gradients.
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
    let [grad, x, slots, offsets] = [cast(grad, x.dtype), x, order.slots_r.clone(), order.offsets_e1.clone()].map(dense);
    let grads = activation_backward(
        &grad,
        experts.down.clone(),
        up,
        weights.clone(),
        &slots,
        &offsets,
        top_k,
        activation,
    );
    let weights_tk = weights.as_ref().zip(grads.weight_parts).map(|(weights, parts)| {
        let bias = experts.down_bias.clone().map(|bias| (bias, offsets.clone()));
        let sums = portable::sum_weight_parts(parts, grad.clone(), order.positions_r.clone(), bias, top_k);
        cast(sums, weights.dtype)
    });
    let rows = portable::GroupRows {
        slots: slots.clone(),
        offsets: offsets.clone(),
        top_k,
    };
    let down_bias = experts
        .down_bias
        .as_ref()
        .map(|bias| portable::sum_tokens(grad.clone(), weights, &rows, bias.dtype));
    let up_bias = experts
        .up_bias
        .as_ref()
        .map(|bias| portable::sum_rows(grads.up.clone(), &rows, bias.dtype));
    let rows = permute::permute(grad, slots.clone(), top_k);
    let down = gemm::grouped_grad_weight(rows, grads.weighted_act, offsets.clone());
    let rows = permute::permute(x, slots, top_k);
    let up = gemm::grouped_grad_weight(grads.up.clone(), rows, offsets.clone());
    let grad_rows = gemm::grouped(Product::GradRows, grads.up, experts.up.clone(), offsets);
    ExpertMlpGrads {
        x_td: permute::unpermute(grad_rows, order.positions_r.clone(), None, None, top_k),
        weights_tk,
        up,
        up_bias,
        down,
        down_bias,
    }
}

/// Every kernel variant this file can launch, for compile checks without a GPU.
pub fn variants() -> Vec<RawKernel> {
    let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
    let mut kernels = Vec::new();
    for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2, clamped] {
        // widths of 192 and 256 columns a tile
        for (width, flag) in [(2048, false), (2048, true), (2880, true)] {
            kernels.push(backward_config(activation, width, flag).kernel(8));
            kernels.push(forward_config(activation, width, flag).kernel(8));
        }
    }
    kernels
}
