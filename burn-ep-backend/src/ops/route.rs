//! Router logits to expert ids and weights.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result, RoutePrim, RouterDesc};

/// Chosen experts of every token.
#[derive(Debug, Clone)]
pub struct Route<B: MoeBackend> {
    /// `[T, K]` fp32, differentiable with respect to the logits.
    pub weights_tk: Tensor<B, 2>,
    /// `[T, K]`, best expert first.
    pub ids_tk: Tensor<B, 2, Int>,
}

/// Choose `K` experts per token from logits `[T, E]` (any float dtype; scores are fp32).
///
/// `selection_bias_e [E]` shifts the choice but not the weights (DeepSeek-V3, Nemotron-H) and gets no gradient.
/// `replay_tk` fixes the choice, e.g. when a block is recomputed.
pub fn route<B: MoeBackend>(
    logits_te: Tensor<B, 2>,
    selection_bias_e: Option<Tensor<B, 1>>,
    replay_tk: Option<Tensor<B, 2, Int>>,
    desc: &RouterDesc,
) -> Result<Route<B>> {
    let op = "route";
    let [t, e] = logits_te.dims();
    desc.validate()?;
    check::shape(op, "logits", [t, e], [t, desc.num_experts], "[T, E]")?;
    if let Some(bias) = &selection_bias_e {
        check::shape(op, "selection_bias", bias.dims(), [e], "[E]")?;
    }
    if let Some(replay) = &replay_tk {
        check::shape(op, "replay", replay.dims(), [t, desc.top_k], "[T, K]")?;
    }
    let RoutePrim { weights_tk, ids_tk } = B::moe_route(
        check::float(logits_te),
        selection_bias_e.map(check::float),
        replay_tk.map(check::int),
        desc,
    );
    Ok(Route {
        weights_tk: check::tensor(weights_tk),
        ids_tk: check::int_tensor(ids_tk),
    })
}

impl RouterDesc {
    /// Checks counts and groups against each other.
    pub fn validate(&self) -> Result<()> {
        let op = "route";
        check::setting(op, "num_experts", self.num_experts > 0, self.num_experts, "at least 1")?;
        check::setting(
            op,
            "top_k",
            (1..=self.num_experts).contains(&self.top_k),
            self.top_k,
            format!("1 to num_experts = {}", self.num_experts),
        )?;
        check::setting(
            op,
            "groups",
            self.groups > 0 && self.num_experts.is_multiple_of(self.groups),
            self.groups,
            format!("a divisor of num_experts = {}", self.num_experts),
        )?;
        check::setting(
            op,
            "top_groups",
            (1..=self.groups).contains(&self.top_groups),
            self.top_groups,
            format!("1 to groups = {}", self.groups),
        )?;
        let reachable = self.top_groups * (self.num_experts / self.groups);
        check::setting(
            op,
            "top_k",
            self.top_k <= reachable,
            self.top_k,
            format!("at most the {reachable} experts of {} groups", self.top_groups),
        )
    }
}
