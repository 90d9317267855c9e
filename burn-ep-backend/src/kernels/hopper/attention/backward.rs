//! Backward of the Hopper attention: row statistics, the main kernel, fp32 sums to 16 bits, the gradient of the sink.

use burn_backend::DType;

use super::{DEFS, PTX, Tile, WGMMA, head_map};
use crate::desc::AttentionDesc;
use crate::kernels::attention::{GROUP, Grads, Mask, Ranges, Saved, Shape, TYPES, buffers, sink_gradient};
use crate::kernels::raw::{self, CudaTensor, RawKernel, dense};

const SHARED: &str = include_str!("../../../../kernels/hopper/attention_backward.cuh");
const MAIN: &str = include_str!("../../../../kernels/hopper/attention_backward.cu");
const ENDS: &str = include_str!("../../../../kernels/hopper/attention_backward_ends.cu");

/// Whether the backward covers such a call too.
pub fn supports_backward(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc) -> bool {
    let Shape { dk, dv, .. } = Shape::of(q, k, v);
    super::supports(q, k, v, desc) && Tile::of(dk, dv).is_some_and(|tile| tile.dk == tile.dv)
}

/// The kernels of one backward.
struct Kernels {
    prepare: RawKernel,
    main: RawKernel,
    finish: RawKernel,
}

impl Kernels {
    fn new(tile: Tile, masked: bool, elem: DType) -> Self {
        let head_dim = tile.dk;
        let (q_stages, stages, bulk, load, math) = if head_dim == 128 { (3, 2, 1, 24, 240) } else { (4, 3, 0, 40, 232) };
        let defines = format!(
            "#define QSTAGES {q_stages}\n#define STAGES {stages}\n#define BULK {bulk}\n#define REGS_LOAD {load}\n#define REGS_MATH {math}\n"
        );
        let main = [&tile.defines(masked, elem), &defines, TYPES, DEFS, PTX, WGMMA, SHARED, MAIN].concat();
        let ends = [&tile.defines(false, elem), TYPES, DEFS, PTX, SHARED, ENDS].concat();
        let smem = 4 * 128 * head_dim
            + (q_stages + stages) * (GROUP * head_dim * 2 + 256 + 16)
            + 32_768
            + bulk * 256 * head_dim
            + usize::from(masked) * q_stages * 528
            + 48;
        Self {
            prepare: RawKernel::new(ends.clone(), "attn_bwd_pre", 256, 0),
            main: RawKernel::new(main, "attn_bwd", 384, smem),
            finish: RawKernel::new(ends, "attn_bwd_post", 128, 0),
        }
    }
}

/// See [`crate::kernels::attention::backward`].
pub fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc) -> Grads {
    let (q, k, v) = (raw::mappable(saved.q), raw::mappable(saved.k), raw::mappable(saved.v));
    let (grad, out, lse, sink) = (dense(grad), dense(saved.out), dense(saved.lse), saved.sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let tile = Tile::of(shape.dk, shape.dv).expect("sizes that `supports_backward` let pass");
    let client = &q.client;
    let [q_groups, kv_groups] = shape.groups();
    let rows = shape.batch * shape.heads * q_groups * GROUP;
    // fp32 sums of dQ, dK, dV, tile by tile
    let sums = shape.batch * (shape.heads * q_groups + 2 * shape.kv_heads * kv_groups) * GROUP * tile.dk;
    let [neg_lse, delta, workspace, counter] = buffers(&q, [rows * 4, rows * 4, sums * 4, 16]);
    let grads = [shape.query(shape.dk), shape.key(shape.dk), shape.key(shape.dv)].map(|dims| raw::empty(&q, &dims, shape.elem));
    let scalars = shape.scalars(mask, sink.is_some(), desc, sums / 4);
    let ranges = Ranges::unless_causal(&q, &shape, mask, desc, &scalars);
    let kernels = Kernels::new(tile, ranges.is_some(), shape.elem);
    let processors = raw::multiprocessors(client);

    let buffers = [&out.handle, &grad.handle, &lse.handle, &neg_lse, &delta, &workspace, &counter];
    kernels.prepare.launch(client, processors * 16, vec![], &buffers, scalars.clone());

    let maps = vec![head_map(&q, 64), head_map(&grad, 64), head_map(&k, 128), head_map(&v, 128)];
    let mut buffers = vec![&neg_lse, &delta, &workspace, &counter];
    buffers.extend(ranges.iter().flat_map(Ranges::all));
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
    let variant = |dim: usize, masked: bool, elem: DType| Kernels::new(Tile { dk: dim, dv: dim }, masked, elem);
    let mut all = Vec::new();
    for dim in [64, 128] {
        let Kernels { main, prepare, .. } = variant(dim, false, DType::BF16);
        // the kernels around the main one are one source
        all.extend([main, prepare, variant(dim, true, DType::BF16).main]);
    }
    let Kernels { main, prepare, .. } = variant(128, true, DType::F16);
    all.extend([main, prepare]);
    all
}
