//! Burn's own training loop on our step.

use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_moe::batch::HostBatch;
use burn_moe::optim::{AdamW, AdamWConfig, GradStore, ParamGroup, ParamTable, RouterBiasConfig};
use burn_moe::train::learner::{
    AdamWRecord, ExpertLoadMetric, Failure, LearnerModel, LearnerOptimizer, LearnerSchedule, TokensPerSecondMetric, learner,
};
use burn_moe::train::{Decay, Schedule, Trainer, TrainerConfig, evaluate};
use burn_train::metric::{LossMetric, MetricDefinition, NumericEntry};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining, ProgressType,
    TrainingProgress,
};
use burn_train::{Interrupter, SupervisedTraining};

use super::step::snapshot;
use super::toy::{B, Inner, ToyConfig, ToyLm, random_batch};

/// Steps of a fixed list, one after the other.
#[derive(Clone)]
struct Steps(Vec<Vec<HostBatch>>);

struct StepsIterator<'a> {
    steps: &'a [Vec<HostBatch>],
    next: usize,
}

impl Iterator for StepsIterator<'_> {
    type Item = Vec<HostBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.steps.get(self.next)?;
        self.next += 1;
        Some(step.clone())
    }
}

impl DataLoaderIterator<Vec<HostBatch>> for StepsIterator<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.next, self.steps.len())
    }
}

impl<AB: Backend> DataLoader<AB, Vec<HostBatch>> for Steps {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Vec<HostBatch>> + 'a> {
        Box::new(StepsIterator { steps: &self.0, next: 0 })
    }

    fn num_items(&self) -> usize {
        self.0.len()
    }

    fn to_device(&self, _device: &AB::Device) -> Arc<dyn DataLoader<AB, Vec<HostBatch>>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<AB, Vec<HostBatch>>> {
        Arc::new(Self(self.0[start..end].to_vec()))
    }
}

/// Keeps every numeric training metric as `(name of the log line, value)`.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, f64)>>>);

impl MetricsRendererTraining for Log {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, value) = state {
            let value = match value {
                NumericEntry::Value(value) => value,
                NumericEntry::Aggregated { aggregated_value, .. } => aggregated_value,
            };
            self.0.lock().unwrap().push((format!("{:?}", entry.metric_id), value));
        }
    }

    fn update_valid(&mut self, _state: MetricState) {}

    fn render_train(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}

    fn render_valid(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Log {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _item: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Log {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {}
}

fn config(steps: u64) -> TrainerConfig {
    TrainerConfig {
        steps,
        schedule: Schedule {
            lr: 1e-2,
            decay: Decay::Linear,
            ..Schedule::default()
        },
        max_grad_norm: Some(0.5),
        optimizer: AdamWConfig {
            groups: vec![ParamGroup::new("norm").with_weight_decay(0.0), ParamGroup::new("embed").frozen()],
            ..AdamWConfig::default()
        },
        ..TrainerConfig::default()
    }
}

fn toy() -> ToyLm<B> {
    ToyConfig {
        aux: Some(0.01),
        ..ToyConfig::default()
    }
    .init(1)
}

fn train(steps: Vec<Vec<HostBatch>>, config: &TrainerConfig) -> (LearnerModel<Inner, ToyLm<Inner>>, Log, Failure) {
    let dir = tempfile::tempdir().unwrap();
    let interrupter = Interrupter::new();
    let (learner, failure) = learner::<B, _>(toy(), config, interrupter.clone()).unwrap();
    let log = Log::default();
    let result = SupervisedTraining::new(dir.path(), Arc::new(Steps(steps.clone())), Arc::new(Steps(steps[..1].to_vec())))
        .metric_train_numeric(LossMetric::<B>::new())
        .metric_valid_numeric(LossMetric::<Inner>::new())
        .metric_train_numeric(TokensPerSecondMetric::new())
        .metric_train_numeric(ExpertLoadMetric::new())
        .with_interrupter(interrupter)
        .with_application_logger(None)
        .renderer(log.clone())
        .launch(learner);
    (result.model, log, failure)
}

#[test]
fn the_learner_trains_like_the_trainer() {
    let steps: Vec<Vec<HostBatch>> = (0..6).map(|i| vec![random_batch(2, 5, i), random_batch(1, 7, i + 50)]).collect();
    let (model, log, failure) = train(steps.clone(), &config(6));
    assert!(failure.take().is_none());

    let settings = TrainerConfig {
        micro_batches: 2,
        ..config(6)
    };
    let mut trainer = Trainer::<B, _>::new(toy(), settings, Default::default(), None).unwrap();
    let reports: Vec<_> = steps.iter().map(|step| trainer.train_step(step).unwrap()).collect();

    let log = log.0.lock().unwrap();
    let named = |name: &str| {
        log.iter()
            .filter(|(id, _)| id.contains(name))
            .map(|(_, value)| *value)
            .collect::<Vec<_>>()
    };
    let losses = named("Loss");
    assert_eq!(losses.len(), 6);
    for (loss, report) in losses.iter().zip(&reports) {
        assert!((loss - report.loss).abs() < 1e-5, "{loss} {report}");
    }
    for (load, report) in named("Expert load").iter().zip(&reports) {
        assert!((load - report.worst_load().unwrap()).abs() < 1e-9);
    }
    assert!(named("Tokens per second").iter().all(|speed| *speed > 0.0));

    // Same weights, frozen ones untouched: clipping inside or before the optimizer rounds differently, nothing more.
    let trained = ToyLm::<B>::from_inner(model.model);
    let floats = |bytes: &[u8]| {
        bytes
            .chunks(4)
            .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
            .collect::<Vec<_>>()
    };
    for ((path, got), (_, want)) in snapshot::<B, _>(&trained).iter().zip(snapshot::<B, _>(trainer.model())) {
        for (g, w) in floats(got).into_iter().zip(floats(&want)) {
            assert!((g - w).abs() < 1e-4, "{path}: {g} {w}");
        }
        assert_eq!(
            path == "embed_tokens.weight",
            snapshot::<B, _>(&toy()).iter().any(|(p, old)| p == path && old == got),
            "{path}"
        );
    }
}

#[test]
fn an_error_ends_the_training_and_is_kept() {
    let mut bad = random_batch(1, 5, 1);
    bad.input_ids[2] = -7;
    let steps = vec![vec![random_batch(1, 5, 2)], vec![bad], vec![random_batch(1, 5, 3)]];
    let (model, _, failure) = train(steps, &config(3));
    let error = failure.take().unwrap().to_string();
    assert!(error.contains("input_ids") && error.contains("-7"), "{error}");
    let (sum, tokens) = evaluate(&model.model, &random_batch(1, 5, 2), &Default::default(), None).unwrap();
    assert!(sum.is_finite() && tokens > 0);
}

#[test]
fn settings_the_learner_cannot_honour_are_refused() {
    let error = |config: &TrainerConfig| match learner::<B, _>(toy(), config, Interrupter::new()) {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    };
    let bias = TrainerConfig {
        router_bias: Some(RouterBiasConfig { rate: 1e-3 }),
        ..config(3)
    };
    assert!(error(&bias).contains("router_bias"));
    assert!(
        error(&TrainerConfig {
            micro_batches: 2,
            ..config(3)
        })
        .contains("micro_batches")
    );
}

#[test]
fn optimizer_and_schedule_come_back_from_their_records() {
    let toy = ToyConfig {
        dtype: FloatDType::BF16,
        ..ToyConfig::default()
    };
    let model: ToyLm<B> = toy.init(1);
    let table = ParamTable::new(&model);
    let fresh = || {
        let optimizer = AdamW::new(AdamWConfig::default(), table.clone()).unwrap();
        LearnerOptimizer::<B>::new(optimizer, table.clone(), Default::default(), Failure::default())
    };
    let gradients = |step: usize| {
        let mut grads = GradStore::<Inner>::new();
        for info in table.trainable() {
            let n: usize = info.shape.iter().product();
            let values: Vec<f32> = (0..n).map(|i| ((i + step) as f32).sin()).collect();
            grads.insert_flat(
                info.id,
                Tensor::from_data(TensorData::new(values, [n]), &Default::default()),
                &info.shape,
            );
        }
        grads.into_gradients_params()
    };
    let mut optimizer = fresh();
    let mut model = model;
    for step in 0..2 {
        model = optimizer.step(1e-2, model, gradients(step));
    }
    // Through the bytes of Burn's recorder, which knows no bf16.
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    let record: Vec<AdamWRecord<B>> = Optimizer::<ToyLm<B>, B>::to_record(&optimizer);
    let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
    let record: Vec<AdamWRecord<B>> = recorder.load(bytes, &Default::default()).unwrap();
    let mut resumed = Optimizer::<ToyLm<B>, B>::load_record(fresh(), record);
    let straight = optimizer.step(1e-2, model.clone(), gradients(2));
    let continued = resumed.step(1e-2, model.clone(), gradients(2));
    let forgetful = fresh().step(1e-2, model, gradients(2));
    assert_eq!(snapshot::<B, _>(&straight), snapshot::<B, _>(&continued));
    assert_ne!(snapshot::<B, _>(&straight), snapshot::<B, _>(&forgetful));

    let mut schedule = LearnerSchedule::new(config(4).schedule, 4);
    let first: Vec<f64> = (0..4).map(|_| schedule.step()).collect();
    let mut half = LearnerSchedule::new(config(4).schedule, 4);
    half.step();
    let mut half = LearnerSchedule::new(config(4).schedule, 4).load_record::<B>(half.to_record::<B>());
    assert_eq!((0..3).map(|_| half.step()).collect::<Vec<_>>(), first[1..]);
    assert_eq!(first, [1e-2, 7.5e-3, 5e-3, 2.5e-3]);
}
