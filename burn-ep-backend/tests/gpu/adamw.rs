//! Fused AdamW.

use burn::tensor::{FloatDType, Tensor};
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
        let desc = AdamWDesc {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
        };
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
