//! Network namespaces that go with their guard.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_netlink::sysctl::{Key, Scope, Setting};
use flowloom_netlink::{DEFAULT_DIR, Handle, IfIndex, LinkChange, Netns, NetnsId};

use crate::exec::{Cmd, Output};
use crate::process::open_pidfd;
use crate::root::require_root;
use crate::temp::left_by_the_dead;
use crate::undo::{Registered, Undo, register};

static NEXT: AtomicU32 = AtomicU32::new(0);
static SWEEP: Once = Once::new();

/// A named namespace, loopback up, without duplicate address detection (tests do not wait for it). Removed on drop,
/// together with every process that still runs in it.
#[derive(Debug)]
pub struct Ns {
    netns: Netns,
    name: String,
    _registered: Registered,
}

impl Deref for Ns {
    type Target = Netns;
    fn deref(&self) -> &Netns {
        &self.netns
    }
}

impl Ns {
    /// Makes one named `fl<pid>-<n>-<label>` under `/run/netns`.
    ///
    /// # Errors
    /// When the kernel refuses.
    ///
    /// # Panics
    /// Without root's rights.
    pub fn new(label: &str) -> Result<Self> {
        SWEEP.call_once(|| {
            require_root();
            sweep();
            crate::temp::sweep();
        });
        let name = format!("fl{}-{}-{label}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(DEFAULT_DIR).join(&name);
        let registered = register(Undo::Netns(path.clone()));
        let netns = Netns::create(Path::new(DEFAULT_DIR), &name)?;
        let ns = Self { netns, name, _registered: registered };
        let mut handle = ns.handle()?;
        let dad_off = |scope| Setting { scope, key: Key::AcceptDad, value: 0 };
        handle.ensure_sysctls(&[dad_off(Scope::All), dad_off(Scope::Default)])?;
        handle.change_link(IfIndex::LOOPBACK, &LinkChange::up())?;
        Ok(ns)
    }

    /// Its name, as `ip netns` shows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A netlink handle inside.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn handle(&self) -> Result<Handle> {
        Ok(Handle::in_netns(&self.netns)?)
    }

    /// Runs a command inside and returns what it printed, whatever its exit status; 30 s at most.
    ///
    /// # Errors
    /// When it cannot be started or takes too long.
    pub fn exec<S: AsRef<str>>(&self, argv: &[S]) -> Result<Output> {
        Cmd::new(argv).in_netns(self)?.timeout(Duration::from_secs(30)).run()
    }

    /// As [`Self::exec`], and an exit status other than 0 is an error that quotes the output.
    ///
    /// # Errors
    /// When it fails.
    pub fn exec_ok<S: AsRef<str>>(&self, argv: &[S]) -> Result<Output> {
        self.exec(argv)?.success()
    }
}

impl Drop for Ns {
    fn drop(&mut self) {
        if let Err(e) = remove(self.netns.path()) {
            eprintln!("namespace {} was not removed: {e:#}", self.name);
        }
    }
}

/// Ends what runs inside and removes the name.
pub(crate) fn remove(path: &Path) -> Result<()> {
    if let Ok(id) = Netns::open(path).and_then(|ns| ns.id()) {
        end_processes(id);
    }
    Netns::remove(path).map(drop).with_context(|| format!("removing {}", path.display()))
}

/// Kills every process whose main thread is in that namespace; a process descriptor makes sure that it is the one
/// that was looked at.
fn end_processes(id: NetnsId) {
    let inside = |pid: i32| {
        fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|m| m.dev() == id.device && m.ino() == id.inode)
    };
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    for pid in pids().into_iter().filter(|p| *p != me && inside(*p)) {
        let Ok(fd) = open_pidfd(pid) else { continue };
        if inside(pid) {
            // SAFETY: the descriptor is open; a null siginfo is allowed; the kernel reads nothing else.
            unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    fd.as_raw_fd(),
                    libc::SIGKILL,
                    std::ptr::null::<libc::siginfo_t>(),
                    0,
                );
            }
        }
    }
}

fn pids() -> BTreeSet<i32> {
    let Ok(dir) = fs::read_dir("/proc") else { return BTreeSet::new() };
    dir.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Removes namespaces of test processes that were killed before they could.
fn sweep() {
    let Ok(dir) = fs::read_dir(DEFAULT_DIR) else { return };
    let paths: Vec<PathBuf> = dir
        .flatten()
        .filter(|e| left_by_the_dead(&e.file_name().to_string_lossy()))
        .map(|e| e.path())
        .collect();
    for path in paths {
        let _ = remove(&path);
    }
}
