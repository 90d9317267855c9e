//! Chunked selective scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs") on plain tensors, fp32 inside.
//!
//! Per head, with `A = -exp(a_log)`, `delta = clamp(softplus(dt + dt_bias))`, `u = delta x` and `s = A delta`:
//! `S_t = exp(s_t) S_{t-1} + u_t B_t^T` and `y_t = S_t C_t + D x_t`. Tokens whose document starts after row 0 do not see the
//! state of earlier documents; a document at row 0 continues the initial state.

use burn_backend::{
    DType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_tensor::{Bool, Int, Tensor, activation::sigmoid};

use super::prim::{Times, cast, int_tensor, primitive, wide};
use crate::backend::*;
use crate::desc::SsdDesc;

/// See [`MoeBackend::ssd_scan`].
pub fn ssd_scan<B: MoeBackend>(input: SsdPrim<B>, desc: &SsdDesc) -> SsdOutPrim<B> {
    let dtype = input.x.dtype();
    let scan = Scan::new(input, desc);
    let mut state_bhpn = scan.initial_state_bhpn.clone();
    let mut parts = Vec::new();
    for start in scan.chunk_starts() {
        let chunk = scan.chunk(start);
        parts.push(chunk.output(&state_bhpn));
        state_bhpn = chunk.next_state(state_bhpn);
    }
    let y_bhsp = Tensor::cat(parts, 2) + scan.x_bhsp * scan.d_1h11;
    SsdOutPrim {
        y: primitive(y_bhsp.swap_dims(1, 2).cast(dtype)),
        final_state: primitive(state_bhpn),
    }
}

/// See [`MoeBackend::ssd_scan_backward`]. Walks the chunks backwards with `E = dL/dS` at each chunk end.
pub fn ssd_scan_backward<B: MoeBackend>(grad_y: FloatTensor<B>, input: SsdPrim<B>, desc: &SsdDesc) -> SsdGrads<B> {
    let dtypes = Dtypes::of(&input);
    let scan = Scan::new(input, desc);
    let dy_bhsp = cast::<B, 4>(grad_y, scan.x_bhsp.dtype()).swap_dims(1, 2);

    let mut states = Vec::new();
    let mut state_bhpn = scan.initial_state_bhpn.clone();
    for start in scan.chunk_starts() {
        states.push(state_bhpn.clone());
        state_bhpn = scan.chunk(start).next_state(state_bhpn);
    }
    let mut adjoint_bhpn = Tensor::zeros_like(&scan.initial_state_bhpn);
    let (mut du, mut db, mut dc, mut ds) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (index, start) in scan.chunk_starts().enumerate().collect::<Vec<_>>().into_iter().rev() {
        let chunk = scan.chunk(start);
        let dy_bhqp = dy_bhsp.clone().narrow(2, start, chunk.len);
        let grads = chunk.backward(dy_bhqp, &states[index], adjoint_bhpn);
        adjoint_bhpn = grads.adjoint_bhpn;
        du.push(grads.u_bhqp);
        db.push(grads.b_bhqn);
        dc.push(grads.c_bhqn);
        ds.push(grads.s_bhq);
    }
    [&mut du, &mut db, &mut dc].into_iter().for_each(|parts| parts.reverse());
    ds.reverse();
    let (du_bhsp, db_bhsn, dc_bhsn) = (Tensor::cat(du, 2), Tensor::cat(db, 2), Tensor::cat(dc, 2));
    let ds_bhs = Tensor::cat(ds, 2);

    let [_, heads, _, _] = scan.x_bhsp.dims();
    let per_head = |value_bhs: Tensor<B, 3>| value_bhs.sum_dim(2).sum_dim(0).reshape([heads]);
    let a_1h1 = scan.a_1h1.clone();
    let ddelta_bhs = (scan.x_bhsp.clone() * du_bhsp.clone()).sum_dim(3).squeeze_dim::<3>(3) + ds_bhs.clone() * a_1h1.clone();
    let ddt_bhs = ddelta_bhs * scan.slope_bhs.clone();
    let da_h = per_head(scan.delta_bhs.clone() * ds_bhs) * a_1h1.reshape([heads]);
    let dd_h = per_head((dy_bhsp.clone() * scan.x_bhsp.clone()).sum_dim(3).squeeze_dim::<3>(3));
    let dx_bhsp = du_bhsp * scan.delta_bhs.clone().unsqueeze_dim::<4>(3) + dy_bhsp * scan.d_1h11.clone();
    SsdGrads {
        x: primitive(dx_bhsp.swap_dims(1, 2).cast(dtypes.x)),
        dt: primitive(ddt_bhs.clone().swap_dims(1, 2).cast(dtypes.dt)),
        a_log: primitive(da_h.cast(dtypes.a_log)),
        b: primitive(scan.sum_groups(db_bhsn).cast(dtypes.b)),
        c: primitive(scan.sum_groups(dc_bhsn).cast(dtypes.c)),
        d: primitive(dd_h.cast(dtypes.d)),
        dt_bias: primitive(per_head(ddt_bhs).cast(dtypes.dt_bias)),
    }
}

struct Dtypes {
    x: DType,
    dt: DType,
    a_log: DType,
    b: DType,
    c: DType,
    d: DType,
    dt_bias: DType,
}

impl Dtypes {
    fn of<B: MoeBackend>(input: &SsdPrim<B>) -> Self {
        Self {
            x: input.x.dtype(),
            dt: input.dt.dtype(),
            a_log: input.a_log.dtype(),
            b: input.b.dtype(),
            c: input.c.dtype(),
            d: input.d.dtype(),
            dt_bias: input.dt_bias.dtype(),
        }
    }
}

/// The inputs, wide, heads before the sequence, groups repeated to heads.
struct Scan<B: MoeBackend> {
    x_bhsp: Tensor<B, 4>,
    b_bhsn: Tensor<B, 4>,
    c_bhsn: Tensor<B, 4>,
    delta_bhs: Tensor<B, 3>,
    /// `d delta / d dt`: the sigmoid, or zero where the clamp is active.
    slope_bhs: Tensor<B, 3>,
    a_1h1: Tensor<B, 3>,
    d_1h11: Tensor<B, 4>,
    initial_state_bhpn: Tensor<B, 4>,
    doc_start_bs: Option<Tensor<B, 2, Int>>,
    groups: usize,
    chunk: usize,
}

impl<B: MoeBackend> Scan<B> {
    fn new(input: SsdPrim<B>, desc: &SsdDesc) -> Self {
        let x_bhsp = wide::<B, 4>(input.x).swap_dims(1, 2);
        let (dtype, device) = (x_bhsp.dtype(), x_bhsp.device());
        let [b, h, _, p] = x_bhsp.dims();
        let b_bsgn = cast::<B, 4>(input.b, dtype);
        let [_, _, groups, n] = b_bsgn.dims();
        let c_bsgn = cast::<B, 4>(input.c, dtype);

        let bias_1h1 = cast::<B, 1>(input.dt_bias, dtype).reshape([1, h, 1]);
        let pre_bhs = cast::<B, 3>(input.dt, dtype).swap_dims(1, 2) + bias_1h1;
        // softplus without overflow: max(x, 0) + log(1 + exp(-|x|)).
        let softplus_bhs = pre_bhs.clone().clamp_min(0.0) + pre_bhs.clone().abs().neg().exp().log1p();
        let clamped = softplus_bhs
            .clone()
            .lower_elem(desc.dt_min)
            .bool_or(softplus_bhs.clone().greater_elem(desc.dt_max));
        Self {
            b_bhsn: repeat_groups(b_bsgn, h),
            c_bhsn: repeat_groups(c_bsgn, h),
            delta_bhs: softplus_bhs.clamp(desc.dt_min, desc.dt_max),
            slope_bhs: sigmoid(pre_bhs).mask_fill(clamped, 0.0),
            a_1h1: cast::<B, 1>(input.a_log, dtype).exp().neg().reshape([1, h, 1]),
            d_1h11: cast::<B, 1>(input.d, dtype).reshape([1, h, 1, 1]),
            initial_state_bhpn: match input.initial_state {
                Some(state) => cast::<B, 4>(state, dtype),
                None => Tensor::zeros([b, h, p, n], (&device, dtype)),
            },
            doc_start_bs: input.doc_start_bs.map(|doc: IntTensor<B>| int_tensor::<B, 2>(doc)),
            groups,
            chunk: desc.chunk,
            x_bhsp,
        }
    }

    fn chunk_starts(&self) -> std::iter::StepBy<std::ops::Range<usize>> {
        (0..self.x_bhsp.dims()[2]).step_by(self.chunk)
    }

    fn chunk(&self, start: usize) -> Chunk<B> {
        let [b, h, seq, _] = self.x_bhsp.dims();
        let len = self.chunk.min(seq - start);
        let delta_bhq = self.delta_bhs.clone().narrow(2, start, len);
        let s_bhq1 = (delta_bhq.clone() * self.a_1h1.clone()).unsqueeze_dim::<4>(3);
        let (seen_bqq, carried_bq) = self.visibility(start, len);
        let dtype = delta_bhq.dtype();
        let seen_bhqq = seen_bqq.clone().float().cast(dtype).unsqueeze_dim::<4>(1).expand([b, h, len, len]);
        // Sum of s over the tokens of the same document and chunk up to i: restarts where a document does.
        let cum_bhq1 = seen_bhqq.clone().times(s_bhq1);
        let exponent_bhqq = cum_bhq1.clone() - cum_bhq1.clone().swap_dims(2, 3);
        let hidden_bhqq = seen_bqq.bool_not().unsqueeze_dim::<4>(1).expand([b, h, len, len]);
        let entry_bhq1 = cum_bhq1.exp() * carried_bq.float().cast(dtype).reshape([b, 1, len, 1]);
        Chunk {
            len,
            u_bhqp: self.x_bhsp.clone().narrow(2, start, len) * delta_bhq.unsqueeze_dim::<4>(3),
            b_bhqn: self.b_bhsn.clone().narrow(2, start, len),
            c_bhqn: self.c_bhsn.clone().narrow(2, start, len),
            decay_bhqq: exponent_bhqq.mask_fill(hidden_bhqq, f32::NEG_INFINITY).exp(),
            entry_bhq1,
            seen_bhqq,
        }
    }

    /// Which tokens j of the chunk token i sees, `[B, Q, Q]`, and whether it sees the state before the chunk, `[B, Q]`.
    fn visibility(&self, start: usize, len: usize) -> (Tensor<B, 3, Bool>, Tensor<B, 2, Bool>) {
        let [b, _, _, _] = self.x_bhsp.dims();
        let device = self.x_bhsp.device();
        let rows = Tensor::<B, 1, Int>::arange(start as i64..(start + len) as i64, &device);
        let shape = [b, len, len];
        let i_bqq = rows.clone().reshape([1, len, 1]).expand(shape);
        let j_bqq = rows.reshape([1, 1, len]).expand(shape);
        let causal = j_bqq.clone().lower_equal(i_bqq.clone());
        let doc_bq = match &self.doc_start_bs {
            Some(doc_bs) => doc_bs.clone().narrow(1, start, len).cast(j_bqq.dtype()),
            None => Tensor::zeros([b, len], (&device, j_bqq.dtype())),
        };
        // A start behind the token itself is not valid; read it as a document of its own.
        let doc_bq = doc_bq.min_pair(i_bqq.clone().narrow(2, 0, 1).squeeze_dim::<2>(2));
        let same_document = j_bqq.greater_equal(doc_bq.clone().unsqueeze_dim::<3>(2).expand(shape));
        (causal.bool_and(same_document), doc_bq.lower_elem(start.max(1) as i64))
    }

    /// Sum over the heads of each group: `[B, H, S, N]` to `[B, S, G, N]`.
    fn sum_groups(&self, grad_bhsn: Tensor<B, 4>) -> Tensor<B, 4> {
        let [b, h, s, n] = grad_bhsn.dims();
        let grouped = grad_bhsn.reshape([b, self.groups, h / self.groups, s, n]);
        grouped.sum_dim(2).squeeze_dim::<4>(2).swap_dims(1, 2)
    }
}

/// One chunk of Q tokens.
struct Chunk<B: MoeBackend> {
    len: usize,
    u_bhqp: Tensor<B, 4>,
    b_bhqn: Tensor<B, 4>,
    c_bhqn: Tensor<B, 4>,
    /// `exp(cum_i - cum_j)` where i sees j, else 0. Its last row takes inputs to the chunk end.
    decay_bhqq: Tensor<B, 4>,
    /// `exp(cum_i)` where i sees the state before the chunk, else 0. Its last entry takes that state to the chunk end.
    entry_bhq1: Tensor<B, 4>,
    /// 1 where i sees j.
    seen_bhqq: Tensor<B, 4>,
}

struct ChunkGrads<B: MoeBackend> {
    u_bhqp: Tensor<B, 4>,
    b_bhqn: Tensor<B, 4>,
    c_bhqn: Tensor<B, 4>,
    s_bhq: Tensor<B, 3>,
    /// Of the state before the chunk.
    adjoint_bhpn: Tensor<B, 4>,
}

impl<B: MoeBackend> Chunk<B> {
    fn exit_bhq1(&self) -> Tensor<B, 4> {
        self.decay_bhqq.clone().narrow(2, self.len - 1, 1).swap_dims(2, 3)
    }

    fn keep_bh11(&self) -> Tensor<B, 4> {
        self.entry_bhq1.clone().narrow(2, self.len - 1, 1)
    }

    fn mixing_bhqq(&self) -> Tensor<B, 4> {
        self.c_bhqn.clone().times(self.b_bhqn.clone().swap_dims(2, 3)) * self.decay_bhqq.clone()
    }

    /// `Y = (C B^T * decay) U + entry * (C S^T)`, without the skip.
    fn output(&self, state_bhpn: &Tensor<B, 4>) -> Tensor<B, 4> {
        let carried_bhqp = self.c_bhqn.clone().times(state_bhpn.clone().swap_dims(2, 3));
        self.mixing_bhqq().times(self.u_bhqp.clone()) + carried_bhqp * self.entry_bhq1.clone()
    }

    /// `S' = keep * S + (exit * U)^T B`.
    fn next_state(&self, state_bhpn: Tensor<B, 4>) -> Tensor<B, 4> {
        let added_bhpn = (self.u_bhqp.clone() * self.exit_bhq1()).swap_dims(2, 3).times(self.b_bhqn.clone());
        state_bhpn * self.keep_bh11() + added_bhpn
    }

    /// Gradients from `dy`, the state before the chunk and the adjoint of the state after it.
    ///
    /// Step t decays everything that crosses it, so `ds_t` sums four parts without cancellation: inputs j < t read at
    /// i >= t; the carried state read at i >= t; inputs j < t that reach the chunk end; the carried state that does.
    fn backward(&self, dy_bhqp: Tensor<B, 4>, state_bhpn: &Tensor<B, 4>, adjoint_bhpn: Tensor<B, 4>) -> ChunkGrads<B> {
        let (u_bhqp, exit_bhq1, seen_bhqq) = (self.u_bhqp.clone(), self.exit_bhq1(), self.seen_bhqq.clone());
        let weights_bhqq = dy_bhqp.clone().times(u_bhqp.clone().swap_dims(2, 3)) * self.decay_bhqq.clone();
        let from_end_bhqp = self.b_bhqn.clone().times(adjoint_bhpn.clone().swap_dims(2, 3)) * exit_bhq1.clone();
        let carried_dy_bhqp = dy_bhqp.clone() * self.entry_bhq1.clone();
        let from_state_bhqn = carried_dy_bhqp.clone().times(state_bhpn.clone());

        let eye = Tensor::<B, 2>::eye(self.len, &u_bhqp.device())
            .cast(u_bhqp.dtype())
            .unsqueeze::<4>();
        let earlier_bhqq = seen_bhqq.clone() - eye;
        let inside_bhqq = weights_bhqq.clone() * self.c_bhqn.clone().times(self.b_bhqn.clone().swap_dims(2, 3));
        let crossing_bhqq = inside_bhqq.times(earlier_bhqq.clone().swap_dims(2, 3)) * seen_bhqq.clone();
        let entered_bhq1 = (from_state_bhqn.clone() * self.c_bhqn.clone()).sum_dim(3);
        let leaving_bhq1 = (from_end_bhqp.clone() * u_bhqp.clone()).sum_dim(3);
        let through_bh11 = (adjoint_bhpn.clone() * state_bhpn.clone()).sum_dim(3).sum_dim(2) * self.keep_bh11();
        let ds_bhq1 = crossing_bhqq.sum_dim(2).swap_dims(2, 3)
            + seen_bhqq.swap_dims(2, 3).times(entered_bhq1)
            + earlier_bhqq.times(leaving_bhq1)
            + through_bh11;
        ChunkGrads {
            u_bhqp: self.mixing_bhqq().swap_dims(2, 3).times(dy_bhqp) + from_end_bhqp,
            b_bhqn: weights_bhqq.clone().swap_dims(2, 3).times(self.c_bhqn.clone()) + (u_bhqp * exit_bhq1).times(adjoint_bhpn.clone()),
            c_bhqn: weights_bhqq.times(self.b_bhqn.clone()) + from_state_bhqn,
            s_bhq: ds_bhq1.squeeze_dim::<3>(3),
            adjoint_bhpn: adjoint_bhpn * self.keep_bh11() + carried_dy_bhqp.swap_dims(2, 3).times(self.c_bhqn.clone()),
        }
    }
}

/// `[B, S, G, N]` to `[B, H, S, N]`; consecutive heads share a group.
fn repeat_groups<B: MoeBackend>(value_bsgn: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [b, s, groups, n] = value_bsgn.dims();
    let repeat = heads / groups;
    let grouped = value_bsgn.swap_dims(1, 2).unsqueeze_dim::<5>(2);
    grouped.expand([b, groups, repeat, s, n]).reshape([b, heads, s, n])
}

#[cfg(test)]
#[path = "ssd_scan_case.rs"]
mod case;
#[cfg(test)]
#[path = "ssd_scan_tests.rs"]
mod tests;
