//! Which backend implements which op with what. An op that is not listed runs its reference.
//!
//! | op | Flex (CPU) | CUDA (feature `cuda`) |
//! | --- | --- | --- |
//! | route, sort, permute, unpermute | `flex/` | `kernels/cube/` |
//! | grouped matmul | `flex/` | `kernels/hopper/gemm.rs` in bf16 on compute capability 9.0, else reference |
//! | expert layer | `flex/` | `kernels/cube/expert_mlp.rs` around the grouped matmul |
//! | attention | `flex/` | `kernels/hopper/attention.rs` in bf16, causal, head size 64 or 128, no documents or padding; else reference |
//! | RMSNorm, gated RMSNorm, rotary embedding | `flex/` | `kernels/cube/` |
//! | causal convolution | `flex/` | reference: the kernel in `kernels/cube/` failed on the device and is not routed |
//! | scan | `flex/` | reference |
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
