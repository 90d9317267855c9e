//! Attention on the CPU, a block of queries at a time: `O(block * Skv)` scores in memory per head.
//!
//! The backward recomputes probabilities from the log-sum-exp (Dao 2023, "FlashAttention-2").

use std::ops::Range;

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use gemm::Parallelism;
use rayon::prelude::*;

use super::attention_mask::Visible;
use super::lanes::{dot, exp, sum};
use super::matrix::{Matrix, MatrixMut, Write, inner_parallelism, matmul};
use super::numeric::float_tensor;
use super::slice::{any_f64, f32s, interleave_heads};
use crate::backend::{AttentionGrads, AttentionMaskPrim, AttentionPrim};
use crate::desc::AttentionDesc;
use crate::reference;

/// Queries per block.
const BLOCK: usize = 64;

pub(crate) fn attention(
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    sink: Option<FlexTensor>,
    mask: &AttentionMaskPrim<Flex>,
    desc: &AttentionDesc,
) -> AttentionPrim<Flex> {
    if any_f64([&q, &k, &v].into_iter().chain(&sink)) {
        return reference::attention::attention::<Flex>(q, k, v, sink, mask, desc);
    }
    let sizes = Sizes::of(&q, &k, &v);
    let visible = Visible::new([sizes.batch, sizes.sq, sizes.skv], mask, desc);
    let (q32, k32, v32) = (f32s(&q), f32s(&k), f32s(&v));
    let sink_h = sink.as_ref().map(f32s);
    let tasks = sizes.batch * sizes.heads;
    let threads = inner_parallelism(tasks);
    let (heads, lses): (Vec<_>, Vec<_>) = (0..tasks)
        .into_par_iter()
        .map(|task| {
            let (b, h) = (task / sizes.heads, task % sizes.heads);
            let head = Head {
                sizes: &sizes,
                visible: &visible,
                b,
                q: sizes.query_head(&q32, b, h, sizes.dk),
                k: sizes.key_head(&k32, b, h / sizes.repeat(), sizes.dk),
                v: sizes.key_head(&v32, b, h / sizes.repeat(), sizes.dv),
                sink: sink_h.as_ref().map(|sink_h| sink_h[h]),
                scale: desc.scale,
                threads,
            };
            head.forward()
        })
        .unzip();
    let Sizes {
        batch, sq, heads: h, dv, ..
    } = sizes;
    AttentionPrim {
        out_bshd: float_tensor(interleave_heads(&heads, batch, sq, dv), [batch, sq, h, dv], q.dtype()),
        lse_bhs: float_tensor(lses.concat(), [batch, h, sq], DType::F32),
    }
}

pub(crate) fn attention_backward(
    grad: FlexTensor,
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    sink: Option<FlexTensor>,
    mask: &AttentionMaskPrim<Flex>,
    out: &AttentionPrim<Flex>,
    desc: &AttentionDesc,
) -> AttentionGrads<Flex> {
    if any_f64([&grad, &q, &k, &v, &out.out_bshd, &out.lse_bhs].into_iter().chain(&sink)) {
        return reference::attention::attention_backward::<Flex>(grad, q, k, v, sink, mask, out, desc);
    }
    let sizes = Sizes::of(&q, &k, &v);
    let visible = Visible::new([sizes.batch, sizes.sq, sizes.skv], mask, desc);
    let (q32, k32, v32) = (f32s(&q), f32s(&k), f32s(&v));
    let (grad32, out32, lse32) = (f32s(&grad), f32s(&out.out_bshd), f32s(&out.lse_bhs));
    let sink_h = sink.as_ref().map(f32s);
    let tasks = sizes.batch * sizes.kv_heads;
    let threads = inner_parallelism(tasks);
    // One task per key head, so that the sum over its query heads needs no locks and has a fixed order.
    let groups: Vec<GroupGrads> = (0..tasks)
        .into_par_iter()
        .map(|task| {
            let (b, kv_head) = (task / sizes.kv_heads, task % sizes.kv_heads);
            let mut grads = GroupGrads {
                q: Vec::with_capacity(sizes.repeat()),
                k: vec![0.0; sizes.skv * sizes.dk],
                v: vec![0.0; sizes.skv * sizes.dv],
                sink: Vec::with_capacity(sizes.repeat()),
            };
            for h in kv_head * sizes.repeat()..(kv_head + 1) * sizes.repeat() {
                let head = Head {
                    sizes: &sizes,
                    visible: &visible,
                    b,
                    q: sizes.query_head(&q32, b, h, sizes.dk),
                    k: sizes.key_head(&k32, b, kv_head, sizes.dk),
                    v: sizes.key_head(&v32, b, kv_head, sizes.dv),
                    sink: sink_h.as_ref().map(|sink_h| sink_h[h]),
                    scale: desc.scale,
                    threads,
                };
                let first = (b * sizes.heads + h) * sizes.sq;
                head.backward(
                    sizes.query_head(&grad32, b, h, sizes.dv),
                    sizes.query_head(&out32, b, h, sizes.dv),
                    &lse32[first..first + sizes.sq],
                    &mut grads,
                );
            }
            grads
        })
        .collect();

    let Sizes {
        batch,
        sq,
        skv,
        heads,
        kv_heads,
        dk,
        dv,
    } = sizes;
    let mut dsink_h = vec![0.0; heads];
    let (mut dq, mut dk_heads, mut dv_heads) = (Vec::new(), Vec::new(), Vec::new());
    for (task, group) in groups.into_iter().enumerate() {
        let first = task % kv_heads * (heads / kv_heads);
        for (sum, value) in dsink_h[first..].iter_mut().zip(group.sink) {
            *sum += value;
        }
        dq.extend(group.q);
        dk_heads.push(group.k);
        dv_heads.push(group.v);
    }
    AttentionGrads {
        q: float_tensor(interleave_heads(&dq, batch, sq, dk), [batch, sq, heads, dk], q.dtype()),
        k: float_tensor(interleave_heads(&dk_heads, batch, skv, dk), [batch, skv, kv_heads, dk], k.dtype()),
        v: float_tensor(interleave_heads(&dv_heads, batch, skv, dv), [batch, skv, kv_heads, dv], v.dtype()),
        sink: sink.map(|sink| float_tensor(dsink_h, [heads], sink.dtype())),
    }
}

struct Sizes {
    batch: usize,
    sq: usize,
    skv: usize,
    heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
}

impl Sizes {
    fn of(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> Self {
        let (q, k, v) = (q.layout().shape(), k.layout().shape(), v.layout().shape());
        Self {
            batch: q[0],
            sq: q[1],
            skv: k[1],
            heads: q[2],
            kv_heads: k[2],
            dk: q[3],
            dv: v[3],
        }
    }

    fn repeat(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// `[Sq, width]` of one head of a `[B, Sq, H, width]` slice.
    fn query_head<'a>(&self, data: &'a [f32], b: usize, h: usize, width: usize) -> Rows<'a> {
        Rows::new(data, (b * self.sq * self.heads + h) * width, width, self.heads * width)
    }

    /// `[Skv, width]` of one head of a `[B, Skv, Hkv, width]` slice.
    fn key_head<'a>(&self, data: &'a [f32], b: usize, h: usize, width: usize) -> Rows<'a> {
        Rows::new(data, (b * self.skv * self.kv_heads + h) * width, width, self.kv_heads * width)
    }
}

/// Rows of one head inside a tensor of all heads.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    fn new(data: &'a [f32], first: usize, width: usize, stride: usize) -> Self {
        Self {
            data: &data[first.min(data.len())..],
            width,
            stride,
        }
    }

    fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..i * self.stride + self.width]
    }

    fn range(&self, rows: Range<usize>) -> Matrix<'a> {
        Matrix::new(&self.data[rows.start * self.stride..], rows.len(), self.width, self.stride)
    }
}

/// Gradients of one key head and its query heads.
struct GroupGrads {
    /// `[H / Hkv][Sq * Dk]`.
    q: Vec<Vec<f32>>,
    /// `[Skv * Dk]`.
    k: Vec<f32>,
    /// `[Skv * Dv]`.
    v: Vec<f32>,
    /// `[H / Hkv]`.
    sink: Vec<f32>,
}

/// One query head and the key head it reads.
struct Head<'a> {
    sizes: &'a Sizes,
    visible: &'a Visible,
    b: usize,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    sink: Option<f32>,
    scale: f32,
    threads: Parallelism,
}

impl Head<'_> {
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let sq = self.sizes.sq;
        (0..sq).step_by(BLOCK).map(move |first| first..(first + BLOCK).min(sq))
    }

    /// Scaled scores of a block against `keys`, `[block, keys]`.
    fn scores<'s>(&self, buffer: &'s mut [f32], queries: &Range<usize>, keys: &Range<usize>) -> &'s mut [f32] {
        let scores = &mut buffer[..queries.len() * keys.len()];
        let (q, k) = (self.q.range(queries.clone()), self.k.range(keys.clone()).t());
        let out = MatrixMut::new(scores, queries.len(), keys.len(), keys.len());
        matmul(out, Write::Replace, self.scale, q, k, self.threads);
        scores
    }

    /// Sets hidden entries of the score row of query i to zero and maps the others.
    fn map_visible(&self, row: &mut [f32], i: usize, first_key: usize, map: impl Fn(f32) -> f32) {
        let seen = self.visible.range(self.b, i);
        let (start, end) = if seen.is_empty() {
            (0, 0)
        } else {
            (seen.start - first_key, seen.end - first_key)
        };
        row[..start].fill(0.0);
        row[end..].fill(0.0);
        if self.visible.all_keys() {
            row[start..end].iter_mut().for_each(|score| *score = map(*score));
        } else {
            for (j, score) in row[start..end].iter_mut().enumerate() {
                *score = if self.visible.key(self.b, seen.start + j) {
                    map(*score)
                } else {
                    0.0
                };
            }
        }
    }

    fn maximum(&self, row: &[f32], i: usize, first_key: usize) -> f32 {
        let floor = self.sink.unwrap_or(f32::NEG_INFINITY);
        let seen = self.visible.range(self.b, i);
        let visible = seen.filter(|&j| self.visible.key(self.b, j));
        visible.fold(floor, |maximum, j| maximum.max(row[j - first_key]))
    }

    /// Output `[Sq * Dv]` and log-sum-exp `[Sq]`.
    fn forward(&self) -> (Vec<f32>, Vec<f32>) {
        let Sizes { sq, skv, dv, .. } = *self.sizes;
        let mut out = vec![0.0; sq * dv];
        let mut lse = vec![0.0; sq];
        let mut buffer = vec![0.0; BLOCK.min(sq) * skv];
        for queries in self.blocks() {
            let keys = self.visible.union(self.b, queries.clone());
            let scores = self.scores(&mut buffer, &queries, &keys);
            for (local, i) in queries.clone().enumerate() {
                let row = &mut scores[local * keys.len()..(local + 1) * keys.len()];
                let maximum = self.maximum(row, i, keys.start);
                if maximum == f32::NEG_INFINITY {
                    row.fill(0.0);
                    lse[i] = f32::NEG_INFINITY;
                    continue;
                }
                self.map_visible(row, i, keys.start, |score| exp(score - maximum));
                let sink = self.sink.map_or(0.0, |sink| exp(sink - maximum));
                let denominator = sum(row) + sink;
                row.iter_mut().for_each(|p| *p /= denominator);
                lse[i] = maximum + denominator.ln();
            }
            let out = MatrixMut::new(&mut out[queries.start * dv..queries.end * dv], queries.len(), dv, dv);
            let scores = Matrix::new(scores, queries.len(), keys.len(), keys.len());
            matmul(out, Write::Replace, 1.0, scores, self.v.range(keys), self.threads);
        }
        (out, lse)
    }

    /// Adds the gradients of k and v to `grads` and appends those of q and of the sink.
    fn backward(&self, grad: Rows<'_>, out: Rows<'_>, lse: &[f32], grads: &mut GroupGrads) {
        let Sizes { sq, skv, dk, dv, .. } = *self.sizes;
        let mut dq = vec![0.0; sq * dk];
        let mut dsink = 0.0;
        let block = BLOCK.min(sq);
        let (mut score_buffer, mut dscore_buffer) = (vec![0.0; block * skv], vec![0.0; block * skv]);
        for queries in self.blocks() {
            let delta: Vec<f32> = queries.clone().map(|i| dot(grad.row(i), out.row(i))).collect();
            if let Some(sink) = self.sink {
                dsink -= queries.clone().zip(&delta).map(|(i, d)| exp(sink - lse[i]) * d).sum::<f32>();
            }
            let keys = self.visible.union(self.b, queries.clone());
            if keys.is_empty() {
                continue;
            }
            let probabilities = self.scores(&mut score_buffer, &queries, &keys);
            for (row, i) in probabilities.chunks_exact_mut(keys.len()).zip(queries.clone()) {
                self.map_visible(row, i, keys.start, |score| exp(score - lse[i]));
            }
            let probabilities = &*probabilities;
            let p = Matrix::new(probabilities, queries.len(), keys.len(), keys.len());
            let grad_block = grad.range(queries.clone());
            let dv_rows = &mut grads.v[keys.start * dv..keys.end * dv];
            matmul(
                MatrixMut::new(dv_rows, keys.len(), dv, dv),
                Write::Add,
                1.0,
                p.t(),
                grad_block,
                self.threads,
            );

            let dscores = &mut dscore_buffer[..queries.len() * keys.len()];
            let dp = MatrixMut::new(dscores, queries.len(), keys.len(), keys.len());
            matmul(dp, Write::Replace, 1.0, grad_block, self.v.range(keys.clone()).t(), self.threads);
            let rows = dscores.chunks_exact_mut(keys.len()).zip(probabilities.chunks_exact(keys.len()));
            for ((dscore_row, p_row), &delta) in rows.zip(&delta) {
                for (dscore, &p) in dscore_row.iter_mut().zip(p_row) {
                    *dscore = p * (*dscore - delta);
                }
            }
            let ds = Matrix::new(dscores, queries.len(), keys.len(), keys.len());
            let dq_rows = MatrixMut::new(&mut dq[queries.start * dk..queries.end * dk], queries.len(), dk, dk);
            matmul(dq_rows, Write::Replace, self.scale, ds, self.k.range(keys.clone()), self.threads);
            let dk_rows = MatrixMut::new(&mut grads.k[keys.start * dk..keys.end * dk], keys.len(), dk, dk);
            matmul(dk_rows, Write::Add, self.scale, ds.t(), self.q.range(queries), self.threads);
        }
        grads.q.push(dq);
        grads.sink.push(dsink);
    }
}
