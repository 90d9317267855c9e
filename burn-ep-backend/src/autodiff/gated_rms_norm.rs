#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn gated_rms_norm<B: MoeBackend, C: CheckpointStrategy>(
    y: FloatTensor<Autodiff<B, C>>,
    z: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    groups: usize,
    eps: f32,
) -> FloatTensor<Autodiff<B, C>> {
    todo!()
}
