//! Optimizer state dealt over the ranks that hold the same parameter (stage 1 of ZeRO, Rajbhandari et al. 2020).
//!
//! Every parameter is cut into equal shares, one for each rank that holds it: all ranks for what is replicated, the replicas of
//! a rank for its experts. Gradients are summed into shares, each rank updates its share with its share of the state, and the
//! shares of the new weights are gathered. A share is a multiple of 256 elements (a block of 8-bit moments), with zeros behind
//! the end of the parameter.

use std::ops::Range;

use burn::tensor::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::{CommHandle, EpGroup};
use burn_ep_backend::reference::adamw8::BLOCK;

use super::ParamInfo;

/// How a job deals its optimizer state.
#[derive(Debug, Clone)]
pub struct Shards {
    group: EpGroup,
}

/// This rank's share of one parameter.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The ranks that hold the parameter.
    pub comm: CommHandle,
    /// Elements of every share, padding included.
    pub share: usize,
    /// Elements of the parameter on each of these ranks.
    pub len: usize,
}

impl Shards {
    /// Over the mesh of `group`.
    pub fn new(group: EpGroup) -> Self {
        Self { group }
    }

    /// The mesh.
    pub fn group(&self) -> &EpGroup {
        &self.group
    }

    /// The share of a parameter; None where no other rank holds it.
    pub fn get(&self, info: &ParamInfo) -> Option<Shard> {
        let comm = holders(info, &self.group);
        let ranks = comm.get().world();
        let len = info.shape.iter().product();
        (ranks > 1).then(|| Shard {
            comm: comm.clone(),
            share: share_len(len, ranks),
            len,
        })
    }
}

/// The ranks that hold a parameter.
pub(super) fn holders<'a>(info: &ParamInfo, group: &'a EpGroup) -> &'a CommHandle {
    match info.is_expert() {
        true => group.replicas(),
        false => group.world(),
    }
}

/// Elements of each share of a parameter of `len` elements over `ranks`.
pub fn share_len(len: usize, ranks: usize) -> usize {
    len.div_ceil(ranks).next_multiple_of(BLOCK)
}

impl Shard {
    /// Elements of the parameter in this rank's share; the rest of it is padding.
    pub fn range(&self) -> Range<usize> {
        let start = (self.comm.get().rank() * self.share).min(self.len);
        start..(start + self.share).min(self.len)
    }

    /// `flat [len]` with zeros up to the end of the last share.
    pub(super) fn padded<B: MoeBackend>(&self, flat: FloatTensor<B>) -> FloatTensor<B> {
        pad::<B>(flat, self.share * self.comm.get().world())
    }

    /// This rank's share of a parameter of any rank, `[share]`.
    pub(super) fn take<B: MoeBackend>(&self, param: FloatTensor<B>) -> FloatTensor<B> {
        let range = self.range();
        if range.is_empty() {
            return B::float_zeros([self.share].into(), &B::float_device(&param), param.dtype().into());
        }
        let flat = B::float_reshape(param, [self.len].into());
        let slice = burn::tensor::Slice::from(range);
        pad::<B>(B::float_slice(flat, &[slice]), self.share)
    }

    /// The whole parameter from the shares of all ranks.
    pub(super) fn join<B: MoeBackend>(&self, share: FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
        let all = B::all_gather(share, &self.comm);
        let whole = match all.shape().num_elements() == self.len {
            true => all,
            false => B::float_slice(all, &[burn::tensor::Slice::from(0..self.len)]),
        };
        B::float_reshape(whole, shape.to_vec().into())
    }
}

fn pad<B: MoeBackend>(flat: FloatTensor<B>, len: usize) -> FloatTensor<B> {
    let missing = len - flat.shape().num_elements();
    if missing == 0 {
        return flat;
    }
    let zeros = B::float_zeros([missing].into(), &B::float_device(&flat), flat.dtype().into());
    B::float_cat(vec![flat, zeros], 0)
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use burn::tensor::{DType, Tensor, TensorPrimitive};
    use burn_ep_backend::comm::LocalCommunicator;
    use burn_flex::Flex;

    use super::*;

    fn info(path: &str, shape: &[usize]) -> ParamInfo {
        ParamInfo {
            path: path.into(),
            id: ParamId::new(),
            shape: shape.to_vec(),
            dtype: DType::F32,
            trainable: true,
            aliases: Vec::new(),
        }
    }

    #[test]
    fn shares_cover_a_parameter_once_and_follow_the_mesh() {
        let groups: Vec<EpGroup> = LocalCommunicator::group(4)
            .into_iter()
            .map(|comm| EpGroup::mesh(CommHandle::new(comm), 2).unwrap())
            .collect();
        for (path, len, ranks) in [("norm.weight", 700, vec![0, 1, 2, 3]), ("mlp.experts.up", 700, vec![1, 3])] {
            let mut covered = Vec::new();
            for rank in &ranks {
                let shard = Shards::new(groups[*rank].clone()).get(&info(path, &[7, len / 7])).unwrap();
                assert_eq!(shard.share % 256, 0);
                let whole: Vec<f32> = (0..len).map(|i| i as f32).collect();
                let param = Tensor::<Flex, 1>::from_floats(whole.as_slice(), &Default::default()).reshape([7, len / 7]);
                let own = shard.take::<Flex>(param.into_primitive().tensor());
                let own: Vec<f32> = Tensor::<Flex, 1>::from_primitive(TensorPrimitive::Float(own))
                    .into_data()
                    .to_vec()
                    .unwrap();
                assert_eq!(own.len(), shard.share);
                let range = shard.range();
                assert_eq!(own[..range.len()], whole[range.clone()]);
                assert!(own[range.len()..].iter().all(|v| *v == 0.0));
                covered.extend(range);
            }
            assert_eq!(covered, (0..len).collect::<Vec<_>>(), "{path}");
        }
        let alone = EpGroup::new(CommHandle::new(LocalCommunicator::group(2).remove(0)));
        assert!(
            Shards::new(alone).get(&info("mlp.experts.up", &[8])).is_none(),
            "nobody else holds these experts"
        );
    }
}
