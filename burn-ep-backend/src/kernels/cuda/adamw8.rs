//! AdamW with 8-bit moments, in place.

use burn_backend::{DType, TensorMetadata};

use super::super::raw::{CudaTensor, RawKernel, dense};
use super::{is_float, kernel};
use crate::MoeBackend;
use crate::backend::{AdamW8Prim, Block8Prim};
use crate::desc::AdamWDesc;
use crate::reference::adamw8::BLOCK;

const SOURCE: &str = include_str!("../../../kernels/cuda/adamw8.cu");

/// Threads of a block; each warp has one block of moments.
const THREADS: usize = 256;

fn step_kernel(param: DType, grad: DType, master: bool, stochastic: bool) -> RawKernel {
    let stochastic = u8::from(stochastic && param == DType::BF16 && !master);
    let param = match param {
        DType::BF16 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    kernel(
        SOURCE,
        "adamw8",
        grad,
        DType::I32,
        &format!(
            "#define PARAM {param}\n#define MASTER {}\n#define STOCHASTIC {stochastic}\n",
            u8::from(master)
        ),
        THREADS as u32,
    )
}

/// Whether the kernel takes these dtypes.
pub fn supports<B>(state: &AdamW8Prim<B>, grad: &CudaTensor) -> bool
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let bytes = [&state.m.codes, &state.v.codes].iter().all(|codes| codes.dtype == DType::U8);
    let wide = [&state.m.scales, &state.v.scales].into_iter().chain(&state.master);
    bytes
        && is_float(state.param.dtype)
        && is_float(grad.dtype)
        && wide.into_iter().all(|tensor| tensor.dtype == DType::F32)
        && grad.shape().num_elements() > 0
}

/// The tensor itself where nobody else holds it, else a copy.
fn own(tensor: CudaTensor) -> CudaTensor {
    let tensor = dense(tensor);
    if tensor.can_mut() { tensor } else { dense(tensor.copy()) }
}

fn own_block<B>(block: Block8Prim<B>) -> Block8Prim<B>
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    Block8Prim {
        codes: own(block.codes),
        scales: own(block.scales),
    }
}

/// See [`MoeBackend::adamw8_step`].
pub fn step<B>(state: AdamW8Prim<B>, grad: CudaTensor, grad_scale: Option<CudaTensor>, desc: &AdamWDesc) -> AdamW8Prim<B>
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let grad = dense(grad);
    let n = grad.shape().num_elements();
    let (param, m, v) = (own(state.param), own_block::<B>(state.m), own_block::<B>(state.v));
    let master = state.master.map(own);
    let scale = grad_scale.map(|scale| dense(burn_cubecl::kernel::cast(scale, DType::F32)));
    let f = desc.factors();
    let bits = |number: f64| u64::from((number as f32).to_bits());
    let scalars = vec![
        n as u64,
        bits(f.decay),
        bits(f.take_m),
        bits(f.keep_v),
        bits(f.take_v),
        bits(f.v_root),
        bits(f.eps),
        bits(f.step_size),
        u64::from(desc.stochastic_rounding.unwrap_or(desc.step as u32)),
        u64::from(scale.is_some()),
    ];
    // The gradient stands in for what is absent; the kernel does not touch it then.
    let buffers = [
        &param.handle,
        &grad.handle,
        &m.codes.handle,
        &m.scales.handle,
        &v.codes.handle,
        &v.scales.handle,
        &master.as_ref().unwrap_or(&grad).handle,
        &scale.as_ref().unwrap_or(&grad).handle,
    ];
    let grid = n.div_ceil(BLOCK * (THREADS / 32)) as u32;
    let kernel = step_kernel(param.dtype, grad.dtype, master.is_some(), desc.stochastic_rounding.is_some());
    kernel.launch(&grad.client, grid, vec![], &buffers, scalars);
    AdamW8Prim { param, m, v, master }
}

/// Every kernel of this file for a gradient of this dtype.
pub fn variants(grad: DType) -> Vec<RawKernel> {
    let flags = [(false, false), (false, true), (true, false)];
    let kernels = |param| flags.map(|(master, stochastic)| step_kernel(param, grad, master, stochastic));
    [DType::BF16, DType::F16, DType::F32].map(kernels).concat()
}
