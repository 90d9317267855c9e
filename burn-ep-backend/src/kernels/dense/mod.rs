//! Dense products of CUDA tensors: any strides and batches without copies where a library or kernel can read them.
//!
//! [`route`] says which implementation runs a product, [`layout`] how the operands lie in memory.

pub mod layout;
pub mod route;

use burn_backend::{DType, TensorMetadata};
use cubecl::zspace::metadata::Metadata;

use super::hopper;
use super::raw::{self, CudaTensor, dense};
use super::vendor::{Call, MatrixLayout, Place, Product, cublaslt};
use layout::{Problem, Unreadable, View};
use route::{Candidate, Route};

/// Calls of one product that are worth a library call each; more outer batches stay with Burn.
const MAX_CALLS: usize = 64;
/// Batches of one library call (a grid dimension of its kernels).
const MAX_BATCH: usize = 65_535;

/// A product for Burn's own kernel, given back.
#[derive(Debug)]
pub struct Unrouted {
    pub lhs: CudaTensor,
    pub rhs: CudaTensor,
    pub bias: Option<CudaTensor>,
}

/// `lhs [.., M, K] · rhs [.., K, N] (+ bias [N])` with broadcast batches, in the dtype of the operands and dense; sums are
/// fp32. Err gives the operands back: Burn's kernel is to run.
pub fn matmul(lhs: CudaTensor, rhs: CudaTensor, bias: Option<CudaTensor>) -> Result<CudaTensor, Box<Unrouted>> {
    let fits = matches!(lhs.dtype, DType::BF16 | DType::F16 | DType::F32)
        && rhs.dtype == lhs.dtype
        && bias.as_ref().is_none_or(|bias| bias.dtype == lhs.dtype)
        && lhs.qparams.is_none()
        && rhs.qparams.is_none()
        && lhs.device == rhs.device;
    let problem = if fits { readable(lhs.clone(), rhs.clone()) } else { None };
    let unrouted = |bias| {
        Box::new(Unrouted {
            lhs: lhs.clone(),
            rhs: rhs.clone(),
            bias,
        })
    };
    let Some((problem, a, b)) = problem else {
        return Err(unrouted(bias));
    };
    let candidate = Candidate {
        dtype: a.dtype,
        problem: &problem,
        hopper: bias.is_none() && hopper::dense::supports(&a, &b, &problem),
    };
    for route in route::order(&candidate) {
        let out = match route {
            Route::Burn => return Err(unrouted(bias)),
            Route::Hopper if candidate.hopper => hopper::dense::matmul(&a, &b, &problem),
            Route::Hopper => continue,
            Route::CublasLt => match by_cublaslt(&a, &b, bias.as_ref(), &problem) {
                Some(out) => out,
                None => continue,
            },
        };
        tracing::trace!(?route, m = problem.m, n = problem.n, k = problem.k, dtype = ?a.dtype, "dense product");
        return Ok(out);
    }
    Err(unrouted(bias))
}

/// `x [.., In] · weight [In, Out] (+ bias [Out])`: one product over all rows.
pub fn linear(x: CudaTensor, weight: CudaTensor, bias: Option<CudaTensor>) -> Result<CudaTensor, Box<Unrouted>> {
    let mut broadcast = weight.clone();
    for _ in broadcast.meta.rank()..x.meta.rank() {
        broadcast.meta.insert(0, 1, 0);
    }
    matmul(x, broadcast, bias).map_err(|call| Box::new(Unrouted { rhs: weight, ..*call }))
}

/// Whether the last two axes are stored swapped, so that the transpose is the dense matrix.
pub fn is_transposed(tensor: &CudaTensor) -> bool {
    let rank = tensor.meta.rank();
    rank >= 2 && {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let [rows, cols] = [shape[rank - 2], shape[rank - 1]];
        rows > 1 && cols > 1 && layout::matrix([rows, cols], [strides[rank - 2], strides[rank - 1]]).is_some_and(|m| m.transposed)
    }
}

/// The product's description; operands whose strides no matrix layout has are copied first. None for shapes that are not
/// products, empty ones among them.
fn readable(mut a: CudaTensor, mut b: CudaTensor) -> Option<(Problem, CudaTensor, CudaTensor)> {
    loop {
        match layout::problem(view(&a), view(&b)) {
            Ok(problem) => return Some((problem, a, b)),
            Err(Unreadable::Lhs) => a = dense(a),
            Err(Unreadable::Rhs) => b = dense(b),
            Err(Unreadable::Shapes) => return None,
        }
    }
}

fn view(tensor: &CudaTensor) -> View<'_> {
    View {
        shape: tensor.meta.shape(),
        strides: tensor.meta.strides(),
    }
}

/// A dense tensor of the product's output shape.
pub(super) fn output(like: &CudaTensor, problem: &Problem) -> CudaTensor {
    raw::empty(like, &problem.out_shape, like.dtype)
}

fn by_cublaslt(a: &CudaTensor, b: &CudaTensor, bias: Option<&CudaTensor>, problem: &Problem) -> Option<CudaTensor> {
    let (inner, outer) = match problem.batches.split_first() {
        Some((inner, outer)) => (inner.clone(), outer),
        None => (layout::Batch::ONE, [].as_slice()),
    };
    let calls = outer.iter().map(|batch| batch.size).product::<usize>();
    if calls > MAX_CALLS || inner.size > MAX_BATCH {
        return None;
    }
    let size = a.dtype.size();
    let bias = bias.map(|bias| dense(bias.clone()));
    let offsets = layout::outer_offsets(outer);
    let aligned = |tensor: &CudaTensor, stride: fn(&layout::Batch) -> usize| {
        let start = tensor.handle.offset_start.unwrap_or(0) as usize;
        let steps = problem.batches.iter().map(|batch| stride(batch) * size);
        steps.chain([start]).fold(16, |alignment, bytes| alignment.min(alignment_of(bytes)))
    };
    let product = Product {
        dtype: a.dtype,
        tf32: route::fp32_products() == route::Fp32Products::Tf32,
        m: problem.m,
        n: problem.n,
        k: problem.k,
        batch: inner.size,
        a: MatrixLayout {
            ld: problem.a.ld,
            transposed: problem.a.transposed,
            batch_stride: inner.a,
            alignment: aligned(a, |batch| batch.a),
        },
        b: MatrixLayout {
            ld: problem.b.ld,
            transposed: problem.b.transposed,
            batch_stride: inner.b,
            alignment: aligned(b, |batch| batch.b),
        },
        c: MatrixLayout {
            ld: problem.n,
            transposed: false,
            batch_stride: inner.c,
            alignment: problem
                .batches
                .iter()
                .fold(16, |alignment, batch| alignment.min(alignment_of(batch.c * size))),
        },
        accumulate: false,
        bias: bias.is_some(),
    };
    if !cublaslt::supports(&a.device, &product) {
        return None;
    }
    let out = output(a, problem);
    let calls = offsets
        .into_iter()
        .map(|[at_a, at_b, at_c]| Call {
            product: product.clone(),
            a: Place {
                buffer: 0,
                offset: at_a * size,
            },
            b: Place {
                buffer: 1,
                offset: at_b * size,
            },
            c: Place {
                buffer: 2,
                offset: at_c * size,
            },
            bias: bias.as_ref().map(|_| Place { buffer: 3, offset: 0 }),
        })
        .collect();
    let buffers = [Some(a), Some(b), Some(&out), bias.as_ref()];
    let buffers = buffers
        .into_iter()
        .flatten()
        .map(|tensor| tensor.handle.clone().binding())
        .collect();
    cublaslt::launch(&a.device, buffers, calls);
    Some(out)
}

/// Largest power of two, at most 16, that divides a byte offset.
pub(super) fn alignment_of(bytes: usize) -> usize {
    if bytes == 0 { 16 } else { 1 << bytes.trailing_zeros().min(4) }
}

/// The buffer of a tensor seen as another dense tensor.
pub(super) fn reinterpret(tensor: &CudaTensor, shape: Vec<usize>) -> CudaTensor {
    CudaTensor::new_contiguous(
        tensor.client.clone(),
        tensor.device.clone(),
        shape.into(),
        tensor.handle.clone(),
        tensor.dtype,
    )
}

/// A view of a dense matrix with its two axes swapped.
pub fn transposed(tensor: CudaTensor) -> CudaTensor {
    let [rows, cols] = tensor.shape().dims::<2>();
    let strides = tensor.meta.strides();
    let meta = Metadata::new([cols, rows], [strides[1], strides[0]]);
    CudaTensor::new(tensor.client, tensor.handle, meta, tensor.device, tensor.dtype)
}
