//! Vocabulary projection and cross entropy in one op.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{CrossEntropyDesc, MoeBackend, Result};

/// Sum over rows of `-log softmax(hidden · weight^T)[label]`, fp32 `[1]`: hidden `[T, D]`, weight `[V, D]`, labels `[T]`.
///
/// Never holds more than `desc.chunk` rows of logits. Labels outside the vocabulary other than `ignore_index` are a
/// contract violation that callers check on the host, where the data comes from.
pub fn linear_cross_entropy<B: MoeBackend>(
    hidden_td: Tensor<B, 2>,
    weight_vd: Tensor<B, 2>,
    labels_t: Tensor<B, 1, Int>,
    desc: &CrossEntropyDesc,
) -> Result<Tensor<B, 1>> {
    let op = "linear_cross_entropy";
    let [t, d] = hidden_td.dims();
    let [v, wd] = weight_vd.dims();
    check::shape(op, "weight", [v, wd], [v, d], "[V, D]")?;
    check::shape(op, "labels", labels_t.dims(), [t], "[T]")?;
    check::setting(op, "chunk", desc.chunk > 0, desc.chunk, "at least 1")?;
    let out = B::linear_cross_entropy(check::float(hidden_td), check::float(weight_vd), check::int(labels_t), false, desc);
    Ok(check::tensor(out.loss_sum))
}
