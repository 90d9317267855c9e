//! The public ops on Burn tensors: they check shapes and settings, then call [`MoeBackend`](crate::MoeBackend).
//!
//! Every op is differentiable on an autodiff backend with respect to its float inputs unless its docs say otherwise.

mod adamw;
mod attention;
mod causal_conv1d;
mod check;
mod collective;
mod count;
mod exchange;
mod expert_mlp;
mod grouped_matmul;
mod inject;
mod linear_cross_entropy;
mod norm;
mod permute;
mod rope;
mod route;
mod ssd_scan;

pub(crate) use adamw::{AdamWFactors, Rounded, rounding_noise, stochastic_bf16};
pub use adamw::{AdamWState, adamw_step};
pub use attention::{Attention, AttentionMask, attention};
pub use causal_conv1d::causal_conv1d;
pub use collective::{all_gather, all_reduce, reduce_scatter};
pub use count::count_experts;
pub use exchange::exchange_rows;
pub use expert_mlp::{ExpertWeights, expert_mlp};
pub use grouped_matmul::grouped_matmul;
pub use inject::inject_gradient;
pub use linear_cross_entropy::linear_cross_entropy;
pub use norm::{add_rms_norm, gated_rms_norm, rms_norm};
pub use permute::{ExpertOrder, permute, sort_by_expert, unpermute};
pub use rope::{rms_norm_rope, rope};
pub use route::{Route, route};
pub use ssd_scan::{SsdInput, SsdOutput, ssd_scan};
