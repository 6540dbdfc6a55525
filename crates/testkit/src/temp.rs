//! Directories that go with their guard.

use std::path::Path;

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

/// Makes one under the system's temporary directory.
///
/// # Errors
/// When it cannot be made.
pub fn temp_dir(label: &str) -> Result<TempDir> {
    let dir = tempfile::Builder::new().prefix(&format!("fl-{label}-")).tempdir()?;
    let registered = register(Undo::Dir(dir.path().to_path_buf()));
    Ok(TempDir { dir, _registered: registered })
}
