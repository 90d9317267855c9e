//! The optimizer in the backward against the update after it, and against the formulas.

use std::path::Path;
use std::slice;

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Tensor, TensorPrimitive};
use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};
use burn_ep_backend::host_reads;
use burn_moe::Error;
use burn_moe::backend::{Device, Train};
use burn_moe::batch::HostBatch;
use burn_moe::optim::{AdamWConfig, GradStore, MomentDType, ParamGroup, ParamTable, RouterBiasConfig};
use burn_moe::train::{Decay, Recompute, RepeatSource, Schedule, StepSettings, TrainableLm, Trainer, TrainerConfig};
use burn_moe::train::{forward_backward, no_hook};

use super::device::{batch, model};
use super::step::snapshot;
use super::toy::{B, Dense, Inner, Mixer, ToyConfig, ToyLm, Weight, random_batch};

fn config(optimizer: AdamWConfig) -> TrainerConfig {
    TrainerConfig {
        steps: 6,
        schedule: Schedule {
            lr: 2e-2,
            decay: Decay::Cosine,
            warmup_steps: 1,
            min_ratio: 0.1,
        },
        optimizer: AdamWConfig {
            weight_decay: 0.1,
            groups: vec![ParamGroup::new("norm").with_weight_decay(0.0)],
            ..optimizer
        },
        max_grad_norm: None,
        ..TrainerConfig::default()
    }
}

fn in_backward(config: &TrainerConfig) -> TrainerConfig {
    TrainerConfig {
        optimizer_in_backward: true,
        ..config.clone()
    }
}

/// First and second moments of every parameter, by path, as stored.
fn moments<M: TrainableLm<Train>>(trainer: &Trainer<Train, M>) -> Vec<(String, u64, [Vec<f32>; 2])> {
    let list = |moment| {
        let n = burn_backend::TensorMetadata::shape(&moment).num_elements();
        let tensor = Tensor::<Inner, 1>::from_primitive(TensorPrimitive::Float(
            <Inner as burn_backend::ops::FloatTensorOps<Inner>>::float_reshape(moment, [n].into()),
        ));
        tensor.cast(FloatDType::F32).into_data().to_vec::<f32>().unwrap()
    };
    let state = |info: &burn_moe::optim::ParamInfo| {
        let state = trainer.optimizer().state(info.id)?;
        Some((info.path.clone(), state.step, [list(state.m), list(state.v)]))
    };
    trainer.parameters().entries().iter().filter_map(state).collect()
}

/// Both kinds of update from the same model over three steps: the same weights, moments, losses and norms.
fn compare<M: TrainableLm<Train>>(what: &str, model: impl Fn() -> M, config: &TrainerConfig, batches: &[HostBatch]) {
    let train = |config: TrainerConfig| {
        let mut trainer = Trainer::<Train, M>::new(model(), config, Default::default(), None).unwrap();
        let reports: Vec<_> = batches
            .iter()
            .map(|batch| trainer.train_step(slice::from_ref(batch)).unwrap())
            .collect();
        (snapshot::<Train, M>(trainer.model()), moments(&trainer), reports)
    };
    let (weights, state, reports) = train(config.clone());
    let (weights_b, state_b, reports_b) = train(in_backward(config));
    assert_ne!(weights, snapshot::<Train, M>(&model()), "{what}: nothing moved");
    assert!(state.iter().all(|(_, step, _)| *step == batches.len() as u64), "{what}");
    assert!(weights == weights_b, "{what}: weights differ");
    assert!(state == state_b, "{what}: moments differ");
    for (a, b) in reports.iter().zip(&reports_b) {
        assert_eq!(
            (a.loss, a.balance_loss, a.z_loss, a.lr),
            (b.loss, b.balance_loss, b.z_loss, b.lr),
            "{what}"
        );
        assert!(
            (a.grad_norm / b.grad_norm - 1.0).abs() < 1e-6,
            "{what}: {} {}",
            a.grad_norm,
            b.grad_norm
        );
        assert_eq!(a.expert_load, b.expert_load, "{what}");
    }
}

fn batches() -> Vec<HostBatch> {
    (0..3).map(|seed| random_batch(2, 6, seed)).collect()
}

fn tied(dtype: FloatDType) -> ToyLm<B> {
    let mut model: ToyLm<B> = ToyConfig {
        layers: "dmb",
        aux: Some(0.01),
        dtype,
        ..ToyConfig::default()
    }
    .init(1);
    // The same parameter in two places, so that it has a gradient in the first segment and in the last.
    model.lm_head = Some(model.embed_tokens.clone());
    model
}

#[test]
fn the_update_is_that_after_the_backward() {
    let every_part = |optimizer| TrainerConfig {
        recompute: Recompute::First(2),
        z_loss: 1e-3,
        router_bias: Some(RouterBiasConfig { rate: 1e-2 }),
        ..config(optimizer)
    };
    let bf16 = AdamWConfig {
        master_weights: false,
        moments: MomentDType::Param,
        stochastic_rounding: true,
        ..AdamWConfig::default()
    };
    let eight = AdamWConfig {
        moments: MomentDType::Block8,
        ..bf16.clone()
    };
    compare("fp32", || tied(FloatDType::F32), &every_part(AdamWConfig::default()), &batches());
    compare(
        "fp32 masters",
        || tied(FloatDType::BF16),
        &every_part(AdamWConfig::default()),
        &batches(),
    );
    compare("bf16 moments", || tied(FloatDType::BF16), &every_part(bf16), &batches());
    compare("8-bit moments", || tied(FloatDType::BF16), &every_part(eight), &batches());
}

#[test]
fn families_train_as_with_the_update_after_the_backward() {
    let optimizer = AdamWConfig {
        master_weights: false,
        moments: MomentDType::Block8,
        stochastic_rounding: true,
        ..AdamWConfig::default()
    };
    let config = TrainerConfig {
        recompute: Recompute::First(1),
        ..config(optimizer)
    };
    let batches: Vec<_> = (0..3).map(|seed| batch(24, seed)).collect();
    for preset in ["tiny_qwen3_moe", "tiny_nemotron_h"] {
        compare(preset, || model(preset, 7), &config, &batches);
    }
}

/// First moments after a step are `0.1 factor g`, with the factor of each segment from the gradients of the plain step.
#[test]
fn clipping_is_by_the_running_norm() {
    let max_norm = 0.05;
    let settings = TrainerConfig {
        max_grad_norm: Some(max_norm),
        optimizer_in_backward: true,
        ..config(AdamWConfig::default())
    };
    let model: ToyLm<B> = ToyConfig {
        layers: "dm",
        ..ToyConfig::default()
    }
    .init(3);
    let mut trainer = Trainer::<B, _>::new(model, settings, Default::default(), None).unwrap();
    let mut old: Vec<(String, Vec<f32>)> = Vec::new();
    let mut running = 0.0f64;
    for (step, batch) in batches().into_iter().enumerate() {
        let mut grads = GradStore::<Inner>::new();
        let labels = StepSettings::new(batch.num_label_tokens() as f64);
        forward_backward::<B, _>(trainer.model(), &batch, &Default::default(), &labels, &mut grads, &mut no_hook).unwrap();
        let table = ParamTable::new(trainer.model());
        // Segments in the order of their backward passes.
        let segment = |path: &str| match path {
            path if path.starts_with("layers.1") => 1,
            path if path.starts_with("layers.0") => 2,
            path if path.starts_with("embed") => 3,
            _ => 0,
        };
        let squares = grads.squared_norms(table.entries().iter().map(|info| info.id));
        let so_far: Vec<f64> = (0..4)
            .map(|s| {
                let parts = table.entries().iter().zip(&squares).filter(|(info, _)| segment(&info.path) <= s);
                parts.map(|(_, square)| square).sum::<f64>().sqrt()
            })
            .collect();
        let factor = |s: usize| (max_norm / (running.max(so_far[s]) + 1e-6)).min(1.0);
        assert!(factor(3) < 0.9, "nothing to clip");

        let report = trainer.train_step(slice::from_ref(&batch)).unwrap();
        assert!((report.grad_norm / so_far[3] - 1.0).abs() < 1e-5);
        for (path, _, [m, _]) in moments(&trainer) {
            let info = table.entries().iter().find(|info| info.path == path).unwrap();
            let (grad, _) = grads.remove_flat(info.id).unwrap();
            let grad = grad.into_data().to_vec::<f32>().unwrap();
            let before = old.iter().find(|(p, _)| *p == path).map(|(_, m)| m.clone());
            for (i, found) in m.iter().enumerate() {
                let before = before.as_ref().map_or(0.0, |before| f64::from(before[i]));
                let expected = 0.9 * before + 0.1 * factor(segment(&path)) * f64::from(grad[i]);
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-7,
                    "step {step}, {path}: {found} {expected}"
                );
            }
        }
        running = if step == 0 { so_far[3] } else { 0.9 * running + 0.1 * so_far[3] };
        old = moments(&trainer).into_iter().map(|(path, _, [m, _])| (path, m)).collect();
    }
}

#[test]
fn a_resumed_run_continues_alike() {
    let settings = TrainerConfig {
        max_grad_norm: Some(0.05),
        optimizer_in_backward: true,
        ..config(AdamWConfig {
            moments: MomentDType::Param,
            master_weights: false,
            stochastic_rounding: true,
            ..AdamWConfig::default()
        })
    };
    let trainer = |model| Trainer::<B, _>::new(model, settings.clone(), Default::default(), None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint-3");
    let mut first = trainer(tied(FloatDType::BF16));
    for batch in batches() {
        first.train_step(&[batch]).unwrap();
    }
    first.save(&checkpoint, &|_: &ToyLm<B>, _: &Path| Ok(()), 3.into()).unwrap();
    let mut second = trainer(first.model().clone());
    second.resume(&checkpoint, &mut RepeatSource::new(batches())).unwrap();
    for batch in batches() {
        let (a, b) = (
            first.train_step(slice::from_ref(&batch)).unwrap(),
            second.train_step(&[batch]).unwrap(),
        );
        assert_eq!((a.step, a.loss, a.grad_norm), (b.step, b.loss, b.grad_norm));
    }
    assert_eq!(snapshot::<B, _>(first.model()), snapshot::<B, _>(second.model()));
    assert_eq!(moments(&first), moments(&second));
}

#[test]
fn a_step_waits_for_the_device_once() {
    for preset in ["tiny_qwen3_moe", "tiny_nemotron_h"] {
        let settings = TrainerConfig {
            max_grad_norm: Some(1.0),
            optimizer_in_backward: true,
            ..config(AdamWConfig::default())
        };
        let mut trainer = Trainer::<Train, _>::new(model(preset, 7), settings, Device::default(), None).unwrap();
        for seed in 0..2 {
            let before = host_reads();
            trainer.train_step(&[batch(32, seed)]).unwrap();
            assert_eq!(host_reads() - before, 1, "{preset}");
        }
    }
}

/// Where the values of every parameter and moment lie: the update must not move them, whether the block was kept or recomputed.
#[cfg(not(feature = "cuda"))]
#[test]
fn parameters_and_moments_stay_where_they_are() {
    use burn::module::ModuleVisitor;
    struct Places(Vec<usize>);
    impl ModuleVisitor<B> for Places {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val().inner().into_primitive().tensor();
            self.0.push(value.bytes().as_ptr() as usize);
        }
    }
    fn check<M: TrainableLm<B>>(what: &str, model: M, batches: Vec<HostBatch>) {
        let settings = TrainerConfig {
            recompute: Recompute::First(1),
            ..in_backward(&config(AdamWConfig::default()))
        };
        let mut trainer = Trainer::<B, M>::new(model, settings, Default::default(), None).unwrap();
        let mut places = Vec::new();
        for batch in batches {
            trainer.train_step(&[batch]).unwrap();
            let mut seen = Places(Vec::new());
            trainer.model().visit(&mut seen);
            for info in trainer.parameters().trainable() {
                let state = trainer.optimizer().state(info.id).unwrap();
                seen.0
                    .extend([state.m.bytes().as_ptr() as usize, state.v.bytes().as_ptr() as usize]);
            }
            places.push(seen.0);
        }
        assert!(places[1] == places[0] && places[2] == places[0], "{what}");
    }
    let toy: ToyLm<B> = ToyConfig::default().init(5);
    check("toy", toy, batches());
    for preset in ["tiny_qwen3_moe", "tiny_nemotron_h", "tiny_gpt_oss"] {
        check(preset, model(preset, 7), (0..3).map(|seed| batch(24, seed)).collect());
    }
}

#[test]
fn ranks_update_as_after_the_backward() {
    let train = |config: &TrainerConfig| -> Vec<_> {
        let groups = LocalCommunicator::group(2);
        std::thread::scope(|scope| {
            let rank = |comm| {
                let ep = EpGroup::new(CommHandle::new(comm));
                let batch = random_batch(2, 6, 20 + ep.rank() as u64);
                let model: ToyLm<B> = ToyConfig {
                    layers: "dm",
                    ..ToyConfig::default()
                }
                .init(9);
                let mut trainer = Trainer::<B, _>::new(model, config.clone(), Default::default(), Some(ep)).unwrap();
                let norms: Vec<f64> = (0..3)
                    .map(|_| trainer.train_step(slice::from_ref(&batch)).unwrap().grad_norm)
                    .collect();
                (snapshot::<B, _>(trainer.model()), norms)
            };
            let threads: Vec<_> = groups.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let config = config(AdamWConfig::default());
    let (after, within) = (train(&config), train(&in_backward(&config)));
    for ((weights, norms), (weights_b, norms_b)) in after.iter().zip(&within) {
        assert!(weights == weights_b);
        for (a, b) in norms.iter().zip(norms_b) {
            assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
        }
    }
    // With clipping, all ranks still hold the same replicated parameters.
    let clipped = train(&TrainerConfig {
        max_grad_norm: Some(0.05),
        ..in_backward(&config)
    });
    assert_eq!(clipped[0].1, clipped[1].1);
    for ((path, a), (_, b)) in clipped[0].0.iter().zip(&clipped[1].0) {
        assert_eq!(a == b, !path.contains("experts"), "{path}");
    }
}

fn full(shape: [usize; 2], value: f32) -> Weight<B> {
    Weight {
        weight: Param::from_tensor(Tensor::full(shape, value, &Default::default())),
    }
}

/// The first block's output is moderate, an up weight of 1e-25 times a down weight of 1e25, but the gradient of the former is of the
/// size of the latter, and its square overflows. Head and second block are updated by then.
#[test]
fn a_bad_gradient_stops_the_segments_from_its_own_on() {
    let mut model: ToyLm<B> = ToyConfig {
        layers: "dd",
        ..ToyConfig::default()
    }
    .init(11);
    model.layers[0].mixer = Mixer::Dense(Dense {
        up_proj: full([5, 6], 1e-25),
        down_proj: full([6, 5], 1e25),
    });
    let settings = TrainerConfig {
        schedule: Schedule {
            warmup_steps: 0,
            lr: 2e-2,
            ..Schedule::default()
        },
        ..in_backward(&config(AdamWConfig::default()))
    };
    let mut trainer = Trainer::<B, _>::new(model, settings, Default::default(), None).unwrap();
    let before = snapshot::<B, _>(trainer.model());
    let error = trainer.train_step(&[random_batch(2, 6, 1)]).unwrap_err();
    let Error::Training { step: 1, why } = &error else {
        panic!("{error}")
    };
    assert!(why.contains("block 0 is inf") && why.contains("head to block 1 was done"), "{why}");
    assert_eq!(trainer.step(), 0);
    let states = moments(&trainer);
    for ((path, old), (_, new)) in before.iter().zip(&snapshot::<B, _>(trainer.model())) {
        let updated = !(path.starts_with("layers.0") || path.starts_with("embed"));
        let (_, steps, [m, v]) = states.iter().find(|(p, ..)| p == path).unwrap();
        assert_eq!(*steps, u64::from(updated), "{path}");
        assert_eq!(m.iter().any(|m| *m != 0.0), updated, "{path}");
        assert!(m.iter().chain(v).all(|moment| moment.is_finite()), "{path}");
        assert!(updated || old == new, "{path}");
        // Decay moves a weight even where its moment is 0.
        assert!(!updated || old != new, "{path}");
    }
}

#[test]
fn a_loss_that_is_no_number_changes_nothing() {
    let mut model: ToyLm<B> = ToyConfig::default().init(12);
    model.norm.weight = Param::from_tensor(Tensor::full([6], f32::NAN, &Default::default()));
    let settings = TrainerConfig {
        max_grad_norm: Some(1.0),
        ..in_backward(&config(AdamWConfig::default()))
    };
    let mut trainer = Trainer::<B, _>::new(model, settings, Default::default(), None).unwrap();
    let before = snapshot::<B, _>(trainer.model());
    let error = trainer.train_step(&[random_batch(2, 6, 1)]).unwrap_err().to_string();
    assert!(error.contains("loss") && error.contains("unchanged"), "{error}");
    assert_eq!(snapshot::<B, _>(trainer.model()), before);
    for (path, step, [m, v]) in moments(&trainer) {
        assert!(step == 0 && m.iter().chain(&v).all(|moment| *moment == 0.0), "{path}");
    }
}

#[test]
fn several_micro_batches_are_refused() {
    let settings = TrainerConfig {
        micro_batches: 2,
        ..in_backward(&config(AdamWConfig::default()))
    };
    let error = Trainer::<B, _>::new(tied(FloatDType::F32), settings.clone(), Default::default(), None).unwrap_err();
    assert!(error.to_string().contains("micro_batches"), "{error}");
    let one = TrainerConfig {
        micro_batches: 1,
        ..settings.clone()
    };
    let mut trainer = Trainer::<B, _>::new(tied(FloatDType::F32), one.clone(), Default::default(), None).unwrap();
    let error = trainer.train_step(&batches()).unwrap_err();
    assert!(error.to_string().contains("micro_batches"), "{error}");
    // The trainer is as before.
    trainer.train_step(&batches()[..1]).unwrap();
    let learner = burn_moe::train::learner::learner::<B, _>(tied(FloatDType::F32), &one, burn_train::Interrupter::new());
    let error = learner.err().expect("refused");
    assert!(error.to_string().contains("optimizer_in_backward"), "{error}");
    assert_eq!(trainer.model().embed_tokens.weight.val().dtype(), DType::F32);
}
