//! Backward of the grouped product: one grouped product per tracked input.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};

use crate::backend::MoeBackend;

#[derive(Debug)]
struct GroupedMatmulBackward;

impl<B: MoeBackend> Backward<B, 2> for GroupedMatmulBackward {
    /// Rows (kept if the weight is tracked), weight (kept if the rows are), its dtype, offsets.
    type State = (Option<FloatTensor<B>>, Option<FloatTensor<B>>, DType, IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (rows_ri, weight_eoi, weight_dtype, offsets_e1) = ops.state;
        let grad_ro = grads.consume::<B>(&ops.node);
        let [rows, weight] = ops.parents;
        if let (Some(rows), Some(weight_eoi)) = (rows, weight_eoi) {
            let grad = B::grouped_matmul_grad_rows(grad_ro.clone(), weight_eoi, offsets_e1.clone());
            grads.register::<B>(rows.id, grad);
        }
        if let (Some(weight), Some(rows_ri)) = (weight, rows_ri) {
            let grad = B::grouped_matmul_grad_weight(grad_ro, rows_ri, offsets_e1);
            grads.register::<B>(weight.id, B::float_cast(grad, weight_dtype.into()));
        }
    }
}

/// [`MoeBackend::grouped_matmul`], tracked.
pub fn grouped_matmul<B: MoeBackend, C: CheckpointStrategy>(
    rows: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    offsets: IntTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::grouped_matmul(rows.primitive.clone(), weight.primitive.clone(), offsets.clone());
    let weight_dtype = weight.primitive.dtype();
    let keep_rows = weight.is_tracked().then(|| rows.primitive.clone());
    let keep_weight = rows.is_tracked().then(|| weight.primitive.clone());
    match GroupedMatmulBackward
        .prepare::<C>([rows.node, weight.node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((keep_rows, keep_weight, weight_dtype, offsets), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
