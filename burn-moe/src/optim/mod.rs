//! From gradients to new parameters, in this order: [`GradStore`] collects, [`reduce_gradients`] sums over ranks (or
//! [`reduce_to_shards`] when the optimizer state is dealt over them by [`Shards`]), [`global_norm`] and [`clip_factor`] bound, [`AdamW`] updates by [`ParamGroup`], [`update_router_bias`] balances the
//! experts.

mod adamw;
mod clip;
mod grad_store;
mod groups;
mod params;
mod router_bias;
mod shards;
mod sync;

pub use adamw::{AdamW, AdamWConfig, AdamWMoments, MomentDType};
pub use clip::{clip_factor, clip_scale, global_norm, running_clip_factor, running_norm, sharded_norm};
pub(crate) use clip::{scale_of_norm, sum_squares};
pub use grad_store::GradStore;
pub use groups::{GroupSettings, ParamGroup, ResolvedGroups, freeze};
pub use params::{ParamInfo, ParamTable, PathStack};
pub use router_bias::{RouterBiasConfig, check_router_bias, router_bias_delta, update_router_bias};
pub use shards::{Shard, Shards, share_len};
pub use sync::{reduce_gradients, reduce_to_shards};
