//! The causal convolution of Mamba-2.

use burn::tensor::FloatDType::{self, BF16, F32};
use burn::tensor::backend::AutodiffBackend;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::ops::causal_conv1d;

use crate::support::{Cpu, Gpu, close, compare, documents, float, host, poison};

#[derive(Debug, Clone, Copy)]
pub struct Conv {
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

pub const PLAIN: Conv = Conv {
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

/// Every option on and off, fewer tokens than taps, odd channels, several runs of tokens, a slice of a wider projection, many
/// taps.
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

pub fn conv<B>(case: Conv, dtype: FloatDType) -> Vec<Vec<f32>>
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
