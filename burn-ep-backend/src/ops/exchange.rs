//! Rows between ranks.

use burn_tensor::Tensor;

use super::check;
use crate::comm::{CommHandle, ExchangePlan};
use crate::{MoeBackend, Result};

/// Send `plan.send[i]` rows to rank i and receive `plan.recv[i]` from it: `[sum(send), D]` to `[sum(recv), D]`.
///
/// Every rank must call it, also with no rows. Its backward is the exchange the other way.
pub fn exchange_rows<B: MoeBackend>(rows_rd: Tensor<B, 2>, plan: &ExchangePlan, comm: &CommHandle) -> Result<Tensor<B, 2>> {
    let op = "exchange_rows";
    let [r, d] = rows_rd.dims();
    check::shape(op, "rows", [r, d], [plan.send.iter().sum(), d], "[sum(send), D]")?;
    let world = comm.get().world();
    for (field, counts) in [("send", &plan.send), ("recv", &plan.recv)] {
        check::setting(
            op,
            field,
            counts.len() == world,
            counts.len(),
            format!("one count for each of {world} ranks"),
        )?;
    }
    let out = check::tensor(B::exchange_rows(check::float(rows_rd), plan, comm));
    comm.check()?;
    Ok(out)
}
