//! Qwen3-MoE (`model_type = "qwen3_moe"`): attention with per-head q/k norm and rotary positions, SwiGLU experts behind
//! a softmax router, optionally dense layers in between.

mod config;
mod init;
mod model;
mod weights;

pub use config::Qwen3MoeConfig;
pub use model::{Block, FeedForward, Qwen3Moe};
pub use weights::weight_map;
