//! What a step asks of the device: one read, and no more memory than the steps before.

use burn::tensor::FloatDType;
use burn_ep_backend::host_reads;
use burn_moe::backend::{Device, Train};
use burn_moe::batch::HostBatch;
use burn_moe::train::{Recompute, Trainer, TrainerConfig};
use burn_moe_models::benchmark::Preset;
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions};

/// A preset whose widths fit the fast kernels, in bf16.
pub fn model(preset: &str, seed: u64) -> AutoModelForCausalLm<Train> {
    let config = Preset::find(preset).unwrap().config(None, None).unwrap();
    let options = FromConfigOptions {
        dtype: Some(FloatDType::BF16),
        seed,
        ep: None,
    };
    AutoModelForCausalLm::from_config(&config, &options, &Device::default()).unwrap()
}

fn trainer(preset: &str, steps: u64) -> Trainer<Train, AutoModelForCausalLm<Train>> {
    let model = model(preset, 0);
    let config = TrainerConfig {
        steps,
        ..TrainerConfig::default()
    };
    Trainer::new(model, config, Device::default(), None).unwrap()
}

/// Two rows of so many tokens.
pub fn batch(seq: usize, seed: usize) -> HostBatch {
    let ids: Vec<i32> = (0..2 * seq).map(|i| ((i * i * 31 + seed * 7) % 512) as i32).collect();
    HostBatch {
        batch: 2,
        seq,
        labels: ids.clone(),
        input_ids: ids,
        ..HostBatch::default()
    }
}

#[test]
fn a_step_waits_for_the_device_once() {
    for preset in ["tiny_qwen3_moe", "tiny_nemotron_h", "tiny_gpt_oss", "tiny_deepseek_v3"] {
        let mut trainer = trainer(preset, 10);
        let mut reads = |micro_batches: &[HostBatch]| {
            let before = host_reads();
            trainer.train_step(micro_batches).unwrap();
            host_reads() - before
        };
        // The first step measures how long the update takes: it waits before and after it, too.
        assert_eq!(reads(&[batch(32, 0)]), 3, "{preset}");
        assert_eq!(reads(&[batch(32, 1)]), 1, "{preset}");
        assert_eq!(reads(&[batch(32, 2), batch(48, 3)]), 1, "{preset}: two micro-batches");
    }
}

/// The auxiliary losses stay on the device, too, whatever is recomputed.
#[test]
fn auxiliary_losses_are_read_with_the_rest() {
    let config = Preset::find("tiny_qwen3_moe").unwrap().config(None, None).unwrap();
    let AutoConfig::Sparse(mut config) = config else {
        panic!("a sparse decoder")
    };
    config.output_router_logits = true;
    let config = AutoConfig::Sparse(config);
    for recompute in [Recompute::None, Recompute::All, Recompute::KeepEvery(2)] {
        let model = AutoModelForCausalLm::<Train>::from_config(&config, &FromConfigOptions::default(), &Device::default()).unwrap();
        let settings = TrainerConfig {
            z_loss: 1e-3,
            recompute,
            ..TrainerConfig::default()
        };
        let mut trainer = Trainer::<Train, _>::new(model, settings, Device::default(), None).unwrap();
        for (step, expected) in [(0, 3), (1, 1)] {
            let before = host_reads();
            let report = trainer.train_step(&[batch(32, step), batch(16, step)]).unwrap();
            assert_eq!(host_reads() - before, expected, "{recompute:?}");
            // Two of eight experts: 2 when they share the work evenly, and ln 8 squared for a router that knows nothing.
            let (balance, z) = (report.balance_loss.unwrap(), report.z_loss.unwrap());
            assert!(
                (1.9..3.0).contains(&balance) && (3.0..6.0).contains(&z),
                "{recompute:?}: {balance} {z}"
            );
        }
    }
}

#[test]
fn reports_name_speed_and_memory() {
    let mut trainer = trainer("tiny_qwen3_moe", 10);
    let report = trainer.train_step(&[batch(32, 0)]).unwrap();
    assert!(report.update_seconds > 0.0 && report.update_seconds < report.seconds);
    assert!(report.tokens_per_second_without_update() > report.tokens_per_second());
    let flops = Preset::find("tiny_qwen3_moe")
        .unwrap()
        .config(None, None)
        .unwrap()
        .flops_per_token(32);
    let expected = flops * report.tokens_per_second() / 1e12;
    assert!((report.tflops.unwrap() / expected - 1.0).abs() < 1e-9);
    assert_eq!(report.mfu, None);
    assert_eq!(report.memory.is_some(), cfg!(feature = "cuda"));
    let again = trainer.train_step(&[batch(32, 0)]).unwrap();
    assert_eq!(again.update_seconds, report.update_seconds);
}

/// burn#4792, burn#5202. Buffers are reused: after the kernels are tuned, a step takes what the one before gave back. All threads
/// of a process share the device's memory, so the test runs in a process of its own.
#[cfg(feature = "cuda")]
#[test]
fn memory_stays_flat_over_200_steps() {
    const ALONE: &str = "BURN_MOE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "training::device::memory_stays_flat_over_200_steps";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let done = child.args([name, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    for preset in ["tiny_qwen3_moe", "tiny_nemotron_h"] {
        let mut trainer = trainer(preset, 200);
        let mut used = Vec::new();
        for step in 0..200 {
            // Rows of several lengths, as real data has.
            let report = trainer.train_step(&[batch([64, 96, 128][step % 3], step)]).unwrap();
            used.push(report.memory.unwrap().used);
        }
        assert_eq!(used[199], used[20], "{preset}: {used:?}");
    }
}
