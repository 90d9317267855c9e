//! DeepSeek-V3 (`model_type = "deepseek_v3"`) and what shares its architecture: attention over compressed keys and values,
//! dense layers first, then SwiGLU experts with shared ones beside them.
//!
//! | checkpoint | `model_type` | what differs |
//! | --- | --- | --- |
//! | DeepSeek-V3, R1, V3.1; Moonlight | `deepseek_v3` | sigmoid router with correction bias, groups by their two best experts |
//! | Kimi K2 | `kimi_k2` | the same under another name |
//! | GLM-4.7-Flash | `glm4_moe_lite` | the same with a list of dense and sparse layers |
//! | DeepSeek-V2, V2-Lite | `deepseek_v2` | softmax router, groups by their best expert or none |

mod config;
#[cfg(test)]
mod config_tests;
mod init;
mod model;
mod weights;

pub use config::{DeepseekV3Config, Generation};
pub use model::{Block, DeepseekV3};
pub use weights::weight_map;
