//! Rotary embedding: values and gradients.

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::{FloatDType, Tensor, TensorData, backend::AutodiffBackend};
use burn_ep_backend::{MoeBackend, RopeLayout, ops::rope};

use crate::support::{Cpu, Gpu, close, compare, float, host, poison};

/// Batch, sequence, heads, head size, channels that turn, batch rows of the table, strided input.
type Case = (usize, usize, usize, usize, usize, usize, bool);

const CASES: [Case; 8] = [
    (1, 1, 1, 2, 2, 1, false),
    (2, 7, 3, 6, 2, 2, true),
    (2, 65, 8, 128, 128, 1, false),
    (1, 130, 2, 128, 128, 1, true),
    (3, 33, 5, 96, 32, 3, false),
    (2, 40, 4, 80, 40, 2, true),
    (1, 19, 7, 33, 10, 1, false),
    (2, 3000, 16, 64, 64, 2, false),
];

/// `[rows, S, half]` of `f(angle)` with another first position in each batch row.
fn table<B: AutodiffBackend>(case: Case, f: fn(f32) -> f32) -> Tensor<B, 3> {
    let (_, seq, _, _, turning, rows, _) = case;
    let half = turning / 2;
    let angle = |i: usize| {
        let (row, position, pair) = (i / (seq * half), i / half % seq, i % half);
        (position + 17 * row) as f32 * 100f32.powf(-(pair as f32) / half as f32)
    };
    let values: Vec<f32> = (0..rows * seq * half).map(|i| f(angle(i))).collect();
    Tensor::from_data(TensorData::new(values, [rows, seq, half]), &Default::default())
}

fn run<B>(case: Case, layout: RopeLayout, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (b, s, h, d, _, _, strided) = case;
    let x = float::<B, 4>([b, s, h, d], 1, strided, dtype).require_grad();
    let up = float::<B, 4>([b, s, h, d], 2, strided, dtype);
    poison::<B>(b * s * h * d);
    let y = rope(x.clone(), table(case, f32::cos), table(case, f32::sin), layout).expect("valid shapes");
    poison::<B>(b * s * h * d);
    let grads = (y.clone() * up).sum().backward();
    assert_eq!(y.dtype(), x.dtype());
    vec![host(y), host(x.grad(&grads).expect("x"))]
}

#[test]
fn rope_matches_the_reference() {
    for case in CASES {
        for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
            let name = format!("rope {case:?} {layout:?}");
            let exact = run::<Cpu>(case, layout, F32);
            close(&name, run::<Gpu>(case, layout, F32), exact.clone(), 1e-6);
            compare(&name, run::<Gpu>(case, layout, BF16), exact, run::<Cpu>(case, layout, BF16));
        }
    }
}
