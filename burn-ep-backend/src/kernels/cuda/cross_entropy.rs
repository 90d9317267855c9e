//! Vocabulary projection and cross entropy: three products by cuBLASLt for each chunk of rows, one kernel between them that
//! turns the logits into the loss and, in place, into their gradient. Nothing is read back.
//!
//! The gradient of the weight is added up over the chunks in its own dtype, because an fp32 sum would be larger than all
//! logits in memory; each chunk's product and the sum with what is there are fp32 with one rounding. Twelve chunks (16k
//! tokens, 152k entries, default settings) err 1.8 times as much as the plain low-precision path, which rounds each chunk's
//! product but adds in fp32 (simulated on the CPU with random and skewed labels).

use burn_backend::{DType, TensorMetadata};
use burn_cubecl::kernel::cast;

use super::super::dense::layout::{self, Stored};
use super::super::dense::{alignment_of, route};
use super::super::raw::{CudaTensor, RawKernel, dense, empty, multiprocessors};
use super::super::vendor::{Call, MatrixLayout, Place, Product, cublaslt};
use super::{is_float, is_index, kernel};
use crate::desc::CrossEntropyDesc;

/// Rows of a chunk are a multiple of this where the limit allows: whole tiles of the products.
const TILE: usize = 128;

/// Loss `[1]` fp32 and the gradients of hidden `[T, D]` and weight `[V, D]`.
pub struct Loss {
    pub loss_sum: CudaTensor,
    pub grads: Option<(CudaTensor, CudaTensor)>,
}

/// A matrix that the library reads where it is.
struct Matrix {
    tensor: CudaTensor,
    stored: Stored,
}

impl Matrix {
    fn of(tensor: CudaTensor) -> Self {
        let stored = |tensor: &CudaTensor| {
            let strides = tensor.meta.strides();
            layout::matrix(tensor.shape().dims::<2>(), [strides[0], strides[1]])
        };
        if let Some(stored) = stored(&tensor) {
            return Self { tensor, stored };
        }
        let tensor = dense(tensor);
        let [_, ld] = tensor.shape().dims::<2>();
        Self {
            tensor,
            stored: Stored { ld, transposed: false },
        }
    }

    /// Layout and byte offset of the rows from `row` on, as the operand itself or as its transpose.
    fn rows_from(&self, row: usize, transpose: bool) -> (MatrixLayout, usize) {
        let step = if self.stored.transposed { 1 } else { self.stored.ld };
        let offset = row * step * self.tensor.dtype.size();
        let start = self.tensor.handle.offset_start.unwrap_or(0) as usize + offset;
        let layout = MatrixLayout {
            ld: self.stored.ld,
            transposed: self.stored.transposed != transpose,
            batch_stride: 0,
            alignment: alignment_of(start),
        };
        (layout, offset)
    }
}

/// Rows of logits at a time: `chunk` rows of fp32 logits in bytes, spread evenly over the tokens.
fn chunk_rows(chunk: usize, element: usize, tokens: usize) -> usize {
    let most = chunk * 4 / element;
    let even = tokens.div_ceil(tokens.div_ceil(most));
    even.next_multiple_of(TILE).min(most).min(tokens)
}

/// Buffers of the library calls, by position.
const HIDDEN: usize = 0;
const WEIGHT: usize = 1;
const LOGITS: usize = 2;
const GRAD_HIDDEN: usize = 3;
const GRAD_WEIGHT: usize = 4;

/// The products of one chunk: logits, gradient of hidden, gradient of the weight.
struct Chunk {
    first: usize,
    rows: usize,
    calls: [Call; 3],
}

struct Problem {
    hidden: Matrix,
    weight: Matrix,
    sizes: [usize; 3],
    /// Elements from one row of logits to the next.
    ld: usize,
}

impl Problem {
    fn chunk(&self, first: usize, rows: usize) -> Chunk {
        let [_, v, d] = self.sizes;
        let dtype = self.hidden.tensor.dtype;
        let output = |ld: usize, offset: usize| MatrixLayout {
            ld,
            transposed: false,
            batch_stride: 0,
            alignment: alignment_of(offset),
        };
        let logits = |transposed| MatrixLayout {
            transposed,
            ..output(self.ld, 0)
        };
        let call = |[m, n, k]: [usize; 3], a: (MatrixLayout, Place), b: (MatrixLayout, Place), c: (MatrixLayout, Place), accumulate| Call {
            product: Product {
                dtype,
                tf32: route::fp32_products() == route::Fp32Products::Tf32,
                m,
                n,
                k,
                batch: 1,
                a: a.0,
                b: b.0,
                c: c.0,
                accumulate,
                bias: false,
            },
            a: a.1,
            b: b.1,
            c: c.1,
            bias: None,
        };
        let place = |buffer, offset| Place { buffer, offset };
        let (hidden, at_hidden) = self.hidden.rows_from(first, false);
        let hidden = (hidden, place(HIDDEN, at_hidden));
        let weight = |transpose| (self.weight.rows_from(0, transpose).0, place(WEIGHT, 0));
        let at_grad = first * d * dtype.size();
        let calls = [
            call([rows, v, d], hidden, weight(true), (logits(false), place(LOGITS, 0)), false),
            call(
                [rows, d, v],
                (logits(false), place(LOGITS, 0)),
                weight(false),
                (output(d, at_grad), place(GRAD_HIDDEN, at_grad)),
                false,
            ),
            call(
                [v, d, rows],
                (logits(true), place(LOGITS, 0)),
                hidden,
                (output(d, 0), place(GRAD_WEIGHT, 0)),
                first > 0,
            ),
        ];
        Chunk { first, rows, calls }
    }
}

/// The loss, and its gradients if asked for; None where the library does not compute the products.
pub fn linear_cross_entropy(
    hidden_td: &CudaTensor,
    weight_vd: &CudaTensor,
    labels_t: &CudaTensor,
    with_grads: bool,
    desc: &CrossEntropyDesc,
) -> Option<Loss> {
    let ([t, d], [v, _]) = (hidden_td.shape().dims::<2>(), weight_vd.shape().dims::<2>());
    let dtype = hidden_td.dtype;
    let small = i32::try_from(v).is_ok() && i32::try_from(t).is_ok();
    if t * d * v == 0 || !small || !is_float(dtype) || !is_float(weight_vd.dtype) || !is_index(labels_t.dtype) {
        return None;
    }
    cublaslt::available().ok()?;
    let weight = if weight_vd.dtype == dtype {
        weight_vd.clone()
    } else {
        cast(weight_vd.clone(), dtype)
    };
    let problem = Problem {
        hidden: Matrix::of(hidden_td.clone()),
        weight: Matrix::of(weight),
        sizes: [t, v, d],
        ld: v.next_multiple_of(16 / dtype.size()),
    };
    let rows = chunk_rows(desc.chunk, dtype.size(), t);
    let chunks: Vec<Chunk> = (0..t)
        .step_by(rows)
        .map(|first| problem.chunk(first, rows.min(t - first)))
        .collect();
    let device = &hidden_td.device;
    let products = |chunk: &Chunk| chunk.calls[..if with_grads { 3 } else { 1 }].to_vec();
    if !chunks
        .iter()
        .flat_map(products)
        .all(|call| cublaslt::supports(device, &call.product))
    {
        return None;
    }

    let labels = dense(labels_t.clone());
    let logits = empty(hidden_td, &[rows, problem.ld], dtype);
    let losses = empty(hidden_td, &[t], DType::F32);
    let grads = with_grads.then(|| (empty(hidden_td, &[t, d], dtype), empty(hidden_td, &[v, d], dtype)));
    let tensors = [&problem.hidden.tensor, &problem.weight.tensor, &logits];
    let tensors = tensors
        .into_iter()
        .chain(grads.iter().flat_map(|(hidden, weight)| [hidden, weight]));
    let buffers: Vec<_> = tensors.map(|tensor| tensor.handle.clone().binding()).collect();
    let rows_kernel = rows_kernel(dtype, labels.dtype);
    for chunk in chunks {
        let [logits_call, grad_calls @ ..] = chunk.calls;
        cublaslt::launch(device, buffers.clone(), vec![logits_call]);
        let scalars = vec![
            v as u64,
            problem.ld as u64,
            chunk.first as u64,
            desc.ignore_index as u64,
            u64::from(with_grads),
        ];
        let arguments = [&logits.handle, &labels.handle, &losses.handle];
        rows_kernel.launch(&logits.client, chunk.rows as u32, vec![], &arguments, scalars);
        if with_grads {
            cublaslt::launch(device, buffers.clone(), grad_calls.to_vec());
        }
    }
    let grads = grads.map(|(hidden, weight)| {
        let weight = if weight_vd.dtype == dtype {
            weight
        } else {
            cast(weight, weight_vd.dtype)
        };
        (hidden, weight)
    });
    Some(Loss {
        loss_sum: sum(&losses),
        grads,
    })
}

/// Whether [`scale`] runs here.
pub fn supports_scale(x: &CudaTensor, factor: &CudaTensor) -> bool {
    x.shape().num_elements() > 0 && is_float(x.dtype) && factor.dtype == DType::F32
}

/// `x * factor [1]` in fp32, rounded once to the dtype of x; in place if nobody else holds x.
pub fn scale(x: CudaTensor, factor: &CudaTensor) -> CudaTensor {
    let elements = x.shape().num_elements();
    let x = dense(x);
    let out = if x.can_mut() {
        x.clone()
    } else {
        empty(&x, x.meta.shape(), x.dtype)
    };
    let grid = (multiprocessors(&x.client) * 4).min(elements.div_ceil(512) as u32);
    let buffers = [&x.handle, &factor.handle, &out.handle];
    scale_kernel(x.dtype).launch(&x.client, grid, vec![], &buffers, vec![elements as u64]);
    out
}

/// Sum of a dense fp32 vector, `[1]`.
fn sum(x: &CudaTensor) -> CudaTensor {
    let out = empty(x, &[1], DType::F32);
    let elements = x.shape().num_elements() as u64;
    sum_kernel().launch(&x.client, 1, vec![], &[&x.handle, &out.handle], vec![elements]);
    out
}

fn rows_kernel(float: DType, index: DType) -> RawKernel {
    let source = include_str!("../../../kernels/cuda/cross_entropy.cu");
    kernel(source, "cross_entropy_rows", float, index, "", 1024)
}

fn scale_kernel(float: DType) -> RawKernel {
    kernel(include_str!("../../../kernels/cuda/scale.cu"), "scale", float, DType::I32, "", 512)
}

fn sum_kernel() -> RawKernel {
    kernel(
        include_str!("../../../kernels/cuda/sum.cu"),
        "sum",
        DType::F32,
        DType::I32,
        "",
        1024,
    )
}

/// Every kernel of this file for these dtypes.
pub fn variants(float: DType, index: DType) -> Vec<RawKernel> {
    vec![rows_kernel(float, index), scale_kernel(float), sum_kernel()]
}

#[cfg(test)]
mod tests {
    use super::chunk_rows;

    #[test]
    fn chunks_are_even_and_within_the_limit() {
        // 704 rows of fp32 are 1408 of bf16: twelve chunks of 16k tokens
        assert_eq!(chunk_rows(704, 2, 16_384), 1408);
        assert_eq!(chunk_rows(704, 4, 16_384), 704);
        assert_eq!(chunk_rows(704, 2, 1500), 768);
        assert_eq!(chunk_rows(16, 2, 37), 32);
        assert_eq!(chunk_rows(1, 4, 5), 1);
        assert_eq!(chunk_rows(100, 2, 3), 3);
        for (chunk, tokens) in [(1, 1), (3, 1000), (512, 4096), (704, 16_384), (704, 100_000)] {
            let rows = chunk_rows(chunk, 2, tokens);
            assert!(rows >= 1 && rows <= 2 * chunk && rows <= tokens);
        }
    }
}
