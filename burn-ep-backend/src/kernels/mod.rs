//! GPU kernels. `hopper/` holds CUDA C++ for compute capability 9.0 (sources in `kernels/hopper/`), launched through
//! CubeCL's own stream and memory; everything else falls back to the reference.

pub mod cube;
pub mod hopper;
pub mod raw;
