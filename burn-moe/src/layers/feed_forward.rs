//! The second half of a block, where some layers of a model have experts and others are dense.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_ep_backend::MoeBackend;

use super::{Mlp, Moe};
use crate::error::Result;
use crate::model::{ModelInput, RouterOutput};

/// Feed-forward part of a block.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum FeedForward<B: MoeBackend> {
    Moe(Moe<B>),
    Mlp(Mlp<B>),
}

impl<B: MoeBackend> FeedForward<B> {
    /// `[B, S, D]` to `[B, S, D]`, with what the router decided where there is one. `replay_tk` fixes the routing.
    pub fn forward(
        &self,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay_tk: Option<&Tensor<B, 2, Int>>,
    ) -> Result<(Tensor<B, 3>, Option<RouterOutput<B>>)> {
        match self {
            Self::Moe(moe) => {
                let (out_bsd, router) = moe.forward(x_bsd, input, replay_tk)?;
                Ok((out_bsd, Some(router)))
            }
            Self::Mlp(mlp) => Ok((mlp.forward(x_bsd)?, None)),
        }
    }
}
