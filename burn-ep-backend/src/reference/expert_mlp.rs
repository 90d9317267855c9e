#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn expert_mlp<B: MoeBackend>(
    x_td: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpPrim<B> {
    todo!()
}

pub fn expert_mlp_backward<B: MoeBackend>(
    grad_td: FloatTensor<B>,
    x_td: FloatTensor<B>,
    up_rf: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    experts: &ExpertWeightsPrim<B>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpGrads<B> {
    todo!()
}
