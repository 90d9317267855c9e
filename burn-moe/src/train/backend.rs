//! Bounds of everything that trains, under one name each.

use burn::module::{AutodiffModule, ModuleDisplay};
use burn::tensor::backend::AutodiffBackend;
use burn_ep_backend::MoeBackend;

use crate::model::CausalLm;

/// A backend that records gradients and has our ops with and without recording.
pub trait TrainBackend: MoeBackend + AutodiffBackend<InnerBackend: MoeBackend> {}

impl<B> TrainBackend for B
where
    B: MoeBackend + AutodiffBackend,
    B::InnerBackend: MoeBackend,
{
}

/// A causal language model that can be trained on `B`. Every `CausalLm` with `#[derive(Module)]` is one.
pub trait TrainableLm<B: TrainBackend>:
    CausalLm<B> + ModuleDisplay + AutodiffModule<B, InnerModule: CausalLm<B::InnerBackend> + ModuleDisplay>
{
}

impl<B, M> TrainableLm<B> for M
where
    B: TrainBackend,
    M: CausalLm<B> + ModuleDisplay + AutodiffModule<B>,
    M::InnerModule: CausalLm<B::InnerBackend> + ModuleDisplay,
{
}
