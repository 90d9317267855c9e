//! Vocabulary projection with cross entropy.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F16, F32};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::{CrossEntropyDesc, MoeBackend, ops::linear_cross_entropy};

use crate::support::{Cpu, FusedGpu, Gpu, close, compare, float, host, poison};

/// Rows, width, vocabulary, chunk.
type Case = (usize, usize, usize, usize);

/// What is unusual about the inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Inputs {
    Plain,
    /// No row counts.
    AllIgnored,
    /// Hidden is a transposed view, the weight a part of a wider one.
    Strided,
}

fn labels<B: Backend>(labels: Vec<i32>) -> Tensor<B, 1, Int> {
    let n = labels.len();
    Tensor::from_data(TensorData::new(labels, [n]), &Default::default())
}

fn some_labels(t: usize, v: usize, inputs: Inputs) -> Vec<i32> {
    let label = |row: usize| {
        if inputs == Inputs::AllIgnored || row % 5 == 1 {
            -100
        } else {
            ((row * 7 + v - 1) % v) as i32
        }
    };
    (0..t).map(label).collect()
}

/// Loss, and both gradients for the upstream gradient 0.37.
fn loss<B>(case: Case, inputs: Inputs, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (t, d, v, chunk) = case;
    let desc = CrossEntropyDesc { ignore_index: -100, chunk };
    let strided = inputs == Inputs::Strided;
    let hidden = float::<B, 2>(if strided { [d, t] } else { [t, d] }, 1, false, dtype).require_grad();
    let columns = if strided { d + 16 } else { d };
    // logits of a size near 1, which low precision resolves
    let weight = float::<B, 2>([v, columns], 2, false, F32).mul_scalar((d as f32).powf(-0.5));
    let weight = weight.cast(BF16).cast(dtype).detach().require_grad();
    let (h, w) = match strided {
        true => (hidden.clone().transpose(), weight.clone().slice_dim(1, 8..8 + d)),
        false => (hidden.clone(), weight.clone()),
    };
    let labels = labels::<B>(some_labels(t, v, inputs));
    let loss = linear_cross_entropy(h, w, labels, &desc).expect("valid shapes");
    let grads = (loss.clone() * 0.37).backward();
    vec![
        host(loss),
        host(hidden.grad(&grads).expect("hidden")),
        host(weight.grad(&grads).expect("weight")),
    ]
}

const CASES: [Case; 6] = [
    (1, 8, 5, 16),
    (37, 64, 1001, 16),
    (130, 96, 333, 1024),
    (256, 128, 5000, 100),
    (5, 24, 8, 2),
    (300, 72, 40_000, 64),
];

#[test]
fn linear_cross_entropy_matches_the_reference() {
    poison::<Gpu>(1 << 22);
    for case in CASES {
        for inputs in [Inputs::Plain, Inputs::Strided] {
            let name = |dtype: &str| format!("loss {case:?} {inputs:?} {dtype}");
            let exact = loss::<Cpu>(case, inputs, F32);
            close(&name("fp32"), loss::<Gpu>(case, inputs, F32), exact.clone(), 2e-5);
            for dtype in [BF16, F16] {
                compare(
                    &name(&format!("{dtype:?}")),
                    loss::<Gpu>(case, inputs, dtype),
                    exact.clone(),
                    loss::<Cpu>(case, inputs, dtype),
                );
            }
        }
    }
}

/// A published vocabulary; few tokens, so that the CPU keeps up.
#[test]
fn a_vocabulary_of_152k() {
    let case = (24, 64, 151_936, 8);
    let exact = loss::<Cpu>(case, Inputs::Plain, F32);
    let plain = loss::<Cpu>(case, Inputs::Plain, BF16);
    compare("loss 152k", loss::<Gpu>(case, Inputs::Plain, BF16), exact, plain);
}

#[test]
fn the_loss_under_fusion() {
    let case = (130, 96, 333, 64);
    let found = loss::<FusedGpu>(case, Inputs::Plain, BF16);
    assert_eq!(found, loss::<Gpu>(case, Inputs::Plain, BF16));
}

#[test]
fn nothing_to_count_is_zero() {
    for dtype in [BF16, F32] {
        let outputs = loss::<Gpu>((9, 16, 40, 4), Inputs::AllIgnored, dtype);
        assert!(outputs.iter().flatten().all(|value| *value == 0.0));
    }
}

#[test]
fn a_label_outside_the_vocabulary_is_nan_and_gets_no_gradient() {
    let run = |bad: i32| {
        let hidden = float::<Gpu, 2>([3, 16], 1, false, BF16).require_grad();
        let weight = float::<Gpu, 2>([40, 16], 2, false, BF16).require_grad();
        let loss = linear_cross_entropy(
            hidden.clone(),
            weight.clone(),
            labels(vec![1, bad, -100]),
            &CrossEntropyDesc::default(),
        );
        let loss = loss.expect("valid shapes");
        let grads = loss.clone().backward();
        (
            host(loss)[0],
            host(hidden.grad(&grads).expect("hidden")),
            host(weight.grad(&grads).expect("weight")),
        )
    };
    let (_, hidden, weight) = run(-100);
    for bad in [40, 1 << 30, -1] {
        let (loss, found_hidden, found_weight) = run(bad);
        assert!(loss.is_nan(), "label {bad}");
        assert_eq!((found_hidden, found_weight), (hidden.clone(), weight.clone()));
    }
}

#[test]
fn without_tracking_only_the_loss_is_computed() {
    type Inner = <Gpu as AutodiffBackend>::InnerBackend;
    let case = (130, 96, 333, 64);
    let tracked = loss::<Gpu>(case, Inputs::Plain, BF16)[0][0];
    let hidden = float::<Inner, 2>([130, 96], 1, false, BF16);
    let weight = float::<Inner, 2>([333, 96], 2, false, F32).mul_scalar(96f32.powf(-0.5)).cast(BF16);
    let desc = CrossEntropyDesc {
        ignore_index: -100,
        chunk: 64,
    };
    let untracked = linear_cross_entropy(hidden, weight, labels(some_labels(130, 333, Inputs::Plain)), &desc).expect("valid shapes");
    assert_eq!(host(untracked)[0], tracked);
}

#[test]
fn two_runs_agree_bit_for_bit() {
    let case = (300, 128, 5000, 64);
    assert_eq!(loss::<Gpu>(case, Inputs::Plain, BF16), loss::<Gpu>(case, Inputs::Plain, BF16));
}

/// Bytes that CubeCL's pools use and hold on this device.
fn memory() -> (u64, u64) {
    use cubecl::Runtime;
    let usage = cubecl::cuda::CudaRuntime::client(&Default::default())
        .memory_usage()
        .expect("healthy device");
    (usage.bytes_in_use, usage.bytes_reserved)
}

/// 16k tokens, hidden width 2048, 152k entries: forward and both gradients.
#[test]
#[ignore = "needs 8 GB; prints milliseconds and TFLOP/s"]
fn cross_entropy_speed() {
    type B = <Gpu as AutodiffBackend>::InnerBackend;
    let (t, d, v) = (16_384, 2048, 151_936);
    let device = Default::default();
    let random = |rows: usize, std: f64| {
        let distribution = burn::tensor::Distribution::Normal(0.0, std);
        Tensor::<B, 2>::random([rows, d], distribution, (&device, burn::tensor::DType::BF16))
    };
    let (hidden, weight) = (random(t, 1.0), random(v, (d as f64).powf(-0.5)));
    let labels = labels::<B>((0..t).map(|row| ((row * 7919) % v) as i32).collect());
    let sync = || B::sync(&device).expect("no earlier kernel failed");
    let desc = CrossEntropyDesc::default();
    let run = |with_grads: bool| {
        let [hidden, weight] = [&hidden, &weight].map(|t| t.clone().into_primitive().tensor());
        B::linear_cross_entropy(hidden, weight, labels.clone().into_primitive(), with_grads, &desc)
    };
    for with_grads in [true, false] {
        drop(run(with_grads));
        sync();
        let mut seconds: Vec<f64> = (0..7)
            .map(|_| {
                let start = Instant::now();
                drop(run(with_grads));
                sync();
                start.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        let products = if with_grads { 3.0 } else { 1.0 };
        let flop = products * 2.0 * t as f64 * d as f64 * v as f64;
        println!(
            "loss T {t} D {d} V {v} gradients {with_grads}: {:.1} ms, {:.0} TFLOP/s (median of 7, best {:.1} ms)",
            seconds[3] * 1e3,
            flop / seconds[3] / 1e12,
            seconds[0] * 1e3
        );
    }
    // the logits of a chunk are the largest buffer that does not outlive the call; the pools keep what was used at the peak
    let (before, _) = memory();
    let kept = run(true);
    sync();
    let (after, reserved) = memory();
    let results = (t * d + v * d) as u64 * 2;
    drop(kept);
    println!(
        "in use before {} MB, after {} MB with results of {} MB; reserved {} MB; logits of a chunk {} MB",
        before >> 20,
        after >> 20,
        results >> 20,
        reserved >> 20,
        (1408 * v * 2) >> 20
    );
}
