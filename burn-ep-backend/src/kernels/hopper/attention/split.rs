//! Split backward of the Hopper attention: one kernel owns query rows and writes dQ, another owns keys and writes dK and dV. More
//! products than in one pass, but no sums across blocks: no fp32 workspace, no atomics, the same bits in every run.

use burn_backend::DType;

use super::backward::SHARED;
use super::{DEFS, Masking, PTX, ROWS, Rows, Tile, WGMMA, head_map};
use crate::desc::AttentionDesc;
use crate::kernels::attention::{BLOCK, GROUP, Grads, Mask, Saved, Shape, TYPES, buffers, sink_gradient};
use crate::kernels::raw::{self, CudaTensor, RawKernel, dense};

const QUERIES: &str = include_str!("../../../../kernels/hopper/attention_backward_q.cu");
const KEYS: &str = include_str!("../../../../kernels/hopper/attention_backward_kv.cu");

fn rows(tile: Tile) -> Rows {
    let (warpgroups, stages) = if tile.dk == 64 { (3, 4) } else { (2, 3) };
    Rows {
        warpgroups,
        stages,
        q_buffers: 2,
        keys: GROUP,
        skip: true,
    }
}

/// Row statistics and dQ.
fn queries_kernel(tile: Tile, masked: u32, elem: DType) -> RawKernel {
    let rows = rows(tile);
    let smem = rows.q_buffers * rows.warpgroups * GROUP * tile.dk * 4 + rows.stages * rows.keys * tile.dk * 4 + 32 + 16 * rows.stages;
    let source = [&tile.defines(masked, elem), &rows.defines(), TYPES, DEFS, PTX, WGMMA, ROWS, QUERIES].concat();
    RawKernel::new(source, "attn_bwd_dq", rows.threads(), smem)
}

/// dK and dV.
fn keys_kernel(tile: Tile, masked: u32, elem: DType) -> RawKernel {
    let (stages, load, math) = if tile.dk == 64 { (6, 40, 232) } else { (4, 24, 240) };
    let defines = format!("#define STAGES {stages}\n#define REGS_LOAD {load}\n#define REGS_MATH {math}\n");
    let smem = 4 * BLOCK * tile.dk + stages * (GROUP * tile.dk * 4 + 512 + 16) + usize::from(masked == 1) * stages * 528 + 32;
    let source = [&tile.defines(masked, elem), &defines, TYPES, DEFS, PTX, WGMMA, SHARED, KEYS].concat();
    RawKernel::new(source, "attn_bwd_dkv", 384, smem)
}

/// See [`crate::kernels::attention::backward`]; keys and values have one head size of the tile.
pub(super) fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc, tile: Tile) -> Grads {
    let (q, k, v) = (raw::mappable(saved.q), raw::mappable(saved.k), raw::mappable(saved.v));
    let (grad, out, lse, sink) = (dense(grad), dense(saved.out), dense(saved.lse), saved.sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let client = &q.client;
    let stats = shape.batch * shape.heads * shape.groups()[0] * GROUP;
    let [neg_lse, delta, counter] = buffers(&q, [stats * 4, stats * 4, 16]);
    let grads = [shape.query(shape.dk), shape.key(shape.dk), shape.key(shape.dv)].map(|dims| raw::empty(&q, &dims, shape.elem));
    let [grad_q, grad_k, grad_v] = &grads;
    let scalars = shape.scalars(mask, sink.is_some(), desc, 0);
    let masking = Masking::new(&q, &shape, mask, desc, &scalars, true);
    let processors = raw::multiprocessors(client);
    let query_maps = || vec![head_map(&q, GROUP), head_map(&grad, GROUP)];

    let mut maps = query_maps();
    maps.extend([head_map(&k, GROUP), head_map(&v, GROUP), head_map(grad_q, 16)]);
    let mut buffers = vec![&out.handle, &lse.handle, &neg_lse, &delta, &counter];
    buffers.extend(masking.of_queries());
    queries_kernel(tile, masking.code(), shape.elem).launch(client, processors, maps, &buffers, scalars.clone());

    let mut maps = query_maps();
    maps.extend([head_map(&k, BLOCK), head_map(&v, BLOCK), head_map(grad_k, 16), head_map(grad_v, 16)]);
    let mut buffers = vec![&neg_lse, &delta, &counter];
    buffers.extend(masking.all());
    keys_kernel(tile, masking.code(), shape.elem).launch(client, processors, maps, &buffers, scalars.clone());

    let grad_sink = sink.map(|sink| sink_gradient(&sink, &neg_lse, &delta, &shape, scalars));
    (grads, grad_sink)
}

#[cfg(test)]
pub(super) fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    for dim in [64, 128] {
        let tile = Tile { dk: dim, dv: dim };
        // small windows hide keys: by tables or by positions, never only by causality
        for masked in [1, 2] {
            all.extend([queries_kernel, keys_kernel].map(|kernel| kernel(tile, masked, DType::BF16)));
        }
    }
    let tile = Tile { dk: 64, dv: 64 };
    all.extend([queries_kernel, keys_kernel].map(|kernel| kernel(tile, 2, DType::F16)));
    all
}
