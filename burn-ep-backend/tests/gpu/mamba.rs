//! The Mamba-2 ops: causal convolution and selective scan.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Tensor};
use burn_ep_backend::ops::{SsdInput, causal_conv1d, ssd_scan};
use burn_ep_backend::{Cuda, MoeBackend, SsdDesc, SsdPrim};

use crate::support::{Cpu, Gpu, close, compare, documents, float, host, poison};

#[derive(Debug, Clone, Copy)]
struct Conv {
    batch: usize,
    seq: usize,
    channels: usize,
    taps: usize,
    silu: bool,
    bias: bool,
    history: bool,
    /// Length of the documents of the first row.
    documents: Option<usize>,
    strided: bool,
    /// x is a slice of the channels of a wider tensor.
    sliced: bool,
}

const PLAIN: Conv = Conv {
    batch: 2,
    seq: 77,
    channels: 70,
    taps: 4,
    silu: true,
    bias: true,
    history: false,
    documents: None,
    strided: false,
    sliced: false,
};

/// Every option on and off, fewer tokens than taps, odd channels, several runs of tokens, a slice of a wider projection, more
/// taps than the kernel takes.
fn conv_cases() -> Vec<Conv> {
    vec![
        PLAIN,
        Conv { silu: false, ..PLAIN },
        Conv { bias: false, ..PLAIN },
        Conv { history: true, ..PLAIN },
        Conv {
            documents: Some(9),
            ..PLAIN
        },
        Conv {
            documents: Some(3),
            history: true,
            strided: true,
            ..PLAIN
        },
        Conv {
            documents: Some(1),
            silu: false,
            bias: false,
            ..PLAIN
        },
        Conv {
            seq: 1,
            channels: 1,
            ..PLAIN
        },
        Conv {
            seq: 2,
            channels: 33,
            history: true,
            ..PLAIN
        },
        Conv {
            taps: 1,
            channels: 5,
            ..PLAIN
        },
        Conv {
            taps: 2,
            channels: 257,
            strided: true,
            ..PLAIN
        },
        Conv {
            taps: 8,
            batch: 3,
            seq: 130,
            channels: 300,
            documents: Some(20),
            ..PLAIN
        },
        Conv {
            channels: 64,
            sliced: true,
            ..PLAIN
        },
        Conv {
            channels: 36,
            documents: Some(10),
            sliced: true,
            ..PLAIN
        },
        Conv { taps: 9, ..PLAIN },
        Conv {
            batch: 1,
            seq: 4099,
            channels: 640,
            documents: Some(1000),
            ..PLAIN
        },
    ]
}

fn conv<B>(case: Conv, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let Conv {
        batch,
        seq,
        channels,
        taps,
        ..
    } = case;
    let margin = if case.sliced { 8 } else { 0 };
    let wide = float::<B, 3>([batch, seq, channels + 2 * margin], 1, case.strided, dtype).require_grad();
    let x = if case.sliced {
        wide.clone().narrow(2, margin, channels)
    } else {
        wide.clone()
    };
    let weight = float::<B, 2>([channels, taps], 2, case.strided, dtype).require_grad();
    let bias = case.bias.then(|| float::<B, 1>([channels], 3, false, dtype).require_grad());
    // history before the row has no rows for one tap
    let history = (case.history && taps > 1).then(|| float::<B, 3>([batch, taps - 1, channels], 4, false, dtype));
    let doc_start = case.documents.map(|length| documents(batch, seq, length));
    let up = float::<B, 3>([batch, seq, channels], 5, case.strided, dtype);
    poison::<B>(batch * seq * channels);
    let y = causal_conv1d(x.clone(), weight.clone(), bias.clone(), history, doc_start, case.silu).expect("valid shapes");
    poison::<B>(batch * seq * channels);
    let grads = (y.clone() * up).sum().backward();
    assert_eq!(y.dtype(), x.dtype());
    let mut outputs = vec![
        host(y),
        host(wide.grad(&grads).expect("x")),
        host(weight.grad(&grads).expect("weight")),
    ];
    outputs.extend(bias.map(|bias| host(bias.grad(&grads).expect("bias"))));
    outputs
}

#[test]
fn causal_conv1d_matches_the_reference() {
    for case in conv_cases() {
        let exact = conv::<Cpu>(case, F32);
        close(&format!("{case:?} fp32"), conv::<Gpu>(case, F32), exact.clone(), 2e-5);
        compare(&format!("{case:?}"), conv::<Gpu>(case, BF16), exact, conv::<Cpu>(case, BF16));
    }
}

#[derive(Debug, Clone, Copy)]
struct Scan {
    batch: usize,
    seq: usize,
    heads: usize,
    head_size: usize,
    groups: usize,
    state_size: usize,
    /// Length of the documents of the first row.
    documents: Option<usize>,
    initial_state: bool,
    /// Limits of the step size.
    limits: (f32, f32),
    /// x, B, C and dt are slices of one projection, as in the model.
    sliced: bool,
}

const SMALL: Scan = Scan {
    batch: 2,
    seq: 50,
    heads: 4,
    head_size: 16,
    groups: 2,
    state_size: 8,
    documents: None,
    initial_state: false,
    limits: (0.0, f32::INFINITY),
    sliced: false,
};

/// One token, less and more than a chunk of 64, whole chunks; odd sizes; one head and many in a group; documents that start at,
/// before and after a chunk; every option.
fn scan_cases() -> Vec<Scan> {
    vec![
        Scan {
            seq: 1,
            heads: 1,
            groups: 1,
            head_size: 4,
            state_size: 4,
            ..SMALL
        },
        Scan {
            initial_state: true,
            ..SMALL
        },
        Scan {
            groups: 1,
            head_size: 5,
            state_size: 7,
            documents: Some(11),
            ..SMALL
        },
        Scan {
            seq: 64,
            heads: 24,
            groups: 8,
            head_size: 24,
            state_size: 40,
            ..SMALL
        },
        Scan {
            batch: 1,
            seq: 129,
            heads: 8,
            head_size: 64,
            state_size: 128,
            documents: Some(40),
            initial_state: true,
            sliced: true,
            ..SMALL
        },
        Scan {
            seq: 300,
            head_size: 32,
            state_size: 16,
            documents: Some(64),
            sliced: true,
            ..SMALL
        },
        Scan {
            batch: 1,
            seq: 70,
            heads: 6,
            groups: 6,
            head_size: 20,
            state_size: 20,
            limits: (0.4, 1.2),
            initial_state: true,
            ..SMALL
        },
        Scan {
            batch: 1,
            seq: 200,
            heads: 2,
            head_size: 80,
            groups: 1,
            state_size: 136,
            sliced: true,
            ..SMALL
        },
        Scan {
            batch: 1,
            seq: 1500,
            heads: 16,
            head_size: 8,
            groups: 1,
            state_size: 33,
            documents: Some(700),
            initial_state: true,
            ..SMALL
        },
    ]
}

/// Nemotron 3 Nano.
const NANO: Scan = Scan {
    batch: 1,
    seq: 4096,
    heads: 64,
    head_size: 64,
    groups: 8,
    state_size: 128,
    documents: Some(1000),
    sliced: true,
    ..SMALL
};

impl Scan {
    fn desc(&self) -> SsdDesc {
        SsdDesc {
            chunk: 128,
            dt_min: self.limits.0,
            dt_max: self.limits.1,
        }
    }

    /// Width of x, B, C and dt together.
    fn widths(&self) -> [usize; 4] {
        let bc = self.groups * self.state_size;
        [self.heads * self.head_size, bc, bc, self.heads]
    }
}

/// Parts of one leaf or four leaves, x, B, C and dt, each `[B, S, ..]`.
fn projections<B: AutodiffBackend>(case: &Scan, dtype: FloatDType) -> (Vec<Tensor<B, 3>>, [Tensor<B, 3>; 4]) {
    let widths = case.widths();
    let leaf = |width: usize, seed| float::<B, 3>([case.batch, case.seq, width], seed, false, dtype).require_grad();
    if !case.sliced {
        let leaves = [0, 1, 2, 3].map(|i| leaf(widths[i], i as u64 + 1));
        return (leaves.to_vec(), leaves);
    }
    // something before the parts, as the gate is
    let mut at = 16;
    let projection = leaf(at + widths.iter().sum::<usize>(), 1);
    let parts = widths.map(|width| {
        at += width;
        projection.clone().narrow(2, at - width, width)
    });
    (vec![projection], parts)
}

fn scan<B>(case: Scan, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let Scan {
        batch: b,
        seq: s,
        heads: h,
        head_size: p,
        groups: g,
        state_size: n,
        ..
    } = case;
    let (leaves, [x, b_in, c_in, dt]) = projections::<B>(&case, dtype);
    let [a_log, d, dt_bias] = [5, 6, 7].map(|seed| float::<B, 1>([h], seed, false, F32).mul_scalar(0.5).detach().require_grad());
    let input = SsdInput {
        x_bshp: x.reshape([b, s, h, p]),
        dt_bsh: dt,
        a_log_h: a_log.clone(),
        b_bsgn: b_in.reshape([b, s, g, n]),
        c_bsgn: c_in.reshape([b, s, g, n]),
        d_h: d.clone(),
        dt_bias_h: dt_bias.clone(),
        initial_state_bhpn: case.initial_state.then(|| float::<B, 4>([b, h, p, n], 8, false, F32)),
        doc_start_bs: case.documents.map(|length| documents(b, s, length)),
    };
    let up = float::<B, 4>([b, s, h, p], 9, false, dtype);
    let elements = (b * s * h * p).max(b * s.div_ceil(64) * h * p * n);
    poison::<B>(elements);
    let out = ssd_scan(input, &case.desc()).expect("valid shapes");
    poison::<B>(elements);
    let grads = (out.y_bshp.clone() * up).sum().backward();
    let mut outputs = vec![host(out.y_bshp), host(out.final_state_bhpn)];
    outputs.extend([a_log, d, dt_bias].map(|t| host(t.grad(&grads).expect("per head"))));
    outputs.extend(leaves.iter().map(|leaf| host(leaf.grad(&grads).expect("per token"))));
    outputs
}

#[test]
fn ssd_scan_matches_the_cpu() {
    for case in scan_cases() {
        let exact = scan::<Cpu>(case, F32);
        close(&format!("{case:?} fp32"), scan::<Gpu>(case, F32), exact.clone(), 2e-5);
        compare(&format!("{case:?}"), scan::<Gpu>(case, BF16), exact, scan::<Cpu>(case, BF16));
    }
}

#[test]
fn ssd_scan_of_nemotron_nano_matches_the_cpu() {
    let exact = scan::<Cpu>(NANO, F32);
    compare("nano", scan::<Gpu>(NANO, BF16), exact.clone(), scan::<Cpu>(NANO, BF16));
    close("nano fp32", scan::<Gpu>(NANO, F32), exact, 2e-5);
}

/// A state that does not fit into shared memory takes the reference, whose products may run in tf32.
#[test]
fn ssd_scan_with_a_huge_state_takes_the_reference() {
    let case = Scan {
        head_size: 64,
        state_size: 512,
        ..SMALL
    };
    close("huge state", scan::<Gpu>(case, F32), scan::<Cpu>(case, F32), 4e-3);
}

#[test]
fn ssd_scan_is_reproducible_to_the_bit() {
    let case = Scan {
        seq: 700,
        heads: 16,
        head_size: 64,
        state_size: 128,
        documents: Some(300),
        ..SMALL
    };
    assert!(scan::<Gpu>(case, BF16) == scan::<Gpu>(case, BF16));
}

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
