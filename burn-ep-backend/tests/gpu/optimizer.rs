//! AdamW.

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::{FloatDType, Tensor, backend::Backend};
use burn_ep_backend::ops::{AdamWState, adamw_step};
use burn_ep_backend::{AdamWDesc, MoeBackend};

use crate::support::{Cpu, Gpu, close, float, host};

/// Three updates: parameter, moments and master copy.
fn updates<B: Backend + MoeBackend>(shape: [usize; 2], dtype: FloatDType, master: bool, scaled: bool) -> Vec<Vec<f32>> {
    let param = float::<B, 2>(shape, 1, false, dtype);
    let zeros = || Tensor::<B, 2>::zeros(shape, &Default::default()).cast(F32);
    let mut state = AdamWState {
        m: zeros(),
        v: zeros(),
        master: master.then(|| param.clone().cast(F32)),
        param,
    };
    for step in 1..=3 {
        let desc = AdamWDesc {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
        };
        let grad = float::<B, 2>(shape, 10 + step, step == 2, dtype);
        let scale = scaled.then(|| Tensor::<B, 1>::from_floats([0.25], &Default::default()).cast(F32));
        state = adamw_step(state, grad, scale, &desc).expect("valid shapes");
    }
    let mut outputs = vec![host(state.param), host(state.m), host(state.v)];
    outputs.extend(state.master.map(host));
    outputs
}

#[test]
fn adamw_follows_the_cpu() {
    for shape in [[1, 1], [7, 33], [130, 257]] {
        for scaled in [false, true] {
            for (dtype, master, tolerance) in [(F32, false, 1e-5), (BF16, true, 1e-3), (BF16, false, 4e-3)] {
                close(
                    &format!("adamw {shape:?} {dtype:?} master {master} scaled {scaled}"),
                    updates::<Gpu>(shape, dtype, master, scaled),
                    updates::<Cpu>(shape, dtype, master, scaled),
                    tolerance,
                );
            }
        }
    }
}
