//! One model on two backends of the GPU, with and without Burn's fusion layer, in every dtype.

use burn::backend::Autodiff;
use burn::tensor::FloatDType::{self, BF16, F16, F32};
use burn_ep_backend::{Cuda, EpBackend, FusedCuda};
use burn_moe::batch::HostBatch;
use burn_moe::layers::ParamBuilder;
use burn_moe::optim::{AdamWConfig, MomentDType};
use burn_moe::train::{Decay, Schedule, TrainBackend, Trainer, TrainerConfig};
use burn_moe_models::AutoConfig;
use burn_moe_models::benchmark::Preset;
use burn_moe_models::sparse::SparseDecoder;

type Plain = EpBackend<Autodiff<Cuda>>;
type Fused = EpBackend<Autodiff<FusedCuda>>;

const STEPS: usize = 4;

/// Loss and gradient norm of every step of a Qwen3-MoE with two layers on the same two rows.
fn train<B: TrainBackend>(dtype: FloatDType) -> Vec<[f64; 2]> {
    let config = Preset::find("tiny_qwen3_moe").unwrap().config(Some(2), None).unwrap();
    let AutoConfig::Sparse(config) = config else {
        panic!("a sparse decoder")
    };
    let device = B::Device::default();
    let model = SparseDecoder::<B>::new(&config, &ParamBuilder::new(&device, dtype).with_seed(3)).unwrap();
    let settings = TrainerConfig {
        steps: STEPS as u64,
        schedule: Schedule {
            lr: 2e-3,
            decay: Decay::Constant,
            ..Schedule::default()
        },
        // Squares of gradients are below what fp16 can hold.
        optimizer: AdamWConfig {
            moments: MomentDType::F32,
            ..AdamWConfig::default()
        },
        ..TrainerConfig::default()
    };
    let ids: Vec<i32> = (0..96).map(|i| (i * i * 31 + 7) % 512).collect();
    let batch = HostBatch {
        batch: 2,
        seq: 48,
        labels: ids.clone(),
        input_ids: ids,
        ..HostBatch::default()
    };
    let mut trainer = Trainer::<B, _>::new(model, settings, device, None).unwrap();
    (0..STEPS)
        .map(|_| {
            let report = trainer.train_step(std::slice::from_ref(&batch)).unwrap();
            [report.loss, report.grad_norm]
        })
        .collect()
}

/// The two backends round in different places (fused chains stay in fp32, unfused kernels round each result), and both are held to
/// the run in fp32: the rounding of weights and activations alone, 2^-9 in bf16 and 2^-12 in fp16, moves loss and norm by less than
/// `tolerance`.
#[test]
fn training_with_and_without_fusion_in_every_dtype() {
    let exact = train::<Plain>(F32);
    assert!(exact[STEPS - 1][0] < exact[0][0] - 0.02, "nothing is learned: {exact:?}");
    for (dtype, tolerance) in [(F32, 2e-5), (BF16, 2e-2), (F16, 4e-3)] {
        for (name, found) in [("unfused", train::<Plain>(dtype)), ("fused", train::<Fused>(dtype))] {
            println!("{dtype:?} {name}: {found:?}");
            for (step, (found, exact)) in found.iter().zip(&exact).enumerate() {
                for (what, (f, e)) in ["loss", "gradient norm"].iter().zip(found.iter().zip(exact)) {
                    let error = (f / e - 1.0).abs();
                    // What the optimizer did with the rounding of earlier steps comes on top.
                    let allowed = tolerance * (1.0 + step as f64);
                    assert!(error < allowed, "{dtype:?} {name} step {step} {what}: {f} for {e}");
                }
            }
        }
    }
}
