//! Model families for `burn-moe`: Nemotron-H (Nemotron 3), Qwen3-MoE and its relatives, GPT-OSS, DeepSeek (V2, V3, Kimi K2,
//! Moonlight), GLM-4-MoE, dense decoders.
//!
//! [`AutoModelForCausalLm::from_pretrained`] reads a Hugging Face folder of any known family. Each family is a folder of the
//! same files (see `README.md`): `config.rs` reads `config.json`, `model.rs` computes, `weights.rs` names the tensors in
//! the files, `init.rs` gives the initial values.

mod auto;
pub mod benchmark;
mod counts;
mod decoder;
pub mod deepseek_v3;
pub mod dense;
mod family;
pub mod finetune;
mod generation;
pub mod glm4_moe;
pub mod gpt_oss;
mod json;
pub mod nemotron_h;
mod pretrained;
mod registry;
mod rope;
mod router;
pub mod sizing;
pub mod sparse;

pub use auto::{AutoModelForCausalLm, FromConfigOptions};
pub use counts::ParamCount;
pub use decoder::{DecoderConfig, QkNormKind};
pub use family::{Capabilities, ExportLayout};
pub use generation::{GenerationConfig, GenerationOverrides};
pub use json::CommonConfig;
pub use pretrained::{FromPretrainedOptions, Pretrained};
pub use registry::{AutoConfig, FAMILIES, Family};
