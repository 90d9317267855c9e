//! Launches of the portable kernels: any device of compute capability 8.0 or later, fp32, bf16 and fp16, no atomics.

use burn_backend::DType;

use super::{Grads, Mask, Ranges, Saved, Shape, TYPES, buffers, sink_gradient};
use crate::desc::AttentionDesc;
use crate::kernels::raw::{self, CudaTensor, RawKernel, dense};

const PTX: &str = include_str!("../../../kernels/attention/portable_ptx.cuh");
const SHARED: &str = include_str!("../../../kernels/attention/portable.cuh");
const FORWARD: &str = include_str!("../../../kernels/attention/portable_forward.cu");
const BACKWARD: &str = include_str!("../../../kernels/attention/portable_backward.cu");
/// Shared memory that a block may take, so that two fit on a data-centre GPU.
const SHARED_MEMORY: usize = 112 << 10;

/// Sizes of a tile.
#[derive(Clone, Copy, Debug)]
struct Tile {
    dk: usize,
    dv: usize,
    elem: DType,
    /// Warps of a block, each with 16 rows of its own.
    warps: usize,
    /// Rows of the other side per step.
    step: usize,
}

impl Tile {
    /// The largest tile whose kernels fit into `limit` bytes of shared memory.
    fn new(dk: usize, dv: usize, elem: DType, limit: usize) -> Option<Self> {
        let typed = matches!(elem, DType::F32 | DType::BF16 | DType::F16);
        let sized = (1..=256).contains(&dk) && (1..=256).contains(&dv);
        let tiles = [(4, 32), (2, 32), (2, 16), (1, 16)].map(|(warps, step)| Self { dk, dv, elem, warps, step });
        let fitting = tiles.into_iter().find(|tile| tile.shared_memory() <= limit.min(SHARED_MEMORY));
        fitting.filter(|_| typed && sized)
    }

    fn of(like: &CudaTensor, shape: &Shape) -> Option<Self> {
        let limit = like.client.properties().hardware.max_shared_memory_size;
        Self::new(shape.dk, shape.dv, shape.elem, limit)
    }

    /// What the backward kernels need; the forward needs less.
    fn shared_memory(&self) -> usize {
        let size = self.elem.size();
        let columns = |dim: usize| dim.next_multiple_of(16) + 16 / size;
        let rows = self.rows() + 2 * self.step;
        let scratch = if self.elem == DType::F32 {
            self.rows() * (self.step + 4) * 4
        } else {
            0
        };
        rows * (columns(self.dk) + columns(self.dv)) * size + scratch + 8 * self.step * 4
    }

    /// Rows of a block.
    fn rows(&self) -> usize {
        16 * self.warps
    }

    fn kernel(&self, defines: &str, source: &str, entry: &'static str) -> RawKernel {
        let Self { dk, dv, elem, warps, step } = self;
        let code = match elem {
            DType::F32 => 0,
            DType::BF16 => 1,
            _ => 2,
        };
        let whole = [dk, dv].iter().all(|dim| (**dim * elem.size()).is_multiple_of(16));
        let tile = format!(
            "#define ELEM {code}\n#define DK {dk}\n#define DV {dv}\n#define VEC {}\n#define WARPS {warps}\n#define STEP {step}\n{defines}",
            u32::from(whole)
        );
        let source = [&tile, TYPES, PTX, SHARED, source].concat();
        RawKernel::new(source, entry, 32 * *warps as u32, self.shared_memory())
    }

    fn forward(&self) -> RawKernel {
        self.kernel("", FORWARD, "attn_portable_fwd")
    }

    fn delta(&self) -> RawKernel {
        // one source for all tiles: 256 threads, no shared memory
        let kernel = self.kernel("#define BACKWARD 1\n", BACKWARD, "attn_portable_delta");
        RawKernel::new(kernel.source().into(), "attn_portable_delta", 256, 0)
    }

    fn grad_q(&self) -> RawKernel {
        self.kernel("#define BACKWARD 2\n", BACKWARD, "attn_portable_dq")
    }

    /// One kernel for the gradients of k and v, or one for each where the sums of both do not fit into the registers.
    fn grad_kv(&self) -> Vec<RawKernel> {
        let parts: &[u32] = if self.dk + self.dv > 320 { &[1, 2] } else { &[3] };
        let kernel = |part| {
            self.kernel(
                &format!("#define BACKWARD 3\n#define PARTS {part}\n"),
                BACKWARD,
                "attn_portable_dkv",
            )
        };
        parts.iter().map(kernel).collect()
    }
}

/// Whether the kernels cover these sizes on the device of `like`.
pub(super) fn supports(like: &CudaTensor, shape: &Shape) -> bool {
    Tile::of(like, shape).is_some()
}

/// See [`super::forward`].
pub(super) fn forward(
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    sink: Option<CudaTensor>,
    mask: &Mask,
    desc: &AttentionDesc,
) -> (CudaTensor, CudaTensor) {
    let (q, k, v, sink) = (dense(q), dense(k), dense(v), sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let tile = Tile::of(&q, &shape).expect("sizes that `supports` let pass");
    let out = raw::empty(&q, &shape.query(shape.dv), shape.elem);
    let lse = raw::empty(&q, &[shape.batch, shape.heads, shape.sq], DType::F32);
    let scalars = shape.scalars(mask, sink.is_some(), desc, 0);
    let ranges = Ranges::new(&q, &shape, mask, &scalars);
    // without a sink the pointer is not read
    let sink = sink.as_ref().map_or(&lse.handle, |sink| &sink.handle);
    let mut buffers = vec![&q.handle, &k.handle, &v.handle, &out.handle, &lse.handle, sink];
    buffers.extend(ranges.of_queries());
    let grid = shape.batch * shape.heads * shape.sq.div_ceil(tile.rows());
    tile.forward().launch(&q.client, grid as u32, vec![], &buffers, scalars);
    (out, lse)
}

/// See [`super::backward`].
pub(super) fn backward(grad: CudaTensor, saved: Saved, mask: &Mask, desc: &AttentionDesc) -> Grads {
    let (q, k, v) = (dense(saved.q), dense(saved.k), dense(saved.v));
    let (grad, out, lse, sink) = (dense(grad), dense(saved.out), dense(saved.lse), saved.sink.map(dense));
    let shape = Shape::of(&q, &k, &v);
    let tile = Tile::of(&q, &shape).expect("sizes that `supports` let pass");
    let client = &q.client;
    let scalars = shape.scalars(mask, sink.is_some(), desc, 0);
    let ranges = Ranges::new(&q, &shape, mask, &scalars);
    let stats = shape.batch * shape.heads * shape.groups()[0] * super::GROUP;
    let [neg_lse, delta] = buffers(&q, [stats * 4, stats * 4]);
    let buffers = [&out.handle, &grad.handle, &lse.handle, &neg_lse, &delta];
    tile.delta().launch(client, (stats / 8) as u32, vec![], &buffers, scalars.clone());

    let grads = [shape.query(shape.dk), shape.key(shape.dk), shape.key(shape.dv)].map(|dims| raw::empty(&q, &dims, shape.elem));
    let [grad_q, grad_k, grad_v] = &grads;
    let inputs = [&q.handle, &k.handle, &v.handle, &grad.handle, &neg_lse, &delta];
    let mut buffers = inputs.to_vec();
    buffers.push(&grad_q.handle);
    buffers.extend(ranges.of_queries());
    let grid = shape.batch * shape.heads * shape.sq.div_ceil(tile.rows());
    tile.grad_q().launch(client, grid as u32, vec![], &buffers, scalars.clone());

    let mut buffers = inputs.to_vec();
    buffers.extend([&grad_k.handle, &grad_v.handle]);
    buffers.extend(ranges.all());
    let grid = shape.batch * shape.kv_heads * shape.skv.div_ceil(tile.rows());
    for kernel in tile.grad_kv() {
        kernel.launch(client, grid as u32, vec![], &buffers, scalars.clone());
    }
    let grad_sink = sink.map(|sink| sink_gradient(&sink, &neg_lse, &delta, &shape, scalars));
    (grads, grad_sink)
}

/// Kernel variants for compile checks without a GPU.
#[cfg(test)]
pub(in crate::kernels) fn variants() -> Vec<RawKernel> {
    let sizes = [
        (128, 128, DType::BF16),
        (192, 128, DType::F16),
        (256, 256, DType::F32),
        (3, 5, DType::F32),
    ];
    let tiles = sizes.map(|(dk, dv, elem)| Tile::new(dk, dv, elem, usize::MAX).expect("a tile"));
    let mut all = vec![super::ranges::kernel(), super::sink_kernel()];
    for tile in tiles {
        all.extend([tile.forward(), tile.delta(), tile.grad_q()]);
        all.extend(tile.grad_kv());
    }
    all
}
