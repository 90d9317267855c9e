//! Every CUDA kernel against the CPU reference: values and gradients, fresh random inputs, odd sizes, empty groups.
//!
//! Low-precision rule: the error against the fp32 result on the same (rounded) inputs is at most twice the error of the
//! plain bf16 path on the CPU, plus a small floor. Needs a GPU; built with `--features cuda`.

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_ep_backend::ops::{AttentionMask, attention, grouped_matmul};
use burn_ep_backend::{AttentionDesc, MoeBackend};
use burn_flex::Flex;
use cubecl::cuda::CudaRuntime;

type Gpu = burn::backend::Autodiff<CubeBackend<CudaRuntime, f32, i32, u8>>;
type Cpu = burn::backend::Autodiff<Flex>;

/// `||a - b|| / ||b||`.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut diff, mut norm) = (0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        assert!(x.is_finite(), "not finite: {x}");
        diff += f64::from(x - y).powi(2);
        norm += f64::from(*y).powi(2);
    }
    (diff / norm.max(1e-30)).sqrt()
}

fn random(shape: &[usize], seed: u64) -> TensorData {
    // a small generator of our own: both backends must see the same numbers
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|_| half::bf16::from_f32(2.0 * (next() + next() + next())).to_f32())
        .collect();
    TensorData::new(values, shape.to_vec())
}

/// Runs `f` three times: GPU in bf16, CPU in fp32 and CPU in bf16, and applies the rule to every tensor it returns.
fn compare(name: &str, gpu: Vec<Vec<f32>>, exact: Vec<Vec<f32>>, plain: Vec<Vec<f32>>) {
    for (i, ((g, e), p)) in gpu.iter().zip(&exact).zip(&plain).enumerate() {
        let (ours, theirs) = (relative(g, e), relative(p, e));
        println!("{name} output {i}: {ours:.2e} (plain bf16 {theirs:.2e})");
        assert!(
            ours <= 2.0 * theirs + 2e-3,
            "{name} output {i}: error {ours:.3e}, plain bf16 path {theirs:.3e}"
        );
    }
}

fn host<B: burn::tensor::backend::Backend, const D: usize>(t: Tensor<B, D>) -> Vec<f32> {
    t.cast(FloatDType::F32).into_data().convert::<f32>().into_vec().expect("fp32 data")
}

fn grouped<B>(sizes: &[i32], n: usize, k: usize, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: burn::tensor::backend::AutodiffBackend + MoeBackend,
{
    let device = Default::default();
    let rows = sizes.iter().sum::<i32>() as usize;
    let mut offsets = vec![0i32];
    for s in sizes {
        offsets.push(offsets.last().unwrap_or(&0) + s);
    }
    let offsets = Tensor::<B, 1, Int>::from_data(TensorData::new(offsets, [sizes.len() + 1]), &device);
    let float2 = |shape: [usize; 2], seed| Tensor::<B, 2>::from_data(random(&shape, seed), &device).cast(dtype);
    let x = float2([rows, k], 1).require_grad();
    let w = Tensor::<B, 3>::from_data(random(&[sizes.len(), n, k], 2), &device)
        .cast(dtype)
        .require_grad();
    let up = float2([rows, n], 3);
    let y = grouped_matmul(x.clone(), w.clone(), offsets).expect("valid shapes");
    let grads = (y.clone() * up).sum().backward();
    let (gx, gw) = (x.grad(&grads).expect("x"), w.grad(&grads).expect("w"));
    vec![host(y), host(gx), host(gw)]
}

#[test]
fn grouped_matmul_matches_the_reference() {
    for (sizes, n, k) in [
        (vec![5, 0, 130, 1, 64], 72, 136),
        (vec![0, 0, 300], 256, 64),
        (vec![17; 37], 200, 456),
        (vec![777], 192, 1000),
        (vec![128, 256, 0, 512], 768, 2048),
    ] {
        let name = format!("grouped matmul {sizes:?} n {n} k {k}");
        compare(
            &name,
            grouped::<Gpu>(&sizes, n, k, FloatDType::BF16),
            grouped::<Cpu>(&sizes, n, k, FloatDType::F32),
            grouped::<Cpu>(&sizes, n, k, FloatDType::BF16),
        );
    }
}

#[test]
fn grouped_matmul_in_odd_widths_falls_back() {
    let (sizes, n, k) = (vec![3, 0, 9], 20, 23);
    compare(
        "grouped matmul odd",
        grouped::<Gpu>(&sizes, n, k, FloatDType::BF16),
        grouped::<Cpu>(&sizes, n, k, FloatDType::F32),
        grouped::<Cpu>(&sizes, n, k, FloatDType::BF16),
    );
}

/// Batch, sequence, query heads, key heads, head size, window.
type AttentionCase = (usize, usize, usize, usize, usize, Option<usize>);

fn attend<B>(case: AttentionCase, strided: bool, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: burn::tensor::backend::AutodiffBackend + MoeBackend,
{
    let (b, s, h, hkv, d, window) = case;
    let device = Default::default();
    let float = |heads: usize, seed| {
        let x = if strided {
            Tensor::<B, 4>::from_data(random(&[b, heads, s, d], seed), &device).swap_dims(1, 2)
        } else {
            Tensor::<B, 4>::from_data(random(&[b, s, heads, d], seed), &device)
        };
        x.cast(dtype).require_grad()
    };
    let (q, k, v) = (float(h, 1), float(hkv, 2), float(hkv, 3));
    let up = Tensor::<B, 4>::from_data(random(&[b, s, h, d], 4), &device).cast(dtype);
    let desc = AttentionDesc {
        causal: true,
        window,
        scale: (d as f32).powf(-0.5),
    };
    let out = attention(q.clone(), k.clone(), v.clone(), None, &AttentionMask::default(), &desc).expect("valid shapes");
    let lse = host(out.lse_bhs);
    let grads = (out.out_bshd.clone() * up).sum().backward();
    let grad = |t: &Tensor<B, 4>| host(t.grad(&grads).expect("gradient"));
    vec![host(out.out_bshd), lse, grad(&q), grad(&k), grad(&v)]
}

#[test]
fn attention_matches_the_reference() {
    let cases: [AttentionCase; 7] = [
        (1, 1, 2, 1, 128, None),
        (2, 64, 4, 2, 128, None),
        (1, 300, 8, 1, 128, Some(70)),
        (2, 129, 2, 2, 64, None),
        (1, 517, 6, 2, 64, Some(100)),
        (1, 200, 4, 1, 96, None),
        (1, 1024, 16, 2, 128, None),
    ];
    for case in cases {
        for strided in [false, true] {
            let name = format!("attention {case:?} strided {strided}");
            compare(
                &name,
                attend::<Gpu>(case, strided, FloatDType::BF16),
                attend::<Cpu>(case, strided, FloatDType::F32),
                attend::<Cpu>(case, strided, FloatDType::BF16),
            );
        }
    }
}

#[test]
fn random_numbers_are_spread() {
    // the comparisons above mean nothing on constant inputs
    let values = random(&[1000], 7).into_vec::<f32>().expect("fp32");
    let mean = values.iter().sum::<f32>() / 1000.0;
    let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1000.0;
    assert!(mean.abs() < 0.15 && (0.5..2.0).contains(&var), "mean {mean}, variance {var}");
}
