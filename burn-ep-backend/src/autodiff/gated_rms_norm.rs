//! Backward of the gated group RMSNorm: keeps its inputs.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use crate::backend::MoeBackend;

#[derive(Debug)]
struct GatedRmsNorm;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    y: FloatTensor<B>,
    z: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    groups: usize,
    eps: f32,
}

impl<B: MoeBackend> Backward<B, 3> for GatedRmsNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State {
            y,
            z,
            weight_d,
            groups,
            eps,
        } = ops.state;
        let (dy, dz, dweight_d) = B::gated_rms_norm_backward(grad, y, z, weight_d, groups, eps);
        for (parent, grad) in ops.parents.into_iter().zip([dy, dz, dweight_d]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

pub fn gated_rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    y: FloatTensor<Autodiff<B, C>>,
    z: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    groups: usize,
    eps: f32,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::gated_rms_norm(y.primitive.clone(), z.primitive.clone(), weight.primitive.clone(), groups, eps);
    let parents = [y.node.clone(), z.node.clone(), weight.node.clone()];
    match GatedRmsNorm.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(
            State {
                y: y.primitive,
                z: z.primitive,
                weight_d: weight.primitive,
                groups,
                eps,
            },
            out,
        ),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
