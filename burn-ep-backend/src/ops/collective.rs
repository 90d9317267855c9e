//! Flat tensors over ranks: sums of gradients, shares of parameters.

use burn_backend::DType;
use burn_tensor::Tensor;

use super::check;
use crate::comm::CommHandle;
use crate::{MoeBackend, Result};

/// Sum over ranks of `flat [world * share]`; this rank gets its part of it, `[share]`.
///
/// # Errors
/// A dtype that is not fp32 or f64, a length that is no multiple of the number of ranks, and what a rank of the group reports.
pub fn reduce_scatter<B: MoeBackend>(flat: Tensor<B, 1>, comm: &CommHandle) -> Result<Tensor<B, 1>> {
    let op = "reduce_scatter";
    summable(op, flat.dtype())?;
    let (len, world) = (flat.dims()[0], comm.get().world());
    check::setting(
        op,
        "length",
        len.is_multiple_of(world),
        len,
        format!("a multiple of the {world} ranks"),
    )?;
    let out = check::tensor(B::reduce_scatter(check::float(flat), comm));
    comm.check()?;
    Ok(out)
}

/// Shares of all ranks, `[n]` each, one after another: `[world * n]`.
///
/// # Errors
/// What a rank of the group reports.
pub fn all_gather<B: MoeBackend>(share: Tensor<B, 1>, comm: &CommHandle) -> Result<Tensor<B, 1>> {
    let out = check::tensor(B::all_gather(check::float(share), comm));
    comm.check()?;
    Ok(out)
}

/// Sum over ranks of `flat [n]`, the same bits on every rank.
///
/// # Errors
/// A dtype that is not fp32 or f64, and what a rank of the group reports.
pub fn all_reduce<B: MoeBackend>(flat: Tensor<B, 1>, comm: &CommHandle) -> Result<Tensor<B, 1>> {
    summable("all_reduce", flat.dtype())?;
    let out = check::tensor(B::all_reduce(check::float(flat), comm));
    comm.check()?;
    Ok(out)
}

fn summable(op: &'static str, dtype: DType) -> Result<()> {
    let fits = matches!(dtype, DType::F32 | DType::F64);
    check::setting(
        op,
        "dtype",
        fits,
        format!("{dtype:?}"),
        "fp32 or f64: sums of fewer bits lose small terms",
    )
}
