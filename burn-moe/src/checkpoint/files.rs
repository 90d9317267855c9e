//! Files that appear complete or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::index::{INDEX_FILE, SINGLE_FILE};
use crate::error::{Error, Result};

/// Ending of a file that is being written.
const PART: &str = ".part";

/// Files beside the weights that a save copies from the source.
const SIDE_FILES: [&str; 12] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
];
const SIDE_FOLDER: &str = "chat_templates";

/// Whether a file of a repository is one of those: tokenizer, chat template, generation config.
#[cfg(feature = "hub")]
pub(crate) fn is_side_file(name: &str) -> bool {
    SIDE_FILES.contains(&name)
        || name
            .strip_prefix(SIDE_FOLDER)
            .is_some_and(|rest| rest.starts_with('/') && rest.ends_with(".jinja"))
}

/// Whether a file of this name belongs to a checkpoint: config, weights, tokenizer, chat template, generation config.
pub fn is_checkpoint_file(name: &str) -> bool {
    is_weight_file(name) || name == "config.json" || SIDE_FILES.contains(&name)
}

/// Whether a file of this name holds weights of a checkpoint, or their index.
pub fn is_weight_file(name: &str) -> bool {
    name == SINGLE_FILE || name == INDEX_FILE || is_shard(name)
}

/// Creates `dir` if need be and writes a file in it, so that an unwritable output is an error before the first step.
pub fn check_writable(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|e| Error::io(dir, "create the output folder", e))?;
    let probe = dir.join(format!(".write-test-{}", std::process::id()));
    let written = File::create(&probe).and_then(|mut file| file.write_all(b"test"));
    let removed = fs::remove_file(&probe);
    written.and(removed).map_err(|e| Error::io(dir, "write to the output folder", e))
}

/// Where `path` is written before it is complete.
pub(crate) fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(PART);
    PathBuf::from(name)
}

/// A new file of `bytes` bytes that begins with `start`, at `part(path)`.
pub(crate) fn create_part(path: &Path, start: &[u8], bytes: u64) -> Result<()> {
    let temporary = part(path);
    let create = || {
        let mut file = File::create(&temporary)?;
        file.set_len(bytes)?;
        file.write_all(start)
    };
    create().map_err(|e| Error::io(&temporary, "create", e))
}

/// `part(path)` for writing.
pub(crate) fn open_part(path: &Path) -> Result<File> {
    let temporary = part(path);
    OpenOptions::new()
        .write(true)
        .open(&temporary)
        .map_err(|e| Error::io(&temporary, "open", e))
}

/// Makes `part(path)` the file `path`. The data must be synced.
pub(crate) fn commit(path: &Path) -> Result<()> {
    fs::rename(part(path), path).map_err(|e| Error::io(path, "rename into place", e))
}

/// Writes a small file as a whole: temporary name, sync, rename.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    create_part(path, bytes, bytes.len() as u64)?;
    open_part(path)?.sync_all().map_err(|e| Error::io(path, "sync", e))?;
    commit(path)
}

/// Makes renames durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    // Only Unix can open a folder; elsewhere renames are durable as far as the system makes them so.
    if cfg!(unix) {
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| Error::io(dir, "sync the folder", e))?;
    }
    Ok(())
}

/// Names for `count` weight files in `dir`. No name belongs to a shard that is already there, because the index of the last
/// good save may point to it: a crash between two renames would otherwise mix two saves.
pub(crate) fn shard_names(dir: &Path, count: usize) -> Vec<String> {
    if count == 1 {
        return vec![SINGLE_FILE.to_string()];
    }
    let names = |revision: usize| -> Vec<String> {
        let infix = if revision == 0 { String::new() } else { format!("-r{revision}") };
        (1..=count)
            .map(|i| format!("model{infix}-{i:05}-of-{count:05}.safetensors"))
            .collect()
    };
    let mut revision = 0;
    while names(revision).iter().any(|name| dir.join(name).exists()) {
        revision += 1;
    }
    names(revision)
}

/// Removes weight files that are not in `keep`: shards of an earlier save and what an interrupted one left. The new files are
/// in place by then, so what cannot be removed is only worth a warning.
pub(crate) fn remove_stale(dir: &Path, keep: &[String]) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for name in entries.flatten().map(|entry| entry.file_name()) {
        let Some(name) = name.to_str() else { continue };
        let interrupted = name
            .strip_suffix(PART)
            .is_some_and(|name| is_weight_file(name) || name == "config.json");
        if interrupted || (is_weight_file(name) && !keep.iter().any(|k| k == name)) {
            let path = dir.join(name);
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!("{}: a file of an earlier save cannot be removed: {error}", path.display());
            }
        }
    }
}

/// Whether a name is one that this library or transformers gives to a shard.
fn is_shard(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("model-").and_then(|n| n.strip_suffix(".safetensors")) else {
        return false;
    };
    let rest = match rest.strip_prefix('r').and_then(|r| r.split_once('-')) {
        Some((revision, rest)) if !revision.is_empty() && revision.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => rest,
    };
    let number = |n: &str| n.len() == 5 && n.bytes().all(|b| b.is_ascii_digit());
    rest.split_once("-of-").is_some_and(|(i, n)| number(i) && number(n))
}

/// Copies tokenizer, chat template and generation config of `from`, where they exist; nothing if both are one folder.
pub(crate) fn copy_side_files(from: &Path, to: &Path) -> Result<()> {
    if let (Ok(a), Ok(b)) = (from.canonicalize(), to.canonicalize())
        && a == b
    {
        return Ok(());
    }
    for name in SIDE_FILES {
        copy(&from.join(name), &to.join(name))?;
    }
    let Ok(templates) = fs::read_dir(from.join(SIDE_FOLDER)) else {
        return Ok(());
    };
    let folder = to.join(SIDE_FOLDER);
    fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "create", e))?;
    for entry in templates.flatten() {
        copy(&entry.path(), &folder.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_file() {
        return Ok(());
    }
    let bytes = fs::read(from).map_err(|e| Error::io(from, "read", e))?;
    write_whole(to, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_recognised_by_name() {
        for name in ["model-00001-of-00002.safetensors", "model-r3-00001-of-00002.safetensors"] {
            assert!(is_shard(name), "{name}");
        }
        for name in [
            "model.safetensors",
            "adapter_model-00001-of-00002.safetensors",
            "model-a-of-b.safetensors",
            "model-r-00001-of-00002.safetensors",
        ] {
            assert!(!is_shard(name), "{name}");
        }
    }

    #[test]
    fn new_shards_never_take_the_name_of_an_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let first = shard_names(dir.path(), 2);
        assert_eq!(first, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
        fs::write(dir.path().join(&first[1]), []).unwrap();
        let second = shard_names(dir.path(), 2);
        assert_eq!(second[0], "model-r1-00001-of-00002.safetensors");
        fs::write(dir.path().join(&second[0]), []).unwrap();
        fs::write(dir.path().join(format!("{}{PART}", second[1])), []).unwrap();
        fs::write(dir.path().join("optimizer.safetensors"), []).unwrap();
        remove_stale(dir.path(), &second);
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [second[0].as_str(), "optimizer.safetensors"]);
    }

    #[test]
    fn an_unwritable_output_is_found_early() {
        let dir = tempfile::tempdir().unwrap();
        check_writable(&dir.path().join("a/b")).unwrap();
        assert_eq!(fs::read_dir(dir.path().join("a/b")).unwrap().count(), 0);
        let file = dir.path().join("file");
        fs::write(&file, []).unwrap();
        let error = check_writable(&file.join("out")).unwrap_err();
        assert!(
            matches!(&error, Error::Io { .. }) && error.to_string().contains("create the output folder"),
            "{error}"
        );
    }
}
