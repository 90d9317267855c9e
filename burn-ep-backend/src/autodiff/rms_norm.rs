#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    desc: &NormDesc,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}
