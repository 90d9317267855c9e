//! Every CUDA kernel against the CPU reference: values and gradients, fresh random inputs, odd sizes, empty groups.
//!
//! Low-precision rule: the error against the fp32 result on the same (rounded) inputs is at most twice the error of the
//! plain bf16 path on the CPU, plus a small floor. Needs a GPU; built with `--features cuda`.

mod adamw;
mod attention;
mod attention_case;
mod attention_portable;
mod attention_speed;
mod attention_split;
mod comm;
mod dense;
mod embedding;
mod experts;
mod experts_speed;
mod fused;
mod loss;
mod mamba_conv;
mod mamba_scan;
mod mamba_speed;
mod matmul;
mod norm_rope;
mod norms;
mod ops_speed;
mod rope;
mod routing;
mod support;
mod training;
