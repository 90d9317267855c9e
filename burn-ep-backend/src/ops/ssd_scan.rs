//! The Mamba-2 selective scan.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result, SsdDesc, SsdPrim};

/// Inputs of [`ssd_scan`]; see [`SsdPrim`] for the meaning of each.
#[derive(Debug, Clone)]
pub struct SsdInput<B: MoeBackend> {
    pub x_bshp: Tensor<B, 4>,
    pub dt_bsh: Tensor<B, 3>,
    pub a_log_h: Tensor<B, 1>,
    pub b_bsgn: Tensor<B, 4>,
    pub c_bsgn: Tensor<B, 4>,
    pub d_h: Tensor<B, 1>,
    pub dt_bias_h: Tensor<B, 1>,
    pub initial_state_bhpn: Option<Tensor<B, 4>>,
    pub doc_start_bs: Option<Tensor<B, 2, Int>>,
}

/// Output of [`ssd_scan`].
#[derive(Debug, Clone)]
pub struct SsdOutput<B: MoeBackend> {
    /// `[B, S, H, P]`.
    pub y_bshp: Tensor<B, 4>,
    /// `[B, H, P, N]` fp32. Not differentiable.
    pub final_state_bhpn: Tensor<B, 4>,
}

/// `S_t = exp(A d_t) S_{t-1} + d_t x_t B_t^T`, `y_t = S_t C_t + D x_t` with `d = clamp(softplus(dt + dt_bias))`.
pub fn ssd_scan<B: MoeBackend>(input: SsdInput<B>, desc: &SsdDesc) -> Result<SsdOutput<B>> {
    let op = "ssd_scan";
    let [b, s, h, p] = input.x_bshp.dims();
    let [_, _, g, n] = input.b_bsgn.dims();
    check::setting(op, "groups", g > 0 && h.is_multiple_of(g), g, format!("a divisor of the {h} heads"))?;
    check::setting(op, "chunk", desc.chunk > 0, desc.chunk, "at least 1")?;
    check::setting(
        op,
        "dt_min",
        desc.dt_min <= desc.dt_max,
        desc.dt_min,
        format!("at most dt_max = {}", desc.dt_max),
    )?;
    check::shape(op, "dt", input.dt_bsh.dims(), [b, s, h], "[B, S, H]")?;
    check::shape(op, "b", input.b_bsgn.dims(), [b, s, g, n], "[B, S, G, N]")?;
    check::shape(op, "c", input.c_bsgn.dims(), [b, s, g, n], "[B, S, G, N]")?;
    for (name, v) in [("a_log", &input.a_log_h), ("d", &input.d_h), ("dt_bias", &input.dt_bias_h)] {
        check::shape(op, name, v.dims(), [h], "[H]")?;
    }
    if let Some(state) = &input.initial_state_bhpn {
        check::shape(op, "initial_state", state.dims(), [b, h, p, n], "[B, H, P, N]")?;
    }
    if let Some(doc) = &input.doc_start_bs {
        check::shape(op, "doc_start", doc.dims(), [b, s], "[B, S]")?;
    }
    let prim = SsdPrim {
        x: check::float(input.x_bshp),
        dt: check::float(input.dt_bsh),
        a_log: check::float(input.a_log_h),
        b: check::float(input.b_bsgn),
        c: check::float(input.c_bsgn),
        d: check::float(input.d_h),
        dt_bias: check::float(input.dt_bias_h),
        initial_state: input.initial_state_bhpn.map(check::float),
        doc_start_bs: input.doc_start_bs.map(check::int),
    };
    let out = B::ssd_scan(prim, desc);
    Ok(SsdOutput {
        y_bshp: check::tensor(out.y),
        final_state_bhpn: check::tensor(out.final_state),
    })
}
