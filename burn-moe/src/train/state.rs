//! Training state on disk: what a run needs to continue, beyond the weights.
//!
//! ```text
//! <checkpoint>/                     the model, written by the caller's SaveModel (a Hugging Face folder)
//! <checkpoint>/training_state/
//!     optimizer.safetensors         <path>.exp_avg, <path>.exp_avg_sq, <path>.master
//!     trainer_state.json            step, token count, data position, settings, update counts
//! ```
//!
//! Tensors have the names and shapes of the whole model, whatever a rank holds of them: each writes its own elements into the one
//! file and reads them again when loading, so that a run may continue on another mesh. Training draws no random numbers besides the order
//! of the data, which the data position carries.

use std::collections::BTreeMap;
use std::fs::File;
use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;
use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use super::TrainerConfig;
use crate::error::{Error, Result};
use crate::optim::{AdamW, AdamWMoments, ParamInfo, ParamTable};

/// Folder of the state inside a checkpoint.
pub const STATE_DIR: &str = "training_state";
const TENSORS: &str = "optimizer.safetensors";
const JSON: &str = "trainer_state.json";
const FORMAT: u32 = 1;

/// The part of the state that is no tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Version of this format.
    pub format: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Tokens seen, over all ranks.
    pub tokens: u64,
    /// Position of the data source, in its own terms.
    pub data: serde_json::Value,
    /// Settings of the run that wrote the state.
    pub config: TrainerConfig,
    /// Running gradient norm that an optimizer in the backward clips by.
    #[serde(default)]
    pub running_norm: Option<f64>,
    /// Updates of each parameter that the optimizer has state for, by path.
    pub updates: BTreeMap<String, u64>,
}

impl TrainerState {
    /// State of an optimizer after `step` steps.
    pub(super) fn new<B: MoeBackend>(
        step: u64,
        tokens: u64,
        data: serde_json::Value,
        config: TrainerConfig,
        optimizer: &AdamW<B>,
        table: &ParamTable,
    ) -> Self {
        let updates = table
            .entries()
            .iter()
            .filter_map(|info| Some((info.path.clone(), optimizer.updates(info.id)?)))
            .collect();
        Self {
            format: FORMAT,
            step,
            tokens,
            data,
            config,
            running_norm: None,
            updates,
        }
    }

    /// Reads `dir/training_state/trainer_state.json`.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(STATE_DIR).join(JSON);
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", e))?;
        let state: Self =
            serde_json::from_str(&text).map_err(|e| Error::checkpoint(&path, "training state", e, "the format this version writes"))?;
        if state.format != FORMAT {
            return Err(Error::checkpoint(&path, "format", state.format, FORMAT));
        }
        Ok(state)
    }
}

/// Writes the state into `dir/training_state`, synced to disk. Every rank of `ep` must call it.
pub(super) fn write_state<B: MoeBackend>(
    dir: &Path,
    state: &TrainerState,
    optimizer: &AdamW<B>,
    table: &ParamTable,
    ep: Option<&EpGroup>,
) -> Result<()> {
    let folder = dir.join(STATE_DIR);
    let path = folder.join(TENSORS);
    if ep.is_none_or(|ep| ep.world_rank() == 0) {
        std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "create", e))?;
        let json = folder.join(JSON);
        let text = serde_json::to_string_pretty(state).map_err(|e| Error::checkpoint(&json, "training state", e, "plain JSON values"))?;
        let mut file = File::create(&json).map_err(|e| Error::io(&json, "create", e))?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(|e| Error::io(&json, "write", e))?;
        File::create(&path).map_err(|e| Error::io(&path, "create", e))?;
    }
    if let Some(ep) = ep {
        ep.world().get().barrier()?;
    }
    write_tensors(&path, optimizer, table, ep)
}

/// Loads the optimizer state of `dir` for the parameters in `table`; a rank of `ep` takes what it holds.
pub(super) fn read_tensors<B: MoeBackend>(
    dir: &Path,
    state: &TrainerState,
    optimizer: &mut AdamW<B>,
    table: &ParamTable,
    ep: Option<&EpGroup>,
    device: &B::Device,
) -> Result<()> {
    let mut file = StateFile::open(dir.join(STATE_DIR).join(TENSORS))?;
    let path = file.path.clone();
    let known: Vec<&str> = table.entries().iter().map(|info| info.path.as_str()).collect();
    if let Some(unknown) = state.updates.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(Error::checkpoint(
            &path,
            "optimizer state",
            format!("parameter `{unknown}`"),
            "parameters of this model only",
        ));
    }
    for info in table.entries() {
        let Some(&step) = state.updates.get(&info.path) else { continue };
        let missing = |name: &'static str| {
            let path = &path;
            move || Error::checkpoint(path, format!("tensor `{}.{name}`", info.path), "none", "one")
        };
        let moments = AdamWMoments {
            step,
            m: file
                .tensor::<B>(info, "exp_avg", optimizer, ep, device)?
                .ok_or_else(missing("exp_avg"))?,
            v: file
                .tensor::<B>(info, "exp_avg_sq", optimizer, ep, device)?
                .ok_or_else(missing("exp_avg_sq"))?,
            master: file.tensor::<B>(info, "master", optimizer, ep, device)?,
        };
        optimizer
            .check_state(info, &moments)
            .map_err(|(found, expected)| Error::checkpoint(&path, format!("state of `{}`", info.path), found, expected))?;
        optimizer.set_state(info.id, moments);
    }
    Ok(())
}

fn parts<B: MoeBackend>(moments: &AdamWMoments<B>) -> impl Iterator<Item = (&'static str, &FloatTensor<B>)> {
    [("exp_avg", &moments.m), ("exp_avg_sq", &moments.v)]
        .into_iter()
        .chain(moments.master.iter().map(|master| ("master", master)))
}

/// Which elements of a whole tensor a rank holds.
struct Place {
    /// Shape of the whole tensor.
    shape: Vec<usize>,
    /// First element of this rank.
    start: usize,
    /// Elements of this rank; zeros fill its tensor behind them.
    count: usize,
    /// Shape of this rank's tensor.
    local: Vec<usize>,
    /// Whether this rank is the one that writes them.
    writes: bool,
}

impl Place {
    fn new<B: MoeBackend>(info: &ParamInfo, optimizer: &AdamW<B>, ep: Option<&EpGroup>) -> Self {
        let (rank, ranks) = match ep.filter(|_| info.is_expert()) {
            Some(ep) => (ep.rank(), ep.size()),
            None => (0, 1),
        };
        let mut shape = info.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first *= ranks;
        }
        let len: usize = info.shape.iter().product();
        let (held, local, writes) = match optimizer.shard(info) {
            Some(shard) => (shard.range(), vec![shard.share], true),
            None => {
                let first = |ep: &EpGroup| {
                    if info.is_expert() {
                        ep.is_first_replica()
                    } else {
                        ep.world_rank() == 0
                    }
                };
                (0..len, info.shape.clone(), ep.is_none_or(first))
            }
        };
        Self {
            shape,
            start: rank * len + held.start,
            count: held.len(),
            local,
            writes,
        }
    }

    /// Position in a file in which the whole tensor begins at `offset`.
    fn bytes(&self, offset: usize, dtype: DType) -> Range<u64> {
        let start = (offset + self.start * dtype.size()) as u64;
        start..start + (self.count * dtype.size()) as u64
    }
}

#[derive(Serialize)]
struct HeaderEntry {
    dtype: &'static str,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// Writes this rank's part of the file at `path`, which is there; rank 0 the header too. One tensor is on the host at a time.
fn write_tensors<B: MoeBackend>(path: &Path, optimizer: &AdamW<B>, table: &ParamTable, ep: Option<&EpGroup>) -> Result<()> {
    let infos: Vec<&ParamInfo> = table.entries().iter().filter(|info| optimizer.updates(info.id).is_some()).collect();
    let mut header = BTreeMap::new();
    let mut offsets = Vec::new();
    let mut offset = 0;
    for info in &infos {
        let place = Place::new(info, optimizer, ep);
        for (name, dtype) in optimizer.state_dtypes(info) {
            let end = offset + place.shape.iter().product::<usize>() * dtype.size();
            let entry = HeaderEntry {
                dtype: dtype_name(dtype, info)?,
                shape: place.shape.clone(),
                data_offsets: [offset, end],
            };
            header.insert(format!("{}.{name}", info.path), entry);
            offsets.push(offset);
            offset = end;
        }
    }
    let mut header = serde_json::to_vec(&header).map_err(|e| Error::checkpoint(path, "header", e, "plain JSON"))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let data_start = 8 + header.len() as u64;

    let mut file = OpenOptions::new().write(true).open(path).map_err(|e| Error::io(path, "open", e))?;
    let mut put = |at: u64, bytes: &[u8]| {
        let written = file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(bytes));
        written.map_err(|e| Error::io(path, "write", e))
    };
    if ep.is_none_or(|ep| ep.world_rank() == 0) {
        put(0, &(header.len() as u64).to_le_bytes())?;
        put(8, &header)?;
    }
    let mut offsets = offsets.into_iter();
    for info in &infos {
        // One at a time: 8-bit moments are widened here.
        let Some(moments) = optimizer.state(info.id) else { continue };
        let place = Place::new(info, optimizer, ep);
        for ((_, tensor), offset) in parts(&moments).zip(offsets.by_ref()) {
            let range = place.bytes(offset, tensor.dtype());
            if !place.writes || range.is_empty() {
                continue;
            }
            let flat = B::float_reshape(tensor.clone(), Shape::new([tensor.shape().num_elements()]));
            let data = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat)).into_data();
            put(data_start + range.start, &data.as_bytes()[..(range.end - range.start) as usize])?;
        }
    }
    file.sync_all().map_err(|e| Error::io(path, "sync", e))
}

/// An optimizer file, read one tensor at a time.
struct StateFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: u64,
}

impl StateFile {
    fn open(path: PathBuf) -> Result<Self> {
        let io = |e| Error::io(&path, "read", e);
        let mut file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(io)?;
        let header = u64::from_le_bytes(size);
        if header > length - 8 {
            return Err(Error::checkpoint(
                &path,
                "header length",
                header,
                format!("at most {} (the rest of the file)", length - 8),
            ));
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(io)?;
        let metadata: Metadata =
            serde_json::from_slice(&bytes).map_err(|e| Error::checkpoint(&path, "header", e, "a safetensors header"))?;
        let data_start = 8 + header;
        let expected = data_start + metadata.data_len() as u64;
        if length != expected {
            return Err(Error::checkpoint(
                &path,
                "file length",
                length,
                format!("{expected} bytes, as the header says"),
            ));
        }
        Ok(Self {
            path,
            file,
            metadata,
            data_start,
        })
    }

    /// This rank's elements of a tensor; None when the file has none of that name.
    fn tensor<B: MoeBackend>(
        &mut self,
        info: &ParamInfo,
        name: &str,
        optimizer: &AdamW<B>,
        ep: Option<&EpGroup>,
        device: &B::Device,
    ) -> Result<Option<FloatTensor<B>>> {
        let Some(entry) = self.metadata.info(&format!("{}.{name}", info.path)) else {
            return Ok(None);
        };
        let what = || format!("tensor `{}.{name}`", info.path);
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::F64 => DType::F64,
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::F16 => DType::F16,
            other => return Err(Error::checkpoint(&self.path, what(), format!("dtype {other:?}"), "a float dtype")),
        };
        let place = Place::new(info, optimizer, ep);
        if entry.shape != place.shape {
            return Err(Error::checkpoint(
                &self.path,
                what(),
                format!("shape {:?}", entry.shape),
                format!("{:?}", place.shape),
            ));
        }
        let range = place.bytes(entry.data_offsets.0, dtype);
        // Zeros behind the end of the parameter.
        let mut bytes = vec![0; place.local.iter().product::<usize>() * dtype.size()];
        let held = &mut bytes[..(range.end - range.start) as usize];
        self.file
            .seek(SeekFrom::Start(self.data_start + range.start))
            .and_then(|_| self.file.read_exact(held))
            .map_err(|e| Error::io(&self.path, "read", e))?;
        let data = TensorData::from_bytes_vec(bytes, place.local, dtype);
        Ok(Some(B::resident_from_data(data, device)))
    }
}

fn dtype_name(dtype: DType, info: &ParamInfo) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("F32"),
        DType::F64 => Ok("F64"),
        DType::BF16 => Ok("BF16"),
        DType::F16 => Ok("F16"),
        other => Err(Error::Mismatch(format!(
            "optimizer state of `{}`: found dtype {other:?}, expected a float dtype",
            info.path
        ))),
    }
}
