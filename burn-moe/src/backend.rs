//! The concrete backend, chosen once by feature so that models are compiled once.
//!
//! Without GPU features this is Flex, Burn's CPU backend in pure Rust.

use burn::backend::Autodiff;
use burn_ep_backend::EpBackend;
use burn_flex::Flex;

/// Backend for training.
pub type Train = EpBackend<Autodiff<Flex>>;
/// Backend for evaluation and generation: what [`Train`] records gradients over.
pub type Infer = EpBackend<Flex>;
/// Device of both.
pub type Device = burn::tensor::Device<Train>;
