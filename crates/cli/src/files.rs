//! Files that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Puts `contents` at `path` by temporary file, fsync, rename and fsync of the directory. The mode is the old file's, or 0644 cut by the umask.
///
/// # Errors
/// Those of the file system, naming the path.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .ok_or_else(|| at(io::Error::new(io::ErrorKind::InvalidInput, "not a file's path")))?;
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = dir.join(format!(".{name}.{}.tmp", std::process::id()));
    let written = (|| {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&temporary)?;
        if let Ok(old) = fs::metadata(path) {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(contents)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temporary, path)?;
        File::open(dir)?.sync_all()
    })();
    if written.is_err() {
        // Best effort; its name keeps it from being read as anything.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(at)
}

/// Reads a file, or nothing when there is none.
pub(crate) fn read_if_there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io::Error::new(e.kind(), format!("{}: {e}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_is_whole_keeps_its_mode_and_leaves_nothing_beside_it() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("net.yaml");
        assert_eq!(read_if_there(&path).unwrap(), None);
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(read_if_there(&path).unwrap().unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let e = replace(&dir.path().join("none/net.yaml"), b"").unwrap_err();
        assert!(e.to_string().contains("none/net.yaml"), "{e}");
    }
}
