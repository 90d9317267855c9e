//! A root for a backward pass whose gradient is known already.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;

use crate::backend::MoeBackend;

#[derive(Debug)]
struct Inject;

impl<B: MoeBackend> Backward<B, 1> for Inject {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // Takes the upstream gradient out of the container; it does not matter.
        grads.consume::<B>(&ops.node);
        let [y] = ops.parents;
        if let Some(y) = y {
            grads.register::<B>(y.id, ops.state);
        }
    }
}

/// See [`MoeBackend::inject_gradient`].
pub fn inject_gradient<B: MoeBackend, C: CheckpointStrategy>(
    y: FloatTensor<Autodiff<B, C>>,
    grad: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let root = B::inject_gradient(y.primitive, grad.clone());
    match Inject.prepare::<C>([y.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(grad, root),
        OpsKind::UnTracked(prep) => prep.finish(root),
    }
}
