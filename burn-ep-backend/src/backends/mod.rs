//! Which backend implements which op with what. An op that is not listed runs its reference.
//!
//! | op | Flex (CPU) | CUDA (feature `cuda`) |
//! | --- | --- | --- |
//! | route, sort, permute, unpermute | `flex/` | `kernels/cube/` |
//! | grouped matmul | `flex/` | `kernels/hopper/gemm.rs` in bf16 on compute capability 9.0, else `kernels/cube/grouped_matmul.rs` |
//! | expert layer | `flex/` | `kernels/hopper/experts.rs` in bf16 on compute capability 9.0, else `kernels/cube/expert_mlp.rs` |
//! | attention | `flex/` | `kernels/attention/`: Hopper in bf16 and fp16 where the head size fits, else portable, up to 256 |
//! | RMSNorm, with residual, gated RMSNorm, rotary embedding | `flex/` | `kernels/cube/` |
//! | causal convolution, scan | `flex/` | `kernels/mamba/` |
//! | dense products | Burn | `kernels/dense/`: cuBLASLt or `kernels/hopper/dense.rs` by a table, else Burn |
//! | linear cross entropy | `flex/` | `kernels/cuda/cross_entropy.rs` around cuBLASLt, else reference |
//! | embedding and its gradient, scaling | Burn, reference | `kernels/cuda/` |
//! | AdamW | `flex/` | `kernels/cube/adamw.rs` |
//! | AdamW with 8-bit moments | reference | `kernels/cuda/adamw8.rs` |
//! | rows per expert, sums of squares | reference | `kernels/cube/{count,norm}.rs` |
//! | initial values | host | `kernels/init.rs` |
//! | exchange | reference (host bytes) | reference (host bytes) |

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
mod flex;
#[cfg(feature = "cuda")]
mod fusion;
#[cfg(feature = "cuda")]
pub use fusion::FusedCuda;
