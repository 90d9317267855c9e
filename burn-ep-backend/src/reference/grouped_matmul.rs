#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn grouped_matmul<B: Backend>(rows: FloatTensor<B>, weight: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    todo!()
}

pub fn grad_rows<B: Backend>(grad: FloatTensor<B>, weight: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    todo!()
}

pub fn grad_weight<B: Backend>(grad: FloatTensor<B>, rows: FloatTensor<B>, offsets: IntTensor<B>) -> FloatTensor<B> {
    todo!()
}
