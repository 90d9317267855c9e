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
    /// A bias per expert and row of both products (GPT-OSS).
    pub bias: bool,
    pub init: Init,
}

/// The experts of this rank, `[E_local, out, in]` each. Gated families hold `gate_up_proj`, others `up_proj`.
#[derive(Module, Debug)]
pub struct Experts<B: MoeBackend> {
    /// `[E_local, 2F, D]`; gate rows first, or alternating gate and up for [`ExpertActivation::ClampedSwiGlu`].
    pub gate_up_proj: Option<Param<Tensor<B, 3>>>,
    /// `[E_local, 2F]`, in the order of the rows.
    pub gate_up_proj_bias: Option<Param<Tensor<B, 2>>>,
    /// `[E_local, F, D]`.
    pub up_proj: Option<Param<Tensor<B, 3>>>,
    /// `[E_local, F]`.
    pub up_proj_bias: Option<Param<Tensor<B, 2>>>,
    /// `[E_local, D, F]`.
    pub down_proj: Param<Tensor<B, 3>>,
    /// `[E_local, D]`; enters the weighted sum with the expert's output.
    pub down_proj_bias: Option<Param<Tensor<B, 2>>>,
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
            bias,
            init,
        } = *config;
        let local = pb.local_experts(num_experts)?;
        let gated = activation.up_factor() == 2;
        let up_rows = inner * activation.up_factor();
        let up = |name| pb.expert_param(name, local.clone(), up_rows, width, init);
        let offset = |name, present: bool, rows| (bias && present).then(|| pb.expert_bias(name, local.clone(), rows));
        Ok(Self {
            gate_up_proj: gated.then(|| up("gate_up_proj")),
            gate_up_proj_bias: offset("gate_up_proj_bias", gated, up_rows),
            up_proj: (!gated).then(|| up("up_proj")),
            up_proj_bias: offset("up_proj_bias", !gated, up_rows),
            down_proj: pb.expert_param("down_proj", local.clone(), width, inner, init),
            down_proj_bias: offset("down_proj_bias", true, width),
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
            up_bias: self.gate_up_proj_bias.as_ref().or(self.up_proj_bias.as_ref()).map(Param::val),
            down: self.down_proj.val(),
            down_bias: self.down_proj_bias.as_ref().map(Param::val),
        }
    }
}
