#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn linear_cross_entropy<B: MoeBackend, C: CheckpointStrategy>(
    hidden: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    labels: IntTensor<B>,
    desc: &CrossEntropyDesc,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}
