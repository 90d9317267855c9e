//! The output folder: checked before training, filled after.

use std::path::{Path, PathBuf};

use burn_moe::checkpoint::{is_checkpoint_file, is_weight_file};
use burn_moe::train::{SavePlan, latest_checkpoint, remove_checkpoint};
use burn_moe::{Error, Result};

use super::FinetuneConfig;

const CONFIG: &str = "config.json";

/// Checks that the output can be written and holds what the run expects; returns the checkpoint to resume.
pub(super) fn check(config: &FinetuneConfig) -> Result<Option<PathBuf>> {
    plan(config).validate()?;
    // Publishing replaces weights and overwriting deletes checkpoints: the model's own files must not be among them.
    if let (Ok(model), Ok(output)) = (config.model.canonicalize(), config.output.canonicalize())
        && let Ok(inside) = model.strip_prefix(&output)
        && inside
            .iter()
            .next()
            .is_none_or(|name| name.to_string_lossy().starts_with("checkpoint-"))
    {
        let expected = format!("another output folder than that of the model, {}", config.model.display());
        return Err(Error::config("output", config.output.display(), expected));
    }
    let latest = latest_checkpoint(&config.output)?;
    match (latest, config.resume) {
        (None, true) => Err(Error::checkpoint(
            &config.output,
            "resume",
            "no checkpoint-<step> folder",
            "one to resume from",
        )),
        (Some(latest), true) => Ok(Some(latest)),
        (_, false) if config.overwrite => Ok(None),
        (Some(latest), false) => Err(Error::checkpoint(
            &config.output,
            "output",
            format!("the checkpoint {} of an earlier run", latest.display()),
            "no checkpoint; resume it, overwrite it, or choose another output folder",
        )),
        (None, false) => match files(&config.output)?.into_iter().find(|path| is_weight_file(&name(path))) {
            Some(weights) => Err(Error::checkpoint(
                &config.output,
                "output",
                format!("the weights {}", weights.display()),
                "no weights; overwrite them, or choose another output folder",
            )),
            None => Ok(None),
        },
    }
}

/// The plain files of a folder.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(|e| Error::io(dir, "list", e))?;
    Ok(entries.into_iter().map(|e| e.path()).filter(|p| p.is_file()).collect())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// When and where the trainer saves.
pub(super) fn plan(config: &FinetuneConfig) -> SavePlan {
    SavePlan {
        every: config.save_every,
        keep: Some(2),
        ..SavePlan::new(&config.output)
    }
}

/// Removes checkpoints of an earlier run: they would be taken for this run's when it is resumed.
pub(super) fn remove_checkpoints(output: &Path) -> Result<()> {
    while let Some(dir) = latest_checkpoint(output)? {
        remove_checkpoint(&dir)?;
    }
    Ok(())
}

/// Makes the output folder itself loadable: its files are those of the last checkpoint, as links where the file system can
/// (no second copy of the weights), else as copies. The training state stays in the checkpoint.
pub(super) fn publish(checkpoint: &Path, output: &Path) -> Result<()> {
    // Weights of an earlier run may be split differently, and its model may have had other side files; none may outlive it.
    // The config goes first and comes last: without it no reader takes a half-filled folder for a checkpoint.
    let mut old = files(output)?;
    old.retain(|path| is_checkpoint_file(&name(path)));
    old.sort_by_key(|path| name(path) != CONFIG);
    for path in old {
        std::fs::remove_file(&path).map_err(|e| Error::io(path, "remove an old file", e))?;
    }
    let mut new = files(checkpoint)?;
    new.sort_by_key(|path| name(path) == CONFIG);
    for file in new {
        let target = output.join(name(&file));
        let partial = output.join(format!("{}.partial", name(&file)));
        let _ = std::fs::remove_file(&partial);
        std::fs::hard_link(&file, &partial)
            .or_else(|_| std::fs::copy(&file, &partial).map(drop))
            .and_then(|()| std::fs::rename(&partial, &target))
            .map_err(|e| Error::io(target, "publish", e))?;
    }
    Ok(())
}
