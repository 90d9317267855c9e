//! What every causal language model offers to the trainer, the generator and the checkpoint code.
//!
//! A model is a list of segments: embedding, blocks, head. The trainer runs them one by one, so that each segment's
//! backward is its own autodiff graph (see `train/`).

use burn::module::Module;
use burn::tensor::{Bool, Int, Tensor, TensorData, backend::AutodiffBackend};
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::{MoeBackend, ops::AttentionMask};

use crate::batch::HostBatch;
use crate::error::{Error, Result};
use crate::layers::{Embedding, Linear};

/// A batch as tensors, plus everything the blocks share.
#[derive(Debug, Clone)]
pub struct ModelInput<B: MoeBackend> {
    /// `[B, S]`.
    pub ids_bs: Tensor<B, 2, Int>,
    /// Documents and padding.
    pub mask: AttentionMask<B>,
    /// `[B, S]`, 1 for real tokens and 0 for padding; None: all real.
    pub visible_bs: Option<Tensor<B, 2>>,
    /// Rotary tables `[B or 1, S, D_rot / 2]` (cos, sin), for models with positions.
    pub rope: Option<(Tensor<B, 3>, Tensor<B, 3>)>,
    /// Expert-parallel group; None: all experts are here.
    pub ep: Option<EpGroup>,
    /// Route evenly regardless of the logits (benchmarks).
    pub force_balanced: bool,
}

impl<B: MoeBackend> ModelInput<B> {
    /// Ids and masks of a batch; models add their rotary tables.
    pub fn new(batch: &HostBatch, device: &B::Device) -> Self {
        let shape = [batch.batch, batch.seq];
        let ints = |v: &Vec<i32>| Tensor::<B, 2, Int>::from_data(TensorData::new(v.clone(), shape), device);
        Self {
            ids_bs: ints(&batch.input_ids),
            mask: AttentionMask {
                doc_start_bs: batch.doc_start.as_ref().map(ints),
                key_visible_bs: batch
                    .attention_mask
                    .as_ref()
                    .map(|m| Tensor::<B, 2, Bool>::from_data(TensorData::new(m.clone(), shape), device)),
            },
            visible_bs: batch.attention_mask.as_ref().map(|m| {
                let values: Vec<f32> = m.iter().map(|&real| if real { 1.0 } else { 0.0 }).collect();
                Tensor::<B, 2>::from_data(TensorData::new(values, shape), device)
            }),
            rope: None,
            ep: None,
            force_balanced: false,
        }
    }
}

impl<B: AutodiffBackend + MoeBackend> ModelInput<B>
where
    B::InnerBackend: MoeBackend,
{
    /// The same input without gradient recording.
    pub fn inner(&self) -> ModelInput<B::InnerBackend> {
        ModelInput {
            ids_bs: self.ids_bs.clone().inner(),
            mask: AttentionMask {
                doc_start_bs: self.mask.doc_start_bs.clone().map(Tensor::inner),
                key_visible_bs: self.mask.key_visible_bs.clone().map(Tensor::inner),
            },
            visible_bs: self.visible_bs.clone().map(Tensor::inner),
            rope: self.rope.clone().map(|(cos, sin)| (cos.inner(), sin.inner())),
            ep: self.ep.clone(),
            force_balanced: self.force_balanced,
        }
    }
}

/// What the router of a block decided.
#[derive(Debug, Clone)]
pub struct RouterOutput<B: MoeBackend> {
    /// `[T, E]` logits over all experts (also those of other ranks), for auxiliary losses.
    pub logits_te: Tensor<B, 2>,
    /// `[T, K]` chosen experts; pass them back as `replay` to recompute the block with the same routing.
    pub ids_tk: Tensor<B, 2, Int>,
}

/// Result of one block.
#[derive(Debug, Clone)]
pub struct BlockOutput<B: MoeBackend> {
    /// `[B, S, D]`.
    pub x_bsd: Tensor<B, 3>,
    /// Present in blocks with routed experts.
    pub router: Option<RouterOutput<B>>,
}

/// State of one block while generating.
#[derive(Debug, Clone)]
pub enum LayerCache<B: MoeBackend> {
    /// A block without memory, or nothing seen yet.
    Empty,
    /// Keys and values so far, `[B, S, Hkv, D]`.
    Attention { k: Tensor<B, 4>, v: Tensor<B, 4> },
    /// Normed latent vectors `[B, S, L]` and rotated shared keys `[B, S, 1, R]` so far, from which keys and values follow.
    Latent { c: Tensor<B, 3>, k_rot: Tensor<B, 4> },
    /// Last convolution inputs `[B, Kw - 1, C]` and scan state `[B, H, P, N]`.
    Mamba { conv: Tensor<B, 3>, state: Tensor<B, 4> },
}

/// Output side of a model: `logits = hidden · weight^T`.
#[derive(Debug, Clone)]
pub struct Head<B: MoeBackend> {
    /// `[T, D]`, after the final norm.
    pub hidden_td: Tensor<B, 2>,
    /// `[V, D]`.
    pub weight_vd: Tensor<B, 2>,
}

impl<B: MoeBackend> Head<B> {
    /// The head after the final norm `[B, S, D]`; without an output matrix of its own the embedding serves as one.
    pub fn new(normed_bsd: Tensor<B, 3>, lm_head: Option<&Linear<B>>, embedding: &Embedding<B>) -> Self {
        Self {
            hidden_td: normed_bsd.flatten(0, 1),
            weight_vd: lm_head.map_or_else(|| embedding.weight.val(), |head| head.weight.val()),
        }
    }
}

/// Block `index` of a model's list, for [`CausalLm::block`].
///
/// # Errors
/// When there are fewer blocks.
pub fn block_at<T>(blocks: &[T], index: usize) -> Result<&T> {
    let missing = || Error::config("block index", index, format!("below the {} blocks of the model", blocks.len()));
    blocks.get(index).ok_or_else(missing)
}

/// Load-balancing loss settings of a family that has one (Qwen3-MoE, Mixtral).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AuxLossSettings {
    pub coefficient: f64,
    pub num_experts: usize,
    pub top_k: usize,
}

/// A causal language model as a list of segments.
pub trait CausalLm<B: MoeBackend>: Module<B> {
    /// Tensors of a batch, rotary tables included. `past` tokens come before the batch (generation).
    fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>>;

    /// Number of blocks between embedding and head.
    fn num_blocks(&self) -> usize;

    /// Vocabulary size V.
    fn vocab_size(&self) -> usize;

    /// Token embeddings `[B, S, D]`.
    fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>>;

    /// Block `index`. `replay` fixes the routing; `cache` is read and updated while generating.
    fn block(
        &self,
        index: usize,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay: Option<&Tensor<B, 2, Int>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>>;

    /// Final norm and output weight.
    fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>>;

    /// Auxiliary loss of the family, when its config switches it on.
    fn aux_loss(&self) -> Option<AuxLossSettings> {
        None
    }

    /// Floating-point operations per token of one training step over rows of `seq` tokens (forward and backward, recomputation
    /// not counted), for speed reports.
    fn flops_per_token(&self, _seq: usize) -> Option<f64> {
        None
    }

    /// Logits `[B, S, V]` of the whole model in fp32, for evaluation and tests.
    fn logits(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
        let [b, s] = input.ids_bs.dims();
        let mut x = self.embed(input)?;
        for index in 0..self.num_blocks() {
            x = self.block(index, x, input, None, None)?.x_bsd;
        }
        let Head { hidden_td, weight_vd } = self.head(x)?;
        let logits = hidden_td.matmul(weight_vd.transpose());
        Ok(logits.cast(burn::tensor::FloatDType::F32).reshape([b, s, self.vocab_size()]))
    }
}
