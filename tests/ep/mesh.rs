//! Replicas of experts and optimizer state dealt over ranks: the numbers of one rank on every mesh.

use std::collections::BTreeMap;

use burn::tensor::Device;
use burn_ep_backend::comm::EpGroup;
use burn_moe::backend::Train;
use burn_moe::optim::{AdamWConfig, MomentDType, RouterBiasConfig};
use burn_moe::train::{Recompute, Trainer, TrainerConfig};

use super::model::{assert_same, run_on_mesh};
use super::*;

/// World and ranks that share the experts.
const MESHES: [(usize, usize); 5] = [(2, 2), (4, 4), (4, 2), (4, 1), (2, 1)];
const STEPS: usize = 3;

// Automodel#3135, #3540: replicas of experts must be reduced, and once.
#[test]
fn replicas_of_experts_give_the_gradients_of_one_rank() {
    for (name, config) in [("nemotron_h", NEMOTRON), ("qwen3_moe", QWEN), ("gpt_oss", GPT_OSS)] {
        let expected = run_on_mesh(config, 1, 1, Recompute::None, &[]);
        for (world, size) in [(4, 2), (4, 1), (2, 1)] {
            let found = run_on_mesh(config, world, size, Recompute::None, &[]);
            assert_same(&found, &expected, &format!("{name}, {world} ranks, ep {size}"));
        }
    }
}

/// Everything that changes an update: accumulation, clipping, weight decay, the auxiliary loss and the selection bias.
fn config(model: &str, shard_optimizer: bool) -> TrainerConfig {
    TrainerConfig {
        micro_batches: 2,
        // Below the norm of every step, which the test checks.
        max_grad_norm: Some(0.05),
        router_bias: (model == NEMOTRON).then_some(RouterBiasConfig { rate: 1e-3 }),
        shard_optimizer,
        ..trainer_config(LEARNING_RATE)
    }
}

fn start(model_config: &str, config: TrainerConfig, ep: &EpGroup) -> Trainer<Train, Model> {
    Trainer::new(model(model_config, ep), config, Device::<Train>::default(), Some(ep.clone())).unwrap()
}

type Weights = BTreeMap<String, Vec<f32>>;

/// Loss, norm and balance of every step, and the weights of every rank.
fn trained(model_config: &str, config: &TrainerConfig, world: usize, size: usize, steps: usize) -> (Vec<[f64; 3]>, Vec<Weights>) {
    let ranks = on_mesh(world, size, |ep| {
        let mut trainer = start(model_config, config.clone(), &ep);
        let reports: Vec<[f64; 3]> = (0..steps)
            .map(|step| {
                let micro: Vec<_> = (0..config.micro_batches).map(|i| batch(2 * step + i, share(&ep), &[])).collect();
                let report = trainer.train_step(&micro).unwrap();
                assert!(config.max_grad_norm.is_none_or(|max| report.grad_norm > max), "nothing was clipped");
                [report.loss, report.grad_norm, report.balance_loss.unwrap_or(0.0)]
            })
            .collect();
        (reports, parameters(trainer.model()))
    });
    assert!(
        ranks.iter().all(|(reports, _)| *reports == ranks[0].0),
        "ranks report different numbers"
    );
    (ranks[0].0.clone(), ranks.into_iter().map(|(_, weights)| weights).collect())
}

#[test]
fn whole_steps_agree_on_every_mesh_with_and_without_shards() {
    for model in [NEMOTRON, QWEN] {
        let (expected, weights) = trained(model, &config(model, false), 1, 1, STEPS);
        assert_ne!(weights[0], on_ranks(1, |ep| parameters(&super::model(model, &ep)))[0]);
        for (world, size) in MESHES {
            for shards in [true, false] {
                let what = format!("{world} ranks, ep {size}, shards {shards}");
                let (found, ranks) = trained(model, &config(model, shards), world, size, STEPS);
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    assert!((found - expected).abs() <= 1e-5 * expected.abs(), "{what}: {found} for {expected}");
                }
                for (path, values) in join(&ranks[..size]) {
                    let error = max_error(&values, &weights[0][&path]);
                    assert!(error < 1e-5, "{what}, {path}: largest relative error {error:e}");
                }
            }
        }
    }
}

/// Every kind of optimizer state in shares. Random rounding draws by position in the share, so that it falls differently.
#[test]
fn every_kind_of_state_can_be_dealt() {
    for (dtype, moments, master_weights) in [
        (FloatDType::F32, MomentDType::Block8, false),
        (FloatDType::BF16, MomentDType::Param, false),
        (FloatDType::BF16, MomentDType::F32, true),
    ] {
        let run = |world: usize| {
            on_mesh(world, 1, |ep| {
                let config = TrainerConfig {
                    optimizer: AdamWConfig {
                        eps: 1e-2,
                        moments,
                        master_weights,
                        ..AdamWConfig::default()
                    },
                    ..trainer_config(LEARNING_RATE)
                };
                let mut trainer = Trainer::new(model_in(dtype, QWEN, &ep), config, Device::<Train>::default(), Some(ep.clone())).unwrap();
                let steps = (0..STEPS).map(|step| {
                    // The same rows everywhere: the sum over ranks is then a multiple of what one rank has, without rounding.
                    trainer.train_step(&[batch(step, 0..ROWS, &[])]).unwrap().loss
                });
                (steps.collect::<Vec<f64>>(), weights_as_f32(trainer.model()))
            })
        };
        let (alone, dealt) = (run(1), run(2));
        for (found, expected) in dealt[0].0.iter().zip(&alone[0].0) {
            let tolerance = if moments == MomentDType::Block8 { 1e-3 } else { 1e-6 };
            assert!((found / expected - 1.0).abs() < tolerance, "{moments:?}: {found} for {expected}");
        }
        assert_eq!(dealt[0].1, dealt[1].1, "{moments:?}: replicas");
        for (path, values) in &dealt[0].1 {
            let error = max_error(values, &alone[0].1[path]);
            // One step in the last place of bf16 where it is the dtype of the weights, one code of the moments where they are 8-bit.
            let coarse = dtype == FloatDType::BF16 || moments == MomentDType::Block8;
            let tolerance = if coarse { 1e-2 } else { 1e-5 };
            assert!(error < tolerance, "{moments:?}, {path}: {error:e}");
        }
    }
}

fn weights_as_f32(model: &Model) -> Weights {
    use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
    use burn::tensor::Tensor;
    use burn_moe::backend::Infer;

    struct Widen;
    impl ModuleMapper<Infer> for Widen {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Infer, D>>) -> Param<Tensor<Infer, D>> {
            param.map(|t| t.cast(FloatDType::F32))
        }
    }
    parameters(&AutoModelForCausalLm::<Train>::from_inner(model.valid().map(&mut Widen)))
}

// torchtitan#2416.
#[test]
fn replicated_parameters_stay_equal_bit_by_bit_over_fifty_steps() {
    for shards in [true, false] {
        let config = TrainerConfig {
            micro_batches: 1,
            max_grad_norm: Some(1e-3),
            ..config(NEMOTRON, shards)
        };
        let (_, ranks) = trained(NEMOTRON, &config, 4, 2, 50);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for (rank, weights) in ranks.iter().enumerate() {
            for (path, values) in weights {
                let same = if is_expert(path) { rank % 2 } else { 0 };
                assert_eq!(bits(values), bits(&ranks[same][path]), "{path} of rank {rank}, shards {shards}");
            }
        }
    }
}

/// Ranks with rows of different lengths, one of them without any label: the sum over ranks is that over micro-batches.
#[test]
fn ranks_may_have_batches_of_any_shape() {
    let shapes = [(2, 7), (1, 3), (3, 5), (1, 1)];
    let uneven = |rank: usize| {
        let (rows, seq) = shapes[rank];
        let whole = batch(rank, 0..rows, &[]);
        let cut = |list: &[i32]| list.chunks(SEQ).flat_map(|row| row[..seq].to_vec()).collect();
        HostBatch {
            seq,
            input_ids: cut(&whole.input_ids),
            labels: cut(&whole.labels),
            ..whole
        }
    };
    let config = |micro_batches| TrainerConfig {
        micro_batches,
        ..trainer_config(LEARNING_RATE)
    };
    // The balance loss of other models is a mean over micro-batches, which these are not.
    let (expected, weights) = on_ranks(1, |ep| {
        let mut trainer = start(NEMOTRON, config(4), &ep);
        let report = trainer.train_step(&[0, 1, 2, 3].map(uneven)).unwrap();
        ([report.loss, report.grad_norm], parameters(trainer.model()))
    })
    .remove(0);
    for size in [4, 2] {
        let ranks = on_mesh(4, size, |ep| {
            let mut trainer = start(NEMOTRON, config(1), &ep);
            let report = trainer.train_step(&[uneven(ep.world_rank())]).unwrap();
            ([report.loss, report.grad_norm], parameters(trainer.model()))
        });
        for (found, expected) in ranks[0].0.iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-5, "ep {size}: {found} for {expected}");
        }
        let maps: Vec<_> = ranks[..size].iter().map(|(_, weights)| weights.clone()).collect();
        for (path, values) in join(&maps) {
            let error = max_error(&values, &weights[&path]);
            assert!(error < 1e-5, "ep {size}, {path}: {error:e}");
        }
    }
}

/// Each rank keeps its part of the state and no more.
#[test]
fn shares_divide_the_optimizer_state() {
    // Wide enough that a share is much more than the block of 256 elements that it is rounded up to.
    let wide = QWEN
        .replace("\"hidden_size\": 16", "\"hidden_size\": 96")
        .replace("\"moe_intermediate_size\": 12", "\"moe_intermediate_size\": 64");
    let elements = |world: usize, size: usize| {
        let ranks = on_mesh(world, size, |ep| {
            let mut trainer = start(&wide, config(QWEN, true), &ep);
            trainer.train_step(&[batch(0, share(&ep), &[])]).unwrap();
            let table = trainer.parameters().clone();
            let state = table.entries().iter().filter_map(|info| trainer.optimizer().state(info.id));
            state
                .map(|state| burn::tensor::TensorMetadata::shape(&state.m).num_elements())
                .sum::<usize>()
        });
        assert!(ranks.iter().all(|n| *n == ranks[0]), "{ranks:?}");
        ranks[0] as f64
    };
    let whole = elements(1, 1);
    for (world, size) in MESHES {
        let share = elements(world, size) * world as f64 / whole;
        assert!(
            (1.0..1.05).contains(&share),
            "{world} ranks, ep {size}: {share} of what an equal share would be"
        );
    }
}
