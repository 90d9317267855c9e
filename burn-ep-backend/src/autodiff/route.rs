#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn route<B: MoeBackend, C: CheckpointStrategy>(
    logits: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<B>>,
    replay: Option<IntTensor<B>>,
    desc: &RouterDesc,
) -> (FloatTensor<Autodiff<B, C>>, IntTensor<B>) {
    todo!()
}
