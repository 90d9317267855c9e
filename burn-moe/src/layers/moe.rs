//! The mixture-of-experts layer.
//!
//! Path of `T = B*S` hidden states through it:
//!
//! 1. **flatten**: `[B, S, D]` to `[T, D]`;
//! 2. **router** (`router.rs`): logits `[T, E]`, then ids and weights `[T, K]`. It sees the full width D and all E
//!    experts, also those of other ranks;
//! 3. **latent** (Nemotron 3 Super, Ultra): `fc1` takes the tokens to the width at which the experts work;
//! 4. **dispatch** (`dispatch/`): slots are sorted by expert; with expert parallelism their rows travel to the ranks
//!    that hold the experts;
//! 5. **experts** (`experts.rs`, one op): gather, up product, activation, down product;
//! 6. **combine** (`dispatch/`): rows travel back; each token's K rows are weighted and summed in fp32;
//! 7. **latent back**: `fc2` returns to width D;
//! 8. **shared expert** (`mlp.rs`): a dense layer that every token passes, computed from the layer's input; Qwen2-MoE
//!    scales its output by a sigmoid of the input;
//! 9. **sum**: routed plus shared, back to `[B, S, D]`.

use burn::module::Module;
use burn::tensor::{DType, Int, Tensor, activation};
use burn_ep_backend::MoeBackend;

use super::linear::as_dtype;
use super::{Experts, ExpertsConfig, Init, Linear, Mlp, MlpConfig, ParamBuilder, Router, RouterConfig};
use crate::dispatch::routed_experts;
use crate::error::Result;
use crate::model::{ModelInput, RouterOutput};

/// Settings of [`Moe`].
#[derive(Debug, Clone)]
pub struct MoeConfig {
    pub router: RouterConfig,
    pub experts: ExpertsConfig,
    pub shared: Option<MlpConfig>,
    /// A shared expert whose output is scaled by `sigmoid(x · w)` (Qwen2-MoE).
    pub gated_shared: Option<MlpConfig>,
    /// Projections between the hidden width and the experts' width (`experts.width`, the latent width).
    pub latent: Option<LatentConfig>,
}

/// Settings of the latent projections.
#[derive(Debug, Clone, Copy)]
pub struct LatentConfig {
    pub bias: bool,
    pub init: Init,
}

/// Router, routed experts, optional latent projections, optional shared expert.
#[derive(Module, Debug)]
pub struct Moe<B: MoeBackend> {
    pub gate: Router<B>,
    pub experts: Experts<B>,
    pub shared_experts: Option<Mlp<B>>,
    pub shared_expert: Option<Mlp<B>>,
    /// `[1, D]`: how much of `shared_expert` a token takes.
    pub shared_expert_gate: Option<Linear<B>>,
    /// `[L, D]`: to the latent width.
    pub fc1_latent_proj: Option<Linear<B>>,
    /// `[D, L]`: back.
    pub fc2_latent_proj: Option<Linear<B>>,
}

impl<B: MoeBackend> Moe<B> {
    /// A layer of `config`; fails when counts contradict each other or do not divide over the ranks.
    pub fn new(pb: &ParamBuilder<B>, config: &MoeConfig) -> Result<Self> {
        let (hidden, width) = (config.router.hidden, config.experts.width);
        let latent = |name: &str, inputs, outputs| config.latent.map(|l| Linear::new(&pb.at(name), inputs, outputs, l.bias, l.init));
        Ok(Self {
            gate: Router::new(&pb.at("gate"), &config.router)?,
            experts: Experts::new(&pb.at("experts"), &config.experts)?,
            shared_experts: config.shared.as_ref().map(|shared| Mlp::new(&pb.at("shared_experts"), shared)),
            shared_expert: config.gated_shared.as_ref().map(|shared| Mlp::new(&pb.at("shared_expert"), shared)),
            shared_expert_gate: config
                .gated_shared
                .as_ref()
                .map(|shared| Linear::new(&pb.at("shared_expert_gate"), hidden, 1, false, shared.init)),
            fc1_latent_proj: latent("fc1_latent_proj", hidden, width),
            fc2_latent_proj: latent("fc2_latent_proj", width, hidden),
        })
    }

    /// `[B, S, D]` to `[B, S, D]`, with what the router decided. `replay_tk` fixes the routing.
    pub fn forward(
        &self,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay_tk: Option<&Tensor<B, 2, Int>>,
    ) -> Result<(Tensor<B, 3>, RouterOutput<B>)> {
        let [b, s, d] = x_bsd.dims();
        let h_td = x_bsd.reshape([b * s, d]);

        let (route, router) = self.gate.forward(h_td.clone(), replay_tk.cloned(), input.force_balanced)?;

        let latent_tl = match &self.fc1_latent_proj {
            Some(fc1) => fc1.forward(h_td.clone())?,
            None => h_td.clone(),
        };
        let routed_tl = routed_experts(
            latent_tl,
            route,
            self.experts.weights(),
            self.experts.activation(),
            self.gate.num_experts(),
            input.ep.as_ref(),
        )?;
        let mut out_td = match &self.fc2_latent_proj {
            Some(fc2) => fc2.forward(routed_tl)?,
            None => routed_tl,
        };
        if let Some(shared) = &self.shared_experts {
            out_td = out_td + shared.forward(h_td.clone())?;
        }
        if let (Some(shared), Some(gate)) = (&self.shared_expert, &self.shared_expert_gate) {
            // The gate's gradient is a sum over the whole row: product and sum in fp32, rounded once.
            let dtype = out_td.dtype();
            let gate_t1 = activation::sigmoid(as_dtype(gate.forward(h_td.clone())?, DType::F32));
            let shared_td = as_dtype(shared.forward(h_td)?, DType::F32);
            out_td = out_td + as_dtype(gate_t1 * shared_td, dtype);
        }
        Ok((out_td.reshape([b, s, d]), router))
    }
}
