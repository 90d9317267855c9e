//! Ops of the CUDA backend: Hopper kernels where they fit, else the reference on CubeCL's own kernels.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::{CubeBackend, element::BoolElement, element::FloatElement, element::IntElement};
use burn_fusion::{Fusion, FusionBackend};
use cubecl::cuda::CudaRuntime;

use crate::backend::*;
use crate::desc::*;
use crate::kernels::hopper::{self, gemm::Product};
use crate::kernels::raw::CudaTensor;
use crate::reference;

/// CUDA without fusion: the backend whose ops have kernels here. Parameters choose their own dtype; the element types only
/// name the defaults.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

impl<F: FloatElement, I: IntElement, BT: BoolElement> MoeBackend for CubeBackend<CudaRuntime, F, I, BT> {
    fn grouped_matmul(rows: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let [groups, n, k] = weight.shape().dims::<3>();
        if hopper::fits(&rows) && hopper::gemm::supports([n, k], groups) {
            return hopper::gemm::grouped(Product::Forward, rows, weight, offsets_e1);
        }
        reference::grouped_matmul::grouped_matmul::<Self>(rows, weight, offsets_e1)
    }

    fn grouped_matmul_grad_rows(grad: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let [groups, n, k] = weight.shape().dims::<3>();
        if hopper::fits(&grad) && hopper::gemm::supports([n, k], groups) {
            return hopper::gemm::grouped(Product::GradRows, grad, weight, offsets_e1);
        }
        reference::grouped_matmul::grad_rows::<Self>(grad, weight, offsets_e1)
    }

    fn grouped_matmul_grad_weight(grad: FloatTensor<Self>, rows: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let ([_, m], [_, n]) = (grad.shape().dims::<2>(), rows.shape().dims::<2>());
        let [e1] = offsets_e1.shape().dims::<1>();
        if hopper::fits(&grad) && hopper::gemm::supports([m, n], e1 - 1) {
            return hopper::gemm::grouped_grad_weight(grad, rows, offsets_e1);
        }
        reference::grouped_matmul::grad_weight::<Self>(grad, rows, offsets_e1)
    }

    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        if hopper_attention_fits(&q, &k, &v, mask, desc) {
            let sink = sink_h.map(|s| Self::float_cast(s, burn_backend::FloatDType::F32));
            let (out_bshd, lse_bhs) = hopper::attention::forward(q, k, v, sink, desc);
            return AttentionPrim { out_bshd, lse_bhs };
        }
        reference::attention::attention::<Self>(q, k, v, sink_h, mask, desc)
    }

    fn flash_attention_backward(
        grad_bshd: FloatTensor<Self>,
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        out: &AttentionPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionGrads<Self> {
        if sink_h.is_none() && hopper_attention_fits(&q, &k, &v, mask, desc) {
            let [q, k, v] = hopper::attention::backward(grad_bshd, q, k, v, out.out_bshd.clone(), out.lse_bhs.clone(), desc);
            return AttentionGrads { q, k, v, sink: None };
        }
        reference::attention::attention_backward::<Self>(grad_bshd, q, k, v, sink_h, mask, out, desc)
    }
}

fn hopper_attention_fits<B>(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, mask: &AttentionMaskPrim<B>, desc: &AttentionDesc) -> bool
where
    B: MoeBackend,
{
    let masked = mask.doc_start_bs.is_some() || mask.key_visible_bs.is_some();
    !masked && hopper::fits(q) && hopper::attention::supports(q, k, v, desc)
}

/// With fusion every op runs its reference, whose element-wise chains the fusion layer merges.
impl<B: FusionBackend> MoeBackend for Fusion<B> {}
