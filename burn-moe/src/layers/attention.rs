//! Grouped-query attention.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_ep_backend::{AttentionDesc, MoeBackend, RopeLayout, ops};

use super::{Init, Linear, ParamBuilder, RmsNorm};
use crate::error::{Error, Result};
use crate::model::{LayerCache, ModelInput};

/// RMSNorm of queries and keys before the rotation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum QkNorm {
    None,
    /// Over the P channels of each head, one weight `[P]` for all heads (Qwen3).
    Head {
        eps: f64,
    },
    /// Over all heads together, weights `[H*P]` and `[Hkv*P]` (OLMoE).
    Full {
        eps: f64,
    },
}

/// Settings of [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionConfig {
    /// Hidden width D.
    pub hidden: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key and value heads, a divisor of H.
    pub kv_heads: usize,
    /// Head size P; `H * P` need not equal D.
    pub head_dim: usize,
    /// Bias of the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias of the output projection.
    pub o_bias: bool,
    pub qk_norm: QkNorm,
    /// Limit queries, keys and values to `[-c, c]` before the rotation (OLMoE).
    pub clip_qkv: Option<f64>,
    /// A learned logit per query head that takes part in the softmax and has no value (GPT-OSS).
    pub sinks: bool,
    /// Keys `j > i - window` are visible.
    pub window: Option<usize>,
    /// Rotate queries and keys by the tables of the batch; without, the layer knows no positions (Nemotron-H).
    pub rotary: bool,
    pub init: Init,
}

/// Causal attention over packed documents with padding, in this order: projections, q/k norm, clipping, rotation, scores
/// with scale `P^-0.5`, output projection.
#[derive(Module, Debug)]
pub struct Attention<B: MoeBackend> {
    /// `[H*P, D]`.
    pub q_proj: Linear<B>,
    /// `[Hkv*P, D]`.
    pub k_proj: Linear<B>,
    /// `[Hkv*P, D]`.
    pub v_proj: Linear<B>,
    /// `[D, H*P]`.
    pub o_proj: Linear<B>,
    /// `[P]`, or `[H*P]` when it spans all heads.
    pub q_norm: Option<RmsNorm<B>>,
    /// `[P]`, or `[Hkv*P]`.
    pub k_norm: Option<RmsNorm<B>>,
    /// `[H]`.
    pub sinks: Option<Param<Tensor<B, 1>>>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    norm_spans_heads: bool,
    clip_qkv: Option<f64>,
    rotary: bool,
    desc: AttentionDesc,
}

impl<B: MoeBackend> Attention<B> {
    /// A layer of `config`.
    pub fn new(pb: &ParamBuilder<B>, config: &AttentionConfig) -> Self {
        let AttentionConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            qkv_bias,
            o_bias,
            qk_norm,
            clip_qkv,
            sinks,
            window,
            rotary,
            init,
        } = *config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let norm = |name: &str, width: usize| match qk_norm {
            QkNorm::None => None,
            QkNorm::Head { eps } => Some(RmsNorm::new(&pb.at(name), head_dim, eps)),
            QkNorm::Full { eps } => Some(RmsNorm::new(&pb.at(name), width, eps)),
        };
        Self {
            q_proj: Linear::new(&pb.at("q_proj"), hidden, q_width, qkv_bias, init),
            k_proj: Linear::new(&pb.at("k_proj"), hidden, kv_width, qkv_bias, init),
            v_proj: Linear::new(&pb.at("v_proj"), hidden, kv_width, qkv_bias, init),
            o_proj: Linear::new(&pb.at("o_proj"), q_width, hidden, o_bias, init),
            q_norm: norm("q_norm", q_width),
            k_norm: norm("k_norm", kv_width),
            sinks: sinks.then(|| pb.param("sinks", [heads], init)),
            heads,
            kv_heads,
            head_dim,
            norm_spans_heads: matches!(qk_norm, QkNorm::Full { .. }),
            clip_qkv,
            rotary,
            desc: AttentionDesc {
                causal: true,
                window,
                scale: (head_dim as f64).powf(-0.5) as f32,
            },
        }
    }

    /// `[B, S, D]` to `[B, S, D]`. A cache is read for the tokens before this batch and extended by it.
    pub fn forward(&self, h_bsd: Tensor<B, 3>, input: &ModelInput<B>, cache: Option<&mut LayerCache<B>>) -> Result<Tensor<B, 3>> {
        let [b, s, _] = h_bsd.dims();
        let angles = if self.rotary { Some(rope_tables(input)?) } else { None };
        let q_bshp = self.placed(
            self.q_proj.forward(h_bsd.clone())?,
            self.heads,
            self.q_norm.as_ref(),
            angles.clone(),
        )?;
        let mut k_bshp = self.placed(self.k_proj.forward(h_bsd.clone())?, self.kv_heads, self.k_norm.as_ref(), angles)?;
        let mut v_bshp = self.placed(self.v_proj.forward(h_bsd)?, self.kv_heads, None, None)?;
        if let Some(cache) = cache {
            (k_bshp, v_bshp) = extend_cache(cache, k_bshp, v_bshp, input)?;
        }
        let sink_h = self.sinks.as_ref().map(Param::val);
        let out_bshp = ops::attention(q_bshp, k_bshp, v_bshp, sink_h, &input.mask, &self.desc)?.out_bshd;
        self.o_proj.forward(out_bshp.reshape([b, s, self.heads * self.head_dim]))
    }

    /// Splits `[B, S, n*P]` into `n` heads `[B, S, n, P]`, normalises in the order that the kind of norm asks for, clips and turns.
    fn placed(
        &self,
        x_bsd: Tensor<B, 3>,
        n: usize,
        norm: Option<&RmsNorm<B>>,
        angles: Option<(Tensor<B, 3>, Tensor<B, 3>)>,
    ) -> Result<Tensor<B, 4>> {
        let [b, s, _] = x_bsd.dims();
        let heads = [b, s, n, self.head_dim];
        let layout = RopeLayout::HalfSplit;
        let x_bshp = match norm {
            Some(norm) if self.norm_spans_heads => norm.forward(x_bsd)?.reshape(heads),
            Some(norm) => match angles {
                Some((cos, sin)) if self.clip_qkv.is_none() => return norm.forward_rope(x_bsd.reshape(heads), cos, sin, layout),
                _ => norm.forward(x_bsd.reshape(heads))?,
            },
            None => x_bsd.reshape(heads),
        };
        let x_bshp = match self.clip_qkv {
            Some(limit) => x_bshp.clamp(-limit, limit),
            None => x_bshp,
        };
        match angles {
            Some((cos, sin)) => Ok(ops::rope(x_bshp, cos, sin, layout)?),
            None => Ok(x_bshp),
        }
    }
}

/// Fails when the new tokens come with a mask, which would not cover the cached ones.
pub(super) fn check_cached<B: MoeBackend>(input: &ModelInput<B>) -> Result<()> {
    if input.mask.doc_start_bs.is_none() && input.mask.key_visible_bs.is_none() {
        return Ok(());
    }
    Err(Error::batch(
        "attention_mask",
        "documents or padding together with cached tokens",
        "one document without padding per row while generating",
    ))
}

/// The rotary tables of the batch.
pub(super) fn rope_tables<B: MoeBackend>(input: &ModelInput<B>) -> Result<(Tensor<B, 3>, Tensor<B, 3>)> {
    input.rope.clone().ok_or_else(|| {
        Error::batch(
            "position_ids",
            "an input without rotary tables",
            "an input made by `CausalLm::prepare`",
        )
    })
}

/// Keys and values of past and new tokens; the cache then holds both.
fn extend_cache<B: MoeBackend>(
    cache: &mut LayerCache<B>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    input: &ModelInput<B>,
) -> Result<(Tensor<B, 4>, Tensor<B, 4>)> {
    let (k, v) = match &*cache {
        LayerCache::Attention { k: past_k, v: past_v } => {
            check_cached(input)?;
            (Tensor::cat(vec![past_k.clone(), k], 1), Tensor::cat(vec![past_v.clone(), v], 1))
        }
        _ => (k, v),
    };
    *cache = LayerCache::Attention {
        k: k.clone(),
        v: v.clone(),
    };
    Ok((k, v))
}
