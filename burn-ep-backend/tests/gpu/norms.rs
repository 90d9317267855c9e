//! RMSNorm and the gated group norm: values and gradients.

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::{FloatDType, backend::AutodiffBackend};
use burn_ep_backend::ops::{add_rms_norm, gated_rms_norm, rms_norm};
use burn_ep_backend::{MoeBackend, NormDesc, NormRounding};

use crate::support::{Cpu, Gpu, close, compare, float, host, poison};

/// Rows, width, strided input.
type NormCase = (usize, usize, bool);

/// Widths of one element, of less than a plane, odd, of one plane and of several; the last are too wide for the kernels.
const NORM_CASES: [NormCase; 10] = [
    (1, 1, false),
    (5, 3, true),
    (37, 64, false),
    (301, 128, true),
    (20_000, 96, false),
    (70, 1001, false),
    (33, 2688, true),
    (129, 4096, false),
    (3, 16_388, false),
    (2, 40_000, false),
];

fn norm<B>(case: NormCase, rounding: NormRounding, dtype: FloatDType, weight_dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (rows, width, strided) = case;
    let x = float::<B, 3>([1, rows, width], 1, strided, dtype).require_grad();
    let weight = float::<B, 1>([width], 2, false, weight_dtype).require_grad();
    let up = float::<B, 3>([1, rows, width], 3, strided, dtype);
    poison::<B>(rows * width);
    let y = rms_norm(x.clone(), weight.clone(), &NormDesc { eps: 1e-5, rounding }).expect("valid shapes");
    poison::<B>(rows * width);
    let grads = (y.clone() * up).sum().backward();
    let (gx, gw) = (x.grad(&grads).expect("x"), weight.grad(&grads).expect("weight"));
    assert_eq!((y.dtype(), gx.dtype(), gw.dtype()), (x.dtype(), x.dtype(), weight.dtype()));
    vec![host(y), host(gx), host(gw)]
}

#[test]
fn rms_norm_matches_the_reference() {
    for case in NORM_CASES {
        for rounding in [NormRounding::Llama, NormRounding::Fp32Product] {
            for weight_dtype in [BF16, F32] {
                compare(
                    &format!("rms_norm {case:?} {rounding:?} weight {weight_dtype:?}"),
                    norm::<Gpu>(case, rounding, BF16, weight_dtype),
                    norm::<Cpu>(case, rounding, F32, F32),
                    norm::<Cpu>(case, rounding, BF16, weight_dtype),
                );
            }
            close(
                &format!("rms_norm {case:?} {rounding:?} fp32"),
                norm::<Gpu>(case, rounding, F32, F32),
                norm::<Cpu>(case, rounding, F32, F32),
                2e-5,
            );
        }
    }
}

/// Sum and norm, both used, so that the gradient of the sum comes by two ways; the outputs, then the gradients.
pub fn add_norm<B>(case: NormCase, rounding: NormRounding, dtype: FloatDType, weight_dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (rows, width, strided) = case;
    let [x, residual] = [1, 4].map(|seed| float::<B, 3>([1, rows, width], seed, strided, dtype).require_grad());
    let weight = float::<B, 1>([width], 2, false, weight_dtype).require_grad();
    let [up, up_sum] = [3, 5].map(|seed| float::<B, 3>([1, rows, width], seed, strided, dtype));
    poison::<B>(rows * width);
    let desc = NormDesc { eps: 1e-5, rounding };
    let (sum, y) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), &desc).expect("valid shapes");
    poison::<B>(rows * width);
    let grads = ((y.clone() * up).sum() + (sum.clone() * up_sum).sum()).backward();
    let (gx, gr) = (x.grad(&grads).expect("x"), residual.grad(&grads).expect("residual"));
    let gw = weight.grad(&grads).expect("weight");
    assert_eq!([sum.dtype(), gx.dtype(), gr.dtype()], [x.dtype(); 3]);
    vec![host(sum), host(y), host(gx), host(gr), host(gw)]
}

#[test]
fn add_rms_norm_matches_the_reference() {
    for case in NORM_CASES {
        for rounding in [NormRounding::Llama, NormRounding::Fp32Product] {
            compare(
                &format!("add_rms_norm {case:?} {rounding:?}"),
                add_norm::<Gpu>(case, rounding, BF16, BF16),
                add_norm::<Cpu>(case, rounding, F32, F32),
                add_norm::<Cpu>(case, rounding, BF16, BF16),
            );
            close(
                &format!("add_rms_norm {case:?} {rounding:?} fp32"),
                add_norm::<Gpu>(case, rounding, F32, F32),
                add_norm::<Cpu>(case, rounding, F32, F32),
                2e-5,
            );
        }
    }
    // The sum is the sum: no fused multiply-add, one rounding.
    let case = (37, 64, false);
    let (gpu, cpu) = (
        add_norm::<Gpu>(case, NormRounding::Llama, BF16, BF16),
        add_norm::<Cpu>(case, NormRounding::Llama, BF16, BF16),
    );
    assert_eq!(gpu[0], cpu[0]);
}

/// Rows, groups, width of a group, strided input.
type GatedCase = (usize, usize, usize, bool);

const GATED_CASES: [GatedCase; 7] = [
    (1, 1, 1, false),
    (9, 3, 5, true),
    (257, 8, 512, false),
    (40, 8, 512, true),
    (1000, 7, 36, false),
    (50, 2, 1344, false),
    (31, 1, 4096, false),
];

pub fn gated<B>(case: GatedCase, dtype: FloatDType, weight_dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (rows, groups, width, strided) = case;
    let shape = [1, rows, groups * width];
    let [y, z] = [1, 2].map(|seed| float::<B, 3>(shape, seed, strided, dtype).require_grad());
    let weight = float::<B, 1>([groups * width], 3, false, weight_dtype).require_grad();
    let up = float::<B, 3>(shape, 4, strided, dtype);
    poison::<B>(rows * groups * width);
    let out = gated_rms_norm(y.clone(), z.clone(), weight.clone(), groups, 1e-5).expect("valid shapes");
    poison::<B>(rows * groups * width);
    let grads = (out.clone() * up).sum().backward();
    let gw = weight.grad(&grads).expect("weight");
    assert_eq!((out.dtype(), gw.dtype()), (y.dtype(), weight.dtype()));
    vec![
        host(out),
        host(y.grad(&grads).expect("y")),
        host(z.grad(&grads).expect("z")),
        host(gw),
    ]
}

#[test]
fn gated_rms_norm_matches_the_reference() {
    for case in GATED_CASES {
        for weight_dtype in [BF16, F32] {
            compare(
                &format!("gated_rms_norm {case:?} weight {weight_dtype:?}"),
                gated::<Gpu>(case, BF16, weight_dtype),
                gated::<Cpu>(case, F32, F32),
                gated::<Cpu>(case, BF16, weight_dtype),
            );
        }
        close(
            &format!("gated_rms_norm {case:?} fp32"),
            gated::<Gpu>(case, F32, F32),
            gated::<Cpu>(case, F32, F32),
            2e-5,
        );
    }
}
