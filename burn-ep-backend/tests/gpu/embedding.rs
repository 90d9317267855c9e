//! Lookup and its gradient through the decorator.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F16, F32};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::embedding;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::EpBackend;

use crate::support::{Cpu, Gpu, close, compare, float, host, poison};

type EpGpu = EpBackend<Gpu>;
type EpCpu = EpBackend<Cpu>;

/// Mostly one token, then a few, then each once.
fn ids<B: Backend>(batch: usize, seq: usize, vocab: usize) -> Tensor<B, 2, Int> {
    let id = |i: usize| match i % 4 {
        0 | 1 => 3 % vocab,
        2 => (i / 4) % 5 % vocab,
        _ => (i * 7919) % vocab,
    };
    let ids: Vec<i32> = (0..batch * seq).map(|i| id(i) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [batch, seq]), &Default::default())
}

fn run<B: AutodiffBackend>([batch, seq, vocab, width]: [usize; 4], strided: bool, dtype: FloatDType) -> Vec<Vec<f32>> {
    let table = float::<B, 2>([vocab, width], 1, false, dtype).require_grad();
    let out = embedding(table.clone(), ids(batch, seq, vocab));
    let upstream = float::<B, 3>([batch, seq, width], 2, strided, dtype);
    let grads = (out.clone() * upstream).sum().backward();
    vec![host(out), host(table.grad(&grads).expect("tracked"))]
}

#[test]
fn lookup_and_gradient_match_the_reference() {
    poison::<EpGpu>(1 << 20);
    for case in [
        [1, 1, 1, 1],
        [2, 3, 7, 5],
        [2, 300, 50, 24],
        [1, 1000, 3000, 2048],
        [4, 257, 999, 1030],
        [1, 5, 4, 20],
    ] {
        for strided in [false, true] {
            let exact = run::<EpCpu>(case, strided, F32);
            close(
                &format!("embedding {case:?} fp32"),
                run::<EpGpu>(case, strided, F32),
                exact.clone(),
                1e-5,
            );
            for dtype in [BF16, F16] {
                let name = format!("embedding {case:?} {dtype:?}");
                compare(
                    &name,
                    run::<EpGpu>(case, strided, dtype),
                    exact.clone(),
                    run::<EpCpu>(case, strided, dtype),
                );
            }
        }
    }
}

#[test]
fn the_gradient_is_the_same_in_every_run() {
    let case = [2, 2000, 500, 136];
    let first = run::<EpGpu>(case, false, BF16);
    for _ in 0..5 {
        assert_eq!(run::<EpGpu>(case, false, BF16), first);
    }
}

#[test]
#[ignore = "prints milliseconds and GB/s"]
fn embedding_speed() {
    let (batch, seq, vocab, width) = (4, 4096, 151_936, 2048);
    let device = Default::default();
    let distribution = burn::tensor::Distribution::Normal(0.0, 1.0);
    let table = Tensor::<EpGpu, 2>::random([vocab, width], distribution, (&device, burn::tensor::DType::BF16)).require_grad();
    let spread: Vec<i32> = (0..batch * seq).map(|i| ((i * 7919) % vocab) as i32).collect();
    let spread = Tensor::<EpGpu, 2, Int>::from_data(TensorData::new(spread, [batch, seq]), &device);
    let sync = || EpGpu::sync(&device).expect("no earlier kernel failed");
    for (name, ids) in [("all different", spread), ("half one token", ids(batch, seq, vocab))] {
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..8 {
            sync();
            let start = Instant::now();
            let out = embedding(table.clone(), ids.clone());
            sync();
            let forward = start.elapsed().as_secs_f64();
            let loss = out.sum();
            sync();
            let start = Instant::now();
            drop(loss.backward());
            sync();
            if round > 0 {
                times[0].push(forward);
                times[1].push(start.elapsed().as_secs_f64());
            }
        }
        times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        let bytes = [4.0 * (batch * seq * width) as f64, 2.0 * ((vocab + 2 * batch * seq) * width) as f64];
        for ((what, times), bytes) in ["forward", "backward with the sum's"].iter().zip(&times).zip(bytes) {
            println!(
                "embedding {name}, {what}: {:.3} ms, {:.0} GB/s of the least traffic",
                times[3] * 1e3,
                bytes / times[3] / 1e9
            );
        }
    }
}
