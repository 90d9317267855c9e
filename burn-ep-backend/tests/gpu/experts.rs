//! The expert layer: values and all gradients.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Int, Tensor, TensorPrimitive, backend::Backend};
use burn_ep_backend::ops::{ExpertWeights, expert_mlp};
use burn_ep_backend::{ExpertActivation, ExpertOrderPrim, ExpertWeightsPrim, MoeBackend, reference};
use burn_flex::Flex;

use crate::routing::order;
use crate::support::{Cpu, Gpu, close, compare, host, poison, random, relative};

#[derive(Debug, Clone, Copy)]
struct Case {
    /// Tokens, experts per token, experts, hidden width, expert width.
    sizes: [usize; 5],
    activation: ExpertActivation,
    bias: bool,
    weighted: bool,
}

/// Inputs of a case: the same numbers on every backend, rounded to `dtype`.
struct Inputs<B: Backend> {
    x: Tensor<B, 2>,
    up: Tensor<B, 3>,
    up_bias: Option<Tensor<B, 2>>,
    down: Tensor<B, 3>,
    down_bias: Option<Tensor<B, 2>>,
    weights: Option<Tensor<B, 2>>,
    grad: Tensor<B, 2>,
}

impl<B: Backend> Inputs<B> {
    fn new(case: Case, dtype: FloatDType) -> Self {
        let device = Default::default();
        let [t, k, e, d, f] = case.sizes;
        let f_up = f * case.activation.up_factor();
        let stacked = |shape: [usize; 3], seed| {
            let weight = Tensor::<B, 3>::from_data(random(&shape, seed), &device) / (shape[2] as f32).sqrt();
            // both precisions start from the same weights
            weight.cast(FloatDType::BF16).cast(dtype)
        };
        let matrix = |shape: [usize; 2], seed| Tensor::<B, 2>::from_data(random(&shape, seed), &device).cast(dtype);
        Self {
            x: matrix([t, d], 1),
            up: stacked([e, f_up, d], 2),
            up_bias: case.bias.then(|| matrix([e, f_up], 3)),
            down: stacked([e, d, f], 4),
            down_bias: case.bias.then(|| matrix([e, d], 5)),
            weights: case.weighted.then(|| Tensor::from_data(random(&[t, k], 6), &device)),
            grad: matrix([t, d], 7),
        }
    }
}

/// Output, then gradients of x, up, down, routing weights, up bias and down bias, as far as there are any.
fn run<B>(case: Case, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let [t, k, e, d, f] = case.sizes;
    let inputs = Inputs::<B>::new(case, dtype);
    let (x, weights) = (inputs.x.require_grad(), inputs.weights.map(Tensor::require_grad));
    let experts = ExpertWeights {
        up: inputs.up.require_grad(),
        up_bias: inputs.up_bias.map(Tensor::require_grad),
        down: inputs.down.require_grad(),
        down_bias: inputs.down_bias.map(Tensor::require_grad),
    };
    let order = order::<B>(t, k, e);
    poison::<B>(t * k * f.max(d) * 2);
    let out = expert_mlp(x.clone(), &order, weights.clone(), experts.clone(), case.activation).expect("valid shapes");
    poison::<B>(t * k * f.max(d) * 2);
    let grads = (out.clone() * inputs.grad).sum().backward();
    let mut values = vec![host(out), host(x.grad(&grads).expect("x"))];
    values.extend([&experts.up, &experts.down].map(|weight| host(weight.grad(&grads).expect("weight"))));
    if let Some(weights) = weights {
        values.push(host(weights.grad(&grads).expect("routing weights")));
    }
    for bias in [&experts.up_bias, &experts.down_bias].into_iter().flatten() {
        values.push(host(bias.grad(&grads).expect("bias")));
    }
    values
}

/// The same by the plain path on the CPU: a composition of ops that each round their result, as PyTorch does it. (The CPU
/// kernel behind [`run`] rounds less: it keeps activations and weighted gradients in fp32.)
fn plain(case: Case, dtype: FloatDType) -> Vec<Vec<f32>> {
    fn float<const N: usize>(t: Tensor<Flex, N>) -> <Flex as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive {
        t.into_primitive().tensor()
    }
    fn values<const N: usize>(t: <Flex as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive) -> Vec<f32> {
        host(Tensor::<Flex, N>::from_primitive(TensorPrimitive::Float(t)))
    }
    let [t, k, e, _, _] = case.sizes;
    let inputs = Inputs::<Flex>::new(case, dtype);
    let int = |t: Tensor<Flex, 1, Int>| t.into_primitive();
    let order = order::<Flex>(t, k, e);
    let order = ExpertOrderPrim {
        slots_r: int(order.slots_r),
        positions_r: int(order.positions_r),
        offsets_e1: int(order.offsets_e1),
    };
    let experts = ExpertWeightsPrim {
        up: float(inputs.up),
        up_bias: inputs.up_bias.map(float),
        down: float(inputs.down),
        down_bias: inputs.down_bias.map(float),
    };
    let (x, weights) = (float(inputs.x), inputs.weights.map(float));
    let out = reference::expert_mlp::expert_mlp::<Flex>(x.clone(), &order, weights.clone(), &experts, k, case.activation);
    let grad = float(inputs.grad);
    let grads = reference::expert_mlp::expert_mlp_backward::<Flex>(grad, x, out.up_rf, &order, weights, &experts, k, case.activation);
    let mut all = vec![
        values::<2>(out.out_td),
        values::<2>(grads.x_td),
        values::<3>(grads.up),
        values::<3>(grads.down),
    ];
    all.extend(
        [grads.weights_tk, grads.up_bias, grads.down_bias]
            .into_iter()
            .flatten()
            .map(values::<2>),
    );
    all
}

/// Layers small enough for the slow paths: fp16 and fp32 share their kernels, so that a third of the larger ones will do.
fn few_cases(limit: f32) -> impl Iterator<Item = Case> {
    let small = |case: &Case| case.sizes.iter().product::<usize>() < 100_000_000;
    cases(limit)
        .into_iter()
        .filter(move |case| small(case) || (case.bias && case.weighted))
}

fn cases(limit: f32) -> Vec<Case> {
    let mut cases = Vec::new();
    let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit };
    for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2, clamped] {
        // few different numbers of experts and choices: each one compiles kernels of its own
        for sizes in [
            [1, 1, 1, 64, 32],
            [70, 2, 5, 72, 136],
            // widths that are no multiples of 8, one expert without neighbours
            [40, 2, 4, 24, 20],
            [9, 2, 4, 20, 7],
            [100, 1, 1, 40, 24],
            // most experts empty or with a row or two
            [60, 8, 256, 64, 48],
            [64, 2, 60, 2880, 48],
            // several row and column tiles with a short last one
            [300, 4, 32, 256, 128],
            [700, 4, 5, 200, 264],
            [520, 2, 4, 328, 480],
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

/// A limit that nothing reaches: a value rounded across a clamp has another gradient, which no bound covers.
const UNREACHED: f32 = 100.0;

fn low_precision(dtype: FloatDType, cases: impl Iterator<Item = Case>) {
    for case in cases {
        compare(
            &format!("expert_mlp {dtype:?} {case:?}"),
            run::<Gpu>(case, dtype),
            run::<Cpu>(case, FloatDType::F32),
            plain(case, dtype),
        );
    }
}

#[test]
fn expert_mlp_follows_the_low_precision_rule() {
    low_precision(FloatDType::BF16, cases(UNREACHED).into_iter());
}

#[test]
fn expert_mlp_in_fp16_follows_the_low_precision_rule() {
    low_precision(FloatDType::F16, few_cases(UNREACHED));
}

#[test]
fn expert_mlp_in_fp32_matches_the_reference() {
    // the portable products are exact in fp32; only the order of sums differs, which may move a value across the clamp
    for case in few_cases(1.0) {
        let tolerance = match case.activation {
            ExpertActivation::ClampedSwiGlu { .. } => 1e-3,
            _ => 1e-4,
        };
        let (gpu, cpu) = (run::<Gpu>(case, FloatDType::F32), run::<Cpu>(case, FloatDType::F32));
        for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
            let error = relative(gpu, cpu);
            assert!(error < tolerance, "{case:?} output {i}: {error:.2e}");
        }
    }
}

/// Blocks of the persistent kernels work through several tiles each, so that buffers and barriers go round.
/// The portable fp32 kernels, themselves tested against the CPU, stand in for it at this size.
#[test]
fn many_tiles_agree_with_the_portable_kernels() {
    for activation in [
        ExpertActivation::SwiGlu,
        ExpertActivation::ClampedSwiGlu {
            alpha: 1.702,
            limit: 100.0,
        },
    ] {
        let case = Case {
            sizes: [6000, 8, 16, 328, 776],
            activation,
            bias: false,
            weighted: true,
        };
        // bf16 rounds a product, an activation and a gradient, to 2e-3 each
        close(
            &format!("expert_mlp {case:?}"),
            run::<Gpu>(case, FloatDType::BF16),
            run::<Gpu>(case, FloatDType::F32),
            1e-2,
        );
    }
}

/// Values beyond the limit: with numbers that rounding does not move across it, clamped gates and their zero gradients must
/// agree exactly in count.
#[test]
fn clamped_values_pass_no_gradient() {
    let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 1.0 };
    for bias in [false, true] {
        let case = Case {
            sizes: [300, 4, 8, 128, 136],
            activation: clamped,
            bias,
            weighted: true,
        };
        let (gpu, exact) = (run::<Gpu>(case, FloatDType::BF16), run::<Cpu>(case, FloatDType::F32));
        let plain = plain(case, FloatDType::BF16);
        for (i, ((gpu, exact), plain)) in gpu.iter().zip(&exact).zip(&plain).enumerate() {
            let (ours, theirs) = (relative(gpu, exact), relative(plain, exact));
            println!("clamped at 1, output {i}: {ours:.2e} (plain bf16 {theirs:.2e})");
            // a few values near the limit fall on either side; a wrong clamp would be off by tens of percent
            assert!(ours < 2.0 * theirs + 2e-2, "output {i}: {ours:.2e}, plain {theirs:.2e}");
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2] {
        let case = Case {
            sizes: [900, 4, 16, 256, 384],
            activation,
            bias: true,
            weighted: true,
        };
        let first = run::<Gpu>(case, FloatDType::BF16);
        for _ in 0..3 {
            let again = run::<Gpu>(case, FloatDType::BF16);
            for (i, (a, b)) in first.iter().zip(&again).enumerate() {
                assert!(
                    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "output {i} of {activation:?}"
                );
            }
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
