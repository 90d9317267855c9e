//! What a save writes: which tensor goes into which file, and where each parameter's pieces lie.

use std::collections::{HashMap, HashSet};

use safetensors::Dtype;

use super::binding::Binding;
use super::cast::can_cast;
use super::header::byte_size;
use super::mapping::WeightMap;
use super::pattern::natural_order;
use super::plan::{Locator, ParamSpec, Place};
use super::quantise::QuantFormat;
use super::shard::{EpRank, ExpertShare};
use super::source::CheckpointSource;
use super::transform::backward_shapes;
use crate::error::{Error, Result};

/// A tensor of the output, and its place once files are assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: u64,
    /// Position in the list of files.
    pub file: usize,
    /// First byte in that file.
    pub offset: u64,
}

/// How one parameter is written.
pub(crate) struct ParamOut {
    /// Experts of this rank, when axis 0 counts them.
    pub share: Option<ExpertShare>,
    /// Where it goes; a tied tensor that was stored twice is written twice.
    pub copies: Vec<Binding>,
}

/// One output file: its header and the tensors in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutFile {
    pub header: Vec<u8>,
    pub tensors: Vec<usize>,
    pub bytes: u64,
}

/// Everything a save writes.
pub(crate) struct OutPlan {
    pub params: HashMap<String, ParamOut>,
    pub tensors: Vec<OutTensor>,
    pub by_name: HashMap<String, usize>,
    /// Names copied from the source unchanged.
    pub carried: Vec<String>,
    /// Names of weights and scales in the source, which becomes one plain tensor under the first name.
    pub decoded: Vec<([String; 2], QuantFormat)>,
    /// Whether any parameter is written in a quantised format.
    pub quantised: bool,
    pub files: Vec<OutFile>,
    pub num_params: u64,
}

impl OutPlan {
    /// The output tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&OutTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// Element types of the parameters in memory, by module path.
pub(crate) type ParamTypes = HashMap<String, Dtype>;

/// Plan a save. Tensors keep the names and types they have in `like`; new ones get the family's default layout and the
/// type of the parameter. Quantised layouts are written only if `quantised` is set, then for every parameter that has one.
pub(crate) fn plan_output(
    specs: &[ParamSpec],
    types: &ParamTypes,
    map: &WeightMap,
    like: Option<&CheckpointSource>,
    quantised: bool,
    ep: EpRank,
    max_file_bytes: u64,
) -> Result<OutPlan> {
    map.validate()?;
    let locator = Locator::new(map, like, specs);
    let mut order: Vec<&ParamSpec> = specs.iter().collect();
    order.sort_by(|a, b| natural_order(&a.path, &b.path));
    let mut out = OutPlan {
        params: HashMap::with_capacity(specs.len()),
        tensors: Vec::new(),
        by_name: HashMap::new(),
        carried: Vec::new(),
        decoded: Vec::new(),
        quantised: false,
        files: Vec::new(),
        num_params: 0,
    };
    // Tensors of `like` whose parameter is written in another layout.
    let mut replaced = HashSet::new();
    for spec in order {
        let experts = map.find(&spec.path).is_some_and(|(_, rule, _)| rule.is_experts());
        let share = experts.then(|| ep.share(spec.shape.first().copied().unwrap_or(0)));
        let no_rule = || Error::config("weight map", format!("no rule for `{}`", spec.path), "a rule for every parameter");
        let place = locator
            .place(&spec.path, share.as_ref().map_or(0, |s| s.total))
            .ok_or_else(no_rule)?;
        let written = written(&place, quantised).ok_or_else(no_rule)?;
        replaced.extend(place.found.iter().filter(|_| written.moved).flat_map(Binding::names));
        out.quantised |= written.binding.format().is_some();
        let ranks = share.as_ref().map_or(1, |_| ep.size as u64);
        out.num_params += ranks * spec.shape.iter().map(|&n| n as u64).product::<u64>();
        let Some(&dtype) = types.get(&spec.path) else {
            return Err(Error::config("module", format!("no values for `{}`", spec.path), "a parameter"));
        };
        let copies: Vec<Binding> = std::iter::once(written.binding).chain(place.duplicate).collect();
        for copy in &copies {
            add_tensors(&mut out, spec, copy, share.as_ref(), written.dtype.unwrap_or(dtype), like)?;
        }
        out.params.insert(spec.path.clone(), ParamOut { share, copies });
    }
    if let Some(source) = like {
        carry(&mut out, source, map, quantised, &replaced)?;
    }
    assign_files(&mut out, max_file_bytes);
    Ok(out)
}

/// Tensors of the source that no parameter accounts for.
fn carry(out: &mut OutPlan, source: &CheckpointSource, map: &WeightMap, quantised: bool, replaced: &HashSet<String>) -> Result<()> {
    let left: Vec<&String> = source
        .names()
        .iter()
        .filter(|name| !out.by_name.contains_key(*name) && !replaced.contains(*name))
        .collect();
    for name in left {
        let Some(info) = source.info(name) else { continue };
        // A plain file says nothing about quantisation, so nothing in it may be quantised.
        let pair = map.carried_pair(name).filter(|_| !quantised);
        let stored = pair.and_then(|(names, format)| Some((source.info(&names[0])?, source.info(&names[1])?, names, format)));
        match stored {
            Some((_, _, names, _)) if names[1] == *name => {}
            Some((weights, scales, names, format)) => {
                let unfit = |what: String| Error::Mismatch(format!("{name}: cannot be written without quantisation: {what}"));
                format
                    .check_types(weights.dtype, scales.dtype)
                    .map_err(|(part, expected)| unfit(format!("{} should have {expected}", names[part])))?;
                let shape = format.shape(weights.shape, scales.shape).map_err(unfit)?;
                push(out, name.clone(), format.plain_type(), shape)?;
                out.decoded.push((names, format));
            }
            None => {
                push(out, name.clone(), info.dtype, info.shape.to_vec())?;
                out.carried.push(name.clone());
            }
        }
    }
    Ok(())
}

/// The layout that a parameter is written in.
struct Written {
    binding: Binding,
    /// It is not the layout of the file the parameter came from, whose tensors are then left out.
    moved: bool,
    /// Element type of values that were quantised in that file.
    dtype: Option<Dtype>,
}

/// Quantised or plain as asked for, where the table has both: the layout of the file if it is of that kind, else the first.
fn written(place: &Place, quantised: bool) -> Option<Written> {
    let of_kind = |b: &&Binding| b.format().is_some() == quantised;
    let found = place.found.as_ref();
    let layouts = || place.layouts.iter();
    let binding = found.filter(of_kind).or_else(|| layouts().find(of_kind));
    let binding = binding.or(found).or_else(|| layouts().next())?;
    let left = found.filter(|found| found.format() != binding.format());
    Some(Written {
        binding: binding.clone(),
        moved: left.is_some(),
        dtype: left.and_then(Binding::format).map(QuantFormat::plain_type),
    })
}

/// The tensors that a parameter is stored as.
fn add_tensors(
    out: &mut OutPlan,
    spec: &ParamSpec,
    binding: &Binding,
    share: Option<&ExpertShare>,
    dtype: Dtype,
    like: Option<&CheckpointSource>,
) -> Result<()> {
    let item = spec.shape[usize::from(share.is_some())..].to_vec();
    let shapes = backward_shapes(&binding.steps, item, binding.arity())
        .map_err(|why| Error::Mismatch(format!("{}: cannot be written: {why}", spec.path)))?;
    // All experts of one source before the next source, as the reference orders them.
    for (part, shape) in shapes.into_iter().enumerate() {
        for e in 0..binding.items() {
            let piece = &binding.pieces(e)[part];
            let shape = match piece.slab {
                Some(0) => std::iter::once(binding.items()).chain(shape.iter().copied()).collect(),
                Some(_) => break,
                None => shape.clone(),
            };
            let stored = like.and_then(|source| source.info(&piece.name)).map(|info| info.dtype);
            let dtype = match binding.format() {
                Some(format) => format.stored_types()[part % 2],
                None => stored.filter(|&stored| can_cast(dtype, stored)).unwrap_or(dtype),
            };
            push(out, piece.name.clone(), dtype, shape)?;
        }
    }
    Ok(())
}

fn push(out: &mut OutPlan, name: String, dtype: Dtype, shape: Vec<usize>) -> Result<()> {
    let sizes: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
    let bytes = byte_size(dtype, &sizes).ok_or_else(|| Error::Mismatch(format!("{name}: {shape:?} of {dtype} is too large")))?;
    if out.by_name.insert(name.clone(), out.tensors.len()).is_some() {
        return Err(Error::config(
            "weight map",
            format!("two parameters stored as `{name}`"),
            "one name per tensor",
        ));
    }
    out.tensors.push(OutTensor {
        name,
        dtype,
        shape,
        bytes,
        file: 0,
        offset: 0,
    });
    Ok(())
}

/// Fills files in order up to `max_bytes`; a larger tensor gets a file of its own.
fn assign_files(out: &mut OutPlan, max_bytes: u64) {
    let mut groups: Vec<(Vec<usize>, u64)> = vec![(Vec::new(), 0)];
    for (i, tensor) in out.tensors.iter().enumerate() {
        let full = groups
            .last()
            .is_some_and(|(members, bytes)| !members.is_empty() && bytes + tensor.bytes > max_bytes);
        if full {
            groups.push((Vec::new(), 0));
        }
        if let Some((members, bytes)) = groups.last_mut() {
            members.push(i);
            *bytes += tensor.bytes;
        }
    }
    for (file, (mut members, bytes)) in groups.into_iter().enumerate() {
        // Wide elements first keeps every tensor aligned; readers of the format rely on no order.
        members.sort_by(|&a, &b| {
            let (a, b) = (&out.tensors[a], &out.tensors[b]);
            b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name))
        });
        let header = header(members.iter().map(|&i| &out.tensors[i]));
        let mut offset = header.len() as u64;
        for &i in &members {
            out.tensors[i].file = file;
            out.tensors[i].offset = offset;
            offset += out.tensors[i].bytes;
        }
        out.files.push(OutFile {
            bytes: header.len() as u64 + bytes,
            header,
            tensors: members,
        });
    }
}

/// Length, JSON and padding that precede the data.
fn header<'a>(tensors: impl Iterator<Item = &'a OutTensor>) -> Vec<u8> {
    let mut json = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes;
        let name = serde_json::Value::from(tensor.name.as_str());
        let shape = serde_json::Value::from(tensor.shape.clone());
        json.push_str(&format!(
            ",{name}:{{\"dtype\":\"{}\",\"shape\":{shape},\"data_offsets\":[{begin},{end}]}}",
            tensor.dtype
        ));
        begin = end;
    }
    json.push('}');
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::plan::Kind;
    use crate::checkpoint::{Rule, Step, header};

    fn specs() -> Vec<ParamSpec> {
        let spec = |path: &str, shape: &[usize]| ParamSpec {
            path: path.into(),
            shape: shape.to_vec(),
            kind: Kind::Float,
        };
        vec![
            spec("layers.10.experts.gate_up", &[2, 4, 3]),
            spec("layers.2.experts.gate_up", &[2, 4, 3]),
            spec("norm", &[3]),
        ]
    }

    fn map() -> WeightMap {
        let sources = [
            "{base}layers.{layer}.experts.{expert}.gate",
            "{base}layers.{layer}.experts.{expert}.up",
        ];
        WeightMap::new(["model."])
            .rule(Rule::experts("layers.{layer}.experts.gate_up").stored_as(sources, [Step::Concat { axis: 1 }]))
            .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
    }

    fn plan(ep: EpRank, max: u64) -> OutPlan {
        let types = specs().into_iter().map(|s| (s.path, Dtype::BF16)).collect();
        plan_output(&specs(), &types, &map(), None, false, ep, max).unwrap()
    }

    #[test]
    fn names_follow_natural_order_projection_by_projection() {
        let out = plan(EpRank::default(), u64::MAX);
        let names: Vec<&str> = out.tensors.iter().map(|t| t.name.as_str()).take(5).collect();
        let expected = [
            "2.experts.0.gate",
            "2.experts.1.gate",
            "2.experts.0.up",
            "2.experts.1.up",
            "10.experts.0.gate",
        ];
        assert_eq!(names, expected.map(|n| format!("model.layers.{n}")));
        assert_eq!(out.tensors[0].shape, [2, 3]);
        assert_eq!(out.num_params, 2 * 24 + 3);
    }

    #[test]
    fn every_rank_plans_the_same_files() {
        let ranks: Vec<OutPlan> = (0..2).map(|rank| plan(EpRank { rank, size: 2 }, 64)).collect();
        assert_eq!(ranks[0].files, ranks[1].files);
        assert_eq!(ranks[0].tensors, ranks[1].tensors);
        assert!(ranks[0].by_name.contains_key("model.layers.2.experts.3.up"));
        assert_eq!(ranks[0].num_params, 4 * 24 + 3);
    }

    #[test]
    fn files_hold_at_most_the_limit_and_read_back() {
        let out = plan(EpRank::default(), 30);
        // 12-byte expert matrices: two fit into 30 bytes, and two with the 6-byte norm.
        assert_eq!(out.files.iter().map(|f| f.tensors.len()).collect::<Vec<_>>(), [2, 2, 2, 3]);
        for (i, file) in out.files.iter().enumerate() {
            let mut bytes = file.header.clone();
            bytes.resize(file.bytes as usize, 0);
            let entries = header::parse(std::path::Path::new("m"), &bytes).unwrap();
            for (name, entry) in entries {
                let tensor = out.tensor(&name).unwrap();
                assert_eq!((tensor.file, tensor.offset as usize), (i, entry.range.start));
                assert!(tensor.offset.is_multiple_of(2));
            }
        }
    }
}
