//! GPU kernels. `cube/` holds portable kernels in CubeCL, `mamba/` CUDA C++ for compute capability 8.0 and later, `hopper/`
//! CUDA C++ for 9.0 (sources in `kernels/mamba/` and `kernels/hopper/`), which `raw.rs` launches on CubeCL's own stream and
//! memory. `backends/cuda.rs` chooses.

pub mod attention;
pub mod cube;
pub mod hopper;
pub mod mamba;
#[cfg(test)]
mod nvrtc;
pub mod raw;
