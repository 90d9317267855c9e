//! Router in plain tensors.

use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_tensor::activation::{sigmoid, softmax};
use burn_tensor::{IndexingUpdateOp, Int, Tensor, TensorMetadata};

use super::prim::{primitive, tensor, widen};
use crate::backend::RoutePrim;
use crate::desc::{GroupScore, RouterDesc, RouterScore};

/// Keeps the sum of sigmoid scores away from zero (DeepSeek-V3).
const SIGMOID_EPS: f64 = 1e-20;

/// See [`crate::MoeBackend::moe_route`]; f64 logits give f64 weights.
pub fn route<B: Backend>(
    logits_te: FloatTensor<B>,
    bias_e: Option<FloatTensor<B>>,
    replay_tk: Option<IntTensor<B>>,
    desc: &RouterDesc,
) -> RoutePrim<B> {
    let logits_te = widen(tensor::<B, 2>(logits_te));
    let (t, device) = (logits_te.dims()[0], logits_te.device());
    if t == 0 {
        return RoutePrim {
            weights_tk: primitive(Tensor::<B, 2>::zeros([0, desc.top_k], (&device, logits_te.dtype()))),
            ids_tk: Tensor::<B, 2, Int>::zeros([0, desc.top_k], &device).into_primitive(),
        };
    }
    let ids_tk = match replay_tk {
        Some(replay) => Tensor::from_primitive(replay),
        None if desc.force_balanced => balanced_ids(&logits_te, desc),
        None => choose(logits_te.clone(), bias_e.map(|bias| tensor::<B, 1>(bias)), desc),
    };
    let weights_tk = weights(logits_te, ids_tk.clone(), desc);
    RoutePrim {
        weights_tk: primitive(weights_tk),
        ids_tk: ids_tk.into_primitive(),
    }
}

/// See [`crate::MoeBackend::moe_route_backward`].
pub fn route_backward<B: Backend>(
    logits_te: FloatTensor<B>,
    ids_tk: IntTensor<B>,
    grad_tk: FloatTensor<B>,
    desc: &RouterDesc,
) -> FloatTensor<B> {
    let dtype = logits_te.dtype();
    if logits_te.shape().num_elements() == 0 {
        return logits_te;
    }
    let logits_te = widen(tensor::<B, 2>(logits_te));
    let ids_tk: Tensor<B, 2, Int> = Tensor::from_primitive(ids_tk);
    let grad_tk = tensor::<B, 2>(grad_tk).cast(logits_te.dtype()).mul_scalar(desc.scale);
    let zeros_te = logits_te.zeros_like();
    let chosen_tk = logits_te.clone().gather(1, ids_tk.clone());

    let grad_te = match (desc.score, desc.renormalize) {
        (RouterScore::TopKSoftmax, _) | (RouterScore::Softmax, true) => {
            let w_tk = softmax(chosen_tk, 1);
            let mean_t1 = (grad_tk.clone() * w_tk.clone()).sum_dim(1);
            zeros_te.scatter(1, ids_tk, w_tk * (grad_tk - mean_t1), IndexingUpdateOp::Add)
        }
        (RouterScore::Softmax, false) => {
            let p_te = softmax(logits_te, 1);
            let grad_p_te = zeros_te.scatter(1, ids_tk, grad_tk, IndexingUpdateOp::Add);
            let mean_t1 = (grad_p_te.clone() * p_te.clone()).sum_dim(1);
            p_te * (grad_p_te - mean_t1)
        }
        (RouterScore::Sigmoid, renormalize) => {
            let s_tk = sigmoid(chosen_tk);
            let grad_s_tk = if renormalize {
                // w = s / S: dw_a/ds_b = (delta_ab - w_a) / S.
                let sum_t1 = s_tk.clone().sum_dim(1).add_scalar(SIGMOID_EPS);
                let mean_t1 = (grad_tk.clone() * s_tk.clone() / sum_t1.clone()).sum_dim(1);
                (grad_tk - mean_t1) / sum_t1
            } else {
                grad_tk
            };
            let slope_tk = s_tk.clone() * (s_tk.neg().add_scalar(1.0));
            zeros_te.scatter(1, ids_tk, grad_s_tk * slope_tk, IndexingUpdateOp::Add)
        }
    };
    primitive(grad_te.cast(dtype))
}

/// Weights `[T, K]` of given experts, from the scores without bias.
fn weights<B: Backend>(logits_te: Tensor<B, 2>, ids_tk: Tensor<B, 2, Int>, desc: &RouterDesc) -> Tensor<B, 2> {
    let w_tk = match (desc.score, desc.renormalize) {
        // Renormalised softmax: the full denominator cancels. Leaving it out avoids 0 / 0 for forced ids.
        (RouterScore::TopKSoftmax, _) | (RouterScore::Softmax, true) => softmax(logits_te.gather(1, ids_tk), 1),
        (RouterScore::Softmax, false) => softmax(logits_te, 1).gather(1, ids_tk),
        (RouterScore::Sigmoid, renormalize) => {
            let s_tk = sigmoid(logits_te.gather(1, ids_tk));
            if renormalize {
                s_tk.clone() / s_tk.sum_dim(1).add_scalar(SIGMOID_EPS)
            } else {
                s_tk
            }
        }
    };
    w_tk.mul_scalar(desc.scale)
}

/// Slot j of token t takes expert `(t*K + j) mod E`.
fn balanced_ids<B: Backend>(logits_te: &Tensor<B, 2>, desc: &RouterDesc) -> Tensor<B, 2, Int> {
    let [t, e] = logits_te.dims();
    Tensor::arange(0..(t * desc.top_k) as i64, &logits_te.device())
        .remainder_scalar(e as i64)
        .reshape([t, desc.top_k])
}

fn choose<B: Backend>(logits_te: Tensor<B, 2>, bias_e: Option<Tensor<B, 1>>, desc: &RouterDesc) -> Tensor<B, 2, Int> {
    let [t, e] = logits_te.dims();
    let scores_te = match desc.score {
        RouterScore::Softmax => softmax(logits_te, 1),
        RouterScore::TopKSoftmax => logits_te,
        RouterScore::Sigmoid => sigmoid(logits_te),
    };
    let dtype = scores_te.dtype();
    let choice_te = match bias_e {
        Some(bias_e) => scores_te + bias_e.cast(dtype).unsqueeze_dim(0),
        None => scores_te,
    };
    // The lowest finite value ranks below every score and above the -inf that marks what is taken or masked.
    let choice_te = choice_te.clone().mask_fill(choice_te.is_nan(), f32::MIN).clamp_min(f32::MIN);
    if desc.groups == 1 {
        return top_k(choice_te, desc.top_k);
    }
    let size = e / desc.groups;
    let by_group_tgs = choice_te.clone().reshape([t, desc.groups, size]);
    let score_tg = {
        let first_tg1 = by_group_tgs.clone().max_dim(2);
        if size == 1 || desc.group_score == GroupScore::Best {
            first_tg1.reshape([t, desc.groups])
        } else {
            let at_tg = top_k(by_group_tgs.clone().reshape([t * desc.groups, size]), 2).reshape([t, desc.groups, 2]);
            by_group_tgs.gather(2, at_tg).sum_dim(2).reshape([t, desc.groups])
        }
    };
    let kept_tg = top_k(score_tg, desc.top_groups);
    let ones = Tensor::<B, 2>::ones([t, desc.top_groups], &choice_te.device());
    let keep_tg = Tensor::<B, 2>::zeros([t, desc.groups], &choice_te.device()).scatter(1, kept_tg, ones, IndexingUpdateOp::Add);
    let drop_te = keep_tg
        .lower_elem(0.5)
        .unsqueeze_dim::<3>(2)
        .expand([t, desc.groups, size])
        .reshape([t, e]);
    top_k(choice_te.mask_fill(drop_te, f32::NEG_INFINITY), desc.top_k)
}

/// Column indices of the k largest values of each row, descending; ties go to the lower index. Written as k passes of
/// maximum and first match, because sorting is not stable on every backend.
fn top_k<B: Backend>(values_tn: Tensor<B, 2>, k: usize) -> Tensor<B, 2, Int> {
    let [t, n] = values_tn.dims();
    let columns_tn = Tensor::<B, 1, Int>::arange(0..n as i64, &values_tn.device())
        .unsqueeze_dim::<2>(0)
        .expand([t, n]);
    let mut values_tn = values_tn;
    let mut picked = Vec::with_capacity(k);
    for _ in 0..k {
        let is_max_tn = values_tn.clone().equal(values_tn.clone().max_dim(1).expand([t, n]));
        let pick_t1 = columns_tn.clone().mask_fill(is_max_tn.bool_not(), n as i64).min_dim(1);
        let is_pick_tn = columns_tn.clone().equal(pick_t1.clone().expand([t, n]));
        values_tn = values_tn.mask_fill(is_pick_tn, f32::NEG_INFINITY);
        picked.push(pick_t1);
    }
    Tensor::cat(picked, 1)
}
