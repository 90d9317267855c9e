//! RMSNorm of every head with the rotary embedding: values, gradients, speed.

use burn::tensor::FloatDType::{BF16, F16, F32};
use burn::tensor::{FloatDType, Tensor, TensorData, backend::AutodiffBackend};
use burn_cubecl::CubeBackend;
use burn_ep_backend::{MoeBackend, NormDesc, NormRounding, RopeLayout, ops::rms_norm_rope};
use cubecl::cuda::CudaRuntime;

use crate::attention_speed::seconds;
use crate::support::{Cpu, Gpu, close, compare, float, host, poison};

/// Batch, sequence, heads, head size, batch rows of the table, strided input. The kernel takes head sizes in multiples of 16, the
/// others go through the two ops.
type Case = (usize, usize, usize, usize, usize, bool);

const CASES: [Case; 9] = [
    (1, 1, 1, 16, 1, false),
    (2, 65, 8, 128, 1, false),
    (2, 130, 3, 128, 2, true),
    (3, 33, 5, 96, 3, false),
    (2, 40, 4, 80, 1, false),
    (1, 19, 7, 256, 1, false),
    (1, 20, 3, 64, 1, true),
    (1, 19, 7, 34, 1, false),
    (2, 1500, 16, 64, 2, false),
];

fn table<B: AutodiffBackend>(case: Case, f: fn(f32) -> f32, dtype: FloatDType) -> Tensor<B, 3> {
    let (_, seq, _, dim, rows, _) = case;
    let half = dim / 2;
    let angle = |i: usize| {
        let (row, position, pair) = (i / (seq * half), i / half % seq, i % half);
        (position + 17 * row) as f32 * 100f32.powf(-(pair as f32) / half as f32)
    };
    let values: Vec<f32> = (0..rows * seq * half).map(|i| f(angle(i))).collect();
    Tensor::<B, 3>::from_data(TensorData::new(values, [rows, seq, half]), &Default::default()).cast(dtype)
}

/// Output, gradients of x and the weight; weight and tables in `rest`.
fn run<B>(case: Case, rounding: NormRounding, dtype: FloatDType, rest: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (b, s, h, d, _, strided) = case;
    let x = float::<B, 4>([b, s, h, d], 1, strided, dtype).require_grad();
    let weight = (float::<B, 1>([d], 3, false, F32) * 0.3 + 1.0).cast(rest).require_grad();
    let up = float::<B, 4>([b, s, h, d], 2, strided, dtype);
    let (cos, sin) = (table(case, f32::cos, rest), table(case, f32::sin, rest));
    poison::<B>(b * s * h * d);
    let desc = NormDesc { eps: 1e-6, rounding };
    let y = rms_norm_rope(x.clone(), weight.clone(), cos, sin, RopeLayout::HalfSplit, &desc).expect("valid shapes");
    poison::<B>(b * s * h * d);
    let grads = (y.clone() * up).sum().backward();
    assert_eq!(y.dtype(), x.dtype());
    vec![
        host(y),
        host(x.grad(&grads).expect("x")),
        host(weight.grad(&grads).expect("weight")),
    ]
}

#[test]
fn norm_rope_matches_the_reference() {
    for case in CASES {
        for rounding in [NormRounding::Llama, NormRounding::Fp32Product] {
            let name = format!("norm and rope {case:?} {rounding:?}");
            let exact = run::<Cpu>(case, rounding, F32, F32);
            close(&name, run::<Gpu>(case, rounding, F32, F32), exact.clone(), 3e-6);
            for (dtype, rest) in [(BF16, BF16), (BF16, F32), (F16, F16)] {
                let plain = run::<Cpu>(case, rounding, dtype, rest);
                compare(
                    &format!("{name} {dtype:?}"),
                    run::<Gpu>(case, rounding, dtype, rest),
                    exact.clone(),
                    plain,
                );
            }
        }
    }
}

/// One pass against the two ops; GB/s count what must be read and written once.
#[test]
#[ignore = "prints speeds"]
fn norm_rope_speed() {
    type B = CubeBackend<CudaRuntime, f32, i32, u8>;
    let device = Default::default();
    let normal = |heads: usize| {
        let shape = [4, 4096, heads, 128];
        Tensor::<B, 4>::random(shape, burn::tensor::Distribution::Normal(0.0, 1.0), &device).cast(BF16)
    };
    let angles = Tensor::<B, 3>::random([1, 4096, 64], burn::tensor::Distribution::Uniform(-3.0, 3.0), &device);
    let (cos, sin) = (angles.clone().cos().cast(BF16), angles.sin().cast(BF16));
    let weight = Tensor::<B, 1>::ones([128], &device).cast(BF16);
    let prim3 = |t: &Tensor<B, 3>| t.clone().into_primitive().tensor();
    let weight = || weight.clone().into_primitive().tensor();
    let (layout, desc) = (
        RopeLayout::HalfSplit,
        NormDesc {
            eps: 1e-6,
            rounding: NormRounding::Llama,
        },
    );
    for heads in [32, 4] {
        let (x, grad) = (normal(heads), normal(heads));
        let prim = |t: &Tensor<B, 4>| t.clone().into_primitive().tensor();
        let one = seconds(|| drop(B::rms_norm_rope(prim(&x), weight(), prim3(&cos), prim3(&sin), layout, &desc)));
        let two = seconds(|| drop(B::rope(B::rms_norm(prim(&x), weight(), &desc), prim3(&cos), prim3(&sin), layout)));
        let one_back = seconds(|| {
            drop(B::rms_norm_rope_backward(
                prim(&grad),
                prim(&x),
                weight(),
                prim3(&cos),
                prim3(&sin),
                layout,
                &desc,
            ))
        });
        let two_back = seconds(|| {
            let turned = B::rope(prim(&grad), prim3(&cos), prim3(&sin), layout);
            drop(B::rms_norm_backward(turned, prim(&x), weight(), &desc));
        });
        let bytes = x.shape().num_elements() as f64 * 2.0;
        println!(
            "norm + rope, 4 x 4096, {heads} heads of 128: forward {:5.0} us {:5.0} GB/s (two ops {:5.0} us), backward {:5.0} us {:5.0} GB/s (two ops {:5.0} us)",
            one * 1e6,
            2.0 * bytes / one / 1e9,
            two * 1e6,
            one_back * 1e6,
            3.0 * bytes / one_back / 1e9,
            two_back * 1e6,
        );
    }
}
