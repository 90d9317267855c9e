//! Backward of RMSNorm: keeps x and the weight.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use crate::backend::MoeBackend;
use crate::desc::NormDesc;

#[derive(Debug)]
struct RmsNorm;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    x: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    desc: NormDesc,
}

impl<B: MoeBackend> Backward<B, 2> for RmsNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State { x, weight_d, desc } = ops.state;
        let (dx, dweight_d) = B::rms_norm_backward(grad, x, weight_d, &desc);
        for (parent, grad) in ops.parents.into_iter().zip([dx, dweight_d]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

pub fn rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    desc: &NormDesc,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::rms_norm(x.primitive.clone(), weight.primitive.clone(), desc);
    match RmsNorm
        .prepare::<C>([x.node.clone(), weight.node.clone()])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(
            State {
                x: x.primitive,
                weight_d: weight.primitive,
                desc: *desc,
            },
            out,
        ),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
