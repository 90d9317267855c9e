//! From routed tokens to the weighted sum of their experts' outputs, wherever the experts are.
//!
//! - `local.rs`: all experts on this rank; the op gathers and combines itself.
//! - `expert_parallel.rs`: each rank holds `E / ep` experts; rows travel to the rank of their expert and back.
//!
//! Both compute `y[t] = sum_j weights[t, j] * expert(ids[t, j])(x[t])` with the sum in fp32 and drop no token.

mod expert_parallel;
mod local;

use burn::tensor::Tensor;
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::ops::{ExpertWeights, Route};
use burn_ep_backend::{ExpertActivation, MoeBackend, OpError};

pub use expert_parallel::Dispatch;

use crate::error::Result;

/// Routed experts of one layer: `x [T, D]` to `[T, D]`.
///
/// `route` chooses among all `num_experts`; `experts` holds those of this rank (all of them without `ep`), stacked in
/// order. With a group of more than one rank the ids are read to the host and every rank must call this for the same layer,
/// also with `T = 0`; an error on one rank ends the group.
pub fn routed_experts<B: MoeBackend>(
    x_td: Tensor<B, 2>,
    route: Route<B>,
    experts: ExpertWeights<B>,
    activation: ExpertActivation,
    num_experts: usize,
    ep: Option<&EpGroup>,
) -> Result<Tensor<B, 2>> {
    match ep.filter(|ep| ep.size() > 1) {
        None => {
            check_count(&experts, num_experts, "all of this layer")?;
            local::routed_experts(x_td, route, experts, activation, num_experts)
        }
        Some(ep) => {
            let run = || {
                let share = ep.local_experts(num_experts)?;
                check_count(
                    &experts,
                    share.len(),
                    &format!("experts {share:?} of rank {} of {}", ep.rank(), ep.size()),
                )?;
                expert_parallel::routed_experts(x_td, route, experts, activation, num_experts, ep)
            };
            // The other ranks would wait for this one's rows.
            run().inspect_err(|error| ep.comm().get().abort(&error.to_string()))
        }
    }
}

fn check_count<B: MoeBackend>(experts: &ExpertWeights<B>, expected: usize, which: &str) -> Result<()> {
    let shape = experts.up.dims();
    if shape[0] == expected {
        return Ok(());
    }
    Err(OpError::Shape {
        op: "routed_experts",
        tensor: "up",
        found: shape.to_vec(),
        expected: format!("{expected} stacked experts ({which})"),
    }
    .into())
}
