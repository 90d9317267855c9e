//! Sorting routed rows by expert and back, in plain tensors.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_tensor::{IndexingUpdateOp, Int, Tensor};

use super::prim::{primitive, tensor, widen};
use crate::backend::ExpertOrderPrim;

/// See [`crate::MoeBackend::moe_sort_by_expert`]. Takes `R * E` ints of scratch: a one-hot count instead of a sort,
/// which not every backend has on the device, nor stable.
pub fn sort_by_expert<B: Backend>(ids_tk: IntTensor<B>, num_experts: usize) -> ExpertOrderPrim<B> {
    let ids_tk: Tensor<B, 2, Int> = Tensor::from_primitive(ids_tk);
    let (r, device) = (ids_tk.shape().num_elements(), ids_tk.device());
    if r == 0 {
        let zeros = |n: usize| Tensor::<B, 1, Int>::zeros([n], &device).into_primitive();
        return ExpertOrderPrim {
            slots_r: zeros(0),
            positions_r: zeros(0),
            offsets_e1: zeros(num_experts + 1),
        };
    }
    let ids_r1 = ids_tk.reshape([r, 1]);
    let experts_1e = Tensor::<B, 1, Int>::arange(0..num_experts as i64, &device).unsqueeze_dim::<2>(0);
    let one_hot_re = ids_r1
        .clone()
        .expand([r, num_experts])
        .equal(experts_1e.expand([r, num_experts]))
        .int();
    let counts_e = one_hot_re.clone().sum_dim(0).reshape([num_experts]);
    let zero = Tensor::zeros([1], (&device, counts_e.dtype()));
    let offsets_e1 = Tensor::cat(vec![zero, counts_e.cumsum(0)], 0);

    let rank_r = one_hot_re.cumsum(0).gather(1, ids_r1.clone()).reshape([r]).sub_scalar(1);
    let positions_r = offsets_e1.clone().select(0, ids_r1.reshape([r])) + rank_r;
    let slots_r = Tensor::<B, 1, Int>::arange(0..r as i64, &device);
    let slots_r = slots_r.zeros_like().scatter(0, positions_r.clone(), slots_r, IndexingUpdateOp::Add);
    ExpertOrderPrim {
        slots_r: slots_r.into_primitive(),
        positions_r: positions_r.into_primitive(),
        offsets_e1: offsets_e1.into_primitive(),
    }
}

/// See [`crate::MoeBackend::moe_permute`].
pub fn permute<B: Backend>(x_td: FloatTensor<B>, order: &ExpertOrderPrim<B>, top_k: usize) -> FloatTensor<B> {
    B::float_select(x_td, 0, token_of_row::<B>(order, top_k).into_primitive())
}

/// See [`crate::MoeBackend::moe_unpermute`].
pub fn unpermute<B: Backend>(
    rows_rd: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    top_k: usize,
) -> FloatTensor<B> {
    let dtype = rows_rd.dtype();
    let by_slot_tkd = rows_by_slot(tensor(rows_rd), order, top_k);
    let [t, _, d] = by_slot_tkd.dims();
    let weighted_tkd = match weights_tk {
        Some(weights_tk) => {
            let weights_tk = tensor::<B, 2>(weights_tk).cast(by_slot_tkd.dtype());
            by_slot_tkd * weights_tk.unsqueeze_dim(2)
        }
        None => by_slot_tkd,
    };
    primitive(weighted_tkd.sum_dim(1).reshape([t, d]).cast(dtype))
}

/// See [`crate::MoeBackend::moe_unpermute_backward`]; the gradient of the weights has their dtype.
pub fn unpermute_backward<B: Backend>(
    grad_td: FloatTensor<B>,
    rows_rd: FloatTensor<B>,
    order: &ExpertOrderPrim<B>,
    weights_tk: Option<FloatTensor<B>>,
    top_k: usize,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let dtype = rows_rd.dtype();
    let grad_td = widen(tensor::<B, 2>(grad_td));
    let grad_rd = grad_td.clone().select(0, token_of_row::<B>(order, top_k));
    let Some(weights_tk) = weights_tk else {
        return (primitive(grad_rd.cast(dtype)), None);
    };
    let weights_tk = tensor::<B, 2>(weights_tk);
    let ([t, k], r) = (weights_tk.dims(), grad_rd.dims()[0]);
    let slots_r = Tensor::from_primitive(order.slots_r.clone());
    let weights_r1 = weights_tk
        .clone()
        .cast(grad_rd.dtype())
        .reshape([t * k])
        .select(0, slots_r)
        .reshape([r, 1]);
    let by_slot_tkd = rows_by_slot(tensor(rows_rd), order, top_k);
    let grad_weights_tk = (by_slot_tkd * grad_td.unsqueeze_dim(1)).sum_dim(2).reshape([t, k]);
    (
        primitive((grad_rd * weights_r1).cast(dtype)),
        Some(primitive(grad_weights_tk.cast(weights_tk.dtype()))),
    )
}

fn token_of_row<B: Backend>(order: &ExpertOrderPrim<B>, top_k: usize) -> Tensor<B, 1, Int> {
    Tensor::<B, 1, Int>::from_primitive(order.slots_r.clone()).div_scalar(top_k as i64)
}

/// Sorted rows `[R, D]` back in slot order, `[T, K, D]` in the dtype of statistics.
fn rows_by_slot<B: Backend>(rows_rd: Tensor<B, 2>, order: &ExpertOrderPrim<B>, top_k: usize) -> Tensor<B, 3> {
    let d = rows_rd.dims()[1];
    let positions_r: Tensor<B, 1, Int> = Tensor::from_primitive(order.positions_r.clone());
    let t = positions_r.dims()[0] / top_k;
    widen(rows_rd.select(0, positions_r)).reshape([t, top_k, d])
}
