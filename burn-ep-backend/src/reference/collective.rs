//! Flat tensors over ranks through the host. Sums run in rank order, so every rank gets the same bits.

use std::ops::AddAssign;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorData, TensorMetadata};
use bytemuck::Pod;

use crate::comm::{CommHandle, Communicator};
use crate::error::{OpError, Result};

/// [`MoeBackend::reduce_scatter`](crate::MoeBackend::reduce_scatter).
pub fn reduce_scatter<B: Backend>(flat: FloatTensor<B>, comm: &CommHandle) -> FloatTensor<B> {
    let share = flat.shape().num_elements() / comm.get().world();
    through_host::<B>("reduce_scatter", flat, share, comm, |bytes, dtype| {
        sum_share(bytes, dtype, comm.get())
    })
}

/// [`MoeBackend::all_gather`](crate::MoeBackend::all_gather).
pub fn all_gather<B: Backend>(share: FloatTensor<B>, comm: &CommHandle) -> FloatTensor<B> {
    let len = share.shape().num_elements() * comm.get().world();
    through_host::<B>("all_gather", share, len, comm, |bytes, _| {
        Ok(comm.get().all_gather(bytes.to_vec())?.concat())
    })
}

/// [`MoeBackend::all_reduce`](crate::MoeBackend::all_reduce): every rank sums a share and tells the others.
pub fn all_reduce<B: Backend>(flat: FloatTensor<B>, comm: &CommHandle) -> FloatTensor<B> {
    let len = flat.shape().num_elements();
    through_host::<B>("all_reduce", flat, len, comm, |bytes, dtype| {
        let share = len.div_ceil(comm.get().world()) * dtype.size();
        let mut padded = bytes.to_vec();
        padded.resize(share * comm.get().world(), 0);
        let mut all = comm.get().all_gather(sum_share(&padded, dtype, comm.get())?)?.concat();
        all.truncate(bytes.len());
        Ok(all)
    })
}

/// Reads `tensor`, lets `work` make `len` elements of its bytes, and uploads them.
fn through_host<B: Backend>(
    op: &'static str,
    tensor: FloatTensor<B>,
    len: usize,
    comm: &CommHandle,
    work: impl FnOnce(&[u8], DType) -> Result<Vec<u8>>,
) -> FloatTensor<B> {
    let (device, dtype) = (B::float_device(&tensor), tensor.dtype());
    let host = || {
        comm.check()?;
        crate::device::note_read();
        let error = |why: String| OpError::Comm {
            rank: comm.get().rank(),
            world: comm.get().world(),
            op,
            why,
        };
        let data = burn_std::reader::try_read_sync(B::float_into_data(tensor))
            .ok_or_else(|| error("this backend cannot read a tensor synchronously".into()))?
            .map_err(|e| error(format!("reading the tensor: {e}")))?;
        let bytes = work(data.as_bytes(), dtype)?;
        match bytes.len() == len * dtype.size() {
            true => Ok(bytes),
            false => Err(error(format!(
                "the ranks gave {} bytes, expected {}; all must call it with the same length",
                bytes.len(),
                len * dtype.size()
            ))),
        }
    };
    let bytes = host().unwrap_or_else(|error| {
        comm.poison(error);
        vec![0; len * dtype.size()]
    });
    B::float_from_data(TensorData::from_bytes_vec(bytes, [len], dtype), &device)
}

/// This rank's share of the sum of all ranks' `bytes`.
fn sum_share(bytes: &[u8], dtype: DType, comm: &dyn Communicator) -> Result<Vec<u8>> {
    let share = bytes.len() / comm.world();
    let send = (0..comm.world()).map(|rank| bytes[rank * share..(rank + 1) * share].to_vec());
    let parts = comm.all_to_all(send.collect())?;
    if let Some((rank, part)) = parts.iter().enumerate().find(|(_, part)| part.len() != share) {
        return Err(OpError::Comm {
            rank: comm.rank(),
            world: comm.world(),
            op: "reduce_scatter",
            why: format!("rank {rank} sent {} bytes, this rank {share}", part.len()),
        });
    }
    Ok(match dtype {
        DType::F64 => sum::<f64>(parts),
        _ => sum::<f32>(parts),
    })
}

fn sum<T: Pod + AddAssign>(parts: Vec<Vec<u8>>) -> Vec<u8> {
    let mut parts = parts.into_iter();
    let Some(mut total) = parts.next() else {
        return Vec::new();
    };
    let size = size_of::<T>();
    for part in parts {
        for (sum, value) in total.chunks_exact_mut(size).zip(part.chunks_exact(size)) {
            let mut both: T = bytemuck::pod_read_unaligned(sum);
            both += bytemuck::pod_read_unaligned::<T>(value);
            sum.copy_from_slice(bytemuck::bytes_of(&both));
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::tensor::{FloatDType, Tensor};
    use burn_flex::Flex;

    use crate::comm::{CommHandle, LocalCommunicator};
    use crate::ops;

    fn on_ranks<T: Send>(world: usize, f: impl Fn(usize, CommHandle) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = LocalCommunicator::group(world)
                .into_iter()
                .enumerate()
                .map(|(rank, comm)| {
                    scope.spawn({
                        let f = &f;
                        move || f(rank, CommHandle::new(comm))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn tensor(values: &[f32]) -> Tensor<Flex, 1> {
        Tensor::from_floats(values, &Default::default())
    }

    fn list(tensor: Tensor<Flex, 1>) -> Vec<f32> {
        tensor.into_data().convert::<f32>().to_vec().unwrap()
    }

    /// Values whose sum depends on the order.
    fn value(rank: usize, i: usize) -> f32 {
        [1e8, 1.0, -1e8][rank] * (i + 1) as f32
    }

    #[test]
    fn sums_are_those_of_the_rank_order() {
        let results = on_ranks(3, |rank, comm| {
            let values: Vec<f32> = (0..6).map(|i| value(rank, i)).collect();
            let part = ops::reduce_scatter(tensor(&values), &comm).unwrap();
            // A length that the ranks do not divide.
            let all = ops::all_reduce(tensor(&values[..5]), &comm).unwrap();
            (list(part), list(all))
        });
        let expected: Vec<f32> = (0..6).map(|i| value(0, i) + value(1, i) + value(2, i)).collect();
        for (rank, (part, all)) in results.into_iter().enumerate() {
            assert_eq!(part, expected[2 * rank..2 * rank + 2]);
            assert_eq!(all, expected[..5]);
        }
    }

    #[test]
    fn shares_are_joined_with_their_bits_in_any_dtype() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let results = on_ranks(2, |rank, comm| {
                let share = tensor(&[rank as f32, 1.0 / 3.0]).cast(dtype);
                list(ops::all_gather(share, &comm).unwrap())
            });
            let third = list(tensor(&[1.0 / 3.0]).cast(dtype))[0];
            assert!(results.iter().all(|all| *all == [0.0, third, 1.0, third]), "{results:?}");
        }
    }

    #[test]
    fn what_cannot_be_summed_is_refused_and_different_lengths_end_the_group() {
        let comm = CommHandle::new(LocalCommunicator::single());
        let error = ops::all_reduce(tensor(&[1.0]).cast(FloatDType::BF16), &comm)
            .unwrap_err()
            .to_string();
        assert!(error.contains("BF16") && error.contains("fp32"), "{error}");
        let errors = on_ranks(2, |rank, comm| {
            let first = ops::reduce_scatter(tensor(&vec![1.0; 2 + 2 * rank]), &comm).err();
            let later = ops::all_gather(tensor(&[1.0]), &comm).err();
            first.or(later).expect("both ranks learn of it").to_string()
        });
        assert!(errors.iter().all(|e| e.contains("bytes, this rank")), "{errors:?}");
        let odd = on_ranks(2, |_, comm| ops::reduce_scatter(tensor(&[1.0; 3]), &comm).unwrap_err().to_string());
        assert!(odd[0].contains("`length` is 3") && odd[0].contains("2 ranks"), "{odd:?}");
    }
}
