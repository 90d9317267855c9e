//! GPU kernels. `cube/` holds portable kernels in CubeCL, `hopper/` CUDA C++ for compute capability 9.0 (sources in
//! `kernels/hopper/`) that `raw.rs` launches on CubeCL's own stream and memory. `backends/cuda.rs` chooses.

pub mod cube;
pub mod hopper;
#[cfg(test)]
mod nvrtc;
pub mod raw;
