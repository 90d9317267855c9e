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
pub(super) struct Step {
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
            ep.world().get().all_reduce_sum_f64(&mut loss).unwrap();
            let values = table.entries().iter().filter_map(|info| {
                let (flat, _) = grads.clone().remove_flat(info.id)?;
                Some((info.path.clone(), flat.into_data().to_vec().unwrap()))
            });
            let values = values.collect();
            model = optimizer.step::<Train, _>(model.clone(), &mut grads, LEARNING_RATE, 1.0).unwrap();
            Step {
                loss: loss[0] / labels,
                balance: stats.balance.and_then(|balance| balance.into_data().iter::<f64>().next()),
                norm,
                grads: values,
            }
        })
        .collect()
}

/// Two steps of the whole group.
fn run(config: &str, world: usize, recompute: Recompute, ignored: &[usize]) -> Vec<Step> {
    run_on_mesh(config, world, world, recompute, ignored)
}

pub(super) fn run_on_mesh(config: &str, world: usize, size: usize, recompute: Recompute, ignored: &[usize]) -> Vec<Step> {
    let ranks = on_mesh(world, size, |ep| train(config, &ep, recompute, ignored));
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
            for (rank, replica) in ranks.iter().enumerate().skip(size) {
                assert_eq!(replica[s].grads, ranks[rank - size][s].grads, "replicas differ");
            }
            let grads: Vec<_> = ranks[..size].iter().map(|rank| rank[s].grads.clone()).collect();
            Step {
                grads: join(&grads),
                ..ranks[0][s].clone()
            }
        })
        .collect()
}

pub(super) fn assert_same(found: &[Step], expected: &[Step], what: &str) {
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

// maxtext#3699. Our exchange moves exactly the rows that the experts need, so no unused row of a buffer can reach a result;
// here most experts of the second rank get none, and every bias tells whose it is.
#[test]
fn biases_of_experts_stay_with_their_rank() {
    let result = |world: usize| {
        let ranks = on_ranks(world, |ep| {
            let device = Device::<Train>::default();
            let model = number_biases(model(GPT_OSS, &ep), &ep);
            let settings = StepSettings {
                ep: Some(ep.clone()),
                ..StepSettings::new(batch(0, 0..ROWS, &[]).num_label_tokens() as f64)
            };
            let mut grads = GradStore::new();
            let stats =
                forward_backward::<Train, _>(&model, &batch(0, share(&ep), &[]), &device, &settings, &mut grads, &mut no_hook).unwrap();
            let mut loss = [stats.cross_entropy_sum.into_data().iter::<f64>().next().unwrap()];
            ep.world().get().all_reduce_sum_f64(&mut loss).unwrap();
            let biases = ParamTable::new(&model)
                .entries()
                .to_vec()
                .into_iter()
                .filter(|info| info.path.ends_with("proj_bias"));
            let biases: BTreeMap<String, Vec<f32>> = biases
                .map(|info| (info.path, grads.remove_flat(info.id).unwrap().0.into_data().to_vec().unwrap()))
                .collect();
            (loss[0], biases)
        });
        let biases: Vec<_> = ranks.iter().map(|(_, biases)| biases.clone()).collect();
        (ranks[0].0, join(&biases))
    };
    let (loss, biases) = result(1);
    assert!(loss.is_finite() && biases.len() == 4);
    assert!(biases.values().flatten().all(|g| g.is_finite()));
    for world in [2, 4] {
        let (found, found_biases) = result(world);
        assert!((found / loss - 1.0).abs() < 1e-5, "{world} ranks: loss {found} for {loss}");
        for (path, expected) in &biases {
            let error = max_error(&found_biases[path], expected);
            assert!(error < 1e-5, "{world} ranks: {path}: {error:e}");
            let unused = expected.iter().zip(&found_biases[path]).filter(|(e, _)| **e == 0.0);
            assert!(
                unused.into_iter().all(|(_, f)| *f == 0.0),
                "{path}: exact zeros where no token went"
            );
        }
    }
}

/// Fills the biases of every expert with its number among all.
fn number_biases(model: Model, ep: &EpGroup) -> Model {
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::{Tensor, TensorData};
    use burn_moe::optim::PathStack;

    struct Numbered(PathStack, usize);

    impl ModuleMapper<Train> for Numbered {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.0.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.0.exit(container_type);
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Train, D>>) -> Param<Tensor<Train, D>> {
            if !self.0.path().ends_with("proj_bias") {
                return param;
            }
            let shape = param.dims();
            let each: usize = shape[1..].iter().product();
            let values: Vec<f32> = (0..shape[0] * each).map(|i| (self.1 + i / each) as f32).collect();
            param.map(|t| Tensor::from_data(TensorData::new(values.clone(), shape), &t.device()).require_grad())
        }
    }

    let first = ep.local_experts(EXPERTS).unwrap().start;
    model.map(&mut Numbered(PathStack::default(), first))
}
