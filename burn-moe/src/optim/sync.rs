//! Gradients over ranks.
//!
//! Every rank backpropagates its own tokens. Replicated parameters are then summed over the ranks; routed experts are not,
//! because each lives on one rank and the rows it worked on already came from all of them. The loss is scaled by the global
//! number of label tokens, so sums are what one rank with the whole batch would compute: no factor of the group size.

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_ep_backend::comm::{Communicator, EpGroup};

use super::{GradStore, ParamInfo, ParamTable};
use crate::error::Result;

/// Values per collective: large enough to hide its latency, small enough to stay out of the way in memory (16 MiB).
const BUCKET: usize = 1 << 22;

/// Sums the gradients of all parameters except routed experts over the ranks of `ep`, in rank order, in fp32 (fp64
/// parameters: fp64). All ranks hold the same bits afterwards.
///
/// A rank without a gradient for a parameter contributes zero if any other rank has one. Every rank must call this with the
/// table of the same model; without `ep`, or alone in the group, it does nothing.
pub fn reduce_gradients<B: Backend>(grads: &mut GradStore<B>, table: &ParamTable, ep: Option<&EpGroup>, device: &B::Device) -> Result<()> {
    let Some(ep) = ep.filter(|ep| ep.size() > 1) else {
        return Ok(());
    };
    let comm = ep.comm().get();
    let replicated: Vec<&ParamInfo> = table.trainable().filter(|info| !info.is_expert()).collect();
    let mut holders: Vec<f64> = replicated.iter().map(|info| f64::from(grads.contains(info.id))).collect();
    comm.all_reduce_sum_f64(&mut holders)?;

    let mut bucket = Bucket::default();
    for (info, _) in replicated.iter().zip(holders).filter(|(_, holders)| *holders > 0.0) {
        if info.dtype == DType::F64 {
            let mut values = take(grads, info).map_or_else(|| vec![0.0; len(info)], |data| data.iter::<f64>().collect());
            comm.all_reduce_sum_f64(&mut values)?;
            let data = TensorData::new(values, [len(info)]);
            grads.insert_flat(info.id, Tensor::from_data(data, (device, DType::F64)), &info.shape);
            continue;
        }
        if !bucket.values.is_empty() && bucket.values.len() + len(info) > BUCKET {
            bucket.reduce(comm, grads, device)?;
        }
        match take(grads, info) {
            Some(data) => bucket.values.extend(data.iter::<f32>()),
            None => bucket.values.resize(bucket.values.len() + len(info), 0.0),
        }
        bucket.members.push((info.id, info.shape.clone()));
    }
    bucket.reduce(comm, grads, device)
}

fn len(info: &ParamInfo) -> usize {
    info.shape.iter().product()
}

fn take<B: Backend>(grads: &mut GradStore<B>, info: &ParamInfo) -> Option<TensorData> {
    grads.remove_flat(info.id).map(|(flat, _)| flat.into_data())
}

/// Gradients that travel together.
#[derive(Default)]
struct Bucket {
    values: Vec<f32>,
    members: Vec<(ParamId, Vec<usize>)>,
}

impl Bucket {
    /// Sums over the ranks, returns the members to the store, and leaves the bucket empty.
    fn reduce<B: Backend>(&mut self, comm: &dyn Communicator, grads: &mut GradStore<B>, device: &B::Device) -> Result<()> {
        if self.members.is_empty() {
            return Ok(());
        }
        comm.all_reduce_sum(&mut self.values)?;
        let mut rest = self.values.as_slice();
        for (id, shape) in self.members.drain(..) {
            let (values, after) = rest.split_at(shape.iter().product());
            rest = after;
            let data = TensorData::new(values.to_vec(), [values.len()]);
            grads.insert_flat(id, Tensor::from_data(data, (device, DType::F32)), &shape);
        }
        self.values.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::module::{Module, Param};
    use burn::tensor::FloatDType;
    use burn_ep_backend::comm::{CommHandle, LocalCommunicator};
    use burn_flex::Flex;

    use super::*;
    use crate::optim::global_norm;

    #[derive(Module, Debug)]
    struct Experts<B: Backend> {
        up: Param<Tensor<B, 2>>,
    }

    #[derive(Module, Debug)]
    struct Layer<B: Backend> {
        norm: Param<Tensor<B, 1>>,
        gate: Param<Tensor<B, 2>>,
        unused: Param<Tensor<B, 1>>,
        experts: Experts<B>,
    }

    type Train = burn::backend::Autodiff<Flex>;

    fn layer() -> Layer<Train> {
        let device = Default::default();
        Layer {
            norm: Param::from_tensor(Tensor::zeros([2], &device)),
            gate: Param::from_tensor(Tensor::zeros([2, 2], &device)),
            unused: Param::from_tensor(Tensor::zeros([3], &device)),
            experts: Experts {
                up: Param::from_tensor(Tensor::zeros([1, 2], &device)),
            },
        }
    }

    fn on_ranks<T: Send>(world: usize, f: impl Fn(EpGroup) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = LocalCommunicator::group(world)
                .into_iter()
                .map(|comm| scope.spawn(|| f(EpGroup::new(CommHandle::new(comm)))))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn replicated_gradients_are_summed_and_experts_stay() {
        let results = on_ranks(2, |ep| {
            let (layer, device, rank) = (layer(), Default::default(), ep.rank() as f32);
            let mut grads = GradStore::<Flex>::new();
            // 256 + 1 is not a bf16 number, so the sum must be fp32.
            let norm = Tensor::<Flex, 1>::from_floats([256.0 - 255.0 * rank, 0.5], &device);
            grads.add(layer.norm.id, norm.cast(FloatDType::BF16));
            if ep.rank() == 0 {
                grads.add(layer.gate.id, Tensor::<Flex, 2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device));
            }
            grads.add(layer.experts.up.id, Tensor::<Flex, 2>::full([1, 2], 10.0 + rank, &device));
            reduce_gradients(&mut grads, &ParamTable::new(&layer), Some(&ep), &device).unwrap();
            assert!(
                !grads.contains(layer.unused.id),
                "a parameter that no rank used stays without gradient"
            );
            let list = |t: TensorData| t.to_vec::<f32>().unwrap();
            [
                list(grads.get::<1>(layer.norm.id).unwrap().into_data()),
                list(grads.get::<2>(layer.gate.id).unwrap().into_data()),
                list(grads.get::<2>(layer.experts.up.id).unwrap().into_data()),
            ]
        });
        for (rank, [norm, gate, up]) in results.into_iter().enumerate() {
            assert_eq!(norm, [257.0, 1.0]);
            assert_eq!(gate, [1.0, 2.0, 3.0, 4.0]);
            assert_eq!(up, [10.0 + rank as f32; 2]);
        }
    }

    /// Norms on all ranks for squared sums given as (replicated, experts of each rank).
    fn norms(replicated: f32, experts: &[f32]) -> Vec<f64> {
        on_ranks(experts.len(), |ep| {
            let (layer, device) = (layer(), Default::default());
            let mut grads = GradStore::<Flex>::new();
            grads.add(layer.norm.id, Tensor::<Flex, 1>::from_floats([replicated.sqrt(), 0.0], &device));
            let up = experts[ep.rank()].sqrt();
            grads.add(layer.experts.up.id, Tensor::<Flex, 2>::from_floats([[up, 0.0]], &device));
            global_norm(&grads, &ParamTable::new(&layer), Some(&ep)).unwrap()
        })
    }

    // DeepSpeed#8478, #8613, SpecForge#882.
    #[test]
    fn the_norm_counts_every_parameter_once() {
        for (found, expected) in [
            (norms(0.0, &[20.0, 100.0]), 10.954452),
            (norms(36.0, &[32.0, 32.0]), 10.0),
            (norms(9.0, &[0.0; 8]), 3.0),
        ] {
            assert!(found.iter().all(|norm| (norm - expected).abs() < 1e-5), "{found:?} for {expected}");
        }
    }
}
