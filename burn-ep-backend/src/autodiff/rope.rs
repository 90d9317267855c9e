//! Backward of the rotary embedding: the rotation by the negative angle.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use crate::backend::MoeBackend;
use crate::desc::RopeLayout;

#[derive(Debug)]
struct Rope;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    layout: RopeLayout,
}

impl<B: MoeBackend> Backward<B, 1> for Rope {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State { cos, sin, layout } = ops.state;
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, B::rope(grad, cos, B::float_neg(sin), layout));
        }
    }
}

/// cos and sin are constants.
pub fn rope<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    layout: RopeLayout,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::rope(x.primitive, cos.clone(), sin.clone(), layout);
    match Rope.prepare::<C>([x.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(State { cos, sin, layout }, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
