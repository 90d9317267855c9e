//! The same fine-tuning with Burn's own `Learner`: its metrics, renderer and checkpointing around our step.
//!
//! ```text
//! cargo run --release --example burn_learner
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::backend::Backend;
use burn_moe::Result;
use burn_moe::backend::{Device, Infer, Train};
use burn_moe::batch::HostBatch;
use burn_moe::data::{ChatTemplate, Dataset, EncodeOptions, Loader, LoaderOptions, Tokenizer, TooLong};
use burn_moe::train::learner::{ExpertLoadMetric, TokensPerSecondMetric, learner};
use burn_moe::train::{Schedule, TrainerConfig};
use burn_moe_examples::asset;
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};
use burn_train::metric::{LossMetric, MetricDefinition, MetricId};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining, ProgressType,
    TrainingProgress,
};
use burn_train::{Interrupter, SupervisedTraining};

/// Batches come collated, in shuffled order; an item of the learner is the list of micro-batches of one step.
#[derive(Clone)]
struct OneStep;

impl<B: Backend> Batcher<B, HostBatch, Vec<HostBatch>> for OneStep {
    fn batch(&self, micro_batches: Vec<HostBatch>, _device: &B::Device) -> Vec<HostBatch> {
        micro_batches
    }
}

fn steps<B: Backend>(batches: Vec<HostBatch>) -> Arc<dyn DataLoader<B, Vec<HostBatch>>> {
    DataLoaderBuilder::new(OneStep).batch_size(1).build(InMemDataset::new(batches))
}

/// Prints the metrics as lines. (Burn's terminal dashboard is its feature `tui`.)
#[derive(Default)]
struct Lines {
    names: HashMap<MetricId, String>,
    train: BTreeMap<String, String>,
    valid: BTreeMap<String, String>,
}

impl Lines {
    fn entry(&self, state: MetricState) -> (String, String) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let name = self.names.get(&entry.metric_id).cloned().unwrap_or_default();
        (name, entry.serialized_entry.formatted)
    }
}

/// Every tenth step and the last one of a pass over the data.
fn print(phase: &str, progress: &TrainingProgress, metrics: &BTreeMap<String, String>) {
    let Some(items) = &progress.progress else { return };
    if items.items_processed.is_multiple_of(10) || items.items_processed == items.items_total {
        let metrics: Vec<String> = metrics
            .iter()
            .map(|(name, value)| format!("{name} {}", value.replace('\n', " ")))
            .collect();
        println!("{phase} {}/{} {}", items.items_processed, items.items_total, metrics.join(" | "));
    }
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        let (name, value) = self.entry(state);
        self.train.insert(name, value);
    }
    fn update_valid(&mut self, state: MetricState) {
        let (name, value) = self.entry(state);
        self.valid.insert(name, value);
    }
    fn render_train(&mut self, progress: TrainingProgress, _indicators: Vec<ProgressType>) {
        print("train", &progress, &self.train);
    }
    fn render_valid(&mut self, progress: TrainingProgress, _indicators: Vec<ProgressType>) {
        print("valid", &progress, &self.valid);
    }
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
    fn render_test(&mut self, _progress: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}

fn main() -> Result<()> {
    let folder = asset("tiny-nemotron-h");
    let device = Device::default();
    let model = AutoModelForCausalLm::<Train>::from_pretrained(&folder, &FromPretrainedOptions::default(), &device)?.model;

    let tokenizer = Tokenizer::from_folder(&folder)?;
    let template = ChatTemplate::from_folder(&folder, &tokenizer)?;
    let encode = EncodeOptions {
        max_len: 128,
        too_long: TooLong::Error,
        vocab_size: model.config().vocab_size(),
    };
    let data = Dataset::from_jsonl(asset("instructions.jsonl"), &tokenizer, template.as_ref(), &encode)?;
    let mut loader = Loader::new(Arc::new(data), LoaderOptions::new(8, 128))?;
    let mut batches = (0..loader.batches_in_epochs(1))
        .map(|_| loader.next_batch())
        .collect::<Result<Vec<_>>>()?;
    let valid = batches.split_off(batches.len() - 5);

    let epochs = 2;
    let config = TrainerConfig {
        steps: epochs as u64 * batches.len() as u64,
        schedule: Schedule {
            lr: 2e-3,
            warmup_steps: 10,
            ..Schedule::default()
        },
        ..TrainerConfig::default()
    };
    let interrupter = Interrupter::new();
    let (learner, failure) = learner::<Train, _>(model, &config, interrupter.clone())?;
    SupervisedTraining::new("out/burn_learner", steps::<Train>(batches), steps::<Infer>(valid))
        .metrics((LossMetric::<Infer>::new(),))
        .metric_train_numeric(TokensPerSecondMetric::new())
        .metric_train_numeric(ExpertLoadMetric::new())
        .renderer(Lines::default())
        .with_interrupter(interrupter)
        .num_epochs(epochs)
        .launch(learner);
    match failure.take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
