//! Flash attention in bf16 and fp16: forward with log-sum-exp, backward in one pass or split in two.
//!
//! Head sizes up to 128 in multiples of 8, and up to 192/128 (multi-head latent attention); grouped query heads, causal or
//! not, sliding window, sink logit with its gradient, packed documents, padding, keys of earlier tokens. Blocks of keys that no
//! query of a tile sees are skipped; windows up to [`SMALL_WINDOW`] keys take smaller tiles. The one-pass backward adds dQ, and
//! dK and dV, with fp32 atomics, so it is not reproducible to the last bit; the split one is, and serves small windows.

mod backward;
mod split;

pub use backward::{backward, supports_backward};

use burn_backend::DType;
use cubecl::server::{Handle, TensorMapBinding};

use super::super::attention::{BLOCK, Mask, Ranges, Shape, TYPES};
use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense};
use crate::desc::AttentionDesc;

const DEFS: &str = include_str!("../../../../kernels/hopper/attention.cuh");
const PTX: &str = include_str!("../../../../kernels/hopper/attention_ptx.cuh");
const WGMMA: &str = include_str!("../../../../kernels/hopper/attention_wgmma.cuh");
const ROWS: &str = include_str!("../../../../kernels/hopper/attention_rows.cuh");
const FORWARD: &str = include_str!("../../../../kernels/hopper/attention_forward.cu");

/// Largest window whose tiles are 64 queries and 64 keys of a warpgroup.
const SMALL_WINDOW: usize = 256;

/// How the kernels know which keys a query sees.
enum Masking {
    /// Causal over the whole row.
    Causal,
    /// From tables on the device.
    Tables(Box<Ranges>),
    /// Causal with a window, from the positions.
    Window,
}

impl Masking {
    /// `window`: whether the kernels know [`Masking::Window`].
    fn new(like: &CudaTensor, shape: &Shape, mask: &Mask, desc: &AttentionDesc, scalars: &[u64], window: bool) -> Self {
        let by_position = desc.causal && shape.sq == shape.skv && mask.is_none();
        match (by_position, hides(desc, shape)) {
            (true, false) => Self::Causal,
            (true, true) if window => Self::Window,
            _ => Self::Tables(Box::new(Ranges::new(like, shape, mask, scalars))),
        }
    }

    /// The define `MASKED`.
    fn code(&self) -> u32 {
        match self {
            Self::Causal => 0,
            Self::Tables(_) => 1,
            Self::Window => 2,
        }
    }

    /// Parameters of the kernels that walk the keys of a tile of queries.
    fn of_queries(&self) -> Vec<&Handle> {
        match self {
            Self::Tables(ranges) => ranges.of_queries().to_vec(),
            _ => Vec::new(),
        }
    }

    /// Parameters of those that walk the queries of a tile of keys.
    fn all(&self) -> Vec<&Handle> {
        match self {
            Self::Tables(ranges) => ranges.all().to_vec(),
            _ => Vec::new(),
        }
    }
}

/// Whether the window hides any key.
fn hides(desc: &AttentionDesc, shape: &Shape) -> bool {
    desc.window.is_some_and(|window| window < shape.skv)
}

/// Whether a call takes the tiles for small windows.
fn small_window(desc: &AttentionDesc, shape: &Shape, tile: Tile) -> bool {
    hides(desc, shape) && desc.window.is_some_and(|window| window <= SMALL_WINDOW) && tile.dk <= 128
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

    /// The defines that all parts share; `masked` is [`Masking::code`].
    fn defines(self, masked: u32, elem: DType) -> String {
        let Self { dk, dv } = self;
        let fp16 = u32::from(elem == DType::F16);
        format!("#define HDK {dk}\n#define HDV {dv}\n#define MASKED {masked}\n#define FP16 {fp16}\n")
    }
}

/// Whether the forward kernel covers a call of filled tensors of one dtype.
pub fn supports(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc) -> bool {
    let Shape { dk, dv, elem, .. } = Shape::of(q, k, v);
    matches!(elem, DType::BF16 | DType::F16) && desc.scale > 0.0 && Tile::of(dk, dv).is_some()
}

/// Settings of a kernel that owns query rows.
#[derive(Clone, Copy)]
struct Rows {
    warpgroups: usize,
    stages: usize,
    q_buffers: usize,
    /// Keys of a block.
    keys: usize,
    /// Whether a warpgroup passes over blocks that its own rows do not see.
    skip: bool,
}

impl Rows {
    fn forward(tile: Tile, small: bool) -> Self {
        let (warpgroups, stages, q_buffers) = match (tile.dk, small) {
            (64, true) => (3, 6, 2),
            (64, false) => (3, 4, 2),
            (128, true) => (2, 4, 2),
            (128, false) => (2, 2, 2),
            _ => (2, 2, 1),
        };
        Self {
            warpgroups,
            stages,
            q_buffers,
            keys: if small { 64 } else { BLOCK },
            skip: small,
        }
    }

    fn defines(self) -> String {
        let Self {
            warpgroups,
            stages,
            q_buffers,
            keys,
            skip,
        } = self;
        let (load, math) = if warpgroups == 3 { (32, 160) } else { (24, 240) };
        format!(
            "#define NWG {warpgroups}\n#define STAGES {stages}\n#define QBUFS {q_buffers}\n#define KEYS {keys}\n#define SKIP {}\n\
             #define REGS_LOAD {load}\n#define REGS_MATH {math}\n",
            u32::from(skip)
        )
    }

    fn threads(self) -> u32 {
        128 * (self.warpgroups as u32 + 1)
    }
}

fn forward_kernel(tile: Tile, small: bool, masked: u32, elem: DType) -> RawKernel {
    let rows = Rows::forward(tile, small);
    let Rows {
        warpgroups,
        stages,
        q_buffers,
        keys,
        ..
    } = rows;
    let smem = q_buffers * warpgroups * 64 * tile.dk * 2 + stages * keys * (tile.dk + tile.dv) * 2 + 32 + 32 * stages;
    let source = [&tile.defines(masked, elem), &rows.defines(), TYPES, DEFS, PTX, WGMMA, ROWS, FORWARD].concat();
    RawKernel::new(source, "attn_fwd", rows.threads(), smem)
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
    let masking = Masking::new(&q, &shape, mask, desc, &scalars, true);
    let small = small_window(desc, &shape, tile);
    let keys = Rows::forward(tile, small).keys;
    let maps = vec![head_map(&q, 64), head_map(&k, keys), head_map(&v, keys), head_map(&out, 16)];
    // without a sink the pointer is not read
    let mut buffers = vec![&lse.handle, sink.as_ref().map_or(&lse.handle, |sink| &sink.handle)];
    buffers.extend(masking.of_queries());
    let kernel = forward_kernel(tile, small, masking.code(), shape.elem);
    kernel.launch(&q.client, raw::multiprocessors(&q.client), maps, &buffers, scalars);
    (out, lse)
}

/// Every kernel variant of this module in bf16, and some of those in fp16, for compile checks without a GPU.
#[cfg(test)]
pub fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    let tiles = [(64, 64), (128, 128), (192, 128)].map(|(dk, dv)| Tile { dk, dv });
    for tile in tiles {
        all.extend([0, 1, 2].map(|masked| forward_kernel(tile, false, masked, DType::BF16)));
    }
    for tile in &tiles[..2] {
        all.extend([1, 2].map(|masked| forward_kernel(*tile, true, masked, DType::BF16)));
    }
    all.push(forward_kernel(tiles[1], false, 1, DType::F16));
    all.extend(backward::variants());
    all.extend(split::variants());
    all
}
