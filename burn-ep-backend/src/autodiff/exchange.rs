//! The gradient of rows received is sent back to where they came from.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use crate::backend::*;
use crate::comm::{CommHandle, ExchangePlan};

#[derive(Debug)]
struct ExchangeRows;

impl<B: MoeBackend> Backward<B, 1> for ExchangeRows {
    type State = (ExchangePlan, CommHandle);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (plan, comm) = &ops.state;
        // Called even if nobody asks for the gradient: the other ranks wait for this rank's rows.
        let grad = B::exchange_rows(grad, &plan.reversed(), comm);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, grad);
        }
    }
}

pub fn exchange_rows<B: MoeBackend, C: CheckpointStrategy>(
    rows: FloatTensor<Autodiff<B, C>>,
    plan: &ExchangePlan,
    comm: &CommHandle,
) -> FloatTensor<Autodiff<B, C>> {
    let out = B::exchange_rows(rows.primitive, plan, comm);
    match ExchangeRows.prepare::<C>([rows.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((plan.clone(), comm.clone()), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::backend::Autodiff;
    use burn::tensor::{Device, Tensor, TensorData};
    use burn_flex::Flex;

    use super::*;
    use crate::comm::LocalCommunicator;
    use crate::ops;

    /// Rows sent from each rank to each rank.
    const COUNTS: [[usize; 2]; 2] = [[1, 2], [0, 0]];

    /// Gradient of rank 0's rows, and whether the handles are still healthy.
    fn run(fail_on: Option<usize>) -> Vec<(Vec<f32>, bool)> {
        // not the communicator's barrier: an abort right behind it could still reach a rank that is leaving it
        let forward_done = std::sync::Barrier::new(2);
        let work = |comm: LocalCommunicator| {
            type A = Autodiff<Flex>;
            let comm = CommHandle::new(comm);
            let rank = comm.get().rank();
            let device = Device::<A>::default();
            let plan = ExchangePlan {
                send: COUNTS[rank].to_vec(),
                recv: vec![COUNTS[0][rank], COUNTS[1][rank]],
            };
            let n: usize = plan.send.iter().sum();
            let rows = Tensor::<A, 2>::ones([n, 2], &device).require_grad();
            let out = ops::exchange_rows(rows.clone(), &plan, &comm).unwrap();
            // Gradient of received row i on rank r: 10 r + i + 1 (first channel), its negative (second).
            let [m, _] = out.dims();
            let weights: Vec<f32> = (0..m).flat_map(|i| [1.0, -1.0].map(|s| s * (10 * rank + i + 1) as f32)).collect();
            let loss = (out * Tensor::from_data(TensorData::new(weights, [m, 2]), &device)).sum();
            forward_done.wait();
            if fail_on == Some(rank) {
                comm.get().abort("out of memory");
            }
            let grads = loss.backward();
            let grad = rows.grad(&grads).unwrap();
            assert_eq!(grad.dims(), [n, 2]);
            (grad.into_data().to_vec().unwrap(), comm.check().is_ok())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = LocalCommunicator::group(2).into_iter().map(|c| scope.spawn(|| work(c))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn gradients_return_to_the_sender_and_empty_ranks_take_part() {
        let results = run(None);
        // Row 0 stayed on rank 0; rows 1 and 2 became rows 0 and 1 of rank 1.
        assert_eq!(results[0], (vec![1.0, -1.0, 11.0, -11.0, 12.0, -12.0], true));
        assert_eq!(results[1], (vec![], true));
    }

    #[test]
    fn a_failed_exchange_in_backward_gives_zeros_and_poisons_every_handle() {
        let results = run(Some(1));
        assert_eq!(results[0], (vec![0.0; 6], false));
        assert!(!results[1].1);
    }
}
