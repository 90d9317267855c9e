//! Dense decoders (`model_type` `llama`, `qwen2`, `qwen3`, `mistral`): attention with rotary positions and a SwiGLU
//! feed-forward. What distinguishes the families is a table in `config.rs`.

mod config;
mod init;
mod model;
mod weights;

pub use config::{DenseConfig, DenseKind};
pub use model::{Block, DenseDecoder};
pub use weights::weight_map;
