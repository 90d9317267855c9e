//! Backend primitives as Burn tensors and back, and the width in which statistics are computed.

use burn_backend::{
    Backend, DType,
    tensor::{FloatTensor, IntTensor},
};
use burn_tensor::{Int, Tensor, TensorPrimitive};

use crate::backend::MoeBackend;

pub(crate) fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(crate) fn int_tensor<B: Backend, const D: usize>(primitive: IntTensor<B>) -> Tensor<B, D, Int> {
    Tensor::from_primitive(primitive)
}

pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// The dtype of statistics, sums and exponentials: fp32, or f64 for f64 inputs (gradient checks).
pub(crate) fn wide_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// `primitive` as a tensor of its [`wide_dtype`].
pub(crate) fn wide<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    widen(tensor(primitive))
}

/// The tensor in its [`wide_dtype`].
pub(crate) fn widen<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = wide_dtype(tensor.dtype());
    tensor.cast(dtype)
}

/// Like [`wide`] in a given dtype, for small inputs that may be narrower than the main one.
pub(crate) fn cast<B: Backend, const D: usize>(primitive: FloatTensor<B>, dtype: DType) -> Tensor<B, D> {
    tensor::<B, D>(primitive).cast(dtype)
}

/// The product that references use: the routed one, so that an accelerator's library computes it where there is one.
pub(crate) trait Times {
    /// `self · rhs` over the last two axes.
    fn times(self, rhs: Self) -> Self;
}

impl<B: MoeBackend, const D: usize> Times for Tensor<B, D> {
    fn times(self, rhs: Self) -> Self {
        tensor(B::routed_matmul(primitive(self), primitive(rhs)))
    }
}
