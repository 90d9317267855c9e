//! Backward of dense products: one routed product per tracked operand, transposes as views, broadcast operands as one product
//! over all rows.

use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, broadcast_shape};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};

use crate::backend::MoeBackend;

#[derive(Debug)]
struct MatmulBackward;

/// Operands are kept where the other one is tracked.
#[derive(Debug, Clone)]
struct Kept {
    lhs: Option<NodeId>,
    rhs: Option<NodeId>,
    lhs_shape: Shape,
    rhs_shape: Shape,
    /// The right operand is the transpose of a dense matrix; so will be its gradient.
    rhs_transposed: bool,
}

impl Kept {
    /// Registers the gradients of the operands with these nodes.
    fn register<B: MoeBackend>(self, parents: [Option<NodeId>; 2], grad: FloatTensor<B>, grads: &mut Gradients, kept: &mut Checkpointer) {
        let [lhs, rhs] = parents;
        if let (Some(node), Some(rhs)) = (lhs, self.rhs) {
            let rhs = kept.retrieve_node_output::<FloatTensor<B>>(rhs);
            grads.register::<B>(node, grad_lhs::<B>(grad.clone(), rhs, &self.lhs_shape));
        }
        if let (Some(node), Some(lhs)) = (rhs, self.lhs) {
            let lhs = kept.retrieve_node_output::<FloatTensor<B>>(lhs);
            grads.register::<B>(node, grad_rhs::<B>(grad, lhs, &self.rhs_shape, self.rhs_transposed));
        }
    }
}

impl<B: MoeBackend> Backward<B, 2> for MatmulBackward {
    type State = Kept;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        ops.state.register::<B>(parents, grad, grads, checkpointer);
    }
}

/// Gradient `[.., M, K]` of the left operand, summed over the axes in which it was broadcast.
fn grad_lhs<B: MoeBackend>(grad: FloatTensor<B>, rhs: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    broadcast_shape::<B>(B::routed_matmul(grad, B::float_transpose(rhs)), shape)
}

/// Gradient `[.., K, N]` of the right operand. `transposed` computes its transpose densely and returns a view of that.
fn grad_rhs<B: MoeBackend>(grad: FloatTensor<B>, lhs: FloatTensor<B>, shape: &Shape, transposed: bool) -> FloatTensor<B> {
    let product = |lhs: FloatTensor<B>, grad: FloatTensor<B>| {
        if transposed {
            B::float_transpose(B::routed_matmul(B::float_transpose(grad), lhs))
        } else {
            B::routed_matmul(B::float_transpose(lhs), grad)
        }
    };
    let rank = shape.num_dims();
    let shared = shape[..rank - 2].iter().all(|size| *size == 1);
    if rank > 2 && shared {
        // one right operand for all rows: the sum over the batch is part of one product
        return B::float_reshape(product(flat::<B>(lhs), flat::<B>(grad)), shape.clone());
    }
    broadcast_shape::<B>(product(lhs, grad), shape)
}

/// `[.., N]` to `[R, N]`.
fn flat<B: MoeBackend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape[..shape.num_dims() - 1].iter().product::<usize>();
    B::float_reshape(tensor, Shape::new([rows, width]))
}

/// [`MoeBackend::routed_matmul`], tracked.
pub fn matmul<B: MoeBackend, C: CheckpointStrategy>(
    lhs: FloatTensor<Autodiff<B, C>>,
    rhs: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let (lhs_tracked, rhs_tracked) = (lhs.is_tracked(), rhs.is_tracked());
    let op = MatmulBackward.prepare::<C>([lhs.node.clone(), rhs.node.clone()]).compute_bound();
    match op.stateful() {
        OpsKind::Tracked(mut prep) => {
            let kept = Kept {
                lhs: rhs_tracked.then(|| prep.checkpoint(&lhs)),
                rhs: lhs_tracked.then(|| prep.checkpoint(&rhs)),
                lhs_shape: lhs.primitive.shape(),
                rhs_shape: rhs.primitive.shape(),
                rhs_transposed: B::is_transposed(&rhs.primitive),
            };
            prep.finish(kept, B::routed_matmul(lhs.primitive, rhs.primitive))
        }
        OpsKind::UnTracked(prep) => prep.finish(B::routed_matmul(lhs.primitive, rhs.primitive)),
    }
}

#[derive(Debug)]
struct LinearBackward;

#[derive(Debug)]
struct BiasedLinearBackward;

impl<B: MoeBackend> Backward<B, 2> for LinearBackward {
    type State = Kept;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = flat::<B>(grads.consume::<B>(&ops.node));
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        linear_backward::<B>(ops.state, parents, grad, grads, checkpointer);
    }
}

impl<B: MoeBackend> Backward<B, 3> for BiasedLinearBackward {
    type State = Kept;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = flat::<B>(grads.consume::<B>(&ops.node));
        let [x, weight, bias] = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(bias) = bias {
            grads.register::<B>(bias, sum_rows::<B>(grad.clone()));
        }
        linear_backward::<B>(ops.state, [x, weight], grad, grads, checkpointer);
    }
}

/// `[R, N]` to `[N]` as a product with ones: one rounding of an fp32 sum where products are that.
fn sum_rows<B: MoeBackend>(grad: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, width] = grad.shape().dims::<2>();
    let ones = B::float_ones(Shape::new([1, rows]), &B::float_device(&grad), grad.dtype().into());
    B::float_reshape(B::routed_matmul(ones, grad), Shape::new([width]))
}

/// `grad [R, Out]`: gradients of x in its own shape and of the weight `[In, Out]`.
fn linear_backward<B: MoeBackend>(
    state: Kept,
    [x, weight]: [Option<NodeId>; 2],
    grad: FloatTensor<B>,
    grads: &mut Gradients,
    checkpointer: &mut Checkpointer,
) {
    if let (Some(node), Some(kept)) = (x, state.rhs) {
        let weight = checkpointer.retrieve_node_output::<FloatTensor<B>>(kept);
        let grad_x = B::routed_matmul(grad.clone(), B::float_transpose(weight));
        grads.register::<B>(node, B::float_reshape(grad_x, state.lhs_shape));
    }
    if let (Some(node), Some(kept)) = (weight, state.lhs) {
        let x = flat::<B>(checkpointer.retrieve_node_output::<FloatTensor<B>>(kept));
        grads.register::<B>(node, grad_rhs::<B>(grad, x, &state.rhs_shape, state.rhs_transposed));
    }
}

/// [`MoeBackend::routed_linear`], tracked.
pub fn linear<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = [x.is_tracked(), weight.is_tracked()];
    let transposed = B::is_transposed(&weight.primitive);
    // The two kinds of op have types of their own, so what both do is a macro over the preparation.
    macro_rules! finish {
        ($op:expr, $bias:expr) => {
            match $op {
                OpsKind::Tracked(mut prep) => {
                    let kept = Kept {
                        lhs: tracked[1].then(|| prep.checkpoint(&x)),
                        rhs: tracked[0].then(|| prep.checkpoint(&weight)),
                        lhs_shape: x.primitive.shape(),
                        rhs_shape: weight.primitive.shape(),
                        rhs_transposed: transposed,
                    };
                    prep.finish(kept, B::routed_linear(x.primitive, weight.primitive, $bias))
                }
                OpsKind::UnTracked(prep) => prep.finish(B::routed_linear(x.primitive, weight.primitive, $bias)),
            }
        };
    }
    match bias {
        Some(bias) => {
            let nodes = [x.node.clone(), weight.node.clone(), bias.node];
            finish!(
                BiasedLinearBackward.prepare::<C>(nodes).compute_bound().stateful(),
                Some(bias.primitive)
            )
        }
        None => {
            let nodes = [x.node.clone(), weight.node.clone()];
            finish!(LinearBackward.prepare::<C>(nodes).compute_bound().stateful(), None)
        }
    }
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
