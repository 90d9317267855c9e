//! Plain Burn tensors, readable first: what every kernel is checked against, and the default on every backend.

pub mod adamw;
pub mod adamw8;
pub mod attention;
pub mod causal_conv1d;
pub mod collective;
pub mod count;
pub mod embedding;
pub mod exchange;
pub mod expert_mlp;
pub mod gated_rms_norm;
pub mod grouped_matmul;
pub mod linear_cross_entropy;
pub mod permute;
pub(crate) mod prim;
pub mod rms_norm;
pub mod rope;
pub mod route;
pub mod scale;
pub mod ssd_scan;
