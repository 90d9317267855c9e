//! Router z-loss (Zoph et al. 2022, "ST-MoE", eq. 5): the mean over tokens of `logsumexp(z)^2` keeps router logits small.
//!
//! The mean is over all MoE layers and unmasked tokens, like that of the balance loss.

use burn::tensor::{FloatDType, Tensor};
use burn_ep_backend::MoeBackend;

/// `Σ_n μ_n logsumexp(z_n)^2`, `[1]` fp32: logits `[T, E]`, mask `[T]`.
pub fn router_z_sum<B: MoeBackend>(logits_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>) -> Tensor<B, 1> {
    let z = logits_te.cast(FloatDType::F32);
    let max_t1 = z.clone().detach().max_dim(1);
    let lse_t1 = (z - max_t1.clone()).exp().sum_dim(1).log() + max_t1;
    let square_t1 = lse_t1.clone() * lse_t1;
    match mask_t {
        Some(mask_t) => (square_t1 * mask_t.clone().unsqueeze_dim(1)).sum(),
        None => square_t1.sum(),
    }
}

/// One block's part of `coefficient * z-loss`; `rows` counts the unmasked tokens of all MoE layers and ranks.
pub fn z_loss_term<B: MoeBackend>(logits_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>, coefficient: f64, rows: f64) -> Tensor<B, 1> {
    let scale = if rows > 0.0 { coefficient / rows } else { 0.0 };
    router_z_sum(logits_te, mask_t) * scale
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn matches_a_plain_loop_and_skips_masked_rows() {
        let device = Default::default();
        let rows = [[1.0f32, -2.0, 0.5], [30.0, 31.0, 29.0], [100.0, 0.0, 0.0]];
        let logits = Tensor::<Flex, 2>::from_floats(rows, &device);
        let mask = Tensor::<Flex, 1>::from_floats([1.0, 1.0, 0.0], &device);
        let expected: f64 = rows[..2]
            .iter()
            .map(|z| z.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln().powi(2))
            .sum();
        let got = f64::from(router_z_sum(logits.clone(), Some(&mask)).into_scalar());
        assert!((got / expected - 1.0).abs() < 1e-6, "{got} {expected}");
        let term = f64::from(z_loss_term(logits, Some(&mask), 0.1, 2.0).into_scalar());
        assert!((term / (0.05 * expected) - 1.0).abs() < 1e-6);
    }
}
