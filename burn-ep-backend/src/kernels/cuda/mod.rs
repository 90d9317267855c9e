//! CUDA C++ kernels for any device (sources in `kernels/cuda/`), around the products of `vendor/`: the vocabulary loss, the
//! embedding and its gradient, scaling by a number on the device; AdamW with 8-bit moments; and the norm of every head with the
//! rotary embedding.

pub mod adamw8;
pub mod cross_entropy;
pub mod embedding;
pub mod norm_rope;

use burn_backend::DType;

use super::raw::RawKernel;

const ELEMENT: &str = include_str!("../../../kernels/cuda/element.cuh");

/// Whether the kernels of this folder read and write the dtype.
fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16 | DType::F32)
}

/// Whether the kernels of this folder read the integers.
fn is_index(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64)
}

/// The kernel of one source file for these dtypes, with further defines.
fn kernel(source: &str, entry: &'static str, float: DType, index: DType, defines: &str, threads: u32) -> RawKernel {
    let elem = match float {
        DType::BF16 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let index64 = u8::from(index == DType::I64);
    let defines = format!("#define ELEM {elem}\n#define INDEX64 {index64}\n#define ENTRY {entry}\n{defines}");
    RawKernel::new(defines + ELEMENT + source, entry, threads, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_compiles_for_sm_90a() {
        for float in [DType::BF16, DType::F16, DType::F32] {
            for kernel in adamw8::variants(float).into_iter().chain(norm_rope::variants(float)) {
                crate::kernels::nvrtc::compile_for_sm_90a(kernel.source());
            }
            for index in [DType::I32, DType::I64] {
                let kernels = [cross_entropy::variants(float, index), embedding::variants(float, index)].concat();
                assert_eq!(kernels.len(), 7);
                for kernel in kernels {
                    crate::kernels::nvrtc::compile_for_sm_90a(kernel.source());
                }
            }
        }
    }
}
