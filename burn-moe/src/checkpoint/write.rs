//! Write a module as a Hugging Face folder: the table of `mapping.rs`, run backwards.
//!
//! Every file is written under a temporary name, synced and renamed, and the rename of the index (or of the single file)
//! comes last: an interrupted save never hurts the last good one in the same folder.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, backend::Backend};
use burn_ep_backend::OpError;
use burn_ep_backend::comm::EpGroup;
use indicatif::ProgressBar;

use super::binding::{Binding, Piece};
use super::cast::{cast, first_nonfinite, from_burn};
use super::files::{
    check_writable, commit, copy_side_files, create_part, open_part, part, remove_stale, shard_names, sync_dir, write_whole,
};
use super::index::{INDEX_FILE, SINGLE_FILE};
use super::json::ConfigJson;
use super::layout::{OutPlan, ParamTypes, plan_output};
use super::mapping::WeightMap;
use super::plan::{PathStack, param_specs};
use super::progress::bytes_bar;
use super::quantise::{QuantFormat, dequantise, quantise};
use super::read::read_piece;
use super::shard::EpRank;
use super::source::CheckpointSource;
use super::transform::{HostTensor, backward};
use crate::error::{Error, Result};

/// Default limit of a weight file.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;
/// Field of `config.json` that says how the weights of the files are quantised.
const QUANTIZATION_CONFIG: &str = "quantization_config";

/// How to save.
#[derive(Debug, Clone, Copy)]
pub struct SaveOptions<'a> {
    /// Checkpoint the module was loaded from: names, layout and element types are those of it, tensors the module does not
    /// use are carried through, and config, tokenizer, chat template and generation config are copied. None: the family's
    /// default layout and the parameters' own types.
    pub like: Option<&'a CheckpointSource>,
    /// `config.json` to write; None: that of `like`.
    pub config: Option<&'a ConfigJson>,
    /// Write NaN and infinite weights too. Without it a model that diverged is an error, not a checkpoint that cannot be loaded.
    pub allow_nonfinite: bool,
    /// Write quantised layouts, for every parameter that has one in the table: blocks whose values are those of `like` keep its
    /// bytes, others are quantised by the rule of the format. By default (false) a model that was loaded from quantised weights
    /// is written in plain bf16, and `quantization_config` is removed from its config, as transformers does for a
    /// dequantised model.
    pub quantised: bool,
    /// Largest weight file in bytes (5 GB by default); a larger single tensor gets a file of its own.
    pub max_shard_bytes: u64,
    /// Expert-parallel group. All ranks call [`save`] with the same options and write into one folder, which all must see.
    pub ep: Option<&'a EpGroup>,
    /// Show a progress bar when stderr is a terminal.
    pub progress: bool,
}

impl Default for SaveOptions<'_> {
    fn default() -> Self {
        Self {
            like: None,
            config: None,
            allow_nonfinite: false,
            quantised: false,
            max_shard_bytes: MAX_SHARD_BYTES,
            ep: None,
            progress: false,
        }
    }
}

/// What a save wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveReport {
    /// The folder.
    pub dir: PathBuf,
    /// Weight files in it.
    pub files: Vec<String>,
    /// Tensors in them.
    pub tensors: usize,
    /// Parameters of the model over all ranks.
    pub num_params: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Write `module` into the folder `dir`.
///
/// Errors: [`Error::Io`] when the folder cannot be written (the last good save in it is then still whole),
/// [`Error::Config`] for a malformed table or a missing config, [`Error::Mismatch`] when a parameter's shape does not fit its
/// layout or a weight is not finite, [`Error::Op`] when another rank failed.
pub fn save<B: Backend, M: Module<B>>(module: &M, map: &WeightMap, dir: impl AsRef<Path>, options: &SaveOptions<'_>) -> Result<SaveReport> {
    let dir = dir.as_ref();
    let ranks = Ranks(options.ep);
    let mut plan = None;
    // The names depend on what is in the folder, so the first rank chooses them.
    let names = ranks.agree(prepare(module, map, dir, options).map(|(out, names)| {
        plan = Some(out);
        names.join("\n")
    }))?;
    let names: Vec<String> = names.split('\n').map(str::to_string).collect();
    let Some(plan) = plan else {
        return Err(Error::config("save", "no plan", "a prepared save"));
    };
    let written = ranks.agree(write_params(module, &plan, dir, &names, options).map(|()| String::new()));
    if written.is_err() && ranks.is_first() {
        // Best effort: the next successful save removes what stays.
        for name in &names {
            let _ = std::fs::remove_file(part(&dir.join(name)));
        }
    }
    written?;
    let committed = if ranks.is_first() {
        finish(&plan, map, dir, &names, options)
    } else {
        Ok(())
    };
    ranks.agree(committed.map(|()| String::new()))?;
    Ok(SaveReport {
        dir: dir.to_path_buf(),
        files: names,
        tensors: plan.tensors.len(),
        num_params: plan.num_params,
        bytes: plan.total_bytes(),
    })
}

/// The ranks that write one folder together.
struct Ranks<'a>(Option<&'a EpGroup>);

impl Ranks<'_> {
    fn rank(&self) -> EpRank {
        self.0.map_or_else(EpRank::default, |ep| EpRank {
            rank: ep.rank(),
            size: ep.size(),
        })
    }

    fn is_first(&self) -> bool {
        self.0.is_none_or(|ep| ep.world_rank() == 0)
    }

    fn turn(&self) -> (usize, usize) {
        self.0.map_or((0, 1), |ep| (ep.world_rank(), ep.world_size()))
    }

    /// Whether this rank writes its experts: replicas hold the same ones.
    fn writes_experts(&self) -> bool {
        self.0.is_none_or(EpGroup::is_first_replica)
    }

    /// Waits for all ranks and gives each the first rank's text. Fails on every rank when one failed, so that none waits for
    /// it later.
    fn agree(&self, outcome: Result<String>) -> Result<String> {
        let Some(ep) = self.0 else {
            return outcome;
        };
        let message = match &outcome {
            Ok(text) => format!("+{text}"),
            Err(error) => format!("-{error}"),
        };
        let all = ep.world().get().all_gather(message.into_bytes())?;
        outcome?;
        let texts = all.iter().map(|bytes| String::from_utf8_lossy(bytes));
        let mut first = None;
        for (rank, text) in texts.enumerate() {
            match text.strip_prefix('+') {
                Some(text) if rank == 0 => first = Some(text.to_string()),
                Some(_) => {}
                None => {
                    return Err(Error::Op(OpError::Comm {
                        rank: ep.world_rank(),
                        world: ep.world_size(),
                        op: "save",
                        why: format!("rank {rank} failed: {}", text.trim_start_matches('-')),
                    }));
                }
            }
        }
        Ok(first.unwrap_or_default())
    }
}

/// Checks everything that can be checked, and creates the files on the first rank.
fn prepare<B: Backend, M: Module<B>>(module: &M, map: &WeightMap, dir: &Path, options: &SaveOptions<'_>) -> Result<(OutPlan, Vec<String>)> {
    if options.config.is_none() && options.like.is_none() {
        return Err(Error::config("config", "nothing", "a config, or a checkpoint to take it from"));
    }
    let ranks = Ranks(options.ep);
    let mut types = TypeVisitor::default();
    module.visit(&mut types);
    let specs = param_specs(module);
    let plan = plan_output(
        &specs,
        &types.types,
        map,
        options.like,
        options.quantised,
        ranks.rank(),
        options.max_shard_bytes,
    )?;
    if options.quantised && !plan.quantised {
        return Err(Error::config(
            "quantised",
            "true",
            "false: this family has no quantised layout that can be written",
        ));
    }
    if !ranks.is_first() {
        return Ok((plan, Vec::new()));
    }
    check_writable(dir)?;
    let names = shard_names(dir, plan.files.len());
    for (file, name) in plan.files.iter().zip(&names) {
        create_part(&dir.join(name), &file.header, file.bytes)?;
    }
    Ok((plan, names))
}

/// Writes this rank's share of the weights and syncs it.
fn write_params<B: Backend, M: Module<B>>(
    module: &M,
    plan: &OutPlan,
    dir: &Path,
    names: &[String],
    options: &SaveOptions<'_>,
) -> Result<()> {
    let ranks = Ranks(options.ep);
    let bar = bytes_bar(options.progress && ranks.is_first(), "saving", plan.total_bytes());
    let mut writer = Writer {
        stack: PathStack::default(),
        plan,
        files: Files {
            paths: names.iter().map(|name| dir.join(name)).collect(),
            open: HashMap::new(),
        },
        turn: ranks.turn(),
        experts: ranks.writes_experts(),
        like: options.like,
        bar: &bar,
        allow_nonfinite: options.allow_nonfinite,
        error: None,
    };
    module.visit(&mut writer);
    if let Some(error) = writer.error {
        return Err(error);
    }
    let mut files = writer.files;
    if ranks.is_first()
        && let Some(source) = options.like
    {
        for name in &plan.carried {
            let (Some(bytes), Some(tensor)) = (source.bytes(name), plan.tensor(name)) else {
                return Err(Error::checkpoint(
                    source.dir(),
                    format!("tensor `{name}`"),
                    "nothing",
                    "data to carry through",
                ));
            };
            files.write(tensor.file, tensor.offset, bytes)?;
            bar.inc(bytes.len() as u64);
        }
        for (names, format) in &plan.decoded {
            let [weights, scales] = names.each_ref().map(|name| {
                let piece = Piece {
                    name: name.clone(),
                    slab: None,
                };
                read_piece(&piece, source)
            });
            let tensor = plan.tensor(&names[0]);
            let tensor = tensor.ok_or_else(|| Error::Mismatch(format!("no place for `{}`", names[0])))?;
            let plain = dequantise(*format, &weights?, &scales?, tensor.dtype)
                .map_err(|why| Error::Mismatch(format!("{}: cannot be decoded: {why}", names[0])))?;
            files.write(tensor.file, tensor.offset, &plain.data)?;
            bar.inc(plain.data.len() as u64);
        }
    }
    files.sync()?;
    bar.finish_and_clear();
    Ok(())
}

/// Puts the written files into place, then removes what they replace.
fn finish(plan: &OutPlan, map: &WeightMap, dir: &Path, names: &[String], options: &SaveOptions<'_>) -> Result<()> {
    if let Some(source) = options.like {
        copy_side_files(source.dir(), dir)?;
    }
    if let Some(config) = options.config.or(options.like.map(CheckpointSource::config)) {
        let mut config = config.clone();
        if !plan.quantised {
            config.remove(QUANTIZATION_CONFIG);
        } else if config.get(QUANTIZATION_CONFIG).is_none_or(serde_json::Value::is_null)
            && let Some(value) = map.quantised_config()
        {
            config.set(QUANTIZATION_CONFIG, value.clone());
        }
        write_whole(&dir.join("config.json"), config.to_text().as_bytes())?;
    }
    for name in names {
        commit(&dir.join(name))?;
    }
    let mut keep = names.to_vec();
    if names.len() > 1 {
        // Renames are ordered: the shards must be there before an index points to them.
        sync_dir(dir)?;
        write_whole(&dir.join(INDEX_FILE), index_text(plan, names).as_bytes())?;
        keep.push(INDEX_FILE.to_string());
    }
    sync_dir(dir)?;
    // A single file wins over an index, so its removal is what makes a sharded save the valid one.
    let single = dir.join(SINGLE_FILE);
    if names.len() > 1 && single.exists() {
        std::fs::remove_file(&single).map_err(|e| Error::io(single, "remove the file of an earlier save", e))?;
        sync_dir(dir)?;
    }
    remove_stale(dir, &keep);
    Ok(())
}

fn index_text(plan: &OutPlan, names: &[String]) -> String {
    let weight_map: BTreeMap<&str, &str> = plan.tensors.iter().map(|t| (t.name.as_str(), names[t.file].as_str())).collect();
    let index = serde_json::json!({
        "metadata": { "total_parameters": plan.num_params, "total_size": plan.total_bytes() },
        "weight_map": weight_map,
    });
    format!("{index:#}\n")
}

/// Element types of parameters, without copying them to the host.
#[derive(Default)]
struct TypeVisitor {
    stack: PathStack,
    types: ParamTypes,
}

impl TypeVisitor {
    fn push(&mut self, dtype: DType) {
        if let Some(dtype) = from_burn(dtype) {
            self.types.insert(self.stack.path(), dtype);
        }
    }
}

impl<B: Backend> ModuleVisitor<B> for TypeVisitor {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.stack.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.stack.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.push(param.dtype());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.push(param.dtype());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.push(param.dtype());
    }
}

/// Files being written, opened when first needed.
struct Files {
    paths: Vec<PathBuf>,
    open: HashMap<usize, File>,
}

impl Files {
    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let path = &self.paths[file];
        let handle = match self.open.entry(file) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(open_part(path)?),
        };
        let written = handle.seek(SeekFrom::Start(offset)).and_then(|_| handle.write_all(bytes));
        written.map_err(|e| Error::io(part(path), "write", e))
    }

    fn sync(self) -> Result<()> {
        self.open
            .into_iter()
            .try_for_each(|(i, file)| file.sync_all().map_err(|e| Error::io(part(&self.paths[i]), "sync", e)))
    }
}

/// Writes parameters in module order; only one of them is on the host at a time.
struct Writer<'a> {
    stack: PathStack,
    plan: &'a OutPlan,
    files: Files,
    /// Parameters that all ranks hold are written in turn: those until this rank's next one, and the number of ranks.
    turn: (usize, usize),
    /// Whether this rank writes its experts.
    experts: bool,
    like: Option<&'a CheckpointSource>,
    bar: &'a ProgressBar,
    allow_nonfinite: bool,
    /// A visitor cannot fail: the first error is kept and the rest skipped.
    error: Option<Error>,
}

impl Writer<'_> {
    fn visit(&mut self, data: impl FnOnce() -> TensorData) {
        let path = self.stack.path();
        let Some(param) = self.plan.params.get(&path) else {
            return;
        };
        let writes = match param.share {
            Some(_) => self.experts,
            None => {
                let (until, ranks) = self.turn;
                self.turn.0 = until.checked_sub(1).unwrap_or(ranks - 1);
                until == 0
            }
        };
        if self.error.is_some() || !writes {
            return;
        }
        let data = data();
        if !self.allow_nonfinite
            && let Some((index, value)) = from_burn(data.dtype).and_then(|dtype| first_nonfinite(dtype, data.as_bytes()))
        {
            let found = format!("{path}: found {value} at element {index}");
            self.error = Some(Error::Mismatch(format!(
                "{found}, expected finite weights (or set `allow_nonfinite`): nothing was saved"
            )));
            return;
        }
        for copy in &param.copies {
            let local = param.share.as_ref().map_or(0..1, |share| share.local.clone());
            let written = self.write(&path, &data, copy, local);
            if let Err(error) = written {
                self.error = Some(error);
                return;
            }
        }
        self.bar.inc(data.bytes.len() as u64);
    }

    fn write(&mut self, path: &str, data: &TensorData, binding: &Binding, items: std::ops::Range<usize>) -> Result<()> {
        let dtype = from_burn(data.dtype).ok_or_else(|| Error::Mismatch(format!("{path}: {:?} cannot be stored", data.dtype)))?;
        let shape = &data.shape.as_slice()[usize::from(binding.experts.is_some())..];
        let item_bytes = data.bytes.len().checked_div(items.len()).unwrap_or(0);
        for (position, item) in items.enumerate() {
            let bytes = &data.as_bytes()[position * item_bytes..(position + 1) * item_bytes];
            let tensor = HostTensor {
                dtype,
                shape: shape.to_vec(),
                data: Cow::Borrowed(bytes),
            };
            let pieces = binding.pieces(item);
            let parts = match binding.format() {
                None => backward(&binding.steps, tensor, binding.arity()),
                Some(format) => backward(&binding.steps[1..], tensor, binding.arity() / 2)
                    .and_then(|matrices| quantise_all(format, &matrices, &pieces, self.like)),
            };
            let parts = parts.map_err(|why| Error::Mismatch(format!("{path}: cannot be written: {why}")))?;
            for (piece, part) in pieces.into_iter().zip(parts) {
                let tensor = self.plan.tensor(&piece.name);
                let tensor = tensor.ok_or_else(|| Error::Mismatch(format!("{path}: no place for `{}`", piece.name)))?;
                let bytes = cast(part.data, part.dtype, tensor.dtype);
                let slab = piece.slab.unwrap_or(0) as u64 * bytes.len() as u64;
                self.files.write(tensor.file, tensor.offset + slab, &bytes)?;
            }
        }
        Ok(())
    }
}

/// Weights and scales of every matrix, next to those of the checkpoint it came from.
fn quantise_all<'a>(
    format: QuantFormat,
    matrices: &[HostTensor<'_>],
    pieces: &[Piece],
    like: Option<&CheckpointSource>,
) -> std::result::Result<Vec<HostTensor<'a>>, String> {
    let stored = |piece: &Piece| like.and_then(|source| read_piece(piece, source).ok());
    let pairs = matrices.iter().zip(pieces.chunks(2)).map(|(matrix, pair)| {
        let before = stored(&pair[0]).zip(stored(&pair[1])).map(<[HostTensor<'_>; 2]>::from);
        quantise(format, matrix, before)
    });
    Ok(pairs.collect::<std::result::Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

impl<B: Backend> ModuleVisitor<B> for Writer<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.stack.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.stack.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.visit(|| param.val().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.visit(|| param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.visit(|| param.val().into_data());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::Dtype;

    use crate::checkpoint::plan::{Kind, ParamSpec};

    #[test]
    fn index_keys_are_sorted_and_sizes_counted() {
        let specs: Vec<ParamSpec> = ["b.weight", "a.weight"]
            .map(|path| ParamSpec {
                path: path.into(),
                shape: vec![2, 3],
                kind: Kind::Float,
            })
            .to_vec();
        let types = specs.iter().map(|s| (s.path.clone(), Dtype::F32)).collect();
        let map = WeightMap::new(["model."]).rule(crate::checkpoint::Rule::tensor("{path}").stored_as(["{base}{path}"], []));
        let plan = plan_output(&specs, &types, &map, None, false, EpRank::default(), 24).unwrap();
        let text = index_text(&plan, &["x".into(), "y".into()]);
        let expected = "{\n  \"metadata\": {\n    \"total_parameters\": 12,\n    \"total_size\": 48\n  },\n  \"weight_map\": {\n    \"model.a.weight\": \"x\",\n    \"model.b.weight\": \"y\"\n  }\n}\n";
        assert_eq!(text, expected);
    }
}
