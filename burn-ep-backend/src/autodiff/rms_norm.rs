//! Backward of RMSNorm: keeps x and the weight.
//!
//! The input of a norm in a decoder also runs past it, on the residual stream, and the gradient of that way is there first. The
//! norm's backward takes it out of the gradients and adds its own part to it in one kernel, instead of leaving the sum to a pass
//! over three tensors.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{AutodiffBackend, TensorMetadata, tensor::FloatTensor};

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
        let [x_node, weight_node] = ops.parents;
        let so_far = x_node.as_ref().and_then(|node| {
            // Gradients are found by tensor: this one stands for x.
            let mut tensor = Autodiff::<B>::from_inner(grad.clone());
            tensor.node = node.clone();
            grads.remove::<B>(&tensor)
        });
        let (so_far, apart) = match so_far {
            Some(so_far) if so_far.shape() == x.shape() && so_far.dtype() == x.dtype() => (Some(so_far), None),
            other => (None, other),
        };
        let (dx, dweight_d) = match so_far {
            Some(so_far) => B::add_rms_norm_backward(grad, so_far, x, weight_d, &desc),
            None => B::rms_norm_backward(grad, x, weight_d, &desc),
        };
        if let Some(node) = x_node {
            grads.register::<B>(node.id, dx);
            if let Some(apart) = apart {
                grads.register::<B>(node.id, apart);
            }
        }
        if let Some(node) = weight_node {
            grads.register::<B>(node.id, dweight_d);
        }
    }
}

pub fn rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    desc: &NormDesc,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::rms_norm(x.primitive.clone(), weight.primitive.clone(), desc);
    record::<B, C>(x, weight, desc, out)
}

fn record<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    desc: &NormDesc,
    out: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
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

/// The gradient of a sum of two tensors of one shape.
#[derive(Debug)]
struct Add;

impl<B: MoeBackend> Backward<B, 2> for Add {
    type State = ();

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        for parent in ops.parents.into_iter().flatten() {
            grads.register::<B>(parent.id, grad.clone());
        }
    }
}

/// Two ops in the graph, one kernel forward: the sum, and its norm.
pub fn add_rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    residual: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    desc: &NormDesc,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    let parents = [x.node.clone(), residual.node.clone()];
    let (sum, out) = B::add_rms_norm(x.primitive, residual.primitive, weight.primitive.clone(), desc);
    let sum = match Backward::<B, 2>::prepare::<C>(Add, parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), sum),
        OpsKind::UnTracked(prep) => prep.finish(sum),
    };
    let out = record::<B, C>(sum.clone(), weight, desc, out);
    (sum, out)
}
