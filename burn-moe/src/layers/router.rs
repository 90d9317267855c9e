//! The router: hidden states to expert ids and weights.

use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor};
use burn_ep_backend::{MoeBackend, RouterDesc, ops};

use super::linear::{as_dtype, linear};
use super::{Init, ParamBuilder};
use crate::error::Result;
use crate::model::RouterOutput;

/// In which dtype a family computes its logits. Weights stay in fp32 everywhere; some references round them to the dtype of the
/// hidden states, which costs accuracy in every gradient behind them and saves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterPrecision {
    /// In the dtype of the hidden states (Qwen3-MoE, Mixtral, GPT-OSS).
    Model,
    /// In fp32 (Nemotron-H, DeepSeek-V3).
    Fp32,
}

/// Settings of [`Router`].
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// Hidden width D.
    pub hidden: usize,
    /// Counts, score function, groups.
    pub desc: RouterDesc,
    pub precision: RouterPrecision,
    /// Add a trained bias to the logits (GPT-OSS).
    pub bias: bool,
    /// Hold a correction bias that shifts the choice only.
    pub selection_bias: bool,
    /// Of the weight and, unlike other layers, of the bias.
    pub init: Init,
}

/// Chooses `K` of `E` experts per token.
#[derive(Module, Debug)]
pub struct Router<B: MoeBackend> {
    /// `[E, D]`.
    pub weight: Param<Tensor<B, 2>>,
    /// `[E]`, added to the logits.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// `[E]`, fp32, moved by load statistics instead of gradients.
    pub e_score_correction_bias: Option<Param<Tensor<B, 1>>>,
    desc: RouterDesc,
    precision: RouterPrecision,
}

impl<B: MoeBackend> Router<B> {
    /// A router of `config`; fails when its counts contradict each other.
    pub fn new(pb: &ParamBuilder<B>, config: &RouterConfig) -> Result<Self> {
        config.desc.validate()?;
        let experts = config.desc.num_experts;
        Ok(Self {
            weight: pb.param("weight", [experts, config.hidden], config.init),
            bias: config.bias.then(|| pb.param("bias", [experts], config.init)),
            e_score_correction_bias: config
                .selection_bias
                .then(|| pb.buffer("e_score_correction_bias", [experts], Init::Zeros)),
            desc: config.desc.clone(),
            precision: config.precision,
        })
    }

    /// Number of experts E over all ranks.
    pub fn num_experts(&self) -> usize {
        self.desc.num_experts
    }

    /// `[T, D]` to the route and what outlives the layer: logits `[T, E]` and ids. `replay_tk` fixes the choice.
    pub fn forward(
        &self,
        h_td: Tensor<B, 2>,
        replay_tk: Option<Tensor<B, 2, Int>>,
        force_balanced: bool,
    ) -> Result<(ops::Route<B>, RouterOutput<B>)> {
        let mut logits_te = match self.precision {
            RouterPrecision::Model => linear(h_td, self.weight.val())?,
            RouterPrecision::Fp32 => linear(as_dtype(h_td, DType::F32), self.weight.val())?,
        };
        if let Some(bias) = &self.bias {
            let bias_1e = as_dtype(bias.val(), logits_te.dtype()).unsqueeze::<2>();
            logits_te = logits_te + bias_1e;
        }
        let desc = RouterDesc {
            force_balanced: force_balanced || self.desc.force_balanced,
            ..self.desc.clone()
        };
        let bias = self.e_score_correction_bias.as_ref().map(Param::val);
        let route = ops::route(logits_te.clone(), bias, replay_tk, &desc)?;
        let output = RouterOutput {
            logits_te,
            ids_tk: route.ids_tk.clone(),
        };
        Ok((route, output))
    }
}
