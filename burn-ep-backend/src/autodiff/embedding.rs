//! Backward of the embedding lookup.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::TensorMetadata;
use burn_backend::tensor::{FloatTensor, IntTensor};

use crate::backend::MoeBackend;

#[derive(Debug)]
struct EmbeddingBackward;

impl<B: MoeBackend> Backward<B, 1> for EmbeddingBackward {
    /// Ids and rows of the table.
    type State = (IntTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (ids_bs, vocab) = ops.state;
        let grad_bsd = grads.consume::<B>(&ops.node);
        let [table] = ops.parents;
        if let Some(table) = table {
            grads.register::<B>(table.id, B::embedding_grad(grad_bsd, ids_bs, vocab));
        }
    }
}

/// [`MoeBackend::routed_embedding`], tracked.
pub fn embedding<B: MoeBackend, C: CheckpointStrategy>(
    table_vd: FloatTensor<Autodiff<B, C>>,
    ids_bs: IntTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let [vocab, _] = table_vd.primitive.shape().dims::<2>();
    let out = B::routed_embedding(table_vd.primitive, ids_bs.clone());
    match EmbeddingBackward.prepare::<C>([table_vd.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((ids_bs, vocab), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;
    use burn_tensor::Tensor;
    use burn_tensor::backend::AutodiffBackend;

    use super::*;
    use crate::testing::{assert_close, f64s, ints, tensor, values};
    use crate::{EpBackend, Routing, with_routing};

    type Burn = Autodiff<Flex>;
    type Ep = EpBackend<Burn>;

    fn run<B: AutodiffBackend>(ids: &[usize], dtype: DType) -> [Vec<f64>; 2] {
        let (vocab, width) = (7, 5);
        let table = tensor::<B, 2>(&values(1, vocab * width), [vocab, width], dtype).require_grad();
        let out = burn_tensor::module::embedding(table.clone(), ints::<B, 2>(ids, [2, ids.len() / 2]));
        let upstream = tensor::<B, 3>(&values(2, out.dims().iter().product()), out.dims(), dtype);
        let grads = (out.clone() * upstream).sum().backward();
        [f64s(out), f64s(table.grad(&grads).unwrap())]
    }

    #[test]
    fn lookup_and_gradient_match_burn() {
        let ids = [3, 0, 3, 6, 3, 0, 1, 3];
        let [expected_out, expected_grad] = run::<Burn>(&ids, DType::F64);
        for found in [
            run::<Ep>(&ids, DType::F64),
            with_routing(Routing::BurnOnly, || run::<Ep>(&ids, DType::F64)),
        ] {
            assert_close("out", &found[0], &expected_out, 0.0);
            assert_close("grad", &found[1], &expected_grad, 1e-12);
        }
    }

    #[test]
    fn repeated_tokens_are_added_in_fp32() {
        let ids: Vec<usize> = (0..3000).map(|i| if i % 7 == 0 { i % 6 } else { 2 }).collect();
        let exact = run::<Burn>(&ids, DType::F64);
        let [out, grad] = run::<Ep>(&ids, DType::BF16);
        assert_close("out", &out, &exact[0], 0.0);
        // one rounding of the sum: half a unit in the last of 8 bits
        assert_close("grad", &grad, &exact[1], 2f64.powi(-8));
    }

    #[test]
    fn a_frozen_table_needs_no_gradient() {
        let table: Tensor<Ep, 2> = tensor(&values(1, 6), [3, 2], DType::F32);
        let out = burn_tensor::module::embedding(table, ints::<Ep, 2>(&[2, 0], [1, 2]));
        assert!(!out.is_require_grad());
    }
}
