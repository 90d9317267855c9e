//! The Mamba-2 ops: causal convolution and selective scan.

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::{FloatDType, backend::AutodiffBackend};
use burn_ep_backend::ops::{SsdInput, causal_conv1d, ssd_scan};
use burn_ep_backend::{MoeBackend, SsdDesc};

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
};

/// Every option on and off, fewer tokens than taps, odd channels, several runs of tokens, more taps than the kernel takes.
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
    let x = float::<B, 3>([batch, seq, channels], 1, case.strided, dtype).require_grad();
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
        host(x.grad(&grads).expect("x")),
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

/// Batch, sequence, heads, head size, groups, state size, chunk, documents, initial state.
type Scan = (usize, usize, usize, usize, usize, usize, usize, Option<usize>, bool);

const SCANS: [Scan; 5] = [
    (1, 1, 1, 4, 1, 4, 8, None, false),
    (2, 50, 4, 16, 2, 8, 16, None, true),
    (2, 50, 4, 16, 1, 8, 16, Some(11), false),
    (1, 129, 8, 64, 2, 128, 64, Some(40), true),
    (2, 300, 4, 32, 4, 16, 128, None, false),
];

fn scan<B>(case: Scan, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (b, s, h, p, g, n, chunk, length, with_state) = case;
    let per_head = |seed| float::<B, 1>([h], seed, false, F32).mul_scalar(0.5).detach().require_grad();
    let x_bshp = float::<B, 4>([b, s, h, p], 1, false, dtype).require_grad();
    let dt_bsh = float::<B, 3>([b, s, h], 2, false, dtype).require_grad();
    let [b_bsgn, c_bsgn] = [3, 4].map(|seed| float::<B, 4>([b, s, g, n], seed, false, dtype).require_grad());
    let (a_log_h, d_h, dt_bias_h) = (per_head(5), per_head(6), per_head(7));
    let input = SsdInput {
        x_bshp: x_bshp.clone(),
        dt_bsh: dt_bsh.clone(),
        a_log_h: a_log_h.clone(),
        b_bsgn: b_bsgn.clone(),
        c_bsgn: c_bsgn.clone(),
        d_h: d_h.clone(),
        dt_bias_h: dt_bias_h.clone(),
        initial_state_bhpn: with_state.then(|| float::<B, 4>([b, h, p, n], 8, false, F32)),
        doc_start_bs: length.map(|length| documents(b, s, length)),
    };
    let desc = SsdDesc {
        chunk,
        dt_min: 0.0,
        dt_max: f32::INFINITY,
    };
    let out = ssd_scan(input, &desc).expect("valid shapes");
    let up = float::<B, 4>([b, s, h, p], 9, false, dtype);
    let grads = (out.y_bshp.clone() * up).sum().backward();
    let of_head = [a_log_h, d_h, dt_bias_h].map(|t| host(t.grad(&grads).expect("per head")));
    let wide = [x_bshp, b_bsgn, c_bsgn].map(|t| host(t.grad(&grads).expect("per token")));
    let mut outputs = vec![host(out.y_bshp), host(out.final_state_bhpn), host(dt_bsh.grad(&grads).expect("dt"))];
    outputs.extend(of_head);
    outputs.extend(wide);
    outputs
}

#[test]
fn ssd_scan_runs_on_the_device() {
    for case in SCANS {
        let exact = scan::<Cpu>(case, F32);
        // the products of the reference may run in tf32
        close(&format!("scan {case:?} fp32"), scan::<Gpu>(case, F32), exact.clone(), 4e-3);
        close(&format!("scan {case:?} bf16"), scan::<Gpu>(case, BF16), exact, 2e-2);
    }
}
