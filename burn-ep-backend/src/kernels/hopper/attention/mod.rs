//! Flash attention in bf16 and fp16: forward with log-sum-exp, backward with fp32 sums.
//!
//! Head sizes up to 128 in multiples of 8, and 192/128 (multi-head latent attention) in the forward; grouped query heads,
//! causal or not, sliding window, sink logit with its gradient, packed documents, padding, keys of earlier tokens. Blocks of
//! keys that no query of a tile sees are skipped. The backward adds dQ, and dK and dV, with fp32 atomics, so it is not
//! reproducible to the last bit.

mod backward;

pub use backward::{backward, supports_backward};

use burn_backend::DType;
use cubecl::server::TensorMapBinding;

use super::super::attention::{BLOCK, Mask, Ranges, Shape, TYPES};
use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense};
use crate::desc::AttentionDesc;

const DEFS: &str = include_str!("../../../../kernels/hopper/attention.cuh");
const PTX: &str = include_str!("../../../../kernels/hopper/attention_ptx.cuh");
const WGMMA: &str = include_str!("../../../../kernels/hopper/attention_wgmma.cuh");
const FORWARD: &str = include_str!("../../../../kernels/hopper/attention_forward.cu");

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

/// Whether the forward kernel covers a call of filled tensors of one dtype.
pub fn supports(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc) -> bool {
    let Shape { dk, dv, elem, .. } = Shape::of(q, k, v);
    matches!(elem, DType::BF16 | DType::F16) && desc.scale > 0.0 && Tile::of(dk, dv).is_some()
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
        let source = [&tile.defines(masked, elem), &defines, TYPES, DEFS, PTX, WGMMA, FORWARD].concat();
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
    let tile = Tile::of(shape.dk, shape.dv).expect("sizes that `supports` let pass");
    let out = raw::empty(&q, &shape.query(shape.dv), shape.elem);
    let lse = raw::empty(&q, &[shape.batch, shape.heads, shape.sq], DType::F32);
    let scalars = shape.scalars(mask, sink.is_some(), desc, 0);
    let ranges = Ranges::unless_causal(&q, &shape, mask, desc, &scalars);
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
    let mut all = Vec::new();
    let tiles = [(64, 64), (128, 128), (192, 128)].map(|(dk, dv)| Tile { dk, dv });
    for tile in tiles {
        all.extend([false, true].map(|masked| Forward::kernel(tile, masked, DType::BF16)));
    }
    all.push(Forward::kernel(tiles[1], true, DType::F16));
    all.extend(backward::variants());
    all
}
