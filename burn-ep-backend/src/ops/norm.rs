//! RMSNorm and the gated group norm of Mamba-2.

use burn_tensor::Tensor;

use super::check;
use crate::{MoeBackend, NormDesc, Result};

/// RMSNorm over the last axis with weight `[D]`; statistics in fp32 (Zhang and Sennrich 2019).
pub fn rms_norm<B: MoeBackend, const R: usize>(x: Tensor<B, R>, weight_d: Tensor<B, 1>, desc: &NormDesc) -> Result<Tensor<B, R>> {
    let d = x.dims()[R - 1];
    check::shape("rms_norm", "weight", weight_d.dims(), [d], "[D]")?;
    Ok(check::tensor(B::rms_norm(check::float(x), check::float(weight_d), desc)))
}

/// `RMSNorm_groups(y * silu(z)) * weight`, statistics over each of `groups` equal parts of the last axis.
pub fn gated_rms_norm<B: MoeBackend, const R: usize>(
    y: Tensor<B, R>,
    z: Tensor<B, R>,
    weight_d: Tensor<B, 1>,
    groups: usize,
    eps: f32,
) -> Result<Tensor<B, R>> {
    let op = "gated_rms_norm";
    let d = y.dims()[R - 1];
    check::shape(op, "z", z.dims(), y.dims(), "[.., D]")?;
    check::shape(op, "weight", weight_d.dims(), [d], "[D]")?;
    check::setting(
        op,
        "groups",
        groups > 0 && d.is_multiple_of(groups),
        groups,
        format!("a divisor of D = {d}"),
    )?;
    Ok(check::tensor(B::gated_rms_norm(
        check::float(y),
        check::float(z),
        check::float(weight_d),
        groups,
        eps,
    )))
}
