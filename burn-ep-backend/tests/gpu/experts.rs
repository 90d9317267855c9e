//! The expert layer: values and all gradients.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Tensor};
use burn_ep_backend::ops::{ExpertWeights, expert_mlp};
use burn_ep_backend::{ExpertActivation, MoeBackend};

use crate::routing::order;
use crate::support::{Cpu, Gpu, compare, host, poison, random, relative};

#[derive(Debug, Clone, Copy)]
struct Case {
    /// Tokens, experts per token, experts, hidden width, expert width.
    sizes: [usize; 5],
    activation: ExpertActivation,
    bias: bool,
    weighted: bool,
}

/// Output, then gradients of x, up, down and what else there is.
fn run<B>(case: Case, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let device = Default::default();
    let [t, k, e, d, f] = case.sizes;
    let f_up = f * case.activation.up_factor();
    let scaled = |shape: [usize; 3], seed| {
        let weight = Tensor::<B, 3>::from_data(random(&shape, seed), &device) / (shape[2] as f32).sqrt();
        weight.cast(dtype).require_grad()
    };
    let matrix = |shape: [usize; 2], seed| Tensor::<B, 2>::from_data(random(&shape, seed), &device).cast(dtype).require_grad();
    let x = matrix([t, d], 1);
    let experts = ExpertWeights {
        up: scaled([e, f_up, d], 2),
        up_bias: case.bias.then(|| matrix([e, f_up], 3)),
        down: scaled([e, d, f], 4),
        down_bias: case.bias.then(|| matrix([e, d], 5)),
    };
    let weights = Tensor::<B, 2>::from_data(random(&[t, k], 6), &device).require_grad();
    let order = order::<B>(t, k, e);
    poison::<B>(t * k * f_up);
    let weights_tk = case.weighted.then(|| weights.clone());
    let out = expert_mlp(x.clone(), &order, weights_tk, experts.clone(), case.activation).expect("valid shapes");
    let grads = (out.clone() * matrix([t, d], 7).detach()).sum().backward();
    let mut values = vec![host(out), host(x.grad(&grads).expect("x"))];
    values.extend([&experts.up, &experts.down].map(|weight| host(weight.grad(&grads).expect("weight"))));
    if case.weighted {
        values.push(host(weights.grad(&grads).expect("routing weights")));
    }
    for bias in [&experts.up_bias, &experts.down_bias].into_iter().flatten() {
        values.push(host(bias.grad(&grads).expect("bias")));
    }
    values
}

fn cases(limit: f32) -> Vec<Case> {
    let mut cases = Vec::new();
    let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit };
    for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2, clamped] {
        for sizes in [
            [1, 1, 1, 64, 32],
            [70, 2, 5, 72, 136],
            [9, 3, 4, 20, 7],
            [300, 4, 32, 256, 128],
            [64, 6, 60, 2880, 48],
        ] {
            for (bias, weighted) in [(false, true), (true, true), (true, false)] {
                cases.push(Case {
                    sizes,
                    activation,
                    bias,
                    weighted,
                });
            }
        }
    }
    cases
}

#[test]
fn expert_mlp_follows_the_low_precision_rule() {
    // a limit that nothing reaches: a value rounded across a clamp has another gradient, which no bound covers
    for case in cases(100.0) {
        compare(
            &format!("expert_mlp {case:?}"),
            run::<Gpu>(case, FloatDType::BF16),
            run::<Cpu>(case, FloatDType::F32),
            run::<Cpu>(case, FloatDType::BF16),
        );
    }
}

#[test]
fn expert_mlp_in_fp32_matches_the_reference() {
    // TF32 products may differ by 1e-3 and move a few values across the clamp
    for case in cases(1.0) {
        let tolerance = match case.activation {
            ExpertActivation::ClampedSwiGlu { .. } => 5e-2,
            _ => 5e-3,
        };
        let (gpu, cpu) = (run::<Gpu>(case, FloatDType::F32), run::<Cpu>(case, FloatDType::F32));
        for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
            let error = relative(gpu, cpu);
            assert!(error < tolerance, "{case:?} output {i}: {error:.2e}");
        }
    }
}

#[test]
fn experts_without_rows_get_exact_zeros() {
    for dtype in [FloatDType::BF16, FloatDType::F32] {
        let case = Case {
            sizes: [2, 1, 6, 64, 32],
            activation: ExpertActivation::SwiGlu,
            bias: true,
            weighted: true,
        };
        let values = run::<Gpu>(case, dtype);
        let expected = run::<Cpu>(case, dtype);
        for (i, size) in [(2, 64 * 64), (3, 64 * 32), (5, 64), (6, 64)] {
            for (e, (gpu, cpu)) in values[i].chunks(size).zip(expected[i].chunks(size)).enumerate() {
                let used = |grad: &[f32]| grad.iter().any(|&g| g != 0.0);
                assert_eq!(used(gpu), used(cpu), "output {i}, expert {e}");
            }
        }
    }
}
