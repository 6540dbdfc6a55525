//! Small file operations.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Writes a file that only its owner may read, whole or not at all.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    write_mode(path, text.as_bytes(), 0o600)
}

/// Writes under another name, then renames: a watcher never reads half a file.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<()> {
    write_mode(path, text.as_bytes(), 0o644)
}

/// Copies an executable the same way.
pub(crate) fn install(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
    write_mode(to, &bytes, 0o755)
}

fn write_mode(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.new"));
    // A file left by a killed writer could have another mode.
    let _ = fs::remove_file(&new);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&new)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&new, path));
    written.with_context(|| format!("writing {}", path.display()))
}
