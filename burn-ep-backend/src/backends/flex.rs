//! Ops of the CPU backend: native kernels where plain tensors would be slow.

use burn_flex::{Flex, FlexTensor};

use crate::backend::*;
use crate::desc::*;
use crate::flex;

impl MoeBackend for Flex {
    // ---- routing ----

    // ---- experts ----

    // ---- attention, norms, positions ----

    fn flash_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        sink_h: Option<FlexTensor>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        flex::attention::attention(q, k, v, sink_h, mask, desc)
    }

    fn flash_attention_backward(
        grad_bshd: FlexTensor,
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        sink_h: Option<FlexTensor>,
        mask: &AttentionMaskPrim<Self>,
        out: &AttentionPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionGrads<Self> {
        flex::attention::attention_backward(grad_bshd, q, k, v, sink_h, mask, out, desc)
    }

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

    fn ssd_scan(input: SsdPrim<Self>, desc: &SsdDesc) -> SsdOutPrim<Self> {
        flex::ssd_scan::ssd_scan(input, desc)
    }

    fn ssd_scan_backward(grad_y: FlexTensor, input: SsdPrim<Self>, desc: &SsdDesc) -> SsdGrads<Self> {
        flex::ssd_scan::ssd_scan_backward(grad_y, input, desc)
    }

    // ---- loss, optimizer ----
}
