//! Segments: the pieces of a model that are autodiff graphs of their own.

use std::fmt;

use burn::module::ParamId;
use burn::tensor::Tensor;
use burn_ep_backend::comm::EpGroup;
use serde::{Deserialize, Serialize};

use super::TrainBackend;
use crate::error::Result;
use crate::optim::GradStore;

/// A piece of the model with its own backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    Embedding,
    Block(usize),
    /// Final norm, output projection and loss.
    Head,
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Block(index) => write!(f, "block {index}"),
            Self::Head => f.write_str("head"),
        }
    }
}

/// Which blocks drop their activations after the forward pass and compute them again in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Keep everything: fastest.
    #[default]
    None,
    /// Keep the input of each block only: least memory, a third more work.
    All,
    /// Keep every n-th block (index 0, n, ..), recompute the others.
    KeepEvery(usize),
    /// Recompute the first n blocks, keep the others, whose backward passes come first and free their activations before any
    /// block is recomputed. A number of at least that of the blocks recomputes all.
    First(usize),
}

impl Recompute {
    /// True when block `index` is to be recomputed.
    pub fn recomputes(self, index: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::KeepEvery(n) => n == 0 || !index.is_multiple_of(n),
            Self::First(n) => index < n,
        }
    }
}

/// Called when the backward pass of a segment is done, with the parameters it added gradients for. In the last micro-batch
/// these are final, except for a parameter that an earlier segment shares (tied embeddings: final after
/// [`Segment::Embedding`]).
pub type SegmentHook<'a, B> = dyn FnMut(Segment, &[ParamId], &mut GradStore<B>) -> Result<()> + 'a;

/// A [`SegmentHook`] that does nothing.
pub fn no_hook<B: burn::tensor::backend::Backend>(_: Segment, _: &[ParamId], _: &mut GradStore<B>) -> Result<()> {
    Ok(())
}

/// Backward of one segment from its scalar root `[1]`.
///
/// Autodiff ends every backward by waiting for the locks of all live graphs of the process. Ranks that are threads would
/// deadlock if one of them sat in a collective inside its backward while another still finished the previous one, hence the
/// barrier.
pub(super) fn backward<B: TrainBackend>(root: Tensor<B, 1>, ep: Option<&EpGroup>) -> Result<B::Gradients> {
    if let Some(world) = ep
        .map(|ep| ep.world().get())
        .filter(|world| world.world() > 1 && world.in_process())
    {
        world.barrier()?;
    }
    // The anchor makes the root differentiable even if every parameter of the segment is frozen.
    let anchor = Tensor::<B, 1>::from_inner(root.clone().inner().zeros_like()).require_grad();
    let gradients = (root + anchor).backward();
    check(ep)?;
    Ok(gradients)
}

/// Surfaces a communication error that an op could not return.
pub(super) fn check(ep: Option<&EpGroup>) -> Result<()> {
    match ep {
        Some(ep) => Ok(ep.world().check()?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recompute_policies_name_their_blocks() {
        let blocks = |policy: Recompute| (0..5).filter(|&i| policy.recomputes(i)).collect::<Vec<_>>();
        assert!(blocks(Recompute::None).is_empty());
        assert_eq!(blocks(Recompute::All), [0, 1, 2, 3, 4]);
        assert_eq!(blocks(Recompute::KeepEvery(2)), [1, 3]);
        assert_eq!(blocks(Recompute::KeepEvery(0)), [0, 1, 2, 3, 4]);
        assert_eq!(blocks(Recompute::First(2)), [0, 1]);
        assert_eq!(blocks(Recompute::First(9)), [0, 1, 2, 3, 4]);
    }
}
