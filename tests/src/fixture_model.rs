//! The model of a fixture, and one training pass of it.

use std::collections::BTreeMap;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_moe::backend::{Device, Infer, Train};
use burn_moe::batch::HostBatch;
use burn_moe::checkpoint::CheckpointSource;
use burn_moe::model::CausalLm;
use burn_moe::optim::{AdamWConfig, GradStore, ParamTable, PathStack, global_norm};
use burn_moe::train::{Recompute, StepSettings, forward_backward, no_hook};
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromPretrainedOptions, Pretrained};

use crate::fixture::{Fixture, HostTensor, Run, Training};

/// Step floors below this never act in the fixtures.
const NO_FLOOR: f64 = 1e-9;

/// Model of the tests.
pub type Model = AutoModelForCausalLm<Train>;

/// Result of one forward and backward pass.
#[derive(Debug, Clone)]
pub struct Pass {
    /// Cross entropy plus auxiliary loss.
    pub loss: f64,
    /// Auxiliary loss without its coefficient.
    pub balance: Option<f64>,
    pub grad_norm: f64,
    /// Gradient of every trainable parameter by its path.
    pub grads: BTreeMap<String, HostTensor>,
}

/// Loads a fixture under the behaviour of a run, in `dtype` or as stored. Strict: every tensor is used and found.
pub fn open(fixture: &Fixture, run: &Run, dtype: Option<FloatDType>) -> Pretrained<Train> {
    let source = CheckpointSource::open(&fixture.dir).expect("a checkpoint we read");
    let mut config = AutoConfig::from_json(source.config()).expect("a config we read");
    if let AutoConfig::NemotronH(config) = &mut config {
        let floor = fixture.expected.reference_dt_floor.expect("nemotron_h fixtures record their floor");
        config.parity.dt_floor = floor > NO_FLOOR && run.name != "no_floor";
    }
    let options = FromPretrainedOptions {
        dtype,
        ..FromPretrainedOptions::default()
    };
    Model::load(source, config, &options, &Device::default()).expect("a strict load")
}

/// Logits `[B * S * V]` without gradient recording.
pub fn logits(model: &Model, batch: &HostBatch) -> Vec<f32> {
    let model = model.valid();
    let input = model.prepare(batch, 0, &Device::default()).expect("a batch");
    host(model.logits(&input).expect("logits").flatten::<1>(0, 2))
}

/// Forward and backward over one batch.
pub fn pass(model: &Model, fixture: &Fixture, recompute: Recompute) -> Pass {
    let mut grads = GradStore::new();
    let (loss, balance) = gradients(model, fixture, recompute, &mut grads);
    let table = ParamTable::new::<Train, _>(model);
    let grad_norm = global_norm(&grads, &table, None).expect("a norm");
    let mut named = BTreeMap::new();
    for info in table.trainable() {
        let grad = grads.remove_flat(info.id);
        let (flat, shape) = grad.unwrap_or_else(|| panic!("{} has no gradient", info.path));
        named.insert(info.path.clone(), HostTensor { shape, values: host(flat) });
    }
    assert!(grads.is_empty(), "gradients of parameters that are not trainable");
    Pass {
        loss,
        balance,
        grad_norm,
        grads: named,
    }
}

/// Total loss and auxiliary loss of the fixture's batch; gradients go to `grads`.
pub fn gradients(model: &Model, fixture: &Fixture, recompute: Recompute, grads: &mut GradStore<Infer>) -> (f64, Option<f64>) {
    let batch = fixture.batch();
    let items = fixture.expected.num_items_in_batch.unwrap_or(batch.num_label_tokens()) as f64;
    let settings = StepSettings {
        recompute,
        ..StepSettings::new(items)
    };
    let stats = forward_backward(model, &batch, &Device::default(), &settings, grads, &mut no_hook).expect("a step");
    let sum = stats.cross_entropy_sum.into_data().iter::<f64>().next().expect("one value");
    let coefficient = model.aux_loss().map_or(0.0, |aux| aux.coefficient);
    let balance = stats.balance.and_then(|balance| balance.into_data().iter::<f64>().next());
    (sum / items + coefficient * balance.unwrap_or(0.0), balance)
}

/// Optimizer settings of the reference.
pub fn adamw(training: &Training) -> AdamWConfig {
    AdamWConfig {
        beta1: training.beta1,
        beta2: training.beta2,
        eps: training.eps,
        weight_decay: training.weight_decay,
        ..AdamWConfig::default()
    }
}

/// Every parameter by its path, buffers included.
pub fn parameters(model: &Model) -> BTreeMap<String, HostTensor> {
    #[derive(Default)]
    struct Collector {
        path: PathStack,
        found: BTreeMap<String, HostTensor>,
    }

    impl ModuleVisitor<Train> for Collector {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.path.exit(container_type);
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Train, D>>) {
            let value = param.val().inner();
            let shape = value.dims().to_vec();
            let elements = shape.iter().product::<usize>();
            let values = host(value.reshape([elements]));
            self.found.insert(self.path.path(), HostTensor { shape, values });
        }
    }

    let mut collector = Collector::default();
    model.visit(&mut collector);
    collector.found
}

/// Our module path of a parameter named as in transformers.
pub fn path_of(name: &str) -> &str {
    name.strip_prefix("model.").unwrap_or(name)
}

/// Values of a flat tensor, widened to f32.
pub fn host(flat: Tensor<Infer, 1>) -> Vec<f32> {
    flat.into_data().iter::<f32>().collect()
}
