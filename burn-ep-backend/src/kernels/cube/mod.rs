//! Portable kernels in CubeCL: the default where no faster kernel fits, and the check of the faster ones.
//!
//! All of them work on dense row-major tensors, compute in fp32 and index with `usize`.

pub mod reduce;
pub mod rms_norm;

/// Threads of a cube that works on one row.
pub const ROW_UNITS: u32 = 256;
