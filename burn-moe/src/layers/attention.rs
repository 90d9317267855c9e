//! Grouped-query attention.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_ep_backend::{AttentionDesc, MoeBackend, RopeLayout, ops};

use super::{Init, Linear, ParamBuilder, RmsNorm};
use crate::error::{Error, Result};
use crate::model::{LayerCache, ModelInput};

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
    /// Bias of the four projections.
    pub bias: bool,
    /// RMSNorm of every query and key head, with this epsilon (Qwen3).
    pub qk_norm_eps: Option<f64>,
    /// Keys `j > i - window` are visible.
    pub window: Option<usize>,
    /// Rotate queries and keys by the tables of the batch; without, the layer knows no positions (Nemotron-H).
    pub rotary: bool,
    pub init: Init,
}

/// Causal attention over packed documents with padding, in this order: projections, q/k norm, rotation, scores with
/// scale `P^-0.5`, output projection.
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
    /// `[P]`.
    pub q_norm: Option<RmsNorm<B>>,
    /// `[P]`.
    pub k_norm: Option<RmsNorm<B>>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
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
            bias,
            qk_norm_eps,
            window,
            rotary,
            init,
        } = *config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let norm = |name: &str| qk_norm_eps.map(|eps| RmsNorm::new(&pb.at(name), head_dim, eps));
        Self {
            q_proj: Linear::new(&pb.at("q_proj"), hidden, q_width, bias, init),
            k_proj: Linear::new(&pb.at("k_proj"), hidden, kv_width, bias, init),
            v_proj: Linear::new(&pb.at("v_proj"), hidden, kv_width, bias, init),
            o_proj: Linear::new(&pb.at("o_proj"), q_width, hidden, bias, init),
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            heads,
            kv_heads,
            head_dim,
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
        let heads = |x: Tensor<B, 3>, n: usize| x.reshape([b, s, n, self.head_dim]);
        let mut q_bshp = heads(self.q_proj.forward(h_bsd.clone())?, self.heads);
        let mut k_bshp = heads(self.k_proj.forward(h_bsd.clone())?, self.kv_heads);
        let mut v_bshp = heads(self.v_proj.forward(h_bsd)?, self.kv_heads);
        if let Some(norm) = &self.q_norm {
            q_bshp = norm.forward(q_bshp)?;
        }
        if let Some(norm) = &self.k_norm {
            k_bshp = norm.forward(k_bshp)?;
        }
        if self.rotary {
            let (cos, sin) = rope_tables(input)?;
            q_bshp = ops::rope(q_bshp, cos.clone(), sin.clone(), RopeLayout::HalfSplit)?;
            k_bshp = ops::rope(k_bshp, cos, sin, RopeLayout::HalfSplit)?;
        }
        if let Some(cache) = cache {
            (k_bshp, v_bshp) = extend_cache(cache, k_bshp, v_bshp, input)?;
        }
        let out_bshp = ops::attention(q_bshp, k_bshp, v_bshp, None, &input.mask, &self.desc)?.out_bshd;
        self.o_proj.forward(out_bshp.reshape([b, s, self.heads * self.head_dim]))
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
