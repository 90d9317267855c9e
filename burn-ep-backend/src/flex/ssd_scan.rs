//! Chunked selective scan on the CPU: matrix products per chunk, parallel over batch and group.
//!
//! The heads of a group share B and C, so one task owns a group: it forms `C B^T` once per chunk and sums the gradients
//! of B and C over its heads without locks. The mathematics of a chunk is in `ssd_chunk.rs`.

use std::borrow::Cow;

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use gemm::Parallelism;
use rayon::prelude::*;

use super::lanes::sigmoid;
use super::matrix::{Matrix, MatrixMut, Write, inner_parallelism, matmul};
use super::numeric::float_tensor;
use super::slice::{any_f64, f32s, interleave_heads, ints};
use super::ssd_chunk::{Adjoint, Chunk, GroupRows, HeadRows};
use crate::backend::{SsdGrads, SsdOutPrim, SsdPrim};
use crate::desc::SsdDesc;
use crate::reference;

pub(crate) fn ssd_scan(input: SsdPrim<Flex>, desc: &SsdDesc) -> SsdOutPrim<Flex> {
    if needs_reference(&input) {
        return reference::ssd_scan::ssd_scan::<Flex>(input, desc);
    }
    let scan = Scan::new(&input, desc);
    let Sizes {
        batch, seq, heads, p, n, ..
    } = scan.sizes;
    let groups: Vec<_> = scan.tasks().map(|(b, g)| scan.forward_group(b, g)).collect();
    let (y, states): (Vec<_>, Vec<_>) = groups.into_iter().flatten().unzip();
    SsdOutPrim {
        y: float_tensor(interleave_heads(&y, batch, seq, p), [batch, seq, heads, p], input.x.dtype()),
        final_state: float_tensor(states.concat(), [batch, heads, p, n], DType::F32),
    }
}

pub(crate) fn ssd_scan_backward(grad_y: FlexTensor, input: SsdPrim<Flex>, desc: &SsdDesc) -> SsdGrads<Flex> {
    if needs_reference(&input) || any_f64([&grad_y]) {
        return reference::ssd_scan::ssd_scan_backward::<Flex>(grad_y, input, desc);
    }
    let scan = Scan::new(&input, desc);
    let Sizes {
        batch,
        seq,
        heads,
        groups,
        p,
        n,
        ..
    } = scan.sizes;
    let dy_bshp = f32s(&grad_y);
    let grads: Vec<GroupGrads> = scan.tasks().map(|(b, g)| scan.backward_group(&dy_bshp, b, g)).collect();

    let (mut dx, mut ddt, mut db, mut dc) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut da_h, mut dd_h, mut dbias_h) = (vec![0.0; heads], vec![0.0; heads], vec![0.0; heads]);
    for (task, group) in grads.into_iter().enumerate() {
        let first = task % groups * scan.sizes.repeat();
        for (h, head) in (first..).zip(group.heads) {
            da_h[h] += head.a * scan.a_h[h];
            dd_h[h] += head.d;
            dbias_h[h] += head.dt_s.iter().sum::<f32>();
            dx.push(head.x_sp);
            ddt.push(head.dt_s);
        }
        db.push(group.b_sn);
        dc.push(group.c_sn);
    }
    SsdGrads {
        x: float_tensor(interleave_heads(&dx, batch, seq, p), [batch, seq, heads, p], input.x.dtype()),
        dt: float_tensor(interleave_heads(&ddt, batch, seq, 1), [batch, seq, heads], input.dt.dtype()),
        a_log: float_tensor(da_h, [heads], input.a_log.dtype()),
        b: float_tensor(interleave_heads(&db, batch, seq, n), [batch, seq, groups, n], input.b.dtype()),
        c: float_tensor(interleave_heads(&dc, batch, seq, n), [batch, seq, groups, n], input.c.dtype()),
        d: float_tensor(dd_h, [heads], input.d.dtype()),
        dt_bias: float_tensor(dbias_h, [heads], input.dt_bias.dtype()),
    }
}

fn needs_reference(input: &SsdPrim<Flex>) -> bool {
    let SsdPrim {
        x,
        dt,
        a_log,
        b,
        c,
        d,
        dt_bias,
        initial_state,
        ..
    } = input;
    any_f64([x, dt, a_log, b, c, d, dt_bias].into_iter().chain(initial_state))
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    seq: usize,
    heads: usize,
    groups: usize,
    p: usize,
    n: usize,
    chunk: usize,
}

impl Sizes {
    fn repeat(&self) -> usize {
        self.heads / self.groups
    }
}

/// Gradients of one head over the whole row.
struct HeadGrads {
    x_sp: Vec<f32>,
    dt_s: Vec<f32>,
    /// With respect to A, not to its logarithm.
    a: f32,
    d: f32,
}

struct GroupGrads {
    heads: Vec<HeadGrads>,
    b_sn: Vec<f32>,
    c_sn: Vec<f32>,
}

/// The inputs as f32 slices.
struct Scan<'a> {
    sizes: Sizes,
    x_bshp: Cow<'a, [f32]>,
    b_bsgn: Cow<'a, [f32]>,
    c_bsgn: Cow<'a, [f32]>,
    d_h: Cow<'a, [f32]>,
    a_h: Vec<f32>,
    /// `[B, H, S]`.
    delta: Vec<f32>,
    /// `[B, H, S]`: `d delta / d dt`, zero where the clamp is active.
    slope: Vec<f32>,
    initial_bhpn: Option<Cow<'a, [f32]>>,
    /// `[B, S]`; empty when documents are not packed.
    doc_start_bs: Vec<i64>,
    threads: Parallelism,
}

impl<'a> Scan<'a> {
    fn new(input: &'a SsdPrim<Flex>, desc: &SsdDesc) -> Self {
        let (x, b) = (input.x.layout().shape(), input.b.layout().shape());
        let sizes = Sizes {
            batch: x[0],
            seq: x[1],
            heads: x[2],
            groups: b[2],
            p: x[3],
            n: b[3],
            chunk: desc.chunk,
        };
        let (dt_bsh, bias_h) = (f32s(&input.dt), f32s(&input.dt_bias));
        let pre = (0..dt_bsh.len()).map(|at| {
            // `at` counts [B, H, S].
            let (bh, s) = (at / sizes.seq, at % sizes.seq);
            let (b, h) = (bh / sizes.heads, bh % sizes.heads);
            dt_bsh[(b * sizes.seq + s) * sizes.heads + h] + bias_h[h]
        });
        let (delta, slope) = pre
            .map(|pre| {
                let softplus = pre.max(0.0) + (-pre.abs()).exp().ln_1p();
                let clamped = softplus < desc.dt_min || softplus > desc.dt_max;
                let slope = if clamped { 0.0 } else { sigmoid(pre) };
                (softplus.max(desc.dt_min).min(desc.dt_max), slope)
            })
            .unzip();
        Self {
            x_bshp: f32s(&input.x),
            b_bsgn: f32s(&input.b),
            c_bsgn: f32s(&input.c),
            d_h: f32s(&input.d),
            a_h: f32s(&input.a_log).iter().map(|a_log| -a_log.exp()).collect(),
            delta,
            slope,
            initial_bhpn: input.initial_state.as_ref().map(f32s),
            doc_start_bs: input.doc_start_bs.as_ref().map_or(Vec::new(), ints),
            threads: inner_parallelism(sizes.batch * sizes.groups),
            sizes,
        }
    }

    fn tasks(&self) -> impl IndexedParallelIterator<Item = (usize, usize)> + use<> {
        let groups = self.sizes.groups;
        (0..self.sizes.batch * groups)
            .into_par_iter()
            .map(move |task| (task / groups, task % groups))
    }

    /// Chunks of batch row b in order.
    fn chunks(&self, b: usize) -> Vec<Chunk> {
        let seq = self.sizes.seq;
        let doc_start = self.doc_start_bs.get(b * seq..(b + 1) * seq);
        (0..seq)
            .step_by(self.sizes.chunk)
            .map(|start| Chunk::new(start, self.sizes.chunk.min(seq - start), doc_start))
            .collect()
    }

    fn head_rows(&self, b: usize, h: usize) -> HeadRows<'_> {
        let Sizes { seq, heads, p, .. } = self.sizes;
        let first = (b * heads + h) * seq;
        HeadRows {
            x: &self.x_bshp[(b * seq * heads + h) * p..],
            stride: heads * p,
            p,
            delta_s: &self.delta[first..first + seq],
            slope_s: &self.slope[first..first + seq],
            a: self.a_h[h],
            d: self.d_h[h],
        }
    }

    fn group_rows(&self, b: usize, g: usize) -> GroupRows<'_> {
        let Sizes { seq, groups, n, .. } = self.sizes;
        let first = (b * seq * groups + g) * n;
        GroupRows {
            b: &self.b_bsgn[first..],
            c: &self.c_bsgn[first..],
            stride: groups * n,
            n,
            threads: self.threads,
        }
    }

    fn initial_state(&self, b: usize, h: usize) -> Vec<f32> {
        let size = self.sizes.p * self.sizes.n;
        let first = (b * self.sizes.heads + h) * size;
        match &self.initial_bhpn {
            Some(states) => states[first..first + size].to_vec(),
            None => vec![0.0; size],
        }
    }

    fn heads_of(&self, g: usize) -> std::ops::Range<usize> {
        g * self.sizes.repeat()..(g + 1) * self.sizes.repeat()
    }

    /// Per head of the group: y `[S * P]` and the final state `[P * N]`.
    fn forward_group(&self, b: usize, g: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
        let Sizes { seq, p, .. } = self.sizes;
        let group = self.group_rows(b, g);
        let mut heads: Vec<_> = self.heads_of(g).map(|h| (vec![0.0; seq * p], self.initial_state(b, h))).collect();
        for chunk in self.chunks(b) {
            let products_qq = group.products(&chunk);
            for (h, (y_sp, state_pn)) in self.heads_of(g).zip(&mut heads) {
                let y_qp = &mut y_sp[chunk.start * p..(chunk.start + chunk.len) * p];
                self.head_rows(b, h).forward(&chunk, &group, &products_qq, state_pn, y_qp);
            }
        }
        heads
    }

    fn backward_group(&self, dy_bshp: &[f32], b: usize, g: usize) -> GroupGrads {
        let Sizes { seq, heads, p, n, .. } = self.sizes;
        let group = self.group_rows(b, g);
        let chunks = self.chunks(b);
        // State before each chunk, per head.
        let states: Vec<Vec<Vec<f32>>> = self
            .heads_of(g)
            .map(|h| {
                let mut state_pn = self.initial_state(b, h);
                let before = chunks.iter().map(|chunk| {
                    let before = state_pn.clone();
                    self.head_rows(b, h).advance(chunk, &group, &mut state_pn);
                    before
                });
                before.collect()
            })
            .collect();
        let mut adjoints: Vec<_> = self.heads_of(g).map(|_| vec![0.0; p * n]).collect();
        let mut grads = GroupGrads {
            heads: self
                .heads_of(g)
                .map(|_| HeadGrads {
                    x_sp: vec![0.0; seq * p],
                    dt_s: vec![0.0; seq],
                    a: 0.0,
                    d: 0.0,
                })
                .collect(),
            b_sn: vec![0.0; seq * n],
            c_sn: vec![0.0; seq * n],
        };
        for (index, chunk) in chunks.iter().enumerate().rev() {
            let products_qq = group.products(chunk);
            let rows = chunk.start * n..(chunk.start + chunk.len) * n;
            let (db_qn, dc_qn) = (&mut grads.b_sn[rows.clone()], &mut grads.c_sn[rows]);
            let mut weights_qq = vec![0.0; chunk.len * chunk.len];
            for (local, h) in self.heads_of(g).enumerate() {
                let head = self.head_rows(b, h);
                let head_grads = &mut grads.heads[local];
                let tokens = chunk.start..chunk.start + chunk.len;
                let (da, dd) = head.backward(
                    chunk,
                    &group,
                    &products_qq,
                    &dy_bshp[(b * seq * heads + h) * p..],
                    Adjoint {
                        state_pn: &states[local][index],
                        adjoint_pn: &mut adjoints[local],
                        weights_qq: &mut weights_qq,
                        db_qn,
                        dc_qn,
                        dx_qp: &mut head_grads.x_sp[tokens.start * p..tokens.end * p],
                        ddt_q: &mut head_grads.dt_s[tokens],
                    },
                );
                head_grads.a += da;
                head_grads.d += dd;
            }
            let weights = Matrix::new(&weights_qq, chunk.len, chunk.len, chunk.len);
            let c_rows = MatrixMut::new(dc_qn, chunk.len, n, n);
            matmul(c_rows, Write::Add, 1.0, weights, group.b_rows(chunk), self.threads);
            let b_rows = MatrixMut::new(db_qn, chunk.len, n, n);
            matmul(b_rows, Write::Add, 1.0, weights.t(), group.c_rows(chunk), self.threads);
        }
        grads
    }
}
