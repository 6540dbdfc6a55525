//! The desired-state document on disk. The last good one stays in force; what is bad of a new one degrades alone.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use flowloom_model::{Fault, Format, World};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use serde::{Deserialize, Serialize};

/// The files of a document that was in force, kept so that a restart has a last good one, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    document: String,
    lock: Option<String>,
    json: bool,
}

impl Kept {
    /// What it says.
    ///
    /// # Errors
    /// When this version does not understand it any more.
    pub(crate) fn load(&self) -> Result<Loaded, String> {
        let format = if self.json { Format::Json } else { Format::Yaml };
        read(self.document.as_bytes(), self.lock.as_deref().map(str::as_bytes), format, None)
    }
}

/// A document that is in force.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// What of it is right, completed from the lock file.
    pub world: World,
    /// What is not.
    pub faults: Vec<Fault>,
    /// Names the contents of both files (`flowloom_api::v1::digest`).
    pub digest: String,
}

impl Loaded {
    /// What a document says that says nothing.
    ///
    /// # Errors
    /// Never in practice.
    pub(crate) fn empty() -> Result<Self, String> {
        read(b"version: 1\n", None, Format::Yaml, None).map(|loaded| Self { digest: String::new(), ..loaded })
    }
}

/// Reads document and lock when their content changed.
#[derive(Debug)]
pub(crate) struct DocumentFile {
    path: PathBuf,
    lock: PathBuf,
    /// Contents of the last attempt.
    seen: Option<(Vec<u8>, Option<Vec<u8>>)>,
}

impl DocumentFile {
    /// Nothing is read yet.
    #[must_use]
    pub(crate) fn new(path: &Path, lock: &Path) -> Self {
        Self { path: path.to_owned(), lock: lock.to_owned(), seen: None }
    }

    /// The contents of the last attempt.
    pub(crate) fn contents(&self) -> Option<Kept> {
        let (document, lock) = self.seen.as_ref()?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let lock = match lock {
            Some(bytes) => Some(text(bytes)?),
            None => None,
        };
        Some(Kept { document: text(document)?, lock, json: Format::of_path(&self.path) == Format::Json })
    }

    /// `None` when nothing changed since the last call. `last_good` is the world in force.
    ///
    /// # Errors
    /// Why the file as a whole cannot be used; the caller keeps what it has.
    pub(crate) fn load(&mut self, last_good: Option<&World>) -> Option<Result<Loaded, String>> {
        let document = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) => {
                self.seen = None;
                return Some(Err(format!("{} cannot be read: {e}", self.path.display())));
            }
        };
        let lock = match fs::read(&self.lock) {
            Ok(bytes) => Some(bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Some(Err(format!("{} cannot be read: {e}", self.lock.display()))),
        };
        let now = (document, lock);
        if self.seen.as_ref() == Some(&now) {
            return None;
        }
        let result = read(&now.0, now.1.as_deref(), Format::of_path(&self.path), last_good);
        self.seen = Some(now);
        Some(result.map_err(|e| format!("{}: {e}", self.path.display())))
    }
}

fn read(
    document: &[u8],
    lock: Option<&[u8]>,
    format: Format,
    last_good: Option<&World>,
) -> Result<Loaded, String> {
    let one_line = |faults: Vec<Fault>| {
        let shown: Vec<String> = faults.iter().take(3).map(ToString::to_string).collect();
        let more = faults.len().saturating_sub(shown.len());
        let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
        format!("{}{rest}", shown.join("; "))
    };
    let loaded = flowloom_model::load(document, format, lock, last_good).map_err(one_line)?;
    let digest = flowloom_api::v1::digest(document, lock);
    Ok(Loaded { world: loaded.world, faults: loaded.faults, digest })
}

/// Calls `changed` after something happened to the document or its lock. The directory is watched: editors and config
/// maps replace files by renaming. Watching ends when the value is dropped.
///
/// # Errors
/// When the directory does not exist or cannot be watched.
pub(crate) fn watch(
    document: &Path,
    lock: &Path,
    changed: impl Fn() + Send + 'static,
) -> notify::Result<RecommendedWatcher> {
    let directory = document.parent().unwrap_or(Path::new("/")).to_owned();
    let names: Vec<OsString> =
        [document, lock].iter().filter_map(|p| p.file_name()).map(OsString::from).collect();
    // Behind a symbolic link the file may have any name.
    let any_name = fs::symlink_metadata(document).is_ok_and(|m| m.is_symlink());
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // A lost event is a reason to look.
        let relevant =
            event.is_err() || event.as_ref().is_ok_and(|e| is_change(e) && (any_name || concerns(e, &names)));
        if relevant {
            changed();
        }
    })?;
    watcher.watch(&directory, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

/// Reading is not changing.
fn is_change(event: &notify::Event) -> bool {
    use notify::event::{AccessKind, AccessMode};
    !matches!(event.kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write))
}

fn concerns(event: &notify::Event, names: &[OsString]) -> bool {
    event.need_rescan()
        || event.paths.is_empty()
        || event.paths.iter().filter_map(|p| p.file_name()).any(|n| names.iter().any(|name| name == n))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const SMALL: &str = "version: 1\nvpcs: [{name: red, vni: 7}]\n";

    #[test]
    fn only_a_change_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.yaml");
        let mut file = DocumentFile::new(&path, &dir.path().join("d.yaml.lock.yaml"));
        assert!(file.load(None).unwrap().unwrap_err().contains("d.yaml"));
        fs::write(&path, SMALL).unwrap();
        let loaded = file.load(None).unwrap().unwrap();
        assert!(loaded.world.vpcs.contains_key(&"red".parse().unwrap()));
        assert!(file.load(None).is_none());
        fs::write(&path, "version: [").unwrap();
        assert!(file.load(None).unwrap().is_err());
    }

    #[test]
    fn a_file_replaced_by_renaming_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.yaml");
        fs::write(&path, SMALL).unwrap();
        let (tx, rx) = mpsc::channel();
        let _watcher =
            watch(&path, &dir.path().join("lock"), move || tx.send(()).unwrap_or_default()).unwrap();
        for n in 0..3 {
            let new = dir.path().join("new");
            fs::write(&new, format!("{SMALL}# {n}\n")).unwrap();
            while rx.try_recv().is_ok() {}
            fs::rename(&new, &path).unwrap();
            rx.recv_timeout(Duration::from_secs(5)).unwrap_or_else(|_| panic!("rename {n} was not noticed"));
        }
    }
}
