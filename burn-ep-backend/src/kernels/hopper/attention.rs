//! Causal flash attention in bf16: forward with log-sum-exp, backward with fp32 sums.
//!
//! Head sizes 64 and 128, grouped query heads, sliding window, sink logit. The backward adds dQ (and dK, dV of grouped
//! heads) with fp32 atomics, so it is not reproducible to the last bit.

use burn_backend::{DType, TensorMetadata};

use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense, dense_map};
use crate::desc::AttentionDesc;

const COMMON: &str = include_str!("../../../kernels/hopper/attention.cuh");
const FORWARD: &str = include_str!("../../../kernels/hopper/attention_forward.cu");
const BACKWARD: &str = include_str!("../../../kernels/hopper/attention_backward.cu");
/// Rows of a query tile in the backward workspaces.
const TILE: usize = 64;

/// Sizes of one call.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Shape {
    fn of(q: &CudaTensor, k: &CudaTensor) -> Self {
        let [batch, seq, heads, head_dim] = q.shape().dims::<4>();
        let [_, _, kv_heads, _] = k.shape().dims::<4>();
        Self {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
        }
    }

    fn query(&self) -> [usize; 4] {
        [self.batch, self.seq, self.heads, self.head_dim]
    }

    fn key(&self) -> [usize; 4] {
        [self.batch, self.seq, self.kv_heads, self.head_dim]
    }

    fn tiles(&self) -> usize {
        self.batch * self.seq.div_ceil(TILE)
    }

    /// fp32 sums of dQ, dK, dV, tile by tile.
    fn workspace(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.tiles() * TILE * self.head_dim
    }

    fn scalars(&self, desc: &AttentionDesc, zeros: usize) -> Vec<u64> {
        vec![
            self.batch as u64,
            self.seq as u64,
            self.heads as u64,
            self.kv_heads as u64,
            u64::from(desc.scale.to_bits()),
            desc.window.unwrap_or(0) as u64,
            self.seq as u64,
            zeros as u64,
        ]
    }
}

/// Whether the kernels cover this call (documents, padding, other head sizes and decoding go to the reference).
pub fn supports(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor, desc: &AttentionDesc) -> bool {
    let [_, sq, h, dk] = q.shape().dims::<4>();
    let [_, skv, hkv, _] = k.shape().dims::<4>();
    let [.., dv] = v.shape().dims::<4>();
    desc.causal && desc.scale > 0.0 && sq == skv && sq > 0 && dk == dv && (dk == 64 || dk == 128) && h.is_multiple_of(hkv)
}

/// Query-tile settings of the forward kernel by head size.
#[derive(Clone, Copy)]
struct ForwardConfig {
    head_dim: usize,
    warpgroups: usize,
    stages: usize,
}

impl ForwardConfig {
    fn new(head_dim: usize) -> Self {
        if head_dim == 128 {
            Self {
                head_dim,
                warpgroups: 2,
                stages: 2,
            }
        } else {
            Self {
                head_dim,
                warpgroups: 3,
                stages: 4,
            }
        }
    }

    fn kernel(self, window: bool, sink: bool) -> RawKernel {
        let Self {
            head_dim,
            warpgroups,
            stages,
        } = self;
        let (load, math) = if warpgroups == 3 { (32, 160) } else { (24, 240) };
        let defines = format!(
            "#define FORWARD 1\n#define BACKWARD 0\n#define HD {head_dim}\n#define NWG {warpgroups}\n#define STAGES {stages}\n\
             #define PINGPONG 1\n#define SLACK 8.0f\n#define WINDOW {}\n#define SINK {}\n#define VARLEN 0\n#define PROFILE 0\n\
             #define REGS_LOAD {load}\n#define REGS_MATH {math}\n#define ENTRY attn_fwd\n",
            u32::from(window),
            u32::from(sink),
        );
        let smem = 2 * warpgroups * 64 * head_dim * 2 + 2 * stages * 128 * head_dim * 2 + 32 + 32 * stages;
        RawKernel::new(defines + COMMON + FORWARD, "attn_fwd", 128 * (warpgroups as u32 + 1), smem)
    }
}

/// Output `[B, S, H, D]` and log-sum-exp `[B, H, S]` fp32. `sink` is fp32 `[H]`.
pub fn forward(q: CudaTensor, k: CudaTensor, v: CudaTensor, sink: Option<CudaTensor>, desc: &AttentionDesc) -> (CudaTensor, CudaTensor) {
    let (q, k, v, sink) = (dense(q), dense(k), dense(v), sink.map(dense));
    let shape = Shape::of(&q, &k);
    let out = raw::empty(&q, &shape.query(), DType::BF16);
    let lse = raw::empty(&q, &[shape.batch, shape.heads, shape.seq], DType::F32);
    let map = |t: &CudaTensor, dims: [usize; 4], rows: usize| dense_map(&t.handle, &dims, &[1, rows, 1, 64], MapElem::Bf16);
    let maps = vec![
        map(&q, shape.query(), 64),
        map(&k, shape.key(), 128),
        map(&v, shape.key(), 128),
        map(&out, shape.query(), 16),
    ];
    let mut buffers = vec![&lse.handle];
    buffers.extend(sink.as_ref().map(|s| &s.handle));
    let kernel = ForwardConfig::new(shape.head_dim).kernel(desc.window.is_some(), sink.is_some());
    kernel.launch(&q.client, raw::multiprocessors(&q.client), maps, &buffers, shape.scalars(desc, 0));
    (out, lse)
}

/// The three kernels of the backward: row statistics and zeroing, the main one, fp32 sums to bf16.
struct BackwardKernels {
    prepare: RawKernel,
    main: RawKernel,
    finish: RawKernel,
}

impl BackwardKernels {
    fn new(head_dim: usize, window: bool) -> Self {
        let (q_stages, stages, bulk, load, math) = if head_dim == 128 { (3, 2, 1, 24, 240) } else { (4, 3, 0, 40, 232) };
        let source = |part: u32| {
            format!(
                "#define FORWARD 0\n#define BACKWARD {part}\n#define HD {head_dim}\n#define STAGES {stages}\n#define QSTAGES {q_stages}\n\
                 #define BULK {bulk}\n#define CHUNKS 1\n#define WINDOW {}\n#define VARLEN 0\n#define PROFILE 0\n\
                 #define REGS_LOAD {load}\n#define REGS_MATH {math}\n#define ENTRY attn_bwd\n",
                u32::from(window)
            ) + COMMON
                + BACKWARD
        };
        let smem = 4 * 128 * head_dim
            + (q_stages + stages) * (TILE * head_dim * 2 + 256 + 16)
            + 32_768
            + if bulk == 1 { 256 * head_dim } else { 0 }
            + 48;
        Self {
            prepare: RawKernel::new(source(2), "attn_bwd_pre", 256, 0),
            main: RawKernel::new(source(1), "attn_bwd", 384, smem),
            finish: RawKernel::new(source(2), "attn_bwd_post", 128, 0),
        }
    }
}

/// Gradients of q, k and v. The sink needs nothing here: its part is in `lse`.
pub fn backward(
    grad: CudaTensor,
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    out: CudaTensor,
    lse: CudaTensor,
    desc: &AttentionDesc,
) -> [CudaTensor; 3] {
    let (grad, q, k, v, out, lse) = (dense(grad), dense(q), dense(k), dense(v), dense(out), dense(lse));
    let shape = Shape::of(&q, &k);
    let client = &q.client;
    let rows = shape.heads * shape.tiles() * TILE;
    let fp32 = |n: usize| client.empty(n * 4);
    let (neg_lse, delta, sums, counter) = (fp32(rows), fp32(rows), fp32(shape.workspace()), client.empty(16));
    let grad_q = raw::empty(&q, &shape.query(), DType::BF16);
    let grad_k = raw::empty(&q, &shape.key(), DType::BF16);
    let grad_v = raw::empty(&q, &shape.key(), DType::BF16);
    let kernels = BackwardKernels::new(shape.head_dim, desc.window.is_some());
    let scalars = shape.scalars(desc, shape.workspace() / 4);
    let sms = raw::multiprocessors(client);

    let buffers = [&out.handle, &grad.handle, &lse.handle, &neg_lse, &delta, &sums, &counter];
    kernels.prepare.launch(client, sms * 16, vec![], &buffers, scalars.clone());

    let map = |t: &CudaTensor, dims: [usize; 4], rows: usize| dense_map(&t.handle, &dims, &[1, rows, 1, 64], MapElem::Bf16);
    let maps = vec![
        map(&q, shape.query(), 64),
        map(&grad, shape.query(), 64),
        map(&k, shape.key(), 128),
        map(&v, shape.key(), 128),
    ];
    kernels
        .main
        .launch(client, sms, maps, &[&neg_lse, &delta, &sums, &counter], scalars.clone());

    let buffers = [&sums, &grad_q.handle, &grad_k.handle, &grad_v.handle];
    let grid = shape.batch * shape.seq.div_ceil(TILE) * (shape.heads + 2 * shape.kv_heads);
    kernels.finish.launch(client, grid as u32, vec![], &buffers, scalars);
    [grad_q, grad_k, grad_v]
}

/// Every kernel variant this file can launch, for compile checks without a GPU.
pub fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    for head_dim in [64, 128] {
        for window in [false, true] {
            all.extend([false, true].map(|sink| ForwardConfig::new(head_dim).kernel(window, sink)));
            let BackwardKernels { prepare, main, finish } = BackwardKernels::new(head_dim, window);
            all.extend([prepare, main, finish]);
        }
    }
    all
}
