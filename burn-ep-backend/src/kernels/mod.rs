//! GPU kernels. `cube/` holds portable kernels in CubeCL, `cuda/` CUDA C++ for any device, `mamba/` for compute capability 8.0
//! and later, `hopper/` for 9.0 (sources in `kernels/`), which `raw.rs` launches on CubeCL's own stream and memory; `vendor/`
//! runs NVIDIA's libraries, `upload.rs` brings weights to the device. `dense/` chooses for dense products, `backends/cuda.rs` for all other ops.

pub mod attention;
pub mod cube;
pub mod cuda;
pub mod dense;
pub mod hopper;
pub mod init;
pub mod mamba;
#[cfg(test)]
pub(crate) mod nvrtc;
pub mod profile;
pub mod raw;
pub mod upload;
pub mod vendor;
