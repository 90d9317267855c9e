//! Backward of the router: only the logits are kept, scores are formed again.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::{MoeBackend, RoutePrim};
use crate::desc::RouterDesc;

#[derive(Debug)]
struct RouteBackward;

impl<B: MoeBackend> Backward<B, 1> for RouteBackward {
    type State = (FloatTensor<B>, IntTensor<B>, RouterDesc);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (logits_te, ids_tk, desc) = ops.state;
        let grad_tk = grads.consume::<B>(&ops.node);
        let [logits] = ops.parents;
        if let Some(logits) = logits {
            grads.register::<B>(logits.id, B::moe_route_backward(logits_te, ids_tk, grad_tk, &desc));
        }
    }
}

/// Weights (tracked) and ids of [`MoeBackend::moe_route`].
pub fn route<B: MoeBackend, C: CheckpointStrategy>(
    logits: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<B>>,
    replay: Option<IntTensor<B>>,
    desc: &RouterDesc,
) -> (FloatTensor<Autodiff<B, C>>, IntTensor<B>) {
    let RoutePrim { weights_tk, ids_tk } = B::moe_route(logits.primitive.clone(), bias, replay, desc);
    let weights_tk = match RouteBackward.prepare::<C>([logits.node.clone()]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((logits.primitive, ids_tk.clone(), desc.clone()), weights_tk),
        OpsKind::UnTracked(prep) => prep.finish(weights_tk),
    };
    (weights_tk, ids_tk)
}
