//! Flash attention on CUDA: the Hopper kernels where they fit, else the portable ones. Neither needs memory that grows with the
//! product of the lengths; both skip blocks of keys that no query of a tile sees.

mod portable;
mod ranges;

use std::cell::Cell;
use std::sync::OnceLock;

use burn_backend::{DType, TensorMetadata};
use cubecl::server::Handle;

#[cfg(test)]
pub(super) use self::portable::variants;
pub(super) use self::ranges::Ranges;
use super::hopper;
use super::raw::{self, CudaTensor, RawKernel, dense};
use crate::desc::AttentionDesc;

/// Types, scalars and tables of all kernels.
pub(super) const TYPES: &str = include_str!("../../../kernels/attention/types.cuh");
const SINK: &str = include_str!("../../../kernels/attention/sink.cu");
/// Query rows that share one entry in the tables of [`Ranges`].
pub(super) const GROUP: usize = 64;
/// Keys that do.
pub(super) const BLOCK: usize = 128;

/// Masks as the kernels read them.
pub struct Mask {
    /// `[B, Sq]` i32.
    doc_start: Option<CudaTensor>,
    /// `[B, Skv]`, one or four bytes a key, zero where it is hidden.
    key_visible: Option<CudaTensor>,
}

impl Mask {
    /// `doc_start` in i32; any strides.
    pub fn new(doc_start: Option<CudaTensor>, key_visible: Option<CudaTensor>) -> Self {
        Self {
            doc_start: doc_start.map(dense),
            key_visible: key_visible.map(dense),
        }
    }

    /// Whether nothing but causality and a window hides keys.
    pub(super) fn is_none(&self) -> bool {
        self.doc_start.is_none() && self.key_visible.is_none()
    }
}

/// What the forward took and gave.
pub struct Saved {
    pub q: CudaTensor,
    pub k: CudaTensor,
    pub v: CudaTensor,
    /// fp32 `[H]`.
    pub sink: Option<CudaTensor>,
    pub out: CudaTensor,
    pub lse: CudaTensor,
}

/// Gradients of q, k and v, and of the sink in fp32.
pub type Grads = ([CudaTensor; 3], Option<CudaTensor>);

/// Sizes of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) batch: usize,
    pub(super) sq: usize,
    pub(super) skv: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dk: usize,
    pub(super) dv: usize,
    pub(super) elem: DType,
}

impl Shape {
    pub(super) fn of(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor) -> Self {
        let [batch, sq, heads, dk] = q.shape().dims::<4>();
        let [_, skv, kv_heads, _] = k.shape().dims::<4>();
        let [.., dv] = v.shape().dims::<4>();
        Self {
            batch,
            sq,
            skv,
            heads,
            kv_heads,
            dk,
            dv,
            elem: q.dtype,
        }
    }

    /// 64-row groups of the queries and of the keys of one batch row.
    pub(super) fn groups(&self) -> [usize; 2] {
        [self.sq.div_ceil(GROUP), self.skv.div_ceil(GROUP)]
    }

    /// `[B, Sq, H, dim]`.
    pub(super) fn query(&self, dim: usize) -> [usize; 4] {
        [self.batch, self.sq, self.heads, dim]
    }

    /// `[B, Skv, Hkv, dim]`.
    pub(super) fn key(&self, dim: usize) -> [usize; 4] {
        [self.batch, self.skv, self.kv_heads, dim]
    }

    /// The by-value struct `Info` of the kernels.
    pub(super) fn scalars(&self, mask: &Mask, sink: bool, desc: &AttentionDesc, zeros: usize) -> Vec<u64> {
        vec![
            self.batch as u64,
            self.sq as u64,
            self.skv as u64,
            self.heads as u64,
            self.kv_heads as u64,
            self.dk as u64,
            self.dv as u64,
            u64::from(desc.scale.to_bits()),
            u64::from(desc.causal),
            desc.window.map_or(0, |window| window.min(self.skv)) as u64,
            u64::from(mask.doc_start.is_some()),
            mask.key_visible.as_ref().map_or(0, |keys| keys.dtype.size()) as u64,
            u64::from(sink),
            zeros as u64,
        ]
    }
}

/// Whether some kernel covers this call: fp32, bf16 or fp16, head sizes up to 256.
pub fn supports(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor) -> bool {
    let shape = Shape::of(q, k, v);
    let filled = shape.batch > 0 && shape.sq > 0 && shape.skv >= shape.sq && shape.heads > 0;
    // tables, tiles and grids are counted in 32 bits
    let small = shape.batch * shape.skv.next_multiple_of(BLOCK) * shape.heads < 1 << 31;
    let same = k.dtype == q.dtype && v.dtype == q.dtype;
    filled && small && same && portable::supports(q, &shape)
}

/// Output `[B, Sq, H, Dv]` and log-sum-exp `[B, H, Sq]` fp32 of a call that [`supports`] lets pass. `sink` is fp32 `[H]`.
pub fn forward(
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    sink: Option<CudaTensor>,
    mask: &Mask,
    desc: &AttentionDesc,
) -> (CudaTensor, CudaTensor) {
    let hopper = hopper::is_hopper(&q) && hopper::attention::supports(&q, &k, &v, desc);
    tracing::debug!(op = "attention", hopper, shape = ?Shape::of(&q, &k, &v));
    match hopper {
        true => hopper::attention::forward(q, k, v, sink, mask, desc),
        false => portable::forward(q, k, v, sink, mask, desc),
    }
}

/// Gradients of such a call; `grad` has the dtype of q.
pub fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc) -> Grads {
    let Saved { q, k, v, .. } = &saved;
    let deterministic = deterministic();
    let hopper = hopper::is_hopper(q) && hopper::attention::supports_backward(q, k, v, desc, deterministic);
    tracing::debug!(op = "attention_backward", hopper, deterministic, shape = ?Shape::of(q, k, v));
    match hopper {
        true => hopper::attention::backward(grad, saved, mask, desc),
        false => portable::backward(grad, saved, mask, desc),
    }
}

thread_local! {
    /// None: what the environment says.
    static DETERMINISTIC: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether the gradients of attention must be the same to the last bit in every run: `BURN_MOE_DETERMINISTIC=1`, or what
/// [`with_deterministic`] says. On Hopper the portable backward then replaces the one in one pass, which is faster but sums by
/// atomics; in small windows the backward has no atomics anyway.
pub fn deterministic() -> bool {
    static SET: OnceLock<bool> = OnceLock::new();
    let set = || *SET.get_or_init(|| std::env::var("BURN_MOE_DETERMINISTIC").is_ok_and(|value| value == "1"));
    DETERMINISTIC.get().unwrap_or_else(set)
}

/// Runs `f`, and every backward inside, with [`deterministic`] switched on or off on this thread.
pub fn with_deterministic<R>(on: bool, f: impl FnOnce() -> R) -> R {
    crate::scoped::with(&DETERMINISTIC, Some(on), f)
}

fn sink_kernel() -> RawKernel {
    RawKernel::new([TYPES, SINK].concat(), "attn_bwd_sink", 256, 0)
}

/// Gradient of the sink from `-log2(e) lse` and `delta`, both `[B, H, Sq]` fp32 with rows padded to groups.
pub(super) fn sink_gradient(sink: &CudaTensor, neg_lse: &Handle, delta: &Handle, shape: &Shape, scalars: Vec<u64>) -> CudaTensor {
    let grad = raw::empty(sink, &[shape.heads], DType::F32);
    let buffers = [neg_lse, delta, &sink.handle, &grad.handle];
    sink_kernel().launch(&sink.client, shape.heads as u32, vec![], &buffers, scalars);
    grad
}

/// Buffers of `bytes` bytes each.
pub(super) fn buffers<const N: usize>(like: &CudaTensor, bytes: [usize; N]) -> [Handle; N] {
    bytes.map(|bytes| like.client.empty(bytes))
}
