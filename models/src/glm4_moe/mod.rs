//! GLM-4-MoE (`model_type = "glm4_moe"`; GLM-4.5, 4.6, 4.7): grouped-query attention with partly rotated heads, dense layers
//! first, then SwiGLU experts behind the router of DeepSeek-V3, with shared ones beside them.

mod config;
mod init;
mod model;
mod weights;

pub use config::Glm4MoeConfig;
pub use model::{Block, Glm4Moe};
pub use weights::weight_map;
