//! The state directory: one file per endpoint, the numbers, one lock. Files are replaced whole and survive a power cut, or are
//! gone with what they describe.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::replay::Replays;
use crate::slow::watched;
use crate::writes;

/// Why the state directory refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// A file operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Another agent runs on this directory.
    #[error("another agent uses the state directory {}; give this one its own state_dir", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// A file is not what this program wrote.
    #[error("{} is damaged ({source}); move it away to start without it", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { what, path, source }
}

/// The locked state directory.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    root: PathBuf,
    _lock: Arc<Flock<File>>,
}

const ENDPOINTS: &str = "endpoints";

impl Store {
    /// Opens or makes the directory and takes its lock.
    ///
    /// # Errors
    /// [`StoreError::Locked`] when another process has it.
    pub(crate) fn open(root: &Path) -> Result<Self, StoreError> {
        for dir in [root.to_path_buf(), root.join(ENDPOINTS)] {
            if !dir.is_dir() {
                writes::before("state directory");
                fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(&dir)
                    .map_err(io_error("make the directory", &dir))?;
                writes::made(1);
            }
        }
        let mode = fs::metadata(root).map_err(io_error("read", root))?.permissions().mode();
        if mode & 0o077 != 0 {
            fs::set_permissions(root, fs::Permissions::from_mode(0o700)).map_err(io_error("close", root))?;
        }
        let path = root.join("lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("open", &path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| StoreError::Locked { path: root.to_owned() })?;
        let store = Self { root: root.to_owned(), _lock: Arc::new(lock) };
        store.sweep_temporaries()?;
        Ok(store)
    }

    /// Leftovers of writes that never finished.
    fn sweep_temporaries(&self) -> Result<(), StoreError> {
        for dir in [self.root.clone(), self.root.join(ENDPOINTS)] {
            for entry in fs::read_dir(&dir).map_err(io_error("list", &dir))? {
                let path = entry.map_err(io_error("list", &dir))?.path();
                if path.extension().is_some_and(|e| e == "tmp") {
                    fs::remove_file(&path).map_err(io_error("remove", &path))?;
                }
            }
        }
        Ok(())
    }

    /// Reads a file of the directory; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        read(&self.root.join(name))
    }

    /// Replaces a file of the directory; on return it is on the disk.
    ///
    /// # Errors
    /// When anything of that fails; the old content is then in place.
    pub(crate) fn write(&self, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
        replace(&self.root.join(name), value)
    }

    /// Reads the newest whole one of a series of files (see [`Self::write_next`]); `None` when there is none.
    ///
    /// # Errors
    /// When files of the series are there and none of them is whole.
    pub(crate) fn read_series<T: DeserializeOwned>(&self, series: &str) -> Result<Option<T>, StoreError> {
        let mut error = None;
        for (_, path) in self.series(series)?.into_iter().rev() {
            match read(&path) {
                Ok(Some(value)) => return Ok(Some(value)),
                Ok(None) => {}
                Err(e) => {
                    // Cut by a crash: the one before it is still there.
                    tracing::warn!(error = %e, "the one before it is used");
                    error.get_or_insert(e);
                }
            }
        }
        error.map_or(Ok(None), Err)
    }

    /// Writes the next file of a series; on return it is on the disk. The file before it goes afterwards: nothing is
    /// replaced, which file systems are slow at.
    ///
    /// # Errors
    /// When anything of that fails; the file before it is then in place.
    pub(crate) fn write_next(&self, series: &str, value: &impl Serialize) -> Result<(), StoreError> {
        let next = self.place_next(series, value)?;
        let path = next.path.clone();
        next.sync().inspect_err(|_| {
            // Perhaps not whole: the reader would pass over it, and the next write takes its place.
            let _ = fs::remove_file(&path);
        })
    }

    /// As [`Self::write_next`], but on return the file outlives this process only; the file before it stays until
    /// [`Unsynced::sync`].
    ///
    /// # Errors
    /// When it cannot be made; the file before it is then in place.
    pub(crate) fn place_next(&self, series: &str, value: &impl Serialize) -> Result<Unsynced, StoreError> {
        let old = self.series(series)?;
        let next = old.last().map_or(1, |(n, _)| n + 1);
        let path = self.root.join(format!("{series}-{next}.json"));
        let bytes =
            serde_json::to_vec(value).map_err(|source| StoreError::Damaged { path: path.clone(), source })?;
        writes::before("next state file");
        let mut file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("make", &path))?;
        if let Err(e) = file.write_all(&bytes) {
            // Not whole: the reader would pass over it, and the next write takes its place.
            let _ = fs::remove_file(&path);
            return Err(io_error("write", &path)(e));
        }
        writes::made(1);
        Ok(Unsynced { file, path, replaced: old.into_iter().map(|(_, path)| path).collect() })
    }

    /// Files of a series by number.
    fn series(&self, series: &str) -> Result<Vec<(u64, PathBuf)>, StoreError> {
        let mut list = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(io_error("list", &self.root))? {
            let path = entry.map_err(io_error("list", &self.root))?.path();
            let number = path.file_name().and_then(|n| {
                n.to_str()?.strip_prefix(series)?.strip_prefix('-')?.strip_suffix(".json")?.parse().ok()
            });
            list.extend(number.map(|n: u64| (n, path.clone())));
        }
        list.sort_unstable();
        Ok(list)
    }

    /// Every endpoint's record. A damaged one is reported and left alone.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub(crate) fn endpoints<T: DeserializeOwned>(&self) -> Result<(Vec<T>, Vec<StoreError>), StoreError> {
        let dir = self.root.join(ENDPOINTS);
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&dir).map_err(io_error("list", &dir))? {
            let path = entry.map_err(io_error("list", &dir))?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match read(&path) {
                Ok(Some(value)) => good.push(value),
                Ok(None) => {}
                // A power cut before it was on the disk: nobody was told of the attachment, and its device is gone, too.
                Err(_) if fs::metadata(&path).is_ok_and(|m| m.len() == 0) => {
                    tracing::info!(path = %path.display(), "an empty record is removed");
                    fs::remove_file(&path).map_err(io_error("remove", &path))?;
                }
                Err(e) => bad.push(e),
            }
        }
        Ok((good, bad))
    }

    /// Replaces one endpoint's record.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn write_endpoint(&self, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
        replace(&self.root.join(ENDPOINTS).join(format!("{name}.json")), value)
    }

    /// As [`Self::write_endpoint`], but on return the record outlives this process only, until [`Unsynced::sync`]. Enough
    /// for what a power cut takes anyway: a device in a namespace of this boot.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn place_endpoint(&self, name: &str, value: &impl Serialize) -> Result<Unsynced, StoreError> {
        let path = self.root.join(ENDPOINTS).join(format!("{name}.json"));
        let (file, temporary) = temporary(&path, value)?;
        rename(&temporary, &path)?;
        writes::made(1);
        Ok(Unsynced { file, path, replaced: Vec::new() })
    }

    /// Removes one endpoint's record; one that is gone is a success.
    ///
    /// # Errors
    /// When the file system refuses.
    pub(crate) fn remove_endpoint(&self, name: &str) -> Result<(), StoreError> {
        let path = self.root.join(ENDPOINTS).join(format!("{name}.json"));
        writes::before("endpoint record");
        match fs::remove_file(&path) {
            Ok(()) => {
                writes::made(1);
                // Not synced: a record that comes back after a power cut is found to have no device and removed again.
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(io_error("remove", &path)(e)),
        }
    }

    /// The queue of DELs below the directory.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn queue(&self) -> Result<Replays, StoreError> {
        Replays::open(&self.root).map_err(io_error("open the queue of", &self.root))
    }

    /// Now, on the clock that records have.
    ///
    /// # Errors
    /// When `/proc` is not there.
    pub(crate) fn clock(&self) -> Result<flowloom_api::v1::Moment, StoreError> {
        flowloom_cni::clock::now().map_err(io_error("read the clock for", &self.root))
    }

    /// What every whole line of a file of the directory holds; no file has no line.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn lines<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>, StoreError> {
        let path = self.root.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io_error("read", &path)(e)),
        };
        // A line that a crash cut is passed over.
        Ok(bytes.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Bytes of a file of the directory; 0 when there is none.
    pub(crate) fn size(&self, name: &str) -> usize {
        let length = fs::metadata(self.root.join(name)).map_or(0, |m| m.len());
        usize::try_from(length).unwrap_or(usize::MAX)
    }

    /// Adds whole lines to a file of the directory. They are on the disk when the kernel gets to it: a power cut may take the last of them.
    ///
    /// # Errors
    /// When the file system refuses.
    pub(crate) fn append(&self, name: &str, lines: &[u8]) -> Result<(), StoreError> {
        let path = self.root.join(name);
        writes::before("lines of a state file");
        let append = || {
            let mut file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(&path)?;
            if !ends_a_line(&mut file)? {
                file.write_all(b"\n")?;
            }
            file.write_all(lines)
        };
        append().map_err(io_error("write", &path))?;
        writes::made(1);
        Ok(())
    }

    /// Replaces all lines of such a file.
    ///
    /// # Errors
    /// When the file system refuses; the old lines are then in place.
    pub(crate) fn replace_lines(&self, name: &str, lines: &[u8]) -> Result<(), StoreError> {
        let path = self.root.join(name);
        let temporary = path.with_extension("tmp");
        writes::before("all lines of a state file");
        let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary);
        file.and_then(|mut file| file.write_all(lines))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(io_error("write", &path))?;
        writes::made(1);
        Ok(())
    }

    /// Removes everything below the directory, and it when it is then empty.
    ///
    /// # Errors
    /// The first thing that cannot be removed.
    pub(crate) fn destroy(self) -> Result<(), StoreError> {
        let endpoints = self.root.join(ENDPOINTS);
        fs::remove_dir_all(&endpoints).map_err(io_error("remove", &endpoints))?;
        let queue = self.root.join(flowloom_cni::queue::DIRECTORY);
        match fs::remove_dir_all(&queue) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", &queue)(e)),
            _ => {}
        }
        let numbers = self.series("numbers")?.into_iter().map(|(_, path)| path);
        let kept = [crate::history::FILE, crate::pins::FILE, crate::revisions::FILE, crate::reserve::FILE];
        let others = kept.into_iter().chain(["document.json", "lock"]).map(|name| self.root.join(name));
        for path in numbers.chain(others) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", &path)(e)),
                _ => {}
            }
        }
        match fs::remove_dir(&self.root) {
            // Somebody else's files: theirs to keep.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => other.map_err(io_error("remove", &self.root)),
        }
    }
}

/// Whether whole lines may follow: a crash may have cut the last one.
fn ends_a_line(file: &mut File) -> io::Result<bool> {
    if file.metadata()?.len() == 0 {
        return Ok(true);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StoreError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error("read", path)(e)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| StoreError::Damaged { path: path.to_owned(), source })
}

/// A file in its place that is not known to be on the disk.
#[derive(Debug)]
#[must_use = "a power cut takes what is not synced"]
pub(crate) struct Unsynced {
    file: File,
    path: PathBuf,
    replaced: Vec<PathBuf>,
}

impl Unsynced {
    /// On return it is on the disk, and what it takes the place of is removed. No place for tests to end the process: nobody
    /// may wait for this.
    ///
    /// # Errors
    /// When anything of that fails; what it takes the place of is then there.
    pub(crate) fn sync(self) -> Result<(), StoreError> {
        sync_file(&self.file, &self.path)?;
        sync_directory_of(&self.path)?;
        for path in &self.replaced {
            match fs::remove_file(path) {
                // The next of the series was faster.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other.map_err(io_error("remove", path))?,
            }
        }
        Ok(())
    }
}

/// Temporary file, sync, rename, sync of the directory.
fn replace(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    let (file, temporary) = temporary(path, value)?;
    sync_file(&file, &temporary)?;
    rename(&temporary, path)?;
    sync_directory_of(path)?;
    writes::made(1);
    Ok(())
}

/// What is to be at `path`, beside it.
fn temporary(path: &Path, value: &impl Serialize) -> Result<(File, PathBuf), StoreError> {
    let bytes =
        serde_json::to_vec(value).map_err(|source| StoreError::Damaged { path: path.to_owned(), source })?;
    let temporary = path.with_extension("tmp");
    writes::before("state file");
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(io_error("make", &temporary))?;
    file.write_all(&bytes).map_err(io_error("write", &temporary))?;
    Ok((file, temporary))
}

fn rename(temporary: &Path, path: &Path) -> Result<(), StoreError> {
    writes::before("state file rename");
    fs::rename(temporary, path).map_err(io_error("rename", temporary))
}

fn sync_file(file: &File, path: &Path) -> Result<(), StoreError> {
    watched("sync of a state file", || file.sync_data()).map_err(io_error("sync", path))
}

fn sync_directory_of(path: &Path) -> Result<(), StoreError> {
    let Some(dir) = path.parent() else { return Ok(()) };
    let sync = || File::open(dir).and_then(|d| d.sync_all());
    watched("sync of a directory", sync).map_err(io_error("sync", dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_removing_twice_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s")).unwrap();
        store.write_endpoint("red_web", &"a").unwrap();
        store.write_endpoint("red_web", &"b").unwrap();
        assert_eq!(store.endpoints::<String>().unwrap().0, vec!["b".to_owned()]);
        store.remove_endpoint("red_web").unwrap();
        store.remove_endpoint("red_web").unwrap();
        assert!(store.endpoints::<String>().unwrap().0.is_empty());
        assert_eq!(fs::metadata(dir.path().join("s")).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn two_agents_never_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap();
        assert!(matches!(Store::open(dir.path()), Err(StoreError::Locked { .. })));
        drop(first);
        Store::open(dir.path()).unwrap();
    }

    #[test]
    fn a_write_that_was_cut_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.write("document.json", &1).unwrap();
        fs::write(dir.path().join("document.tmp"), "{").unwrap();
        drop(store);
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.read::<u32>("document.json").unwrap(), Some(1));
        assert!(!dir.path().join("document.tmp").exists());
    }

    #[test]
    fn a_series_survives_a_write_that_was_cut() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.read_series::<u32>("numbers").unwrap(), None);
        for n in 1..=12u32 {
            store.write_next("numbers", &n).unwrap();
            assert_eq!(store.series("numbers").unwrap().len(), 1);
        }
        fs::write(dir.path().join("numbers-13.json"), "{").unwrap();
        assert_eq!(store.read_series::<u32>("numbers").unwrap(), Some(12));
        store.write_next("numbers", &14u32).unwrap();
        assert_eq!(store.read_series::<u32>("numbers").unwrap(), Some(14));
        let only: Vec<u64> = store.series("numbers").unwrap().into_iter().map(|(n, _)| n).collect();
        assert_eq!(only, vec![14]);
        fs::write(dir.path().join("numbers-14.json"), "").unwrap();
        assert!(matches!(store.read_series::<u32>("numbers"), Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn files_that_are_placed_are_read_before_and_after_they_are_synced() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let record = store.place_endpoint("red_web", &"a").unwrap();
        assert_eq!(store.endpoints::<String>().unwrap().0, vec!["a".to_owned()]);
        record.sync().unwrap();
        assert_eq!(store.endpoints::<String>().unwrap().0, vec!["a".to_owned()]);

        store.write_next("numbers", &1u32).unwrap();
        let (second, third) =
            (store.place_next("numbers", &2u32).unwrap(), store.place_next("numbers", &3u32).unwrap());
        assert_eq!(store.read_series::<u32>("numbers").unwrap(), Some(3));
        // A power cut leaves an empty file where one was not synced; the one that was is still there.
        for n in [2, 3] {
            fs::write(dir.path().join(format!("numbers-{n}.json")), "").unwrap();
        }
        assert_eq!(store.read_series::<u32>("numbers").unwrap(), Some(1));
        third.sync().unwrap();
        second.sync().unwrap();
        let left: Vec<u64> = store.series("numbers").unwrap().into_iter().map(|(n, _)| n).collect();
        assert_eq!(left, vec![3]);
    }

    #[test]
    fn a_record_that_a_power_cut_emptied_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.write_endpoint("red_a", &"a").unwrap();
        let empty = dir.path().join("endpoints/red_b.json");
        fs::write(&empty, "").unwrap();
        let (good, bad) = store.endpoints::<String>().unwrap();
        assert_eq!((good.len(), bad.len(), empty.exists()), (1, 0, false));
    }

    #[test]
    fn a_line_that_a_crash_cut_takes_no_other_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.lines::<u32>("l").unwrap(), Vec::<u32>::new());
        store.append("l", b"1\n2\n").unwrap();
        fs::write(dir.path().join("l"), "1\n[2,").unwrap();
        store.append("l", b"3\n").unwrap();
        assert_eq!(store.lines::<u32>("l").unwrap(), [1, 3]);
        store.replace_lines("l", b"4\n").unwrap();
        assert_eq!((store.lines::<u32>("l").unwrap(), store.size("l")), (vec![4], 2));
    }

    #[test]
    fn a_damaged_record_degrades_alone() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.write_endpoint("red_a", &"a").unwrap();
        fs::write(dir.path().join("endpoints/red_b.json"), "{").unwrap();
        let (good, bad) = store.endpoints::<String>().unwrap();
        assert_eq!((good.len(), bad.len()), (1, 1));
        assert!(bad[0].to_string().contains("red_b.json"), "{}", bad[0]);
    }

    #[test]
    fn destroy_leaves_what_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let store = Store::open(&root).unwrap();
        store.write("document.json", &1).unwrap();
        fs::write(root.join("theirs"), "x").unwrap();
        store.destroy().unwrap();
        let left: Vec<_> = fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, vec!["theirs"]);
    }
}
