//! AdamW in plain tensors.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
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

    let grad = match grad_scale {
        Some(scale_1) => flat(grad) * cast::<B, 1>(scale_1, wide),
        None => flat(grad),
    };
    let m = flat(state.m);
    let m = m.clone() + (grad.clone() - m).mul_scalar(factors.take_m);
    let v = flat(state.v).mul_scalar(factors.keep_v) + grad.clone().mul_scalar(factors.take_v) * grad;
    let denominator = v.clone().sqrt().div_scalar(factors.v_root).add_scalar(factors.eps);
    let master_dtype = state.master.as_ref().map(|master| master.dtype());
    let param = flat(state.master.unwrap_or(state.param)).mul_scalar(factors.decay);
    let param = param - (m.clone() / denominator).mul_scalar(factors.step_size);
    AdamWPrim {
        master: master_dtype.map(|dtype| shaped(param.clone(), dtype)),
        param: shaped(param, dtype),
        m: shaped(m, m_dtype),
        v: shaped(v, v_dtype),
    }
}
