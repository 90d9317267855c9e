#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn rope<B: Backend>(x_bshd: FloatTensor<B>, cos: FloatTensor<B>, sin: FloatTensor<B>, layout: RopeLayout) -> FloatTensor<B> {
    todo!()
}
