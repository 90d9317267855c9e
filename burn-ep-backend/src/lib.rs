//! A Burn backend decorator for mixture-of-experts models.
//!
//! [`EpBackend<B>`] wraps any Burn backend that implements [`MoeBackend`]. It keeps B's own tensors,
//! delegates every Burn op, reroutes the ops Burn does slowly, and adds the ops Burn lacks.
//!
//! An op has a file of its name in up to four folders: `ops/` (public and checked), `reference/` (plain Burn
//! tensors, the default on every backend), `flex/` (CPU kernel), `autodiff/` (its backward). `backends/` says what
//! runs where.
//!
//! Shape legend of the whole crate: `B` batch, `S` sequence, `T = B*S` tokens, `D` hidden width, `V` vocabulary,
//! `E` experts, `K` experts per token, `R = T*K` routed rows, `F` expert width, `H` heads, `G` groups, `P` head size,
//! `N` state size. Tensor names carry their shape: `x_td`, `rows_rd`, `ids_tk`.

mod autodiff;
mod backend;
mod backends;
pub mod comm;
mod decorator;
mod desc;
mod device;
mod error;
mod flex;
mod init;
#[cfg(feature = "cuda")]
pub mod kernels;
pub mod ops;
mod prims;
pub mod reference;
mod scoped;
#[cfg(test)]
mod testing;
mod upload;

pub use backend::*;
#[cfg(feature = "cuda")]
pub use backends::{Cuda, FusedCuda};
pub use decorator::{EpBackend, Routing, with_routing};
pub use desc::*;
pub use device::{DeviceMemory, host_reads};
#[cfg(feature = "cuda")]
pub use device::{gpu_memory, visible_gpus};
pub use error::{OpError, Result};
pub use init::{Init, InitDesc, stream_key};
pub use upload::{Fill, host_data};
