//! Backward of permute and unpermute: each is the other.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;

use crate::backend::{ExpertOrderPrim, MoeBackend};

#[derive(Debug)]
struct PermuteBackward;

impl<B: MoeBackend> Backward<B, 1> for PermuteBackward {
    type State = (ExpertOrderPrim<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (order, top_k) = ops.state;
        let grad_rd = grads.consume::<B>(&ops.node);
        let [x] = ops.parents;
        if let Some(x) = x {
            grads.register::<B>(x.id, B::moe_unpermute(grad_rd, &order, None, top_k));
        }
    }
}

/// [`MoeBackend::moe_permute`], tracked; keeps the order only.
pub fn permute<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    top_k: usize,
) -> FloatTensor<Autodiff<B, C>> {
    let rows_rd = B::moe_permute(x.primitive, &order, top_k);
    match PermuteBackward.prepare::<C>([x.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((order, top_k), rows_rd),
        OpsKind::UnTracked(prep) => prep.finish(rows_rd),
    }
}

/// Rows and weights are kept only for the weights' gradient.
#[derive(Debug)]
struct WeightedUnpermuteBackward;

impl<B: MoeBackend> Backward<B, 2> for WeightedUnpermuteBackward {
    type State = (FloatTensor<B>, ExpertOrderPrim<B>, FloatTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (rows_rd, order, weights_tk, top_k) = ops.state;
        let grad_td = grads.consume::<B>(&ops.node);
        let (grad_rd, grad_tk) = B::moe_unpermute_backward(grad_td, rows_rd, &order, Some(weights_tk), top_k);
        let [rows, weights] = ops.parents;
        if let Some(rows) = rows {
            grads.register::<B>(rows.id, grad_rd);
        }
        if let (Some(weights), Some(grad_tk)) = (weights, grad_tk) {
            grads.register::<B>(weights.id, grad_tk);
        }
    }
}

#[derive(Debug)]
struct SumUnpermuteBackward;

impl<B: MoeBackend> Backward<B, 1> for SumUnpermuteBackward {
    type State = (ExpertOrderPrim<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (order, top_k) = ops.state;
        let grad_td = grads.consume::<B>(&ops.node);
        let [rows] = ops.parents;
        if let Some(rows) = rows {
            grads.register::<B>(rows.id, B::moe_permute(grad_td, &order, top_k));
        }
    }
}

/// [`MoeBackend::moe_unpermute`], tracked.
pub fn unpermute<B: MoeBackend, C: CheckpointStrategy>(
    rows: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    weights: Option<FloatTensor<Autodiff<B, C>>>,
    top_k: usize,
) -> FloatTensor<Autodiff<B, C>> {
    let Some(weights) = weights else {
        let out_td = B::moe_unpermute(rows.primitive, &order, None, top_k);
        return match SumUnpermuteBackward.prepare::<C>([rows.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((order, top_k), out_td),
            OpsKind::UnTracked(prep) => prep.finish(out_td),
        };
    };
    let out_td = B::moe_unpermute(rows.primitive.clone(), &order, Some(weights.primitive.clone()), top_k);
    match WeightedUnpermuteBackward
        .prepare::<C>([rows.node, weights.node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((rows.primitive, order, weights.primitive, top_k), out_td),
        OpsKind::UnTracked(prep) => prep.finish(out_td),
    }
}
