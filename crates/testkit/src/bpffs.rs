//! A BPF file system of the test's own.

use std::path::Path;

use crate::temp::TempDir;
use crate::undo::{Registered, Undo, register};
use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A bpffs mounted at a temporary path; everything pinned there goes with it.
#[derive(Debug)]
pub struct Bpffs {
    dir: TempDir,
    _registered: Registered,
}

impl Bpffs {
    /// Mounts.
    ///
    /// # Errors
    /// Without root's rights, or when the kernel has no bpffs.
    pub fn mount() -> Result<Self> {
        let dir = crate::temp::temp_dir("bpffs")?;
        let registered = register(Undo::Mount(dir.path().to_path_buf()));
        mount(Some("bpf"), dir.path(), Some("bpf"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting bpffs at {} (root is needed)", dir.path().display()))?;
        Ok(Self { dir, _registered: registered })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        if let Err(e) = umount2(self.path(), MntFlags::MNT_DETACH) {
            eprintln!("bpffs at {} was not unmounted: {e}", self.path().display());
        }
    }
}
