//! Stacked weights of the routed experts.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_ep_backend::{ExpertActivation, MoeBackend, ops};

use super::{Init, ParamBuilder};
use crate::error::Result;

/// Settings of [`Experts`].
#[derive(Debug, Clone, Copy)]
pub struct ExpertsConfig {
    /// Experts E over all ranks.
    pub num_experts: usize,
    /// Width at which the experts work: D, or the latent width.
    pub width: usize,
    /// Inner width F.
    pub inner: usize,
    pub activation: ExpertActivation,
    pub init: Init,
}

/// The experts of this rank, `[E_local, out, in]` each. Gated families hold `gate_up_proj`, others `up_proj`.
#[derive(Module, Debug)]
pub struct Experts<B: MoeBackend> {
    /// `[E_local, 2F, D]`, gate rows first.
    pub gate_up_proj: Option<Param<Tensor<B, 3>>>,
    /// `[E_local, F, D]`.
    pub up_proj: Option<Param<Tensor<B, 3>>>,
    /// `[E_local, D, F]`.
    pub down_proj: Param<Tensor<B, 3>>,
    activation: ExpertActivation,
}

impl<B: MoeBackend> Experts<B> {
    /// The experts of this rank; fails unless `num_experts` is a multiple of the expert-parallel size.
    pub fn new(pb: &ParamBuilder<B>, config: &ExpertsConfig) -> Result<Self> {
        let ExpertsConfig {
            num_experts,
            width,
            inner,
            activation,
            init,
        } = *config;
        let local = pb.local_experts(num_experts)?;
        let gated = activation.up_factor() == 2;
        let up = |name| pb.expert_param(name, local.clone(), inner * activation.up_factor(), width, init);
        Ok(Self {
            gate_up_proj: gated.then(|| up("gate_up_proj")),
            up_proj: (!gated).then(|| up("up_proj")),
            down_proj: pb.expert_param("down_proj", local.clone(), width, inner, init),
            activation,
        })
    }

    /// Activation between the two products.
    pub fn activation(&self) -> ExpertActivation {
        self.activation
    }

    /// Weights as the expert op takes them.
    pub fn weights(&self) -> ops::ExpertWeights<B> {
        let up = match (&self.gate_up_proj, &self.up_proj) {
            (Some(gate_up), _) => gate_up.val(),
            (None, Some(up)) => up.val(),
            (None, None) => unreachable!("`Experts::new` sets one of the two"),
        };
        ops::ExpertWeights {
            up,
            up_bias: None,
            down: self.down_proj.val(),
            down_bias: None,
        }
    }
}
