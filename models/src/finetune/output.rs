//! The output folder: checked before training, filled after.

use std::path::{Path, PathBuf};

use burn_moe::train::{SavePlan, latest_checkpoint};
use burn_moe::{Error, Result};

use super::FinetuneConfig;

/// Checks that the output can be written and holds what the run expects; returns the checkpoint to resume.
pub(super) fn check(config: &FinetuneConfig) -> Result<Option<PathBuf>> {
    plan(config).validate()?;
    let latest = latest_checkpoint(&config.output)?;
    match (latest, config.resume) {
        (None, true) => Err(Error::checkpoint(
            &config.output,
            "resume",
            "no checkpoint-<step> folder",
            "one to resume from",
        )),
        (Some(latest), true) => Ok(Some(latest)),
        (None, false) => Ok(None),
        (Some(_), false) if config.overwrite => match is_inside(&config.model, &config.output) {
            true => Err(Error::config(
                "overwrite",
                format!("true, but the model {} is one of the checkpoints to delete", config.model.display()),
                "another output folder",
            )),
            false => Ok(None),
        },
        (Some(latest), false) => Err(Error::checkpoint(
            &config.output,
            "output",
            format!("the checkpoint {} of an earlier run", latest.display()),
            "no checkpoint; resume it, overwrite it, or choose another output folder",
        )),
    }
}

/// True for a folder below `output`, not for `output` itself.
fn is_inside(folder: &Path, output: &Path) -> bool {
    match (folder.canonicalize(), output.canonicalize()) {
        (Ok(folder), Ok(output)) => folder != output && folder.starts_with(output),
        _ => false,
    }
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
        std::fs::remove_dir_all(&dir).map_err(|e| Error::io(dir, "remove an old checkpoint", e))?;
    }
    Ok(())
}

/// Makes the output folder itself loadable: its files are those of the last checkpoint, as links where the file system can
/// (no second copy of the weights), else as copies. The training state stays in the checkpoint.
pub(super) fn publish(checkpoint: &Path, output: &Path) -> Result<()> {
    let list = |dir: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(dir).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
        let entries = entries.map_err(|e| Error::io(dir, "list", e))?;
        Ok(entries.into_iter().map(|e| e.path()).filter(|p| p.is_file()).collect())
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Weights of an earlier run may be split differently; a stale shard or index must not outlive them.
    for old in list(output)?.iter().filter(|p| name(p).contains(".safetensors")) {
        std::fs::remove_file(old).map_err(|e| Error::io(old, "remove old weights", e))?;
    }
    for file in list(checkpoint)? {
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
