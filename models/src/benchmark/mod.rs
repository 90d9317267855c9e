//! How fast whole training steps are: the same batch of random tokens again and again, or tokens from a file.
//!
//! Two loops are timed with the device idle at both ends of every step: whole steps (forward, backward, clipping, optimizer)
//! and steps without the optimizer (forward and backward, gradients dropped). Warm-up steps come before each and are not
//! counted; neither are they in the memory, which is measured over the counted whole steps.

mod presets;
mod report;

use std::path::PathBuf;
use std::time::Instant;

use burn::module::ParamId;
use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn_ep_backend::MoeBackend;
use burn_moe::backend::{Device, Train, device_capacity};
use burn_moe::batch::HostBatch;
use burn_moe::checkpoint::SaveOptions;
use burn_moe::optim::{AdamWConfig, GradStore, MomentDType};
use burn_moe::train::{Decay, Recompute, Schedule, Segment, StepSettings, Trainer, TrainerConfig, forward_backward};
use burn_moe::{Error, Result};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

pub use presets::{PRESETS, Preset};
pub use report::{BenchmarkReport, Loading, Timing};

use crate::sizing::{MemoryPlan, MemorySettings};
use crate::{AutoConfig, AutoModelForCausalLm, FromConfigOptions, FromPretrainedOptions};

type Model = AutoModelForCausalLm<Train>;

/// Dense bf16 peak of an H100 or H200 SXM, in TFLOP/s: what MFU is relative to unless another peak is given.
pub const H200_BF16_TFLOPS: f64 = 989.5;

/// Optimizer state that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BenchmarkOptimizer {
    /// None: forward and backward only.
    None,
    /// AdamW with moments in the dtype of the parameters, as PyTorch keeps them.
    Adamw,
    /// The same with stochastic rounding of moments and parameters.
    AdamwStochastic,
    /// AdamW with 8-bit moments and stochastically rounded parameters.
    Adamw8bit,
    /// AdamW with fp32 moments and an fp32 copy of the parameters.
    AdamwMaster,
}

/// What is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchmarkConfig {
    /// Name of a [`Preset`]; with `from_safetensors`, what the report calls the model.
    pub preset: String,
    /// First layers of the model; None: all.
    pub layers: Option<usize>,
    /// Routed experts per layer; None: as published.
    pub experts: Option<usize>,
    /// Rows per step.
    pub batch: usize,
    /// Tokens per row.
    pub seq: usize,
    /// Deal the tokens evenly over the experts instead of asking the router.
    pub balanced: bool,
    pub recompute: Recompute,
    pub optimizer: BenchmarkOptimizer,
    /// Update each segment in the backward pass, see [`TrainerConfig::optimizer_in_backward`].
    pub optimizer_in_backward: bool,
    /// Bound of the gradient norm; None: no clipping.
    pub max_grad_norm: Option<f64>,
    /// Counted steps of each loop.
    pub steps: usize,
    /// Steps before them.
    pub warmup: usize,
    /// Dtype of the parameters.
    #[serde(serialize_with = "report::dtype_name")]
    pub dtype: FloatDType,
    /// Seed of weights and tokens.
    pub seed: u64,
    pub lr: f64,
    /// Load this checkpoint instead of drawing weights.
    pub from_safetensors: Option<PathBuf>,
    /// Write the weights here first and load them again, to measure loading.
    pub write_safetensors: Option<PathBuf>,
    /// Train on these tokens instead of one random batch: 32-bit little-endian ids, `batch * seq` for each step, from the start
    /// again when they end. For comparing losses.
    pub tokens: Option<PathBuf>,
    /// Leave the steps without optimizer out.
    pub skip_plain: bool,
    /// Peak of the device that MFU is relative to, in TFLOP/s.
    pub peak_tflops: f64,
}

impl BenchmarkConfig {
    /// The comparison of this project: sequence 4096, bf16, AdamW with bf16 moments, 8 counted steps after 3.
    pub fn new(preset: impl Into<String>) -> Self {
        Self {
            preset: preset.into(),
            layers: None,
            experts: None,
            batch: 1,
            seq: 4096,
            balanced: false,
            recompute: Recompute::None,
            optimizer: BenchmarkOptimizer::Adamw,
            optimizer_in_backward: false,
            max_grad_norm: TrainerConfig::default().max_grad_norm,
            steps: 8,
            warmup: 3,
            dtype: FloatDType::BF16,
            seed: 0,
            lr: 1e-5,
            from_safetensors: None,
            write_safetensors: None,
            tokens: None,
            skip_plain: false,
            peak_tflops: H200_BF16_TFLOPS,
        }
    }

    fn validate(&self) -> Result<()> {
        for (field, value) in [("--batch", self.batch), ("--seq", self.seq), ("--steps", self.steps)] {
            if value == 0 {
                return Err(Error::config(field, 0, "at least 1"));
            }
        }
        if !(self.peak_tflops.is_finite() && self.peak_tflops > 0.0) {
            return Err(Error::config("--peak-tflops", self.peak_tflops, "a positive number"));
        }
        if self.optimizer_in_backward && self.optimizer == BenchmarkOptimizer::None {
            return Err(Error::config("--optimizer-in-backward", "given", "an optimizer"));
        }
        if self.skip_plain && self.optimizer == BenchmarkOptimizer::None {
            return Err(Error::config("--skip-plain", "given", "an optimizer: nothing would be measured"));
        }
        if self.from_safetensors.is_some() {
            let cut = [
                ("--layers", self.layers.is_some()),
                ("--experts", self.experts.is_some()),
                ("--write-safetensors", self.write_safetensors.is_some()),
            ];
            if let Some((field, _)) = cut.into_iter().find(|(_, given)| *given) {
                return Err(Error::config(field, "a value", "none together with --from-safetensors"));
            }
        }
        Ok(())
    }

    fn trainer(&self) -> TrainerConfig {
        use BenchmarkOptimizer::{Adamw8bit, AdamwMaster, AdamwStochastic};
        let bf16 = self.dtype == FloatDType::BF16;
        TrainerConfig {
            steps: (self.warmup + self.steps) as u64,
            schedule: Schedule {
                lr: self.lr,
                decay: Decay::Constant,
                ..Schedule::default()
            },
            optimizer: AdamWConfig {
                master_weights: self.optimizer == AdamwMaster,
                moments: match self.optimizer {
                    AdamwMaster => MomentDType::F32,
                    Adamw8bit => MomentDType::Block8,
                    _ => MomentDType::Param,
                },
                // Only bf16 is rounded; asking for it elsewhere is an error.
                stochastic_rounding: self.optimizer == AdamwStochastic || (self.optimizer == Adamw8bit && bf16),
                ..AdamWConfig::default()
            },
            recompute: self.recompute,
            optimizer_in_backward: self.optimizer_in_backward,
            max_grad_norm: self.max_grad_norm,
            force_balanced: self.balanced,
            ..TrainerConfig::default()
        }
    }

    /// Config of the model that is drawn or loaded.
    fn model_config(&self) -> Result<AutoConfig> {
        match &self.from_safetensors {
            Some(folder) => AutoConfig::from_file(folder.join("config.json")),
            None => Preset::find(&self.preset)?.config(self.layers, self.experts),
        }
    }
}

/// Runs the benchmark on the default device; `progress` hears one line per phase.
///
/// # Errors
/// Settings out of range, a checkpoint that cannot be read, a loss that is not finite.
pub fn run(config: &BenchmarkConfig, progress: &mut dyn FnMut(&str)) -> Result<BenchmarkReport> {
    config.validate()?;
    let device = Device::default();
    Train::prepare_device(&device);
    let start = Instant::now();
    let with_optimizer = config.optimizer != BenchmarkOptimizer::None;
    let settings = MemorySettings {
        dtype: config.dtype,
        optimizer: with_optimizer.then(|| config.trainer().optimizer),
        recompute: config.recompute,
        gradients_kept: !config.optimizer_in_backward,
        ..MemorySettings::new(config.batch, config.seq)
    };
    let plan = MemoryPlan::new(&config.model_config()?, &settings)?;
    progress(&format!("memory, planned:\n{plan}"));
    if let Some(available) = device_capacity(&device) {
        plan.check(available)?;
    }
    let (model, loading) = model(config, &device, progress)?;
    let auto_config = model.config();
    let mut trainer = Trainer::<Train, Model>::new(model, config.trainer(), Device::default(), None)?;
    sync(&device)?;
    let ready_seconds = start.elapsed().as_secs_f64();
    let batches = batches(config, auto_config.vocab_size())?;
    let (mut losses, mut used) = (Vec::new(), Vec::new());
    let mut memory = None;

    let (mut plain, mut queued) = (None, Vec::new());
    if !config.skip_plain {
        progress("steps without optimizer");
        let step = |index: usize| {
            let batch = &batches[index % batches.len()];
            let settings = StepSettings {
                recompute: config.recompute,
                force_balanced: config.balanced,
                ..StepSettings::new(batch.num_label_tokens() as f64)
            };
            let mut grads = GradStore::new();
            // As in whole steps, one segment's gradients at a time.
            let mut on_segment = |_: Segment, _: &[ParamId], grads: &mut GradStore<_>| {
                if config.optimizer_in_backward {
                    grads.clear();
                }
                Ok(())
            };
            let start = Instant::now();
            forward_backward(trainer.model(), batch, &device, &settings, &mut grads, &mut on_segment)?;
            Train::flush(&device);
            queued.push(start.elapsed().as_secs_f64());
            sync(&device)
        };
        plain = Some(timed(config, &device, step)?);
        memory = Train::device_memory(&device);
    }

    let mut whole = None;
    if with_optimizer {
        progress("whole steps");
        let step = |index: usize| {
            let batch = &batches[index % batches.len()];
            let report = trainer.train_step(std::slice::from_ref(batch))?;
            losses.push(report.loss);
            used.extend(report.memory.map(|memory| memory.used));
            sync(&device)
        };
        whole = Some(timed(config, &device, step)?);
        memory = Train::device_memory(&device);
    }
    Ok(BenchmarkReport::new(
        config,
        &auto_config,
        report::Measured {
            ready_seconds,
            plan,
            loading,
            whole,
            plain,
            queued: queued.split_off(queued.len().min(config.warmup)),
            memory,
            used: used.split_off(used.len().min(config.warmup)),
            losses,
        },
    ))
}

/// Warm-up and counted steps; `step` hears how many were before it.
fn timed(config: &BenchmarkConfig, device: &Device, mut step: impl FnMut(usize) -> Result<()>) -> Result<report::Loop> {
    let start = Instant::now();
    for index in 0..config.warmup {
        step(index)?;
    }
    let warmup_seconds = start.elapsed().as_secs_f64();
    // Buffers of the warm-up only (tuning of kernels) go back to the device.
    Train::memory_cleanup(device);
    sync(device)?;
    Train::reset_peak_memory(device);
    let mut seconds = Vec::with_capacity(config.steps);
    for index in 0..config.steps {
        let start = Instant::now();
        step(config.warmup + index)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(report::Loop { warmup_seconds, seconds })
}

fn sync(device: &Device) -> Result<()> {
    Train::sync(device).map_err(|error| Error::Training {
        step: 0,
        why: format!("the device reports: {error}"),
    })
}

fn model(config: &BenchmarkConfig, device: &Device, progress: &mut dyn FnMut(&str)) -> Result<(Model, Option<Loading>)> {
    if let Some(folder) = &config.from_safetensors {
        progress("loading");
        return load(config, folder, device);
    }
    progress("drawing the weights");
    let auto_config = config.model_config()?;
    let options = FromConfigOptions {
        dtype: Some(config.dtype),
        seed: config.seed,
        ep: None,
    };
    let model = Model::from_config(&auto_config, &options, device)?;
    let Some(folder) = &config.write_safetensors else {
        return Ok((model, None));
    };
    progress("writing");
    model.save_pretrained(folder, &SaveOptions::default())?;
    drop(model);
    Train::memory_cleanup(device);
    progress("loading");
    load(config, folder, device)
}

fn load(config: &BenchmarkConfig, folder: &std::path::Path, device: &Device) -> Result<(Model, Option<Loading>)> {
    let options = FromPretrainedOptions {
        dtype: Some(config.dtype),
        ..FromPretrainedOptions::default()
    };
    let start = Instant::now();
    let loaded = Model::from_pretrained(folder, &options, device)?;
    sync(device)?;
    let loading = Loading::new(loaded.report.bytes, start.elapsed().as_secs_f64());
    Ok((loaded.model, Some(loading)))
}

/// The batch of every step, each row its own labels: one of random tokens, or those of the file.
fn batches(config: &BenchmarkConfig, vocab_size: usize) -> Result<Vec<HostBatch>> {
    let tokens = config.batch * config.seq;
    let ids: Vec<i32> = match &config.tokens {
        None => {
            let mut rng = StdRng::seed_from_u64(config.seed);
            (0..tokens).map(|_| rng.random_range(0..vocab_size as i32)).collect()
        }
        Some(path) => {
            let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", e))?;
            if bytes.is_empty() || !bytes.len().is_multiple_of(4 * tokens) {
                let expected = format!("a multiple of {} (4 * batch * seq), and not 0", 4 * tokens);
                return Err(Error::checkpoint(path, "size in bytes", bytes.len(), expected));
            }
            bytes.as_chunks().0.iter().map(|id| i32::from_le_bytes(*id)).collect()
        }
    };
    let batches: Vec<HostBatch> = ids
        .chunks(tokens)
        .map(|ids| HostBatch {
            batch: config.batch,
            seq: config.seq,
            labels: ids.to_vec(),
            input_ids: ids.to_vec(),
            ..HostBatch::default()
        })
        .collect();
    batches.iter().try_for_each(|batch| batch.validate(vocab_size))?;
    Ok(batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(preset: &str) -> BenchmarkConfig {
        BenchmarkConfig {
            batch: 2,
            seq: 16,
            steps: 3,
            warmup: 1,
            lr: 1e-2,
            dtype: FloatDType::F32,
            ..BenchmarkConfig::new(preset)
        }
    }

    #[test]
    fn a_run_reports_every_number() {
        for preset in ["tiny_qwen3_moe", "tiny_nemotron_h", "tiny_gpt_oss", "tiny_deepseek_v3"] {
            let config = BenchmarkConfig {
                recompute: Recompute::KeepEvery(2),
                ..tiny(preset)
            };
            let report = run(&config, &mut |_| {}).unwrap();
            let whole = report.step.as_ref().unwrap();
            assert_eq!((report.losses.len(), report.tokens_per_step), (4, 32));
            assert!(
                report.losses[3] < report.losses[0],
                "the optimizer does nothing: {:?}",
                report.losses
            );
            // ln 512 = 6.24 is the loss of a uniform guess.
            assert!((5.5..7.5).contains(&report.losses[0]), "{:?}", report.losses);
            assert!(whole.min_ms > 0.0 && whole.min_ms <= whole.median_ms);
            let plain = report.without_optimizer.as_ref().unwrap();
            assert!(
                report
                    .queued_ms
                    .is_some_and(|queued| queued > 0.0 && queued <= plain.median_ms * 1.5)
            );
            assert!((whole.tokens_per_second * whole.median_ms / 1e3 / 32.0 - 1.0).abs() < 1e-9);
            let flops = report.gflop_per_token * 1e9 * whole.tokens_per_second;
            assert!((flops / 1e12 / whole.tflops - 1.0).abs() < 1e-9 && (whole.tflops / 989.5 / whole.mfu - 1.0).abs() < 1e-9);
            let text = serde_json::to_string(&report).unwrap();
            assert!(text.contains(r#""dtype":"float32""#) && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn every_optimizer_trains_in_bf16() {
        use BenchmarkOptimizer::{Adamw, Adamw8bit, AdamwMaster, AdamwStochastic};
        for optimizer in [Adamw, AdamwStochastic, Adamw8bit, AdamwMaster] {
            let config = BenchmarkConfig {
                dtype: FloatDType::BF16,
                optimizer,
                skip_plain: true,
                steps: 5,
                ..tiny("tiny_qwen3_moe")
            };
            let losses = run(&config, &mut |_| {}).unwrap().losses;
            assert!(losses[5] < losses[0] - 0.5, "{optimizer:?}: {losses:?}");
        }
    }

    #[test]
    fn the_optimizer_in_the_backward_takes_the_same_steps() {
        for preset in ["tiny_qwen3_moe", "tiny_nemotron_h"] {
            let losses = |optimizer_in_backward, recompute| {
                let config = BenchmarkConfig {
                    dtype: FloatDType::BF16,
                    optimizer: BenchmarkOptimizer::Adamw8bit,
                    optimizer_in_backward,
                    max_grad_norm: None,
                    recompute,
                    ..tiny(preset)
                };
                run(&config, &mut |_| {}).unwrap().losses
            };
            let two_phase = losses(false, Recompute::None);
            assert!(two_phase[3] < two_phase[0]);
            assert_eq!(losses(true, Recompute::First(2)), two_phase, "{preset}");
        }
    }

    #[test]
    fn weights_are_written_and_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let drawn = run(&tiny("tiny_qwen3_moe"), &mut |_| {}).unwrap();
        let config = BenchmarkConfig {
            write_safetensors: Some(dir.path().into()),
            ..tiny("tiny_qwen3_moe")
        };
        let written = run(&config, &mut |_| {}).unwrap();
        assert_eq!(written.losses, drawn.losses);
        let config = BenchmarkConfig {
            from_safetensors: Some(dir.path().into()),
            optimizer: BenchmarkOptimizer::None,
            ..tiny("mine")
        };
        let loaded = run(&config, &mut |_| {}).unwrap();
        assert_eq!(loaded.loading.unwrap().bytes, 4 * loaded.parameters);
        assert!(loaded.step.is_none() && loaded.losses.is_empty());
    }

    #[test]
    fn steps_take_their_tokens_from_the_file_in_turn() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let ids: Vec<u8> = (0..2 * 32).flat_map(|i: i32| (i * 7 % 512).to_le_bytes()).collect();
        std::fs::write(file.path(), &ids).unwrap();
        let config = BenchmarkConfig {
            tokens: Some(file.path().into()),
            skip_plain: true,
            ..tiny("tiny_qwen3_moe")
        };
        let batches = batches(&config, 512).unwrap();
        assert_eq!(batches.iter().map(|b| b.input_ids[0]).collect::<Vec<_>>(), [0, 32 * 7]);
        let report = run(&config, &mut |_| {}).unwrap();
        assert!(report.without_optimizer.is_none() && report.losses.len() == 4);
        std::fs::write(file.path(), &ids[4..]).unwrap();
        assert!(run(&config, &mut |_| {}).unwrap_err().to_string().contains("128"));
    }

    #[test]
    fn settings_are_refused_by_name() {
        for (config, field) in [
            (
                BenchmarkConfig {
                    batch: 0,
                    ..tiny("tiny_qwen3_moe")
                },
                "--batch",
            ),
            (
                BenchmarkConfig {
                    steps: 0,
                    ..tiny("tiny_qwen3_moe")
                },
                "--steps",
            ),
            (tiny("unknown"), "--preset"),
            (
                BenchmarkConfig {
                    skip_plain: true,
                    optimizer: BenchmarkOptimizer::None,
                    ..tiny("tiny_qwen3_moe")
                },
                "--skip-plain",
            ),
            (
                BenchmarkConfig {
                    from_safetensors: Some("x".into()),
                    layers: Some(1),
                    ..tiny("x")
                },
                "--layers",
            ),
        ] {
            let error = run(&config, &mut |_| {}).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
