#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn expert_mlp<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    weights: Option<FloatTensor<Autodiff<B, C>>>,
    up_down: [FloatTensor<Autodiff<B, C>>; 2],
    biases: [Option<FloatTensor<Autodiff<B, C>>>; 2],
    top_k: usize,
    activation: ExpertActivation,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    todo!()
}
