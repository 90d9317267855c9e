//! Expert activations on one row; formulas in [`ExpertActivation`].

use super::numeric::Real;
use crate::desc::ExpertActivation;

/// `up [F * up_factor]` to `act [F]`.
pub(crate) fn activate<A: Real>(activation: ExpertActivation, up: &[A], act: &mut [A]) {
    match activation {
        ExpertActivation::SwiGlu => {
            let (gate, linear) = up.split_at(act.len());
            for ((act, &g), &u) in act.iter_mut().zip(gate).zip(linear) {
                *act = g * sigmoid(g) * u;
            }
        }
        ExpertActivation::Relu2 => {
            for (act, &u) in act.iter_mut().zip(up) {
                let positive = u.max(A::zero());
                *act = positive * positive;
            }
        }
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let (alpha, limit) = (A::of(alpha.into()), A::of(limit.into()));
            for (act, pair) in act.iter_mut().zip(up.chunks_exact(2)) {
                let gate = pair[0].min(limit);
                let linear = pair[1].max(-limit).min(limit);
                *act = (linear + A::one()) * gate * sigmoid(alpha * gate);
            }
        }
    }
}

/// Gradient `[F * up_factor]` of the up product from the gradient `[F]` of the activation.
pub(crate) fn activate_backward<A: Real>(activation: ExpertActivation, up: &[A], grad_act: &[A], grad_up: &mut [A]) {
    match activation {
        ExpertActivation::SwiGlu => {
            let f = grad_act.len();
            let (gate, linear) = up.split_at(f);
            let (grad_gate, grad_linear) = grad_up.split_at_mut(f);
            for i in 0..f {
                let (g, sigma) = (gate[i], sigmoid(gate[i]));
                grad_gate[i] = grad_act[i] * linear[i] * sigma * (A::one() + g * (A::one() - sigma));
                grad_linear[i] = grad_act[i] * g * sigma;
            }
        }
        ExpertActivation::Relu2 => {
            for ((grad_up, &u), &grad) in grad_up.iter_mut().zip(up).zip(grad_act) {
                *grad_up = grad * (u.max(A::zero()) * A::of(2.0));
            }
        }
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let (alpha, limit) = (A::of(alpha.into()), A::of(limit.into()));
            for ((grad_up, pair), &grad) in grad_up.chunks_exact_mut(2).zip(up.chunks_exact(2)).zip(grad_act) {
                let gate = pair[0].min(limit);
                let linear = pair[1].max(-limit).min(limit);
                let sigma = sigmoid(alpha * gate);
                // Clamped values are constants; a value on the limit still passes its gradient.
                let slope = sigma * (A::one() + alpha * gate * (A::one() - sigma));
                grad_up[0] = if pair[0] <= limit {
                    grad * (linear + A::one()) * slope
                } else {
                    A::zero()
                };
                grad_up[1] = if pair[1].abs() <= limit { grad * gate * sigma } else { A::zero() };
            }
        }
    }
}

/// Logistic function; saturates to 0 and 1 without NaN.
#[inline]
pub(crate) fn sigmoid<A: Real>(x: A) -> A {
    A::one() / (A::one() + (-x).lane_exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kimi and GPT-OSS ports disagreed on the clamps (ktransformers#1862, prime-rl#2365).
    #[test]
    fn clamped_swiglu_caps_the_gate_above_only() {
        let activation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        let mut act = [0.0f64; 2];
        activate(activation, &[8.0, -9.0, -8.0, 0.0], &mut act);
        assert!((act[0] + 41.9997).abs() < 1e-4, "{act:?}");
        assert!((act[1] + 9.77e-6).abs() < 1e-8, "{act:?}");
    }

    #[test]
    fn backward_matches_finite_differences() {
        let up = [0.7f64, -1.3, 2.0, 6.5, -7.5, 3.0, 8.0, -0.2];
        let weights = [0.9, -0.4, 1.7, 0.3];
        let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2, clamped] {
            let f = up.len() / activation.up_factor();
            let weights = &[weights, weights].concat()[..f];
            let value = |up: &[f64]| {
                let mut act = vec![0.0; f];
                activate(activation, up, &mut act);
                act.iter().zip(weights).map(|(a, w)| a * w).sum::<f64>()
            };
            let mut grad = [0.0; 8];
            activate_backward(activation, &up, weights, &mut grad);
            for i in 0..up.len() {
                let (mut low, mut high) = (up, up);
                low[i] -= 1e-6;
                high[i] += 1e-6;
                let expected = (value(&high) - value(&low)) / 2e-6;
                assert!((grad[i] - expected).abs() < 1e-7, "{activation:?} {i}: {} vs {expected}", grad[i]);
            }
        }
    }

    #[test]
    fn extreme_inputs_stay_finite() {
        let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        for activation in [ExpertActivation::SwiGlu, clamped] {
            let up = [1e4f32, -1e4, -1e4, 1e4];
            let (mut act, mut grad) = ([0.0; 2], [0.0; 4]);
            activate(activation, &up, &mut act);
            activate_backward(activation, &up, &[1.0, 1.0], &mut grad);
            assert!(act.iter().chain(&grad).all(|v| v.is_finite()), "{act:?} {grad:?}");
        }
    }
}
