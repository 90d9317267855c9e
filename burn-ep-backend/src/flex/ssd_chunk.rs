//! One chunk of one head of the selective scan. Notation of `reference/ssd_scan.rs`.

use gemm::Parallelism;

use super::lanes::{dot, exp};
use super::matrix::{Matrix, MatrixMut, Write, matmul};

/// Tokens `start..start + len` of a row and what each sees.
pub(super) struct Chunk {
    pub(super) start: usize,
    pub(super) len: usize,
    /// `[Q]`: first token of the chunk that token i sees.
    first: Vec<usize>,
    /// `[Q]`: whether token i sees the state before the chunk. Always a prefix.
    carried: Vec<bool>,
}

impl Chunk {
    /// `doc_start` is that of the whole row.
    pub(super) fn new(start: usize, len: usize, doc_start: Option<&[i64]>) -> Self {
        let (first, carried) = (start..start + len)
            .map(|token| {
                let doc = doc_start.map_or(0, |doc| doc[token].max(0) as usize);
                // A start behind the token itself is not valid; read it as a document of its own.
                (doc.min(token).saturating_sub(start), doc < start.max(1))
            })
            .unzip();
        Self {
            start,
            len,
            first,
            carried,
        }
    }

    fn any_carried(&self) -> bool {
        self.carried.first().is_some_and(|&carried| carried)
    }
}

/// B and C of one group.
pub(super) struct GroupRows<'a> {
    /// Row t starts at `t * stride`.
    pub(super) b: &'a [f32],
    pub(super) c: &'a [f32],
    pub(super) stride: usize,
    pub(super) n: usize,
    pub(super) threads: Parallelism,
}

impl GroupRows<'_> {
    pub(super) fn b_rows(&self, chunk: &Chunk) -> Matrix<'_> {
        Matrix::new(&self.b[chunk.start * self.stride..], chunk.len, self.n, self.stride)
    }

    pub(super) fn c_rows(&self, chunk: &Chunk) -> Matrix<'_> {
        Matrix::new(&self.c[chunk.start * self.stride..], chunk.len, self.n, self.stride)
    }

    /// `C B^T`, `[Q * Q]`.
    pub(super) fn products(&self, chunk: &Chunk) -> Vec<f32> {
        self.product(chunk.len, chunk.len, self.c_rows(chunk), self.b_rows(chunk).t())
    }

    fn product(&self, rows: usize, cols: usize, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Vec<f32> {
        let mut out = vec![0.0; rows * cols];
        matmul(
            MatrixMut::new(&mut out, rows, cols, cols),
            Write::Replace,
            1.0,
            lhs,
            rhs,
            self.threads,
        );
        out
    }
}

/// What the backward of a chunk reads besides its inputs and what it adds to.
pub(super) struct Adjoint<'a> {
    pub(super) state_pn: &'a [f32],
    /// `dL/dS` after the chunk; on return before it.
    pub(super) adjoint_pn: &'a mut [f32],
    /// Sum over heads of `decay * dY U^T`; the caller multiplies it with B and C once per group.
    pub(super) weights_qq: &'a mut [f32],
    pub(super) db_qn: &'a mut [f32],
    pub(super) dc_qn: &'a mut [f32],
    pub(super) dx_qp: &'a mut [f32],
    pub(super) ddt_q: &'a mut [f32],
}

/// Decays of one head inside a chunk.
struct Decay {
    /// `exp(cum_i - cum_j)` where i sees j, else 0. The last row takes inputs to the chunk end.
    inside_qq: Vec<f32>,
    /// `exp(cum_i)` where i sees the state before the chunk, else 0.
    entry_q: Vec<f32>,
}

impl Decay {
    fn exit_q(&self) -> &[f32] {
        &self.inside_qq[self.inside_qq.len() - self.entry_q.len()..]
    }

    /// Decay of the carried state over the whole chunk.
    fn keep(&self) -> f32 {
        self.entry_q[self.entry_q.len() - 1]
    }
}

/// Inputs of one head of one batch row.
pub(super) struct HeadRows<'a> {
    /// Row t starts at `t * stride`.
    pub(super) x: &'a [f32],
    pub(super) stride: usize,
    pub(super) p: usize,
    pub(super) delta_s: &'a [f32],
    pub(super) slope_s: &'a [f32],
    pub(super) a: f32,
    pub(super) d: f32,
}

impl HeadRows<'_> {
    fn x_row(&self, token: usize) -> &[f32] {
        &self.x[token * self.stride..token * self.stride + self.p]
    }

    /// `cum`: sum of `A delta` from the start of the document or of the chunk, whichever is later.
    fn cumulative(&self, chunk: &Chunk) -> Vec<f32> {
        let mut sum = 0.0;
        (0..chunk.len)
            .map(|i| {
                let step = self.a * self.delta_s[chunk.start + i];
                sum = if chunk.first[i] == i { step } else { sum + step };
                sum
            })
            .collect()
    }

    fn decay(&self, chunk: &Chunk) -> Decay {
        let cum_q = self.cumulative(chunk);
        let mut inside_qq = vec![0.0; chunk.len * chunk.len];
        for (i, row) in inside_qq.chunks_exact_mut(chunk.len).enumerate() {
            let seen = chunk.first[i]..i + 1;
            for (decay, cum) in row[seen.clone()].iter_mut().zip(&cum_q[seen]) {
                *decay = exp(cum_q[i] - cum);
            }
        }
        let entry = cum_q
            .iter()
            .zip(&chunk.carried)
            .map(|(cum, &carried)| if carried { exp(*cum) } else { 0.0 });
        Decay {
            inside_qq,
            entry_q: entry.collect(),
        }
    }

    /// `u = delta x`, times `weights` if given, `[Q * P]`.
    fn inputs(&self, chunk: &Chunk, weights: Option<&[f32]>) -> Vec<f32> {
        let mut u_qp = Vec::with_capacity(chunk.len * self.p);
        for i in 0..chunk.len {
            let scale = self.delta_s[chunk.start + i] * weights.map_or(1.0, |weights| weights[i]);
            u_qp.extend(self.x_row(chunk.start + i).iter().map(|x| scale * x));
        }
        u_qp
    }

    /// `S <- keep * S + (exit * U)^T B` without the output.
    pub(super) fn advance(&self, chunk: &Chunk, group: &GroupRows<'_>, state_pn: &mut [f32]) {
        let cum_q = self.cumulative(chunk);
        let last = chunk.len - 1;
        let exit_q: Vec<f32> = (0..chunk.len)
            .map(|j| if j >= chunk.first[last] { exp(cum_q[last] - cum_q[j]) } else { 0.0 })
            .collect();
        let keep = if chunk.carried[last] { exp(cum_q[last]) } else { 0.0 };
        self.advance_by(chunk, group, &exit_q, keep, state_pn);
    }

    fn advance_by(&self, chunk: &Chunk, group: &GroupRows<'_>, exit_q: &[f32], keep: f32, state_pn: &mut [f32]) {
        let weighted_qp = self.inputs(chunk, Some(exit_q));
        state_pn.iter_mut().for_each(|s| *s *= keep);
        let weighted = Matrix::new(&weighted_qp, chunk.len, self.p, self.p);
        let state = MatrixMut::new(state_pn, self.p, group.n, group.n);
        matmul(state, Write::Add, 1.0, weighted.t(), group.b_rows(chunk), group.threads);
    }

    /// Writes y of the chunk and moves the state to its end. `products_qq` is `C B^T`.
    pub(super) fn forward(&self, chunk: &Chunk, group: &GroupRows<'_>, products_qq: &[f32], state_pn: &mut [f32], y_qp: &mut [f32]) {
        let (p, len) = (self.p, chunk.len);
        let mut decay = self.decay(chunk);
        let (exit_q, keep) = (decay.exit_q().to_vec(), decay.keep());
        for (mix, product) in decay.inside_qq.iter_mut().zip(products_qq) {
            *mix *= product;
        }
        let u_qp = self.inputs(chunk, None);
        let mixing = Matrix::new(&decay.inside_qq, len, len, len);
        let out = MatrixMut::new(y_qp, len, p, p);
        matmul(out, Write::Replace, 1.0, mixing, Matrix::new(&u_qp, len, p, p), group.threads);
        if chunk.any_carried() {
            let state = Matrix::new(state_pn, p, group.n, group.n);
            let carried_qp = group.product(len, p, group.c_rows(chunk), state.t());
            for ((y_p, carried_p), entry) in y_qp.chunks_exact_mut(p).zip(carried_qp.chunks_exact(p)).zip(&decay.entry_q) {
                add_scaled(y_p, *entry, carried_p);
            }
        }
        for (i, y_p) in y_qp.chunks_exact_mut(p).enumerate() {
            add_scaled(y_p, self.d, self.x_row(chunk.start + i));
        }
        self.advance_by(chunk, group, &exit_q, keep, state_pn);
    }

    /// Adds the gradients of the chunk (spec: chunk form of the SSD backward); returns those of A and D.
    /// `dy` starts at this head like `x`.
    pub(super) fn backward(&self, chunk: &Chunk, group: &GroupRows<'_>, products_qq: &[f32], dy: &[f32], io: Adjoint<'_>) -> (f32, f32) {
        let (p, n, len) = (self.p, group.n, chunk.len);
        let dy_rows = Matrix::new(&dy[chunk.start * self.stride..], len, p, self.stride);
        let dy_row = |i: usize| &dy[(chunk.start + i) * self.stride..][..p];
        let mut decay = self.decay(chunk);
        let (exit_q, keep) = (decay.exit_q().to_vec(), decay.keep());
        let u_qp = self.inputs(chunk, None);

        // ds_t sums what crosses step t, without cancellation: first inputs j < t that are read at i >= t.
        let mut ds_q = vec![0.0_f64; len];
        let dyu_qq = group.product(len, len, dy_rows, Matrix::new(&u_qp, len, p, p).t());
        for (i, &first) in chunk.first.iter().enumerate() {
            let seen = i * len + first..i * len + i + 1;
            let sums = ds_q[first..].iter_mut().zip(&mut io.weights_qq[seen.clone()]);
            let factors = dyu_qq[seen.clone()].iter().zip(&products_qq[seen.clone()]);
            let mut inputs_before = 0.0_f64;
            for (((ds, weight_sum), (dyu, product)), mix) in sums.zip(factors).zip(&mut decay.inside_qq[seen]) {
                *ds += inputs_before;
                let weight = *mix * dyu;
                *weight_sum += weight;
                inputs_before += f64::from(weight * product);
                *mix *= product;
            }
        }
        let mixing = Matrix::new(&decay.inside_qq, len, len, len);
        let mut du_qp = group.product(len, p, mixing.t(), dy_rows);

        // Then inputs j < t, and the carried state, that reach the chunk end and are read behind it.
        if io.adjoint_pn.iter().any(|&e| e != 0.0) {
            let adjoint = Matrix::new(io.adjoint_pn, p, n, n);
            let pulled_qp = group.product(len, p, group.b_rows(chunk), adjoint.t());
            let mut leaving = f64::from(keep * dot(io.adjoint_pn, io.state_pn));
            for j in 0..len {
                let row = j * p..(j + 1) * p;
                ds_q[j] += if j >= chunk.first[len - 1] { leaving } else { 0.0 };
                leaving += f64::from(exit_q[j] * dot(&u_qp[row.clone()], &pulled_qp[row.clone()]));
                add_scaled(&mut du_qp[row.clone()], exit_q[j], &pulled_qp[row]);
            }
            let weighted_qp = self.inputs(chunk, Some(&exit_q));
            let db = MatrixMut::new(io.db_qn, len, n, n);
            matmul(db, Write::Add, 1.0, Matrix::new(&weighted_qp, len, p, p), adjoint, group.threads);
        }
        // Last the carried state that is read at i >= t.
        io.adjoint_pn.iter_mut().for_each(|e| *e *= keep);
        if chunk.any_carried() {
            let mut weighted_qp = Vec::with_capacity(len * p);
            for (i, entry) in decay.entry_q.iter().enumerate() {
                weighted_qp.extend(dy_row(i).iter().map(|dy| entry * dy));
            }
            let weighted = Matrix::new(&weighted_qp, len, p, p);
            let pulled_qn = group.product(len, n, weighted, Matrix::new(io.state_pn, p, n, n));
            let mut entered = 0.0;
            for (i, pulled_n) in pulled_qn.chunks_exact(n).enumerate().rev().filter(|(i, _)| chunk.carried[*i]) {
                entered += f64::from(dot(&group.c[(chunk.start + i) * group.stride..][..n], pulled_n));
                ds_q[i] += entered;
                add_scaled(&mut io.dc_qn[i * n..(i + 1) * n], 1.0, pulled_n);
            }
            let adjoint = MatrixMut::new(io.adjoint_pn, p, n, n);
            matmul(adjoint, Write::Add, 1.0, weighted.t(), group.c_rows(chunk), group.threads);
        }

        let (mut da, mut dd) = (0.0_f64, 0.0_f64);
        for (i, ds) in ds_q.into_iter().enumerate() {
            let token = chunk.start + i;
            let (x_p, du_p, dy_p) = (self.x_row(token), &du_qp[i * p..(i + 1) * p], dy_row(i));
            let ddelta = f64::from(dot(x_p, du_p)) + f64::from(self.a) * ds;
            io.ddt_q[i] = ddelta as f32 * self.slope_s[token];
            da += f64::from(self.delta_s[token]) * ds;
            dd += f64::from(dot(dy_p, x_p));
            for ((dx, du), dy) in io.dx_qp[i * p..(i + 1) * p].iter_mut().zip(du_p).zip(dy_p) {
                *dx = self.delta_s[token] * du + self.d * dy;
            }
        }
        (da as f32, dd as f32)
    }
}

fn add_scaled(to: &mut [f32], scale: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += scale * from;
    }
}
