//! Fine-tune mixture-of-experts language models with Burn, from Hugging Face checkpoint to Hugging Face checkpoint.
//!
//! The modules are listed in the order in which a batch meets them; `ARCHITECTURE.md` walks one batch through them.

pub mod backend;
pub mod batch;
pub mod checkpoint;
pub mod data;
pub mod dispatch;
pub mod error;
pub mod generate;
pub mod layers;
pub mod loss;
pub mod model;
pub mod optim;
pub mod train;

pub use error::{Error, Result};
