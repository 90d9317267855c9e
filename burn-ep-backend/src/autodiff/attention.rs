//! Backward of attention: keeps q, k, v, the output and its log-sum-exp, never the probabilities.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{AutodiffBackend, tensor::FloatTensor};

use crate::backend::*;
use crate::desc::AttentionDesc;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    sink_h: Option<FloatTensor<B>>,
    mask: AttentionMaskPrim<B>,
    out: AttentionPrim<B>,
    desc: AttentionDesc,
}

impl<B: MoeBackend> State<B> {
    fn gradients(self, grad: FloatTensor<B>) -> AttentionGrads<B> {
        B::flash_attention_backward(grad, self.q, self.k, self.v, self.sink_h, &self.mask, &self.out, &self.desc)
    }
}

#[derive(Debug)]
struct FlashAttention;

impl<B: MoeBackend> Backward<B, 3> for FlashAttention {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let AttentionGrads { q, k, v, .. } = ops.state.gradients(grad);
        for (parent, grad) in ops.parents.into_iter().zip([q, k, v]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct FlashAttentionSink;

impl<B: MoeBackend> Backward<B, 4> for FlashAttentionSink {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let AttentionGrads { q, k, v, sink } = ops.state.gradients(grad);
        for (parent, grad) in ops.parents.into_iter().zip([Some(q), Some(k), Some(v), sink]) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// Output and log-sum-exp; the latter carries no gradient.
pub fn attention<B: MoeBackend, C: CheckpointStrategy>(
    q: FloatTensor<Autodiff<B, C>>,
    k: FloatTensor<Autodiff<B, C>>,
    v: FloatTensor<Autodiff<B, C>>,
    sink: Option<FloatTensor<Autodiff<B, C>>>,
    mask: AttentionMaskPrim<B>,
    desc: &AttentionDesc,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    let sink_h = sink.as_ref().map(|sink| sink.primitive.clone());
    let out = B::flash_attention(
        q.primitive.clone(),
        k.primitive.clone(),
        v.primitive.clone(),
        sink_h.clone(),
        &mask,
        desc,
    );
    let AttentionPrim { out_bshd, lse_bhs } = out.clone();
    let state = State::<B> {
        q: q.primitive,
        k: k.primitive,
        v: v.primitive,
        sink_h,
        mask,
        out,
        desc: *desc,
    };
    let out_bshd = match sink {
        Some(sink) => match FlashAttentionSink
            .prepare::<C>([q.node, k.node, v.node, sink.node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(state, out_bshd),
            OpsKind::UnTracked(prep) => prep.finish(out_bshd),
        },
        None => match FlashAttention.prepare::<C>([q.node, k.node, v.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, out_bshd),
            OpsKind::UnTracked(prep) => prep.finish(out_bshd),
        },
    };
    (out_bshd, Autodiff::<B, C>::from_inner(lse_bhs))
}
