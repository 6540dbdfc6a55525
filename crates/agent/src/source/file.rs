//! The desired-state document on disk. The last good one stays in force; what is bad of a new one degrades alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use flowloom_model::{Fault, Format, World};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

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

/// Calls `changed` after anything happened in the directory of the document (editors and config maps replace files by
/// renaming, so the file itself is not watched). Watching ends when the value is dropped.
///
/// # Errors
/// When the directory does not exist or cannot be watched.
pub(crate) fn watch(
    document: &Path,
    changed: impl Fn() + Send + 'static,
) -> notify::Result<RecommendedWatcher> {
    let directory = document.parent().unwrap_or(Path::new("/"));
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading is not changing; a lost event is a reason to look.
        if !matches!(&event, Ok(e) if matches!(e.kind, EventKind::Access(_)) && !closed_after_write(e)) {
            changed();
        }
    })?;
    watcher.watch(directory, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

fn closed_after_write(event: &notify::Event) -> bool {
    use notify::event::{AccessKind, AccessMode};
    event.kind == EventKind::Access(AccessKind::Close(AccessMode::Write))
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
        let _watcher = watch(&path, move || tx.send(()).unwrap_or_default()).unwrap();
        for n in 0..3 {
            let new = dir.path().join("new");
            fs::write(&new, format!("{SMALL}# {n}\n")).unwrap();
            while rx.try_recv().is_ok() {}
            fs::rename(&new, &path).unwrap();
            rx.recv_timeout(Duration::from_secs(5)).unwrap_or_else(|_| panic!("rename {n} was not noticed"));
        }
    }
}
