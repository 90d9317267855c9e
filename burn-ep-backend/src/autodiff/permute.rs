#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn permute<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    top_k: usize,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}

pub fn unpermute<B: MoeBackend, C: CheckpointStrategy>(
    rows: FloatTensor<Autodiff<B, C>>,
    order: ExpertOrderPrim<B>,
    weights: Option<FloatTensor<Autodiff<B, C>>>,
    top_k: usize,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}
