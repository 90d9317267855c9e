//! Backward of the fused loss: gradients come out of the forward pass and are only scaled here.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::{CrossEntropyPrim, MoeBackend};
use crate::desc::CrossEntropyDesc;

#[derive(Debug)]
struct LinearCrossEntropyBackward;

impl<B: MoeBackend> Backward<B, 2> for LinearCrossEntropyBackward {
    /// Gradients of hidden and weight for an upstream gradient of 1, each if tracked.
    type State = [Option<FloatTensor<B>>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let upstream_1 = grads.consume::<B>(&ops.node);
        for (parent, grad) in ops.parents.into_iter().zip(ops.state) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, B::scale_by(grad, upstream_1.clone()));
            }
        }
    }
}

/// Loss of [`MoeBackend::linear_cross_entropy`], tracked; gradients are computed only if an input is.
pub fn linear_cross_entropy<B: MoeBackend, C: CheckpointStrategy>(
    hidden: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    labels: IntTensor<B>,
    desc: &CrossEntropyDesc,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = [hidden.is_tracked(), weight.is_tracked()];
    let op = LinearCrossEntropyBackward.prepare::<C>([hidden.node, weight.node]).compute_bound();
    match op.stateful() {
        OpsKind::Tracked(prep) => {
            let CrossEntropyPrim { loss_sum, grads } = B::linear_cross_entropy(hidden.primitive, weight.primitive, labels, true, desc);
            let state = match grads {
                Some((hidden, weight)) => [tracked[0].then_some(hidden), tracked[1].then_some(weight)],
                None => [None, None],
            };
            prep.finish(state, loss_sum)
        }
        OpsKind::UnTracked(prep) => {
            let out = B::linear_cross_entropy(hidden.primitive, weight.primitive, labels, false, desc);
            prep.finish(out.loss_sum)
        }
    }
}
