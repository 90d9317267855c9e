//! Gradient of a table of rows looked up by index.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, TensorMetadata};

use super::prim::wide_dtype;

/// See [`crate::MoeBackend::embedding_grad`]: added up in fp32, rounded once.
pub fn embedding_grad<B: Backend>(grad_bsd: FloatTensor<B>, ids_bs: IntTensor<B>, vocab: usize) -> FloatTensor<B> {
    let (dtype, device) = (grad_bsd.dtype(), B::float_device(&grad_bsd));
    let [b, s, d] = grad_bsd.shape().dims::<3>();
    let wide = wide_dtype(dtype).into();
    let grad_td = B::float_cast(B::float_reshape(grad_bsd, Shape::new([b * s, d])), wide);
    let ids_t = B::int_reshape(ids_bs, Shape::new([b * s]));
    let zeros_vd = B::float_zeros(Shape::new([vocab, d]), &device, wide);
    B::float_cast(B::float_select_add(zeros_vd, 0, ids_t, grad_td), dtype.into())
}
