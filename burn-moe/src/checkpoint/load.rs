//! Fill a module from a checkpoint, one parameter at a time.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, TensorPrimitive, backend::Backend};
use burn_ep_backend::{MoeBackend, host_data};
use indicatif::ProgressBar;

use super::cast::to_burn;
use super::mapping::WeightMap;
use super::plan::{ParamPlan, PathStack, param_specs, plan};
use super::progress::bytes_bar;
use super::read::Reader;
use super::report::LoadReport;
use super::shard::EpRank;
use super::source::CheckpointSource;
use crate::error::{Error, Result};

/// How to load.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// Element type of floating-point parameters; None keeps what is stored. `WeightMap::keep_fp32` wins over it.
    pub dtype: Option<DType>,
    /// Refuse missing and unused tensors (true by default). Otherwise they are listed in the report, and parameters without
    /// data keep their initialisation. Shapes and types that do not fit are refused in either case.
    pub strict: bool,
    /// Accept NaN and infinite weights.
    pub allow_nonfinite: bool,
    /// This rank of the expert-parallel group; the module must have been built with its share of the experts.
    pub ep: EpRank,
    /// Show a progress bar when stderr is a terminal.
    pub progress: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            strict: true,
            allow_nonfinite: false,
            ep: EpRank::default(),
            progress: false,
        }
    }
}

/// What [`load`] would do, from names and headers alone: no weights are read and no parameter is allocated.
///
/// Errors: [`Error::Config`] for a malformed table or rank. Names and shapes that do not fit are listed in the report.
pub fn inspect<B: Backend, M: Module<B>>(
    module: &M,
    source: &CheckpointSource,
    map: &WeightMap,
    options: &LoadOptions,
) -> Result<LoadReport> {
    Ok(plan(&param_specs(module), source, map, options)?.report)
}

/// Fill the parameters of `module`. Names and shapes are checked before anything is read.
///
/// Parameters keep their id, device and whether they require gradients. A lazily initialised parameter is never initialised
/// when the checkpoint has data for it. Several threads read, convert and stack; on a device with memory of its own they do so
/// in a few small buffers, so that host memory stays flat. Where a layout needs it (interleaved rows), every thread holds one
/// expert besides.
///
/// Errors: [`Error::Mismatch`] with the whole report when names, shapes or types do not fit; [`Error::Checkpoint`] naming file
/// and tensor for NaN or infinite weights; [`Error::Config`] for a malformed table or rank.
pub fn load<B: MoeBackend, M: Module<B>>(
    module: M,
    source: &CheckpointSource,
    map: &WeightMap,
    options: &LoadOptions,
) -> Result<(M, LoadReport)> {
    let plan = plan(&param_specs(&module), source, map, options)?;
    let report = plan.report;
    if !report.mismatched.is_empty() || (options.strict && !report.is_exact()) {
        let hint = match report.mismatched.is_empty() {
            true => "names must fit, or set `strict` to false to load what fits",
            false => "shapes and types must fit",
        };
        return Err(Error::Mismatch(format!("the checkpoint does not fit the model ({hint})\n{report}")));
    }
    let bar = bytes_bar(options.progress, "loading", report.bytes);
    let mut filler = Filler::<B> {
        stack: PathStack::default(),
        plans: plan.params,
        source,
        allow_nonfinite: options.allow_nonfinite,
        bar: &bar,
        device: None,
        error: None,
    };
    let module = module.map(&mut filler);
    bar.finish_and_clear();
    if let Some(device) = &filler.device {
        B::release_staging(device);
    }
    match filler.error {
        Some(error) => Err(error),
        None => Ok((module, report)),
    }
}

/// Replaces the parameters that have a plan.
struct Filler<'a, B: MoeBackend> {
    stack: PathStack,
    plans: HashMap<String, ParamPlan>,
    source: &'a CheckpointSource,
    allow_nonfinite: bool,
    bar: &'a ProgressBar,
    /// Of the parameters.
    device: Option<B::Device>,
    /// A mapper cannot fail: the first error is kept and the rest of the module left as it is.
    error: Option<Error>,
}

impl<B: MoeBackend> Filler<'_, B> {
    /// What `place` makes of the current parameter's shape, dtype and bytes; None without a plan or after an error.
    fn next<T>(&mut self, place: impl FnOnce(&[usize], DType, &Reader<'_>) -> Result<T>) -> Option<T> {
        let plan = self.plans.remove(&self.stack.path())?;
        if self.error.is_some() {
            return None;
        }
        let reader = Reader::new(&plan, self.source, self.allow_nonfinite);
        let placed = match to_burn(plan.dtype) {
            Some(dtype) => place(&plan.shape, dtype, &reader),
            None => Err(Error::Mismatch(format!("{} has no tensor type", plan.dtype))),
        };
        match placed {
            Ok(value) => {
                let elements: usize = plan.shape.iter().product();
                self.bar.inc((elements * plan.dtype.bitsize() / 8) as u64);
                Some(value)
            }
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }

    /// The current parameter on the host.
    fn next_data(&mut self) -> Option<TensorData> {
        self.next(|shape, dtype, reader| host_data(shape, dtype, reader.unit(), &|offset, out: &mut [u8]| reader.fill(offset, out)))
    }
}

impl<B: MoeBackend> ModuleMapper<B> for Filler<'_, B> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.stack.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.stack.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, device): (ParamId, _) = (param.id, param.lazy_device());
        // Weights stay for the whole run: a device with memory pools keeps them apart from what comes and goes.
        let value = self.next(|shape, dtype, reader| {
            B::resident_from_chunks(
                shape,
                dtype,
                reader.unit(),
                &|offset, out: &mut [u8]| reader.fill(offset, out),
                &device,
            )
        });
        let Some(value) = value else {
            return param;
        };
        self.device = Some(device);
        param.transform_for_load(Tensor::from_primitive(TensorPrimitive::Float(value)), id)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let Some(data) = self.next_data() else {
            return param;
        };
        let (id, device) = (param.id, param.lazy_device());
        // The device's own integer type, in which the ops of the backend expect ids.
        param.transform_for_load(Tensor::from_data(data, &device), id)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some(data) = self.next_data() else {
            return param;
        };
        let (id, device) = (param.id, param.lazy_device());
        param.transform_for_load(Tensor::from_data(data, &device), id)
    }
}
