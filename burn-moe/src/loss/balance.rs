//! Auxiliary load-balancing loss (Fedus, Zoph and Shazeer 2021, "Switch Transformers"; form of Mixtral and Qwen3-MoE).
//!
//! With router logits `z` of all MoE layers m and rows n, mask `μ_n`, `R = Σ_m Σ_n μ_n`, and top-k of `softmax(z)`:
//!
//! ```text
//! f_e = Σ_m Σ_n μ_n [e in top-k] / R          P_e = Σ_m Σ_n μ_n softmax(z)_e / R
//! L   = E Σ_e f_e P_e                          dL/dP^m_n[e] = E f_e μ_n / R
//! ```
//!
//! One mean over all layers and tokens. `f` is a constant for the gradient, so the loss splits into one term per block
//! once `f` is known from the forward pass of all blocks; that is how the segmented step uses it.

use burn::tensor::activation::softmax;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::comm::CommHandle;
use burn_ep_backend::{MoeBackend, RouterDesc, ops};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::AuxLossSettings;

/// How the auxiliary loss adds up over micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuxScaling {
    /// Each micro-batch counts its tokens over all ranks, and the step averages over micro-batches, so that the weight
    /// does not depend on how a batch is cut.
    #[default]
    Average,
    /// Each micro-batch of each rank adds its own loss with full weight, as transformers does: with g micro-batches and W
    /// ranks the term weighs g·W times as much.
    Reference,
}

/// Sums over the routers of one micro-batch, `[E]` each.
#[derive(Debug, Clone)]
pub struct BalanceStats<B: MoeBackend> {
    settings: AuxLossSettings,
    counts_e: Option<Tensor<B, 1>>,
    probs_e: Option<Tensor<B, 1>>,
    rows: f64,
}

impl<B: MoeBackend> BalanceStats<B> {
    /// Nothing seen yet.
    pub fn new(settings: AuxLossSettings) -> Self {
        Self {
            settings,
            counts_e: None,
            probs_e: None,
            rows: 0.0,
        }
    }

    /// Adds the router of one block: logits `[T, E]`, mask `[T]` of zeros and ones with `rows` ones.
    pub fn observe(&mut self, logits_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>, rows: f64) -> Result<()> {
        let AuxLossSettings { num_experts, top_k, .. } = self.settings;
        if logits_te.dims()[1] != num_experts {
            return Err(Error::config(
                "aux_loss.num_experts",
                num_experts,
                format!("{} (the width of the router logits)", logits_te.dims()[1]),
            ));
        }
        let ids_tk = ops::route(logits_te.clone(), None, None, &RouterDesc::softmax(num_experts, top_k, false))?.ids_tk;
        add_to(&mut self.counts_e, count_experts(ids_tk, mask_t, num_experts)?);
        add_to(
            &mut self.probs_e,
            masked(probabilities(logits_te), mask_t).sum_dim(0).squeeze_dim(0),
        );
        self.rows += rows;
        Ok(())
    }

    /// The loss of this micro-batch; with `comm`, of the same micro-batch on all its ranks together. What several ranks add up is
    /// read from the device; on one rank nothing is.
    pub fn finish(self, comm: Option<&CommHandle>, device: &B::Device) -> Result<BalanceLoss<B>> {
        let e = self.settings.num_experts;
        let zeros = || Tensor::zeros([e], (device, DType::F32));
        let (mut counts_e, mut probs_e) = (self.counts_e.unwrap_or_else(zeros), self.probs_e.unwrap_or_else(zeros));
        let mut rows = self.rows;
        if let Some(comm) = comm.filter(|comm| comm.get().world() > 1) {
            let mut sums: Vec<f64> = Tensor::cat(vec![counts_e, probs_e], 0).into_data().iter::<f64>().collect();
            sums.push(rows);
            comm.get().all_reduce_sum_f64(&mut sums)?;
            rows = sums[2 * e];
            let upload = |sums: &[f64]| Tensor::from_data(TensorData::new(sums.to_vec(), [e]), (device, DType::F32));
            (counts_e, probs_e) = (upload(&sums[..e]), upload(&sums[e..2 * e]));
        }
        let scale = if rows > 0.0 { e as f64 / rows / rows } else { 0.0 };
        let weight_e = counts_e * scale;
        Ok(BalanceLoss {
            value: (weight_e.clone() * probs_e).sum(),
            weight_e,
        })
    }
}

/// A balance loss, ready to be added to the blocks' backward passes.
#[derive(Debug, Clone)]
pub struct BalanceLoss<B: MoeBackend> {
    /// `L`, without coefficient, `[1]` fp32. The perfectly balanced value is K.
    pub value: Tensor<B, 1>,
    /// `dL/dP^m_n[e] = E f_e / R` of every unmasked row, `[E]` fp32.
    weight_e: Tensor<B, 1>,
}

impl<I: MoeBackend> BalanceLoss<I> {
    /// The part of `coefficient * L` that one block's logits carry, `[1]` fp32: its gradient for the logits is that of L.
    pub fn term<B>(&self, logits_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>, coefficient: f64) -> Tensor<B, 1>
    where
        B: MoeBackend + AutodiffBackend<InnerBackend = I>,
    {
        let weight_1e = Tensor::from_inner(self.weight_e.clone() * coefficient).unsqueeze::<2>();
        (masked(probabilities(logits_te), mask_t) * weight_1e).sum()
    }
}

/// Softmax in the dtype of the logits (fp32 inside, rounded once), as fp32.
fn probabilities<B: MoeBackend>(logits_te: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = logits_te.dtype();
    let probs = softmax(logits_te.cast(FloatDType::F32), 1);
    match dtype {
        DType::F32 => probs,
        _ => probs.cast(FloatDType::from(dtype)).cast(FloatDType::F32),
    }
}

fn masked<B: MoeBackend>(x_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>) -> Tensor<B, 2> {
    match mask_t {
        Some(mask_t) => x_te * mask_t.clone().unsqueeze_dim(1),
        None => x_te,
    }
}

fn add_to<B: MoeBackend>(sum: &mut Option<Tensor<B, 1>>, term: Tensor<B, 1>) {
    *sum = Some(match sum.take() {
        Some(old) => old + term,
        None => term,
    });
}

/// Rows per expert `[E]` fp32 from chosen ids `[T, K]`; rows whose mask is 0 do not count.
pub(crate) fn count_experts<B: MoeBackend>(
    ids_tk: Tensor<B, 2, Int>,
    mask_t: Option<&Tensor<B, 1>>,
    num_experts: usize,
) -> Result<Tensor<B, 1>> {
    Ok(ops::count_experts(ids_tk, mask_t.cloned(), num_experts)?)
}
