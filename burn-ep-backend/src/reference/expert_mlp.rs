//! The expert layer as a composition of this crate's smaller ops and plain tensors.

use burn_backend::TensorMetadata;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_tensor::activation::{relu, sigmoid};
use burn_tensor::{IndexingUpdateOp, Int, Tensor};

use super::prim::{primitive, tensor, widen};
use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim, MoeBackend};
use crate::desc::ExpertActivation;

/// See [`MoeBackend::expert_mlp`].
pub fn expert_mlp<B: MoeBackend>(
    x_td: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpPrim<B> {
    let dtype = x_td.dtype();
    if order.slots_r.shape().num_elements() == 0 {
        let width = experts.up.shape()[1];
        let up_rf = B::float_zeros([0, width].into(), &B::float_device(&x_td), dtype.into());
        return ExpertMlpPrim { out_td: x_td, up_rf };
    }
    let rows_rd = B::moe_permute(x_td, order, top_k);
    let up_rf = B::grouped_matmul(rows_rd, experts.up.clone(), order.offsets_e1.clone());
    let up_rf = add_bias(tensor(up_rf), experts.up_bias.clone(), order);
    let act_rf = activate(widen(up_rf.clone()), activation).cast(dtype);
    let y_rd = B::grouped_matmul(primitive(act_rf), experts.down.clone(), order.offsets_e1.clone());
    let y_rd = add_bias(tensor(y_rd), experts.down_bias.clone(), order);
    ExpertMlpPrim {
        out_td: B::moe_unpermute(primitive(y_rd), order, weights_tk, top_k),
        up_rf: primitive(up_rf),
    }
}

/// See [`MoeBackend::expert_mlp_backward`].
///
/// The gradient of routing weight w_r is `<grad, y_r>` with `y_r = down · act_r + bias`; it is formed as
/// `<grad · down, act_r> + <grad, bias>`, so that the down product need not be kept or repeated.
pub fn expert_mlp_backward<B: MoeBackend>(
    grad_td: FloatTensor<B>,
    x_td: FloatTensor<B>,
    up_rf: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpGrads<B> {
    let dtype = x_td.dtype();
    let num_experts = experts.up.shape()[0];
    if order.slots_r.shape().num_elements() == 0 {
        let zeros = |like: &FloatTensor<B>| B::float_zeros(like.shape(), &B::float_device(like), like.dtype().into());
        return ExpertMlpGrads {
            x_td: zeros(&x_td),
            weights_tk: weights_tk.as_ref().map(zeros),
            up: zeros(&experts.up),
            up_bias: experts.up_bias.as_ref().map(zeros),
            down: zeros(&experts.down),
            down_bias: experts.down_bias.as_ref().map(zeros),
        };
    }
    let offsets = || order.offsets_e1.clone();
    let up_rf = widen(tensor::<B, 2>(up_rf));
    let act_rf = activate(up_rf.clone(), activation);
    let grad_rd = tensor::<B, 2>(B::moe_permute(grad_td, order, top_k));
    let r = grad_rd.dims()[0];

    // Unweighted gradient of the activation.
    let grad_act_rf = B::grouped_matmul_grad_rows(primitive(grad_rd.clone()), experts.down.clone(), offsets());
    let grad_act_rf = widen(tensor::<B, 2>(grad_act_rf));
    let slots_r: Tensor<B, 1, Int> = Tensor::from_primitive(order.slots_r.clone());
    let weights_r1 = weights_tk.clone().map(|weights| {
        let weights = widen(tensor::<B, 2>(weights)).reshape([r]);
        weights.select(0, slots_r).reshape([r, 1]).cast(act_rf.dtype())
    });
    let grad_weights_tk = weights_tk.map(|weights_tk| {
        let weights_tk = tensor::<B, 2>(weights_tk);
        let mut grad_r1 = (act_rf.clone() * grad_act_rf.clone()).sum_dim(1);
        if let Some(bias) = &experts.down_bias {
            let bias_rd = bias_rows(widen(tensor::<B, 2>(bias.clone())), order);
            grad_r1 = grad_r1 + (widen(grad_rd.clone()) * bias_rd).sum_dim(1);
        }
        let positions_r: Tensor<B, 1, Int> = Tensor::from_primitive(order.positions_r.clone());
        let by_slot = grad_r1.select(0, positions_r).reshape(weights_tk.dims());
        primitive(by_slot.cast(weights_tk.dtype()))
    });

    let weigh = |rows: Tensor<B, 2>| match &weights_r1 {
        Some(weights_r1) => rows * weights_r1.clone(),
        None => rows,
    };
    let weighted_grad_rd = weigh(widen(grad_rd));
    let grad_up_rf = activate_backward(up_rf, weigh(grad_act_rf), activation);
    let bias_grad = |grad: Tensor<B, 2>, bias: &Option<FloatTensor<B>>| {
        let dtype = bias.as_ref()?.dtype();
        Some(primitive(sum_by_expert(grad, order, num_experts).cast(dtype)))
    };
    let up_bias = bias_grad(grad_up_rf.clone(), &experts.up_bias);
    let down_bias = bias_grad(weighted_grad_rd.clone(), &experts.down_bias);

    let down = B::grouped_matmul_grad_weight(primitive(weighted_grad_rd.cast(dtype)), primitive(act_rf.cast(dtype)), offsets());
    let grad_up_rf = primitive(grad_up_rf.cast(dtype));
    let rows_rd = B::moe_permute(x_td, order, top_k);
    let up = B::grouped_matmul_grad_weight(grad_up_rf.clone(), rows_rd, offsets());
    let grad_rows_rd = B::grouped_matmul_grad_rows(grad_up_rf, experts.up.clone(), offsets());
    ExpertMlpGrads {
        x_td: B::moe_unpermute(grad_rows_rd, order, None, top_k),
        weights_tk: grad_weights_tk,
        up: primitive(tensor::<B, 3>(up).cast(experts.up.dtype())),
        up_bias,
        down: primitive(tensor::<B, 3>(down).cast(experts.down.dtype())),
        down_bias,
    }
}

/// `up [R, F * up_factor]` to `[R, F]`; formulas in [`ExpertActivation`].
fn activate<B: MoeBackend>(up_rf: Tensor<B, 2>, activation: ExpertActivation) -> Tensor<B, 2> {
    match activation {
        ExpertActivation::SwiGlu => {
            let [gate, linear] = halves(up_rf);
            gate.clone() * sigmoid(gate) * linear
        }
        ExpertActivation::Relu2 => {
            let positive = relu(up_rf);
            positive.clone() * positive
        }
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let [gate, linear] = alternating(up_rf);
            let gate = gate.clamp_max(limit);
            let linear = linear.clamp(-limit, limit);
            linear.add_scalar(1.0) * gate.clone() * sigmoid(gate.mul_scalar(alpha))
        }
    }
}

fn activate_backward<B: MoeBackend>(up_rf: Tensor<B, 2>, grad_rf: Tensor<B, 2>, activation: ExpertActivation) -> Tensor<B, 2> {
    match activation {
        ExpertActivation::SwiGlu => {
            let [gate, linear] = halves(up_rf);
            let sigma = sigmoid(gate.clone());
            let slope = sigma.clone() * (gate.clone() * (sigma.clone().neg().add_scalar(1.0))).add_scalar(1.0);
            Tensor::cat(vec![grad_rf.clone() * linear * slope, grad_rf * gate * sigma], 1)
        }
        ExpertActivation::Relu2 => grad_rf * relu(up_rf).mul_scalar(2.0),
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let [gate, linear] = alternating(up_rf);
            // Clamped values are constants; a value on the limit still passes its gradient.
            let gate_clamped = gate.clone().greater_elem(limit);
            let linear_clamped = linear.clone().abs().greater_elem(limit);
            let gate = gate.clamp_max(limit);
            let linear = linear.clamp(-limit, limit);
            let sigma = sigmoid(gate.clone().mul_scalar(alpha));
            let slope = sigma.clone() * (gate.clone().mul_scalar(alpha) * (sigma.clone().neg().add_scalar(1.0))).add_scalar(1.0);
            let grad_gate = (grad_rf.clone() * linear.add_scalar(1.0) * slope).mask_fill(gate_clamped, 0.0);
            let grad_linear = (grad_rf * gate * sigma).mask_fill(linear_clamped, 0.0);
            let [r, f] = grad_gate.dims();
            Tensor::cat(vec![grad_gate.unsqueeze_dim::<3>(2), grad_linear.unsqueeze_dim::<3>(2)], 2).reshape([r, 2 * f])
        }
    }
}

/// First and second half of the columns.
fn halves<B: MoeBackend>(up_rf: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let f = up_rf.dims()[1] / 2;
    [up_rf.clone().narrow(1, 0, f), up_rf.narrow(1, f, f)]
}

/// Even and odd columns.
fn alternating<B: MoeBackend>(up_rf: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let [r, f_up] = up_rf.dims();
    let pairs_rf2 = up_rf.reshape([r, f_up / 2, 2]);
    [0, 1].map(|side| pairs_rf2.clone().narrow(2, side, 1).reshape([r, f_up / 2]))
}

fn add_bias<B: MoeBackend>(rows: Tensor<B, 2>, bias: Option<FloatTensor<B>>, order: &ExpertOrderPrim<B>) -> Tensor<B, 2> {
    match bias {
        Some(bias) => {
            let dtype = rows.dtype();
            rows + bias_rows(tensor(bias), order).cast(dtype)
        }
        None => rows,
    }
}

/// `[E, N]` to `[R, N]`: the bias of each sorted row's expert.
fn bias_rows<B: MoeBackend>(bias_en: Tensor<B, 2>, order: &ExpertOrderPrim<B>) -> Tensor<B, 2> {
    let [e, _] = bias_en.dims();
    bias_en.select(0, expert_of_row(order, e))
}

/// `[R, N]` to `[E, N]`: sum over the rows of each expert.
fn sum_by_expert<B: MoeBackend>(rows: Tensor<B, 2>, order: &ExpertOrderPrim<B>, num_experts: usize) -> Tensor<B, 2> {
    let n = rows.dims()[1];
    let zeros = Tensor::zeros([num_experts, n], (&rows.device(), rows.dtype()));
    zeros.select_assign(0, expert_of_row(order, num_experts), rows, IndexingUpdateOp::Add)
}

/// Expert of every sorted row: how many groups end at or before it. Computed on the device.
fn expert_of_row<B: MoeBackend>(order: &ExpertOrderPrim<B>, num_experts: usize) -> Tensor<B, 1, Int> {
    let offsets_e1: Tensor<B, 1, Int> = Tensor::from_primitive(IntTensor::<B>::clone(&order.offsets_e1));
    let r = order.slots_r.shape().num_elements();
    let rows_re = Tensor::<B, 1, Int>::arange(0..r as i64, &offsets_e1.device())
        .unsqueeze_dim::<2>(1)
        .expand([r, num_experts]);
    let ends_re = offsets_e1.narrow(0, 1, num_experts).unsqueeze_dim::<2>(0).expand([r, num_experts]);
    let ended_r = rows_re.greater_equal(ends_re).int().sum_dim(1).reshape([r]);
    // Rows past the last offset belong to no expert; they count as the last one's, with zero content.
    ended_r.clamp_max(num_experts as i64 - 1)
}
