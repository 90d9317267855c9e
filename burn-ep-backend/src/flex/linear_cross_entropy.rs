//! Cross entropy of the vocabulary projection. Only counted rows are computed; logits exist for one chunk at a time.

use burn_backend::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use gemm::Parallelism;
use num_traits::Zero;
use rayon::prelude::*;

use super::matrix::{Matrix, MatrixMut, Write, matmul};
use super::numeric::{Real, dense, dims, float_tensor, wide, wide_range, with_real};
use super::slice::ints;
use crate::backend::CrossEntropyPrim;
use crate::desc::CrossEntropyDesc;

/// Rows of logits per task.
const ROW_TILE: usize = 64;
/// Rows of the weight per product: bounds the widened copy of a bf16 weight.
const VOCAB_TILE: usize = 2048;

pub(crate) fn linear_cross_entropy(
    hidden_td: FlexTensor,
    weight_vd: FlexTensor,
    labels_t: FlexTensor,
    with_grads: bool,
    desc: &CrossEntropyDesc,
) -> CrossEntropyPrim<Flex> {
    let labels = ints(&labels_t);
    with_real!(hidden_td.dtype(), A => {
        let (hidden, weight) = (dense(hidden_td), dense(weight_vd));
        let [v, d] = dims(&weight);
        let hidden_wide = wide::<A>(&hidden);
        let counted = Counted::new(&labels, v, desc.ignore_index);
        let mut loss = if counted.outside { f64::NAN } else { 0.0 };
        let mut grads = with_grads.then(|| (vec![A::zero(); hidden_wide.len()], vec![A::zero(); v * d]));
        for chunk in counted.rows.chunks(desc.chunk) {
            let hidden_nd = gather(&hidden_wide, d, chunk);
            let mut logits_nv = vec![A::zero(); chunk.len() * v];
            loss += loss_and_logit_grads(&hidden_nd, &weight, chunk, &mut logits_nv, with_grads);
            if let Some((grad_hidden, grad_weight)) = &mut grads {
                add_weight_grad(grad_weight, &logits_nv, &hidden_nd, v, d);
                let grad_nd = hidden_grad(&logits_nv, &weight, chunk.len());
                for (row, grad) in chunk.iter().zip(grad_nd.chunks(d.max(1))) {
                    grad_hidden[row.index * d..(row.index + 1) * d].copy_from_slice(grad);
                }
            }
        }
        CrossEntropyPrim {
            loss_sum: float_tensor(vec![A::of(loss)], [1], A::DTYPE),
            grads: grads.map(|(grad_hidden, grad_weight)| {
                (
                    float_tensor(grad_hidden, hidden.shape(), hidden.dtype()),
                    float_tensor(grad_weight, weight.shape(), weight.dtype()),
                )
            }),
        }
    })
}

/// A row that counts.
struct Row {
    index: usize,
    label: usize,
}

struct Counted {
    rows: Vec<Row>,
    /// A label was neither in the vocabulary nor `ignore_index`: the loss is NaN, the row gets no gradient.
    outside: bool,
}

impl Counted {
    fn new(labels: &[i64], vocabulary: usize, ignore_index: i64) -> Self {
        let mut counted = Self {
            rows: Vec::new(),
            outside: false,
        };
        for (index, &label) in labels.iter().enumerate().filter(|&(_, &label)| label != ignore_index) {
            match usize::try_from(label) {
                Ok(label) if label < vocabulary => counted.rows.push(Row { index, label }),
                _ => counted.outside = true,
            }
        }
        counted
    }
}

fn gather<A: Real>(hidden_td: &[A], d: usize, rows: &[Row]) -> Vec<A> {
    rows.iter()
        .flat_map(|row| &hidden_td[row.index * d..(row.index + 1) * d])
        .copied()
        .collect()
}

/// Sum of `-log p(label)`; turns the logits into their gradient `p - [label]` when asked to.
fn loss_and_logit_grads<A: Real>(hidden_nd: &[A], weight_vd: &FlexTensor, rows: &[Row], logits_nv: &mut [A], with_grads: bool) -> f64 {
    let [v, d] = dims(weight_vd);
    let losses: Vec<f64> = logits_nv
        .par_chunks_mut(ROW_TILE * v)
        .zip(hidden_nd.par_chunks((ROW_TILE * d).max(1)))
        .zip(rows.par_chunks(ROW_TILE))
        .map(|((logits_nv, hidden_nd), rows)| {
            let n = rows.len();
            for first in (0..v).step_by(VOCAB_TILE) {
                let columns = VOCAB_TILE.min(v - first);
                let weight = wide_range::<A>(weight_vd, first * d..(first + columns) * d);
                let out = MatrixMut::new(&mut logits_nv[first..], n, columns, v);
                let (hidden, weight) = (Matrix::new(hidden_nd, n, d, d), Matrix::new(&weight, columns, d, d).t());
                matmul(out, Write::Replace, A::of(1.0), hidden, weight, Parallelism::None);
            }
            let rows = logits_nv.chunks_mut(v).zip(rows);
            rows.map(|(logits, row)| row_loss(logits, row.label, with_grads)).sum::<f64>()
        })
        .collect();
    losses.into_iter().sum()
}

/// `-log p(label)` of one row; the logits turn into `p - [label]`, or into scratch without gradients.
fn row_loss<A: Real>(logits: &mut [A], label: usize, with_grads: bool) -> f64 {
    let max = logits.iter().copied().fold(A::neg_infinity(), A::max);
    let at_label = logits[label] - max;
    logits.iter_mut().for_each(|z| *z = (*z - max).lane_exp());
    let sum = A::sum(logits);
    if with_grads {
        let inverse = A::one() / sum;
        logits.iter_mut().for_each(|z| *z = *z * inverse);
        logits[label] += -A::one();
    }
    sum.as_f64().ln() - at_label.as_f64()
}

/// `grad_weight += grad_logits^T · hidden`.
fn add_weight_grad<A: Real>(grad_vd: &mut [A], grad_nv: &[A], hidden_nd: &[A], v: usize, d: usize) {
    let n = grad_nv.len() / v;
    grad_vd.par_chunks_mut((ROW_TILE * d).max(1)).enumerate().for_each(|(tile, out)| {
        let columns = out.len() / d;
        let grad = Matrix::new(&grad_nv[tile * ROW_TILE..], n, columns, v).t();
        let out = MatrixMut::new(out, columns, d, d);
        matmul(out, Write::Add, A::one(), grad, Matrix::new(hidden_nd, n, d, d), Parallelism::None);
    });
}

/// `grad_logits · weight`.
fn hidden_grad<A: Real>(grad_nv: &[A], weight_vd: &FlexTensor, n: usize) -> Vec<A> {
    let [v, d] = dims(weight_vd);
    let mut grad_nd = vec![A::zero(); n * d];
    grad_nd
        .par_chunks_mut((ROW_TILE * d).max(1))
        .zip(grad_nv.par_chunks(ROW_TILE * v))
        .for_each(|(out, grad_nv)| {
            let n = grad_nv.len() / v;
            for first in (0..v).step_by(VOCAB_TILE) {
                let columns = VOCAB_TILE.min(v - first);
                let weight = wide_range::<A>(weight_vd, first * d..(first + columns) * d);
                let grad = Matrix::new(&grad_nv[first..], n, columns, v);
                let out = MatrixMut::new(out, n, d, d);
                matmul(
                    out,
                    Write::Add,
                    A::one(),
                    grad,
                    Matrix::new(&weight, columns, d, d),
                    Parallelism::None,
                );
            }
        });
    grad_nd
}
