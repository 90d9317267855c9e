//! Backward passes: one custom autodiff op per public op.
//!
//! Helpers are generic over `B: MoeBackend` and `C: CheckpointStrategy` without a `where Autodiff<B, C>: ..` clause:
//! such a clause stops rustc from normalising `FloatTensor<Autodiff<B, C>>` and hides its fields.

pub mod attention;
pub mod causal_conv1d;
pub mod embedding;
pub mod exchange;
pub mod expert_mlp;
pub mod gated_rms_norm;
pub mod grouped_matmul;
pub mod inject;
pub mod linear_cross_entropy;
pub mod matmul;
pub mod permute;
pub mod rms_norm;
pub mod rms_norm_rope;
pub mod rope;
pub mod route;
pub mod ssd_scan;

use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{AutodiffBackend, DType, FloatDType, TensorData};

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;
use crate::device::DeviceMemory;
use crate::init::InitDesc;
use crate::upload::Fill;

// Int and bool primitives of `Autodiff<B>` are those of B, so masks and orders convert by moving their fields.
pub(crate) fn inner_order<B: MoeBackend, C: CheckpointStrategy>(order: &ExpertOrderPrim<Autodiff<B, C>>) -> ExpertOrderPrim<B> {
    ExpertOrderPrim {
        slots_r: order.slots_r.clone(),
        positions_r: order.positions_r.clone(),
        offsets_e1: order.offsets_e1.clone(),
    }
}

pub(crate) fn inner_mask<B: MoeBackend, C: CheckpointStrategy>(mask: &AttentionMaskPrim<Autodiff<B, C>>) -> AttentionMaskPrim<B> {
    AttentionMaskPrim {
        doc_start_bs: mask.doc_start_bs.clone(),
        key_visible_bs: mask.key_visible_bs.clone(),
    }
}

impl<B: MoeBackend, C: CheckpointStrategy> MoeBackend for Autodiff<B, C> {
    fn moe_route(
        logits_te: FloatTensor<Self>,
        selection_bias_e: Option<FloatTensor<Self>>,
        replay_tk: Option<IntTensor<Self>>,
        desc: &RouterDesc,
    ) -> RoutePrim<Self> {
        let (weights_tk, ids_tk) = route::route::<B, C>(logits_te, selection_bias_e.map(|b| b.primitive), replay_tk, desc);
        RoutePrim { weights_tk, ids_tk }
    }

    fn moe_sort_by_expert(ids_tk: IntTensor<Self>, num_experts: usize) -> ExpertOrderPrim<Self> {
        let ExpertOrderPrim {
            slots_r,
            positions_r,
            offsets_e1,
        } = B::moe_sort_by_expert(ids_tk, num_experts);
        ExpertOrderPrim {
            slots_r,
            positions_r,
            offsets_e1,
        }
    }

    fn moe_permute(x_td: FloatTensor<Self>, order: &ExpertOrderPrim<Self>, top_k: usize) -> FloatTensor<Self> {
        permute::permute::<B, C>(x_td, inner_order::<B, C>(order), top_k)
    }

    fn moe_unpermute(
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> FloatTensor<Self> {
        permute::unpermute::<B, C>(rows_rd, inner_order::<B, C>(order), weights_tk, top_k)
    }

    fn grouped_matmul(rows: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        grouped_matmul::grouped_matmul::<B, C>(rows, weight, offsets_e1)
    }

    fn expert_mlp(
        x_td: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpPrim<Self> {
        let (out_td, up_rf) = expert_mlp::expert_mlp::<B, C>(
            x_td,
            inner_order::<B, C>(order),
            weights_tk,
            [experts.up.clone(), experts.down.clone()],
            [experts.up_bias.clone(), experts.down_bias.clone()],
            top_k,
            activation,
        );
        ExpertMlpPrim { out_td, up_rf }
    }

    fn exchange_rows(rows: FloatTensor<Self>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<Self> {
        exchange::exchange_rows::<B, C>(rows, plan, comm)
    }

    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        let (out_bshd, lse_bhs) = attention::attention::<B, C>(q, k, v, sink_h, inner_mask::<B, C>(mask), desc);
        AttentionPrim { out_bshd, lse_bhs }
    }

    fn rms_norm(x: FloatTensor<Self>, weight_d: FloatTensor<Self>, desc: &NormDesc) -> FloatTensor<Self> {
        rms_norm::rms_norm::<B, C>(x, weight_d, desc)
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rms_norm::add_rms_norm::<B, C>(x, residual, weight_d, desc)
    }

    fn gated_rms_norm(
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> FloatTensor<Self> {
        gated_rms_norm::gated_rms_norm::<B, C>(y, z, weight_d, groups, eps)
    }

    fn rms_norm_rope(
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> FloatTensor<Self> {
        rms_norm_rope::rms_norm_rope::<B, C>(x_bshd, weight_d, [cos.primitive, sin.primitive], layout, desc)
    }

    fn rope(x_bshd: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, layout: RopeLayout) -> FloatTensor<Self> {
        rope::rope::<B, C>(x_bshd, cos.primitive, sin.primitive, layout)
    }

    fn causal_conv1d(
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        history: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> FloatTensor<Self> {
        causal_conv1d::causal_conv1d::<B, C>(x_bsc, weight_ck, bias_c, history.map(|h| h.primitive), doc_start_bs, silu)
    }

    fn ssd_scan(input: SsdPrim<Self>, desc: &SsdDesc) -> SsdOutPrim<Self> {
        let SsdPrim {
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
            initial_state,
            doc_start_bs,
        } = input;
        let (y, final_state) = ssd_scan::ssd_scan::<B, C>(
            [x, dt, a_log, b, c, d, dt_bias],
            initial_state.map(|s| s.primitive),
            doc_start_bs,
            desc,
        );
        SsdOutPrim { y, final_state }
    }

    fn linear_cross_entropy(
        hidden_td: FloatTensor<Self>,
        weight_vd: FloatTensor<Self>,
        labels_t: IntTensor<Self>,
        _with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        let loss_sum = linear_cross_entropy::linear_cross_entropy::<B, C>(hidden_td, weight_vd, labels_t, desc);
        CrossEntropyPrim { loss_sum, grads: None }
    }

    fn routed_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        matmul::matmul::<B, C>(lhs, rhs)
    }

    fn routed_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        matmul::linear::<B, C>(x, weight, bias)
    }

    fn routed_embedding(table_vd: FloatTensor<Self>, ids_bs: IntTensor<Self>) -> FloatTensor<Self> {
        embedding::embedding::<B, C>(table_vd, ids_bs)
    }

    fn count_experts(ids_tk: IntTensor<Self>, mask_t: Option<FloatTensor<Self>>, num_experts: usize) -> FloatTensor<Self> {
        Self::from_inner(B::count_experts(ids_tk, mask_t.map(|mask| mask.primitive), num_experts))
    }

    fn inject_gradient(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        inject::inject_gradient::<B, C>(y, grad.primitive)
    }

    fn prepare_device(device: &Device<Self>) {
        B::prepare_device(device);
    }

    fn flush(device: &Device<Self>) {
        B::flush(device);
    }

    fn resident_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::resident_from_data(data, device))
    }

    fn resident_from_chunks<E: Send>(
        shape: &[usize],
        dtype: DType,
        unit: usize,
        fill: &Fill<'_, E>,
        device: &Device<Self>,
    ) -> core::result::Result<FloatTensor<Self>, E> {
        B::resident_from_chunks(shape, dtype, unit, fill, device).map(Self::from_inner)
    }

    fn release_staging(device: &Device<Self>) {
        B::release_staging(device);
    }

    fn resident_init(desc: &InitDesc, shape: &[usize], dtype: FloatDType, device: &Device<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::resident_init(desc, shape, dtype, device))
    }

    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        B::device_memory(device)
    }

    fn reset_peak_memory(device: &Device<Self>) {
        B::reset_peak_memory(device);
    }
}
