#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn ssd_scan<B: Backend>(input: SsdPrim<B>, desc: &SsdDesc) -> SsdOutPrim<B> {
    todo!()
}

pub fn ssd_scan_backward<B: Backend>(grad_y: FloatTensor<B>, input: SsdPrim<B>, desc: &SsdDesc) -> SsdGrads<B> {
    todo!()
}
