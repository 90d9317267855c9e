//! One layer of routed experts: router, dispatch, experts, combine.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::ops::{ExpertWeights, Route, route};
use burn_ep_backend::{ExpertActivation, RouterDesc};
use burn_moe::backend::Train;
use burn_moe::dispatch::routed_experts;

use super::{max_error, on_ranks};

const TOKENS: usize = 12;
const WIDTH: usize = 6;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const FFN: usize = 5;
const LEARNING_RATE: f64 = 0.02;

/// How tokens choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Choice {
    Router,
    /// Every token takes experts 0 and 1, which live on one rank.
    FirstTwo,
}

/// What one step of training shows, whole tensors.
#[derive(Debug, Clone, Default, PartialEq)]
struct Step {
    loss: f64,
    norm: f64,
    out: Vec<f32>,
    x: Vec<f32>,
    router: Vec<f32>,
    up: Vec<f32>,
    up_bias: Vec<f32>,
    down: Vec<f32>,
}

fn wave(len: usize, phase: f32) -> Vec<f32> {
    (0..len).map(|i| (1.7 * i as f32 + phase).sin()).collect()
}

/// Rows `rows` of a tensor whose first axis has `total` entries.
fn rows<const D: usize>(values: &[f32], shape: [usize; D], rows: std::ops::Range<usize>, device: &Device<Train>) -> Tensor<Train, D> {
    let width: usize = shape[1..].iter().product();
    let mut local = shape;
    local[0] = rows.len();
    let part = values[rows.start * width..rows.end * width].to_vec();
    Tensor::from_data(TensorData::new(part, local), device)
}

fn list<const D: usize>(tensor: Tensor<burn_moe::backend::Infer, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// Two steps of gradient descent on one rank that has `tokens` of the batch.
fn train(ep: &EpGroup, tokens: std::ops::Range<usize>, choice: Choice) -> Vec<Step> {
    let device = Device::<Train>::default();
    let comm = ep.comm().get();
    let local = ep.local_experts(EXPERTS).unwrap();
    let x = wave(TOKENS * WIDTH, 0.1);
    let target = wave(TOKENS * WIDTH, 0.9);
    let mut router: Tensor<Train, 2> = rows(&wave(EXPERTS * WIDTH, 0.2), [EXPERTS, WIDTH], 0..EXPERTS, &device);
    let up_shape = [EXPERTS, 2 * FFN, WIDTH];
    let mut up = rows(&wave(up_shape.iter().product(), 0.3), up_shape, local.clone(), &device);
    let mut up_bias = rows(&wave(EXPERTS * 2 * FFN, 0.4), [EXPERTS, 2 * FFN], local.clone(), &device);
    let down_shape = [EXPERTS, WIDTH, FFN];
    let mut down = rows(&wave(down_shape.iter().product(), 0.5), down_shape, local.clone(), &device);

    (0..2)
        .map(|_| {
            let t = tokens.len();
            let x = rows(&x, [TOKENS, WIDTH], tokens.clone(), &device).require_grad();
            let target: Tensor<Train, 2> = rows(&target, [TOKENS, WIDTH], tokens.clone(), &device);
            for weight in [&mut router, &mut up_bias] {
                *weight = weight.clone().detach().require_grad();
            }
            for weight in [&mut up, &mut down] {
                *weight = weight.clone().detach().require_grad();
            }

            let logits = x.clone().matmul(router.clone().transpose());
            let replay = (choice == Choice::FirstTwo).then(|| {
                let ids: Vec<i32> = (0..t).flat_map(|_| [0, 1]).collect();
                Tensor::<Train, 2, Int>::from_data(TensorData::new(ids, [t, TOP_K]), &device)
            });
            let chosen: Route<Train> = route(logits, None, replay, &RouterDesc::softmax(EXPERTS, TOP_K, true)).unwrap();
            let experts = ExpertWeights {
                up: up.clone(),
                up_bias: Some(up_bias.clone()),
                down: down.clone(),
                down_bias: None,
            };
            let out = routed_experts(x.clone(), chosen, experts, ExpertActivation::SwiGlu, EXPERTS, Some(ep)).unwrap();
            let loss = (out.clone() - target).powi_scalar(2).sum() / TOKENS as f64;
            comm.barrier().unwrap();
            let grads = loss.backward();
            ep.comm().check().unwrap();

            let mut step = Step {
                out: list(out.inner()),
                x: list(x.grad(&grads).unwrap()),
                router: list(router.grad(&grads).unwrap()),
                up: list(up.grad(&grads).unwrap()),
                up_bias: list(up_bias.grad(&grads).unwrap()),
                down: list(down.grad(&grads).unwrap()),
                ..Step::default()
            };
            comm.all_reduce_sum(&mut step.router).unwrap();
            let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            let mut sums = [
                loss.into_data().iter::<f64>().next().unwrap(),
                square(&step.up) + square(&step.up_bias) + square(&step.down),
            ];
            comm.all_reduce_sum_f64(&mut sums).unwrap();
            step.loss = sums[0];
            step.norm = (sums[1] + square(&step.router)).sqrt();

            let router_grad = Tensor::from_data(TensorData::new(step.router.clone(), [EXPERTS, WIDTH]), &device);
            router = router.clone() - router_grad * LEARNING_RATE;
            let descend = |w: &Tensor<Train, 3>| w.clone() - Tensor::from_inner(w.grad(&grads).unwrap()) * LEARNING_RATE;
            up = descend(&up);
            down = descend(&down);
            up_bias = up_bias.clone() - Tensor::from_inner(up_bias.grad(&grads).unwrap()) * LEARNING_RATE;
            step
        })
        .collect()
}

/// Two steps of the whole group, tensors of the ranks joined. `share[r]` tokens are on rank r.
fn run(share: &[usize], choice: Choice) -> Vec<Step> {
    assert_eq!(share.iter().sum::<usize>(), TOKENS);
    let ranks = on_ranks(share.len(), |ep| {
        let start: usize = share[..ep.rank()].iter().sum();
        train(&ep, start..start + share[ep.rank()], choice)
    });
    (0..2)
        .map(|s| {
            let mut whole = Step {
                router: ranks[0][s].router.clone(),
                loss: ranks[0][s].loss,
                norm: ranks[0][s].norm,
                ..Step::default()
            };
            for rank in &ranks {
                let part = &rank[s];
                assert_eq!(
                    (part.loss, part.norm, &part.router),
                    (whole.loss, whole.norm, &whole.router),
                    "ranks differ"
                );
                whole.out.extend(&part.out);
                whole.x.extend(&part.x);
                whole.up.extend(&part.up);
                whole.up_bias.extend(&part.up_bias);
                whole.down.extend(&part.down);
            }
            whole
        })
        .collect()
}

fn assert_same(found: &[Step], expected: &[Step], what: &str) {
    for (s, (found, expected)) in found.iter().zip(expected).enumerate() {
        let numbers = |step: &Step| [step.loss as f32, step.norm as f32];
        for (name, error) in [
            ("loss and norm", max_error(&numbers(found), &numbers(expected))),
            ("output", max_error(&found.out, &expected.out)),
            ("d(input)", max_error(&found.x, &expected.x)),
            ("d(router)", max_error(&found.router, &expected.router)),
            ("d(up)", max_error(&found.up, &expected.up)),
            ("d(up bias)", max_error(&found.up_bias, &expected.up_bias)),
            ("d(down)", max_error(&found.down, &expected.down)),
        ] {
            assert!(error < 1e-5, "{what}, step {s}, {name}: largest relative error {error:e}");
        }
    }
}

/// The layer in plain loops and fp64: its output for the first step.
fn by_hand(choice: Choice) -> Vec<f32> {
    let (x, router) = (wave(TOKENS * WIDTH, 0.1), wave(EXPERTS * WIDTH, 0.2));
    let (up, up_bias) = (wave(EXPERTS * 2 * FFN * WIDTH, 0.3), wave(EXPERTS * 2 * FFN, 0.4));
    let down = wave(EXPERTS * WIDTH * FFN, 0.5);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let mut out = Vec::new();
    for x in x.chunks(WIDTH) {
        let scores: Vec<f64> = router.chunks(WIDTH).map(|w| dot(x, w).exp()).collect();
        let mut chosen: Vec<usize> = (0..EXPERTS).collect();
        chosen.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        if choice == Choice::FirstTwo {
            chosen = vec![0, 1];
        }
        chosen.truncate(TOP_K);
        let total: f64 = chosen.iter().map(|e| scores[*e]).sum();
        let mut y = [0.0f64; WIDTH];
        for e in chosen {
            let hidden: Vec<f64> = (0..2 * FFN)
                .map(|i| {
                    let row = (e * 2 * FFN + i) * WIDTH;
                    dot(x, &up[row..row + WIDTH]) + f64::from(up_bias[e * 2 * FFN + i])
                })
                .collect();
            let active: Vec<f32> = (0..FFN)
                .map(|i| (hidden[i] / (1.0 + (-hidden[i]).exp()) * hidden[FFN + i]) as f32)
                .collect();
            for (d, y) in y.iter_mut().enumerate() {
                let row = (e * WIDTH + d) * FFN;
                *y += scores[e] / total * dot(&active, &down[row..row + FFN]);
            }
        }
        out.extend(y.map(|v| v as f32));
    }
    out
}

#[test]
fn the_layer_computes_what_its_definition_says() {
    for choice in [Choice::Router, Choice::FirstTwo] {
        let error = max_error(&run(&[TOKENS], choice)[0].out, &by_hand(choice));
        assert!(error < 1e-5, "{choice:?}: {error:e}");
    }
}

// pytorch#160285, Megatron#5956, transformers#48205, #48687, DeepSpeed#8213, megablocks#86.
#[test]
fn two_steps_agree_for_every_group_size() {
    let expected = run(&[TOKENS], Choice::Router);
    assert!(expected[1].loss < expected[0].loss, "the second step sees other weights");
    for share in [&[6, 6][..], &[5, 7], &[3, 3, 3, 3], &[1, 2, 4, 5]] {
        assert_same(&run(share, Choice::Router), &expected, &format!("tokens {share:?}"));
    }
}

// Automodel#935, Megatron#1877, DeepEP#374, LlamaFactory#9628.
#[test]
fn all_tokens_on_the_experts_of_one_rank() {
    let started = Instant::now();
    let expected = run(&[TOKENS], Choice::FirstTwo);
    for share in [&[6, 6][..], &[3, 3, 3, 3]] {
        let found = run(share, Choice::FirstTwo);
        assert_same(&found, &expected, &format!("tokens {share:?}"));
        for step in &found {
            let unused = &step.up[2 * 2 * FFN * WIDTH..];
            assert!(unused.iter().all(|g| *g == 0.0), "experts without tokens have exact zero gradients");
            assert!(step.down[2 * WIDTH * FFN..].iter().all(|g| *g == 0.0));
        }
        assert!(found[1].loss < found[0].loss, "the step was taken");
    }
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_rank_without_tokens_takes_part() {
    for choice in [Choice::Router, Choice::FirstTwo] {
        let expected = run(&[TOKENS], choice);
        for share in [&[TOKENS, 0][..], &[0, TOKENS], &[0, 7, 0, 5]] {
            assert_same(&run(share, choice), &expected, &format!("{choice:?}, tokens {share:?}"));
        }
    }
}

// torchtitan#4258, axolotl#3461.
#[test]
fn a_number_of_experts_that_does_not_divide_is_refused_with_both_numbers() {
    let errors = on_ranks(8, |ep| ep.local_experts(63).unwrap_err().to_string());
    for error in errors {
        assert!(
            error.contains("`num_experts` is 63") && error.contains("expert-parallel size 8"),
            "{error}"
        );
    }
}

#[test]
fn an_error_on_one_rank_ends_the_others() {
    let started = Instant::now();
    let errors = on_ranks(2, |ep| {
        let device = Device::<Train>::default();
        // Rank 1 brings the weights of all experts instead of its own.
        let held = if ep.rank() == 0 { EXPERTS / 2 } else { EXPERTS };
        let route = Route {
            weights_tk: Tensor::<Train, 2>::ones([1, 1], &device),
            ids_tk: Tensor::<Train, 2, Int>::zeros([1, 1], &device),
        };
        let experts = ExpertWeights {
            up: Tensor::<Train, 3>::ones([held, FFN, WIDTH], &device),
            up_bias: None,
            down: Tensor::<Train, 3>::ones([held, WIDTH, FFN], &device),
            down_bias: None,
        };
        let x = Tensor::<Train, 2>::ones([1, WIDTH], &device);
        routed_experts(x, route, experts, ExpertActivation::Relu2, EXPERTS, Some(&ep))
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors[1].contains("4 stacked experts (experts 4..8 of rank 1 of 2)"),
        "{}",
        errors[1]
    );
    assert!(errors[0].contains("rank 1 aborted the group"), "{}", errors[0]);
    assert!(started.elapsed() < Duration::from_secs(5));
}
