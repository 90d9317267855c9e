//! The Mamba-2 ops in plain CUDA C++ for compute capability 8.0 and later (sources in `kernels/mamba/`).

pub mod causal_conv1d;
pub mod ssd_scan;

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use burn_backend::{DType, TensorMetadata};

use super::raw::{CudaTensor, RawKernel, dense};

const COMMON: &str = include_str!("../../../kernels/mamba/common.cuh");

/// The kernel of these defines and sources. Putting a source together and hashing it takes longer than a launch, so it is done once.
fn kernel(entry: &'static str, defines: String, sources: &[&str], threads: usize, smem: usize) -> RawKernel {
    type Kernels = Mutex<HashMap<(&'static str, String), RawKernel>>;
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    let mut kernels = KERNELS.get_or_init(Default::default).lock().unwrap_or_else(|e| e.into_inner());
    let build = |defines: &str| RawKernel::new(defines.to_string() + COMMON + &sources.concat(), entry, threads as u32, smem);
    let key = (entry, defines);
    if let Some(kernel) = kernels.get(&key) {
        return kernel.clone();
    }
    let kernel = build(&key.1);
    kernels.entry(key).or_insert(kernel).clone()
}

/// A tensor `[B, S, ..]` whose tokens are dense inside but may lie apart: a slice of a wider projection is read in place.
struct Tokens {
    tensor: CudaTensor,
    /// Elements from one batch row to the next.
    batch: u64,
    /// Elements from one token to the next.
    token: u64,
}

impl Tokens {
    /// Copies where the axes after the second are not dense, or where rows of `vector` elements would not be aligned.
    fn new(tensor: CudaTensor, vector: usize) -> Self {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let inner: usize = shape.iter().skip(2).product();
        let mut axes = shape.iter().zip(strides.iter());
        let offset = tensor.handle.offset_start.unwrap_or(0) as usize;
        let mut aligned = offset.is_multiple_of(vector * tensor.dtype.size());
        for (size, stride) in axes.by_ref().take(2) {
            aligned &= *size == 1 || stride.is_multiple_of(vector);
        }
        let mut expected = inner;
        let mut dense_inside = true;
        for (size, stride) in axes {
            expected /= (*size).max(1);
            dense_inside &= *size == 1 || *stride == expected;
        }
        if dense_inside && aligned {
            let (batch, token) = (strides[0] as u64, strides[1] as u64);
            return Self { tensor, batch, token };
        }
        let tensor = dense(tensor);
        let seq = tensor.shape()[1];
        Self {
            tensor,
            batch: (seq * inner) as u64,
            token: inner as u64,
        }
    }
}

/// Whether the device lacks bf16 conversions and products, which some of `tensors` need.
fn lacks_bf16<'a>(tensors: impl IntoIterator<Item = &'a CudaTensor>) -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let has = |tensor: &CudaTensor| {
        *FOUND.get_or_init(|| {
            let capability = super::hopper::compute_capability(tensor.device.index as i32);
            capability.is_some_and(|(major, _)| major >= 8)
        })
    };
    tensors.into_iter().any(|tensor| tensor.dtype == DType::BF16 && !has(tensor))
}

/// Type of the document starts in CUDA C++.
fn int_type(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::I32 => Some("int"),
        DType::I64 => Some("long long"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_kernel_compiles_for_sm_90a() {
        for kernel in [super::ssd_scan::variants(), super::causal_conv1d::variants()].concat() {
            crate::kernels::nvrtc::compile_for_sm_90a(kernel.source());
        }
    }
}
