//! AdamW in plain tensors.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_tensor::Tensor;

use super::prim::{cast, primitive, wide_dtype};
use crate::backend::AdamWPrim;
use crate::desc::AdamWDesc;

/// See [`crate::MoeBackend::adamw_step`]; f64 parameters are updated in f64.
pub fn adamw_step<B: Backend>(
    state: AdamWPrim<B>,
    grad: FloatTensor<B>,
    grad_scale: Option<FloatTensor<B>>,
    desc: &AdamWDesc,
) -> AdamWPrim<B> {
    let factors = desc.factors();
    let (shape, n) = (state.param.shape(), state.param.shape().num_elements());
    let wide = wide_dtype(state.param.dtype());
    let flat = |tensor: FloatTensor<B>| cast::<B, 1>(B::float_reshape(tensor, [n].into()), wide);
    let shaped = |tensor: Tensor<B, 1>, dtype| B::float_reshape(primitive(tensor.cast(dtype)), shape.clone());
    let (dtype, m_dtype, v_dtype) = (state.param.dtype(), state.m.dtype(), state.v.dtype());

    let scale_1 = grad_scale.map(|scale| cast::<B, 1>(scale, wide));
    // Infinity minus itself is NaN, which equals nothing.
    let skip_1 = scale_1.clone().map(|scale| (scale.clone() - scale).equal_elem(0.0).bool_not());
    let unless_skipped = |new: Tensor<B, 1>, old: Tensor<B, 1>| match &skip_1 {
        Some(skip) => new.mask_where(skip.clone().expand([n]), old),
        None => new,
    };
    let grad = match scale_1 {
        Some(scale) => flat(grad) * scale,
        None => flat(grad),
    };
    let (old_m, old_v) = (flat(state.m), flat(state.v));
    let m = old_m.clone() + (grad.clone() - old_m.clone()).mul_scalar(factors.take_m);
    let v = old_v.clone().mul_scalar(factors.keep_v) + grad.clone().mul_scalar(factors.take_v) * grad;
    let denominator = v.clone().sqrt().div_scalar(factors.v_root).add_scalar(factors.eps);
    let master_dtype = state.master.as_ref().map(|master| master.dtype());
    let old = flat(state.master.unwrap_or(state.param));
    let param = old.clone().mul_scalar(factors.decay) - (m.clone() / denominator).mul_scalar(factors.step_size);
    let (param, m, v) = (unless_skipped(param, old), unless_skipped(m, old_m), unless_skipped(v, old_v));
    let random = |tensor: Tensor<B, 1>, dtype: DType, on: bool| match desc.stochastic_rounding.is_some() && on && dtype == DType::BF16 {
        true => stochastic_bf16(tensor),
        false => tensor,
    };
    let (m, v) = (random(m, m_dtype, true), random(v, v_dtype, true));
    let rounded = random(param.clone(), dtype, master_dtype.is_none());
    AdamWPrim {
        master: master_dtype.map(|dtype| shaped(param, dtype)),
        param: shaped(rounded, dtype),
        m: shaped(m, m_dtype),
        v: shaped(v, v_dtype),
    }
}

/// `x` moved at random to one of the two bf16 numbers around it, with its value as the mean. The random numbers are the backend's
/// own.
fn stochastic_bf16<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    let near = x.clone().cast(DType::BF16).cast(x.dtype());
    // A unit in the last place of bf16 is 2^-7 of the power of two below the number.
    let unit = near.clone().abs().log().div_scalar(core::f64::consts::LN_2).floor().sub_scalar(7.0);
    let unit = unit.mul_scalar(core::f64::consts::LN_2).exp();
    let off = x - near.clone();
    let uniform = Tensor::random_like(&off, burn_tensor::Distribution::Uniform(0.0, 1.0));
    let other = near.clone() + off.clone().sign() * unit.clone();
    near.mask_where((uniform * unit).lower(off.abs()), other)
}

/// See [`crate::MoeBackend::squared_norms`].
pub fn squared_norms<B: Backend>(tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let wide = tensors.first().map_or(DType::F32, |first| wide_dtype(first.dtype()));
    let sums = tensors.into_iter().map(|tensor| {
        let n = tensor.shape().num_elements();
        let flat = cast::<B, 1>(B::float_reshape(tensor, [n].into()), wide);
        (flat.clone() * flat).sum()
    });
    primitive(Tensor::cat(sums.collect(), 0))
}
