//! Directories that go with their guard.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::undo::{Registered, Undo, register};

/// A directory of its own, removed on drop.
#[derive(Debug)]
pub struct TempDir {
    dir: tempfile::TempDir,
    _registered: Registered,
}

impl TempDir {
    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        remove_with_mounts(self.dir.path());
    }
}

/// Makes one under the system's temporary directory, named after this process and the label.
///
/// # Errors
/// When it cannot be made.
pub fn temp_dir(label: &str) -> Result<TempDir> {
    let prefix = format!("fl{}-{label}-", std::process::id());
    let dir = tempfile::Builder::new().prefix(&prefix).tempdir()?;
    let registered = register(Undo::Dir(dir.path().to_path_buf()));
    Ok(TempDir { dir, _registered: registered })
}

/// Removes directories (and the file systems mounted on them) of test processes that were killed before they could.
pub(crate) fn sweep() {
    let Ok(dir) = fs::read_dir(std::env::temp_dir()) else { return };
    let stale: Vec<PathBuf> = dir
        .flatten()
        .filter(|e| left_by_the_dead(&e.file_name().to_string_lossy()))
        .map(|e| e.path())
        .collect();
    for path in stale {
        remove_with_mounts(&path);
    }
}

/// Removes a directory after what is mounted on it and below it: namespaces of an agent that was killed, file systems.
pub(crate) fn remove_with_mounts(dir: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // The kernel lists mounts in the order they were made; what was mounted last goes first.
    for target in mounts.lines().rev().filter_map(|l| l.split(' ').nth(1)).map(Path::new) {
        if target.starts_with(dir) {
            let _ = nix::mount::umount2(target, nix::mount::MntFlags::MNT_DETACH);
        }
    }
    let _ = fs::remove_dir_all(dir);
}

/// Whether a name is `fl<pid>-...` of a process that is no more.
pub(crate) fn left_by_the_dead(name: &str) -> bool {
    let pid =
        name.strip_prefix("fl").and_then(|n| n.split_once('-')).and_then(|(pid, _)| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}
