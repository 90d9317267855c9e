//! Ops of the CPU backend: native kernels where plain tensors would be slow.

use burn_flex::{Flex, FlexTensor};

use crate::backend::*;
use crate::desc::*;
use crate::flex;

impl MoeBackend for Flex {
    // ---- routing ----

    fn moe_route(
        logits_te: FlexTensor,
        selection_bias_e: Option<FlexTensor>,
        replay_tk: Option<FlexTensor>,
        desc: &RouterDesc,
    ) -> RoutePrim<Self> {
        flex::route::route(logits_te, selection_bias_e, replay_tk, desc)
    }

    fn moe_route_backward(logits_te: FlexTensor, ids_tk: FlexTensor, grad_weights_tk: FlexTensor, desc: &RouterDesc) -> FlexTensor {
        flex::route::route_backward(logits_te, ids_tk, grad_weights_tk, desc)
    }

    fn moe_sort_by_expert(ids_tk: FlexTensor, num_experts: usize) -> ExpertOrderPrim<Self> {
        flex::permute::sort_by_expert(ids_tk, num_experts)
    }

    fn moe_permute(x_td: FlexTensor, order: &ExpertOrderPrim<Self>, top_k: usize) -> FlexTensor {
        flex::permute::permute(x_td, order, top_k)
    }

    fn moe_unpermute(rows_rd: FlexTensor, order: &ExpertOrderPrim<Self>, weights_tk: Option<FlexTensor>, top_k: usize) -> FlexTensor {
        flex::permute::unpermute(rows_rd, order, weights_tk, top_k)
    }

    fn moe_unpermute_backward(
        grad_td: FlexTensor,
        rows_rd: FlexTensor,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FlexTensor>,
        top_k: usize,
    ) -> (FlexTensor, Option<FlexTensor>) {
        flex::permute::unpermute_backward(grad_td, rows_rd, order, weights_tk, top_k)
    }

    // ---- experts ----

    fn grouped_matmul(rows: FlexTensor, weight: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
        flex::grouped_matmul::grouped_matmul(rows, weight, offsets_e1)
    }

    fn grouped_matmul_grad_rows(grad: FlexTensor, weight: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
        flex::grouped_matmul::grad_rows(grad, weight, offsets_e1)
    }

    fn grouped_matmul_grad_weight(grad: FlexTensor, rows: FlexTensor, offsets_e1: FlexTensor) -> FlexTensor {
        flex::grouped_matmul::grad_weight(grad, rows, offsets_e1)
    }

    fn expert_mlp(
        x_td: FlexTensor,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FlexTensor>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpPrim<Self> {
        flex::expert_mlp::expert_mlp(x_td, order, weights_tk, experts, top_k, activation)
    }

    fn expert_mlp_backward(
        grad_td: FlexTensor,
        x_td: FlexTensor,
        up_rf: FlexTensor,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FlexTensor>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpGrads<Self> {
        flex::expert_mlp::expert_mlp_backward(grad_td, x_td, up_rf, order, weights_tk, experts, top_k, activation)
    }

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
        flex::rms_norm::backward(grad, None, x, weight_d, desc)
    }

    fn add_rms_norm(x: FlexTensor, residual: FlexTensor, weight_d: FlexTensor, desc: &NormDesc) -> (FlexTensor, FlexTensor) {
        flex::rms_norm::add_rms_norm(x, residual, weight_d, desc)
    }

    fn add_rms_norm_backward(
        grad: FlexTensor,
        grad_x: FlexTensor,
        x: FlexTensor,
        weight_d: FlexTensor,
        desc: &NormDesc,
    ) -> (FlexTensor, FlexTensor) {
        flex::rms_norm::backward(grad, Some(grad_x), x, weight_d, desc)
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

    fn linear_cross_entropy(
        hidden_td: FlexTensor,
        weight_vd: FlexTensor,
        labels_t: FlexTensor,
        with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        flex::linear_cross_entropy::linear_cross_entropy(hidden_td, weight_vd, labels_t, with_grads, desc)
    }

    fn adamw_step(state: AdamWPrim<Self>, grad: FlexTensor, grad_scale: Option<FlexTensor>, desc: &AdamWDesc) -> AdamWPrim<Self> {
        flex::adamw::adamw_step(state, grad, grad_scale, desc)
    }
}
