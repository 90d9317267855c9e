//! Times of the Mamba-2 ops, on request.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_ep_backend::{Cuda, MoeBackend, SsdPrim};

use crate::mamba_scan::NANO;
use crate::support::float;

/// Milliseconds for a call of `op`.
fn time(mut op: impl FnMut()) -> f64 {
    let device = Default::default();
    let calls = 50;
    (0..5).for_each(|_| op());
    Cuda::sync(&device).expect("device");
    let start = Instant::now();
    (0..calls).for_each(|_| op());
    Cuda::sync(&device).expect("device");
    start.elapsed().as_secs_f64() * 1e3 / f64::from(calls)
}

/// Times the Mamba-2 ops of one Nano layer; the bandwidth counts what must be read and written once.
#[test]
#[ignore = "prints times"]
fn mamba_speed() {
    let report = |name: &str, ms: f64, bytes: usize| println!("{name}: {ms:.3} ms, {:.0} GB/s", bytes as f64 / ms / 1e6);
    let prim = |t: Tensor<Cuda, 3>| t.into_primitive().tensor();
    let per_head = |seed| {
        float::<Cuda, 1>([NANO.heads], seed, false, F32)
            .mul_scalar(0.5)
            .into_primitive()
            .tensor()
    };
    let (s, widths) = (NANO.seq, NANO.widths());
    let channels = widths[0] + widths[1] + widths[2];
    let gate = widths[0];
    let projection = float::<Cuda, 3>([1, s, gate + channels + NANO.heads], 1, false, BF16);

    let xbc = prim(projection.clone().narrow(2, gate, channels));
    let weight = float::<Cuda, 2>([channels, 4], 2, false, BF16).into_primitive().tensor();
    let bias = float::<Cuda, 1>([channels], 3, false, BF16).into_primitive().tensor();
    let grad = prim(float::<Cuda, 3>([1, s, channels], 4, false, BF16));
    let ms = time(|| {
        drop(Cuda::causal_conv1d(
            xbc.clone(),
            weight.clone(),
            Some(bias.clone()),
            None,
            None,
            true,
        ))
    });
    report("causal_conv1d", ms, 2 * 2 * s * channels);
    let ms = time(|| {
        drop(Cuda::causal_conv1d_backward(
            grad.clone(),
            xbc.clone(),
            weight.clone(),
            Some(bias.clone()),
            None,
            true,
        ));
    });
    report("causal_conv1d_backward", ms, 3 * 2 * s * channels);

    let mut at = gate;
    let [x, b, c, dt] = widths.map(|width| {
        at += width;
        projection.clone().narrow(2, at - width, width)
    });
    let four = |t: Tensor<Cuda, 3>, heads: usize| {
        let width = t.dims()[2] / heads;
        t.reshape([1, s, heads, width]).into_primitive().tensor()
    };
    let input = SsdPrim::<Cuda> {
        x: four(x, NANO.heads),
        dt: prim(dt),
        a_log: per_head(5),
        b: four(b, NANO.groups),
        c: four(c, NANO.groups),
        d: per_head(6),
        dt_bias: per_head(7),
        initial_state: None,
        doc_start_bs: None,
    };
    let grad_y = four(float::<Cuda, 3>([1, s, widths[0]], 8, false, BF16), NANO.heads);
    let own = 2 * s * widths.iter().sum::<usize>();
    let ms = time(|| drop(Cuda::ssd_scan(input.clone(), &NANO.desc())));
    report("ssd_scan", ms, own + 2 * s * widths[0]);
    let ms = time(|| drop(Cuda::ssd_scan_backward(grad_y.clone(), input.clone(), &NANO.desc())));
    report("ssd_scan_backward", ms, 2 * own + 2 * s * widths[0]);

    let [y, z, up] = [9, 10, 11].map(|seed| prim(float::<Cuda, 3>([1, s, widths[0]], seed, false, BF16)));
    let weight = float::<Cuda, 1>([widths[0]], 12, false, BF16).into_primitive().tensor();
    let ms = time(|| drop(Cuda::gated_rms_norm(y.clone(), z.clone(), weight.clone(), NANO.groups, 1e-5)));
    report("gated_rms_norm", ms, 3 * 2 * s * widths[0]);
    let ms = time(|| {
        let grads = Cuda::gated_rms_norm_backward(up.clone(), y.clone(), z.clone(), weight.clone(), NANO.groups, 1e-5);
        drop(grads);
    });
    report("gated_rms_norm_backward", ms, 5 * 2 * s * widths[0]);
}
