//! Portable kernels in CubeCL: the default where no faster kernel fits, and the check of the faster ones.
//!
//! All of them work on dense row-major tensors and compute in fp32. `usize` is as wide as the kernel's address type, which
//! is 32 bits unless `address_type = "u64"` is given: every kernel here gives it.

pub mod activation;
pub mod adamw;
pub mod column_sums;
#[cfg(test)]
mod compile_check;
pub mod count;
pub mod expert_mlp;
pub mod grouped_matmul;
pub mod launch;
pub mod norm;
pub mod permute;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod route;
pub mod rows;
pub mod sort;
#[cfg(test)]
mod source;

use burn_backend::DType;

use super::raw::CudaTensor;

/// Threads that a multiprocessor is given when a kernel loops over its work.
const THREADS_PER_PROCESSOR: u32 = 1024;

/// Whether every tensor has a float type that the kernels of this folder read and write.
pub fn fits<'a>(tensors: impl IntoIterator<Item = &'a CudaTensor>) -> bool {
    tensors
        .into_iter()
        .all(|tensor| matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16))
}

/// Elements of the widest vector access (16 bytes of fp32) that divides all of `widths`.
fn vector_size(widths: &[usize]) -> usize {
    [4, 2]
        .into_iter()
        .find(|vector| widths.iter().all(|width| width.is_multiple_of(*vector)))
        .unwrap_or(1)
}
