//! Same numbers as transformers 5.17.0, for every folder of `tests/fixtures`.

mod decoders;
mod deepseek;
mod gpt_oss;
mod harness;
mod nemotron_h;
mod qwen3_moe;
