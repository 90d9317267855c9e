//! Vocabulary projection and cross entropy, a chunk of rows at a time.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_tensor::activation::log_softmax;
use burn_tensor::{Int, Tensor};

use super::prim::{Times, int_tensor, primitive, tensor, wide_dtype};
use crate::backend::{CrossEntropyPrim, MoeBackend};
use crate::desc::CrossEntropyDesc;

/// See [`crate::MoeBackend::linear_cross_entropy`]; f64 inputs give an f64 loss.
///
/// A label outside the vocabulary that is not `ignore_index` makes the loss NaN and leaves the gradients alone.
pub fn linear_cross_entropy<B: MoeBackend>(
    hidden_td: FloatTensor<B>,
    weight_vd: FloatTensor<B>,
    labels_t: IntTensor<B>,
    with_grads: bool,
    desc: &CrossEntropyDesc,
) -> CrossEntropyPrim<B> {
    let (hidden_td, weight_vd) = (tensor::<B, 2>(hidden_td), tensor::<B, 2>(weight_vd));
    let labels_t: Tensor<B, 1, Int> = int_tensor(labels_t);
    let ([t, d], [v, _]) = (hidden_td.dims(), weight_vd.dims());
    let (dtype, device) = (hidden_td.dtype(), hidden_td.device());
    let wide = wide_dtype(dtype);
    let weight_in_dtype = weight_vd.clone().cast(dtype);

    let mut loss = Tensor::<B, 1>::zeros([1], (&device, wide));
    let mut grad_hidden = Vec::new();
    let mut grad_weight = with_grads.then(|| Tensor::<B, 2>::zeros([v, d], (&device, wide)));
    for start in (0..t).step_by(desc.chunk) {
        let rows = start..t.min(start + desc.chunk);
        let n = rows.len();
        let hidden_nd = hidden_td.clone().slice([rows.clone()]);
        let labels_n1 = labels_t.clone().slice([rows]).reshape([n, 1]);
        let ignored_n1 = labels_n1.clone().equal_elem(desc.ignore_index);
        let outside_n1 = labels_n1
            .clone()
            .lower_elem(0)
            .bool_or(labels_n1.clone().greater_equal_elem(v as i64));
        // Rows that do not count read column 0, so that the gather stays inside.
        let column_n1 = labels_n1.mask_fill(outside_n1.clone(), 0);
        let skipped_n1 = ignored_n1.clone().bool_or(outside_n1.clone());

        let logits_nv = hidden_nd.clone().times(weight_in_dtype.clone().transpose()).cast(wide);
        let log_p_nv = log_softmax(logits_nv, 1);
        let nll_n1 = log_p_nv.clone().gather(1, column_n1.clone()).neg();
        let nll_n1 = nll_n1.mask_fill(outside_n1, f32::NAN).mask_fill(ignored_n1, 0.0);
        loss = loss + nll_n1.sum();

        let Some(sum_vd) = grad_weight.take() else { continue };
        let columns_1v = Tensor::<B, 1, Int>::arange(0..v as i64, &device).unsqueeze_dim::<2>(0);
        let is_label_nv = columns_1v.expand([n, v]).equal(column_n1.expand([n, v]));
        let p_nv = log_p_nv.exp();
        let grad_nv = p_nv.clone().mask_where(is_label_nv, p_nv.sub_scalar(1.0));
        let grad_nv = grad_nv.mask_fill(skipped_n1.expand([n, v]), 0.0).cast(dtype);
        grad_weight = Some(sum_vd + grad_nv.clone().transpose().times(hidden_nd).cast(wide));
        grad_hidden.push(grad_nv.times(weight_in_dtype.clone()));
    }
    CrossEntropyPrim {
        loss_sum: primitive(loss),
        grads: grad_weight.map(|grad_vd| {
            let grad_td = if grad_hidden.is_empty() {
                hidden_td.zeros_like()
            } else {
                Tensor::cat(grad_hidden, 0)
            };
            (primitive(grad_td), primitive(grad_vd.cast(weight_vd.dtype())))
        }),
    }
}
