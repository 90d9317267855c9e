//! Experts spread over ranks: rows travel to their expert's rank and back.
//!
//! 1. The slots of this rank's tokens are sorted by owner rank (stable, so slots of one rank stay in token order).
//! 2. The ranks tell each other which local expert each row is for; the lengths of these messages are the plan.
//! 3. Rows are sent, the local experts work on what arrived, results are sent back the same way.
//! 4. Each token's K rows are weighted and summed in fp32, with one rounding.
//!
//! The plan is frozen before the first row moves, so the backward pass sends the same rows the other way. Ranks without
//! rows take part in every exchange.

use burn::tensor::{Int, Tensor, TensorData};
use burn_ep_backend::comm::{CommHandle, EpGroup, ExchangePlan};
use burn_ep_backend::ops::{ExpertOrder, ExpertWeights, Route, exchange_rows, expert_mlp, permute, sort_by_expert, unpermute};
use burn_ep_backend::{ExpertActivation, MoeBackend, OpError};

use crate::error::Result;

pub(super) fn routed_experts<B: MoeBackend>(
    x_td: Tensor<B, 2>,
    route: Route<B>,
    experts: ExpertWeights<B>,
    activation: ExpertActivation,
    num_experts: usize,
    ep: &EpGroup,
) -> Result<Tensor<B, 2>> {
    let dispatch = Dispatch::new(route.ids_tk, num_experts, ep)?;
    let rows_nd = dispatch.send(x_td)?;
    let out_nd = expert_mlp(rows_nd, dispatch.local_order(), None, experts, activation)?;
    dispatch.combine(out_nd, route.weights_tk)
}

/// Where the rows of one layer and one forward pass go.
#[derive(Debug, Clone)]
pub struct Dispatch<B: MoeBackend> {
    plan: ExchangePlan,
    /// Slots of this rank's tokens, sorted by owner rank.
    owner_order: ExpertOrder<B>,
    /// Received rows, sorted by local expert (one choice a row).
    local_order: ExpertOrder<B>,
    comm: CommHandle,
}

impl<B: MoeBackend> Dispatch<B> {
    /// Agrees with the other ranks on where the rows of `ids [T, K]` go. Reads the ids to the host.
    pub fn new(ids_tk: Tensor<B, 2, Int>, num_experts: usize, ep: &EpGroup) -> Result<Self> {
        let share = ep.local_experts(num_experts)?.len();
        let device = ids_tk.device();
        let ids: Vec<i64> = ids_tk.clone().into_data().iter::<i64>().collect();
        let outgoing = split_by_owner(&ids, share, ep.size())?;
        let send = outgoing.iter().map(Vec::len).collect();
        let messages = outgoing.iter().map(|ids| ids.iter().flat_map(|id| id.to_le_bytes()).collect());
        let comm = ep.comm().clone();
        let received = comm.get().all_to_all(messages.collect())?;

        let (mut recv, mut local_ids) = (Vec::with_capacity(received.len()), Vec::new());
        for (from, message) in received.iter().enumerate() {
            let (ids, rest) = message.as_chunks::<4>();
            if let Some(bad) = ids
                .iter()
                .map(|id| i32::from_le_bytes(*id))
                .find(|id| !(0..share as i32).contains(id))
            {
                return Err(disagree(
                    ep,
                    format!("rank {from} sent a row for local expert {bad}, this rank holds {share}"),
                ));
            }
            if !rest.is_empty() {
                return Err(disagree(ep, format!("rank {from} sent {} bytes of expert ids", message.len())));
            }
            recv.push(ids.len());
            local_ids.extend(ids.iter().map(|id| i32::from_le_bytes(*id)));
        }
        let rows = local_ids.len();
        let local_ids_n1 = Tensor::<B, 2, Int>::from_data(TensorData::new(local_ids, [rows, 1]), &device);
        Ok(Self {
            plan: ExchangePlan { send, recv },
            owner_order: sort_by_expert(ids_tk / share as i32, ep.size())?,
            local_order: sort_by_expert(local_ids_n1, share)?,
            comm,
        })
    }

    /// Rows sent to and received from each rank.
    pub fn plan(&self) -> &ExchangePlan {
        &self.plan
    }

    /// Received rows by local expert, for [`expert_mlp`] with one choice a row and no weights.
    pub fn local_order(&self) -> &ExpertOrder<B> {
        &self.local_order
    }

    /// `x [T, D]` to the rows `[N, D]` that this rank's experts work on, in the order of arrival.
    pub fn send(&self, x_td: Tensor<B, 2>) -> Result<Tensor<B, 2>> {
        let rows_rd = permute(x_td, &self.owner_order)?;
        Ok(exchange_rows(rows_rd, &self.plan, &self.comm)?)
    }

    /// Expert outputs `[N, D]` back to their tokens: `[T, D]`, weighted by `weights [T, K]`.
    pub fn combine(&self, out_nd: Tensor<B, 2>, weights_tk: Tensor<B, 2>) -> Result<Tensor<B, 2>> {
        let rows_rd = exchange_rows(out_nd, &self.plan.reversed(), &self.comm)?;
        Ok(unpermute(rows_rd, &self.owner_order, Some(weights_tk))?)
    }
}

/// For each rank the local ids of the experts its rows are for, in slot order. Rank r holds experts
/// `r * share..(r + 1) * share`.
fn split_by_owner(ids: &[i64], share: usize, ranks: usize) -> Result<Vec<Vec<i32>>> {
    let mut owners = vec![Vec::new(); ranks];
    for (index, &id) in ids.iter().enumerate() {
        let expert = usize::try_from(id).ok().filter(|e| *e < share * ranks);
        let Some(expert) = expert else {
            return Err(OpError::Value {
                op: "routed_experts",
                tensor: "ids",
                index,
                found: id.to_string(),
                expected: format!("an expert id below {}", share * ranks),
            }
            .into());
        };
        owners[expert / share].push((expert % share) as i32);
    }
    Ok(owners)
}

fn disagree(ep: &EpGroup, why: String) -> crate::Error {
    OpError::Comm {
        rank: ep.rank(),
        world: ep.size(),
        op: "routed_experts",
        why,
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_go_to_the_rank_of_their_expert_in_order() {
        // Two ranks with two experts each.
        let owners = split_by_owner(&[3, 0, 2, 1, 3], 2, 2).unwrap();
        assert_eq!(owners, [vec![0, 1], vec![1, 0, 1]]);
        assert_eq!(split_by_owner(&[], 2, 3).unwrap(), vec![Vec::<i32>::new(); 3]);
    }

    #[test]
    fn an_id_outside_the_layer_names_its_slot() {
        for bad in [4, -1] {
            let error = split_by_owner(&[0, bad], 2, 2).unwrap_err().to_string();
            assert!(
                error.contains(&format!("holds {bad} at index 1")) && error.contains("below 4"),
                "{error}"
            );
        }
    }
}
