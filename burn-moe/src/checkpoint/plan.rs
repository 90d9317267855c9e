//! Which tensors make up which parameter, decided from names and headers before any weight is read.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor, backend::Backend};
use safetensors::Dtype;

use super::binding::{Binding, Piece, detect};
use super::cast::{can_cast, is_float, to_burn};
use super::load::LoadOptions;
use super::mapping::WeightMap;
use super::quantise::QuantFormat;
use super::report::{LoadReport, LoadedTensor, MismatchedTensor, MissingTensor, UnusedTensor};
use super::shard::ExpertShare;
use super::source::{CheckpointSource, TieState};
use super::transform::forward_shape;
use crate::error::{Error, Result};

/// Every expert is a name to look for: a damaged config must not ask for billions.
const MAX_EXPERTS: usize = 1 << 20;

/// Element kind of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

/// A parameter of a module, known without its values.
#[derive(Debug, Clone)]
pub(crate) struct ParamSpec {
    pub path: String,
    pub shape: Vec<usize>,
    pub kind: Kind,
}

/// How to fill one parameter.
#[derive(Debug, Clone)]
pub(crate) struct ParamPlan {
    pub binding: Binding,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    /// Experts of this rank, when axis 0 counts them.
    pub share: Option<ExpertShare>,
}

/// Plan of a whole module: by module path, without the parameters for which the checkpoint has nothing.
pub(crate) struct Plan {
    pub params: HashMap<String, ParamPlan>,
    pub report: LoadReport,
}

/// Dot-joined module path. Enum variants are not part of it, so that a layer's name does not depend on its kind.
#[derive(Debug, Default)]
pub(crate) struct PathStack(Vec<String>);

impl PathStack {
    pub fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.push(name.to_string());
        }
    }

    pub fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.pop();
        }
    }

    pub fn path(&self) -> String {
        self.0.join(".")
    }
}

#[derive(Default)]
struct SpecVisitor {
    stack: PathStack,
    specs: Vec<ParamSpec>,
}

impl SpecVisitor {
    fn push(&mut self, shape: &[usize], kind: Kind) {
        self.specs.push(ParamSpec {
            path: self.stack.path(),
            shape: shape.to_vec(),
            kind,
        });
    }
}

impl<B: Backend> ModuleVisitor<B> for SpecVisitor {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.stack.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.stack.exit(container_type);
    }

    // `lazy_shape` leaves a parameter that is still to be loaded without memory.
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.push(param.lazy_shape().as_slice(), Kind::Float);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.push(param.lazy_shape().as_slice(), Kind::Int);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.push(param.lazy_shape().as_slice(), Kind::Bool);
    }
}

/// Parameters of a module, in module order, without allocating any.
pub(crate) fn param_specs<B: Backend, M: Module<B>>(module: &M) -> Vec<ParamSpec> {
    let mut visitor = SpecVisitor::default();
    module.visit(&mut visitor);
    visitor.specs
}

/// Where a module path is stored. `layouts` is never empty; `found` is the layout the file has.
pub(crate) struct Place {
    pub layouts: Vec<Binding>,
    pub found: Option<Binding>,
    /// A second stored copy of a tied tensor.
    pub duplicate: Option<Binding>,
}

/// Finds parameters in a file (or, without one, in the family's default layout).
pub(crate) struct Locator<'a> {
    map: &'a WeightMap,
    source: Option<&'a CheckpointSource>,
    base: &'a str,
    /// The tied pair, when the module holds only its first.
    tie: Option<(&'a str, &'a str)>,
}

impl<'a> Locator<'a> {
    pub fn new(map: &'a WeightMap, source: Option<&'a CheckpointSource>, specs: &[ParamSpec]) -> Self {
        let base = match source {
            Some(source) => source.base(map),
            None => map.bases().first().map_or("", String::as_str),
        };
        let has = |path: &str| specs.iter().any(|spec| spec.path == path);
        Self {
            map,
            source,
            base,
            tie: map.tied().filter(|(kept, other)| has(kept) && !has(other)),
        }
    }

    /// Place of `path`; None when no rule fits. `experts` is the number of experts of all ranks.
    pub fn place(&self, path: &str, experts: usize) -> Option<Place> {
        let (_, rule, captures) = self.map.find(path)?;
        let layouts = Binding::all(rule, &captures, self.base, experts);
        let find = |layouts: &[Binding]| self.source.and_then(|source| detect(layouts, source));
        let mut found = find(&layouts);
        let mut duplicate = None;
        if let Some((_, other)) = self.tie.filter(|(kept, _)| *kept == path)
            && let Some((_, rule, captures)) = self.map.find(other)
        {
            let twin = find(&Binding::all(rule, &captures, self.base, experts));
            match found {
                Some(_) => duplicate = twin,
                None => found = twin,
            }
        }
        Some(Place { layouts, found, duplicate })
    }
}

/// Plan the load of `specs`; the report lists what does not fit.
pub(crate) fn plan(specs: &[ParamSpec], source: &CheckpointSource, map: &WeightMap, options: &LoadOptions) -> Result<Plan> {
    map.validate()?;
    let ep = options.ep;
    if ep.size == 0 || ep.rank >= ep.size {
        return Err(Error::config(
            "ep",
            format!("rank {} of {}", ep.rank, ep.size),
            "a rank below the group size",
        ));
    }
    if let Some(dtype) = options.dtype
        && !super::cast::from_burn(dtype).is_some_and(is_float)
    {
        return Err(Error::config("dtype", format!("{dtype:?}"), "F64, F32, F16 or BF16"));
    }
    let locator = Locator::new(map, Some(source), specs);
    let mut report = LoadReport {
        dir: source.dir().to_path_buf(),
        ..LoadReport::default()
    };
    let mut used = HashSet::new();
    let mut params = HashMap::with_capacity(specs.len());
    for spec in specs {
        let experts = map.find(&spec.path).is_some_and(|(_, rule, _)| rule.is_experts());
        let share = experts.then(|| ep.share(spec.shape.first().copied().unwrap_or(0)));
        if let Some(share) = share.as_ref().filter(|share| share.total > MAX_EXPERTS) {
            let found = format!("{} experts in `{}`", share.total, spec.path);
            return Err(Error::config("number of experts", found, format!("at most {MAX_EXPERTS}")));
        }
        let Some(place) = locator.place(&spec.path, share.as_ref().map_or(0, |s| s.total)) else {
            return Err(Error::config(
                "weight map",
                format!("no rule for `{}`", spec.path),
                "a rule for every parameter",
            ));
        };
        let Some(binding) = place.found else {
            report.missing.push(MissingTensor {
                path: spec.path.clone(),
                names: place.layouts.first().map(Binding::names).unwrap_or_default(),
                suggestion: None,
            });
            continue;
        };
        used.extend(binding.names());
        if let Some(twin) = place.duplicate {
            tie_note(source, &spec.path, &binding, &twin, &mut report);
            used.extend(twin.names());
        }
        if let Some(plan) = plan_param(spec, binding, share, source, map, options, &mut report) {
            params.insert(spec.path.clone(), plan);
        }
    }
    for name in source.names().iter().filter(|name| !used.contains(*name)) {
        if map.is_carried(name) {
            report.carried.push(name.clone());
        } else {
            report.unused.push(UnusedTensor {
                name: name.clone(),
                suggestion: None,
            });
        }
    }
    report.suggest();
    Ok(Plan { params, report })
}

fn tie_note(source: &CheckpointSource, path: &str, kept: &Binding, twin: &Binding, report: &mut LoadReport) {
    for (a, b) in kept.names().iter().zip(twin.names()) {
        if source.same_tensor(a, &b) {
            report.notes.push(format!("{b} is the same tensor as {a}: tied"));
        } else {
            report.mismatched.push(MismatchedTensor {
                path: path.to_string(),
                found: format!("other values than {a}"),
                name: b,
                expected: format!(
                    "equal values, because the model ties them; build it untied ({:?})",
                    TieState::Different
                ),
            });
        }
    }
}

/// Checks one parameter against the headers. Problems go into the report.
fn plan_param(
    spec: &ParamSpec,
    binding: Binding,
    share: Option<ExpertShare>,
    source: &CheckpointSource,
    map: &WeightMap,
    options: &LoadOptions,
    report: &mut LoadReport,
) -> Option<ParamPlan> {
    let absent: Vec<String> = binding.names().into_iter().filter(|name| !source.contains(name)).collect();
    if !absent.is_empty() {
        report.missing.push(MissingTensor {
            path: spec.path.clone(),
            names: absent,
            suggestion: None,
        });
        return None;
    }
    let wanted = wanted_dtype(spec, map, options);
    match check_stored(spec, &binding, share.as_ref(), source, wanted) {
        Err((name, found, expected)) => {
            report.mismatched.push(MismatchedTensor {
                path: spec.path.clone(),
                name,
                found,
                expected,
            });
            None
        }
        Ok(stored) => {
            let format = binding.format();
            let dtype = wanted.or(format.map(QuantFormat::plain_type)).unwrap_or(stored);
            let local: u64 = spec.shape.iter().map(|&n| n as u64).product();
            report.bytes += local * (dtype.bitsize() as u64 / 8);
            report.loaded.push(LoadedTensor {
                path: spec.path.clone(),
                shape: spec.shape.clone(),
                dtype,
                stored,
                format,
                names: binding.templates(),
                sources: binding.names().len(),
                elements: local * share.as_ref().map_or(1, |_| options.ep.size as u64),
                experts: share.is_some(),
            });
            Some(ParamPlan {
                binding,
                shape: spec.shape.clone(),
                dtype,
                share,
            })
        }
    }
}

/// The element type in memory; None: as stored.
fn wanted_dtype(spec: &ParamSpec, map: &WeightMap, options: &LoadOptions) -> Option<Dtype> {
    match spec.kind {
        Kind::Float if map.is_kept_fp32(&spec.path) => Some(Dtype::F32),
        Kind::Float => options.dtype.and_then(super::cast::from_burn),
        Kind::Int | Kind::Bool => None,
    }
}

/// Checks the types of quantised weights and their scales.
fn check_pairs(spec: &ParamSpec, format: QuantFormat, pieces: &[Piece], source: &CheckpointSource) -> Result<(), Unfit> {
    let dtype = |piece: &Piece| source.info(&piece.name).map(|info| info.dtype);
    for pair in pieces.chunks(2) {
        let [weights, scales] = pair else { continue };
        if spec.kind != Kind::Float {
            return Err((
                weights.name.clone(),
                format.to_string(),
                format!("a dtype for {:?} parameters", spec.kind),
            ));
        }
        // A name that is not there has been reported as missing.
        if let (Some(first), Some(second)) = (dtype(weights), dtype(scales))
            && let Err((part, expected)) = format.check_types(first, second)
        {
            return Err((pair[part].name.clone(), format!("dtype {}", [first, second][part]), expected));
        }
    }
    Ok(())
}

/// Name, what is stored, and what is needed.
type Unfit = (String, String, String);

/// Checks dtypes and shapes of every stored piece; gives the stored dtype.
fn check_stored(
    spec: &ParamSpec,
    binding: &Binding,
    share: Option<&ExpertShare>,
    source: &CheckpointSource,
    wanted: Option<Dtype>,
) -> Result<Dtype, Unfit> {
    let (item_shape, mut first) = (&spec.shape[usize::from(share.is_some())..], None);
    for item in 0..binding.items() {
        let mut shapes = Vec::with_capacity(binding.arity());
        let mut name = String::new();
        let pieces = binding.pieces(item);
        if let Some(format) = binding.format() {
            check_pairs(spec, format, &pieces, source)?;
        }
        for piece in pieces {
            let info = source
                .info(&piece.name)
                .ok_or_else(|| (piece.name.clone(), "nothing".into(), "a tensor".into()))?;
            let dtype = info.dtype;
            let loadable = match spec.kind {
                Kind::Float if binding.format().is_some() => true,
                Kind::Float => is_float(dtype),
                Kind::Int => can_cast(dtype, Dtype::I64),
                Kind::Bool => dtype == Dtype::BOOL,
            };
            if !loadable || (to_burn(dtype).is_none() && binding.format().is_none()) {
                return Err((
                    piece.name,
                    format!("dtype {dtype}"),
                    format!("a dtype for {:?} parameters", spec.kind),
                ));
            }
            let stored = *first.get_or_insert(dtype);
            if stored != dtype && wanted.is_none() && binding.format().is_none() {
                let expected = format!("dtype {stored} like the other parts of {}, or a dtype to load as", spec.path);
                return Err((piece.name, format!("dtype {dtype}"), expected));
            }
            shapes.push(match (piece.slab, share, info.shape.split_first()) {
                (None, ..) => info.shape.to_vec(),
                (Some(_), Some(share), Some((&count, rest))) if count == share.total => rest.to_vec(),
                _ => {
                    let total = share.map_or(0, |s| s.total);
                    return Err((piece.name, format!("shape {:?}", info.shape), format!("{total} experts on axis 0")));
                }
            });
            name = piece.name;
        }
        let parts = match shapes.len() {
            1 => format!("shape {:?}", shapes[0]),
            n => format!("{n} tensors of shapes {shapes:?}"),
        };
        match forward_shape(&binding.steps, shapes) {
            Ok(shape) if shape == item_shape => {}
            Ok(shape) => {
                let found = if binding.steps.is_empty() {
                    parts
                } else {
                    format!("{parts}, together {shape:?}")
                };
                return Err((name, found, format!("shape {item_shape:?}")));
            }
            Err(why) => return Err((name, why, format!("parts of shape {item_shape:?}"))),
        }
    }
    first.ok_or_else(|| (spec.path.clone(), "no expert".into(), "at least one expert on axis 0".into()))
}
