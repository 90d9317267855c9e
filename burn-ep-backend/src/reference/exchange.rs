#![allow(unused)]
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;

pub fn exchange_rows<B: Backend>(rows: FloatTensor<B>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<B> {
    todo!()
}
