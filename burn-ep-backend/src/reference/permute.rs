#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn sort_by_expert<B: Backend>(ids_tk: IntTensor<B>, num_experts: usize) -> ExpertOrderPrim<B> {
    todo!()
}

pub fn permute<B: Backend>(x_td: FloatTensor<B>, order: &ExpertOrderPrim<B>, top_k: usize) -> FloatTensor<B> {
    todo!()
}

pub fn unpermute<B: Backend>(
    rows_rd: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    top_k: usize,
) -> FloatTensor<B> {
    todo!()
}

pub fn unpermute_backward<B: Backend>(
    grad_td: FloatTensor<B>,
    rows_rd: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    top_k: usize,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    todo!()
}
