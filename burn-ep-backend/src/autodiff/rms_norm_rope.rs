//! Backward of RMSNorm and rotary embedding in one op: keeps its input.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use crate::backend::MoeBackend;
use crate::desc::{NormDesc, RopeLayout};

#[derive(Debug)]
struct RmsNormRope;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    x: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    /// cos and sin.
    angles: [FloatTensor<B>; 2],
    layout: RopeLayout,
    desc: NormDesc,
}

impl<B: MoeBackend> Backward<B, 2> for RmsNormRope {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State {
            x,
            weight_d,
            angles: [cos, sin],
            layout,
            desc,
        } = ops.state;
        let (dx, dweight_d) = B::rms_norm_rope_backward(grad, x, weight_d, cos, sin, layout, &desc);
        for (parent, grad) in ops.parents.into_iter().zip([dx, dweight_d]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// cos and sin are constants.
pub fn rms_norm_rope<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    angles: [FloatTensor<B>; 2],
    layout: RopeLayout,
    desc: &NormDesc,
) -> FloatTensor<Autodiff<B, C>> {
    let [cos, sin] = angles.clone();
    let out = B::rms_norm_rope(x.primitive.clone(), weight.primitive.clone(), cos, sin, layout, desc);
    let parents = [x.node.clone(), weight.node.clone()];
    match RmsNormRope.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(
            State {
                x: x.primitive,
                weight_d: weight.primitive,
                angles,
                layout,
                desc: *desc,
            },
            out,
        ),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
