//! Which backend implements which op with what. An op that is not listed runs its reference.
//!
//! | op | Flex (CPU) |
//! | --- | --- |
//! | all | see `flex.rs` |

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
mod flex;
