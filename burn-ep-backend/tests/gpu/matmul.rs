//! Grouped products.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::{MoeBackend, ops::grouped_matmul};

use crate::support::{Cpu, Gpu, close, compare, host, poison, random};

fn grouped<B>(sizes: &[i32], n: usize, k: usize, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
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
    poison::<B>(rows * n.max(k));
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

/// Group sizes that leave tiles of 64 rows to several experts, to one, and to none.
fn portable_cases() -> Vec<(Vec<i32>, usize, usize)> {
    let mut many: Vec<i32> = (0..256).map(|e| e % 5).collect();
    many[77] = 300;
    vec![
        (vec![3, 0, 9], 20, 23),
        (vec![0, 0, 0, 1], 1, 1),
        (vec![64, 64, 1, 0, 63, 129], 65, 31),
        (vec![5, 0, 130, 1, 64], 72, 136),
        (vec![0, 200, 0], 33, 257),
        (many, 20, 24),
        (vec![1; 70], 100, 17),
    ]
}

#[test]
fn portable_grouped_matmul_follows_the_low_precision_rule() {
    // bf16 in widths that are multiples of 8 takes the Hopper kernel on such a device, fp16 never
    for (sizes, n, k) in portable_cases() {
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            compare(
                &format!("grouped matmul {dtype:?} {} groups n {n} k {k}", sizes.len()),
                grouped::<Gpu>(&sizes, n, k, dtype),
                grouped::<Cpu>(&sizes, n, k, FloatDType::F32),
                grouped::<Cpu>(&sizes, n, k, dtype),
            );
        }
    }
}

#[test]
fn portable_grouped_matmul_is_exact_in_fp32() {
    for (sizes, n, k) in portable_cases() {
        close(
            &format!("grouped matmul fp32 {} groups n {n} k {k}", sizes.len()),
            grouped::<Gpu>(&sizes, n, k, FloatDType::F32),
            grouped::<Cpu>(&sizes, n, k, FloatDType::F32),
            1e-5,
        );
    }
}
