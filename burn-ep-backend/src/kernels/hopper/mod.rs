//! CUDA C++ kernels for Hopper (compute capability 9.0): TMA, mbarriers, wgmma, warp specialisation, persistent grids.

pub mod attention;
pub mod dense;
pub mod experts;
pub mod gemm;

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use burn_backend::DType;
use cubecl::server::Handle;
use cubecl_common::stream_id::StreamId;

use super::raw::CudaTensor;

/// Whether the kernels of this folder may run: a Hopper device and 16-bit brain floats.
pub fn fits(tensor: &CudaTensor) -> bool {
    tensor.dtype == DType::BF16 && is_hopper(tensor)
}

/// wgmma exists on compute capability 9.0 only.
pub fn is_hopper(tensor: &CudaTensor) -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let capability = compute_capability(tensor.device.index as i32);
        tracing::info!(?capability, hopper_kernels = capability == Some((9, 0)), "CUDA device");
        capability == Some((9, 0))
    })
}

/// Major and minor number of the device; None if the driver does not say.
pub(super) fn compute_capability(ordinal: i32) -> Option<(i32, i32)> {
    use cudarc::driver::{result::device, sys::CUdevice_attribute as Attribute};
    let device = device::get(ordinal).ok()?;
    // SAFETY: `device` was returned by the driver just now; the calls only read properties.
    unsafe {
        let major = device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).ok()?;
        let minor = device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR).ok()?;
        Some((major, minor))
    }
}

/// Two zeroed counters for the work queue of a persistent kernel, one pair for each stream of each device: launches that
/// may overlap must not share them. The kernels leave them zero.
fn queue_counter(tensor: &CudaTensor) -> Handle {
    type Counters = Mutex<HashMap<(usize, StreamId), Handle>>;
    static COUNTERS: OnceLock<Counters> = OnceLock::new();
    let key = (tensor.device.index, StreamId::current());
    let mut map = COUNTERS.get_or_init(Default::default).lock().unwrap_or_else(|e| e.into_inner());
    map.entry(key)
        .or_insert_with(|| tensor.client.create_from_slice(&[0u8; 16]))
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_compiles_for_sm_90a() {
        let experts = experts::variants();
        for variants in [
            attention::variants(),
            gemm::variants(),
            experts,
            crate::kernels::attention::variants(),
        ] {
            assert!(!variants.is_empty());
            for kernel in &variants {
                crate::kernels::nvrtc::compile_for_sm_90a(kernel.source());
            }
        }
    }
}
