//! Backward of the causal convolution: keeps its inputs and recomputes the sum before the activation.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{
    Slice, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use crate::backend::MoeBackend;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    x_bsc: FloatTensor<B>,
    weight_ck: FloatTensor<B>,
    bias_c: Option<FloatTensor<B>>,
    history: Option<FloatTensor<B>>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
}

impl<B: MoeBackend> State<B> {
    fn gradients(self, grad: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) {
        let Some(history) = self.history else {
            return B::causal_conv1d_backward(grad, self.x_bsc, self.weight_ck, self.bias_c, self.doc_start_bs, self.silu);
        };
        // With history the row is `[history, x]`: the added rows get no gradient and belong to the document at row 0.
        let ([b, added, c], seq) = (history.shape().dims::<3>(), self.x_bsc.shape()[1]);
        let device = B::float_device(&grad);
        let no_grad = B::float_zeros([b, added, c].into(), &device, grad.dtype().into());
        let grad = B::float_cat(vec![no_grad, grad], 1);
        let x_bsc = B::float_cat(vec![B::float_cast(history, self.x_bsc.dtype().into()), self.x_bsc], 1);
        let doc_start_bs = self.doc_start_bs.map(|doc| {
            let dtype = doc.dtype();
            let inside = B::int_greater_elem(doc.clone(), 0.into(), burn_backend::get_device_settings::<B>(&device).bool_dtype);
            let moved = B::int_add_scalar(doc.clone(), (added as i64).into());
            let first = B::int_zeros(doc.shape(), &device, dtype.into());
            let doc = B::int_mask_where(first, inside, moved);
            B::int_cat(vec![B::int_zeros([b, added].into(), &device, dtype.into()), doc], 1)
        });
        let (dx, dweight, dbias) = B::causal_conv1d_backward(grad, x_bsc, self.weight_ck, self.bias_c, doc_start_bs, self.silu);
        let own_rows = [Slice::full(), Slice::from(added..added + seq), Slice::full()];
        (B::float_slice(dx, &own_rows), dweight, dbias)
    }
}

#[derive(Debug)]
struct CausalConv1d;

impl<B: MoeBackend> Backward<B, 2> for CausalConv1d {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (dx, dweight, _) = ops.state.gradients(grad);
        for (parent, grad) in ops.parents.into_iter().zip([dx, dweight]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct CausalConv1dBias;

impl<B: MoeBackend> Backward<B, 3> for CausalConv1dBias {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (dx, dweight, dbias) = ops.state.gradients(grad);
        for (parent, grad) in ops.parents.into_iter().zip([Some(dx), Some(dweight), dbias]) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

pub fn causal_conv1d<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    history: Option<FloatTensor<B>>,
    doc_start: Option<IntTensor<B>>,
    silu: bool,
) -> FloatTensor<Autodiff<B, C>> {
    let state = State::<B> {
        x_bsc: x.primitive,
        weight_ck: weight.primitive,
        bias_c: bias.as_ref().map(|bias| bias.primitive.clone()),
        history,
        doc_start_bs: doc_start,
        silu,
    };
    let State {
        x_bsc,
        weight_ck,
        bias_c,
        history,
        doc_start_bs,
        ..
    } = state.clone();
    let out = B::causal_conv1d(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu);
    match bias {
        Some(bias) => match CausalConv1dBias
            .prepare::<C>([x.node, weight.node, bias.node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(state, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        },
        None => match CausalConv1d.prepare::<C>([x.node, weight.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        },
    }
}
