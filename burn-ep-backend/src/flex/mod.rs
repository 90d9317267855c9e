//! CPU kernels on flat slices, parallel with rayon. One file per op, named like the op.

pub(crate) mod adamw;
pub(crate) mod attention;
mod attention_mask;
pub(crate) mod causal_conv1d;
pub(crate) mod expert_activation;
pub(crate) mod expert_mlp;
pub(crate) mod gated_rms_norm;
pub(crate) mod grouped_matmul;
pub(crate) mod groups;
pub(crate) mod lanes;
pub(crate) mod linear_cross_entropy;
pub(crate) mod matrix;
pub(crate) mod numeric;
pub(crate) mod permute;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod slice;
mod ssd_chunk;
pub(crate) mod ssd_scan;
