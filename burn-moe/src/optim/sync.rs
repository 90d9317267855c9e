//! Gradients over ranks.
//!
//! Every rank backpropagates its own tokens. What several ranks hold is then summed over them: replicated parameters over the
//! job, routed experts over the replicas of their rank (the rows they worked on already came from their whole row of the mesh).
//! The loss is scaled by the global number of label tokens, so sums are what one rank with the whole batch would compute: no
//! factor of the group size. Sums are fp32 (fp64 parameters: fp64).

use burn::tensor::{DType, FloatDType, Shape, Slice, Tensor, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::{CommHandle, EpGroup};

use super::shards::holders;
use super::{GradStore, ParamInfo, ParamTable, Shards};
use crate::error::Result;

/// Values per collective: large enough to hide its latency, small enough to stay out of the way in memory (16 MiB).
const BUCKET: usize = 1 << 22;

/// Sums the gradients of every parameter over the ranks of `ep` that hold it. All of them hold the same bits afterwards.
///
/// A rank without a gradient for a parameter contributes zero if any other rank has one. Every rank must call this with the
/// table of the same model; without `ep`, or alone in the job, it does nothing.
pub fn reduce_gradients<B: MoeBackend>(
    grads: &mut GradStore<B>,
    table: &ParamTable,
    ep: Option<&EpGroup>,
    device: &B::Device,
) -> Result<()> {
    reduce(grads, table, ep, None, device)
}

/// As [`reduce_gradients`], but each rank keeps only its share of the sums: gradients of sharded parameters are `[share]` of
/// [`Shard`](super::Shard) afterwards.
pub fn reduce_to_shards<B: MoeBackend>(
    grads: &mut GradStore<B>,
    table: &ParamTable,
    ep: &EpGroup,
    shards: &Shards,
    device: &B::Device,
) -> Result<()> {
    reduce(grads, table, Some(ep), Some(shards), device)
}

fn reduce<B: MoeBackend>(
    grads: &mut GradStore<B>,
    table: &ParamTable,
    ep: Option<&EpGroup>,
    shards: Option<&Shards>,
    device: &B::Device,
) -> Result<()> {
    let Some(ep) = ep.filter(|ep| ep.world_size() > 1) else {
        return Ok(());
    };
    let shared: Vec<&ParamInfo> = table.trainable().filter(|info| holders(info, ep).get().world() > 1).collect();
    let mut count: Vec<f64> = shared.iter().map(|info| f64::from(grads.contains(info.id))).collect();
    ep.world().get().all_reduce_sum_f64(&mut count)?;

    let mut buckets: Vec<Bucket<'_, B>> = Vec::new();
    for (info, _) in shared.iter().zip(count).filter(|(_, count)| *count > 0.0) {
        let comm = holders(info, ep);
        let flat = flat_gradient(grads, info, device);
        let (kind, flat) = match shards.and_then(|shards| shards.get(info)) {
            Some(shard) => (Kind::Share(shard.share), shard.padded::<B>(flat)),
            None => (Kind::Whole, flat),
        };
        let member = Member::<B> { info, flat, kind };
        let sharded = kind != Kind::Whole;
        let dtype = member.flat.dtype();
        // Parameters of one kind go together: replicated or experts, fp32 or fp64.
        let fitting = buckets
            .iter_mut()
            .find(|b| b.expert == info.is_expert() && b.dtype == dtype && b.sharded == sharded);
        match fitting {
            Some(bucket) => bucket.push(member, grads)?,
            None => buckets.push(Bucket {
                comm,
                expert: info.is_expert(),
                dtype,
                sharded,
                members: vec![member],
            }),
        }
    }
    buckets.iter_mut().try_for_each(|bucket| bucket.reduce(grads))
}

/// The gradient of `info` as the dtype it is summed in, flat; zeros where this rank has none.
fn flat_gradient<B: MoeBackend>(grads: &mut GradStore<B>, info: &ParamInfo, device: &B::Device) -> FloatTensor<B> {
    let dtype = match info.dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    match grads.remove_flat(info.id) {
        Some((flat, _)) => flat.cast(dtype).into_primitive().tensor(),
        None => B::float_zeros(Shape::new([info.shape.iter().product()]), device, dtype),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Every rank gets the whole sum.
    Whole,
    /// Every rank gets this many elements.
    Share(usize),
}

struct Member<'a, B: MoeBackend> {
    info: &'a ParamInfo,
    flat: FloatTensor<B>,
    kind: Kind,
}

/// Gradients that travel together.
struct Bucket<'a, B: MoeBackend> {
    comm: &'a CommHandle,
    expert: bool,
    dtype: DType,
    sharded: bool,
    members: Vec<Member<'a, B>>,
}

impl<'a, B: MoeBackend> Bucket<'a, B> {
    fn push(&mut self, member: Member<'a, B>, grads: &mut GradStore<B>) -> Result<()> {
        let len = |member: &Member<'a, B>| member.flat.shape().num_elements();
        let full: usize = self.members.iter().map(len).sum();
        if full + len(&member) > BUCKET {
            self.reduce(grads)?;
        }
        self.members.push(member);
        Ok(())
    }

    /// Sums over the ranks, returns the members to the store, and leaves the bucket empty.
    fn reduce(&mut self, grads: &mut GradStore<B>) -> Result<()> {
        if self.members.is_empty() {
            return Ok(());
        }
        let members = std::mem::take(&mut self.members);
        let sum = match self.sharded {
            true => self.reduce_shares(&members),
            false => {
                let flats = members.iter().map(|member| member.flat.clone()).collect();
                B::all_reduce(cat::<B>(flats, 0), self.comm)
            }
        };
        self.comm.check()?;
        let alone = members.len() == 1;
        let mut start = 0;
        for member in members {
            let (len, shape) = match member.kind {
                Kind::Whole => (member.flat.shape().num_elements(), member.info.shape.clone()),
                Kind::Share(share) => (share, vec![share]),
            };
            let part = match alone {
                true => sum.clone(),
                false => B::float_slice(sum.clone(), &[Slice::from(start..start + len)]),
            };
            start += len;
            grads.insert_flat(member.info.id, Tensor::from_primitive(TensorPrimitive::Float(part)), &shape);
        }
        Ok(())
    }

    /// The shares of one rank lie side by side, those of the ranks one after another.
    fn reduce_shares(&self, members: &[Member<'a, B>]) -> FloatTensor<B> {
        let ranks = self.comm.get().world();
        let rows = members.iter().map(|member| {
            let share = member.flat.shape().num_elements() / ranks;
            B::float_reshape(member.flat.clone(), Shape::new([ranks, share]))
        });
        let all = cat::<B>(rows.collect(), 1);
        let len = all.shape().num_elements();
        B::reduce_scatter(B::float_reshape(all, Shape::new([len])), self.comm)
    }
}

fn cat<B: MoeBackend>(mut tensors: Vec<FloatTensor<B>>, dim: usize) -> FloatTensor<B> {
    match tensors.len() {
        1 => tensors.remove(0),
        _ => B::float_cat(tensors, dim),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::module::{Module, Param};
    use burn::tensor::TensorData;
    use burn::tensor::backend::Backend;
    use burn_ep_backend::comm::LocalCommunicator;
    use burn_flex::Flex;

    use super::*;
    use crate::optim::{global_norm, sharded_norm};

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
        on_mesh(world, world, f)
    }

    fn on_mesh<T: Send>(world: usize, size: usize, f: impl Fn(EpGroup) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = LocalCommunicator::group(world)
                .into_iter()
                .map(|comm| scope.spawn(|| f(EpGroup::mesh(CommHandle::new(comm), size).unwrap())))
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
    /// 2 x 2: what is replicated is summed over four ranks, experts over the two that hold them; in shares, each rank keeps
    /// its part, and the norm is the same.
    #[test]
    fn experts_are_summed_over_their_replicas_also_in_shares() {
        let results = on_mesh(4, 2, |ep| {
            let (layer, device, rank) = (layer(), Default::default(), ep.world_rank() as f32);
            let table = ParamTable::new(&layer);
            let gradients = || {
                let mut grads = GradStore::<Flex>::new();
                grads.add(layer.norm.id, Tensor::<Flex, 1>::from_floats([rank, 1.0], &device));
                // one replica of each expert saw no row
                if ep.is_first_replica() {
                    grads.add(layer.experts.up.id, Tensor::<Flex, 2>::full([1, 2], 10.0 + rank, &device));
                }
                grads
            };
            let mut whole = gradients();
            reduce_gradients(&mut whole, &table, Some(&ep), &device).unwrap();
            let list = |t: TensorData| t.to_vec::<f32>().unwrap();
            let sums = (
                list(whole.get::<1>(layer.norm.id).unwrap().into_data()),
                list(whole.get::<2>(layer.experts.up.id).unwrap().into_data()),
            );
            let mut shares = gradients();
            let shards = Shards::new(ep.clone());
            reduce_to_shards(&mut shares, &table, &ep, &shards, &device).unwrap();
            let own = |id| list(shares.get::<1>(id).unwrap().into_data());
            let norms = (
                global_norm(&whole, &table, Some(&ep)).unwrap(),
                sharded_norm(&shares, &table, &shards).unwrap(),
            );
            (sums, own(layer.norm.id), own(layer.experts.up.id), norms)
        });
        for (rank, ((norm, up), own_norm, own_up, norms)) in results.into_iter().enumerate() {
            let expert = 10.0 + (rank % 2) as f32;
            assert_eq!((norm, up), (vec![6.0, 4.0], vec![expert; 2]));
            assert_eq!((own_norm.len(), own_up.len()), (256, 256), "a block each, most of it padding");
            // Both parameters fit in the first share.
            let first = |is: bool, values: [f32; 2]| if is { values } else { [0.0; 2] };
            assert_eq!(own_norm[..2], first(rank == 0, [6.0, 4.0]));
            assert_eq!(own_up[..2], first(rank < 2, [expert; 2]));
            let expected = (36.0 + 16.0 + 2.0 * 100.0 + 2.0 * 121.0f64).sqrt();
            assert!(
                (norms.0 - expected).abs() < 1e-6 && (norms.1 - expected).abs() < 1e-6,
                "{norms:?} for {expected}"
            );
        }
    }
}
