#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn rope<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    layout: RopeLayout,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}
