//! The run itself: one thread or process per rank, each with its share of the experts.

use std::path::Path;

use burn::module::AutodiffModule;
use burn_ep_backend::comm::{Agreement, CommHandle, EpGroup, Launch, LocalCommunicator, rendezvous};
use burn_moe::backend::{Device, Train, communicator, device_capacity, local_device};
use burn_moe::checkpoint::{CheckpointSource, SaveOptions};
use burn_moe::data::{Loader, LoaderOptions};
use burn_moe::generate::{GenerateOptions, generate};
use burn_moe::train::{Interrupt, RunEnd, Trainer};
use burn_moe::{Error, Result};

use super::{Event, Finetune, output};
use crate::{AutoConfig, AutoModelForCausalLm, FromPretrainedOptions};

type Model = AutoModelForCausalLm<Train>;

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinetuneReport {
    /// Why it ended.
    pub end: RunEnd,
    /// Optimizer steps done, earlier runs included.
    pub step: u64,
    /// Loss of every step of this run.
    pub losses: Vec<f64>,
}

impl FinetuneReport {
    /// Mean loss of the first and of the last tenth of the steps; None without a step.
    pub fn first_and_last_loss(&self) -> Option<(f64, f64)> {
        let window = self.losses.len().div_ceil(10);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        (window > 0).then(|| (mean(&self.losses[..window]), mean(&self.losses[self.losses.len() - window..])))
    }
}

impl Finetune {
    /// Loads the model, trains until all steps are done or `interrupt` asks to stop, and saves either way. `on_event` hears
    /// what happens, on the thread or in the process of rank 0.
    pub fn run(&self, interrupt: &Interrupt, mut on_event: impl FnMut(Event<'_>) + Send) -> Result<FinetuneReport> {
        let report = match (&self.launch, self.config.ep) {
            (Some(launch), _) => return self.process(launch, interrupt, &mut on_event),
            (None, 1) => self.rank(None, &Device::default(), interrupt, &mut on_event),
            (None, ranks) => self.ranks(ranks, interrupt, &mut on_event),
        }?;
        self.publish(&report)?;
        Ok(report)
    }

    fn publish(&self, report: &FinetuneReport) -> Result<()> {
        output::publish(&output::plan(&self.config).checkpoint(report.step), &self.config.output)
    }

    /// This process as one rank of a job.
    fn process(&self, launch: &Launch, interrupt: &Interrupt, on_event: &mut (dyn FnMut(Event<'_>) + Send)) -> Result<FinetuneReport> {
        let device = local_device(launch.local_rank)?;
        let host = rendezvous(launch, &self.agreement(), self.config.rendezvous)?;
        let group = EpGroup::mesh(communicator(host, &device, self.config.transport)?, self.config.ep)?;
        let guard = AbortOnPanic(group.clone());
        let silent = &mut |_: Event<'_>| {};
        let on_event: &mut (dyn FnMut(Event<'_>) + Send) = if launch.rank == 0 { on_event } else { silent };
        let result = self.rank(Some(group.clone()), &device, interrupt, on_event).and_then(|report| {
            if launch.rank == 0 {
                self.publish(&report)?;
            }
            // Nobody leaves before the output is complete: a launcher may end the job with its first process.
            group.world().get().barrier()?;
            Ok(report)
        });
        result.inspect_err(|error| guard.0.world().get().abort(&error.to_string()))
    }

    /// What must be equal on all processes: everything that decides which operations they call and on what.
    fn agreement(&self) -> Agreement {
        let config = &self.config;
        let setting = |name: &str, value: String| (name.to_string(), value);
        vec![
            setting("backend", burn_moe::backend::NAME.into()),
            setting("model", config.model.display().to_string()),
            setting("output", config.output.display().to_string()),
            setting("resumed checkpoint", format!("{:?}", self.resumed)),
            setting("data", self.data.report().to_string()),
            setting("transport", format!("{:?}", config.transport)),
            setting("ep", config.ep.to_string()),
            setting("batch", config.batch.to_string()),
            setting("seq", config.seq.to_string()),
            setting("layout", format!("{:?}", config.layout)),
            setting("too_long", format!("{:?}", config.too_long)),
            setting("seed", config.seed.to_string()),
            setting("save_every", format!("{:?}", config.save_every)),
            setting("overwrite", config.overwrite.to_string()),
            setting("question", format!("{:?}", config.question)),
            setting("max_new_tokens", config.max_new_tokens.to_string()),
            setting("trainer", format!("{:?}", config.trainer)),
        ]
    }

    fn ranks(&self, ranks: usize, interrupt: &Interrupt, on_event: &mut (dyn FnMut(Event<'_>) + Send)) -> Result<FinetuneReport> {
        let groups: Vec<EpGroup> = LocalCommunicator::group(ranks)
            .into_iter()
            .map(|c| EpGroup::new(CommHandle::new(c)))
            .collect();
        let results: Vec<Result<FinetuneReport>> = std::thread::scope(|scope| {
            let mut on_event = Some(on_event);
            let threads: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    let on_event = on_event.take();
                    scope.spawn(move || {
                        let guard = AbortOnPanic(group.clone());
                        match on_event {
                            Some(on_event) => self.rank(Some(group), &Device::default(), interrupt, on_event),
                            None => self.rank(Some(group), &Device::default(), interrupt, &mut |_| {}),
                        }
                        .inspect_err(|error| guard.0.world().get().abort(&error.to_string()))
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        // Ranks that were only told about a failure report the exchange; the cause is more useful.
        let is_cause = |error: &Error| !matches!(error, Error::Op(burn_ep_backend::OpError::Comm { .. }));
        let mut errors: Vec<Error> = Vec::new();
        let mut first = None;
        for result in results {
            match result {
                Ok(report) => first = first.or(Some(report)),
                Err(error) => errors.push(error),
            }
        }
        let cause = errors.iter().position(is_cause).unwrap_or(0);
        match (errors.is_empty(), first) {
            (true, Some(report)) => Ok(report),
            _ => Err(errors.swap_remove(cause)),
        }
    }

    /// The work of one rank.
    fn rank(
        &self,
        ep: Option<EpGroup>,
        device: &Device,
        interrupt: &Interrupt,
        on_event: &mut (dyn FnMut(Event<'_>) + Send),
    ) -> Result<FinetuneReport> {
        let config = &self.config;
        let options = FromPretrainedOptions {
            ep: ep.clone(),
            progress: ep.as_ref().is_none_or(|ep| ep.world_rank() == 0),
            ..FromPretrainedOptions::default()
        };
        let weights = self.resumed.as_ref().unwrap_or(&config.model);
        let plan = self.memory_plan(&AutoConfig::from_file(weights.join("config.json"))?)?;
        on_event(Event::Memory(&plan));
        if let Some(available) = device_capacity(device) {
            plan.check(available)?;
        }
        let model = Model::from_pretrained(weights, &options, device)?.model;
        let parameters = model.config().parameters();
        let (rank, world) = ep.as_ref().map_or((0, 1), |ep| (ep.world_rank(), ep.world_size()));
        let mut loader = Loader::new(
            self.data.clone(),
            LoaderOptions {
                layout: config.layout,
                seed: config.seed,
                pad_id: self.tokenizer.pad_id(),
                rank,
                world,
                ..LoaderOptions::new(config.batch / world, config.seq)
            },
        )?;
        #[allow(clippy::clone_on_copy, reason = "a CUDA device is not Copy")]
        let mut trainer = Trainer::<Train, Model>::new(model, config.trainer.clone(), device.clone(), ep.clone())?;
        if let Some(checkpoint) = &self.resumed {
            trainer.resume(checkpoint, &mut loader)?;
        }
        on_event(Event::Loaded {
            parameters: parameters.total(),
            active: parameters.active(),
            step: trainer.step(),
        });
        if self.resumed.is_none() {
            self.answer(trainer.model(), ep.as_ref(), device, false, on_event)?;
        }

        // Names, layout, tokenizer and unread tensors are those of the original model, also after resuming: the checkpoint
        // that was resumed may be pruned before the run ends.
        let original = CheckpointSource::open(&config.model)?;
        let save = |model: &Model, dir: &Path| {
            let options = SaveOptions {
                like: Some(&original),
                ep: ep.as_ref(),
                ..SaveOptions::default()
            };
            model.save_pretrained(dir, &options).map(drop)
        };
        // Not earlier: a model that cannot be loaded must not cost the checkpoints of the run before.
        if rank == 0 && self.resumed.is_none() && config.overwrite {
            output::remove_checkpoints(&config.output)?;
        }
        let mut losses = Vec::new();
        let end = trainer.run(&mut loader, interrupt, Some((&output::plan(config), &save)), &mut |report| {
            losses.push(report.loss);
            on_event(Event::Step(report));
        })?;
        if end == RunEnd::Finished {
            self.answer(trainer.model(), ep.as_ref(), device, true, on_event)?;
        }
        Ok(FinetuneReport {
            end,
            step: trainer.step(),
            losses,
        })
    }

    /// Answers the question. Every rank takes part, since each has only its own experts.
    fn answer(
        &self,
        model: &Model,
        ep: Option<&EpGroup>,
        device: &Device,
        trained: bool,
        on_event: &mut (dyn FnMut(Event<'_>) + Send),
    ) -> Result<()> {
        let (Some(question), Some(prompt)) = (&self.config.question, &self.prompt) else {
            return Ok(());
        };
        let options = GenerateOptions {
            max_new_tokens: self.config.max_new_tokens.min(self.max_positions.saturating_sub(prompt.len())),
            stop_tokens: self.tokenizer.eos_ids().to_vec(),
            ep: ep.cloned(),
            ..GenerateOptions::default()
        };
        let tokens = generate(&model.valid(), prompt, &options, device)?;
        let answer = self.tokenizer.decode(&tokens, true)?;
        on_event(Event::Answer {
            trained,
            question,
            answer: &answer,
        });
        Ok(())
    }
}

/// Ends the other ranks' waiting when this rank panics.
struct AbortOnPanic(EpGroup);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.world().get().abort("a rank panicked");
        }
    }
}
