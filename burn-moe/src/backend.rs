//! The concrete backend, chosen once by feature so that models are compiled once.
//!
//! Without GPU features this is Flex, Burn's CPU backend in pure Rust; with the feature `cuda` it is CubeCL's CUDA backend.

use burn::backend::Autodiff;
use burn_ep_backend::EpBackend;

#[cfg(feature = "cuda")]
use burn_ep_backend::Cuda as Base;
#[cfg(not(feature = "cuda"))]
use burn_flex::Flex as Base;

/// Name of the backend this build runs on.
pub const NAME: &str = if cfg!(feature = "cuda") { "cuda" } else { "flex" };

/// Backend for training.
pub type Train = EpBackend<Autodiff<Base>>;
/// Backend for evaluation and generation: what [`Train`] records gradients over.
pub type Infer = EpBackend<Base>;
/// Device of both.
pub type Device = burn::tensor::Device<Train>;
