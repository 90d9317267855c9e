//! Every op of [`MoeBackend`] delegated to the wrapped backend.
//!
//! Tensors are the same types on both sides; only the structs that are generic over the backend are rebuilt.

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType, TensorData, TensorPrimitive};

use super::EpBackend;
use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;
use crate::device::DeviceMemory;
use crate::init::InitDesc;
use crate::upload::Fill;

pub(super) fn primitive_in<B: MoeBackend>(tensor: TensorPrimitive<EpBackend<B>>) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(t) => TensorPrimitive::Float(t),
        TensorPrimitive::QFloat(t) => TensorPrimitive::QFloat(t),
    }
}

pub(super) fn primitive_out<B: MoeBackend>(tensor: TensorPrimitive<B>) -> TensorPrimitive<EpBackend<B>> {
    match tensor {
        TensorPrimitive::Float(t) => TensorPrimitive::Float(t),
        TensorPrimitive::QFloat(t) => TensorPrimitive::QFloat(t),
    }
}

fn order_in<B: MoeBackend>(order: &ExpertOrderPrim<EpBackend<B>>) -> ExpertOrderPrim<B> {
    ExpertOrderPrim {
        slots_r: order.slots_r.clone(),
        positions_r: order.positions_r.clone(),
        offsets_e1: order.offsets_e1.clone(),
    }
}

fn experts_in<B: MoeBackend>(experts: &ExpertWeightsPrim<EpBackend<B>>) -> ExpertWeightsPrim<B> {
    ExpertWeightsPrim {
        up: experts.up.clone(),
        up_bias: experts.up_bias.clone(),
        down: experts.down.clone(),
        down_bias: experts.down_bias.clone(),
    }
}

fn mask_in<B: MoeBackend>(mask: &AttentionMaskPrim<EpBackend<B>>) -> AttentionMaskPrim<B> {
    AttentionMaskPrim {
        doc_start_bs: mask.doc_start_bs.clone(),
        key_visible_bs: mask.key_visible_bs.clone(),
    }
}

fn ssd_in<B: MoeBackend>(input: SsdPrim<EpBackend<B>>) -> SsdPrim<B> {
    SsdPrim {
        x: input.x,
        dt: input.dt,
        a_log: input.a_log,
        b: input.b,
        c: input.c,
        d: input.d,
        dt_bias: input.dt_bias,
        initial_state: input.initial_state,
        doc_start_bs: input.doc_start_bs,
    }
}

fn block8<From, To>(block: Block8Prim<From>) -> Block8Prim<To>
where
    From: MoeBackend,
    To: MoeBackend<IntTensorPrimitive = From::IntTensorPrimitive, FloatTensorPrimitive = From::FloatTensorPrimitive>,
{
    Block8Prim {
        codes: block.codes,
        scales: block.scales,
    }
}

impl<B: MoeBackend> MoeBackend for EpBackend<B> {
    fn moe_route(
        logits_te: FloatTensor<Self>,
        selection_bias_e: Option<FloatTensor<Self>>,
        replay_tk: Option<IntTensor<Self>>,
        desc: &RouterDesc,
    ) -> RoutePrim<Self> {
        let RoutePrim { weights_tk, ids_tk } = B::moe_route(logits_te, selection_bias_e, replay_tk, desc);
        RoutePrim { weights_tk, ids_tk }
    }

    fn moe_route_backward(
        logits_te: FloatTensor<Self>,
        ids_tk: IntTensor<Self>,
        grad_weights_tk: FloatTensor<Self>,
        desc: &RouterDesc,
    ) -> FloatTensor<Self> {
        B::moe_route_backward(logits_te, ids_tk, grad_weights_tk, desc)
    }

    fn moe_sort_by_expert(ids_tk: IntTensor<Self>, num_experts: usize) -> ExpertOrderPrim<Self> {
        let order = B::moe_sort_by_expert(ids_tk, num_experts);
        ExpertOrderPrim {
            slots_r: order.slots_r,
            positions_r: order.positions_r,
            offsets_e1: order.offsets_e1,
        }
    }

    fn moe_permute(x_td: FloatTensor<Self>, order: &ExpertOrderPrim<Self>, top_k: usize) -> FloatTensor<Self> {
        B::moe_permute(x_td, &order_in::<B>(order), top_k)
    }

    fn moe_unpermute(
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> FloatTensor<Self> {
        B::moe_unpermute(rows_rd, &order_in::<B>(order), weights_tk, top_k)
    }

    fn moe_unpermute_backward(
        grad_td: FloatTensor<Self>,
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        B::moe_unpermute_backward(grad_td, rows_rd, &order_in::<B>(order), weights_tk, top_k)
    }

    fn grouped_matmul(rows: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        B::grouped_matmul(rows, weight, offsets_e1)
    }

    fn grouped_matmul_grad_rows(grad: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        B::grouped_matmul_grad_rows(grad, weight, offsets_e1)
    }

    fn grouped_matmul_grad_weight(grad: FloatTensor<Self>, rows: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        B::grouped_matmul_grad_weight(grad, rows, offsets_e1)
    }

    fn expert_mlp(
        x_td: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpPrim<Self> {
        let (order, experts) = (order_in::<B>(order), experts_in::<B>(experts));
        let ExpertMlpPrim { out_td, up_rf } = B::expert_mlp(x_td, &order, weights_tk, &experts, top_k, activation);
        ExpertMlpPrim { out_td, up_rf }
    }

    fn expert_mlp_backward(
        grad_td: FloatTensor<Self>,
        x_td: FloatTensor<Self>,
        up_rf: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpGrads<Self> {
        let (order, experts) = (order_in::<B>(order), experts_in::<B>(experts));
        let grads = B::expert_mlp_backward(grad_td, x_td, up_rf, &order, weights_tk, &experts, top_k, activation);
        ExpertMlpGrads {
            x_td: grads.x_td,
            weights_tk: grads.weights_tk,
            up: grads.up,
            up_bias: grads.up_bias,
            down: grads.down,
            down_bias: grads.down_bias,
        }
    }

    fn exchange_rows(rows: FloatTensor<Self>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<Self> {
        B::exchange_rows(rows, plan, comm)
    }

    fn reduce_scatter(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        B::reduce_scatter(flat, comm)
    }

    fn all_gather(share: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        B::all_gather(share, comm)
    }

    fn all_reduce(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        B::all_reduce(flat, comm)
    }

    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        let AttentionPrim { out_bshd, lse_bhs } = B::flash_attention(q, k, v, sink_h, &mask_in::<B>(mask), desc);
        AttentionPrim { out_bshd, lse_bhs }
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
        let out = AttentionPrim::<B> {
            out_bshd: out.out_bshd.clone(),
            lse_bhs: out.lse_bhs.clone(),
        };
        let AttentionGrads { q, k, v, sink } = B::flash_attention_backward(grad_bshd, q, k, v, sink_h, &mask_in::<B>(mask), &out, desc);
        AttentionGrads { q, k, v, sink }
    }

    fn rms_norm(x: FloatTensor<Self>, weight_d: FloatTensor<Self>, desc: &NormDesc) -> FloatTensor<Self> {
        B::rms_norm(x, weight_d, desc)
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::rms_norm_backward(grad, x, weight_d, desc)
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::add_rms_norm(x, residual, weight_d, desc)
    }

    fn add_rms_norm_backward(
        grad: FloatTensor<Self>,
        grad_x: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::add_rms_norm_backward(grad, grad_x, x, weight_d, desc)
    }

    fn gated_rms_norm(
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> FloatTensor<Self> {
        B::gated_rms_norm(y, z, weight_d, groups, eps)
    }

    fn gated_rms_norm_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        B::gated_rms_norm_backward(grad, y, z, weight_d, groups, eps)
    }

    fn rms_norm_rope(
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> FloatTensor<Self> {
        B::rms_norm_rope(x_bshd, weight_d, cos, sin, layout, desc)
    }

    fn rms_norm_rope_backward(
        grad: FloatTensor<Self>,
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::rms_norm_rope_backward(grad, x_bshd, weight_d, cos, sin, layout, desc)
    }

    fn rope(x_bshd: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, layout: RopeLayout) -> FloatTensor<Self> {
        B::rope(x_bshd, cos, sin, layout)
    }

    fn causal_conv1d(
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        history: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> FloatTensor<Self> {
        B::causal_conv1d(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu)
    }

    fn causal_conv1d_backward(
        grad_bsc: FloatTensor<Self>,
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, Option<FloatTensor<Self>>) {
        B::causal_conv1d_backward(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu)
    }

    fn ssd_scan(input: SsdPrim<Self>, desc: &SsdDesc) -> SsdOutPrim<Self> {
        let SsdOutPrim { y, final_state } = B::ssd_scan(ssd_in::<B>(input), desc);
        SsdOutPrim { y, final_state }
    }

    fn ssd_scan_backward(grad_y: FloatTensor<Self>, input: SsdPrim<Self>, desc: &SsdDesc) -> SsdGrads<Self> {
        let SsdGrads {
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
        } = B::ssd_scan_backward(grad_y, ssd_in::<B>(input), desc);
        SsdGrads {
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
        }
    }

    fn linear_cross_entropy(
        hidden_td: FloatTensor<Self>,
        weight_vd: FloatTensor<Self>,
        labels_t: IntTensor<Self>,
        with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        let CrossEntropyPrim { loss_sum, grads } = B::linear_cross_entropy(hidden_td, weight_vd, labels_t, with_grads, desc);
        CrossEntropyPrim { loss_sum, grads }
    }

    fn count_experts(ids_tk: IntTensor<Self>, mask_t: Option<FloatTensor<Self>>, num_experts: usize) -> FloatTensor<Self> {
        B::count_experts(ids_tk, mask_t, num_experts)
    }

    fn inject_gradient(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        B::inject_gradient(y, grad)
    }

    fn squared_norms(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        B::squared_norms(tensors)
    }

    fn adamw_step(
        state: AdamWPrim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamWPrim<Self> {
        let state = AdamWPrim::<B> {
            param: state.param,
            m: state.m,
            v: state.v,
            master: state.master,
        };
        let AdamWPrim { param, m, v, master } = B::adamw_step(state, grad, grad_scale, desc);
        AdamWPrim { param, m, v, master }
    }

    fn adamw8_step(
        state: AdamW8Prim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamW8Prim<Self> {
        let state = AdamW8Prim::<B> {
            param: state.param,
            m: block8::<Self, B>(state.m),
            v: block8::<Self, B>(state.v),
            master: state.master,
        };
        let AdamW8Prim { param, m, v, master } = B::adamw8_step(state, grad, grad_scale, desc);
        AdamW8Prim {
            param,
            m: block8::<B, Self>(m),
            v: block8::<B, Self>(v),
            master,
        }
    }

    fn routed_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        B::routed_matmul(lhs, rhs)
    }

    fn routed_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        B::routed_linear(x, weight, bias)
    }

    fn is_transposed(tensor: &FloatTensor<Self>) -> bool {
        B::is_transposed(tensor)
    }

    fn routed_embedding(table_vd: FloatTensor<Self>, ids_bs: IntTensor<Self>) -> FloatTensor<Self> {
        B::routed_embedding(table_vd, ids_bs)
    }

    fn embedding_grad(grad_bsd: FloatTensor<Self>, ids_bs: IntTensor<Self>, vocab: usize) -> FloatTensor<Self> {
        B::embedding_grad(grad_bsd, ids_bs, vocab)
    }

    fn scale_by(tensor: FloatTensor<Self>, factor_1: FloatTensor<Self>) -> FloatTensor<Self> {
        B::scale_by(tensor, factor_1)
    }

    fn prepare_device(device: &Device<Self>) {
        B::prepare_device(device);
    }

    fn flush(device: &Device<Self>) {
        B::flush(device);
    }

    fn resident_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        B::resident_from_data(data, device)
    }

    fn resident_from_chunks<E: Send>(
        shape: &[usize],
        dtype: DType,
        unit: usize,
        fill: &Fill<'_, E>,
        device: &Device<Self>,
    ) -> core::result::Result<FloatTensor<Self>, E> {
        B::resident_from_chunks(shape, dtype, unit, fill, device)
    }

    fn release_staging(device: &Device<Self>) {
        B::release_staging(device);
    }

    fn resident_init(desc: &InitDesc, shape: &[usize], dtype: FloatDType, device: &Device<Self>) -> FloatTensor<Self> {
        B::resident_init(desc, shape, dtype, device)
    }

    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        B::device_memory(device)
    }

    fn reset_peak_memory(device: &Device<Self>) {
        B::reset_peak_memory(device);
    }
}
