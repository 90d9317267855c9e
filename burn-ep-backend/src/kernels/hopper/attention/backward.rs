//! Backward of the Hopper attention: row statistics, the main kernel, fp32 sums to 16 bits, the gradient of the sink.

use burn_backend::DType;

use super::ranges::Ranges;
use super::{GROUP, Mask, PTX, Shape, TYPES, Tile, WGMMA, buffers, head_map};
use crate::desc::AttentionDesc;
use crate::kernels::raw::{self, CudaTensor, RawKernel, dense};

const SHARED: &str = include_str!("../../../../kernels/hopper/attention_backward.cuh");
const MAIN: &str = include_str!("../../../../kernels/hopper/attention_backward.cu");
const ENDS: &str = include_str!("../../../../kernels/hopper/attention_backward_ends.cu");

/// Whether the backward covers a call that the forward covers.
pub fn supports_backward(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor) -> bool {
    Shape::of(q, k, v).tile().is_some_and(|tile| tile.dk == tile.dv)
}

/// The kernels of one backward.
struct Kernels {
    prepare: RawKernel,
    main: RawKernel,
    finish: RawKernel,
    sink: RawKernel,
}

impl Kernels {
    fn new(tile: Tile, masked: bool, elem: DType) -> Self {
        let head_dim = tile.dk;
        let (q_stages, stages, bulk, load, math) = if head_dim == 128 { (3, 2, 1, 24, 240) } else { (4, 3, 0, 40, 232) };
        let defines = format!(
            "#define QSTAGES {q_stages}\n#define STAGES {stages}\n#define BULK {bulk}\n#define REGS_LOAD {load}\n#define REGS_MATH {math}\n"
        );
        let main = [&tile.defines(masked, elem), &defines, TYPES, PTX, WGMMA, SHARED, MAIN].concat();
        let ends = [&tile.defines(false, elem), TYPES, PTX, SHARED, ENDS].concat();
        let smem = 4 * 128 * head_dim
            + (q_stages + stages) * (GROUP * head_dim * 2 + 256 + 16)
            + 32_768
            + bulk * 256 * head_dim
            + usize::from(masked) * q_stages * 528
            + 48;
        Self {
            prepare: RawKernel::new(ends.clone(), "attn_bwd_pre", 256, 0),
            main: RawKernel::new(main, "attn_bwd", 384, smem),
            finish: RawKernel::new(ends.clone(), "attn_bwd_post", 128, 0),
            sink: RawKernel::new(ends, "attn_bwd_sink", 256, 0),
        }
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

/// Gradients of q, k, v and, in fp32, of the sink.
pub fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc) -> ([CudaTensor; 3], Option<CudaTensor>) {
    let (q, k, v) = (raw::mappable(saved.q), raw::mappable(saved.k), raw::mappable(saved.v));
    let (grad, out, lse, sink) = (dense(grad), dense(saved.out), dense(saved.lse), saved.sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let tile = shape.tile().expect("sizes that `supports_backward` let pass");
    let client = &q.client;
    let [q_groups, kv_groups] = shape.groups();
    let rows = shape.batch * shape.heads * q_groups * GROUP;
    // fp32 sums of dQ, dK, dV, tile by tile
    let sums = shape.batch * (shape.heads * q_groups + 2 * shape.kv_heads * kv_groups) * GROUP * tile.dk;
    let [neg_lse, delta, workspace, counter] = buffers(&q, [rows * 4, rows * 4, sums * 4, 16]);
    let query = |dim| [shape.batch, shape.sq, shape.heads, dim];
    let key = |dim| [shape.batch, shape.skv, shape.kv_heads, dim];
    let grads = [query(shape.dk), key(shape.dk), key(shape.dv)].map(|dims| raw::empty(&q, &dims, shape.elem));
    let scalars = shape.scalars(mask, sink.is_some(), desc, sums / 4);
    let ranges = Ranges::new(&q, &shape, mask, desc, &scalars);
    let kernels = Kernels::new(tile, ranges.is_some(), shape.elem);
    let processors = raw::multiprocessors(client);

    let buffers = [&out.handle, &grad.handle, &lse.handle, &neg_lse, &delta, &workspace, &counter];
    kernels.prepare.launch(client, processors * 16, vec![], &buffers, scalars.clone());

    let maps = vec![head_map(&q, 64), head_map(&grad, 64), head_map(&k, 128), head_map(&v, 128)];
    let mut buffers = vec![&neg_lse, &delta, &workspace, &counter];
    buffers.extend(ranges.iter().flat_map(Ranges::all));
    kernels.main.launch(client, processors, maps, &buffers, scalars.clone());

    let grad_sink = sink.map(|sink| {
        let grad_sink = raw::empty(&q, &[shape.heads], DType::F32);
        let buffers = [&neg_lse, &delta, &sink.handle, &grad_sink.handle];
        kernels.sink.launch(client, shape.heads as u32, vec![], &buffers, scalars.clone());
        grad_sink
    });
    let [grad_q, grad_k, grad_v] = &grads;
    let buffers = [&workspace, &grad_q.handle, &grad_k.handle, &grad_v.handle];
    let grid = shape.batch * q_groups.max(kv_groups) * (shape.heads + 2 * shape.kv_heads);
    kernels.finish.launch(client, grid as u32, vec![], &buffers, scalars);
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
