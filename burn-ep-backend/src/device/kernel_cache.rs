//! Where compiled kernels are kept between runs, so that only the first one waits for the compiler.
//!
//! CubeCL finds a kernel by its name and compile-time arguments, not by its source. A folder therefore belongs to one executable
//! file, one compute capability and one version of the compiler; a changed program starts a new one, and folders that no program has
//! used for a month go. `BURN_MOE_KERNEL_CACHE` is another place for all of this, or `off`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cudarc::driver::sys::CUdevice_attribute;

const VARIABLE: &str = "BURN_MOE_KERNEL_CACHE";
const KEEP: Duration = Duration::from_secs(30 * 24 * 3600);

/// The folder for this process on the device; None when it is switched off or cannot be written.
pub fn folder(ordinal: usize) -> Option<PathBuf> {
    let root = match std::env::var_os(VARIABLE) {
        Some(value) if ["off", "0", ""].iter().any(|off| value == *off) => return None,
        Some(folder) => PathBuf::from(folder),
        None => default_root(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))?,
    };
    let folder = root.join(format!("{:016x}", fingerprint(ordinal)?));
    if let Err(error) = prepare(&folder) {
        tracing::info!(?folder, %error, "compiled kernels are not kept; {VARIABLE} names another folder");
        return None;
    }
    forget_old(&root, &folder, SystemTime::now());
    Some(folder)
}

fn default_root(cache: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let given = |value: Option<std::ffi::OsString>| value.map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = given(cache).or_else(|| Some(given(home)?.join(".cache")))?;
    Some(cache.join("burn-moe").join("kernels"))
}

/// Of everything that compiled kernels depend on; None when one of them is unknown.
fn fingerprint(ordinal: usize) -> Option<u64> {
    let program = std::env::current_exe().ok()?;
    let metadata = program.metadata().ok()?;
    let mut hasher = DefaultHasher::new();
    (program, metadata.len(), metadata.modified().ok()?).hash(&mut hasher);
    compiler()?.hash(&mut hasher);
    capability(ordinal)?.hash(&mut hasher);
    Some(hasher.finish())
}

fn compiler() -> Option<(i32, i32)> {
    use cudarc::nvrtc::sys;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded only if it is there; the call writes two integers.
    let known = unsafe { sys::is_culib_present() && sys::nvrtcVersion(&mut major, &mut minor).result().is_ok() };
    known.then_some((major, minor))
}

fn capability(ordinal: usize) -> Option<(i32, i32)> {
    use cudarc::driver::{result, sys};
    // SAFETY: opens and closes the library.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    result::init().ok()?;
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: the device is one that the driver returned.
    let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.ok();
    Some((
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// Makes the folder and sees that it takes files: CubeCL ends the program otherwise.
fn prepare(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let probe = folder.join(format!("writable-{}", std::process::id()));
    std::fs::write(&probe, [])?;
    std::fs::remove_file(&probe)
}

/// Removes what other programs left long ago: [`prepare`] renews the date of a folder whenever it is used.
fn forget_old(root: &Path, in_use: &Path, now: SystemTime) {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()).filter(|path| path != in_use) {
        let ours = folder
            .file_name()
            .is_some_and(|name| name.len() == 16 && name.to_string_lossy().chars().all(|c| c.is_ascii_hexdigit()));
        let age = folder
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|date| now.duration_since(date).ok());
        if ours && age.is_some_and(|age| age > KEEP) {
            let _ = std::fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_follows_the_desktop_convention() {
        let path = |cache: Option<&str>, home: Option<&str>| default_root(cache.map(Into::into), home.map(Into::into));
        assert_eq!(path(Some("/c"), Some("/h")), Some(PathBuf::from("/c/burn-moe/kernels")));
        assert_eq!(
            path(Some("relative"), Some("/h")),
            Some(PathBuf::from("/h/.cache/burn-moe/kernels"))
        );
        assert_eq!(path(None, None), None);
    }

    #[test]
    fn old_folders_go_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = root.path().join(name);
            prepare(&folder).unwrap();
            assert_eq!(folder.read_dir().unwrap().count(), 0);
            folder
        };
        let (own, other, foreign) = (make("0123456789abcdef"), make("fedcba9876543210"), make("notes"));
        forget_old(root.path(), &own, SystemTime::now());
        assert!(other.exists());
        forget_old(root.path(), &own, SystemTime::now() + KEEP + Duration::from_secs(60));
        assert!(own.exists() && foreign.exists() && !other.exists());
    }
}
