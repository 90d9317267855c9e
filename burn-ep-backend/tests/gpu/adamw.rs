//! Fused AdamW.

use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_ep_backend::ops::{AdamWState, adamw_step};
use burn_ep_backend::{AdamWDesc, MoeBackend};

use crate::support::{Cpu, Gpu, float, host, random, relative};

/// Dtypes of param, gradient, both moments, and whether there is a master copy.
type Dtypes = ([FloatDType; 4], bool);

fn train<B: MoeBackend>(shape: [usize; 2], (dtypes, master): Dtypes, shared: bool) -> Vec<Vec<f32>> {
    let device = Default::default();
    let [param, grad, m, v] = dtypes;
    let value = Tensor::<B, 2>::from_data(random(&shape, 1), &device);
    let mut state = AdamWState {
        param: value.clone().cast(param),
        m: Tensor::<B, 2>::zeros(shape, &device).cast(m),
        v: Tensor::<B, 2>::zeros(shape, &device).cast(v),
        master: master.then_some(value),
    };
    let scale = Tensor::<B, 1>::full([1], 0.5, &device);
    let first = shared.then(|| state.clone());
    for step in 1..=3 {
        let desc = desc(step);
        let grad = float::<B, 2>(shape, 10 + step, step == 2, grad);
        let scale = (step > 1).then(|| scale.clone());
        state = adamw_step(state, grad, scale, &desc).expect("valid settings");
    }
    let tensors = |state: AdamWState<B, 2>| {
        let mut values = vec![host(state.param), host(state.m), host(state.v)];
        values.extend(state.master.map(host));
        values
    };
    let mut values = tensors(state);
    // what others hold must not change under their hands
    values.extend(first.into_iter().flat_map(tensors));
    values
}

#[test]
fn adamw_matches_the_reference() {
    use FloatDType::{BF16, F32};
    type GpuInner = <Gpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    type CpuInner = <Cpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    for shape in [[1, 1], [3, 5], [33, 1000], [257, 512]] {
        for dtypes in [
            ([F32; 4], false),
            ([BF16; 4], false),
            ([BF16, BF16, F32, F32], true),
            ([BF16, F32, BF16, F32], true),
        ] {
            for shared in [false, true] {
                let gpu = train::<GpuInner>(shape, dtypes, shared);
                let cpu = train::<CpuInner>(shape, dtypes, shared);
                for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
                    // bf16 state may round the other way
                    let tolerance = if dtypes.0 == [F32; 4] { 1e-5 } else { 4e-3 };
                    let error = relative(gpu, cpu);
                    assert!(error < tolerance, "{shape:?} {dtypes:?} shared {shared} output {i}: {error:.2e}");
                }
            }
        }
    }
}

#[test]
fn a_scale_that_is_not_finite_changes_nothing() {
    use FloatDType::{BF16, F32};
    type GpuInner = <Gpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    let device = Default::default();
    let shape = [33, 1000];
    for (shared, scale) in [(false, f32::NAN), (true, f32::INFINITY), (false, f32::NEG_INFINITY)] {
        let state = || AdamWState::<GpuInner, 2> {
            param: float(shape, 1, false, BF16),
            m: float(shape, 2, false, F32),
            v: float::<GpuInner, 2>(shape, 3, false, F32).abs(),
            master: Some(float(shape, 4, false, F32)),
        };
        let desc = AdamWDesc {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 1,
            stochastic_rounding: None,
        };
        let before = state();
        let held = shared.then(|| before.clone());
        let grad = Tensor::<GpuInner, 2>::full(shape, f32::NAN, &device);
        let after = adamw_step(before, grad, Some(Tensor::full([1], scale, &device)), &desc).expect("valid settings");
        let values = |state: AdamWState<GpuInner, 2>| [host(state.param), host(state.m), host(state.v), host(state.master.expect("kept"))];
        assert!(values(after) == values(state()), "shared {shared} scale {scale}");
        drop(held);
    }
}

/// The noise is a function of seed and index, so the two backends differ only where another order of rounding in fp32 moves a
/// value across the threshold.
#[test]
fn stochastic_rounding_is_that_of_the_cpu() {
    use FloatDType::BF16;
    type GpuInner = <Gpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    type CpuInner = <Cpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    fn step<B: MoeBackend>(shape: [usize; 2], seed: Option<u32>) -> [Vec<f32>; 3] {
        let state = AdamWState::<B, 2> {
            param: float(shape, 1, false, BF16),
            m: float(shape, 2, false, BF16),
            v: float::<B, 2>(shape, 3, false, BF16).abs(),
            master: None,
        };
        let desc = AdamWDesc {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 7,
            stochastic_rounding: seed,
        };
        let out = adamw_step(state, float(shape, 4, false, BF16), None, &desc).expect("valid settings");
        [host(out.param), host(out.m), host(out.v)]
    }
    for shape in [[33, 1000], [7, 13]] {
        let (gpu, cpu) = (step::<GpuInner>(shape, Some(5)), step::<CpuInner>(shape, Some(5)));
        let nearest = step::<CpuInner>(shape, None);
        for (i, ((gpu, cpu), nearest)) in gpu.iter().zip(&cpu).zip(&nearest).enumerate() {
            let different = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
            assert!(
                different(gpu, cpu) * 100 <= gpu.len(),
                "{shape:?} output {i}: {} differ",
                different(gpu, cpu)
            );
            assert!(
                different(cpu, nearest) > 0,
                "{shape:?} output {i}: nothing was rounded the other way"
            );
            assert!(relative(gpu, cpu) < 2e-3, "{shape:?} output {i}");
        }
    }
}

type Moments = (Vec<f32>, Vec<f32>);

/// 20 steps with 8-bit moments: the parameter (the master if there is one), and both moments as codes and as numbers.
fn eight_bit_steps<B: MoeBackend>(shape: [usize; 2], dtype: FloatDType, master: bool) -> (Vec<f32>, [Moments; 2]) {
    use burn::tensor::{IntDType, TensorPrimitive};
    use burn_ep_backend::reference::adamw8::{BLOCK, decode};
    use burn_ep_backend::{AdamW8Prim, Block8Prim};
    let (device, n) = (Default::default(), shape[0] * shape[1]);
    let zeros = || Block8Prim::<B> {
        codes: B::int_zeros([n].into(), &device, IntDType::U8),
        scales: B::float_zeros([n.div_ceil(BLOCK)].into(), &device, FloatDType::F32),
    };
    let prim = |t: Tensor<B, 2>| t.into_primitive().tensor();
    let mut state = AdamW8Prim::<B> {
        param: prim(float(shape, 1, false, dtype)),
        m: zeros(),
        v: zeros(),
        master: master.then(|| prim(float(shape, 1, false, FloatDType::F32))),
    };
    for step in 1..=20 {
        let (grad, scale) = eight_bit_gradient::<B>(shape, step, dtype);
        let scale = scale.map(|scale| scale.into_primitive().tensor());
        state = B::adamw8_step(state, prim(grad), scale, &desc(step));
    }
    let values = |p| host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(p)));
    let moments = [(state.m, true), (state.v, false)].map(|(block, signed)| {
        let codes = Tensor::<B, 1, burn::tensor::Int>::from_primitive(block.codes.clone()).float();
        (host(codes), values(decode::<B>(block, signed, shape.into())))
    });
    (values(state.master.unwrap_or(state.param)), moments)
}

fn desc(step: u64) -> AdamWDesc {
    AdamWDesc {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        step,
        stochastic_rounding: None,
    }
}

/// Rows of very different size, some of them zero, and in every second step a clipping factor.
fn eight_bit_gradient<B: MoeBackend>(shape: [usize; 2], step: u64, dtype: FloatDType) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
    let device = Default::default();
    let sizes: Vec<f32> = (0..shape[0]).map(|i| [1.0, 1e-3, 0.0][i % 3]).collect();
    let rows = Tensor::<B, 2>::from_data(TensorData::new(sizes, [shape[0], 1]), &device);
    let grad = float::<B, 2>(shape, 10 + step, step == 2, FloatDType::F32) * rows;
    let scale = (step % 2 == 0).then(|| Tensor::<B, 1>::full([1], 0.5, (&device, burn::tensor::DType::F32)));
    (grad.cast(dtype), scale)
}

/// The random numbers of the 8-bit codes are a function of seed and element, so the kernel chooses the reference's codes except where
/// another last bit of a logarithm moves a value across its threshold, and what follows from that.
#[test]
fn eight_bit_codes_are_those_of_the_reference() {
    type GpuInner = <Gpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    type CpuInner = <Cpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    for shape in [[1, 1], [7, 300], [33, 1000]] {
        for (dtype, master) in [(FloatDType::F32, false), (FloatDType::BF16, true), (FloatDType::BF16, false)] {
            let (param, moments) = eight_bit_steps::<GpuInner>(shape, dtype, master);
            let (cpu_param, cpu_moments) = eight_bit_steps::<CpuInner>(shape, dtype, master);
            for (name, (codes, values), (cpu_codes, cpu_values)) in
                [("m", &moments[0], &cpu_moments[0]), ("v", &moments[1], &cpu_moments[1])]
            {
                let different = codes.iter().zip(cpu_codes).filter(|(a, b)| a != b).count();
                let error = relative(values, cpu_values);
                println!("{shape:?} {dtype:?} {name}: {different} of {} codes, {error:.2e}", codes.len());
                // A code is 9 % of a value.
                assert!(
                    different * 100 <= codes.len(),
                    "{shape:?} {dtype:?} {name}: {different} codes differ"
                );
                assert!(error < 9e-3, "{shape:?} {dtype:?} {name}: {error:.2e}");
            }
            // bf16 parameters may round the other way.
            let (error, tolerance) = (
                relative(&param, &cpu_param),
                if dtype == FloatDType::F32 || master { 1e-3 } else { 4e-3 },
            );
            assert!(error < tolerance, "{shape:?} {dtype:?} parameter: {error:.2e}");
            // Rows without gradient keep exact zeros.
            for (m, v) in moments[0].1.iter().zip(&moments[1].1).skip(2 * shape[1]).take(shape[1]) {
                assert_eq!((*m, *v), (0.0, 0.0), "{shape:?}");
            }
        }
    }
}

/// What rounding to 8 bits costs beside fp32 moments: an unbiased error of the size that the codes have. One rounding to one of two codes
/// `2^(1/8)` apart errs by 3.7 % of the value in the mean (`0.0905 * sqrt(1/6)`); a moment carries the errors of all steps, each times
/// `beta` as often as it has decayed since, which is at most `1 / sqrt(1 - beta^2)` times that, 2.3 for the first moment.
#[test]
fn eight_bit_moments_stay_near_those_in_fp32() {
    type GpuInner = <Gpu as burn::tensor::backend::AutodiffBackend>::InnerBackend;
    let (shape, dtype) = ([33, 1000], FloatDType::F32);
    let device = Default::default();
    let mut exact = AdamWState::<GpuInner, 2> {
        param: float(shape, 1, false, dtype),
        m: Tensor::zeros(shape, &device),
        v: Tensor::zeros(shape, &device),
        master: None,
    };
    for step in 1..=20 {
        let (grad, scale) = eight_bit_gradient::<GpuInner>(shape, step, dtype);
        exact = adamw_step(exact, grad, scale, &desc(step)).expect("valid settings");
    }
    let (_, [(_, m), (_, v)]) = eight_bit_steps::<GpuInner>(shape, dtype, false);
    for (name, found, exact, beta) in [("m", m, host(exact.m), 0.9f64), ("v", v, host(exact.v), 0.99)] {
        let bound = 0.0905 / 6f64.sqrt() / (1.0 - beta * beta).sqrt();
        // The rows of size one: the others share blocks with them only at the edges, and have an error of their own size.
        let rows = |values: &[f32]| -> Vec<f32> { values.chunks(1000).step_by(3).flatten().copied().collect() };
        let (found, exact) = (rows(&found), rows(&exact));
        let error = relative(&found, &exact);
        let bias =
            found.iter().zip(&exact).map(|(f, e)| f64::from(f - e)).sum::<f64>() / exact.iter().map(|e| f64::from(e.abs())).sum::<f64>();
        println!("{name}: error {error:.3}, bound {bound:.3}, bias {bias:.4}");
        assert!(error < bound, "{name}: {error:.3}, bound {bound:.3}");
        // Five standard errors over 11000 elements.
        assert!(bias.abs() < 5.0 * bound / 11_000f64.sqrt(), "{name}: bias {bias:.4}");
    }
}
