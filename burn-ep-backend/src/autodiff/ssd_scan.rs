#![allow(unused)]
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn ssd_scan<B: MoeBackend, C: CheckpointStrategy>(
    inputs: [FloatTensor<Autodiff<B, C>>; 7],
    initial_state: Option<FloatTensor<B>>,
    doc_start: Option<IntTensor<B>>,
    desc: &SsdDesc,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    todo!()
}
