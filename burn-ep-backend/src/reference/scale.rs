//! A tensor times a number on the device.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Shape, TensorMetadata};

/// See [`crate::MoeBackend::scale_by`].
pub fn scale_by<B: Backend>(tensor: FloatTensor<B>, factor_1: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = tensor.dtype();
    let ones = vec![1; tensor.shape().num_dims()];
    let factor = B::float_reshape(factor_1, Shape::from(ones));
    let tensor = B::float_cast(tensor, factor.dtype().into());
    B::float_cast(B::float_mul(tensor, factor), dtype.into())
}
