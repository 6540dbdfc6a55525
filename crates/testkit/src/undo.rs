//! What to undo when the test process is asked to end before its guards are dropped.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::Pid;

/// One thing to undo; undone in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Undo {
    /// Kill a child that was not waited for.
    Process(i32),
    /// Unmount.
    Mount(PathBuf),
    /// Remove a named namespace and end what runs in it.
    Netns(PathBuf),
    /// Remove a directory.
    Dir(PathBuf),
}

static ENTRIES: Mutex<BTreeMap<u64, Undo>> = Mutex::new(BTreeMap::new());
static PIPE: AtomicI32 = AtomicI32::new(-1);
static INSTALL: Once = Once::new();

/// Withdraws its entry when dropped; it undoes nothing itself.
#[derive(Debug)]
pub(crate) struct Registered(u64);

impl Drop for Registered {
    fn drop(&mut self) {
        entries().remove(&self.0);
    }
}

fn entries() -> std::sync::MutexGuard<'static, BTreeMap<u64, Undo>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers, and makes sure that a signal is noticed.
pub(crate) fn register(undo: Undo) -> Registered {
    INSTALL.call_once(install);
    let mut map = entries();
    let id = map.last_key_value().map_or(1, |(k, _)| k + 1);
    map.insert(id, undo);
    Registered(id)
}

extern "C" fn on_signal(signal: libc::c_int) {
    let byte = [u8::try_from(signal).unwrap_or(0)];
    // SAFETY: write(2) is async-signal-safe; the buffer is on this stack; the pipe is never closed once it is stored.
    unsafe {
        libc::write(PIPE.load(Ordering::Relaxed), byte.as_ptr().cast(), 1);
    }
}

fn install() {
    let Ok((reader, writer)) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC) else { return };
    PIPE.store(writer.as_raw_fd(), Ordering::Relaxed);
    // Lives until the process ends: the handler may run at any time.
    std::mem::forget(writer);
    let started = std::thread::Builder::new().name("undo".into()).spawn(move || watch(&reader));
    if started.is_err() {
        return;
    }
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let ours = SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler calls nothing but write(2) and touches one atomic.
        let _ = unsafe { sigaction(signal, &ours) };
    }
}

fn watch(reader: &OwnedFd) {
    let mut byte = [0u8; 1];
    loop {
        match nix::unistd::read(reader, &mut byte) {
            Ok(1) => break,
            Err(nix::errno::Errno::EINTR) => {}
            _ => return,
        }
    }
    let mut all: Vec<Undo> = entries().values().cloned().collect();
    all.sort();
    for undo in all {
        run(&undo);
    }
    // End as the signal would have ended it.
    if let Ok(signal) = Signal::try_from(i32::from(byte[0])) {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: sets the default action, no handler is involved.
        let _ = unsafe { sigaction(signal, &default) };
        let _ = nix::sys::signal::kill(Pid::this(), signal);
    }
}

/// Best effort: there is nobody left to tell.
fn run(undo: &Undo) {
    match undo {
        Undo::Process(pid) => {
            let _ = nix::sys::signal::kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        Undo::Mount(path) => {
            let _ = nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH);
        }
        Undo::Netns(path) => {
            let _ = crate::ns::remove(path);
        }
        Undo::Dir(path) => {
            crate::temp::remove_with_mounts(path);
        }
    }
}
