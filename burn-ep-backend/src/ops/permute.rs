//! Sorting routed rows by expert and back.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{ExpertOrderPrim, MoeBackend, Result};

/// Rows sorted by expert; see [`ExpertOrderPrim`].
#[derive(Debug, Clone)]
pub struct ExpertOrder<B: MoeBackend> {
    pub slots_r: Tensor<B, 1, Int>,
    pub positions_r: Tensor<B, 1, Int>,
    pub offsets_e1: Tensor<B, 1, Int>,
    pub top_k: usize,
}

impl<B: MoeBackend> ExpertOrder<B> {
    pub(super) fn prim(&self) -> ExpertOrderPrim<B> {
        ExpertOrderPrim {
            slots_r: self.slots_r.clone().into_primitive(),
            positions_r: self.positions_r.clone().into_primitive(),
            offsets_e1: self.offsets_e1.clone().into_primitive(),
        }
    }
}

/// Stable sort of the `T*K` slots of `ids [T, K]` by expert.
pub fn sort_by_expert<B: MoeBackend>(ids_tk: Tensor<B, 2, Int>, num_experts: usize) -> Result<ExpertOrder<B>> {
    check::setting("sort_by_expert", "num_experts", num_experts > 0, num_experts, "at least 1")?;
    let [_, top_k] = ids_tk.dims();
    let order = B::moe_sort_by_expert(ids_tk.into_primitive(), num_experts);
    Ok(ExpertOrder {
        slots_r: Tensor::from_primitive(order.slots_r),
        positions_r: Tensor::from_primitive(order.positions_r),
        offsets_e1: Tensor::from_primitive(order.offsets_e1),
        top_k,
    })
}

/// `rows[r] = x[slots[r] / K]`: `[T, D]` to `[R, D]`.
pub fn permute<B: MoeBackend>(x_td: Tensor<B, 2>, order: &ExpertOrder<B>) -> Result<Tensor<B, 2>> {
    let [t, d] = x_td.dims();
    let [r] = order.slots_r.dims();
    check::shape("permute", "x", [t, d], [r / order.top_k.max(1), d], "[T, D]")?;
    Ok(check::tensor(B::moe_permute(check::float(x_td), &order.prim(), order.top_k)))
}

/// Weighted sum of each token's `K` rows: `[R, D]` to `[T, D]`; weights default to 1.
pub fn unpermute<B: MoeBackend>(rows_rd: Tensor<B, 2>, order: &ExpertOrder<B>, weights_tk: Option<Tensor<B, 2>>) -> Result<Tensor<B, 2>> {
    let [r, d] = rows_rd.dims();
    let [slots] = order.slots_r.dims();
    check::shape("unpermute", "rows", [r, d], [slots, d], "[R, D]")?;
    if let Some(w) = &weights_tk {
        check::shape(
            "unpermute",
            "weights",
            w.dims(),
            [slots / order.top_k.max(1), order.top_k],
            "[T, K]",
        )?;
    }
    Ok(check::tensor(B::moe_unpermute(
        check::float(rows_rd),
        &order.prim(),
        weights_tk.map(check::float),
        order.top_k,
    )))
}
