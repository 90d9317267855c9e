//! Dense products by the grouped kernel with one group.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use burn_backend::DType;
use cubecl::server::Handle;
use cubecl_common::stream_id::StreamId;

use super::super::dense::layout::{Problem, Stored};
use super::super::dense::{reinterpret, transposed};
use super::super::raw::CudaTensor;
use super::gemm::{self, Product};

/// Whether the kernel reads the operands where they are: bf16 on Hopper, no batch, dense matrices with rows of 16 bytes.
pub fn supports(a: &CudaTensor, b: &CudaTensor, problem: &Problem) -> bool {
    let Problem { m, n, k, .. } = *problem;
    let dense = |stored: Stored, [rows, cols]: [usize; 2]| stored.ld == if stored.transposed { rows } else { cols };
    let aligned = |tensor: &CudaTensor| tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    // widths of the stored rows: those of the output and of each operand
    let widths = match (problem.a.transposed, problem.b.transposed) {
        (false, _) => [n, k],
        (true, false) => [m, n],
        (true, true) => [m, k],
    };
    super::fits(a)
        && super::fits(b)
        && problem.batches.is_empty()
        && dense(problem.a, [m, k])
        && dense(problem.b, [k, n])
        && aligned(a)
        && aligned(b)
        && [m, n, k].iter().all(|size| i32::try_from(*size).is_ok())
        && gemm::supports(widths, 1)
}

/// The product; [`supports`] must have accepted it.
pub fn matmul(a: &CudaTensor, b: &CudaTensor, problem: &Problem) -> CudaTensor {
    let Problem { m, n, k, .. } = *problem;
    let rows = |tensor: &CudaTensor, rows: usize, cols: usize| reinterpret(tensor, vec![rows, cols]);
    let group = |tensor: &CudaTensor, rows: usize, cols: usize| reinterpret(tensor, vec![1, rows, cols]);
    let out = match (problem.a.transposed, problem.b.transposed) {
        (false, true) => gemm::grouped(Product::Forward, rows(a, m, k), group(b, n, k), one_group(a, m)),
        (false, false) => gemm::grouped(Product::GradRows, rows(a, m, k), group(b, k, n), one_group(a, m)),
        (true, false) => gemm::grouped_grad_weight(rows(a, k, m), rows(b, k, n), one_group(a, k)),
        // C^T [N, M] = B^T [N, K] · A^T [K, M], both as stored
        (true, true) => {
            let out = gemm::grouped(Product::GradRows, rows(b, n, k), group(a, k, m), one_group(a, n));
            let mut out = transposed(out);
            let rank = problem.out_shape.len();
            for _ in 2..rank {
                out.meta.insert(0, 1, m * n);
            }
            return out;
        }
    };
    reinterpret(&out, problem.out_shape.clone())
}

/// Offsets `[0, rows]` of a single group, kept for each row count and stream.
fn one_group(like: &CudaTensor, rows: usize) -> CudaTensor {
    /// Row counts kept; more different ones than this start over.
    const KEPT: usize = 4096;
    type Offsets = Mutex<HashMap<(usize, StreamId, usize), Handle>>;
    static OFFSETS: OnceLock<Offsets> = OnceLock::new();
    let mut kept = OFFSETS.get_or_init(Default::default).lock().unwrap_or_else(|e| e.into_inner());
    if kept.len() >= KEPT {
        kept.clear();
    }
    let upload = || like.client.create_from_slice(bytemuck::cast_slice(&[0i32, rows as i32]));
    let handle = kept
        .entry((like.device.index, StreamId::current(), rows))
        .or_insert_with(upload)
        .clone();
    CudaTensor::new_contiguous(like.client.clone(), like.device.clone(), vec![2].into(), handle, DType::I32)
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_group_fits_the_kernel() {
        assert!(super::gemm::supports([2048, 2048], 1));
        assert!(!super::gemm::supports([2044, 2048], 1));
    }
}
