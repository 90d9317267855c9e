//! The extension trait: every op this crate adds to Burn, with its contract.
//!
//! All defaults call `reference/`, which is made of Burn primitives, so any Burn backend can implement the trait
//! with an empty body. Float outputs have the dtype of their main input unless said otherwise; statistics,
//! routing weights and losses are fp32 (f64 for f64 inputs, which gradient checks use). No kernel reads a tensor back
//! to the host unless its contract says so; the reference of the grouped products does.

use burn_backend::{
    Backend, DType, FloatDType, TensorData,
    tensor::{Device, FloatTensor, IntTensor},
};

use crate::comm::{CommHandle, ExchangePlan};
use crate::desc::*;
use crate::device::DeviceMemory;
use crate::init::InitDesc;
pub use crate::prims::*;
use crate::reference;
use crate::upload::{Fill, host_data};

/// The mixture-of-experts extension of a Burn backend.
pub trait MoeBackend: Backend {
    // ---- routing -------------------------------------------------------------------------------------------

    /// Router logits `[T, E]` to weights and ids. `selection_bias [E]` (fp32) shifts the choice only.
    /// `replay_tk` fixes the ids (recomputation, tests): weights are then computed for exactly those experts.
    fn moe_route(
        logits_te: FloatTensor<Self>,
        selection_bias_e: Option<FloatTensor<Self>>,
        replay_tk: Option<IntTensor<Self>>,
        desc: &RouterDesc,
    ) -> RoutePrim<Self> {
        reference::route::route::<Self>(logits_te, selection_bias_e, replay_tk, desc)
    }

    /// Gradient `[T, E]` (dtype of the logits) of [`MoeBackend::moe_route`] from the gradient of the weights.
    fn moe_route_backward(
        logits_te: FloatTensor<Self>,
        ids_tk: IntTensor<Self>,
        grad_weights_tk: FloatTensor<Self>,
        desc: &RouterDesc,
    ) -> FloatTensor<Self> {
        reference::route::route_backward::<Self>(logits_te, ids_tk, grad_weights_tk, desc)
    }

    /// Stable counting sort of the `T*K` slots by expert.
    fn moe_sort_by_expert(ids_tk: IntTensor<Self>, num_experts: usize) -> ExpertOrderPrim<Self> {
        reference::permute::sort_by_expert::<Self>(ids_tk, num_experts)
    }

    /// `rows[r] = x[slots[r] / K]`, `[R, D]`.
    fn moe_permute(x_td: FloatTensor<Self>, order: &ExpertOrderPrim<Self>, top_k: usize) -> FloatTensor<Self> {
        reference::permute::permute::<Self>(x_td, order, top_k)
    }

    /// `out[t] = sum_j weights[t, j] * rows[positions[t*K + j]]`, fp32 sum, one rounding; weights default to 1.
    fn moe_unpermute(
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> FloatTensor<Self> {
        reference::permute::unpermute::<Self>(rows_rd, order, weights_tk, top_k)
    }

    /// Gradients of [`MoeBackend::moe_unpermute`]: rows `[R, D]` and weights `[T, K]` fp32.
    fn moe_unpermute_backward(
        grad_td: FloatTensor<Self>,
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        reference::permute::unpermute_backward::<Self>(grad_td, rows_rd, order, weights_tk, top_k)
    }

    // ---- experts -------------------------------------------------------------------------------------------

    /// `out[r] = rows[r] · weight[e]^T` for the rows of each expert: `[R, In] x [E, Out, In] -> [R, Out]`.
    fn grouped_matmul(rows: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        reference::grouped_matmul::grouped_matmul::<Self>(rows, weight, offsets_e1)
    }

    /// Gradient for the rows, `[R, In]`.
    fn grouped_matmul_grad_rows(grad: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        reference::grouped_matmul::grad_rows::<Self>(grad, weight, offsets_e1)
    }

    /// Gradient for the weight, `[E, Out, In]`; experts without rows get exact zeros.
    fn grouped_matmul_grad_weight(grad: FloatTensor<Self>, rows: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        reference::grouped_matmul::grad_weight::<Self>(grad, rows, offsets_e1)
    }

    /// Gather, up, activation, down, weighted combine. `weights_tk` absent means weight 1 (rows that another rank
    /// combines). All `[T, D]` to `[T, D]`.
    fn expert_mlp(
        x_td: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpPrim<Self> {
        reference::expert_mlp::expert_mlp::<Self>(x_td, order, weights_tk, experts, top_k, activation)
    }

    /// Gradients of [`MoeBackend::expert_mlp`] from its inputs and the kept up product.
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
        reference::expert_mlp::expert_mlp_backward::<Self>(grad_td, x_td, up_rf, order, weights_tk, experts, top_k, activation)
    }

    /// Send rows to other ranks and receive theirs: `[sum(plan.send), D] -> [sum(plan.recv), D]`, blocks in rank
    /// order. The backward is the same op with `plan.reversed()`. A failed exchange poisons `comm` (see
    /// [`CommHandle::check`]) and returns zeros, because a backward step cannot return an error.
    fn exchange_rows(rows: FloatTensor<Self>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<Self> {
        reference::exchange::exchange_rows::<Self>(rows, plan, comm)
    }

    /// Sum over the ranks of `comm` of `flat [world * share]`, of which rank r gets elements `r * share ..`: `[share]`. fp32 or
    /// f64, summed in that dtype. Not differentiable. A failure poisons `comm`; the result is then zero.
    fn reduce_scatter(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        reference::collective::reduce_scatter::<Self>(flat, comm)
    }

    /// `share [n]` of every rank of `comm`, in rank order: `[world * n]`, any float dtype. Not differentiable. A failure poisons
    /// `comm`; the result is then zero.
    fn all_gather(share: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        reference::collective::all_gather::<Self>(share, comm)
    }

    /// Sum of `flat [n]` over the ranks of `comm`, the same bits on all of them. fp32 or f64. Not differentiable. A failure
    /// poisons `comm`; the result is then zero.
    fn all_reduce(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        reference::collective::all_reduce::<Self>(flat, comm)
    }

    // ---- attention, norms, positions -----------------------------------------------------------------------

    /// Grouped-query attention. q `[B, Sq, H, Dk]`, k `[B, Skv, Hkv, Dk]`, v `[B, Skv, Hkv, Dv]`, `Skv >= Sq`: query i
    /// has row index `i + Skv - Sq`. Query head h uses key head `h / (H / Hkv)`. `sink_h [H]` is an extra logit in the
    /// softmax denominator without a value. Query rows that see no key return zeros. Without causality a query also sees
    /// later keys, but of its own document only.
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        reference::attention::attention::<Self>(q, k, v, sink_h, mask, desc)
    }

    /// Gradients of [`MoeBackend::flash_attention`].
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
        reference::attention::attention_backward::<Self>(grad_bshd, q, k, v, sink_h, mask, out, desc)
    }

    /// RMSNorm over the last axis, statistics in fp32. x of any rank, weight `[D]`.
    fn rms_norm(x: FloatTensor<Self>, weight_d: FloatTensor<Self>, desc: &NormDesc) -> FloatTensor<Self> {
        reference::rms_norm::rms_norm::<Self>(x, weight_d, desc)
    }

    /// Gradients (x, weight).
    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::rms_norm::rms_norm_backward::<Self>(grad, x, weight_d, desc)
    }

    /// `x + residual`, rounded to their dtype, and its [`MoeBackend::rms_norm`]; both of the shape of x.
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::rms_norm::add_rms_norm::<Self>(x, residual, weight_d, desc)
    }

    /// [`MoeBackend::rms_norm_backward`] with `grad_x`, of the shape and dtype of x, added to the gradient of x.
    fn add_rms_norm_backward(
        grad: FloatTensor<Self>,
        grad_x: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::rms_norm::add_rms_norm_backward::<Self>(grad, grad_x, x, weight_d, desc)
    }

    /// Mamba-2 gated norm: `v = y * silu(z)` in fp32, RMSNorm of v per group of `D / groups` channels, times weight.
    fn gated_rms_norm(
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> FloatTensor<Self> {
        reference::gated_rms_norm::gated_rms_norm::<Self>(y, z, weight_d, groups, eps)
    }

    /// Gradients (y, z, weight).
    fn gated_rms_norm_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        reference::gated_rms_norm::gated_rms_norm_backward::<Self>(grad, y, z, weight_d, groups, eps)
    }

    /// [`MoeBackend::rope`] of the [`MoeBackend::rms_norm`] of every head: x `[B, S, H, D]`, weight `[D]`.
    fn rms_norm_rope(
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> FloatTensor<Self> {
        Self::rope(Self::rms_norm(x_bshd, weight_d, desc), cos, sin, layout)
    }

    /// Gradients (x, weight).
    fn rms_norm_rope_backward(
        grad: FloatTensor<Self>,
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let grad = Self::rope(grad, cos, Self::float_neg(sin), layout);
        Self::rms_norm_backward(grad, x_bshd, weight_d, desc)
    }

    /// Rotary embedding of `[B, S, H, D]` by `cos`, `sin` `[B or 1, S, D_rot / 2]`; channels past `D_rot` pass through.
    /// The backward is the same op with negated `sin`.
    fn rope(x_bshd: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, layout: RopeLayout) -> FloatTensor<Self> {
        reference::rope::rope::<Self>(x_bshd, cos, sin, layout)
    }

    // ---- Mamba-2 -------------------------------------------------------------------------------------------

    /// Depthwise causal convolution `[B, S, C]` with `weight [C, Kw]` and optional bias, then SiLU if asked.
    /// Taps before `doc_start` (or before the row) read zero; `history [B, Kw - 1, C]` replaces the zeros before the row.
    fn causal_conv1d(
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        history: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> FloatTensor<Self> {
        reference::causal_conv1d::causal_conv1d::<Self>(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu)
    }

    /// Gradients (x, weight, bias) of [`MoeBackend::causal_conv1d`] without history.
    fn causal_conv1d_backward(
        grad_bsc: FloatTensor<Self>,
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, Option<FloatTensor<Self>>) {
        reference::causal_conv1d::causal_conv1d_backward::<Self>(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu)
    }

    /// Mamba-2 selective scan, chunked (spec: Dao and Gu 2024, "Transformers are SSMs"), fp32 inside.
    fn ssd_scan(input: SsdPrim<Self>, desc: &SsdDesc) -> SsdOutPrim<Self> {
        reference::ssd_scan::ssd_scan::<Self>(input, desc)
    }

    /// Gradients of [`MoeBackend::ssd_scan`] with respect to y only.
    fn ssd_scan_backward(grad_y: FloatTensor<Self>, input: SsdPrim<Self>, desc: &SsdDesc) -> SsdGrads<Self> {
        reference::ssd_scan::ssd_scan_backward::<Self>(grad_y, input, desc)
    }

    // ---- loss, optimizer, matmul ---------------------------------------------------------------------------

    /// Cross entropy of `hidden [T, D] x weight [V, D]^T` against `labels [T]`, without keeping the full logits.
    fn linear_cross_entropy(
        hidden_td: FloatTensor<Self>,
        weight_vd: FloatTensor<Self>,
        labels_t: IntTensor<Self>,
        with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        reference::linear_cross_entropy::linear_cross_entropy::<Self>(hidden_td, weight_vd, labels_t, with_grads, desc)
    }

    /// Rows per expert `[E]` fp32 of chosen ids `[T, K]`, each weighted by `mask [T]` (fp32; absent: 1). Not differentiable.
    fn count_experts(ids_tk: IntTensor<Self>, mask_t: Option<FloatTensor<Self>>, num_experts: usize) -> FloatTensor<Self> {
        reference::count::count_experts::<Self>(ids_tk, mask_t, num_experts)
    }

    /// Zero, `[1]` fp32, whose gradient for `y` is `grad` (of the same shape and dtype), whatever the gradient of the zero itself is:
    /// the root of a backward pass that starts in the middle of a model.
    fn inject_gradient(y: FloatTensor<Self>, _grad: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_zeros([1].into(), &Self::float_device(&y), FloatDType::F32)
    }

    /// Sum of squares of each tensor, `[n]` fp32 (fp64 when the first is). The same bits on every call.
    fn squared_norms(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        reference::adamw::squared_norms::<Self>(tensors)
    }

    /// One AdamW update. `grad_scale [1]` (fp32, e.g. from global-norm clipping) multiplies the gradient; one that is not finite
    /// leaves everything as it is, so that a bad step needs no answer from the device before it is dropped.
    fn adamw_step(
        state: AdamWPrim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamWPrim<Self> {
        reference::adamw::adamw_step::<Self>(state, grad, grad_scale, desc)
    }

    /// [`MoeBackend::adamw_step`] with moments in 8 bits, arithmetic in fp32. The moments are rounded at random, by
    /// `stochastic_rounding` (or the step) as the seed: the same numbers on every device.
    fn adamw8_step(
        state: AdamW8Prim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamW8Prim<Self> {
        reference::adamw8::adamw8_step::<Self>(state, grad, grad_scale, desc)
    }

    /// Where [`crate::EpBackend`] sends `float_matmul`. Accelerators override it with a faster library.
    fn routed_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    /// Where [`crate::EpBackend`] sends `linear`: `x [.., in] · weight [in, out] + bias [out]`.
    fn routed_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::linear(x, weight, bias)
    }

    /// Whether the last two axes are known to be stored swapped. The gradient of such a right operand is computed as the
    /// transpose of a dense matrix, which is what the tensor behind the view wants.
    fn is_transposed(_tensor: &FloatTensor<Self>) -> bool {
        false
    }

    /// Where [`crate::EpBackend`] sends `embedding`: rows of `table [V, D]` for `ids [B, S]`, `[B, S, D]`.
    fn routed_embedding(table_vd: FloatTensor<Self>, ids_bs: IntTensor<Self>) -> FloatTensor<Self> {
        Self::embedding(table_vd, ids_bs)
    }

    /// Gradient `[V, D]` of the table from `grad [B, S, D]`: the sum over the tokens of each id in fp32, rounded once and the
    /// same in every run.
    fn embedding_grad(grad_bsd: FloatTensor<Self>, ids_bs: IntTensor<Self>, vocab: usize) -> FloatTensor<Self> {
        reference::embedding::embedding_grad::<Self>(grad_bsd, ids_bs, vocab)
    }

    /// `tensor * factor [1]` in the precision of the factor, rounded once to the dtype of the tensor.
    fn scale_by(tensor: FloatTensor<Self>, factor_1: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::scale::scale_by::<Self>(tensor, factor_1)
    }

    // ---- device memory -------------------------------------------------------------------------------------

    /// Process-wide settings of the device, before its first use; later calls do nothing.
    fn prepare_device(_device: &Device<Self>) {}

    /// Returns when all work so far has been handed to the device, without waiting for it to be done. For measurements.
    fn flush(_device: &Device<Self>) {}

    /// A float tensor that stays for the whole run, in the data's dtype. Its rows are dense and its memory is apart from what
    /// comes and goes.
    fn resident_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        Self::memory_persistent_allocations(device, data, |data| Self::float_from_data(data, device))
    }

    /// [`MoeBackend::resident_from_data`] of bytes that are made in chunks, by several threads: `fill` writes those from an
    /// offset on, in whole multiples of `unit` bytes. A device with memory of its own gets them through a few small buffers,
    /// so that the tensor is never whole on the host; [`MoeBackend::release_staging`] frees these.
    ///
    /// # Errors
    /// The error of `fill` at the lowest offset.
    fn resident_from_chunks<E: Send>(
        shape: &[usize],
        dtype: DType,
        unit: usize,
        fill: &Fill<'_, E>,
        device: &Device<Self>,
    ) -> core::result::Result<FloatTensor<Self>, E> {
        Ok(Self::resident_from_data(host_data(shape, dtype, unit, fill)?, device))
    }

    /// Frees what [`MoeBackend::resident_from_chunks`] keeps between calls.
    fn release_staging(_device: &Device<Self>) {}

    /// [`MoeBackend::resident_from_data`] of initial values.
    fn resident_init(desc: &InitDesc, shape: &[usize], dtype: FloatDType, device: &Device<Self>) -> FloatTensor<Self> {
        Self::resident_from_data(desc.data(shape, dtype), device)
    }

    /// Memory that this process takes of the device; None where the backend cannot tell.
    fn device_memory(_device: &Device<Self>) -> Option<DeviceMemory> {
        None
    }

    /// Starts the peaks of [`MoeBackend::device_memory`] anew.
    fn reset_peak_memory(_device: &Device<Self>) {}
}
