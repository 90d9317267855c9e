//! Rows per expert.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_tensor::{IndexingUpdateOp, Tensor};

use super::prim::{int_tensor, primitive, tensor};

/// See [`crate::MoeBackend::count_experts`].
pub fn count_experts<B: Backend>(ids_tk: IntTensor<B>, mask_t: Option<FloatTensor<B>>, num_experts: usize) -> FloatTensor<B> {
    let [t, k] = ids_tk.shape().dims::<2>();
    let device = B::int_device(&ids_tk);
    let ones_r = match mask_t {
        Some(mask) => tensor::<B, 1>(mask)
            .cast(DType::F32)
            .unsqueeze_dim::<2>(1)
            .repeat_dim(1, k)
            .reshape([t * k]),
        None => Tensor::ones([t * k], (&device, DType::F32)),
    };
    let ids_r = int_tensor::<B, 1>(B::int_reshape(ids_tk, [t * k].into()));
    let zeros_e = Tensor::<B, 1>::zeros([num_experts], (&device, DType::F32));
    primitive(zeros_e.select_assign(0, ids_r, ones_r, IndexingUpdateOp::Add))
}
