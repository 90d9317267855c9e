//! Checkpoints do not depend on the size of the group.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_moe::checkpoint::SaveOptions;
use burn_moe::optim::PathStack;
use burn_moe::train::RepeatSource;
use burn_moe_models::FromPretrainedOptions;

use super::*;

fn load(dir: &Path, ep: &EpGroup) -> burn_moe::Result<Model> {
    let options = FromPretrainedOptions {
        ep: Some(ep.clone()),
        ..FromPretrainedOptions::default()
    };
    Ok(Model::from_pretrained(dir, &options, &Device::<Train>::default())?.model)
}

fn save(model: &Model, dir: &Path, ep: &EpGroup) -> burn_moe::Result<()> {
    let options = SaveOptions {
        ep: Some(ep),
        ..SaveOptions::default()
    };
    model.save_pretrained(dir, &options).map(|_| ())
}

/// Fills every expert's weights with its number.
#[derive(Default)]
struct Numbered {
    path: PathStack,
}

impl ModuleMapper<Train> for Numbered {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Train, D>>) -> Param<Tensor<Train, D>> {
        if !is_expert(&self.path.path()) {
            return param;
        }
        let shape = param.dims();
        let each: usize = shape[1..].iter().product();
        let values: Vec<f32> = (0..shape[0] * each).map(|i| (i / each) as f32).collect();
        param.map(|t| Tensor::from_data(TensorData::new(values.clone(), shape), &t.device()).set_require_grad(t.is_require_grad()))
    }
}

// transformers#45662.
#[test]
fn experts_land_on_their_rank_and_stay_there() {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(1, |ep| {
        save(&model(NEMOTRON, &ep).map(&mut Numbered::default()), dir.path(), &ep).unwrap()
    });
    on_ranks(4, |ep| {
        let check = |model: &Model, when: &str| {
            let mut seen = 0;
            for (path, values) in parameters(model).into_iter().filter(|(path, _)| is_expert(path)) {
                let half = values.len() / 2;
                let expected = |i: usize| (2 * ep.rank() + i / half) as f32;
                assert!(
                    values.iter().enumerate().all(|(i, v)| *v == expected(i)),
                    "{path} {when}: {values:?}"
                );
                seen += 1;
            }
            assert_eq!(seen, 4, "up and down of two layers");
        };
        let model = load(dir.path(), &ep).unwrap();
        check(&model, "after loading");
        let mut trainer = trainer(model, 0.0, &ep);
        trainer.train_step(&[batch(0, share(&ep), &[])]).unwrap();
        check(trainer.model(), "after a step with learning rate 0");
    });
}

// KempnerForge#202, pith-train#89.
#[test]
fn a_run_continues_with_another_group_size() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("checkpoint-2");
    // Losses of the steps after the save, and the moments at the save, whole.
    let next = |mut trainer: Trainer<Train, Model>, ep: &EpGroup| {
        let losses: Vec<f64> = (2..4)
            .map(|step| trainer.train_step(&[batch(step, share(ep), &[])]).unwrap().loss)
            .collect();
        losses
    };
    let saved = on_mesh(4, 2, |ep| {
        let mut trainer = trainer(model(NEMOTRON, &ep), LEARNING_RATE, &ep);
        for step in 0..2 {
            trainer.train_step(&[batch(step, share(&ep), &[])]).unwrap();
        }
        assert!(trainer.optimizer().shards().is_some());
        let writer = |model: &Model, dir: &Path| save(model, dir, &ep);
        trainer.save(&dir, &writer, 2.into()).unwrap();
        (moments(&trainer), next(trainer, &ep))
    });
    let whole = join(&saved[..2].iter().map(|(moments, _)| moments.clone()).collect::<Vec<_>>());
    let names = safetensors_names(&dir);
    for expert in 0..EXPERTS {
        assert!(
            names.iter().any(|name| name.contains(&format!("experts.{expert}."))),
            "expert {expert} is in the files: {names:?}"
        );
    }
    for (world, size, shard_optimizer) in [(1, 1, true), (4, 4, true), (2, 2, false), (4, 2, true), (4, 1, true), (2, 1, false)] {
        let resumed = on_mesh(world, size, |ep| {
            let config = TrainerConfig {
                shard_optimizer,
                ..trainer_config(LEARNING_RATE)
            };
            let mut trainer = Trainer::new(load(&dir, &ep).unwrap(), config, Device::<Train>::default(), Some(ep.clone())).unwrap();
            let mut source = RepeatSource::new(vec![batch(0, share(&ep), &[])]);
            trainer.resume(&dir, &mut source).unwrap();
            assert_eq!(trainer.step(), 2);
            (moments(&trainer), next(trainer, &ep))
        });
        let found = join(&resumed[..size].iter().map(|(moments, _)| moments.clone()).collect::<Vec<_>>());
        assert_eq!(found, whole, "{world} ranks, ep {size}: moments");
        for (found, expected) in resumed[0].1.iter().zip(&saved[0].1) {
            assert!((found / expected - 1.0).abs() < 1e-5, "ep {world}: loss {found} for {expected}");
        }
    }
}

/// Moments of every parameter as this rank's row of the mesh has them: shares joined again.
fn moments(trainer: &Trainer<Train, Model>) -> BTreeMap<String, Vec<f32>> {
    type Infer = burn_moe::backend::Infer;
    let states = trainer.parameters().entries().iter().filter_map(|info| {
        let state = trainer.optimizer().state(info.id)?;
        assert_eq!(state.step, 2, "{}", info.path);
        let shard = trainer.optimizer().shards().and_then(|shards| shards.get(info));
        let list = |t: &burn_backend::tensor::FloatTensor<Infer>| {
            let t = Tensor::<Infer, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(t.clone()));
            let own = t.into_data().to_vec::<f32>().unwrap();
            let Some(shard) = &shard else { return own };
            assert_eq!(own.len(), shard.share, "{}", info.path);
            let bytes = own.iter().flat_map(|v| v.to_le_bytes()).collect();
            let all = shard.comm.get().all_gather(bytes).unwrap().concat();
            let all = all.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            all.take(shard.len).collect()
        };
        // Experts are joined along their first axis, so the two moments stay apart.
        Some([
            (format!("{}.m", info.path), list(&state.m)),
            (format!("{}.v", info.path), list(&state.v)),
        ])
    });
    states.flatten().collect()
}

fn safetensors_names(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            names.extend(file.names().into_iter().map(ToString::to_string));
        }
    }
    names
}

// torchtitan#4258, axolotl#3461.
#[test]
fn counts_that_do_not_fit_are_refused_with_field_and_both_values() {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(1, |ep| save(&model(QWEN, &ep), dir.path(), &ep).unwrap());
    let errors = on_ranks(3, |ep| load(dir.path(), &ep).unwrap_err().to_string());
    for error in errors {
        assert!(
            error.contains("num_experts") && error.contains('8') && error.contains('3'),
            "{error}"
        );
    }
    let too_many = QWEN.replace("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9");
    let error = AutoConfig::from_text(too_many).unwrap_err().to_string();
    assert!(
        error.contains("num_experts_per_tok") && error.contains('9') && error.contains('8'),
        "{error}"
    );
}
