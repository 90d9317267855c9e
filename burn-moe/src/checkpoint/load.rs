//! Fill a module from a checkpoint, one parameter at a time.

use std::borrow::Cow;
use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, TensorPrimitive, backend::Backend};
use burn_ep_backend::MoeBackend;
use indicatif::ProgressBar;
use rayon::prelude::*;

use super::binding::{Binding, Piece};
use super::cast::{HostBuffer, cast, first_nonfinite, to_burn};
use super::mapping::WeightMap;
use super::plan::{ParamPlan, PathStack, param_specs, plan};
use super::progress::bytes_bar;
use super::report::LoadReport;
use super::shard::EpRank;
use super::source::CheckpointSource;
use super::transform::{HostTensor, dequantise, forward};
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
/// when the checkpoint has data for it. Peak extra host memory is one parameter plus a few of its experts.
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
    let mut filler = Filler {
        stack: PathStack::default(),
        plans: plan.params,
        source,
        allow_nonfinite: options.allow_nonfinite,
        bar: &bar,
        error: None,
    };
    let module = module.map(&mut filler);
    bar.finish_and_clear();
    match filler.error {
        Some(error) => Err(error),
        None => Ok((module, report)),
    }
}

/// Replaces the parameters that have a plan.
struct Filler<'a> {
    stack: PathStack,
    plans: HashMap<String, ParamPlan>,
    source: &'a CheckpointSource,
    allow_nonfinite: bool,
    bar: &'a ProgressBar,
    /// A mapper cannot fail: the first error is kept and the rest of the module left as it is.
    error: Option<Error>,
}

impl Filler<'_> {
    fn next(&mut self) -> Option<TensorData> {
        let plan = self.plans.remove(&self.stack.path())?;
        if self.error.is_some() {
            return None;
        }
        match read(&plan, self.source, self.allow_nonfinite) {
            Ok(data) => {
                self.bar.inc(data.bytes.len() as u64);
                Some(data)
            }
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }
}

impl<B: MoeBackend> ModuleMapper<B> for Filler<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.stack.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.stack.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(data) = self.next() else {
            return param;
        };
        let (id, device): (ParamId, _) = (param.id, param.lazy_device());
        // Weights stay for the whole run: a device with memory pools keeps them apart from what comes and goes.
        let value = B::resident_from_data(data, &device);
        param.transform_for_load(Tensor::from_primitive(TensorPrimitive::Float(value)), id)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let Some(data) = self.next() else {
            return param;
        };
        let (id, device) = (param.id, param.lazy_device());
        // The device's own integer type, in which the ops of the backend expect ids.
        param.transform_for_load(Tensor::from_data(data, &device), id)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some(data) = self.next() else {
            return param;
        };
        let (id, device) = (param.id, param.lazy_device());
        param.transform_for_load(Tensor::from_data(data, &device), id)
    }
}

/// Assemble one parameter: its items are read, converted and placed in parallel.
fn read(plan: &ParamPlan, source: &CheckpointSource, allow_nonfinite: bool) -> Result<TensorData> {
    let elements: usize = plan.shape.iter().product();
    let mut buffer = HostBuffer::new(plan.dtype, elements);
    let items = plan.share.as_ref().map_or(0..1, |share| share.local.clone());
    let bytes = buffer.bytes_mut();
    if !bytes.is_empty() {
        let item_bytes = bytes.len() / items.len();
        bytes
            .par_chunks_mut(item_bytes)
            .zip(items.into_par_iter())
            .try_for_each(|(out, item)| read_item(plan, &plan.binding, item, source, allow_nonfinite, out))?;
    }
    let dtype = to_burn(plan.dtype).ok_or_else(|| Error::Mismatch(format!("{} has no tensor type", plan.dtype)))?;
    Ok(buffer.into_data(plan.shape.clone(), dtype))
}

fn read_item(
    plan: &ParamPlan,
    binding: &Binding,
    item: usize,
    source: &CheckpointSource,
    allow_nonfinite: bool,
    out: &mut [u8],
) -> Result<()> {
    let pieces = binding.pieces(item);
    let unfit = |why: String| Error::Mismatch(format!("{}: {why}", pieces[0].name));
    let check = |piece: &Piece, tensor: &HostTensor<'_>, expected: &str| match allow_nonfinite {
        true => Ok(()),
        false => finite(piece, source, tensor.dtype, &tensor.data, expected),
    };
    let mut tensors = Vec::with_capacity(pieces.len());
    for piece in &pieces {
        let tensor = read_piece(piece, source)?;
        check(piece, &tensor, "finite weights (or set `allow_nonfinite`)")?;
        tensors.push(tensor);
    }
    let in_range = "a value in the range of the dtype asked for";
    let steps = match binding.format() {
        None => {
            for (piece, tensor) in pieces.iter().zip(&mut tensors) {
                if tensor.dtype != plan.dtype {
                    tensor.data = cast(std::mem::take(&mut tensor.data), tensor.dtype, plan.dtype);
                    tensor.dtype = plan.dtype;
                    check(piece, tensor, in_range)?;
                }
            }
            &binding.steps[..]
        }
        Some(format) => {
            tensors = dequantise(format, &tensors, plan.dtype).map_err(unfit)?;
            for (pair, tensor) in pieces.chunks(2).zip(&tensors) {
                check(&pair[0], tensor, in_range)?;
            }
            &binding.steps[1..]
        }
    };
    let item = forward(steps, tensors).map_err(unfit)?;
    if item.data.len() != out.len() {
        return Err(unfit(format!("{} bytes where {} fit", item.data.len(), out.len())));
    }
    out.copy_from_slice(&item.data);
    Ok(())
}

/// A stored tensor, or one expert of it, from the mapped file.
pub(crate) fn read_piece<'a>(piece: &Piece, source: &'a CheckpointSource) -> Result<HostTensor<'a>> {
    let whole = source.info(&piece.name).zip(source.bytes(&piece.name));
    let found = whole.and_then(|(info, bytes)| match piece.slab {
        None => Some((info.dtype, info.shape, bytes)),
        Some(index) => Some((info.dtype, info.shape.get(1..)?, source.slab(&piece.name, index)?)),
    });
    let (dtype, shape, data) =
        found.ok_or_else(|| Error::checkpoint(source.dir(), format!("tensor `{}`", piece.name), "nothing", "data"))?;
    Ok(HostTensor {
        dtype,
        shape: shape.to_vec(),
        data: Cow::Borrowed(data),
    })
}

fn finite(piece: &Piece, source: &CheckpointSource, dtype: safetensors::Dtype, bytes: &[u8], expected: &str) -> Result<()> {
    let Some((index, value)) = first_nonfinite(dtype, bytes) else {
        return Ok(());
    };
    let file = source.info(&piece.name).map_or(source.dir(), |info| info.file);
    let place = match piece.slab {
        Some(expert) => format!("{value} ({dtype}) at element {index} of expert {expert}"),
        None => format!("{value} ({dtype}) at element {index}"),
    };
    Err(Error::checkpoint(file, format!("tensor `{}`", piece.name), place, expected))
}
