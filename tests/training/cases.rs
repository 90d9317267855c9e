//! Cases from public bug reports that concern losses, optimizer and trainer.

use std::{slice, thread};

use burn::tensor::{Tensor, TensorData};
use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};
use burn_moe::batch::HostBatch;
use burn_moe::loss::BalanceStats;
use burn_moe::model::AuxLossSettings;
use burn_moe::optim::{AdamW, freeze};
use burn_moe::optim::{AdamWConfig, GradStore, ParamGroup, ParamTable, RouterBiasConfig, global_norm, update_router_bias};
use burn_moe::train::{Decay, Recompute, Schedule, StepReport, StepSettings, Trainer, TrainerConfig, forward_backward, no_hook};

use super::step::{by_path, snapshot};
use super::toy::{B, EXPERTS, Inner, ToyConfig, ToyLm, random_batch};

// burn#5228, torchtitan#2859
#[test]
fn weight_decay_spares_the_listed_groups() {
    let model: ToyLm<B> = ToyConfig {
        layers: "db",
        ..ToyConfig::default()
    }
    .init(1);
    let before = snapshot::<B, _>(&model);
    let table = ParamTable::new(&model);
    let config = AdamWConfig {
        weight_decay: 0.1,
        groups: vec![
            ParamGroup::new(ParamGroup::NORMS_AND_BIASES).with_weight_decay(0.0),
            ParamGroup::new(ParamGroup::ROUTER).with_weight_decay(0.0),
        ],
        ..AdamWConfig::default()
    };
    let mut grads = GradStore::<Inner>::new();
    for info in table.trainable() {
        let n: usize = info.shape.iter().product();
        grads.insert_flat(info.id, Tensor::zeros([n], &Default::default()), &info.shape);
    }
    let mut optimizer = AdamW::<Inner>::new(config, table).unwrap();
    let model = optimizer.step::<B, _>(model, &mut grads, 1.0, 1.0).unwrap();
    let spared = [
        "norm.weight",
        "layers.1.mixer.gate.weight",
        "layers.1.mixer.gate.e_score_correction_bias",
    ];
    let mut seen = 0;
    for ((path, old), (_, new)) in before.iter().zip(snapshot::<B, _>(&model)) {
        if spared.contains(&path.as_str()) {
            seen += 1;
            assert_eq!(*old, new, "{path}");
            continue;
        }
        let floats = |bytes: &[u8]| {
            bytes
                .chunks(4)
                .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
                .collect::<Vec<_>>()
        };
        for (o, n) in floats(old).into_iter().zip(floats(&new)) {
            assert!((n - 0.9 * o).abs() < 1e-6, "{path}: {o} {n}");
        }
    }
    assert_eq!(seen, 3);
}

// transformers#45120
#[test]
fn a_collapsed_router_has_balance_loss_e() {
    let settings = AuxLossSettings {
        coefficient: 1.0,
        num_experts: 4,
        top_k: 1,
    };
    let logits = Tensor::<Inner, 2>::from_floats([[30.0, 0.0, 0.0, 0.0]; 6], &Default::default());
    let mut stats = BalanceStats::new(settings);
    stats.observe(logits, None, 6.0).unwrap();
    let loss = f64::from(stats.finish(None, &Default::default()).unwrap().value.into_scalar());
    // A softmax over probabilities instead of logits would give about 1.90.
    assert!((loss - 4.0).abs() < 1e-5, "{loss}");
}

#[test]
fn a_balanced_router_has_balance_loss_k() {
    let settings = AuxLossSettings {
        coefficient: 1.0,
        num_experts: 4,
        top_k: 2,
    };
    let rows: Vec<f32> = (0..4)
        .flat_map(|t| (0..4).map(move |e| if (e + t) % 4 < 2 { 5.0 } else { 0.0 }))
        .collect();
    let logits = Tensor::<Inner, 2>::from_data(TensorData::new(rows, [4, 4]), &Default::default());
    let mut stats = BalanceStats::new(settings);
    stats.observe(logits, None, 4.0).unwrap();
    let loss = f64::from(stats.finish(None, &Default::default()).unwrap().value.into_scalar());
    assert!((loss - 2.0).abs() < 1e-5, "{loss}");
}

// transformers#28505, Megatron#4777, torchtitan#4594
#[test]
fn padding_changes_no_loss_no_count_and_no_bias() {
    let model: ToyLm<B> = ToyConfig {
        layers: "bmb",
        aux: Some(0.1),
        ..ToyConfig::default()
    }
    .init(2);
    let batch = random_batch(1, 5, 3);
    let mut padded = HostBatch {
        seq: 8,
        attention_mask: Some([vec![true; 5], vec![false; 3]].concat()),
        ..batch.clone()
    };
    padded.input_ids.extend([0; 3]);
    padded.labels.extend([-100; 3]);
    let settings = StepSettings {
        z_loss: 0.1,
        recompute: Recompute::All,
        ..StepSettings::new(batch.num_label_tokens() as f64)
    };
    let run = |batch: &HostBatch| {
        let mut grads = GradStore::new();
        let stats = forward_backward::<B, _>(&model, batch, &Default::default(), &settings, &mut grads, &mut no_hook).unwrap();
        let load: Vec<Option<Vec<f64>>> = stats
            .expert_load
            .into_iter()
            .map(|l| l.map(|l| l.into_data().iter().collect()))
            .collect();
        (
            f64::from(stats.cross_entropy_sum.into_scalar()),
            f64::from(stats.balance.unwrap().into_scalar()),
            f64::from(stats.z_loss.unwrap().into_scalar()),
            load,
            by_path(&grads, &ParamTable::new(&model)),
        )
    };
    let (ce, balance, z, load, grads) = run(&batch);
    let (ce_p, balance_p, z_p, load_p, grads_p) = run(&padded);
    for (a, b) in [(ce, ce_p), (balance, balance_p), (z, z_p)] {
        assert!((a - b).abs() < 1e-5 * a.abs(), "{a} {b}");
    }
    assert_eq!(load, load_p);
    super::step::assert_close(&grads_p, &grads, 1e-5);

    let groups = AdamW::<Inner>::new(AdamWConfig::default(), ParamTable::new(&model)).unwrap();
    let rate = RouterBiasConfig { rate: 1e-3 };
    let biases =
        |load: &[Option<Vec<f64>>]| snapshot::<B, _>(&update_router_bias::<B, _>(model.clone(), load, &rate, groups.groups()).unwrap());
    assert_eq!(biases(&load), biases(&load_p));
    assert_ne!(biases(&load), snapshot::<B, _>(&model));
}

// torchtitan#1506, torchtitan#3686, maxtext#2494
#[test]
fn the_bias_update_skips_layers_without_bias() {
    let model: ToyLm<B> = ToyConfig {
        layers: "bmb",
        ..ToyConfig::default()
    }
    .init(4);
    let groups = AdamW::<Inner>::new(AdamWConfig::default(), ParamTable::new(&model)).unwrap();
    let load = vec![Some(vec![4.0, 0.0, 0.0, 0.0]); 3];
    let model = update_router_bias::<B, _>(model, &load, &RouterBiasConfig { rate: 1e-3 }, groups.groups()).unwrap();
    let biases: Vec<(String, Vec<f32>)> = snapshot::<B, _>(&model)
        .into_iter()
        .filter(|(path, _)| path.ends_with("e_score_correction_bias"))
        .map(|(path, bytes)| (path, bytes.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()))
        .collect();
    let paths: Vec<&str> = biases.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "layers.0.mixer.gate.e_score_correction_bias",
            "layers.2.mixer.gate.e_score_correction_bias"
        ]
    );
    for (_, bias) in biases {
        for (got, want) in bias.iter().zip([-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]) {
            assert!((got - want).abs() < 1e-9, "{got} {want}");
        }
    }
}

// DeepSpeed#8478, DeepSpeed#8613, SpecForge#882: the parts on one rank; across ranks see `ep`.
#[test]
fn the_gradient_norm_counts_every_parameter_once() {
    let model: ToyLm<B> = ToyConfig {
        layers: "m",
        ..ToyConfig::default()
    }
    .init(5);
    let table = ParamTable::new(&model);
    let mut grads = GradStore::<Inner>::new();
    let mut put = |path: &str, value: f32| {
        let info = table.entries().iter().find(|info| info.path == path).unwrap();
        let n: usize = info.shape.iter().product();
        let mut values = vec![0.0; n];
        values[..4].fill(value);
        grads.insert_flat(
            info.id,
            Tensor::from_data(TensorData::new(values, [n]), &Default::default()),
            &info.shape,
        );
    };
    put("norm.weight", 3.0);
    put("layers.0.mixer.experts.up_proj", 4.0);
    let norm = global_norm(&grads, &table, None).unwrap();
    assert!((norm - 10.0).abs() < 1e-6, "{norm}");
}

fn trainer(layers: &'static str, groups: Vec<ParamGroup>) -> burn_moe::Result<Trainer<B, ToyLm<B>>> {
    let model: ToyLm<B> = ToyConfig {
        layers,
        ..ToyConfig::default()
    }
    .init(6);
    let config = TrainerConfig {
        steps: 20,
        schedule: Schedule {
            lr: 1e-2,
            decay: Decay::Constant,
            ..Schedule::default()
        },
        router_bias: layers.contains('b').then_some(RouterBiasConfig { rate: 1e-2 }),
        optimizer: AdamWConfig {
            groups,
            ..AdamWConfig::default()
        },
        ..TrainerConfig::default()
    };
    Trainer::new(model, config, Default::default(), None)
}

// Megatron#4785, prime-rl#1836
#[test]
fn a_frozen_router_keeps_its_bytes() {
    let router = |path: &str| path.contains(".gate.");
    let run = |groups| {
        let mut trainer = trainer("db", groups).unwrap();
        let before = snapshot::<B, _>(trainer.model());
        for step in 0..20 {
            trainer.train_step(&[random_batch(2, 5, step)]).unwrap();
        }
        let changed: Vec<String> = before
            .into_iter()
            .zip(snapshot::<B, _>(trainer.model()))
            .filter(|(old, new)| old != new)
            .map(|((path, _), _)| path)
            .collect();
        changed
    };
    let frozen = run(vec![ParamGroup::new(ParamGroup::ROUTER).frozen()]);
    assert!(!frozen.is_empty() && !frozen.iter().any(|path| router(path)), "{frozen:?}");
    // The same run without the flag changes both router tensors.
    assert_eq!(run(vec![]).iter().filter(|path| router(path)).count(), 2);
    let error = trainer("dd", vec![ParamGroup::new(ParamGroup::ROUTER).frozen()])
        .unwrap_err()
        .to_string();
    assert!(error.contains("matches no parameter"), "{error}");
}

#[test]
fn router_bias_on_a_model_without_bias_is_an_error() {
    let config = TrainerConfig {
        router_bias: Some(RouterBiasConfig { rate: 1e-3 }),
        ..TrainerConfig::default()
    };
    let model: ToyLm<B> = ToyConfig::default().init(7);
    let error = Trainer::<B, _>::new(model, config, Default::default(), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("router_bias") && error.contains("e_score_correction_bias"),
        "{error}"
    );
}

#[test]
fn freezing_everything_is_an_error() {
    let error = trainer("d", vec![ParamGroup::new(".").frozen()]).unwrap_err().to_string();
    assert!(error.contains("frozen"), "{error}");
    let model: ToyLm<B> = ToyConfig::default().init(8);
    let table = ParamTable::new(&model);
    let groups = AdamWConfig {
        groups: vec![ParamGroup::new("embed").frozen()],
        ..AdamWConfig::default()
    };
    let optimizer = AdamW::<Inner>::new(groups, table).unwrap();
    let frozen = freeze::<B, _>(model, optimizer.groups());
    assert_eq!(
        ParamTable::new(&frozen).trainable().count() + 1,
        ParamTable::new(&frozen).entries().len()
    );
}

#[test]
fn reports_count_experts_over_the_whole_step() {
    let mut trainer = trainer("db", vec![]).unwrap();
    let report: StepReport = trainer.train_step(&[random_batch(2, 5, 1), random_batch(1, 4, 2)]).unwrap();
    assert_eq!(report.tokens, 14);
    let [load] = &report.expert_load[..] else {
        panic!("one routed block")
    };
    assert_eq!((load.block, load.counts.len()), (1, EXPERTS));
    assert_eq!(load.counts.iter().sum::<f64>(), 28.0);
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

// burn#3581
#[test]
fn two_ranks_with_the_same_batch_train_like_one() {
    let config = TrainerConfig {
        steps: 4,
        schedule: Schedule {
            lr: 1e-2,
            warmup_steps: 2,
            ..Schedule::default()
        },
        ..TrainerConfig::default()
    };
    let batch = random_batch(2, 6, 9);
    let train = |ep: Option<EpGroup>| {
        let model: ToyLm<B> = ToyConfig {
            layers: "dd",
            tied: true,
            ..ToyConfig::default()
        }
        .init(10);
        let mut trainer = Trainer::<B, _>::new(model, config.clone(), Default::default(), ep).unwrap();
        let reports: Vec<StepReport> = (0..3).map(|_| trainer.train_step(slice::from_ref(&batch)).unwrap()).collect();
        (reports, snapshot::<B, _>(trainer.model()))
    };
    let (alone, weights) = train(None);
    let ranks: Vec<_> = thread::scope(|scope| {
        let start = |comm| scope.spawn(|| train(Some(EpGroup::new(CommHandle::new(comm)))));
        let threads: Vec<_> = LocalCommunicator::group(2).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (reports, rank_weights) in ranks {
        for (rank, one) in reports.iter().zip(&alone) {
            // Twice the tokens, the same mean, and a schedule that advances once per step, not once per rank.
            assert_eq!((rank.step, rank.lr, rank.label_tokens), (one.step, one.lr, 2 * one.label_tokens));
            assert!((rank.loss - one.loss).abs() < 1e-6 * one.loss, "{rank} / {one}");
            assert!((rank.grad_norm - one.grad_norm).abs() < 1e-5 * one.grad_norm, "{rank} / {one}");
        }
        // One rank forms the clipping factor on the device in fp32, a group on the host in double precision.
        for ((name, found), (expected_name, expected)) in rank_weights.iter().zip(&weights) {
            assert_eq!((name, found.len()), (expected_name, expected.len()));
            for (found, expected) in floats(found).zip(floats(expected)) {
                assert!((found - expected).abs() <= 1e-6, "{name}: {found} {expected}");
            }
        }
    }
}
