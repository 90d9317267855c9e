//! Decoders with softmax-routed SwiGLU experts (`model_type` `qwen3_moe`, `qwen2_moe`, `mixtral`, `olmoe`): the dense
//! decoder with a router and experts in place of the feed-forward of some or all layers. What distinguishes the families
//! is a table in `config.rs`.

mod config;
mod init;
mod model;
mod weights;

pub use config::{SparseConfig, SparseKind};
pub use model::{Block, SparseDecoder};
pub use weights::weight_map;
