//! GPT-OSS (`model_type = "gpt_oss"`): attention with a learned sink per head, every second layer in a sliding window, rotary
//! positions scaled by YaRN, and in every layer clamped SwiGLU experts behind a router that takes the softmax over the chosen
//! experts only. Biases everywhere. Published in MXFP4, which is dequantised on load.

mod config;
mod init;
mod model;
mod weights;

pub use config::{GptOssConfig, LayerAttention};
pub use model::{Block, GptOss, SparseMlp};
pub use weights::weight_map;
