//! Checkpoints of a run: `<output>/checkpoint-<step>`, each complete or absent.

use std::fs::File;
use std::path::{Path, PathBuf};

use burn_ep_backend::comm::EpGroup;

use super::state::STATE_DIR;
use crate::error::{Error, Result};

/// Where and how often a run saves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePlan {
    /// Folder that holds the `checkpoint-<step>` folders.
    pub output: PathBuf,
    /// Save after every so many steps; None: only at the end and when interrupted.
    pub every: Option<u64>,
    /// Checkpoints to keep, the newest ones; None: all.
    pub keep: Option<usize>,
}

impl SavePlan {
    /// Saves at the end and when interrupted, keeps everything.
    pub fn new(output: impl Into<PathBuf>) -> Self {
        Self {
            output: output.into(),
            every: None,
            keep: None,
        }
    }

    /// Checks the numbers and that the folder can be written, before any work is done.
    pub fn validate(&self) -> Result<()> {
        if self.every == Some(0) {
            return Err(Error::config("save.every", 0, "at least 1, or none"));
        }
        if self.keep == Some(0) {
            return Err(Error::config("save.keep", 0, "at least 1, or none"));
        }
        std::fs::create_dir_all(&self.output).map_err(|e| Error::io(&self.output, "create the output folder", e))?;
        tempfile::tempfile_in(&self.output).map_err(|e| Error::io(&self.output, "write to the output folder", e))?;
        Ok(())
    }

    /// Folder of the checkpoint after `step` steps.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.output.join(format!("checkpoint-{step}"))
    }

    /// Removes all but the newest checkpoints.
    pub(super) fn prune(&self) -> Result<()> {
        let Some(keep) = self.keep else { return Ok(()) };
        let mut all = checkpoints(&self.output)?;
        all.truncate(all.len().saturating_sub(keep));
        all.into_iter().try_for_each(|(_, dir)| remove_checkpoint(&dir))
    }
}

/// Removes a checkpoint, under another name: what is left of it when the process ends meanwhile is not taken for one.
pub fn remove_checkpoint(dir: &Path) -> Result<()> {
    let removed = with_suffix(dir, ".removed");
    remove_if_there(&removed)?;
    std::fs::rename(dir, &removed).map_err(|e| Error::io(dir, "move an old checkpoint aside", e))?;
    remove_if_there(&removed)
}

/// What processes that were killed left behind: checkpoints half written or half removed.
fn remove_leftovers(output: &Path) -> Result<()> {
    for entry in std::fs::read_dir(output).map_err(|e| Error::io(output, "list", e))? {
        let path = entry.map_err(|e| Error::io(output, "list", e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let step = name.strip_prefix("checkpoint-").and_then(|rest| rest.split_once('.'));
        if step.is_some_and(|(step, end)| step.parse::<u64>().is_ok() && ["partial", "removed"].contains(&end)) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

/// The newest complete checkpoint in `output`, if any.
pub fn latest_checkpoint(output: &Path) -> Result<Option<PathBuf>> {
    if !output.exists() {
        return Ok(None);
    }
    Ok(checkpoints(output)?.pop().map(|(_, dir)| dir))
}

/// Complete checkpoints by ascending step. A folder that is still being written has another name.
fn checkpoints(output: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(output).map_err(|e| Error::io(output, "list", e))? {
        let path = entry.map_err(|e| Error::io(output, "list", e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(step) = name.strip_prefix("checkpoint-").and_then(|step| step.parse().ok())
            && path.join(STATE_DIR).is_dir()
        {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Fills a folder under a temporary name with `write` and moves it to `dir` when it is complete and on disk; an existing
/// `dir` is replaced. Every rank calls it; rank 0 creates and moves.
pub(super) fn write_folder(dir: &Path, ep: Option<&EpGroup>, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = with_suffix(dir, ".partial");
    let leader = ep.is_none_or(|ep| ep.world_rank() == 0);
    let barrier = || match ep {
        Some(ep) => ep.world().get().barrier().map_err(Error::from),
        None => Ok(()),
    };
    if leader {
        if let Some(output) = dir.parent().filter(|output| output.is_dir()) {
            remove_leftovers(output)?;
        }
        std::fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, "create", e))?;
    }
    barrier()?;
    let written = write(&partial).and_then(|()| barrier());
    if written.is_err() && leader {
        // Best effort: the disk may be full, and the error that says so is the one to report.
        let _ = remove_if_there(&partial);
    }
    written?;
    if leader {
        sync_folder(&partial)?;
        let replaced = with_suffix(dir, ".replaced");
        remove_if_there(&replaced)?;
        if dir.exists() {
            std::fs::rename(dir, &replaced).map_err(|e| Error::io(dir, "move the old folder aside", e))?;
        }
        std::fs::rename(&partial, dir).map_err(|e| Error::io(dir, "rename into place", e))?;
        remove_if_there(&replaced)?;
        if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync(parent)?;
        }
    }
    barrier()
}

fn with_suffix(dir: &Path, suffix: &str) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn remove_if_there(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(dir, "remove", e)),
        _ => Ok(()),
    }
}

fn sync(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|e| Error::io(path, "sync", e))
}

fn sync_folder(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, "list", e))? {
        let path = entry.map_err(|e| Error::io(dir, "list", e))?.path();
        match path.is_dir() {
            true => sync_folder(&path)?,
            false => sync(&path)?,
        }
    }
    sync(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_save_leaves_the_old_folder_alone() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("checkpoint-1");
        write_folder(&dir, None, |p| {
            std::fs::write(p.join("a"), "old").map_err(|e| Error::io(p, "write", e))
        })
        .unwrap();
        let failed = write_folder(&dir, None, |p| {
            std::fs::write(p.join("a"), "half").map_err(|e| Error::io(p, "write", e))?;
            Err(Error::config("model", "broken", "whole"))
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read_to_string(dir.join("a")).unwrap(), "old");
        write_folder(&dir, None, |p| {
            std::fs::write(p.join("a"), "new").map_err(|e| Error::io(p, "write", e))
        })
        .unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("a")).unwrap(), "new");
    }

    #[test]
    fn checkpoints_are_ordered_by_number_and_pruned() {
        let root = tempfile::tempdir().unwrap();
        let plan = SavePlan {
            keep: Some(2),
            ..SavePlan::new(root.path())
        };
        assert_eq!(latest_checkpoint(root.path()).unwrap(), None);
        for step in [2, 10, 9] {
            std::fs::create_dir_all(plan.checkpoint(step).join(STATE_DIR)).unwrap();
        }
        std::fs::create_dir_all(root.path().join("checkpoint-11.partial").join(STATE_DIR)).unwrap();
        std::fs::create_dir_all(root.path().join("checkpoint-12")).unwrap();
        assert_eq!(latest_checkpoint(root.path()).unwrap(), Some(plan.checkpoint(10)));
        plan.prune().unwrap();
        assert!(!plan.checkpoint(2).exists() && plan.checkpoint(9).exists() && plan.checkpoint(10).exists());
    }

    #[test]
    fn what_a_killed_process_left_is_no_checkpoint_and_goes_with_the_next_save() {
        let root = tempfile::tempdir().unwrap();
        let plan = SavePlan::new(root.path());
        for name in [
            "checkpoint-3.removed",
            "checkpoint-4.partial",
            "checkpoint-5.notes",
            "checkpoint-old.removed",
        ] {
            std::fs::create_dir_all(root.path().join(name).join(STATE_DIR)).unwrap();
        }
        assert_eq!(latest_checkpoint(root.path()).unwrap(), None);
        let full_disk = |p: &Path| Err(Error::io(p, "write", std::io::ErrorKind::StorageFull.into()));
        assert!(write_folder(&plan.checkpoint(6), None, full_disk).is_err());
        let mut left: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["checkpoint-5.notes", "checkpoint-old.removed"]);
    }

    #[test]
    fn an_unwritable_output_is_refused_before_the_first_step() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        // A folder inside a file cannot exist, for no user.
        assert!(
            SavePlan::new(file.join("output"))
                .validate()
                .unwrap_err()
                .to_string()
                .contains("output")
        );
    }
}
