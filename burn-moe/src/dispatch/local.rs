//! All experts on this rank.

use burn::tensor::Tensor;
use burn_ep_backend::ops::{ExpertWeights, Route, expert_mlp, sort_by_expert};
use burn_ep_backend::{ExpertActivation, MoeBackend};

use crate::error::Result;

pub(super) fn routed_experts<B: MoeBackend>(
    x_td: Tensor<B, 2>,
    route: Route<B>,
    experts: ExpertWeights<B>,
    activation: ExpertActivation,
    num_experts: usize,
) -> Result<Tensor<B, 2>> {
    let order = sort_by_expert(route.ids_tk, num_experts)?;
    Ok(expert_mlp(x_td, &order, Some(route.weights_tk), experts, activation)?)
}
