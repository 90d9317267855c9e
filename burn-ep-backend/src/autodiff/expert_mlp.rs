//! Backward of the expert layer: keeps its input and the up product, nothing of width D per routed row.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;

use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim, MoeBackend};
use crate::desc::ExpertActivation;

#[derive(Debug)]
struct ExpertMlpBackward;

/// What the backward needs.
#[derive(Debug, Clone)]
struct Saved<B: MoeBackend> {
    x_td: FloatTensor<B>,
    up_rf: FloatTensor<B>,
    order: ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    experts: ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
}

impl<B: MoeBackend> Backward<B, 6> for ExpertMlpBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 6>, grads: &mut Gradients, _: &mut Checkpointer) {
        let saved = ops.state;
        let grad_td = grads.consume::<B>(&ops.node);
        let ExpertMlpGrads {
            x_td,
            weights_tk,
            up,
            up_bias,
            down,
            down_bias,
        } = B::expert_mlp_backward(
            grad_td,
            saved.x_td,
            saved.up_rf,
            &saved.order,
            saved.weights_tk,
            &saved.experts,
            saved.top_k,
            saved.activation,
        );
        let values = [Some(x_td), weights_tk, Some(up), Some(down), up_bias, down_bias];
        for (parent, value) in ops.parents.into_iter().zip(values) {
            if let (Some(parent), Some(value)) = (parent, value) {
                grads.register::<B>(parent.id, value);
            }
        }
    }
}

/// Output (tracked) and up product (not differentiable) of [`MoeBackend::expert_mlp`].
pub fn expert_mlp<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    weights: Option<FloatTensor<Autodiff<B, C>>>,
    up_down: [FloatTensor<Autodiff<B, C>>; 2],
    biases: [Option<FloatTensor<Autodiff<B, C>>>; 2],
    top_k: usize,
    activation: ExpertActivation,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    // The number of parents is part of the type: a constant stands in for what is absent.
    let absent = Autodiff::<B, C>::from_inner(x.primitive.clone());
    let [up, down] = up_down;
    let [up_bias, down_bias] = biases;
    let nodes = [
        x.node.clone(),
        weights.as_ref().unwrap_or(&absent).node.clone(),
        up.node.clone(),
        down.node.clone(),
        up_bias.as_ref().unwrap_or(&absent).node.clone(),
        down_bias.as_ref().unwrap_or(&absent).node.clone(),
    ];
    let weights_tk = weights.map(|weights| weights.primitive);
    let experts = ExpertWeightsPrim {
        up: up.primitive,
        up_bias: up_bias.map(|bias| bias.primitive),
        down: down.primitive,
        down_bias: down_bias.map(|bias| bias.primitive),
    };
    let ExpertMlpPrim { out_td, up_rf } = B::expert_mlp(x.primitive.clone(), &order, weights_tk.clone(), &experts, top_k, activation);
    let out_td = match ExpertMlpBackward.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let saved = Saved {
                x_td: x.primitive,
                up_rf: up_rf.clone(),
                order,
                weights_tk,
                experts,
                top_k,
                activation,
            };
            prep.finish(saved, out_td)
        }
        OpsKind::UnTracked(prep) => prep.finish(out_td),
    };
    (out_td, Autodiff::<B, C>::from_inner(up_rf))
}
