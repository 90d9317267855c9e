//! Speed of the expert layer at published widths, not run by default:
//!
//! ```text
//! cargo test --release -p burn-ep-backend --features cuda --test gpu -- --ignored --nocapture experts_speed
//! ```
//!
//! `benches/torch_experts.py` prints the same rows for PyTorch. Time is the median of batches of about 30 ms between two
//! synchronisations; TFLOP/s counts `2 rows inner columns` of each product and nothing else.

use std::time::Instant;

use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::ops::sort_by_expert;
use burn_ep_backend::{Cuda, ExpertActivation, ExpertOrderPrim, ExpertWeightsPrim, MoeBackend};

type Float = <Cuda as BackendTypes>::FloatTensorPrimitive;

struct Model {
    name: &'static str,
    hidden: usize,
    width: usize,
    experts: usize,
    top_k: usize,
    activation: ExpertActivation,
    bias: bool,
}

const TOKENS: usize = 16_384;

fn models() -> [Model; 4] {
    let model = |name, [hidden, width, experts, top_k]: [usize; 4], activation, bias| Model {
        name,
        hidden,
        width,
        experts,
        top_k,
        activation,
        bias,
    };
    let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
    [
        model("Qwen3-30B-A3B", [2048, 768, 128, 8], ExpertActivation::SwiGlu, false),
        model("Nemotron-3-Nano", [2688, 1856, 128, 6], ExpertActivation::Relu2, false),
        model("GPT-OSS-20B", [2880, 2880, 32, 4], clamped, true),
        model(
            "DeepSeek-V3 (64 of 256 experts)",
            [7168, 2048, 64, 8],
            ExpertActivation::SwiGlu,
            false,
        ),
    ]
}

/// Distinct experts of every token. Skewed: probability falls with the 0.7th power of a shuffled rank, one in eight is empty.
fn ids(experts: usize, top_k: usize, skewed: bool) -> Vec<i32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut order: Vec<usize> = (0..experts).collect();
    for i in (1..experts).rev() {
        order.swap(i, (next() * (i + 1) as f64) as usize);
    }
    let mut ends = vec![0.0; experts];
    let mut sum = 0.0;
    for (rank, &expert) in order.iter().enumerate() {
        ends[expert] = match skewed {
            true if rank % 8 == 7 => 0.0,
            true => ((rank + 1) as f64).powf(-0.7),
            false => 1.0,
        };
    }
    for end in &mut ends {
        sum += *end;
        *end = sum;
    }
    let mut ids = Vec::with_capacity(TOKENS * top_k);
    for _ in 0..TOKENS {
        let start = ids.len();
        while ids.len() < start + top_k {
            let draw = next() * sum;
            let expert = ends.partition_point(|&end| end <= draw).min(experts - 1) as i32;
            if !ids[start..].contains(&expert) {
                ids.push(expert);
            }
        }
    }
    ids
}

/// Median time in seconds of one call.
fn time(mut run: impl FnMut()) -> f64 {
    let device = Default::default();
    let mut batch = |calls: usize| {
        Cuda::sync(&device).expect("no device error");
        let start = Instant::now();
        (0..calls).for_each(|_| run());
        Cuda::sync(&device).expect("no device error");
        start.elapsed().as_secs_f64() / calls as f64
    };
    batch(2);
    let calls = ((0.03 / batch(2)) as usize).clamp(1, 200);
    let mut times: Vec<f64> = (0..9).map(|_| batch(calls)).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn random<const N: usize>(shape: [usize; N], deviation: f64) -> Float {
    let tensor = Tensor::<Cuda, N>::random(shape, Distribution::Normal(0.0, deviation), &Default::default());
    tensor.cast(FloatDType::BF16).into_primitive().tensor()
}

fn report(model: &str, routing: &str, what: &str, flop: f64, seconds: f64) {
    println!(
        "{model} | {routing} | {what} | {:.3} ms | {:.0} TFLOP/s",
        seconds * 1e3,
        flop / seconds / 1e12
    );
}

#[test]
#[ignore = "takes a minute of an H200"]
fn experts_speed() {
    for model in models() {
        let Model {
            name,
            hidden: d,
            width: f,
            experts: e,
            top_k: k,
            activation,
            bias,
        } = model;
        let (rows, f_up) = (TOKENS * k, f * activation.up_factor());
        let x = random([TOKENS, d], 1.0);
        let experts = ExpertWeightsPrim::<Cuda> {
            up: random([e, f_up, d], (d as f64).powf(-0.5)),
            up_bias: bias.then(|| random([e, f_up], 0.1)),
            down: random([e, d, f], (f as f64).powf(-0.5)),
            down_bias: bias.then(|| random([e, d], 0.1)),
        };
        let weights = Tensor::<Cuda, 2>::random([TOKENS, k], Distribution::Uniform(0.0, 1.0), &Default::default());
        let weights = weights.into_primitive().tensor();
        for (routing, skewed) in [("balanced", false), ("skewed", true)] {
            let ids = TensorData::new(ids(e, k, skewed), [TOKENS, k]);
            let order = sort_by_expert(Tensor::<Cuda, 2, Int>::from_data(ids, &Default::default()), e).expect("valid");
            let order = ExpertOrderPrim::<Cuda> {
                slots_r: order.slots_r.into_primitive(),
                positions_r: order.positions_r.into_primitive(),
                offsets_e1: order.offsets_e1.into_primitive(),
            };
            let flop = |columns: usize, inner: usize| 2.0 * rows as f64 * columns as f64 * inner as f64;
            let offsets = || order.offsets_e1.clone();
            let line = |what: &str, flop: f64, run: &mut dyn FnMut()| report(name, routing, what, flop, time(run));

            let rows_d = random([rows, d], 1.0);
            let rows_f = random([rows, f], 1.0);
            let rows_up = random([rows, f_up], 1.0);
            line("up product", flop(f_up, d), &mut || {
                drop(Cuda::grouped_matmul(rows_d.clone(), experts.up.clone(), offsets()))
            });
            line("down product", flop(d, f), &mut || {
                drop(Cuda::grouped_matmul(rows_f.clone(), experts.down.clone(), offsets()))
            });
            line("down: gradient of rows", flop(d, f), &mut || {
                drop(Cuda::grouped_matmul_grad_rows(rows_d.clone(), experts.down.clone(), offsets()))
            });
            line("down: gradient of weight", flop(d, f), &mut || {
                drop(Cuda::grouped_matmul_grad_weight(rows_d.clone(), rows_f.clone(), offsets()))
            });
            line("up: gradient of rows", flop(f_up, d), &mut || {
                drop(Cuda::grouped_matmul_grad_rows(rows_up.clone(), experts.up.clone(), offsets()))
            });
            line("up: gradient of weight", flop(f_up, d), &mut || {
                drop(Cuda::grouped_matmul_grad_weight(rows_up.clone(), rows_d.clone(), offsets()))
            });
            line("permute", 0.0, &mut || drop(Cuda::moe_permute(x.clone(), &order, k)));
            line("combine", 0.0, &mut || {
                drop(Cuda::moe_unpermute(rows_d.clone(), &order, Some(weights.clone()), k))
            });
            drop((rows_f, rows_up, rows_d));
            fused(
                name,
                routing,
                &x,
                &weights,
                &order,
                &experts,
                k,
                activation,
                [flop(f_up, d), flop(d, f)],
            );

            let layer = flop(f_up, d) + flop(d, f);
            let forward = || Cuda::expert_mlp(x.clone(), &order, Some(weights.clone()), &experts, k, activation);
            line("layer forward", layer, &mut || drop(forward()));
            let up_rf = forward().up_rf;
            let backward = |up_rf: Float| {
                Cuda::expert_mlp_backward(x.clone(), x.clone(), up_rf, &order, Some(weights.clone()), &experts, k, activation)
            };
            line("layer backward", 2.0 * layer, &mut || drop(backward(up_rf.clone())));
            drop(up_rf);
            line("layer forward and backward", 3.0 * layer, &mut || drop(backward(forward().up_rf)));
        }
    }
}

/// The fused products on their own, where the Hopper kernels take the layer.
fn fused(
    name: &str,
    routing: &str,
    x: &Float,
    weights: &Float,
    order: &ExpertOrderPrim<Cuda>,
    experts: &ExpertWeightsPrim<Cuda>,
    top_k: usize,
    activation: ExpertActivation,
    [up_flop, down_flop]: [f64; 2],
) {
    use burn_ep_backend::kernels::hopper::experts as kernels;
    if !kernels::supports(x, order, experts) {
        return;
    }
    let (slots, offsets) = (&order.slots_r, &order.offsets_e1);
    let line = |what: &str, flop: f64, run: &mut dyn FnMut()| report(name, routing, what, flop, time(run));
    let up = || {
        let (weight, bias) = (experts.up.clone(), experts.up_bias.clone());
        kernels::up(x, weight, bias, slots, offsets, top_k, activation)
    };
    line("fused gather, up, activation", up_flop, &mut || drop(up()));
    let [up_rf, _] = up();
    let grad_act = || {
        let (down, weights) = (experts.down.clone(), Some(weights.clone()));
        kernels::activation_backward(x, down, up_rf.clone(), weights, slots, offsets, top_k, activation)
    };
    line("fused gather, grad down, activation backward", down_flop, &mut || drop(grad_act()));
}
