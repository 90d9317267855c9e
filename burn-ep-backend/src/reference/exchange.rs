//! Rows between ranks through the host.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorData, TensorMetadata};

use crate::comm::{CommHandle, ExchangePlan};
use crate::error::{OpError, Result};

/// [`MoeBackend::exchange_rows`](crate::MoeBackend::exchange_rows): read to the host, all-to-all, upload.
pub fn exchange_rows<B: Backend>(rows: FloatTensor<B>, plan: &ExchangePlan, comm: &CommHandle) -> FloatTensor<B> {
    let device = B::float_device(&rows);
    let dtype = rows.dtype();
    let width = rows.shape()[1];
    let shape = [plan.recv.iter().sum(), width];
    let bytes = comm
        .check()
        .and_then(|()| exchange_bytes::<B>(rows, plan, comm))
        .unwrap_or_else(|error| {
            comm.poison(error);
            vec![0; shape[0] * width * dtype.size()]
        });
    B::float_from_data(TensorData::from_bytes_vec(bytes, shape, dtype), &device)
}

fn exchange_bytes<B: Backend>(rows: FloatTensor<B>, plan: &ExchangePlan, comm: &CommHandle) -> Result<Vec<u8>> {
    let comm = comm.get();
    let error = |why: String| OpError::Comm {
        rank: comm.rank(),
        world: comm.world(),
        op: "exchange_rows",
        why,
    };
    let row_bytes = rows.shape()[1] * rows.dtype().size();
    crate::device::note_read();
    let data = burn_std::reader::try_read_sync(B::float_into_data(rows))
        .ok_or_else(|| error("this backend cannot read a tensor synchronously".into()))?
        .map_err(|e| error(format!("reading the rows: {e}")))?;
    let mut rest = data.as_bytes();
    let mut send = Vec::with_capacity(plan.send.len());
    for &count in &plan.send {
        let (block, after) = rest
            .split_at_checked(count * row_bytes)
            .ok_or_else(|| error(format!("the plan sends {} rows, fewer are here", plan.send.iter().sum::<usize>())))?;
        send.push(block.to_vec());
        rest = after;
    }
    let received = comm.all_to_all(send)?;
    for (from, (block, &count)) in received.iter().zip(&plan.recv).enumerate() {
        if block.len() != count * row_bytes {
            return Err(error(format!(
                "rank {from} sent {} bytes, expected {count} rows of {row_bytes} bytes",
                block.len()
            )));
        }
    }
    Ok(received.concat())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::tensor::{DType, Device, Tensor};
    use burn_flex::Flex;

    use super::*;
    use crate::comm::LocalCommunicator;
    use crate::ops;

    /// Counts sent from row rank to column rank; rank 1 gets nothing, rank 2 has nothing.
    const COUNTS: [[usize; 3]; 3] = [[2, 0, 1], [1, 0, 3], [0, 0, 0]];

    fn plan(rank: usize) -> ExchangePlan {
        ExchangePlan {
            send: COUNTS[rank].to_vec(),
            recv: COUNTS.iter().map(|row| row[rank]).collect(),
        }
    }

    fn on_ranks<T: Send>(f: impl Fn(CommHandle) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = LocalCommunicator::group(3)
                .into_iter()
                .map(|comm| scope.spawn(|| f(CommHandle::new(comm))))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn rows_arrive_in_rank_order_with_their_bits_also_with_empty_ranks() {
        for dtype in [DType::F32, DType::BF16] {
            let received = on_ranks(|comm| {
                let device = Device::<Flex>::default();
                let rank = comm.get().rank();
                let n = COUNTS[rank].iter().sum::<usize>();
                // Row i of rank r holds 100 r + i and 1/3, which is not exact in either dtype.
                let values: Vec<f32> = (0..n).flat_map(|i| [(100 * rank + i) as f32, 1.0 / 3.0]).collect();
                let data = TensorData::new(values, [n, 2]).convert_dtype(dtype);
                let out = ops::exchange_rows(Tensor::<Flex, 2>::from_data(data, (&device, dtype)), &plan(rank), &comm).unwrap();
                assert_eq!(out.dtype(), dtype);
                let shape = out.dims();
                (shape, out.into_data().convert::<f32>().to_vec::<f32>().unwrap())
            });
            let third = TensorData::from([1.0f32 / 3.0])
                .convert_dtype(dtype)
                .convert::<f32>()
                .to_vec::<f32>()
                .unwrap()[0];
            let rows = |firsts: &[f32]| firsts.iter().flat_map(|f| [*f, third]).collect::<Vec<_>>();
            assert_eq!(received[0], ([3, 2], rows(&[0.0, 1.0, 100.0])));
            assert_eq!(received[1], ([0, 2], vec![]));
            assert_eq!(received[2], ([4, 2], rows(&[2.0, 101.0, 102.0, 103.0])));
        }
    }

    #[test]
    fn a_plan_that_ranks_disagree_on_fails_everywhere_and_poisons_the_handle() {
        let errors = on_ranks(|comm| {
            let device = Device::<Flex>::default();
            let rank = comm.get().rank();
            let mut plan = plan(rank);
            if rank == 2 {
                plan.recv[1] += 1;
            }
            let rows = Tensor::<Flex, 2>::zeros([plan.send.iter().sum(), 2], &device);
            let first = ops::exchange_rows(rows.clone(), &plan, &comm);
            let second = ops::exchange_rows(rows, &plan, &comm);
            (first.err().map(|e| e.to_string()), second.err().map(|e| e.to_string()))
        });
        let own = errors[2].0.as_ref().unwrap();
        assert!(own.contains("rank 1 sent 24 bytes, expected 4 rows of 8 bytes"), "{own}");
        for (_, later) in &errors {
            let later = later.as_ref().expect("every rank fails from here on");
            assert!(later.contains("rank 1 sent 24 bytes"), "{later}");
        }
    }
}
