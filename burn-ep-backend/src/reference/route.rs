#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn route<B: Backend>(
    logits_te: FloatTensor<B>,
    bias_e: Option<FloatTensor<B>>,
    replay_tk: Option<IntTensor<B>>,
    desc: &RouterDesc,
) -> RoutePrim<B> {
    todo!()
}

pub fn route_backward<B: Backend>(
    logits_te: FloatTensor<B>,
    ids_tk: IntTensor<B>,
    grad_tk: FloatTensor<B>,
    desc: &RouterDesc,
) -> FloatTensor<B> {
    todo!()
}
