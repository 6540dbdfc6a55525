//! DELs that no agent could be told of: a file each, in a directory of the agent's state. The plugin puts them there, the agent takes them.
//!
//! An entry says when its DEL was called. What was attached later under the same name is another attachment, and stays.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use flowloom_api::v1::{CniAttachment, CniDelRequest, Moment};
use serde::{Deserialize, Serialize};

use crate::files;

/// The directory's name below the agent's `state_dir`.
pub const DIRECTORY: &str = "cni-queue";
/// Where it is when the network configuration does not say.
pub const DEFAULT: &str = "/var/lib/flowloom/cni-queue";
/// Most files in it, leftovers included.
pub const MAX_FILES: usize = 4096;
/// Largest entry that is read, bytes.
const MAX_BYTES: u64 = 64 * 1024;
/// Longest name of a file (`NAME_MAX`), less what the temporary one adds.
const MAX_NAME: usize = 255 - 16;

const WAITING: &str = ".json";
const TAKEN: &str = ".taken";
const UNREADABLE: &str = ".unreadable";

/// One DEL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What the runtime asked for.
    pub request: CniDelRequest,
    /// When.
    pub started: Moment,
}

/// Why an entry cannot be put or read.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The directory is not there: no agent has run on this node with it.
    #[error("the queue {} does not exist; it is made by the agent", path.display())]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// Too many entries.
    #[error("the queue {} is full ({MAX_FILES} files); start the agent, it empties it", path.display())]
    Full {
        /// The directory.
        path: PathBuf,
    },
    /// Container id and interface are too long for a file's name.
    #[error("{attachment} is too long to be queued")]
    TooLong {
        /// The attachment.
        attachment: CniAttachment,
    },
    /// Not an entry.
    #[error("{} is not an entry of the queue: {problem}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The file system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Name of an attachment's entry. A container id holds no `@`, so no two attachments share one.
fn file_name(attachment: &CniAttachment) -> Result<String, QueueError> {
    let name = format!("{}@{}{WAITING}", attachment.container_id, attachment.ifname);
    let plain = !name.contains('/') && !name.starts_with('.');
    if plain && name.len() <= MAX_NAME {
        Ok(name)
    } else {
        Err(QueueError::TooLong { attachment: attachment.clone() })
    }
}

/// Puts an entry; on return it is on the disk. A second DEL of the same attachment takes the place of the first.
///
/// # Errors
/// When the directory is missing or full, or the file system refuses.
pub fn put(directory: &Path, entry: &Entry) -> Result<(), QueueError> {
    let name = file_name(&entry.request.attachment)?;
    let files = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(QueueError::Missing { path: directory.to_owned() });
        }
        other => other?.count(),
    };
    if files >= MAX_FILES {
        return Err(QueueError::Full { path: directory.to_owned() });
    }
    let bytes = serde_json::to_vec(entry).map_err(io::Error::from)?;
    files::replace(&directory.join(name), &bytes, 0o600)?;
    Ok(())
}

/// What lies in the queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// Entries, those first that were taken and not finished.
    pub entries: Vec<PathBuf>,
    /// Files that were set aside.
    pub unreadable: usize,
}

/// Lists the queue, at most [`MAX_FILES`] files. A missing directory is an empty one.
///
/// # Errors
/// When it cannot be read.
pub fn list(directory: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    let files = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(listing),
        other => other?,
    };
    for file in files.take(MAX_FILES) {
        let path = file?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if name.ends_with(UNREADABLE) {
            listing.unreadable += 1;
        } else if name.ends_with(WAITING) && !name.starts_with('.') || name.ends_with(TAKEN) {
            listing.entries.push(path);
        }
    }
    let order = |path: &PathBuf| (path.extension().is_none_or(|e| e != "taken"), path.clone());
    listing.entries.sort_by_key(order);
    Ok(listing)
}

/// The entry of an attachment, when one waits.
#[must_use]
pub fn of(directory: &Path, attachment: &CniAttachment) -> Option<PathBuf> {
    let path = directory.join(file_name(attachment).ok()?);
    fs::symlink_metadata(&path).is_ok().then_some(path)
}

/// Takes an entry: a DEL that is put under the same name from now on is not lost when this one is [`finish`]ed. Returns where it is
/// now; `None` when it is gone.
///
/// # Errors
/// When the file system refuses.
pub fn take(path: &Path) -> io::Result<Option<PathBuf>> {
    let taken = path.with_extension(&TAKEN[1..]);
    if taken == path {
        return Ok(Some(taken));
    }
    match fs::rename(path, &taken) {
        Ok(()) => Ok(Some(taken)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Reads a taken entry.
///
/// # Errors
/// [`QueueError::Unreadable`] when it is not one: [`set_aside`] is for it.
pub fn read(path: &Path) -> Result<Entry, QueueError> {
    let unreadable = |problem: String| QueueError::Unreadable { path: path.to_owned(), problem };
    let facts = fs::symlink_metadata(path)?;
    if !facts.is_file() || facts.len() > MAX_BYTES {
        return Err(unreadable(format!("it must be a file of at most {MAX_BYTES} bytes")));
    }
    let entry: Entry = serde_json::from_slice(&fs::read(path)?).map_err(|e| unreadable(e.to_string()))?;
    let own = file_name(&entry.request.attachment)?;
    if path.file_stem() != Path::new(&own).file_stem() {
        return Err(unreadable(format!("it names {}", entry.request.attachment)));
    }
    Ok(entry)
}

/// Removes an entry that has been served.
///
/// # Errors
/// When the file system refuses; one that is gone is a success.
pub fn finish(path: &Path) -> io::Result<()> {
    files::remove(path).map(drop)
}

/// Keeps what is no entry out of the way, for people to look at.
///
/// # Errors
/// When the file system refuses.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let aside = path.with_extension(&UNREADABLE[1..]);
    fs::rename(path, &aside)?;
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn entry(id: &str, ns: u64) -> Entry {
        Entry {
            request: CniDelRequest {
                attachment: CniAttachment { container_id: id.into(), ifname: "eth0".into() },
                netns: None,
                args: [("K8S_POD_UID".to_owned(), "u".to_owned())].into(),
            },
            started: Moment { boot: "b".into(), ns },
        }
    }

    fn take_all(dir: &Path) -> Vec<Entry> {
        let list = list(dir).unwrap();
        list.entries.iter().map(|p| read(&take(p).unwrap().unwrap()).unwrap()).collect()
    }

    #[test]
    fn what_is_put_is_read_back_and_gone_when_it_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &entry("a.b", 1)).unwrap();
        put(dir.path(), &entry("a.b", 2)).unwrap();
        put(dir.path(), &entry("c", 3)).unwrap();
        let path = of(dir.path(), &entry("c", 0).request.attachment).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(of(dir.path(), &entry("a", 0).request.attachment).is_none());
        assert_eq!(take_all(dir.path()), [entry("a.b", 2), entry("c", 3)]);
        for path in list(dir.path()).unwrap().entries {
            finish(&path).unwrap();
            finish(&path).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_del_that_comes_while_the_one_before_it_is_served_is_not_lost() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &entry("c", 1)).unwrap();
        let taken = take(&list(dir.path()).unwrap().entries[0]).unwrap().unwrap();
        put(dir.path(), &entry("c", 2)).unwrap();
        finish(&taken).unwrap();
        assert_eq!(take_all(dir.path()), [entry("c", 2)]);
        // One that a crash left taken is listed again, and taken again.
        assert_eq!(take_all(dir.path()), [entry("c", 2)]);
    }

    #[test]
    fn what_is_no_entry_is_told_and_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x@eth0.json"), "{").unwrap();
        fs::write(dir.path().join("z@eth0.json"), serde_json::to_vec(&entry("other", 1)).unwrap()).unwrap();
        fs::write(dir.path().join("long@eth0.json"), vec![b' '; 70_000]).unwrap();
        fs::create_dir(dir.path().join("dir@eth0.json")).unwrap();
        // The plugin's unfinished write and somebody's notes are neither.
        fs::write(dir.path().join(".y@eth0.json.12.tmp"), "{").unwrap();
        fs::write(dir.path().join("notes.txt"), "x").unwrap();
        let entries = list(dir.path()).unwrap().entries;
        assert_eq!(entries.len(), 4);
        for path in entries {
            let taken = take(&path).unwrap().unwrap();
            let e = read(&taken).unwrap_err();
            assert!(matches!(e, QueueError::Unreadable { .. }), "{e}");
            set_aside(&taken).unwrap();
        }
        assert_eq!(list(dir.path()).unwrap(), Listing { entries: vec![], unreadable: 4 });
    }

    #[test]
    fn the_queue_is_bounded_and_never_made_by_the_plugin() {
        let dir = tempfile::tempdir().unwrap();
        let e = put(&dir.path().join("none"), &entry("c", 1)).unwrap_err();
        assert!(matches!(e, QueueError::Missing { .. }) && !dir.path().join("none").exists(), "{e}");
        let e = put(dir.path(), &entry(&"x".repeat(240), 1)).unwrap_err();
        assert!(matches!(e, QueueError::TooLong { .. }), "{e}");
        for n in 0..MAX_FILES {
            fs::write(dir.path().join(n.to_string()), "").unwrap();
        }
        let e = put(dir.path(), &entry("c", 1)).unwrap_err();
        assert!(matches!(e, QueueError::Full { .. }), "{e}");
    }
}
