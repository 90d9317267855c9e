//! Dense products through the decorator: every route, layout and gradient, against the CPU.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F16, F32};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Tensor, module::linear};
use burn_ep_backend::EpBackend;
use burn_ep_backend::kernels::dense::route::{Fp32Products, Route, set_fp32_products, with_route};
use burn_ep_backend::kernels::vendor::cublaslt;

use crate::support::{Cpu, FusedGpu, Gpu, close, compare, float, host, poison};

type EpGpu = EpBackend<Gpu>;
type EpCpu = EpBackend<Cpu>;

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Dense,
    /// Last two axes swapped.
    Swapped,
    /// Columns 8.. of a wider tensor.
    Cut,
    /// Axes 1 and 2 of four swapped, as heads and positions are.
    Heads,
    /// Every second row: no matrix layout has that.
    Steps,
}
use Layout::{Cut, Dense, Heads, Steps, Swapped};

fn operand<B: AutodiffBackend, const D: usize>(shape: [usize; D], layout: Layout, seed: u64, dtype: FloatDType) -> [Tensor<B, D>; 2] {
    let mut leaf_shape = shape;
    match layout {
        Swapped => leaf_shape.swap(D - 2, D - 1),
        Cut => leaf_shape[D - 1] += 16,
        Heads => leaf_shape.swap(1, 2),
        Steps => leaf_shape[D - 2] *= 2,
        Dense => {}
    }
    let leaf = float::<B, D>(leaf_shape, seed, false, dtype).require_grad();
    let operand = match layout {
        Dense => leaf.clone(),
        Swapped => leaf.clone().transpose(),
        Cut => leaf.clone().slice_dim(D - 1, 8..shape[D - 1] + 8),
        Heads => leaf.clone().swap_dims(1, 2),
        Steps => {
            // rows 0, 2, 4, ... as the first of every pair
            let mut pairs = shape.to_vec();
            pairs.insert(D - 1, 2);
            let pairs: Vec<usize> = pairs;
            match <[usize; 3]>::try_from(pairs.as_slice()) {
                Ok(pairs) => leaf.clone().reshape(pairs).slice_dim(1, 0..1).reshape(shape),
                Err(_) => unreachable!("steps are for matrices"),
            }
        }
    };
    [leaf, operand]
}

/// Product and both gradients.
fn product<B: AutodiffBackend, const D: usize>(shapes: [[usize; D]; 2], layouts: [Layout; 2], dtype: FloatDType) -> Vec<Vec<f32>> {
    let [a, lhs] = operand::<B, D>(shapes[0], layouts[0], 1, dtype);
    let [b, rhs] = operand::<B, D>(shapes[1], layouts[1], 2, dtype);
    let out = lhs.matmul(rhs);
    let upstream = float::<B, D>(out.dims(), 3, false, dtype);
    let grads = (out.clone() * upstream).sum().backward();
    vec![host(out), host(a.grad(&grads).expect("lhs")), host(b.grad(&grads).expect("rhs"))]
}

/// Burn's own kernel is left out: its autotuning may leave the device in an error state that fails every later test.
const ROUTES: [Route; 2] = [Route::CublasLt, Route::Hopper];

fn check<const D: usize>(shapes: [[usize; D]; 2], layouts: [Layout; 2], dtype: FloatDType) {
    let exact = product::<EpCpu, D>(shapes, layouts, F32);
    let plain = product::<EpCpu, D>(shapes, layouts, dtype);
    for route in ROUTES {
        let name = format!("{route:?} {shapes:?} {layouts:?} {dtype:?}");
        let found = with_route(route, || product::<EpGpu, D>(shapes, layouts, dtype));
        compare(&name, found, exact.clone(), plain.clone());
    }
}

#[test]
fn the_library_is_there() {
    cublaslt::available().expect("libcublasLt on LD_LIBRARY_PATH: the tests of this file compare its results");
}

#[test]
fn products_in_every_layout() {
    poison::<EpGpu>(1 << 20);
    let layouts = [Dense, Swapped, Cut, Steps];
    for a in layouts {
        for b in layouts {
            check([[136, 200], [200, 72]], [a, b], BF16);
        }
    }
    for layouts in [[Dense, Swapped], [Swapped, Dense]] {
        check([[136, 200], [200, 72]], layouts, F16);
    }
}

#[test]
fn products_in_odd_sizes() {
    for shapes in [
        [[1, 64], [64, 1]],
        [[1, 2048], [2048, 96]],
        [[3, 5], [5, 7]],
        [[33, 129], [129, 65]],
        [[130, 8], [8, 1]],
        [[257, 1], [1, 40]],
        [[1000, 24], [24, 8]],
    ] {
        for layouts in [[Dense, Dense], [Dense, Swapped], [Swapped, Dense], [Swapped, Swapped]] {
            check(shapes, layouts, BF16);
        }
    }
}

#[test]
fn products_with_batches() {
    let cases = [
        ([[2, 3, 40, 24], [2, 3, 24, 56]], [Dense, Dense]),
        ([[2, 3, 40, 24], [2, 3, 24, 56]], [Heads, Swapped]),
        ([[2, 3, 40, 24], [2, 3, 24, 56]], [Heads, Heads]),
        ([[2, 3, 40, 24], [1, 1, 24, 56]], [Dense, Dense]),
        ([[2, 3, 40, 24], [1, 1, 24, 56]], [Heads, Swapped]),
        ([[2, 3, 40, 24], [1, 3, 24, 56]], [Dense, Cut]),
        ([[1, 3, 40, 24], [5, 1, 24, 16]], [Dense, Swapped]),
        ([[4, 2, 1, 64], [1, 1, 64, 48]], [Dense, Swapped]),
    ];
    for (shapes, layouts) in cases {
        check(shapes, layouts, BF16);
    }
}

/// Layers of the real models, with few rows so that the CPU keeps up: it computes them once, in fp32 (its bf16 product is slow).
/// What a bf16 path cannot avoid is one rounding of that.
#[test]
fn products_of_the_models() {
    for (m, k, n) in [
        (72, 2048, 4096),
        (130, 2880, 1024),
        (40, 2688, 10_304),
        (70, 2048, 512),
        (136, 7168, 576),
    ] {
        let (shapes, layouts) = ([[m, k], [k, n]], [Dense, Swapped]);
        let exact = product::<EpCpu, 2>(shapes, layouts, F32);
        let rounded = |values: &Vec<f32>| values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect::<Vec<_>>();
        let plain: Vec<Vec<f32>> = exact.iter().map(rounded).collect();
        for route in ROUTES {
            let found = with_route(route, || product::<EpGpu, 2>(shapes, layouts, BF16));
            compare(&format!("{route:?} {shapes:?}"), found, exact.clone(), plain.clone());
        }
    }
}

/// Several tiles in every direction and more row tiles than one wave.
#[test]
fn large_products_agree_between_the_routes() {
    let (m, k, n) = (5000, 520, 1800);
    let run = |route| with_route(route, || product::<EpGpu, 2>([[m, k], [k, n]], [Dense, Swapped], BF16));
    let exact = with_route(Route::CublasLt, || product::<EpGpu, 2>([[m, k], [k, n]], [Dense, Swapped], F32));
    for route in ROUTES {
        close(&format!("{route:?} {m} {k} {n}"), run(route), exact.clone(), 4e-3);
    }
}

#[test]
fn fp32_is_ieee_unless_tf32_is_asked_for() {
    let shapes = [[200, 1000], [1000, 120]];
    let layouts = [Dense, Swapped];
    let exact = product::<EpCpu, 2>(shapes, layouts, F32);
    let run = || with_route(Route::CublasLt, || product::<EpGpu, 2>(shapes, layouts, F32));
    close("ieee", run(), exact.clone(), 2e-6);
    set_fp32_products(Fp32Products::Tf32);
    let tf32 = run();
    set_fp32_products(Fp32Products::Ieee);
    close("tf32", tf32.clone(), exact.clone(), 2e-3);
    assert_ne!(tf32[0], exact[0], "tf32 rounds the operands");
}

fn linear_case<B: AutodiffBackend>(bias: bool, dtype: FloatDType) -> Vec<Vec<f32>> {
    let x = float::<B, 3>([3, 50, 136], 1, false, dtype).require_grad();
    let weight = float::<B, 2>([136, 72], 2, false, dtype).require_grad();
    let bias = bias.then(|| float::<B, 1>([72], 3, false, dtype).require_grad());
    let out = linear(x.clone(), weight.clone(), bias.clone());
    let upstream = float::<B, 3>(out.dims(), 4, false, dtype);
    let grads = (out.clone() * upstream).sum().backward();
    let mut found = vec![
        host(out),
        host(x.grad(&grads).expect("x")),
        host(weight.grad(&grads).expect("weight")),
    ];
    found.extend(bias.map(|bias| host(bias.grad(&grads).expect("bias"))));
    found
}

#[test]
fn linear_with_and_without_bias() {
    for bias in [false, true] {
        let (exact, plain) = (linear_case::<EpCpu>(bias, F32), linear_case::<EpCpu>(bias, BF16));
        for route in ROUTES {
            let found = with_route(route, || linear_case::<EpGpu>(bias, BF16));
            compare(&format!("linear {route:?} bias {bias}"), found, exact.clone(), plain.clone());
        }
    }
}

#[test]
fn products_in_f64() {
    let shapes = [[40, 24], [24, 56]];
    let exact = product::<EpCpu, 2>(shapes, [Dense, Swapped], F32);
    close("f64", product::<EpGpu, 2>(shapes, [Dense, Swapped], FloatDType::F64), exact, 1e-6);
}

#[test]
fn products_under_fusion() {
    let cases = [
        ([[1, 136, 200], [1, 200, 72]], [Dense, Swapped]),
        ([[3, 136, 200], [1, 200, 72]], [Swapped, Dense]),
    ];
    for (shapes, layouts) in cases {
        let exact = product::<EpCpu, 3>(shapes, layouts, F32);
        let plain = product::<EpCpu, 3>(shapes, layouts, BF16);
        let found = product::<EpBackend<FusedGpu>, 3>(shapes, layouts, BF16);
        compare(&format!("fused {shapes:?} {layouts:?}"), found, exact, plain);
    }
    let (exact, plain) = (linear_case::<EpCpu>(true, F32), linear_case::<EpCpu>(true, BF16));
    compare("fused linear", linear_case::<EpBackend<FusedGpu>>(true, BF16), exact, plain);
}

/// More outer batches than library calls: the operands are made dense.
#[test]
fn products_with_many_uneven_batches() {
    check([[70, 3, 8, 16], [70, 1, 16, 8]], [Dense, Dense], BF16);
    check([[70, 3, 8, 16], [1, 3, 16, 8]], [Heads, Dense], BF16);
    check([[70, 3, 8, 16], [1, 3, 16, 8]], [Heads, Swapped], BF16);
}

/// Writes by Burn before and after: the library's stream must wait for the first and be waited for by the second.
#[test]
fn the_library_runs_in_order_with_burn() {
    let device = Default::default();
    let n = 1024;
    let x = Tensor::<EpGpu, 2>::ones([n, n], &device).cast(BF16);
    with_route(Route::CublasLt, || {
        for round in 0..50 {
            let scaled = x.clone() * (round % 3) as f32;
            let out = scaled.matmul(x.clone()) + 1.0;
            let expected = half::bf16::from_f32((n * (round % 3)) as f32 + 1.0).to_f32();
            let found = host(out);
            assert!(
                found.iter().all(|value| *value == expected),
                "round {round}: {} for {expected}",
                found[0]
            );
        }
    });
}

/// Name, M, N, K and how the operands lie: `nt` weights `[N, K]`, `nn` their transpose, `tn` the left operand transposed.
const SPEED: [(&str, usize, usize, usize, &str); 14] = [
    ("square 8192", 8192, 8192, 8192, "nt"),
    ("square 4096", 4096, 4096, 4096, "nt"),
    ("Qwen3-30B q", 16_384, 4096, 2048, "nt"),
    ("Qwen3-30B q, input gradient", 16_384, 2048, 4096, "nn"),
    ("Qwen3-30B q, weight gradient", 4096, 2048, 16_384, "tn"),
    ("Qwen3-30B k", 16_384, 512, 2048, "nt"),
    ("Qwen3-30B k, weight gradient", 512, 2048, 16_384, "tn"),
    ("GPT-OSS q", 8192, 4096, 2880, "nt"),
    ("Nemotron Nano in_proj", 4096, 10_304, 2688, "nt"),
    ("Nemotron Nano in_proj, weight gradient", 10_304, 2688, 4096, "tn"),
    ("DeepSeek-V3 q_b", 4096, 24_576, 1536, "nt"),
    ("vocabulary", 1408, 151_936, 2048, "nt"),
    ("vocabulary, hidden gradient", 1408, 2048, 151_936, "nn"),
    ("vocabulary, weight gradient", 151_936, 2048, 1408, "tn"),
];

#[test]
#[ignore = "takes a minute; prints TFLOP/s"]
fn matmul_speed() {
    type B = <EpGpu as AutodiffBackend>::InnerBackend;
    let device = Default::default();
    let random = |rows: usize, cols: usize| {
        let distribution = burn::tensor::Distribution::Normal(0.0, 1.0);
        Tensor::<B, 2>::random([rows, cols], distribution, (&device, burn::tensor::DType::BF16))
    };
    println!(
        "{:<40} {:>8} {:>8} {:>8}  {:>9} {:>9}  TFLOP/s, median of 7",
        "", "M", "N", "K", "cuBLASLt", "Hopper"
    );
    for (name, m, n, k, kind) in SPEED {
        let a = if kind == "tn" { random(k, m).transpose() } else { random(m, k) };
        let b = if kind == "nt" { random(n, k).transpose() } else { random(k, n) };
        let flop = 2.0 * m as f64 * n as f64 * k as f64;
        let [lt, hopper] = ROUTES.map(|route| with_route(route, || tflops::<B>(flop, || a.clone().matmul(b.clone()))));
        println!("{name:<40} {m:>8} {n:>8} {k:>8}  {lt:>9.0} {hopper:>9.0}");
    }
}

/// In a process of its own, for the reason at [`ROUTES`].
#[test]
#[ignore = "Burn's autotuning takes minutes and may leave the device in an error state; prints TFLOP/s"]
fn burn_product_speed() {
    type B = <EpGpu as AutodiffBackend>::InnerBackend;
    let device = Default::default();
    for (name, m, n, k, _) in SPEED.into_iter().filter(|(.., kind)| *kind == "nt") {
        let [a, b] = [[m, k], [n, k]].map(|shape| Tensor::<B, 2>::ones(shape, &device).cast(BF16));
        let flop = 2.0 * m as f64 * n as f64 * k as f64;
        let burn = with_route(Route::Burn, || tflops::<B>(flop, || a.clone().matmul(b.clone().transpose())));
        println!("{name:<40} {m:>8} {n:>8} {k:>8}  {burn:>9.0}");
    }
}

/// Median over 7 batches of about 30 ms each.
pub fn tflops<B: Backend>(flop: f64, f: impl Fn() -> Tensor<B, 2>) -> f64 {
    let device = Default::default();
    let sync = || B::sync(&device).expect("no earlier kernel failed");
    let batch = |count: usize| {
        sync();
        let start = Instant::now();
        for _ in 0..count {
            drop(f());
        }
        sync();
        start.elapsed().as_secs_f64() / count as f64
    };
    batch(3);
    let count = (0.03 / batch(3)).ceil().clamp(1.0, 2000.0) as usize;
    let mut seconds: Vec<f64> = (0..7).map(|_| batch(count)).collect();
    seconds.sort_by(f64::total_cmp);
    flop / seconds[3] / 1e12
}
