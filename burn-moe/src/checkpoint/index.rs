//! Which files hold the weights of a folder: `model.safetensors`, or the shards named by `model.safetensors.index.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::json::{ConfigJson, read_text};
use crate::error::{Error, Result};

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The largest published index is a few megabytes.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The weight files of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightFiles {
    /// Paths, in name order.
    pub files: Vec<PathBuf>,
    /// What the index promises: tensor name to position in `files`.
    pub promised: BTreeMap<String, usize>,
    /// The index, if there is one.
    pub index: Option<PathBuf>,
}

/// Find the weight files: the file that `transformers_weights` names, else the single file, else the index.
pub(crate) fn find(dir: &Path, config: &ConfigJson) -> Result<WeightFiles> {
    if let Some(name) = config.get("transformers_weights").and_then(|v| v.as_str()) {
        let path = inside(dir, name).ok_or_else(|| {
            Error::checkpoint(
                config.path(),
                "field `transformers_weights`",
                format!("`{name}`"),
                "a file inside the folder",
            )
        })?;
        return if name.ends_with(".index.json") {
            read_index(dir, &path)
        } else {
            Ok(single(path))
        };
    }
    let (file, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
    if file.is_file() {
        return Ok(single(file));
    }
    if index.is_file() {
        return read_index(dir, &index);
    }
    Err(Error::checkpoint(
        dir,
        "weights",
        "neither of the two",
        format!("{SINGLE_FILE} or {INDEX_FILE}"),
    ))
}

fn single(path: PathBuf) -> WeightFiles {
    WeightFiles {
        files: vec![path],
        promised: BTreeMap::new(),
        index: None,
    }
}

/// Names of the shards that an index lists, checked to stay inside `dir`; they need not be there yet.
#[cfg(feature = "hub")]
pub(crate) fn shard_list(dir: &Path, path: &Path) -> Result<Vec<String>> {
    let raw = RawIndex::read(path)?;
    let names: BTreeSet<&String> = raw.weight_map.0.values().collect();
    names
        .into_iter()
        .map(|name| shard_path(dir, path, name).map(|_| name.clone()))
        .collect()
}

fn read_index(dir: &Path, path: &Path) -> Result<WeightFiles> {
    let raw = RawIndex::read(path)?;
    let names: BTreeSet<&String> = raw.weight_map.0.values().collect();
    let mut files = Vec::with_capacity(names.len());
    for name in &names {
        let file = shard_path(dir, path, name)?;
        if !file.is_file() {
            return Err(Error::checkpoint(
                path,
                "weight_map",
                format!("no file `{name}`"),
                "every listed shard in the folder",
            ));
        }
        files.push(file);
    }
    if files.is_empty() {
        return Err(Error::checkpoint(path, "weight_map", "no entry", "at least one tensor"));
    }
    let position: BTreeMap<&String, usize> = names.iter().enumerate().map(|(i, name)| (*name, i)).collect();
    let promised = raw
        .weight_map
        .0
        .iter()
        .map(|(tensor, file)| (tensor.clone(), position[file]))
        .collect();
    Ok(WeightFiles {
        files,
        promised,
        index: Some(path.to_path_buf()),
    })
}

fn shard_path(dir: &Path, index: &Path, name: &str) -> Result<PathBuf> {
    inside(dir, name).ok_or_else(|| Error::checkpoint(index, "weight_map", format!("the file `{name}`"), "files inside the folder"))
}

/// `dir/name` if that stays inside `dir`.
fn inside(dir: &Path, name: &str) -> Option<PathBuf> {
    let relative = Path::new(name);
    let plain = !name.contains(['\\', '\0']) && relative.components().all(|c| matches!(c, Component::Normal(_)));
    (plain && relative.components().next().is_some()).then(|| dir.join(relative))
}

#[derive(Deserialize)]
struct RawIndex {
    /// Informative in the format, and sometimes wrong: not used.
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
    weight_map: UniqueMap,
}

impl RawIndex {
    fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, MAX_INDEX_BYTES)?;
        serde_json::from_str(&text).map_err(|e| {
            Error::checkpoint(
                path,
                "index",
                format!("an error ({e})"),
                "an object with a `weight_map` of file names",
            )
        })
    }
}

/// A map of strings in which a repeated key is an error.
struct UniqueMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut names = BTreeMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if names.contains_key(&tensor) {
                        return Err(A::Error::custom(format!("tensor `{tensor}` is listed twice")));
                    }
                    names.insert(tensor, file);
                }
                Ok(UniqueMap(names))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ConfigJson {
        ConfigJson::parse("config.json", "{}".into()).unwrap()
    }

    fn index_error(weight_map: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(INDEX_FILE), format!("{{\"weight_map\": {weight_map}}}")).unwrap();
        find(dir.path(), &config()).unwrap_err().to_string()
    }

    #[test]
    fn shards_are_sorted_and_unique() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.safetensors", "a.safetensors"] {
            std::fs::write(dir.path().join(name), []).unwrap();
        }
        let text = r#"{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}"#;
        std::fs::write(dir.path().join(INDEX_FILE), text).unwrap();
        let found = find(dir.path(), &config()).unwrap();
        assert_eq!(found.files, [dir.path().join("a.safetensors"), dir.path().join("b.safetensors")]);
        assert_eq!(found.promised.values().copied().collect::<Vec<_>>(), [1, 0, 1]);
        // The single file wins, as in the reference.
        std::fs::write(dir.path().join(SINGLE_FILE), []).unwrap();
        assert_eq!(find(dir.path(), &config()).unwrap().files, [dir.path().join(SINGLE_FILE)]);
    }

    #[test]
    fn no_shard_outside_the_folder() {
        for name in ["../x.safetensors", "/etc/passwd", "a/../../x", "", "..\\\\x", "."] {
            let text = index_error(&format!("{{\"w\": \"{name}\"}}"));
            assert!(text.contains("files inside the folder"), "{name}: {text}");
        }
    }

    #[test]
    fn defects_are_named() {
        assert!(index_error(r#"{"w": "gone.safetensors"}"#).contains("no file `gone.safetensors`"));
        assert!(index_error("{}").contains("no entry"));
        assert!(index_error("[]").contains("object of file names"));
        assert!(index_error(r#"{"w": "a", "w": "a"}"#).contains("tensor `w` is listed twice"));
        assert!(index_error(r#"{"w": 3}"#).contains("index"));
        let empty = tempfile::tempdir().unwrap();
        assert!(find(empty.path(), &config()).unwrap_err().to_string().contains(INDEX_FILE));
    }
}
