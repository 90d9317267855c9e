//! Flash attention in bf16 and fp16: forward with log-sum-exp, backward with fp32 sums.
//!
//! Head sizes up to 128 in multiples of 8, and 192/128 (multi-head latent attention) in the forward; grouped query heads,
//! causal or not, sliding window, sink logit with its gradient, packed documents, padding, keys of earlier tokens. Blocks of
//! keys that no query of a tile sees are skipped. The backward adds dQ, and dK and dV, with fp32 atomics, so it is not
//! reproducible to the last bit.

mod backward;
mod ranges;

pub use backward::{Saved, backward, supports_backward};

use burn_backend::{DType, TensorMetadata};
use cubecl::server::{Handle, TensorMapBinding};

use self::ranges::Ranges;
use super::super::attention::Mask;
use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense};
use crate::desc::AttentionDesc;

const TYPES: &str = include_str!("../../../../kernels/hopper/attention.cuh");
const PTX: &str = include_str!("../../../../kernels/hopper/attention_ptx.cuh");
const WGMMA: &str = include_str!("../../../../kernels/hopper/attention_wgmma.cuh");
const FORWARD: &str = include_str!("../../../../kernels/hopper/attention_forward.cu");
/// Query rows that share one entry in the tables of [`Ranges`], and rows of a tile in the backward workspaces.
const GROUP: usize = 64;
/// Keys per block.
const BLOCK: usize = 128;

/// Sizes of one call.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: usize,
    sq: usize,
    skv: usize,
    heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
    elem: DType,
}

impl Shape {
    fn of(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor) -> Self {
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

    fn tile(&self) -> Option<Tile> {
        Tile::of(self.dk, self.dv)
    }

    /// 64-row groups of the queries and of the keys of one batch row.
    fn groups(&self) -> [usize; 2] {
        [self.sq.div_ceil(GROUP), self.skv.div_ceil(GROUP)]
    }

    /// The by-value struct `Info` of the kernels.
    fn scalars(&self, mask: &Mask, sink: bool, desc: &AttentionDesc, zeros: usize) -> Vec<u64> {
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

/// Head sizes of a tile, at least those of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    dk: usize,
    dv: usize,
}

impl Tile {
    fn of(dk: usize, dv: usize) -> Option<Self> {
        let fits = dk.is_multiple_of(8) && dv.is_multiple_of(8) && dk > 0 && dv > 0;
        match (dk.max(dv), dk, dv) {
            _ if !fits => None,
            (..=64, ..) => Some(Self { dk: 64, dv: 64 }),
            (..=128, ..) => Some(Self { dk: 128, dv: 128 }),
            (_, ..=192, ..=128) => Some(Self { dk: 192, dv: 128 }),
            _ => None,
        }
    }

    /// The defines that all parts share.
    fn defines(self, masked: bool, elem: DType) -> String {
        let Self { dk, dv } = self;
        let (masked, fp16) = (u32::from(masked), u32::from(elem == DType::F16));
        format!("#define HDK {dk}\n#define HDV {dv}\n#define MASKED {masked}\n#define FP16 {fp16}\n")
    }
}

/// Whether the forward kernel covers this call on a device that has wgmma.
pub fn supports(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc) -> bool {
    let shape = Shape::of(q, k, v);
    let half = matches!(q.dtype, DType::BF16 | DType::F16) && k.dtype == q.dtype && v.dtype == q.dtype;
    let filled = shape.batch > 0 && shape.sq > 0 && shape.skv >= shape.sq;
    // the tables and the tiles are counted in 32 bits
    let small = shape.batch * shape.skv.next_multiple_of(BLOCK) * shape.heads < 1 << 31;
    half && filled && small && desc.scale > 0.0 && shape.heads.is_multiple_of(shape.kv_heads) && shape.tile().is_some()
}

/// Settings of the forward kernel by tile.
#[derive(Clone, Copy)]
struct Forward {
    warpgroups: usize,
    stages: usize,
    q_buffers: usize,
}

impl Forward {
    fn of(tile: Tile) -> Self {
        let (warpgroups, stages, q_buffers) = match tile.dk {
            64 => (3, 4, 2),
            128 => (2, 2, 2),
            _ => (2, 2, 1),
        };
        Self {
            warpgroups,
            stages,
            q_buffers,
        }
    }

    fn kernel(tile: Tile, masked: bool, elem: DType) -> RawKernel {
        let Self {
            warpgroups,
            stages,
            q_buffers,
        } = Self::of(tile);
        let (load, math) = if warpgroups == 3 { (32, 160) } else { (24, 240) };
        let defines = format!(
            "#define NWG {warpgroups}\n#define STAGES {stages}\n#define QBUFS {q_buffers}\n\
             #define REGS_LOAD {load}\n#define REGS_MATH {math}\n"
        );
        let smem = q_buffers * warpgroups * 64 * tile.dk * 2 + stages * BLOCK * (tile.dk + tile.dv) * 2 + 32 + 32 * stages;
        let source = [&tile.defines(masked, elem), &defines, TYPES, PTX, WGMMA, FORWARD].concat();
        RawKernel::new(source, "attn_fwd", 128 * (warpgroups as u32 + 1), smem)
    }
}

/// Boxes of `rows` tokens and 64 columns of one head.
fn head_map(tensor: &CudaTensor, rows: usize) -> TensorMapBinding {
    let elem = if tensor.dtype == DType::F16 { MapElem::F16 } else { MapElem::Bf16 };
    raw::strided_map(tensor, &[1, rows, 1, 64], elem)
}

/// Output `[B, Sq, H, Dv]` and log-sum-exp `[B, H, Sq]` fp32. `sink` is fp32 `[H]`.
pub fn forward(
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    sink: Option<CudaTensor>,
    mask: &Mask,
    desc: &AttentionDesc,
) -> (CudaTensor, CudaTensor) {
    let (q, k, v, sink) = (raw::mappable(q), raw::mappable(k), raw::mappable(v), sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let tile = shape.tile().expect("sizes that `supports` let pass");
    let out = raw::empty(&q, &[shape.batch, shape.sq, shape.heads, shape.dv], shape.elem);
    let lse = raw::empty(&q, &[shape.batch, shape.heads, shape.sq], DType::F32);
    let scalars = shape.scalars(mask, sink.is_some(), desc, 0);
    let ranges = Ranges::new(&q, &shape, mask, desc, &scalars);
    let maps = vec![head_map(&q, 64), head_map(&k, BLOCK), head_map(&v, BLOCK), head_map(&out, 16)];
    // without a sink the pointer is not read
    let mut buffers = vec![&lse.handle, sink.as_ref().map_or(&lse.handle, |sink| &sink.handle)];
    buffers.extend(ranges.iter().flat_map(Ranges::of_queries));
    let kernel = Forward::kernel(tile, ranges.is_some(), shape.elem);
    kernel.launch(&q.client, raw::multiprocessors(&q.client), maps, &buffers, scalars);
    (out, lse)
}

/// Every kernel variant of this module in bf16, and some of those in fp16, for compile checks without a GPU.
#[cfg(test)]
pub fn variants() -> Vec<RawKernel> {
    let mut all = vec![ranges::kernel()];
    let tiles = [(64, 64), (128, 128), (192, 128)].map(|(dk, dv)| Tile { dk, dv });
    for tile in tiles {
        all.extend([false, true].map(|masked| Forward::kernel(tile, masked, DType::BF16)));
    }
    all.push(Forward::kernel(tiles[1], true, DType::F16));
    all.extend(backward::variants());
    all
}

/// Buffers of `bytes` bytes each.
fn buffers<const N: usize>(like: &CudaTensor, bytes: [usize; N]) -> [Handle; N] {
    bytes.map(|bytes| like.client.empty(bytes))
}
