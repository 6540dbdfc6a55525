//! Files that are there whole or not at all, also after a crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Puts `contents` at `path`: temporary file, fsync, rename, fsync of the directory. Returns whether anything was written;
/// a file that has these contents and this mode is left alone.
///
/// The temporary name starts with a dot and ends in `.tmp`, so no container runtime reads one that a crash left behind.
///
/// # Errors
/// Those of the file system, naming the path.
pub fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<bool> {
    use std::os::unix::fs::PermissionsExt;
    if fs::read(path).is_ok_and(|old| old == contents)
        && fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o7777 == mode)
    {
        return Ok(false);
    }
    let (dir, name) = split(path)?;
    let temporary = dir.join(format!(".{name}.{}.tmp", std::process::id()));
    let written = (|| {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
        // The mode given to open is cut by the umask.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(contents)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temporary, path)?;
        File::open(dir)?.sync_all()
    })();
    if let Err(e) = written {
        // Best effort: the next run removes what stays.
        let _ = fs::remove_file(&temporary);
        return Err(at(path, &e));
    }
    Ok(true)
}

/// Removes `path` and makes that last. Returns whether it was there.
///
/// # Errors
/// Those of the file system, naming the path; a missing file is none.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => {
            let (dir, _) = split(path)?;
            File::open(dir).and_then(|d| d.sync_all()).map_err(|e| at(path, &e))?;
            Ok(true)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(at(path, &e)),
    }
}

/// Removes temporary files that crashed runs of [`replace`] left for `path`.
///
/// # Errors
/// Those of the file system, naming the path.
pub fn remove_leftovers(path: &Path) -> io::Result<Vec<PathBuf>> {
    let (dir, name) = split(path)?;
    let prefix = format!(".{name}.");
    let mut removed = Vec::new();
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(removed),
        Err(e) => return Err(at(dir, &e)),
    };
    for entry in entries {
        let entry = entry.map_err(|e| at(dir, &e))?;
        let file = entry.file_name();
        let ours = file
            .to_str()
            .and_then(|f| f.strip_prefix(&prefix))
            .and_then(|f| f.strip_suffix(".tmp"))
            .is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()));
        if ours && remove(&entry.path())? {
            removed.push(entry.path());
        }
    }
    Ok(removed)
}

fn split(path: &Path) -> io::Result<(&Path, &str)> {
    let wrong =
        || io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not a file's path", path.display()));
    let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(wrong)?;
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir, name))
}

fn at(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}
