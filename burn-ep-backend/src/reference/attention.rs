#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn attention<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    sink: Option<FloatTensor<B>>,
    mask: &AttentionMaskPrim<B>,
    desc: &AttentionDesc,
) -> AttentionPrim<B> {
    todo!()
}

pub fn attention_backward<B: Backend>(
    grad: FloatTensor<B>,
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    sink: Option<FloatTensor<B>>,
    mask: &AttentionMaskPrim<B>,
    out: &AttentionPrim<B>,
    desc: &AttentionDesc,
) -> AttentionGrads<B> {
    todo!()
}
