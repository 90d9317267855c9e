//! Rotary position embedding.

use burn_tensor::Tensor;

use super::check;
use crate::{MoeBackend, Result, RopeLayout};

/// Rotate the first `2 * cos.dims()[2]` channels of `[B, S, H, D]`; cos and sin are `[B or 1, S, D_rot / 2]` and get no gradient.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn rope<B: MoeBackend>(x_bshd: Tensor<B, 4>, cos: Tensor<B, 3>, sin: Tensor<B, 3>, layout: RopeLayout) -> Result<Tensor<B, 4>> {
    let op = "rope";
    let [b, s, _, d] = x_bshd.dims();
    let [cb, cs, half] = cos.dims();
    check::shape(
        op,
        "cos",
        [cb, cs, half],
        [if cb == 1 { 1 } else { b }, s, half],
        "[B or 1, S, D_rot / 2]",
    )?;
    check::shape(op, "sin", sin.dims(), [cb, cs, half], "[B or 1, S, D_rot / 2]")?;
    check::setting(
        op,
        "rotary width",
        half > 0 && 2 * half <= d,
        2 * half,
        format!("2 to the head size {d}"),
    )?;
    Ok(check::tensor(B::rope(
        check::float(x_bshd),
        check::float(cos),
        check::float(sin),
        layout,
    )))
}
