//! Depthwise causal convolution of Mamba-2.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result};

/// `[B, S, C]` with `weight [C, Kw]`; see [`MoeBackend::causal_conv1d`]. `history [B, Kw - 1, C]` is for decoding and
/// gets no gradient.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn causal_conv1d<B: MoeBackend>(
    x_bsc: Tensor<B, 3>,
    weight_ck: Tensor<B, 2>,
    bias_c: Option<Tensor<B, 1>>,
    history: Option<Tensor<B, 3>>,
    doc_start_bs: Option<Tensor<B, 2, Int>>,
    silu: bool,
) -> Result<Tensor<B, 3>> {
    let op = "causal_conv1d";
    let [b, s, c] = x_bsc.dims();
    let [wc, taps] = weight_ck.dims();
    check::shape(op, "weight", [wc, taps], [c, taps], "[C, Kw]")?;
    check::setting(op, "taps", taps > 0, taps, "at least 1")?;
    if let Some(bias) = &bias_c {
        check::shape(op, "bias", bias.dims(), [c], "[C]")?;
    }
    if let Some(history) = &history {
        check::shape(op, "history", history.dims(), [b, taps - 1, c], "[B, Kw - 1, C]")?;
    }
    if let Some(doc) = &doc_start_bs {
        check::shape(op, "doc_start", doc.dims(), [b, s], "[B, S]")?;
    }
    Ok(check::tensor(B::causal_conv1d(
        check::float(x_bsc),
        check::float(weight_ck),
        bias_c.map(check::float),
        history.map(check::float),
        doc_start_bs.map(check::int),
        silu,
    )))
}
