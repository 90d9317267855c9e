//! A checkpoint folder, opened: its config, and lazy reads of mapped tensors.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;

use super::header::{self, Entry};
use super::index;
use super::json::ConfigJson;
use super::mapping::WeightMap;
use super::pattern::natural_order;
use crate::error::{Error, Result};

/// An opened checkpoint. Opening checks every header and reads no weights; the files must not be changed in place while it
/// is open (replacing them by a rename is fine).
pub struct CheckpointSource {
    dir: PathBuf,
    config: ConfigJson,
    shards: Vec<Shard>,
    tensors: HashMap<String, (usize, Entry)>,
    /// In natural order, so that nothing depends on the order of shards.
    names: Vec<String>,
}

struct Shard {
    path: PathBuf,
    /// Large reads copy from it; they map no pages and cannot fault.
    #[cfg(unix)]
    file: File,
    map: Mmap,
}

impl Shard {
    #[cfg(unix)]
    fn read(&self, start: usize, out: &mut [u8]) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, start as u64)
    }

    #[cfg(not(unix))]
    fn read(&self, start: usize, out: &mut [u8]) -> std::io::Result<()> {
        let bytes = self.map.get(start..start + out.len()).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }
}

/// What the header says about a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Stored element type.
    pub dtype: Dtype,
    /// Stored sizes.
    pub shape: &'a [usize],
    /// File it lies in.
    pub file: &'a Path,
    /// Size in bytes.
    pub bytes: usize,
}

/// How the two names of a tied pair (`WeightMap::tie`) are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TieState {
    /// At most one of the two is stored; it serves both.
    OneStored,
    /// Both are stored with the same bytes.
    Identical,
    /// Both are stored and differ: do not tie, whatever the config says.
    Different,
}

impl CheckpointSource {
    /// Open a folder with `config.json` and either `model.safetensors` or `model.safetensors.index.json` and its shards.
    ///
    /// Errors are [`Error::Io`] and [`Error::Checkpoint`]; they name the file, the tensor, what was found and expected.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        let config = ConfigJson::read(&dir.join("config.json"))?;
        let found = index::find(&dir, &config)?;
        let mut shards = Vec::with_capacity(found.files.len());
        let mut tensors: HashMap<String, (usize, Entry)> = HashMap::new();
        for (number, path) in found.files.into_iter().enumerate() {
            let file = File::open(&path).map_err(|e| Error::io(&path, "open", e))?;
            if file.metadata().map_err(|e| Error::io(&path, "open", e))?.len() == 0 {
                return Err(Error::checkpoint(path, "file size", "0 bytes", "a safetensors file"));
            }
            // SAFETY: the map is only read. Another process that truncates the file in place would make reads fault; that is
            // the documented condition of `CheckpointSource`, and our own writer replaces files by renaming.
            let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, "map", e))?;
            for (name, entry) in header::parse(&path, &map)? {
                if let Some((other, _)) = tensors.get(&name) {
                    let other: &Shard = &shards[*other];
                    return Err(Error::checkpoint(
                        path,
                        format!("tensor `{name}`"),
                        format!("a second copy (the first is in {})", other.path.display()),
                        "every tensor in one shard",
                    ));
                }
                tensors.insert(name, (number, entry));
            }
            shards.push(Shard {
                path,
                #[cfg(unix)]
                file,
                map,
            });
        }
        for (name, number) in &found.promised {
            if tensors.get(name).is_none_or(|(shard, _)| shard != number) {
                let index = found.index.unwrap_or(dir);
                let file = shards[*number].path.display();
                return Err(Error::checkpoint(
                    index,
                    format!("tensor `{name}`"),
                    format!("none in {file}"),
                    "it there",
                ));
            }
        }
        let mut names: Vec<String> = tensors.keys().cloned().collect();
        names.sort_unstable_by(|a, b| natural_order(a, b));
        Ok(Self {
            dir,
            config,
            shards,
            tensors,
            names,
        })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json`.
    pub fn config(&self) -> &ConfigJson {
        &self.config
    }

    /// Names of all tensors, in natural order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether a tensor is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Dtype, shape and place of a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (shard, entry) = self.tensors.get(name)?;
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: &entry.shape,
            file: &self.shards[*shard].path,
            bytes: entry.range.len(),
        })
    }

    /// Bytes of a tensor, straight from the mapped file.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (shard, entry) = self.tensors.get(name)?;
        self.shards[*shard].map.get(entry.range.clone())
    }

    /// Bytes of entry `index` of axis 0 (one expert of a stacked tensor).
    pub fn slab(&self, name: &str, index: usize) -> Option<&[u8]> {
        let bytes = self.bytes(name)?;
        let count = *self.info(name)?.shape.first()?;
        if index >= count {
            return None;
        }
        let size = bytes.len() / count;
        bytes.get(index * size..(index + 1) * size)
    }

    /// Copies bytes of a tensor, or of entry `slab` of its axis 0, from `offset` on.
    pub(crate) fn read(&self, name: &str, slab: Option<usize>, offset: usize, out: &mut [u8]) -> Result<()> {
        let found = self.tensors.get(name).and_then(|(shard, entry)| {
            let (mut start, mut length) = (entry.range.start, entry.range.len());
            if let Some(index) = slab {
                let count = *entry.shape.first()?;
                length = length.checked_div(count).filter(|_| index < count)?;
                start += index * length;
            }
            (offset + out.len() <= length).then_some((&self.shards[*shard], start + offset))
        });
        let Some((shard, start)) = found else {
            let what = format!("tensor `{name}`");
            return Err(Error::checkpoint(
                &self.dir,
                what,
                "nothing",
                format!("{} bytes at {offset}", out.len()),
            ));
        };
        shard.read(start, out).map_err(|e| Error::io(&shard.path, "read", e))
    }

    /// The prefix that `{base}` stands for in this checkpoint: the one most names begin with.
    pub(crate) fn base<'m>(&self, map: &'m WeightMap) -> &'m str {
        let count = |base: &String| {
            self.names
                .iter()
                .filter(|n| !base.is_empty() && n.starts_with(base.as_str()))
                .count()
        };
        let mut best = None;
        for base in map.bases() {
            let n = count(base);
            if n > best.map_or(0, |(_, n)| n) {
                best = Some((base, n));
            }
        }
        let fallback = || map.bases().iter().find(|b| b.is_empty()).or(map.bases().first());
        best.map(|(base, _)| base).or_else(fallback).map_or("", String::as_str)
    }

    /// How the pair of `WeightMap::tie` is stored; [`TieState::OneStored`] for families without one.
    pub fn tie_state(&self, map: &WeightMap) -> TieState {
        let base = self.base(map);
        let stored = |path: &str| {
            let (_, rule, captures) = map.find(path)?;
            let names = rule.layouts().iter().filter_map(|layout| layout.sources().first());
            names.map(|p| p.fill(&captures, base, None)).find(|name| self.contains(name))
        };
        let pair = map.tied().and_then(|(kept, other)| Some((stored(kept)?, stored(other)?)));
        match pair {
            None => TieState::OneStored,
            Some((kept, other)) if self.same_tensor(&kept, &other) => TieState::Identical,
            Some(_) => TieState::Different,
        }
    }

    pub(crate) fn same_tensor(&self, a: &str, b: &str) -> bool {
        match (self.info(a), self.info(b)) {
            (Some(x), Some(y)) => x.dtype == y.dtype && x.shape == y.shape && self.bytes(a) == self.bytes(b),
            _ => false,
        }
    }
}

impl std::fmt::Debug for CheckpointSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckpointSource")
            .field("dir", &self.dir)
            .field("shards", &self.shards.len())
            .field("tensors", &self.names.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Rule, index::INDEX_FILE};
    use safetensors::tensor::{TensorView, serialize_to_file};

    /// Writes one file of byte tensors of shape `[n]`.
    fn write(path: PathBuf, tensors: &[(&str, &[u8])]) {
        let views = tensors
            .iter()
            .map(|(name, data)| (*name, TensorView::new(Dtype::U8, vec![data.len()], data).unwrap()));
        serialize_to_file(views, None, &path).unwrap();
    }

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        dir
    }

    #[test]
    fn reads_tensors_and_slabs_across_shards() {
        let dir = folder();
        write(dir.path().join("a.safetensors"), &[("l.10", &[1, 2, 3]), ("x", &[9])]);
        write(dir.path().join("b.safetensors"), &[("l.2", &[4, 5])]);
        let index = r#"{"weight_map": {"l.10": "a.safetensors", "l.2": "b.safetensors"}}"#;
        std::fs::write(dir.path().join(INDEX_FILE), index).unwrap();
        let source = CheckpointSource::open(dir.path()).unwrap();
        // `x` is not in the index, yet it is in a listed shard: the reference reads it as well.
        assert_eq!(source.names(), ["l.2", "l.10", "x"]);
        assert_eq!(source.bytes("l.10").unwrap(), [1, 2, 3]);
        assert_eq!(source.slab("l.10", 2).unwrap(), [3]);
        assert!(source.slab("l.10", 3).is_none() && source.bytes("l.3").is_none());
    }

    #[test]
    fn duplicates_and_broken_promises_are_refused() {
        let dir = folder();
        write(dir.path().join("a.safetensors"), &[("w", &[1])]);
        write(dir.path().join("b.safetensors"), &[("w", &[1])]);
        let index = |text: &str| std::fs::write(dir.path().join(INDEX_FILE), text).unwrap();
        let open = || CheckpointSource::open(dir.path()).unwrap_err().to_string();
        index(r#"{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}"#);
        assert!(open().contains("tensor `w`: found a second copy"), "{}", open());
        index(r#"{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}"#);
        assert!(open().contains("tensor `v`: found none in"), "{}", open());
    }

    #[test]
    fn the_base_is_what_most_names_begin_with() {
        let dir = folder();
        write(
            dir.path().join("model.safetensors"),
            &[("model.a", &[1]), ("model.b", &[1]), ("backbone.c", &[1])],
        );
        let source = CheckpointSource::open(dir.path()).unwrap();
        assert_eq!(source.base(&WeightMap::new(["backbone.", "model."])), "model.");
        assert_eq!(source.base(&WeightMap::new(["transformer."])), "transformer.");
        assert_eq!(source.base(&WeightMap::new(["transformer.", ""])), "");
    }

    #[test]
    fn tied_pairs_are_compared() {
        let map = WeightMap::new(["model."])
            .rule(Rule::tensor("head").stored_as(["head"], []))
            .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
            .tie("embed", "head");
        for (head, expected) in [
            (vec![1, 2], TieState::Identical),
            (vec![1, 3], TieState::Different),
            (vec![1], TieState::Different),
        ] {
            let dir = folder();
            write(dir.path().join("model.safetensors"), &[("model.embed", &[1, 2]), ("head", &head)]);
            assert_eq!(CheckpointSource::open(dir.path()).unwrap().tie_state(&map), expected);
        }
        let dir = folder();
        write(dir.path().join("model.safetensors"), &[("head", &[1, 2])]);
        assert_eq!(CheckpointSource::open(dir.path()).unwrap().tie_state(&map), TieState::OneStored);
    }
}
