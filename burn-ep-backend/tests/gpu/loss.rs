//! Vocabulary projection with cross entropy.

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::{FloatDType, Int, Tensor, TensorData, backend::AutodiffBackend};
use burn_ep_backend::{CrossEntropyDesc, MoeBackend, ops::linear_cross_entropy};

use crate::support::{Cpu, Gpu, close, float, host};

/// Rows, width, vocabulary, chunk.
type Case = (usize, usize, usize, usize);

fn loss<B>(case: Case, ignore_all: bool, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let (t, d, v, chunk) = case;
    let desc = CrossEntropyDesc { ignore_index: -100, chunk };
    let hidden = float::<B, 2>([t, d], 1, false, dtype).require_grad();
    // logits of a size near 1, which low precision resolves
    let weight = float::<B, 2>([v, d], 2, false, F32).mul_scalar((d as f32).powf(-0.5));
    let weight = weight.cast(BF16).cast(dtype).detach().require_grad();
    let label = |row: usize| {
        if ignore_all || row % 5 == 1 {
            -100
        } else {
            ((row * 7 + v - 1) % v) as i32
        }
    };
    let labels: Vec<i32> = (0..t).map(label).collect();
    let labels = Tensor::<B, 1, Int>::from_data(TensorData::new(labels, [t]), &Default::default());
    let loss = linear_cross_entropy(hidden.clone(), weight.clone(), labels, &desc).expect("valid shapes");
    let grads = loss.clone().backward();
    vec![
        host(loss),
        host(hidden.grad(&grads).expect("hidden")),
        host(weight.grad(&grads).expect("weight")),
    ]
}

#[test]
fn linear_cross_entropy_runs_on_the_device() {
    for case in [(1, 8, 5, 16), (37, 64, 1001, 16), (130, 96, 333, 1024), (256, 128, 5000, 100)] {
        let exact = loss::<Cpu>(case, false, F32);
        // the products of the reference may run in tf32
        close(&format!("loss {case:?} fp32"), loss::<Gpu>(case, false, F32), exact.clone(), 4e-3);
        close(&format!("loss {case:?} bf16"), loss::<Gpu>(case, false, BF16), exact, 2e-2);
    }
}

#[test]
fn nothing_to_count_is_zero() {
    let outputs = loss::<Gpu>((9, 16, 40, 4), true, BF16);
    assert!(outputs.iter().flatten().all(|value| *value == 0.0));
}
