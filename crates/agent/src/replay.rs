//! DELs that the plugin wrote down while no agent served: done before anything else is, and whenever one appears.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use flowloom_api::v1::{self, CniAttachment, ErrorCode};
use flowloom_cni::queue::{self, Entry};
use notify::event::{ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use crate::cni::Stages;
use crate::core::{Core, Handle};
use crate::desk::Verb;
use crate::record::Record;
use crate::writes;

/// Devices removed at a time.
const THREADS: usize = 8;
/// A temporary file of this age has no plugin that writes it.
const ABANDONED: Duration = Duration::from_secs(3600);

/// The queue, and what came of it.
#[derive(Debug)]
pub(crate) struct Replays {
    directory: PathBuf,
    replayed: u64,
    outdated: u64,
}

impl Replays {
    /// Makes the directory, mode 0700, below the state directory.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn open(state_dir: &Path) -> io::Result<Self> {
        let directory = state_dir.join(queue::DIRECTORY);
        if !directory.is_dir() {
            writes::before("queue");
            DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
            writes::made(1);
        }
        if fs::metadata(&directory)?.permissions().mode() & 0o077 != 0 {
            fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
        }
        for file in fs::read_dir(&directory)?.take(queue::MAX_FILES) {
            let path = file?.path();
            let age = |m: fs::Metadata| SystemTime::now().duration_since(m.modified().ok()?).ok();
            if path.extension().is_some_and(|e| e == "tmp")
                && fs::symlink_metadata(&path).ok().and_then(age).is_some_and(|a| a > ABANDONED)
            {
                fs::remove_file(&path)?;
            }
        }
        Ok(Self { directory, replayed: 0, outdated: 0 })
    }

    /// For the API.
    #[must_use]
    pub(crate) fn report(&self) -> v1::CniQueue {
        let listing = queue::list(&self.directory).unwrap_or_default();
        v1::CniQueue {
            path: self.directory.display().to_string(),
            waiting: listing.entries.len() as u64,
            replayed: self.replayed,
            outdated: self.outdated,
            unreadable: listing.unreadable as u64,
        }
    }
}

/// Tells the core of every entry that appears: a plugin that found no agent may write after the agent has looked.
///
/// # Errors
/// When the directory cannot be watched.
pub(crate) fn watch(state_dir: &Path, core: Handle) -> notify::Result<RecommendedWatcher> {
    let appeared = |event: &notify::Event| {
        let kind = matches!(
            event.kind,
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Both))
        );
        event.need_rescan()
            || kind && event.paths.last().is_some_and(|p| p.extension().is_some_and(|e| e == "json"))
    };
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // A lost event is a reason to look.
        if event.as_ref().map_or(true, appeared) {
            core.tell(Core::replay_now);
        }
    })?;
    watcher.watch(&state_dir.join(queue::DIRECTORY), RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

impl Core {
    /// Serves what waits; a part of a pass.
    pub(crate) fn replay(&mut self) {
        match queue::list(&self.replays.directory) {
            Ok(listing) => self.replay_entries(listing.entries),
            Err(e) => self.note_error(format!("queue {}: {e}", self.replays.directory.display())),
        }
    }

    /// The same outside a pass.
    pub(crate) fn replay_now(&mut self) {
        // Before the first document nothing is deleted; the first pass looks again.
        if self.require_document().is_err() {
            return;
        }
        let (start, writes_before) = (Instant::now(), writes::total());
        self.last.errors.clear();
        self.replay();
        self.finish(start, writes_before);
    }

    /// Serves what waits of these attachments, before they are added again.
    pub(crate) fn replay_of<'a>(&mut self, attachments: impl Iterator<Item = &'a CniAttachment>) {
        let entries: Vec<PathBuf> =
            attachments.filter_map(|a| queue::of(&self.replays.directory, a)).collect();
        self.replay_entries(entries);
    }

    fn replay_entries(&mut self, paths: Vec<PathBuf>) {
        if paths.is_empty() {
            return;
        }
        let start = Instant::now();
        let mut served = Vec::new();
        let mut records: Vec<Record> = Vec::new();
        for path in paths {
            let Some((path, entry)) = self.take_entry(&path) else { continue };
            let meant = self.meant_by(&entry);
            if meant.is_empty() {
                self.replays.outdated += 1;
            }
            let keys: Vec<_> = meant.iter().map(|r| r.key.clone()).collect();
            for record in meant {
                if !records.iter().any(|r| r.key == record.key) {
                    records.push(record);
                }
            }
            served.push((path, entry, keys));
        }
        if !records.is_empty() {
            self.remove_records(records);
        }
        for (path, entry, keys) in served {
            let left = keys.iter().any(|key| self.records.contains_key(key));
            let code = left.then_some(ErrorCode::Realise);
            self.desk.count(Verb::Replay, start, code);
            if left {
                // Its error is noted; the next pass tries again.
                continue;
            }
            tracing::info!(attachment = %entry.request.attachment, endpoints = keys.len(), "a DEL of the queue is done");
            self.replays.replayed += 1;
            writes::before("queue entry");
            match queue::finish(&path) {
                Ok(()) => writes::made(1),
                Err(e) => self.note_error(e.to_string()),
            }
        }
    }

    /// Takes and reads one; what is no entry is told and set aside.
    fn take_entry(&mut self, path: &Path) -> Option<(PathBuf, Entry)> {
        writes::before("queue entry");
        let path = match queue::take(path) {
            Ok(path) => path?,
            Err(e) => {
                self.note_error(format!("{}: {e}", path.display()));
                return None;
            }
        };
        match queue::read(&path) {
            Ok(entry) => Some((path, entry)),
            Err(e) => {
                tracing::error!(error = %e, "a DEL of the queue cannot be read; what it meant is left for GC");
                if let Err(e) = queue::set_aside(&path) {
                    self.note_error(format!("{}: {e}", path.display()));
                }
                None
            }
        }
    }

    /// The attachments a DEL was about: those of its name that there were when it was called.
    fn meant_by(&self, entry: &Entry) -> Vec<Record> {
        let older = |record: &&Record| {
            let added = record.cni.as_ref().and_then(|c| c.added.as_ref());
            added.is_none_or(|added| match added.is_after(&entry.started) {
                Some(later) => !later,
                // What the present boot has is newer than what an earlier one asked for.
                None => added.boot != self.born.boot,
            })
        };
        let keys = self.attachments_of(&entry.request);
        keys.iter().filter_map(|key| self.records.get(key)).filter(older).cloned().collect()
    }

    /// All of a DEL of each. What the kernel refuses is noted, and stays out of force.
    fn remove_records(&mut self, records: Vec<Record>) {
        let label = format!("{} of the queue", records.len());
        let mut leaving = self.begin_leaving(records, Stages::new(), "DEL", label);
        let parts = leaving.shares(THREADS).map(|part| (self.wiring.remover(), part));
        let results = thread::scope(|s| {
            let workers: Vec<_> = parts
                .map(|(remove, part)| {
                    let work = move || -> Vec<_> {
                        part.iter().map(|r| remove(&r.wire).map_err(|e| e.to_string())).collect()
                    };
                    (part.len(), s.spawn(work))
                })
                .collect();
            let ended = |n| vec![Err("the thread that removes devices panicked".to_owned()); n];
            workers.into_iter().flat_map(|(n, w)| w.join().unwrap_or_else(|_| ended(n))).collect()
        });
        self.finish_leaving(&mut leaving, results);
    }
}
