//! Dense products of CUDA tensors: any strides and batches without copies where a library or kernel can read them.
//!
//! [`route`] says which implementation runs a product, [`layout`] how the operands lie in memory.

pub mod layout;
pub mod route;

use std::sync::Once;

use burn_backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::cast;
use cubecl::zspace::metadata::Metadata;

use super::hopper;
use super::raw::{self, CudaTensor, dense};
use super::vendor::{Call, MatrixLayout, Place, Product, cublaslt};
use layout::{Problem, Unreadable, View};
use route::{Candidate, Route};

/// Most library calls for one product. More outer batches than this make the operands dense first, which merges them.
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

/// `lhs [.., M, K] · rhs [.., K, N] (+ bias [N])` with broadcast batches, in the dtype of lhs and dense; sums are fp32 (f64 for
/// f64). Err gives the operands back: Burn's kernel is to run, and a log line says why.
pub fn matmul(lhs: CudaTensor, rhs: CudaTensor, bias: Option<CudaTensor>) -> Result<CudaTensor, Box<Unrouted>> {
    match routed(&lhs, &rhs, bias.as_ref()) {
        Ok(out) => Ok(out),
        Err(reason) => {
            static SAID: Once = Once::new();
            let (lhs_shape, rhs_shape, dtype) = (lhs.meta.shape(), rhs.meta.shape(), lhs.dtype);
            SAID.call_once(|| tracing::warn!(reason, ?lhs_shape, ?rhs_shape, ?dtype, "a product runs on Burn's own kernel"));
            tracing::debug!(reason, ?lhs_shape, ?rhs_shape, ?dtype, "product on Burn's own kernel");
            Err(Box::new(Unrouted { lhs, rhs, bias }))
        }
    }
}

fn routed(lhs: &CudaTensor, rhs: &CudaTensor, bias: Option<&CudaTensor>) -> Result<CudaTensor, &'static str> {
    if !matches!(lhs.dtype, DType::BF16 | DType::F16 | DType::F32 | DType::F64) {
        return Err("dtype");
    }
    if lhs.qparams.is_some() || rhs.qparams.is_some() || lhs.device != rhs.device {
        return Err("quantised, or on two devices");
    }
    let like_lhs = |tensor: &CudaTensor| match tensor.dtype == lhs.dtype {
        true => tensor.clone(),
        false => cast(tensor.clone(), lhs.dtype),
    };
    let (problem, a, b) = readable(lhs.clone(), like_lhs(rhs)).ok_or("the shapes do not multiply, or nothing is to be multiplied")?;
    let bias = bias.map(|bias| dense(like_lhs(bias)));
    let candidate = Candidate {
        dtype: a.dtype,
        problem: &problem,
        hopper: bias.is_none() && hopper::dense::supports(&a, &b, &problem),
    };
    for route in route::order(&candidate) {
        let out = match route {
            Route::Burn => return Err("no other route, or Burn's is asked for"),
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
    Err("no other route")
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
            Ok(problem) if calls(&problem) > MAX_CALLS => {
                let batch = problem.out_shape[..problem.out_shape.len() - 2].to_vec();
                (a, b) = (dense(expanded(a, &batch)), dense(expanded(b, &batch)));
            }
            Ok(problem) => return Some((problem, a, b)),
            Err(Unreadable::Lhs) => a = dense(a),
            Err(Unreadable::Rhs) => b = dense(b),
            Err(Unreadable::Shapes) => return None,
        }
    }
}

/// Library calls for all batches: the innermost axis is one call.
fn calls(problem: &Problem) -> usize {
    let outer = problem.batches.iter().skip(1).map(|batch| batch.size).product::<usize>();
    let inner = problem.batches.first().map_or(1, |batch| batch.size.div_ceil(MAX_BATCH));
    outer * if problem.batches.len() > 1 { inner } else { 1 }
}

/// A view with these batch axes.
fn expanded(mut tensor: CudaTensor, batch: &[usize]) -> CudaTensor {
    for (axis, &size) in batch.iter().enumerate() {
        if tensor.meta.shape()[axis] != size {
            tensor.meta.shape_mut()[axis] = size;
            tensor.meta.strides_mut()[axis] = 0;
        }
    }
    tensor
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
    let size = a.dtype.size();
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
        batch: inner.size.min(MAX_BATCH),
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
    // all batches that one call may have, then the rest
    let parts: Vec<(usize, Product)> = (0..inner.size)
        .step_by(MAX_BATCH)
        .map(|first| {
            let batch = MAX_BATCH.min(inner.size - first);
            (first, Product { batch, ..product.clone() })
        })
        .collect();
    if !parts.iter().all(|(_, product)| cublaslt::supports(&a.device, product)) {
        return None;
    }
    let out = output(a, problem);
    let mut calls = Vec::with_capacity(offsets.len() * parts.len());
    for [at_a, at_b, at_c] in offsets {
        for (first, product) in &parts {
            let place = |buffer: usize, offset: usize| Place {
                buffer,
                offset: offset * size,
            };
            calls.push(Call {
                product: product.clone(),
                a: place(0, at_a + first * inner.a),
                b: place(1, at_b + first * inner.b),
                c: place(2, at_c + first * inner.c),
                bias: bias.map(|_| place(3, 0)),
            });
        }
    }
    let buffers = [Some(a), Some(b), Some(&out), bias];
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

/// Shape of `lhs [.., M, K] · rhs [.., K, N]` with broadcast batches.
pub fn product_shape(lhs: &Shape, rhs: &Shape) -> Shape {
    let rank = lhs.num_dims();
    let size = |axis: usize| match axis {
        _ if axis + 2 == rank => lhs[axis],
        _ if axis + 1 == rank => rhs[axis],
        _ => lhs[axis].max(rhs[axis]),
    };
    (0..rank).map(size).collect::<Vec<_>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_products() {
        let shape = |lhs: &[usize], rhs: &[usize]| product_shape(&lhs.to_vec().into(), &rhs.to_vec().into());
        assert_eq!(shape(&[3, 4], &[4, 5]), Shape::new([3, 5]));
        assert_eq!(shape(&[1, 7, 3, 4], &[2, 1, 4, 5]), Shape::new([2, 7, 3, 5]));
    }

    #[test]
    fn alignment_is_a_power_of_two_up_to_16() {
        assert_eq!([0, 2, 8, 12, 16, 48, 6].map(alignment_of), [16, 2, 8, 4, 16, 16, 2]);
    }
}
