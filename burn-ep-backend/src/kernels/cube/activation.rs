//! Expert activations with their biases, row by row; formulas in [`ExpertActivation`].

use burn_backend::DType;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{PLANE, addresses, dense_f32, matrix_dims, row_units, vector_size};
use super::permute::expert_of_row;
use super::reduce::{team_sum, vector_sum};
use crate::desc::ExpertActivation;

/// [`ExpertActivation`] without its numbers, known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    SwiGlu,
    Relu2,
    ClampedSwiGlu,
}

impl Kind {
    /// The kind, alpha and limit.
    fn split(activation: ExpertActivation) -> (Self, f32, f32) {
        match activation {
            ExpertActivation::SwiGlu => (Self::SwiGlu, 1.0, 0.0),
            ExpertActivation::Relu2 => (Self::Relu2, 1.0, 0.0),
            ExpertActivation::ClampedSwiGlu { alpha, limit } => (Self::ClampedSwiGlu, alpha, limit),
        }
    }

    /// Gate and up alternate, so one access reads one of them.
    fn vector_size(self, dtype: DType, f: usize) -> usize {
        match self {
            Self::ClampedSwiGlu => 1,
            Self::SwiGlu | Self::Relu2 => vector_size(dtype, f),
        }
    }
}

/// Column of the gate (the only input of relu2) that belongs to activation column `i`, in accesses.
#[cube]
fn gate_column(i: usize, #[comptime] kind: Kind) -> usize {
    if comptime!(kind == Kind::ClampedSwiGlu) { i * 2 } else { i }
}

/// Column of the up half.
#[cube]
fn linear_column(i: usize, width: usize, #[comptime] kind: Kind) -> usize {
    if comptime!(kind == Kind::ClampedSwiGlu) {
        i * 2 + 1
    } else if comptime!(kind == Kind::SwiGlu) {
        width + i
    } else {
        i
    }
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + f32::exp(-x))
}

#[cube]
fn activate(gate: f32, linear: f32, alpha: f32, limit: f32, #[comptime] kind: Kind) -> f32 {
    if comptime!(kind == Kind::SwiGlu) {
        gate * sigmoid(gate) * linear
    } else if comptime!(kind == Kind::Relu2) {
        let positive = max(gate, 0.0);
        positive * positive
    } else {
        let gate = min(gate, limit);
        let linear = min(max(linear, -limit), limit);
        (linear + 1.0) * gate * sigmoid(alpha * gate)
    }
}

/// Derivative of the activation with respect to the gate. Clamped values are constants; a value on the limit still passes
/// its gradient.
#[cube]
fn gate_slope(gate: f32, linear: f32, alpha: f32, limit: f32, #[comptime] kind: Kind) -> f32 {
    if comptime!(kind == Kind::SwiGlu) {
        let sigma = sigmoid(gate);
        linear * sigma * (1.0 + gate * (1.0 - sigma))
    } else if comptime!(kind == Kind::Relu2) {
        2.0 * max(gate, 0.0)
    } else {
        let sigma = sigmoid(alpha * gate);
        let linear = min(max(linear, -limit), limit);
        let slope = (linear + 1.0) * sigma * (1.0 + alpha * gate * (1.0 - sigma));
        select(gate <= limit, slope, 0.0)
    }
}

/// Derivative with respect to the up half.
#[cube]
fn linear_slope(gate: f32, linear: f32, alpha: f32, limit: f32, #[comptime] kind: Kind) -> f32 {
    if comptime!(kind == Kind::SwiGlu) {
        gate * sigmoid(gate)
    } else {
        let gate = min(gate, limit);
        let slope = gate * sigmoid(alpha * gate);
        select(linear.abs() <= limit, slope, 0.0)
    }
}

/// One cube per sorted row. With a bias `up` becomes the biased product, rounded, as the backward reads it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float, N: Size>(
    up: &mut Tensor<Vector<T, N>>,
    bias: &Tensor<Vector<f32, N>>,
    offsets: &Tensor<i32>,
    act: &mut Tensor<Vector<T, N>>,
    width: usize,
    alpha: f32,
    limit: f32,
    #[comptime] kind: Kind,
    #[comptime] up_factor: usize,
    #[comptime] biased: bool,
    #[define(T)] _dtype: StorageType,
) {
    let base = CUBE_POS * width * up_factor;
    let mut bias_base = 0usize;
    if comptime!(biased) {
        bias_base = expert_of_row(offsets, CUBE_POS) * width * up_factor;
    }
    let mut i = UNIT_POS as usize;
    while i < width {
        let gate_at = gate_column(i, kind);
        let linear_at = linear_column(i, width, kind);
        if comptime!(biased) {
            let biased = Vector::<f32, N>::cast_from(up[base + gate_at]) + bias[bias_base + gate_at];
            up[base + gate_at] = Vector::cast_from(biased);
            if comptime!(kind != Kind::Relu2) {
                let biased = Vector::<f32, N>::cast_from(up[base + linear_at]) + bias[bias_base + linear_at];
                up[base + linear_at] = Vector::cast_from(biased);
            }
        }
        let gate = Vector::<f32, N>::cast_from(up[base + gate_at]);
        let linear = Vector::<f32, N>::cast_from(up[base + linear_at]);
        let mut value = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value() {
            value[lane] = activate(gate[lane], linear[lane], alpha, limit, kind);
        }
        act[CUBE_POS * width + i] = Vector::cast_from(value);
        i += CUBE_DIM as usize;
    }
}

/// One cube per sorted row: gradient of the up product, weighted activation, and the gradient of the routing weight,
/// `<grad_act, act> + <grad, bias>` (`biased` when there is a bias of the down product and a weight).
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<T: Float, N: Size>(
    up: &Tensor<Vector<T, N>>,
    grad_act: &Tensor<Vector<T, N>>,
    slots: &Tensor<i32>,
    weights: &Tensor<f32>,
    grad: &Tensor<T>,
    bias: &Tensor<f32>,
    offsets: &Tensor<i32>,
    grad_up: &mut Tensor<Vector<T, N>>,
    weighted_act: &mut Tensor<Vector<T, N>>,
    grad_weights: &mut Tensor<f32>,
    width: usize,
    grad_width: usize,
    alpha: f32,
    limit: f32,
    #[comptime] kind: Kind,
    #[comptime] up_factor: usize,
    #[comptime] weighted: bool,
    #[comptime] biased: bool,
    #[comptime] planes: usize,
    #[define(T)] _dtype: StorageType,
) {
    let slot = slots[CUBE_POS] as usize;
    let mut weight = f32::new(1.0);
    if comptime!(weighted) {
        weight = weights[slot];
    }
    let row = CUBE_POS * width;
    let base = row * up_factor;
    let mut dot = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < width {
        let gate_at = base + gate_column(i, kind);
        let linear_at = base + linear_column(i, width, kind);
        let gate = Vector::<f32, N>::cast_from(up[gate_at]);
        let linear = Vector::<f32, N>::cast_from(up[linear_at]);
        let upstream = Vector::<f32, N>::cast_from(grad_act[row + i]);
        let mut act = Vector::<f32, N>::empty();
        let mut to_gate = Vector::<f32, N>::empty();
        let mut to_linear = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value() {
            let (g, l) = (gate[lane], linear[lane]);
            let u = weight * upstream[lane];
            act[lane] = activate(g, l, alpha, limit, kind);
            to_gate[lane] = u * gate_slope(g, l, alpha, limit, kind);
            if comptime!(kind != Kind::Relu2) {
                to_linear[lane] = u * linear_slope(g, l, alpha, limit, kind);
            }
        }
        dot += act * upstream;
        weighted_act[row + i] = Vector::cast_from(act * Vector::<f32, N>::new(weight));
        grad_up[gate_at] = Vector::cast_from(to_gate);
        if comptime!(kind != Kind::Relu2) {
            grad_up[linear_at] = Vector::cast_from(to_linear);
        }
        i += CUBE_DIM as usize;
    }
    if comptime!(weighted) {
        let mut partial = vector_sum::<N>(dot);
        if comptime!(biased) {
            let bias_base = expert_of_row(offsets, CUBE_POS) * grad_width;
            let mut i = UNIT_POS as usize;
            while i < grad_width {
                partial += f32::cast_from(grad[CUBE_POS * grad_width + i]) * bias[bias_base + i];
                i += CUBE_DIM as usize;
            }
        }
        let total = team_sum(partial, planes);
        if UNIT_POS == 0 {
            grad_weights[slot] = total;
        }
    }
}

/// Adds the bias to `up [R, F * up_factor]` (f32 `[E, F * up_factor]`, with the offsets) and returns it with the
/// activation `[R, F]`. `up` must not be shared: it is written to.
pub fn forward(up: CudaTensor, bias: Option<CudaTensor>, offsets: CudaTensor, activation: ExpertActivation) -> [CudaTensor; 2] {
    let (up, offsets) = (dense(up), dense(offsets));
    let [r, f_up] = matrix_dims(&up);
    let f = f_up / activation.up_factor();
    let act = empty(&up, &[r, f], up.dtype);
    let (kind, alpha, limit) = Kind::split(activation);
    let vector = kind.vector_size(up.dtype, f);
    let biased = bias.is_some();
    // An absent bias is never read; any tensor stands in for it.
    let bias = bias.map_or_else(|| empty(&up, &[vector], DType::F32), dense_f32);
    // SAFETY: one cube per row of `up` and `act`; the caller owns `up`; all tensors are dense.
    unsafe {
        forward_kernel::launch_unchecked(
            &up.client.clone(),
            CubeCount::Static(r as u32, 1, 1),
            CubeDim::new_1d(row_units(f / vector)),
            addresses(&[&up, &bias]),
            vector,
            up.clone().into_tensor_arg(),
            bias.into_tensor_arg(),
            offsets.into_tensor_arg(),
            act.clone().into_tensor_arg(),
            f / vector,
            alpha,
            limit,
            kind,
            activation.up_factor(),
            biased,
            up.dtype.into(),
        );
    }
    [up, act]
}

/// Inputs of [`backward`].
pub struct Backward {
    /// `[R, F * up_factor]`, bias included.
    pub up: CudaTensor,
    /// `[R, F]`, gradient of the activation before the routing weight.
    pub grad_act: CudaTensor,
    /// `[R, D]`, gradient of each row's output before the routing weight.
    pub grad: CudaTensor,
    pub slots: CudaTensor,
    pub offsets: CudaTensor,
    /// `[T, K]`.
    pub weights: Option<CudaTensor>,
    /// `[E, D]`.
    pub down_bias: Option<CudaTensor>,
}

/// Result of [`backward`].
pub struct BackwardOut {
    pub grad_up: CudaTensor,
    /// `[R, F]`: activation times routing weight.
    pub weighted_act: CudaTensor,
    /// `[R]` fp32 in slot order.
    pub grad_weights: Option<CudaTensor>,
}

/// Backward of activation and routing weight.
pub fn backward(input: Backward, activation: ExpertActivation) -> BackwardOut {
    let (up, grad_act, grad) = (dense(input.up), dense(input.grad_act), dense(input.grad));
    let ([r, f], [_, d]) = (matrix_dims(&grad_act), matrix_dims(&grad));
    let (kind, alpha, limit) = Kind::split(activation);
    let vector = kind.vector_size(up.dtype, f);
    let units = row_units(f / vector);
    let (grad_up, weighted_act) = (
        empty(&up, &[r, f * activation.up_factor()], up.dtype),
        empty(&up, &[r, f], up.dtype),
    );
    let weighted = input.weights.is_some();
    let biased = weighted && input.down_bias.is_some();
    // Absent inputs are never read; any tensor stands in for them.
    let unread = || empty(&up, &[1], DType::F32);
    let grad_weights = if weighted { empty(&up, &[r], DType::F32) } else { unread() };
    let bias = input.down_bias.map_or_else(unread, dense_f32);
    // SAFETY: one cube per row of `grad_act`; each slot occurs once, so every weight's gradient is written; all tensors are
    // dense.
    unsafe {
        backward_kernel::launch_unchecked(
            &up.client.clone(),
            CubeCount::Static(r as u32, 1, 1),
            CubeDim::new_1d(units),
            addresses(&[&up, &grad, &bias]),
            vector,
            up.clone().into_tensor_arg(),
            grad_act.into_tensor_arg(),
            dense(input.slots).into_tensor_arg(),
            input.weights.map_or_else(unread, dense_f32).into_tensor_arg(),
            grad.into_tensor_arg(),
            bias.into_tensor_arg(),
            dense(input.offsets).into_tensor_arg(),
            grad_up.clone().into_tensor_arg(),
            weighted_act.clone().into_tensor_arg(),
            grad_weights.clone().into_tensor_arg(),
            f / vector,
            d,
            alpha,
            limit,
            kind,
            activation.up_factor(),
            weighted,
            biased,
            (units / PLANE) as usize,
            up.dtype.into(),
        );
    }
    BackwardOut {
        grad_up,
        weighted_act,
        grad_weights: weighted.then_some(grad_weights),
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn activation_kernels_compile_for_sm_90a() {
        for kind in [Kind::SwiGlu, Kind::Relu2, Kind::ClampedSwiGlu] {
            let up_factor = if kind == Kind::Relu2 { 1 } else { 2 };
            for (dtype, biased) in [(DType::BF16, false), (DType::BF16, true), (DType::F32, true)] {
                let vector = kind.vector_size(dtype, 64);
                compile(256, |b| {
                    use forward_kernel::{N, T};
                    b.scope.register_type::<T>(dtype.into());
                    b.scope.register_size::<N>(vector);
                    let (up, bias, offsets, act) = (output(b), input(b), input(b), output(b));
                    let (width, alpha, limit) = (scalar::<usize>(b), scalar::<f32>(b), scalar::<f32>(b));
                    let scope = &mut b.scope;
                    forward_kernel::expand::<T, N>(
                        scope,
                        vector,
                        up,
                        bias,
                        offsets,
                        act,
                        width,
                        alpha,
                        limit,
                        kind,
                        up_factor,
                        biased,
                        dtype.into(),
                    );
                });
                compile(256, |b| {
                    use backward_kernel::{N, T};
                    b.scope.register_type::<T>(dtype.into());
                    b.scope.register_size::<N>(vector);
                    let (up, grad_act, slots, weights) = (input(b), input(b), input(b), input(b));
                    let (grad, bias, offsets) = (input(b), input(b), input(b));
                    let (grad_up, weighted_act, grad_weights) = (output(b), output(b), output(b));
                    let (width, grad_width) = (scalar::<usize>(b), scalar::<usize>(b));
                    let (alpha, limit) = (scalar::<f32>(b), scalar::<f32>(b));
                    let scope = &mut b.scope;
                    backward_kernel::expand::<T, N>(
                        scope,
                        vector,
                        up,
                        grad_act,
                        slots,
                        weights,
                        grad,
                        bias,
                        offsets,
                        grad_up,
                        weighted_act,
                        grad_weights,
                        width,
                        grad_width,
                        alpha,
                        limit,
                        kind,
                        up_factor,
                        biased,
                        biased,
                        8,
                        dtype.into(),
                    );
                });
            }
        }
    }
}
