#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn causal_conv1d<B: Backend>(
    x_bsc: FloatTensor<B>,
    weight_ck: FloatTensor<B>,
    bias_c: Option<FloatTensor<B>>,
    history: Option<FloatTensor<B>>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> FloatTensor<B> {
    todo!()
}

pub fn causal_conv1d_backward<B: Backend>(
    grad: FloatTensor<B>,
    x_bsc: FloatTensor<B>,
    weight_ck: FloatTensor<B>,
    bias_c: Option<FloatTensor<B>>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> (FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) {
    todo!()
}
