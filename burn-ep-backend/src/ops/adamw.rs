//! One fused AdamW update.

use burn_tensor::Tensor;

use super::check;
use crate::{AdamWDesc, AdamWPrim, MoeBackend, Result};

/// A parameter and its optimizer state.
#[derive(Debug, Clone)]
pub struct AdamWState<B: MoeBackend, const D: usize> {
    pub param: Tensor<B, D>,
    /// First moment, fp32 or the parameter's dtype.
    pub m: Tensor<B, D>,
    /// Second moment.
    pub v: Tensor<B, D>,
    /// fp32 copy; when present the update happens here and `param` is its rounding.
    pub master: Option<Tensor<B, D>>,
}

/// Decoupled AdamW (Loshchilov and Hutter 2019); arithmetic in fp32. `grad_scale [1]` multiplies the gradient first.
pub fn adamw_step<B: MoeBackend, const D: usize>(
    state: AdamWState<B, D>,
    grad: Tensor<B, D>,
    grad_scale: Option<Tensor<B, 1>>,
    desc: &AdamWDesc,
) -> Result<AdamWState<B, D>> {
    let op = "adamw";
    check::shape(op, "grad", grad.dims(), state.param.dims(), "the parameter's shape")?;
    check::setting(op, "step", desc.step > 0, desc.step, "1 for the first update")?;
    if let Some(scale) = &grad_scale {
        check::shape(op, "grad_scale", scale.dims(), [1], "[1]")?;
    }
    let prim = AdamWPrim {
        param: check::float(state.param),
        m: check::float(state.m),
        v: check::float(state.v),
        master: state.master.map(check::float),
    };
    let out = B::adamw_step(prim, check::float(grad), grad_scale.map(check::float), desc);
    Ok(AdamWState {
        param: check::tensor(out.param),
        m: check::tensor(out.m),
        v: check::tensor(out.v),
        master: out.master.map(check::tensor),
    })
}
