//! Rows grouped by expert times stacked weights.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result};

/// `out[r] = rows[r] · weight[e]^T` where `offsets[e] <= r < offsets[e + 1]`: `[R, In] x [E, Out, In]` to `[R, Out]`.
///
/// Groups may be empty; `offsets [E + 1]` must end at R (not checked: it lives on the device).
pub fn grouped_matmul<B: MoeBackend>(
    rows_ri: Tensor<B, 2>,
    weight_eoi: Tensor<B, 3>,
    offsets_e1: Tensor<B, 1, Int>,
) -> Result<Tensor<B, 2>> {
    let [r, i] = rows_ri.dims();
    let [e, o, wi] = weight_eoi.dims();
    check::shape("grouped_matmul", "rows", [r, i], [r, wi], "[R, In]")?;
    check::shape("grouped_matmul", "offsets", offsets_e1.dims(), [e + 1], "[E + 1]")?;
    let out: Tensor<B, 2> = check::tensor(B::grouped_matmul(
        check::float(rows_ri),
        check::float(weight_eoi),
        check::int(offsets_e1),
    ));
    debug_assert_eq!(out.dims(), [r, o]);
    Ok(out)
}
