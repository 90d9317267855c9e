//! Ops of the CPU backend: native kernels where plain tensors would be slow.

use burn_flex::{Flex, FlexTensor};

use crate::backend::MoeBackend;
use crate::desc::*;
use crate::flex;

impl MoeBackend for Flex {
    // ---- routing ----

    // ---- experts ----

    // ---- attention, norms, positions ----

    fn rms_norm(x: FlexTensor, weight_d: FlexTensor, desc: &NormDesc) -> FlexTensor {
        flex::rms_norm::rms_norm(x, weight_d, desc)
    }

    fn rms_norm_backward(grad: FlexTensor, x: FlexTensor, weight_d: FlexTensor, desc: &NormDesc) -> (FlexTensor, FlexTensor) {
        flex::rms_norm::rms_norm_backward(grad, x, weight_d, desc)
    }

    fn gated_rms_norm(y: FlexTensor, z: FlexTensor, weight_d: FlexTensor, groups: usize, eps: f32) -> FlexTensor {
        flex::gated_rms_norm::gated_rms_norm(y, z, weight_d, groups, eps)
    }

    fn gated_rms_norm_backward(
        grad: FlexTensor,
        y: FlexTensor,
        z: FlexTensor,
        weight_d: FlexTensor,
        groups: usize,
        eps: f32,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        flex::gated_rms_norm::gated_rms_norm_backward(grad, y, z, weight_d, groups, eps)
    }

    fn rope(x_bshd: FlexTensor, cos: FlexTensor, sin: FlexTensor, layout: RopeLayout) -> FlexTensor {
        flex::rope::rope(x_bshd, cos, sin, layout)
    }

    // ---- Mamba-2 ----

    fn causal_conv1d(
        x_bsc: FlexTensor,
        weight_ck: FlexTensor,
        bias_c: Option<FlexTensor>,
        history: Option<FlexTensor>,
        doc_start_bs: Option<FlexTensor>,
        silu: bool,
    ) -> FlexTensor {
        flex::causal_conv1d::causal_conv1d(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu)
    }

    fn causal_conv1d_backward(
        grad_bsc: FlexTensor,
        x_bsc: FlexTensor,
        weight_ck: FlexTensor,
        bias_c: Option<FlexTensor>,
        doc_start_bs: Option<FlexTensor>,
        silu: bool,
    ) -> (FlexTensor, FlexTensor, Option<FlexTensor>) {
        flex::causal_conv1d::causal_conv1d_backward(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu)
    }

    // ---- loss, optimizer ----
}
