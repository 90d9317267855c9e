//! The routed experts as one op.

use burn_tensor::Tensor;

use super::{ExpertOrder, check};
use crate::{ExpertActivation, ExpertWeightsPrim, MoeBackend, Result};

/// Stacked expert weights.
#[derive(Debug, Clone)]
pub struct ExpertWeights<B: MoeBackend> {
    /// `[E, F * up_factor, D]`.
    pub up: Tensor<B, 3>,
    /// `[E, F * up_factor]`.
    pub up_bias: Option<Tensor<B, 2>>,
    /// `[E, D, F]`.
    pub down: Tensor<B, 3>,
    /// `[E, D]`.
    pub down_bias: Option<Tensor<B, 2>>,
}

/// Gather, up, activation, down, weighted combine: `[T, D]` to `[T, D]`.
///
/// Keeps only the input and the up product for its backward. `weights_tk` absent means weight 1.
pub fn expert_mlp<B: MoeBackend>(
    x_td: Tensor<B, 2>,
    order: &ExpertOrder<B>,
    weights_tk: Option<Tensor<B, 2>>,
    experts: ExpertWeights<B>,
    activation: ExpertActivation,
) -> Result<Tensor<B, 2>> {
    let op = "expert_mlp";
    let [t, d] = x_td.dims();
    let [e, up_rows, up_d] = experts.up.dims();
    let f = up_rows / activation.up_factor();
    check::shape(op, "x", [t, d], [t, up_d], "[T, D]")?;
    check::shape(
        op,
        "up",
        [e, up_rows, up_d],
        [e, f * activation.up_factor(), d],
        "[E, F * up_factor, D]",
    )?;
    check::shape(op, "down", experts.down.dims(), [e, d, f], "[E, D, F]")?;
    check::shape(op, "offsets", order.offsets_e1.dims(), [e + 1], "[E + 1]")?;
    check::shape(op, "slots", order.slots_r.dims(), [t * order.top_k], "[T * K]")?;
    if let Some(b) = &experts.up_bias {
        check::shape(op, "up_bias", b.dims(), [e, up_rows], "[E, F * up_factor]")?;
    }
    if let Some(b) = &experts.down_bias {
        check::shape(op, "down_bias", b.dims(), [e, d], "[E, D]")?;
    }
    if let Some(w) = &weights_tk {
        check::shape(op, "weights", w.dims(), [t, order.top_k], "[T, K]")?;
    }
    let weights = ExpertWeightsPrim {
        up: check::float(experts.up),
        up_bias: experts.up_bias.map(check::float),
        down: check::float(experts.down),
        down_bias: experts.down_bias.map(check::float),
    };
    let out = B::expert_mlp(
        check::float(x_td),
        &order.prim(),
        weights_tk.map(check::float),
        &weights,
        order.top_k,
        activation,
    );
    Ok(check::tensor(out.out_td))
}
