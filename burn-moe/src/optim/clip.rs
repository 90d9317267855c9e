//! Global-norm gradient clipping (Pascanu, Mikolov and Bengio 2013).

use burn::tensor::backend::Backend;
use burn_ep_backend::comm::EpGroup;

use super::{GradStore, ParamTable};
use crate::error::Result;

/// Euclidean norm of the whole model's gradient. Each parameter counts once: a tied one once, a replicated one on this rank
/// only (all ranks hold the same sum by now), routed experts over the ranks that hold them.
pub fn global_norm<B: Backend>(grads: &GradStore<B>, table: &ParamTable, ep: Option<&EpGroup>) -> Result<f64> {
    let entries = table.entries();
    let squares = grads.squared_norms(entries.iter().map(|info| info.id));
    let (mut replicated, mut experts) = (0.0, 0.0);
    for (info, square) in entries.iter().zip(squares) {
        match info.is_expert() {
            true => experts += square,
            false => replicated += square,
        }
    }
    if let Some(ep) = ep.filter(|ep| ep.size() > 1) {
        let mut sum = [experts];
        ep.comm().get().all_reduce_sum_f64(&mut sum)?;
        [experts] = sum;
    }
    Ok((replicated + experts).sqrt())
}

/// Factor that brings a gradient of norm `norm` to at most `max_norm`: `min(1, max_norm / (norm + 1e-6))`, as in PyTorch.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_gradients_pass_and_large_ones_shrink() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
