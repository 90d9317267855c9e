//! One-pass backward of the Hopper attention: row statistics, the main kernel, fp32 sums to 16 bits, the gradient of the sink.

use burn_backend::DType;

use super::{DEFS, Masking, PTX, Tile, WGMMA, head_map, small_window, split};
use crate::desc::AttentionDesc;
use crate::kernels::attention::{GROUP, Grads, Mask, Saved, Shape, TYPES, buffers, sink_gradient};
use crate::kernels::raw::{self, CudaTensor, RawKernel, dense};

pub(super) const SHARED: &str = include_str!("../../../../kernels/hopper/attention_backward.cuh");
const MAIN: &str = include_str!("../../../../kernels/hopper/attention_backward.cu");
const LATENT: &str = include_str!("../../../../kernels/hopper/attention_backward_latent.cu");
const ENDS: &str = include_str!("../../../../kernels/hopper/attention_backward_ends.cu");

/// Whether the backward covers such a call too. Of the deterministic ones only small windows do: beyond them the split backward
/// did not end on an H200.
pub fn supports_backward(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc, deterministic: bool) -> bool {
    let shape = Shape::of(q, k, v);
    super::supports(q, k, v, desc) && Tile::of(shape.dk, shape.dv).is_some_and(|tile| !deterministic || small_window(desc, &shape, tile))
}

/// The kernels of one backward.
struct Kernels {
    prepare: RawKernel,
    main: RawKernel,
    finish: RawKernel,
    /// Keys of a tile of the main kernel.
    keys: usize,
}

impl Kernels {
    fn new(tile: Tile, masked: u32, elem: DType) -> Self {
        let (keys, q_stages, stages, bulk, load, math) = match tile.dk {
            64 => (128, 4, 3, 0, 40, 232),
            128 => (128, 3, 2, 1, 24, 240),
            _ => (64, 3, 2, 1, 24, 240),
        };
        let defines = format!(
            "#define QSTAGES {q_stages}\n#define STAGES {stages}\n#define BULK {bulk}\n#define REGS_LOAD {load}\n#define REGS_MATH {math}\n"
        );
        let source = if keys == 64 { LATENT } else { MAIN };
        let main = [&tile.defines(masked, elem), &defines, TYPES, DEFS, PTX, WGMMA, SHARED, source].concat();
        let ends = [&tile.defines(0, elem), TYPES, DEFS, PTX, SHARED, ENDS].concat();
        let smem = keys * (tile.dk + tile.dv) * 2
            + q_stages * (GROUP * tile.dk * 2 + 256 + 16)
            + stages * (GROUP * tile.dv * 2 + 256 + 16)
            + 2 * keys * GROUP * 2
            + bulk * 256 * tile.dk
            + usize::from(masked == 1) * q_stages * 528
            + 64;
        Self {
            prepare: RawKernel::new(ends.clone(), "attn_bwd_pre", 256, 0),
            main: RawKernel::new(main, "attn_bwd", 384, smem),
            finish: RawKernel::new(ends, "attn_bwd_post", 128, 0),
            keys,
        }
    }
}

/// See [`crate::kernels::attention::backward`].
pub fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc) -> Grads {
    let shape = Shape::of(&saved.q, &saved.k, &saved.v);
    let tile = Tile::of(shape.dk, shape.dv).expect("sizes that `supports_backward` let pass");
    if small_window(desc, &shape, tile) {
        return split::backward(grad, saved, mask, desc, tile);
    }
    let (q, k, v) = (raw::mappable(saved.q), raw::mappable(saved.k), raw::mappable(saved.v));
    let (grad, out, lse, sink) = (dense(grad), dense(saved.out), dense(saved.lse), saved.sink.map(dense));
    let client = &q.client;
    let [q_groups, kv_groups] = shape.groups();
    let rows = shape.batch * shape.heads * q_groups * GROUP;
    // fp32 sums of dQ, dK, dV, tile by tile
    let sums = shape.batch * GROUP * (shape.heads * q_groups * tile.dk + shape.kv_heads * kv_groups * (tile.dk + tile.dv));
    let [neg_lse, delta, workspace, counter] = buffers(&q, [rows * 4, rows * 4, sums * 4, 16]);
    let grads = [shape.query(shape.dk), shape.key(shape.dk), shape.key(shape.dv)].map(|dims| raw::empty(&q, &dims, shape.elem));
    // with a key head for each query head only the sums of dQ have several summands
    let zeros = if shape.heads == shape.kv_heads { rows * tile.dk } else { sums };
    let scalars = shape.scalars(mask, sink.is_some(), desc, zeros / 4);
    let masking = Masking::new(&q, &shape, mask, desc, &scalars, false);
    let kernels = Kernels::new(tile, masking.code(), shape.elem);
    let processors = raw::multiprocessors(client);

    let buffers = [&out.handle, &grad.handle, &lse.handle, &neg_lse, &delta, &workspace, &counter];
    kernels.prepare.launch(client, processors * 16, vec![], &buffers, scalars.clone());

    let keys = kernels.keys;
    let maps = vec![head_map(&q, GROUP), head_map(&grad, GROUP), head_map(&k, keys), head_map(&v, keys)];
    let mut buffers = vec![&neg_lse, &delta, &workspace, &counter];
    buffers.extend(masking.all());
    kernels.main.launch(client, processors, maps, &buffers, scalars.clone());

    let [grad_q, grad_k, grad_v] = &grads;
    let buffers = [&workspace, &grad_q.handle, &grad_k.handle, &grad_v.handle];
    let grid = shape.batch * q_groups.max(kv_groups) * (shape.heads + 2 * shape.kv_heads);
    kernels.finish.launch(client, grid as u32, vec![], &buffers, scalars.clone());
    let grad_sink = sink.map(|sink| sink_gradient(&sink, &neg_lse, &delta, &shape, scalars));
    (grads, grad_sink)
}

#[cfg(test)]
pub(super) fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    for (dk, dv) in [(64, 64), (128, 128), (192, 128)] {
        let variant = |masked| Kernels::new(Tile { dk, dv }, masked, DType::BF16);
        let Kernels { main, prepare, .. } = variant(0);
        // the kernels around the main one are one source
        all.extend([main, prepare, variant(1).main]);
    }
    let Kernels { main, prepare, .. } = Kernels::new(Tile { dk: 128, dv: 128 }, 1, DType::F16);
    all.extend([main, prepare]);
    all
}
