//! Initial values drawn on the device (`kernels/cuda/init.cu`): billions of parameters in a fraction of a second, equal to the
//! host's up to the rounding of a logarithm, a sine and a cosine in double precision.

use burn_backend::{DType, FloatDType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};

use super::raw::{CudaTensor, RawKernel, multiprocessors};
use crate::init::{Init, InitDesc};

const SOURCE: &str = include_str!("../../kernels/cuda/init.cu");
const ENTRY: &str = "init_values";
const THREADS: u32 = 256;

/// Kind, scale and the elements that are zero, or None for the short forms that the host makes.
fn settings(desc: &InitDesc) -> Option<(u64, f64, [usize; 2])> {
    let (constant, normal, uniform) = (0, 1, 2);
    Some(match desc.init {
        Init::Zeros => (constant, 0.0, [0, 0]),
        Init::Ones => (constant, 1.0, [0, 0]),
        Init::Normal { std } => (normal, std, [0, 0]),
        Init::NormalWithZeroRow { std, row } => (normal, std, [row * desc.row_len, (row + 1) * desc.row_len]),
        Init::Uniform { bound } => (uniform, bound, [0, 0]),
        Init::LogCount | Init::SoftplusInverse { .. } => return None,
    })
}

fn kernel(dtype: DType) -> Option<RawKernel> {
    let out = match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => return None,
    };
    let source = format!("#define OUT {out}\n#define ENTRY {ENTRY}\n{SOURCE}");
    Some(RawKernel::new(source, ENTRY, THREADS, 0))
}

/// A dense tensor of initial values; None where the host has to make them.
pub fn init(desc: &InitDesc, shape: &[usize], dtype: FloatDType, device: &CudaDevice) -> Option<CudaTensor> {
    let dtype = DType::from(dtype);
    let (kind, scale, [zero_begin, zero_end]) = settings(desc)?;
    let kernel = kernel(dtype)?;
    let n = shape.iter().product::<usize>();
    if n == 0 {
        return None;
    }
    let client = CudaRuntime::client(device);
    let handle = client.empty(n * dtype.size());
    let grid = multiprocessors(&client) * 8;
    let grid = grid.min((n as u64).div_ceil(2 * u64::from(THREADS)) as u32 + 1);
    let scalars = [
        n as u64,
        desc.key,
        desc.offset as u64,
        kind,
        scale.to_bits(),
        zero_begin as u64,
        zero_end as u64,
    ];
    kernel.launch(&client, grid, vec![], &[&handle], scalars.to_vec());
    Some(CubeTensor::new_contiguous(
        client,
        device.clone(),
        shape.to_vec().into(),
        handle,
        dtype,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_compiles_for_sm_90a() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            crate::kernels::nvrtc::compile_for_sm_90a(kernel(dtype).expect("a kernel").source());
        }
        assert!(kernel(DType::F64).is_none());
    }
}
