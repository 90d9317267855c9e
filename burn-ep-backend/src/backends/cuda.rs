//! Ops of the CUDA backend: Hopper kernels where they fit, then portable ones, else the reference on Burn's own kernels.

use burn_backend::ops::{FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, TensorData, TensorMetadata};
use burn_cubecl::{CubeBackend, element::BoolElement, element::FloatElement, element::IntElement};
use cubecl::cuda::CudaRuntime;

use crate::backend::*;
use crate::comm::{self, CommHandle, ExchangePlan};
use crate::desc::*;
use crate::device::{self, DeviceMemory};
use crate::init::InitDesc;
use crate::kernels::attention::{self, Mask};
use crate::kernels::cube::{self, rms_norm::Other, rows::Rows};
use crate::kernels::cuda as plain;
use crate::kernels::dense;
use crate::kernels::hopper::{self, gemm::Product};
use crate::kernels::init::init;
use crate::kernels::mamba;
use crate::kernels::raw::{self, CudaTensor};
use crate::kernels::upload;
use crate::reference;
use crate::upload::{Fill, host_data};

/// CUDA without fusion: the backend whose ops have kernels here. Parameters choose their own dtype; the element types only
/// name the defaults.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

impl<F: FloatElement, I: IntElement, BT: BoolElement> MoeBackend for CubeBackend<CudaRuntime, F, I, BT> {
    fn moe_route(
        logits_te: FloatTensor<Self>,
        selection_bias_e: Option<FloatTensor<Self>>,
        replay_tk: Option<IntTensor<Self>>,
        desc: &RouterDesc,
    ) -> RoutePrim<Self> {
        if !cube::route::supports(&logits_te, replay_tk.as_ref(), desc) {
            return reference::route::route::<Self>(logits_te, selection_bias_e, replay_tk, desc);
        }
        let [weights_tk, ids_tk] = cube::route::route(logits_te, selection_bias_e, replay_tk, desc);
        RoutePrim { weights_tk, ids_tk }
    }

    fn moe_route_backward(
        logits_te: FloatTensor<Self>,
        ids_tk: IntTensor<Self>,
        grad_weights_tk: FloatTensor<Self>,
        desc: &RouterDesc,
    ) -> FloatTensor<Self> {
        if !cube::route::supports(&logits_te, Some(&ids_tk), desc) {
            return reference::route::route_backward::<Self>(logits_te, ids_tk, grad_weights_tk, desc);
        }
        cube::route::route_backward(logits_te, ids_tk, grad_weights_tk, desc)
    }

    fn moe_sort_by_expert(ids_tk: IntTensor<Self>, num_experts: usize) -> ExpertOrderPrim<Self> {
        if !cube::sort::supports(&ids_tk, num_experts) {
            return reference::permute::sort_by_expert::<Self>(ids_tk, num_experts);
        }
        let order = cube::sort::sort_by_expert(ids_tk, num_experts);
        ExpertOrderPrim {
            slots_r: order.slots,
            positions_r: order.positions,
            offsets_e1: order.offsets,
        }
    }

    fn moe_permute(x_td: FloatTensor<Self>, order: &ExpertOrderPrim<Self>, top_k: usize) -> FloatTensor<Self> {
        if !cube::permute::supports(&x_td, order) {
            return reference::permute::permute::<Self>(x_td, order, top_k);
        }
        cube::permute::permute(x_td, order.slots_r.clone(), top_k)
    }

    fn moe_unpermute(
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> FloatTensor<Self> {
        if !cube::permute::supports(&rows_rd, order) {
            return reference::permute::unpermute::<Self>(rows_rd, order, weights_tk, top_k);
        }
        cube::permute::unpermute(rows_rd, order.positions_r.clone(), weights_tk, None, top_k)
    }

    fn moe_unpermute_backward(
        grad_td: FloatTensor<Self>,
        rows_rd: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        top_k: usize,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        match weights_tk {
            Some(weights_tk) if cube::permute::supports(&rows_rd, order) => {
                let (rows, weights) = cube::permute::unpermute_backward(grad_td, rows_rd, order.slots_r.clone(), weights_tk, top_k);
                (rows, Some(weights))
            }
            weights_tk => reference::permute::unpermute_backward::<Self>(grad_td, rows_rd, order, weights_tk, top_k),
        }
    }

    fn grouped_matmul(rows: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let [groups, n, k] = weight.shape().dims::<3>();
        if hopper_product_fits(&rows, &weight, &offsets_e1) && hopper::gemm::supports([n, k], groups) {
            return hopper::gemm::grouped(Product::Forward, rows, weight, offsets_e1);
        }
        if cube::grouped_matmul::supports(&rows, &weight, &offsets_e1) {
            return cube::grouped_matmul::grouped(rows, weight, offsets_e1, false);
        }
        reference::grouped_matmul::grouped_matmul::<Self>(rows, weight, offsets_e1)
    }

    fn grouped_matmul_grad_rows(grad: FloatTensor<Self>, weight: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let [groups, n, k] = weight.shape().dims::<3>();
        if hopper_product_fits(&grad, &weight, &offsets_e1) && hopper::gemm::supports([n, k], groups) {
            return hopper::gemm::grouped(Product::GradRows, grad, weight, offsets_e1);
        }
        if cube::grouped_matmul::supports(&grad, &weight, &offsets_e1) {
            return cube::grouped_matmul::grouped(grad, weight, offsets_e1, true);
        }
        reference::grouped_matmul::grad_rows::<Self>(grad, weight, offsets_e1)
    }

    fn grouped_matmul_grad_weight(grad: FloatTensor<Self>, rows: FloatTensor<Self>, offsets_e1: IntTensor<Self>) -> FloatTensor<Self> {
        let ([r, m], [_, n]) = (grad.shape().dims::<2>(), rows.shape().dims::<2>());
        let [e1] = offsets_e1.shape().dims::<1>();
        if r > 0 && hopper_product_fits(&grad, &rows, &offsets_e1) && hopper::gemm::supports([m, n], e1 - 1) {
            return hopper::gemm::grouped_grad_weight(grad, rows, offsets_e1);
        }
        if cube::grouped_matmul::supports(&grad, &rows, &offsets_e1) {
            return cube::grouped_matmul::grad_weight(grad, rows, offsets_e1);
        }
        reference::grouped_matmul::grad_weight::<Self>(grad, rows, offsets_e1)
    }

    fn expert_mlp(
        x_td: FloatTensor<Self>,
        order: &ExpertOrderPrim<Self>,
        weights_tk: Option<FloatTensor<Self>>,
        experts: &ExpertWeightsPrim<Self>,
        top_k: usize,
        activation: ExpertActivation,
    ) -> ExpertMlpPrim<Self> {
        if hopper::experts::supports(&x_td, order, experts) {
            return hopper::experts::expert_mlp::<Self>(x_td, order, weights_tk, experts, top_k, activation);
        }
        if !cube::permute::supports(&x_td, order) {
            return reference::expert_mlp::expert_mlp::<Self>(x_td, order, weights_tk, experts, top_k, activation);
        }
        cube::expert_mlp::expert_mlp::<Self>(x_td, order, weights_tk, experts, top_k, activation)
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
        if up_rf.dtype == x_td.dtype && hopper::experts::supports(&x_td, order, experts) {
            return hopper::experts::expert_mlp_backward::<Self>(grad_td, x_td, up_rf, order, weights_tk, experts, top_k, activation);
        }
        if !cube::permute::supports(&x_td, order) {
            return reference::expert_mlp::expert_mlp_backward::<Self>(grad_td, x_td, up_rf, order, weights_tk, experts, top_k, activation);
        }
        cube::expert_mlp::expert_mlp_backward::<Self>(grad_td, x_td, up_rf, order, weights_tk, experts, top_k, activation)
    }

    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sink_h: Option<FloatTensor<Self>>,
        mask: &AttentionMaskPrim<Self>,
        desc: &AttentionDesc,
    ) -> AttentionPrim<Self> {
        if !attention::supports(&q, &k, &v) {
            return reference::attention::attention::<Self>(q, k, v, sink_h, mask, desc);
        }
        let sink = sink_h.map(|s| Self::float_cast(s, burn_backend::FloatDType::F32));
        let (out_bshd, lse_bhs) = attention::forward(q, k, v, sink, &attention_mask(mask), desc);
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
        if !attention::supports(&q, &k, &v) {
            return reference::attention::attention_backward::<Self>(grad_bshd, q, k, v, sink_h, mask, out, desc);
        }
        let sink_dtype = sink_h.as_ref().map(|sink| sink.dtype);
        let grad = Self::float_cast(grad_bshd, q.dtype.into());
        let saved = attention::Saved {
            q,
            k,
            v,
            sink: sink_h.map(|s| Self::float_cast(s, burn_backend::FloatDType::F32)),
            out: out.out_bshd.clone(),
            lse: out.lse_bhs.clone(),
        };
        let ([q, k, v], sink) = attention::backward(grad, saved, &attention_mask(mask), desc);
        let sink = sink.zip(sink_dtype).map(|(sink, dtype)| Self::float_cast(sink, dtype.into()));
        AttentionGrads { q, k, v, sink }
    }

    fn rms_norm(x: FloatTensor<Self>, weight_d: FloatTensor<Self>, desc: &NormDesc) -> FloatTensor<Self> {
        match cube_rows(&x, &[&weight_d], 1) {
            Some(rows) => {
                let round_before_weight = desc.rounding == NormRounding::Llama;
                cube::rms_norm::forward(x, Other::Nothing, weight_d, 1, desc.eps, round_before_weight, rows).0
            }
            None => reference::rms_norm::rms_norm::<Self>(x, weight_d, desc),
        }
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match cube_rows(&x, &[&weight_d], 1) {
            Some(rows) if grad.dtype == x.dtype => {
                let (x, _, weight_d) = cube::rms_norm::backward(grad, x, None, None, weight_d, 1, desc.eps, rows);
                (x, weight_d)
            }
            _ => reference::rms_norm::rms_norm_backward::<Self>(grad, x, weight_d, desc),
        }
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match cube_rows(&x, &[&weight_d], 1) {
            Some(rows) if residual.dtype == x.dtype => {
                let round_before_weight = desc.rounding == NormRounding::Llama;
                let residual = Other::Residual(residual);
                let (out, sum) = cube::rms_norm::forward(x, residual, weight_d, 1, desc.eps, round_before_weight, rows);
                (sum.expect("a residual was given"), out)
            }
            _ => reference::rms_norm::add_rms_norm::<Self>(x, residual, weight_d, desc),
        }
    }

    fn add_rms_norm_backward(
        grad: FloatTensor<Self>,
        grad_x: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        desc: &NormDesc,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match cube_rows(&x, &[&weight_d], 1) {
            Some(rows) if grad.dtype == x.dtype && grad_x.dtype == x.dtype => {
                let (x, _, weight_d) = cube::rms_norm::backward(grad, x, None, Some(grad_x), weight_d, 1, desc.eps, rows);
                (x, weight_d)
            }
            _ => reference::rms_norm::add_rms_norm_backward::<Self>(grad, grad_x, x, weight_d, desc),
        }
    }

    fn gated_rms_norm(
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> FloatTensor<Self> {
        match cube_rows(&y, &[&z, &weight_d], groups) {
            Some(rows) => cube::rms_norm::forward(y, Other::Gate(z), weight_d, groups, eps, true, rows).0,
            None => reference::gated_rms_norm::gated_rms_norm::<Self>(y, z, weight_d, groups, eps),
        }
    }

    fn gated_rms_norm_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        groups: usize,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        match cube_rows(&y, &[&z, &weight_d], groups) {
            Some(rows) if grad.dtype == y.dtype => {
                let (y, z, weight_d) = cube::rms_norm::backward(grad, y, Some(z), None, weight_d, groups, eps, rows);
                (y, z.expect("a gate has a gradient"), weight_d)
            }
            _ => reference::gated_rms_norm::gated_rms_norm_backward::<Self>(grad, y, z, weight_d, groups, eps),
        }
    }

    fn rms_norm_rope(
        x_bshd: FloatTensor<Self>,
        weight_d: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        desc: &NormDesc,
    ) -> FloatTensor<Self> {
        if plain::norm_rope::supports(&x_bshd, &weight_d, &cos, &sin, layout) {
            return plain::norm_rope::forward(x_bshd, weight_d, cos, sin, desc);
        }
        Self::rope(Self::rms_norm(x_bshd, weight_d, desc), cos, sin, layout)
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
        if grad.dtype == x_bshd.dtype && plain::norm_rope::supports(&x_bshd, &weight_d, &cos, &sin, layout) {
            return plain::norm_rope::backward(grad, x_bshd, weight_d, cos, sin, desc);
        }
        let grad = Self::rope(grad, cos, Self::float_neg(sin), layout);
        Self::rms_norm_backward(grad, x_bshd, weight_d, desc)
    }

    fn rope(x_bshd: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, layout: RopeLayout) -> FloatTensor<Self> {
        if cube::fits([&x_bshd, &cos]) && cube::rope::supports(&x_bshd, &cos, &sin) {
            return cube::rope::rope(x_bshd, cos, sin, layout);
        }
        reference::rope::rope::<Self>(x_bshd, cos, sin, layout)
    }

    fn causal_conv1d(
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        history: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> FloatTensor<Self> {
        let others = bias_c.iter().chain(&history);
        let refusal = mamba::causal_conv1d::refusal(&x_bsc, &weight_ck, others, doc_start_bs.as_ref());
        if refused("causal_conv1d", refusal) {
            return reference::causal_conv1d::causal_conv1d::<Self>(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu);
        }
        mamba::causal_conv1d::causal_conv1d::<Self>(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu)
    }

    fn causal_conv1d_backward(
        grad_bsc: FloatTensor<Self>,
        x_bsc: FloatTensor<Self>,
        weight_ck: FloatTensor<Self>,
        bias_c: Option<FloatTensor<Self>>,
        doc_start_bs: Option<IntTensor<Self>>,
        silu: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let refusal = mamba::causal_conv1d::refusal(&x_bsc, &weight_ck, &bias_c, doc_start_bs.as_ref());
        if grad_bsc.dtype != x_bsc.dtype || refused("causal_conv1d_backward", refusal) {
            return reference::causal_conv1d::causal_conv1d_backward::<Self>(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu);
        }
        mamba::causal_conv1d::causal_conv1d_backward::<Self>(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu)
    }

    fn ssd_scan(input: SsdPrim<Self>, desc: &SsdDesc) -> SsdOutPrim<Self> {
        if refused("ssd_scan", mamba::ssd_scan::refusal::<Self>(&input)) {
            return reference::ssd_scan::ssd_scan::<Self>(input, desc);
        }
        mamba::ssd_scan::ssd_scan::<Self>(input, desc)
    }

    fn ssd_scan_backward(grad_y: FloatTensor<Self>, input: SsdPrim<Self>, desc: &SsdDesc) -> SsdGrads<Self> {
        let refusal = mamba::ssd_scan::refusal::<Self>(&input);
        if !cube::fits([&grad_y]) || refused("ssd_scan_backward", refusal) {
            return reference::ssd_scan::ssd_scan_backward::<Self>(grad_y, input, desc);
        }
        mamba::ssd_scan::ssd_scan_backward::<Self>(grad_y, input, desc)
    }

    fn count_experts(ids_tk: IntTensor<Self>, mask_t: Option<FloatTensor<Self>>, num_experts: usize) -> FloatTensor<Self> {
        if !cube::count::supports(&ids_tk) {
            return reference::count::count_experts::<Self>(ids_tk, mask_t, num_experts);
        }
        cube::count::count(ids_tk, mask_t, num_experts)
    }

    fn squared_norms(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        if !cube::norm::supports(&tensors) {
            return reference::adamw::squared_norms::<Self>(tensors);
        }
        cube::norm::squared_norms(tensors)
    }

    fn adamw_step(
        state: AdamWPrim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamWPrim<Self> {
        if !cube::adamw::supports(&state, &grad) {
            return reference::adamw::adamw_step::<Self>(state, grad, grad_scale, desc);
        }
        cube::adamw::adamw_step(state, grad, grad_scale, desc)
    }

    fn routed_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        dense::matmul(lhs, rhs, None).unwrap_or_else(|call| burn_matmul::<Self>(call.lhs, call.rhs))
    }

    fn routed_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        dense::linear(x, weight, bias).unwrap_or_else(|call| Self::linear(call.lhs, call.rhs, call.bias))
    }

    fn is_transposed(tensor: &FloatTensor<Self>) -> bool {
        dense::is_transposed(tensor)
    }

    fn linear_cross_entropy(
        hidden_td: FloatTensor<Self>,
        weight_vd: FloatTensor<Self>,
        labels_t: IntTensor<Self>,
        with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        match plain::cross_entropy::linear_cross_entropy(&hidden_td, &weight_vd, &labels_t, with_grads, desc) {
            Some(loss) => CrossEntropyPrim {
                loss_sum: loss.loss_sum,
                grads: loss.grads,
            },
            None => reference::linear_cross_entropy::linear_cross_entropy::<Self>(hidden_td, weight_vd, labels_t, with_grads, desc),
        }
    }

    fn routed_embedding(table_vd: FloatTensor<Self>, ids_bs: IntTensor<Self>) -> FloatTensor<Self> {
        if !plain::embedding::supports(table_vd.dtype, &ids_bs) {
            return Self::embedding(table_vd, ids_bs);
        }
        plain::embedding::gather(table_vd, ids_bs)
    }

    fn embedding_grad(grad_bsd: FloatTensor<Self>, ids_bs: IntTensor<Self>, vocab: usize) -> FloatTensor<Self> {
        if !plain::embedding::supports_grad(&grad_bsd, &ids_bs, vocab) {
            return reference::embedding::embedding_grad::<Self>(grad_bsd, ids_bs, vocab);
        }
        plain::embedding::table_grad(grad_bsd, ids_bs, vocab)
    }

    fn scale_by(tensor: FloatTensor<Self>, factor_1: FloatTensor<Self>) -> FloatTensor<Self> {
        if !plain::cross_entropy::supports_scale(&tensor, &factor_1) {
            return reference::scale::scale_by::<Self>(tensor, factor_1);
        }
        plain::cross_entropy::scale(tensor, &factor_1)
    }

    fn adamw8_step(
        state: AdamW8Prim<Self>,
        grad: FloatTensor<Self>,
        grad_scale: Option<FloatTensor<Self>>,
        desc: &AdamWDesc,
    ) -> AdamW8Prim<Self> {
        if !plain::adamw8::supports::<Self>(&state, &grad) {
            return reference::adamw8::adamw8_step::<Self>(state, grad, grad_scale, desc);
        }
        plain::adamw8::step::<Self>(state, grad, grad_scale, desc)
    }

    fn prepare_device(device: &Device<Self>) {
        device::cuda::configure(device.index);
    }

    fn flush(device: &Device<Self>) {
        device::cuda::flush(device);
    }

    fn resident_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        Self::memory_persistent_allocations(device, data, |data| raw::from_data(data, device))
    }

    fn resident_from_chunks<E: Send>(
        shape: &[usize],
        dtype: DType,
        unit: usize,
        fill: &Fill<'_, E>,
        device: &Device<Self>,
    ) -> core::result::Result<FloatTensor<Self>, E> {
        if upload::is_worth_it(shape, dtype) {
            let tensor = Self::memory_persistent_allocations(device, (), |()| raw::empty_on(device, shape, dtype));
            match upload::fill(&tensor, unit, fill) {
                Ok(outcome) => return outcome.map(|()| tensor),
                Err(reason) => tracing::warn!(reason, "pinned memory cannot be used: uploading through pageable memory"),
            }
        }
        Ok(Self::resident_from_data(host_data(shape, dtype, unit, fill)?, device))
    }

    fn release_staging(device: &Device<Self>) {
        upload::release(device);
    }

    fn resident_init(desc: &InitDesc, shape: &[usize], dtype: FloatDType, device: &Device<Self>) -> FloatTensor<Self> {
        let drawn = Self::memory_persistent_allocations(device, (), |()| init(desc, shape, dtype, device));
        drawn.unwrap_or_else(|| Self::resident_from_data(desc.data(shape, dtype), device))
    }

    fn exchange_rows(rows: FloatTensor<Self>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<Self> {
        let received = comm::cuda::exchange_rows(&rows, plan, comm);
        received.unwrap_or_else(|| reference::exchange::exchange_rows::<Self>(rows, plan, comm))
    }

    fn reduce_scatter(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        let share = comm::cuda::reduce_scatter(&flat, comm);
        share.unwrap_or_else(|| reference::collective::reduce_scatter::<Self>(flat, comm))
    }

    fn all_gather(share: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        let all = comm::cuda::all_gather(&share, comm);
        all.unwrap_or_else(|| reference::collective::all_gather::<Self>(share, comm))
    }

    fn all_reduce(flat: FloatTensor<Self>, comm: &CommHandle) -> FloatTensor<Self> {
        let sum = comm::cuda::all_reduce(&flat, comm);
        sum.unwrap_or_else(|| reference::collective::all_reduce::<Self>(flat, comm))
    }

    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        device::cuda::memory(device.index)
    }

    fn reset_peak_memory(device: &Device<Self>) {
        device::cuda::reset_peak(device.index);
    }
}

/// Whether a kernel does not take a call; says why in the log.
fn refused(op: &str, reason: Option<&'static str>) -> bool {
    if let Some(reason) = reason {
        tracing::debug!(op, route = "reference", reason);
    }
    reason.is_some()
}

/// Burn's own kernel, except that nothing to multiply makes zeros.
fn burn_matmul<B>(lhs: CudaTensor, rhs: CudaTensor) -> CudaTensor
where
    B: FloatTensorOps<B> + burn_backend::Backend<FloatTensorPrimitive = CudaTensor, Device = cubecl::cuda::CudaDevice>,
{
    let shapes = [lhs.shape(), rhs.shape()];
    if shapes.iter().all(|shape| shape.iter().all(|size| *size > 0)) {
        return B::float_matmul(lhs, rhs);
    }
    B::float_zeros(dense::product_shape(&shapes[0], &shapes[1]), &lhs.device, lhs.dtype.into())
}

/// How the portable norm kernels deal the rows of `x`; None where they do not fit.
fn cube_rows(x: &CudaTensor, others: &[&CudaTensor], groups: usize) -> Option<Rows> {
    let fits = cube::fits(others.iter().copied().chain([x]));
    fits.then(|| Rows::of(x, groups)).flatten()
}

/// Both operands in bf16 and offsets in i32; other dtypes take the portable kernel, which casts.
fn hopper_product_fits(lhs: &CudaTensor, rhs: &CudaTensor, offsets: &CudaTensor) -> bool {
    hopper::fits(lhs) && hopper::fits(rhs) && offsets.dtype == burn_backend::DType::I32
}

/// The masks of attention as its kernels read them.
fn attention_mask<F: FloatElement, I: IntElement, BT: BoolElement>(mask: &AttentionMaskPrim<CubeBackend<CudaRuntime, F, I, BT>>) -> Mask {
    let i32_of = |doc: CudaTensor| match doc.dtype {
        burn_backend::DType::I32 => doc,
        _ => CubeBackend::<CudaRuntime, F, I, BT>::int_cast(doc, burn_backend::IntDType::I32),
    };
    Mask::new(mask.doc_start_bs.clone().map(i32_of), mask.key_visible_bs.clone())
}
