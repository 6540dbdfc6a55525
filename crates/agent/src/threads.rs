//! What waits beside the core: the event ring, the sweeper, netlink notifications. None of them polls.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flowloom_api::v1;
use flowloom_datapath::View;
use flowloom_datapath::conntrack::now_seconds;
use flowloom_datapath::events::now_ns;
use flowloom_netlink::{Event, Interest, Monitor};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::core::{Command, Handle, NetworkChange};
use crate::events::EventLog;

/// Events taken per turn.
const TURN: usize = 1024;
/// Longest pause of the sweeper while nothing is tracked.
const IDLE_SWEEP: Duration = Duration::from_secs(60);

/// A flag to wait on.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    set: Mutex<bool>,
    changed: Condvar,
    fast: AtomicBool,
}

impl Stop {
    /// Wakes every waiter for good.
    pub(crate) fn set(&self) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.fast.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Whether it was set before `limit` passed.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let guard = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let (guard, _) =
            self.changed.wait_timeout_while(guard, limit, |s| !*s).unwrap_or_else(PoisonError::into_inner);
        *guard
    }
}

/// Waits until `fd` is readable; `false` on errors that waiting again does not mend.
fn readable(fd: &impl AsFd) -> bool {
    loop {
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => return true,
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => {
                tracing::error!(error = %e, "poll");
                return false;
            }
        }
    }
}

/// Reads the programs' events into the log.
///
/// # Errors
/// When the ring cannot be mapped or the thread not be started.
pub(crate) fn read_events(view: &View, log: Arc<EventLog>) -> io::Result<JoinHandle<()>> {
    let mut ring = view.events().map_err(io::Error::other)?;
    thread::Builder::new().name("events".into()).spawn(move || {
        while readable(&ring) {
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let wall = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
            let Ok(monotonic) = now_ns() else { return };
            while ring.drain(TURN, |event| log.push(event, (wall, monotonic))) == TURN {}
        }
    })
}

/// Removes timed-out connections, and tells the core how many are left.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn sweep(
    view: View,
    core: Handle,
    every: Duration,
    stop: Arc<Stop>,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("sweeper".into()).spawn(move || {
        let mut swept = 0;
        let mut pause = every;
        while !stop.wait(pause) {
            let report = now_seconds().and_then(|now| view.sweep(now));
            match report {
                Ok(report) => {
                    swept += report.removed;
                    pause = if report.examined == 0 { (pause * 2).min(IDLE_SWEEP).max(every) } else { every };
                    core.send(Command::Swept(v1::ConntrackStatus {
                        established: report.established,
                        capacity: 0,
                        swept,
                    }));
                }
                Err(e) => tracing::warn!(error = %e, "connections could not be swept"),
            }
        }
    })
}

/// Hears about links and addresses that others change.
///
/// # Errors
/// When the socket cannot be opened or the thread not be started.
pub(crate) fn watch_network(core: Handle) -> io::Result<JoinHandle<()>> {
    let mut monitor = Monitor::new(&[Interest::Links, Interest::Addresses]).map_err(io::Error::other)?;
    thread::Builder::new().name("netlink".into()).spawn(move || {
        while readable(&monitor) {
            let events = match monitor.read() {
                Ok(events) => events,
                Err(e) => {
                    tracing::error!(error = %e, "netlink notifications ended");
                    return;
                }
            };
            let mut changes: Vec<NetworkChange> = events.iter().filter_map(change).collect();
            changes.dedup();
            if !changes.is_empty() {
                core.send(Command::Network(changes));
            }
        }
    })
}

fn change(event: &Event) -> Option<NetworkChange> {
    match event {
        Event::LinkRemoved(link) => Some(NetworkChange::LinkGone(link.name.clone())),
        // What the agent does itself it knows already.
        Event::LinkChanged(link) if link.is_ours() || link.kind.as_deref() == Some("veth") => None,
        Event::LinkChanged(_) | Event::AddressChanged(_) | Event::AddressRemoved(_) | Event::Lost => {
            Some(NetworkChange::Other)
        }
        Event::RouteChanged(_) | Event::RouteRemoved(_) => None,
    }
}
