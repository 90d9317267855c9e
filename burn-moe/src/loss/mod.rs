//! What training minimises: token cross entropy, plus the router's auxiliary losses.

mod balance;
mod cross_entropy;
mod z_loss;

pub(crate) use balance::count_experts;
pub use balance::{AuxScaling, BalanceLoss, BalanceStats};
pub use cross_entropy::{label_scale, label_tokens, token_cross_entropy};
pub use z_loss::{router_z_sum, z_loss_term};
