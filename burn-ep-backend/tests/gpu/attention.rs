//! Attention with its gradients.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Tensor};
use burn_ep_backend::ops::{AttentionMask, attention};
use burn_ep_backend::{AttentionDesc, MoeBackend};

use crate::support::{Cpu, Gpu, compare, host, random};

/// Batch, sequence, query heads, key heads, head size, window.
type AttentionCase = (usize, usize, usize, usize, usize, Option<usize>);

fn attend<B>(case: AttentionCase, strided: bool, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
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
