//! The selective scan of Mamba-2.

use burn::tensor::FloatDType::{self, BF16, F32};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_ep_backend::ops::{SsdInput, ssd_scan};
use burn_ep_backend::{MoeBackend, SsdDesc};

use crate::support::{Cpu, Gpu, close, compare, documents, float, host, poison};

#[derive(Debug, Clone, Copy)]
pub struct Scan {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub head_size: usize,
    pub groups: usize,
    pub state_size: usize,
    /// Length of the documents of the first row.
    pub documents: Option<usize>,
    pub initial_state: bool,
    /// Limits of the step size.
    pub limits: (f32, f32),
    /// x, B, C and dt are slices of one projection, as in the model.
    pub sliced: bool,
    /// B and dt in fp32 beside x and C, and the numbers of the heads in their type.
    pub mixed: bool,
}

pub const SMALL: Scan = Scan {
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
    mixed: false,
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
        Scan {
            seq: 90,
            mixed: true,
            ..SMALL
        },
    ]
}

/// Nemotron 3 Nano.
pub const NANO: Scan = Scan {
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
    pub fn desc(&self) -> SsdDesc {
        SsdDesc {
            chunk: 128,
            dt_min: self.limits.0,
            dt_max: self.limits.1,
        }
    }

    /// Width of x, B, C and dt together.
    pub fn widths(&self) -> [usize; 4] {
        let bc = self.groups * self.state_size;
        [self.heads * self.head_size, bc, bc, self.heads]
    }
}

/// Parts of one leaf or four leaves, x, B, C and dt, each `[B, S, ..]`.
fn projections<B: AutodiffBackend>(case: &Scan, dtype: FloatDType) -> (Vec<Tensor<B, 3>>, [Tensor<B, 3>; 4]) {
    let widths = case.widths();
    let leaf = |width: usize, seed, dtype| float::<B, 3>([case.batch, case.seq, width], seed, false, dtype).require_grad();
    if !case.sliced {
        let other = if case.mixed { F32 } else { dtype };
        let dtypes = [dtype, other, dtype, other];
        let leaves = [0, 1, 2, 3].map(|i| leaf(widths[i], i as u64 + 1, dtypes[i]));
        return (leaves.to_vec(), leaves);
    }
    // something before the parts, as the gate is
    let mut at = 16;
    let projection = leaf(at + widths.iter().sum::<usize>(), 1, dtype);
    let parts = widths.map(|width| {
        at += width;
        projection.clone().narrow(2, at - width, width)
    });
    (vec![projection], parts)
}

/// Gradient of `leaf`, which has the type of `leaf`.
fn gradient<B: AutodiffBackend, const D: usize>(leaf: &Tensor<B, D>, grads: &B::Gradients) -> Vec<f32> {
    let grad = leaf.grad(grads).expect("a gradient");
    assert_eq!(grad.dtype(), leaf.dtype());
    host(grad)
}

pub fn scan<B>(case: Scan, dtype: FloatDType) -> Vec<Vec<f32>>
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
    let of_heads = if case.mixed { dtype } else { F32 };
    let [a_log, d, dt_bias] = [5, 6, 7].map(|seed| float::<B, 1>([h], seed, false, of_heads).mul_scalar(0.5).detach().require_grad());
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
    outputs.extend([a_log, d, dt_bias].map(|leaf| gradient(&leaf, &grads)));
    outputs.extend(leaves.iter().map(|leaf| gradient(leaf, &grads)));
    outputs
}

#[test]
fn ssd_scan_matches_the_cpu() {
    for case in scan_cases() {
        let exact = scan::<Cpu>(case, F32);
        // the gradient of A_log sums terms of both signs over all tokens: 3.4e-5 where two heads nearly cancel, 5e-6 elsewhere
        close(&format!("{case:?} fp32"), scan::<Gpu>(case, F32), exact.clone(), 5e-5);
        compare(&format!("{case:?}"), scan::<Gpu>(case, BF16), exact, scan::<Cpu>(case, BF16));
    }
}

#[test]
fn ssd_scan_of_nemotron_nano_matches_the_cpu() {
    let exact = scan::<Cpu>(NANO, F32);
    compare("nano", scan::<Gpu>(NANO, BF16), exact.clone(), scan::<Cpu>(NANO, BF16));
    close("nano fp32", scan::<Gpu>(NANO, F32), exact, 2e-5);
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
