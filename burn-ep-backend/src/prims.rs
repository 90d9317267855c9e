//! Inputs and results of the ops of [`MoeBackend`](crate::MoeBackend) that have several tensors.

use burn_backend::Backend;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};

/// Chosen experts of every token.
#[derive(Debug, Clone)]
pub struct RoutePrim<B: Backend> {
    /// `[T, K]` fp32, differentiable with respect to the logits.
    pub weights_tk: FloatTensor<B>,
    /// `[T, K]`, descending by score; ties go to the lower expert id.
    pub ids_tk: IntTensor<B>,
}

/// Rows sorted by expert. `R = T*K` slots, slot `t*K + j` is choice j of token t.
#[derive(Debug, Clone)]
pub struct ExpertOrderPrim<B: Backend> {
    /// `[R]`: slot at each sorted position (stable: slots of one expert stay in order).
    pub slots_r: IntTensor<B>,
    /// `[R]`: sorted position of each slot (the inverse permutation).
    pub positions_r: IntTensor<B>,
    /// `[E + 1]`: rows of expert e are `offsets[e]..offsets[e + 1]`.
    pub offsets_e1: IntTensor<B>,
}

/// Stacked expert weights.
#[derive(Debug, Clone)]
pub struct ExpertWeightsPrim<B: Backend> {
    /// `[E, F * up_factor, D]`.
    pub up: FloatTensor<B>,
    /// `[E, F * up_factor]`.
    pub up_bias: Option<FloatTensor<B>>,
    /// `[E, D, F]`.
    pub down: FloatTensor<B>,
    /// `[E, D]`.
    pub down_bias: Option<FloatTensor<B>>,
}

/// Result of the expert layer and what its backward keeps.
#[derive(Debug, Clone)]
pub struct ExpertMlpPrim<B: Backend> {
    /// `[T, D]`.
    pub out_td: FloatTensor<B>,
    /// `[R, F * up_factor]`, the up product (bias included, before the activation), sorted by expert.
    pub up_rf: FloatTensor<B>,
}

/// Gradients of the expert layer.
#[derive(Debug, Clone)]
pub struct ExpertMlpGrads<B: Backend> {
    pub x_td: FloatTensor<B>,
    /// `[T, K]` fp32; present when routing weights were given.
    pub weights_tk: Option<FloatTensor<B>>,
    pub up: FloatTensor<B>,
    pub up_bias: Option<FloatTensor<B>>,
    pub down: FloatTensor<B>,
    pub down_bias: Option<FloatTensor<B>>,
}

/// Which keys a query sees, beyond causality and window.
#[derive(Debug, Clone)]
pub struct AttentionMaskPrim<B: Backend> {
    /// `[B, S]`: row index at which the document of each token starts; keys before it are hidden.
    pub doc_start_bs: Option<IntTensor<B>>,
    /// `[B, Skv]`: true where the key may be seen (padding mask, any pattern).
    pub key_visible_bs: Option<BoolTensor<B>>,
}

/// Attention output.
#[derive(Debug, Clone)]
pub struct AttentionPrim<B: Backend> {
    /// `[B, S, H, Dv]`.
    pub out_bshd: FloatTensor<B>,
    /// `[B, H, S]` fp32: log of the softmax denominator (sink included); minus infinity where no key is visible and
    /// there is no sink.
    pub lse_bhs: FloatTensor<B>,
}

/// Attention gradients.
#[derive(Debug, Clone)]
pub struct AttentionGrads<B: Backend> {
    pub q: FloatTensor<B>,
    pub k: FloatTensor<B>,
    pub v: FloatTensor<B>,
    pub sink: Option<FloatTensor<B>>,
}

/// Inputs of the Mamba-2 scan. `P` head size, `N` state size, heads per group `H / G`.
#[derive(Debug, Clone)]
pub struct SsdPrim<B: Backend> {
    /// `[B, S, H, P]`.
    pub x: FloatTensor<B>,
    /// `[B, S, H]`, before bias and softplus.
    pub dt: FloatTensor<B>,
    /// `[H]`; the decay is `-exp(a_log)`.
    pub a_log: FloatTensor<B>,
    /// `[B, S, G, N]`.
    pub b: FloatTensor<B>,
    /// `[B, S, G, N]`.
    pub c: FloatTensor<B>,
    /// `[H]`, the skip weight D.
    pub d: FloatTensor<B>,
    /// `[H]`.
    pub dt_bias: FloatTensor<B>,
    /// `[B, H, P, N]` fp32; zero when absent. No gradient flows into it.
    pub initial_state: Option<FloatTensor<B>>,
    /// `[B, S]` row index of each token's document start; the state is reset there. A document at row 0 continues
    /// `initial_state`.
    pub doc_start_bs: Option<IntTensor<B>>,
}

/// Output of the scan.
#[derive(Debug, Clone)]
pub struct SsdOutPrim<B: Backend> {
    /// `[B, S, H, P]`, dtype of x.
    pub y: FloatTensor<B>,
    /// `[B, H, P, N]` fp32, state after the last token. Not differentiable.
    pub final_state: FloatTensor<B>,
}

/// Gradients of the scan, named like [`SsdPrim`].
#[derive(Debug, Clone)]
pub struct SsdGrads<B: Backend> {
    pub x: FloatTensor<B>,
    pub dt: FloatTensor<B>,
    pub a_log: FloatTensor<B>,
    pub b: FloatTensor<B>,
    pub c: FloatTensor<B>,
    pub d: FloatTensor<B>,
    pub dt_bias: FloatTensor<B>,
}

/// Loss and, when asked for, its gradients for an upstream gradient of 1.
#[derive(Debug, Clone)]
pub struct CrossEntropyPrim<B: Backend> {
    /// `[1]` fp32: sum over counted rows of `-log p(label)`.
    pub loss_sum: FloatTensor<B>,
    /// `([T, D], [V, D])`.
    pub grads: Option<(FloatTensor<B>, FloatTensor<B>)>,
}

/// Optimizer state of one parameter.
#[derive(Debug, Clone)]
pub struct AdamWPrim<B: Backend> {
    pub param: FloatTensor<B>,
    /// First moment.
    pub m: FloatTensor<B>,
    /// Second moment.
    pub v: FloatTensor<B>,
    /// fp32 copy of the parameter; the update happens here and `param` is its rounding.
    pub master: Option<FloatTensor<B>>,
}

/// A tensor in 8-bit codes with one scale for every 256 elements, see [`crate::reference::adamw8`].
#[derive(Debug, Clone)]
pub struct Block8Prim<B: Backend> {
    /// `[n]`, unsigned bytes, in the order of the tensor's elements.
    pub codes: IntTensor<B>,
    /// `[ceil(n / 256)]` fp32.
    pub scales: FloatTensor<B>,
}

/// Optimizer state of one parameter with 8-bit moments.
#[derive(Debug, Clone)]
pub struct AdamW8Prim<B: Backend> {
    pub param: FloatTensor<B>,
    /// First moment, signed codes.
    pub m: Block8Prim<B>,
    /// Second moment, unsigned codes.
    pub v: Block8Prim<B>,
    /// fp32 copy of the parameter; the update happens here and `param` is its rounding.
    pub master: Option<FloatTensor<B>>,
}
