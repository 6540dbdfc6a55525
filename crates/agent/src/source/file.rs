//! The desired-state document on disk. The last good one stays in force; what is bad of a new one degrades alone.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use flowloom_model::{Basis, Edited, Fault, Format, World};
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

impl Kept {
    /// Names the contents, as [`Loaded::digest`] does.
    pub(crate) fn digest(&self) -> String {
        flowloom_api::v1::digest(self.document.as_bytes(), self.lock.as_deref().map(str::as_bytes))
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
    /// The world follows from the two files alone.
    pub self_contained: bool,
}

/// What came of reading.
#[derive(Debug)]
pub(crate) enum Read {
    /// A document.
    Whole(Box<Loaded>),
    /// The world in force was changed to what the document says now; the digest is of both files.
    Edited(Edited, String),
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
    seen: Option<Seen>,
}

#[derive(Debug)]
struct Seen {
    document: Text,
    lock: Option<Vec<u8>>,
}

#[derive(Debug)]
enum Text {
    /// Ready for small edits.
    Basis(Basis),
    /// Can be made so.
    Right(Vec<u8>),
    /// Only read whole.
    Other(Vec<u8>),
}

impl Text {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Basis(basis) => basis.text(),
            Self::Right(bytes) | Self::Other(bytes) => bytes,
        }
    }
}

impl DocumentFile {
    /// Nothing is read yet.
    #[must_use]
    pub(crate) fn new(path: &Path, lock: &Path) -> Self {
        Self { path: path.to_owned(), lock: lock.to_owned(), seen: None }
    }

    /// Reads it for the first time and makes it ready for small edits: for the time that something else takes.
    pub(crate) fn begin(path: &Path, lock: &Path) -> (Self, Option<Result<Read, String>>) {
        let mut file = Self::new(path, lock);
        let read = file.load(None);
        file.prepare();
        (file, read)
    }

    /// The contents of the last attempt.
    pub(crate) fn contents(&self) -> Option<Kept> {
        let Seen { document, lock } = self.seen.as_ref()?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let lock = match lock {
            Some(bytes) => Some(text(bytes)?),
            None => None,
        };
        Some(Kept { document: text(document.bytes())?, lock, json: self.format() == Format::Json })
    }

    fn format(&self) -> Format {
        Format::of_path(&self.path)
    }

    /// Makes the next small edit cheap; in a quiet moment.
    pub(crate) fn prepare(&mut self) {
        let Some(seen) = &mut self.seen else { return };
        if let Text::Right(bytes) = &mut seen.document {
            let bytes = std::mem::take(bytes);
            seen.document = Basis::new(bytes).map_or_else(Text::Other, Text::Basis);
        }
    }

    /// Whether the last attempt was an edit.
    #[cfg(test)]
    pub(crate) fn edited(&self) -> bool {
        matches!(&self.seen, Some(Seen { document: Text::Basis(_), .. }))
    }

    /// Whether [`Self::prepare`] has something to do.
    pub(crate) fn unprepared(&self) -> bool {
        matches!(&self.seen, Some(Seen { document: Text::Right(_), .. }))
    }

    /// Reads the contents of the last attempt again, where another world is the last good one.
    pub(crate) fn again(&mut self, last_good: &World) -> Option<Result<Loaded, String>> {
        let format = self.format();
        let Seen { document, lock } = self.seen.as_ref()?;
        Some(read(document.bytes(), lock.as_deref(), format, Some(last_good)))
    }

    /// `None` when nothing changed since the last call. `in_force` is what came of the last call that succeeded.
    ///
    /// # Errors
    /// Why the file as a whole cannot be used; the caller keeps what it has.
    pub(crate) fn load(&mut self, mut in_force: Option<&mut World>) -> Option<Result<Read, String>> {
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
        if self.seen.as_ref().is_some_and(|s| s.lock == lock && s.document.bytes() == document) {
            return None;
        }
        let mut document = document;
        if let (Some(Seen { document: Text::Basis(basis), lock: held }), Some(world)) =
            (&mut self.seen, in_force.as_deref_mut())
            && *held == lock
        {
            match basis.edit(document, world) {
                Ok(edited) => {
                    let digest = flowloom_api::v1::digest(basis.text(), held.as_deref());
                    return Some(Ok(Read::Edited(edited, digest)));
                }
                Err(text) => document = text,
            }
        }
        let format = self.format();
        let result = read(&document, lock.as_deref(), format, in_force.as_deref());
        let right = format == Format::Json && result.as_ref().is_ok_and(|l| l.self_contained);
        let document = if right { Text::Right(document) } else { Text::Other(document) };
        self.seen = Some(Seen { document, lock });
        Some(
            result
                .map(|loaded| Read::Whole(Box::new(loaded)))
                .map_err(|e| format!("{}: {e}", self.path.display())),
        )
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
    let self_contained = loaded.self_contained;
    Ok(Loaded { world: loaded.world, faults: loaded.faults, digest, self_contained })
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
        let Read::Whole(loaded) = file.load(None).unwrap().unwrap() else { panic!() };
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
