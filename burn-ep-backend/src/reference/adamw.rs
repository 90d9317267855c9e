#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn adamw_step<B: Backend>(
    state: AdamWPrim<B>,
    grad: FloatTensor<B>,
    grad_scale: Option<FloatTensor<B>>,
    desc: &AdamWDesc,
) -> AdamWPrim<B> {
    todo!()
}
