//! Whole models: loss, every gradient, gradient norm and the weights after steps.

use std::collections::BTreeMap;

use burn::tensor::Device;
use burn_ep_backend::comm::EpGroup;
use burn_moe::backend::{Infer, Train};
use burn_moe::optim::{AdamW, AdamWConfig, GradStore, ParamTable, global_norm, reduce_gradients};
use burn_moe::train::{Recompute, StepSettings, forward_backward, no_hook};

use super::*;

/// One step of training, whole tensors.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    loss: f64,
    balance: Option<f64>,
    norm: f64,
    grads: BTreeMap<String, Vec<f32>>,
}

/// Two steps of one rank. Labels of `ignored` rows do not count.
fn train(config: &str, ep: &EpGroup, recompute: Recompute, ignored: &[usize]) -> Vec<Step> {
    let device = Device::<Train>::default();
    let mut model = model(config, ep);
    let settings = AdamWConfig {
        eps: 1e-2,
        ..AdamWConfig::default()
    };
    let table = ParamTable::new(&model);
    let mut optimizer = AdamW::<Infer>::new(settings, table.clone()).unwrap();
    (0..2)
        .map(|step| {
            let labels = batch(step, 0..ROWS, ignored).num_label_tokens() as f64;
            let settings = StepSettings {
                ep: Some(ep.clone()),
                recompute,
                ..StepSettings::new(labels)
            };
            let mut grads = GradStore::new();
            let own = batch(step, share(ep), ignored);
            let stats = forward_backward::<Train, _>(&model, &own, &device, &settings, &mut grads, &mut no_hook).unwrap();
            reduce_gradients(&mut grads, &table, Some(ep), &device).unwrap();
            let norm = global_norm(&grads, &table, Some(ep)).unwrap();
            let mut loss = [stats.cross_entropy_sum.into_data().iter::<f64>().next().unwrap()];
            ep.comm().get().all_reduce_sum_f64(&mut loss).unwrap();
            let values = table.entries().iter().filter_map(|info| {
                let (flat, _) = grads.clone().remove_flat(info.id)?;
                Some((info.path.clone(), flat.into_data().to_vec().unwrap()))
            });
            let values = values.collect();
            model = optimizer.step::<Train, _>(model.clone(), &mut grads, LEARNING_RATE, 1.0).unwrap();
            Step {
                loss: loss[0] / labels,
                balance: stats.balance,
                norm,
                grads: values,
            }
        })
        .collect()
}

/// Two steps of the whole group.
fn run(config: &str, world: usize, recompute: Recompute, ignored: &[usize]) -> Vec<Step> {
    let ranks = on_ranks(world, |ep| train(config, &ep, recompute, ignored));
    (0..2)
        .map(|s| {
            for rank in &ranks {
                let (found, first) = (&rank[s], &ranks[0][s]);
                assert_eq!(
                    (found.loss, found.balance, found.norm),
                    (first.loss, first.balance, first.norm),
                    "ranks differ"
                );
                for (path, values) in found.grads.iter().filter(|(path, _)| !is_expert(path)) {
                    assert_eq!(values, &first.grads[path], "ranks differ in {path}");
                }
            }
            let grads: Vec<_> = ranks.iter().map(|rank| rank[s].grads.clone()).collect();
            Step {
                grads: join(&grads),
                ..ranks[0][s].clone()
            }
        })
        .collect()
}

fn assert_same(found: &[Step], expected: &[Step], what: &str) {
    for (s, (found, expected)) in found.iter().zip(expected).enumerate() {
        let scalars = |step: &Step| [step.loss as f32, step.norm as f32, step.balance.unwrap_or(0.0) as f32];
        let error = max_error(&scalars(found), &scalars(expected));
        assert!(
            error < 1e-5,
            "{what}, step {s}: loss, norm, balance {:?} for {:?}",
            scalars(found),
            scalars(expected)
        );
        assert!(
            found.grads.keys().eq(expected.grads.keys()),
            "{what}: other parameters have gradients"
        );
        // A gradient that is small against the whole (dt_bias) holds the rounding of the larger terms it sums.
        let floor = 0.01 * expected.norm;
        for (path, expected) in &expected.grads {
            let error = max_error_above(floor, &found.grads[path], expected);
            assert!(
                error < 1e-5,
                "{what}, step {s}, gradient of {path}: largest relative error {error:e}"
            );
        }
    }
}

// pytorch#160285, Megatron#5956, transformers#48205, #48687, DeepSpeed#8213, megablocks#86.
#[test]
fn two_steps_agree_for_every_group_size() {
    for &(name, config) in MODELS {
        let expected = run(config, 1, Recompute::None, &[]);
        assert_ne!(expected[0].loss, expected[1].loss);
        assert_eq!(expected[0].balance.is_some(), config.contains("\"output_router_logits\": true"));
        for world in [2, 4] {
            assert_same(&run(config, world, Recompute::None, &[]), &expected, &format!("{name}, ep {world}"));
        }
        assert_same(
            &run(config, 2, Recompute::All, &[]),
            &expected,
            &format!("{name}, ep 2, recomputed"),
        );
    }
}

// Automodel#935, Megatron#1877, DeepEP#374, LlamaFactory#9628.
#[test]
fn a_rank_without_label_tokens_takes_part() {
    for &(name, config) in MODELS {
        let expected = run(config, 1, Recompute::None, &[2, 3]);
        for world in [2, 4] {
            assert_same(
                &run(config, world, Recompute::None, &[2, 3]),
                &expected,
                &format!("{name}, ep {world}"),
            );
        }
    }
}

/// Reports and final weights of `steps` steps of the trainer.
fn trained(config: &str, world: usize, steps: usize) -> (Vec<[f64; 2]>, Vec<BTreeMap<String, Vec<f32>>>) {
    let ranks = on_ranks(world, |ep| {
        let mut trainer = trainer(model(config, &ep), LEARNING_RATE, &ep);
        let reports: Vec<[f64; 2]> = (0..steps)
            .map(|step| {
                let report = trainer.train_step(&[batch(step, share(&ep), &[])]).unwrap();
                [report.loss, report.grad_norm]
            })
            .collect();
        (reports, parameters(trainer.model()))
    });
    assert!(
        ranks.iter().all(|(reports, _)| *reports == ranks[0].0),
        "ranks report different losses"
    );
    (ranks[0].0.clone(), ranks.into_iter().map(|(_, parameters)| parameters).collect())
}

// torchtitan#2416.
#[test]
fn replicated_weights_stay_equal_bit_by_bit_over_five_steps() {
    for &(_, config) in MODELS {
        let (_, ranks) = trained(config, 2, 5);
        for (path, values) in ranks[1].iter().filter(|(path, _)| !is_expert(path)) {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(values), bits(&ranks[0][path]), "{path}");
        }
        let experts = ranks[0].iter().filter(|(path, _)| is_expert(path));
        assert!(experts.clone().count() > 0);
        for (path, values) in experts {
            assert_ne!(values, &ranks[1][path], "{path}: each rank has its own experts");
        }
    }
}

#[test]
fn the_trainer_gives_the_same_run_for_every_group_size() {
    for &(_, config) in MODELS {
        let (expected, weights) = trained(config, 1, 3);
        for world in [2, 4] {
            let (found, ranks) = trained(config, world, 3);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((found / expected - 1.0).abs() < 1e-5, "{found} for {expected}, ep {world}");
            }
            for (path, values) in join(&ranks) {
                let error = max_error(&values, &weights[0][&path]);
                assert!(error < 1e-5, "{path}, ep {world}: largest relative error {error:e}");
            }
        }
    }
}
