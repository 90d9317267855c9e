#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn gated_rms_norm<B: Backend>(
    y: FloatTensor<B>,
    z: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    groups: usize,
    eps: f32,
) -> FloatTensor<B> {
    todo!()
}

pub fn gated_rms_norm_backward<B: Backend>(
    grad: FloatTensor<B>,
    y: FloatTensor<B>,
    z: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    groups: usize,
    eps: f32,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    todo!()
}
