//! The training loop: overfitting, accumulation, interruption, resuming, failure.

use std::path::Path;
use std::slice;

use burn::module::{Module, ModuleMapper, Param};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::{FloatDType, Tensor};
use burn_moe::Error;
use burn_moe::batch::HostBatch;
use burn_moe::optim::AdamWConfig;
use burn_moe::train::{
    Decay, Interrupt, Recompute, RepeatSource, RunEnd, SavePlan, Schedule, StepReport, Trainer, TrainerConfig, TrainerState,
    latest_checkpoint,
};

use super::step::snapshot;
use super::toy::{B, ToyConfig, ToyLm, random_batch, rows};

fn config(steps: u64) -> TrainerConfig {
    TrainerConfig {
        steps,
        schedule: Schedule {
            lr: 2e-2,
            decay: Decay::Cosine,
            warmup_steps: 2,
            min_ratio: 0.1,
        },
        ..TrainerConfig::default()
    }
}

fn toy() -> ToyConfig {
    ToyConfig {
        layers: "dmb",
        tied: true,
        aux: Some(0.01),
        ..ToyConfig::default()
    }
}

fn trainer(config: TrainerConfig) -> Trainer<B, ToyLm<B>> {
    Trainer::new(toy().init(1), config, Default::default(), None).unwrap()
}

/// Stands for the Hugging Face writer: the record of the whole model.
fn save_record(model: &ToyLm<B>, dir: &Path) -> burn_moe::Result<()> {
    let bytes = BinBytesRecorder::<FullPrecisionSettings>::new()
        .record(model.clone().into_record(), ())
        .unwrap();
    std::fs::write(dir.join("model.bin"), bytes).map_err(|e| Error::io(dir, "write", e))
}

fn load_record(dir: &Path) -> ToyLm<B> {
    let bytes = std::fs::read(dir.join("model.bin")).unwrap();
    let record = BinBytesRecorder::<FullPrecisionSettings>::new()
        .load(bytes, &Default::default())
        .unwrap();
    toy().init(99).load_record(record)
}

fn run(
    trainer: &mut Trainer<B, ToyLm<B>>,
    source: &mut RepeatSource,
    interrupt: &Interrupt,
    save: Option<&SavePlan>,
) -> (RunEnd, Vec<StepReport>) {
    let mut reports = Vec::new();
    let end = trainer
        .run(
            source,
            interrupt,
            save.map(|plan| (plan, &save_record as &dyn burn_moe::train::SaveModel<ToyLm<B>>)),
            &mut |report| {
                reports.push(report.clone());
            },
        )
        .unwrap();
    (end, reports)
}

fn batches() -> Vec<HostBatch> {
    (0..3).map(|seed| random_batch(2, 6, seed)).collect()
}

fn losses(reports: &[StepReport]) -> Vec<(u64, u64, u64)> {
    reports.iter().map(|r| (r.step, r.loss.to_bits(), r.grad_norm.to_bits())).collect()
}

#[test]
fn a_tiny_batch_is_learned_by_heart() {
    let mut trainer = Trainer::<B, _>::new(ToyConfig::default().init(2), config(150), Default::default(), None).unwrap();
    let mut batch = random_batch(1, 5, 3);
    batch.input_ids = vec![1, 4, 2, 8, 5];
    batch.labels = batch.input_ids.clone();
    let (end, reports) = run(&mut trainer, &mut RepeatSource::new(vec![batch]), &Interrupt::new(), None);
    assert_eq!(end, RunEnd::Finished);
    let (first, last) = (reports[0].loss, reports[149].loss);
    assert!(first > 1.0 && last < 0.01, "{first} -> {last}");
    assert_eq!(reports[0].lr, 0.0);
    assert_eq!(reports[1].lr, 1e-2);
    assert_eq!(trainer.tokens(), 150 * 5);
}

#[test]
fn accumulated_micro_batches_train_like_one_batch() {
    let batch = random_batch(4, 6, 4);
    let plain = ToyConfig {
        layers: "dm",
        ..ToyConfig::default()
    };
    let train = |micro_batches: Vec<HostBatch>, recompute| {
        let config = TrainerConfig {
            micro_batches: micro_batches.len(),
            recompute,
            schedule: Schedule {
                lr: 1e-2,
                ..Schedule::default()
            },
            ..config(3)
        };
        let mut trainer = Trainer::<B, _>::new(plain.init(5), config, Default::default(), None).unwrap();
        (0..3).map(|_| trainer.train_step(&micro_batches).unwrap()).collect::<Vec<_>>()
    };
    let whole = train(vec![batch.clone()], Recompute::None);
    let parts = train(vec![rows(&batch, 0, 1), rows(&batch, 1, 4)], Recompute::All);
    for (w, p) in whole.iter().zip(&parts) {
        assert!((w.loss - p.loss).abs() < 1e-5 * w.loss, "{w} / {p}");
        assert!((w.grad_norm - p.grad_norm).abs() < 1e-5 * w.grad_norm, "{w} / {p}");
        assert_eq!((w.tokens, w.label_tokens), (p.tokens, p.label_tokens));
        assert_eq!(w.expert_load, p.expert_load);
    }
    assert!(whole[2].loss < whole[0].loss);
}

#[test]
fn an_interrupted_run_resumes_with_the_same_losses() {
    let dir = tempfile::tempdir().unwrap();
    let (_, straight) = run(&mut trainer(config(9)), &mut RepeatSource::new(batches()), &Interrupt::new(), None);

    let plan = SavePlan {
        every: Some(3),
        ..SavePlan::new(dir.path())
    };
    let interrupt = Interrupt::new();
    let mut first = trainer(config(9));
    let mut reports = Vec::new();
    let end = first
        .run(
            &mut RepeatSource::new(batches()),
            &interrupt,
            Some((&plan, &save_record)),
            &mut |report| {
                reports.push(report.clone());
                if report.step == 5 {
                    interrupt.request();
                }
            },
        )
        .unwrap();
    assert_eq!((end, reports.len()), (RunEnd::Interrupted, 5));
    assert!(plan.checkpoint(3).is_dir());
    let latest = latest_checkpoint(dir.path()).unwrap().unwrap();
    assert_eq!(latest, plan.checkpoint(5));
    let state = TrainerState::read(&latest).unwrap();
    assert_eq!((state.step, state.tokens, state.data), (5, 5 * 12, 5.into()));

    for (checkpoint, skip) in [(plan.checkpoint(3), 3), (latest, 5)] {
        let mut second = Trainer::new(load_record(&checkpoint), config(9), Default::default(), None).unwrap();
        let mut source = RepeatSource::new(batches());
        second.resume(&checkpoint, &mut source).unwrap();
        let (end, rest) = run(&mut second, &mut source, &Interrupt::new(), None);
        assert_eq!(end, RunEnd::Finished);
        assert_eq!(losses(&rest), losses(&straight[skip..]));
    }
}

#[test]
fn a_signal_ends_the_run_after_its_step_with_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let plan = SavePlan::new(dir.path());
    let interrupt = Interrupt::on_signals().unwrap();
    let mut trainer = trainer(config(1000));
    let mut steps = 0;
    let end = trainer
        .run(
            &mut RepeatSource::new(batches()),
            &interrupt,
            Some((&plan, &save_record)),
            &mut |_| {
                steps += 1;
                if steps == 2 {
                    // What Ctrl-C sends, through the same system call.
                    let pid = std::process::id().to_string();
                    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
                }
            },
        )
        .unwrap();
    assert_eq!(end, RunEnd::Interrupted);
    assert!((2..1000).contains(&steps));
    assert_eq!(TrainerState::read(&plan.checkpoint(steps)).unwrap().step, steps);
}

#[test]
fn bf16_state_survives_the_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let toy = ToyConfig {
        dtype: FloatDType::BF16,
        ..toy()
    };
    let mut first = Trainer::<B, _>::new(toy.init(1), config(6), Default::default(), None).unwrap();
    let mut source = RepeatSource::new(batches());
    for batch in batches() {
        first.train_step(&[batch]).unwrap();
    }
    let checkpoint = dir.path().join("checkpoint-3");
    first.save(&checkpoint, &|_: &ToyLm<B>, _: &Path| Ok(()), 3.into()).unwrap();
    let mut second = Trainer::<B, _>::new(first.model().clone(), config(6), Default::default(), None).unwrap();
    second.resume(&checkpoint, &mut source).unwrap();
    for batch in batches() {
        let (a, b) = (
            first.train_step(slice::from_ref(&batch)).unwrap(),
            second.train_step(&[batch]).unwrap(),
        );
        assert_eq!(losses(&[a]), losses(&[b]));
    }
    assert_eq!(snapshot::<B, _>(first.model()), snapshot::<B, _>(second.model()));
}

#[test]
fn old_checkpoints_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let plan = SavePlan {
        every: Some(2),
        keep: Some(2),
        ..SavePlan::new(dir.path())
    };
    run(
        &mut trainer(config(7)),
        &mut RepeatSource::new(batches()),
        &Interrupt::new(),
        Some(&plan),
    );
    let kept: Vec<u64> = (1..=7).filter(|&step| plan.checkpoint(step).exists()).collect();
    assert_eq!(kept, [6, 7]);
}

#[test]
fn damaged_or_foreign_states_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = trainer(config(4));
    first.train_step(&batches()[..1]).unwrap();
    let checkpoint = dir.path().join("checkpoint-1");
    first.save(&checkpoint, &save_record, 1.into()).unwrap();
    let resume = |trainer: &mut Trainer<B, ToyLm<B>>| {
        trainer
            .resume(&checkpoint, &mut RepeatSource::new(batches()))
            .unwrap_err()
            .to_string()
    };

    // Other settings of the optimizer than the state was made with.
    let with = |optimizer: AdamWConfig| TrainerConfig { optimizer, ..config(4) };
    let bf16: ToyLm<B> = ToyConfig {
        dtype: FloatDType::BF16,
        ..toy()
    }
    .init(1);
    let mut other = Trainer::new(bf16, with(AdamWConfig::default()), Default::default(), None).unwrap();
    assert!(resume(&mut other).contains("master"));
    // Another model.
    let small: ToyLm<B> = ToyConfig { layers: "d", ..toy() }.init(1);
    let mut other = Trainer::new(small, config(4), Default::default(), None).unwrap();
    assert!(resume(&mut other).contains("layers.1"));
    // Fewer steps than are done.
    let mut other = trainer(config(0).without_warmup());
    assert!(resume(&mut other).contains("steps"));

    let tensors = checkpoint.join("training_state/optimizer.safetensors");
    let bytes = std::fs::read(&tensors).unwrap();
    for (damage, word) in [
        (bytes[..bytes.len() - 3].to_vec(), "file length"),
        (vec![255; 64], "header length"),
        (bytes[..4].to_vec(), "read"),
    ] {
        std::fs::write(&tensors, damage).unwrap();
        let error = resume(&mut trainer(config(4)));
        assert!(error.contains("optimizer.safetensors") && error.contains(word), "{error}");
    }
    std::fs::write(checkpoint.join("training_state/trainer_state.json"), "{").unwrap();
    assert!(resume(&mut trainer(config(4))).contains("trainer_state.json"));
}

trait WithoutWarmup {
    fn without_warmup(self) -> Self;
}

impl WithoutWarmup for TrainerConfig {
    fn without_warmup(mut self) -> Self {
        self.schedule.warmup_steps = 0;
        self
    }
}

#[test]
fn a_loss_that_is_no_number_stops_before_the_update() {
    struct Poison;
    impl ModuleMapper<B> for Poison {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|value| Tensor::from_inner(value.inner().mul_scalar(f32::NAN)).require_grad())
        }
    }
    let mut model: ToyLm<B> = toy().init(1);
    model.norm = model.norm.map(&mut Poison);
    let mut trainer = Trainer::new(model, config(4), Default::default(), None).unwrap();
    let before = snapshot::<B, _>(trainer.model());
    let error = trainer.train_step(&batches()[..1]).unwrap_err();
    assert!(matches!(error, Error::Training { step: 1, .. }), "{error}");
    assert!(error.to_string().contains("loss"), "{error}");
    assert_eq!(snapshot::<B, _>(trainer.model()), before);
    assert_eq!(trainer.step(), 0);
}

#[test]
fn data_may_end_before_the_steps_do() {
    let (end, reports) = run(&mut trainer(config(4)), &mut RepeatSource::new(vec![]), &Interrupt::new(), None);
    assert_eq!((end, reports.len()), (RunEnd::OutOfData, 0));
}

#[test]
fn settings_are_checked_by_name() {
    let model = || -> ToyLm<B> { toy().init(1) };
    let error = |config| {
        Trainer::<B, _>::new(model(), config, Default::default(), None)
            .unwrap_err()
            .to_string()
    };
    assert!(
        error(TrainerConfig {
            micro_batches: 0,
            ..config(4)
        })
        .contains("micro_batches")
    );
    assert!(
        error(TrainerConfig {
            max_grad_norm: Some(0.0),
            ..config(4)
        })
        .contains("max_grad_norm")
    );
    assert!(
        error(TrainerConfig {
            z_loss: f64::NAN,
            ..config(4)
        })
        .contains("z_loss")
    );
    assert!(
        error(TrainerConfig {
            recompute: Recompute::KeepEvery(0),
            ..config(4)
        })
        .contains("keep_every")
    );
    assert!(error(config(1)).contains("warmup_steps"));
}
