//! Threads that serve until they are told to stop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A thread and the event that ends it; dropped = stopped and joined.
#[derive(Debug)]
pub(crate) struct Worker<T> {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<T>>,
}

/// The thread's side.
#[derive(Debug, Clone)]
pub(crate) struct StopEvent(Arc<EventFd>);

impl StopEvent {
    /// Waits for the descriptors to become readable; true = stop.
    pub(crate) fn wait(&self, fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> bool {
        let mut list = vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        list.extend(fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)));
        let timeout =
            timeout.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
        let _ = poll(&mut list, timeout);
        list[0].any().unwrap_or(true)
    }

    /// Waits for nothing but the end of an interval; true = stop. Finer than a millisecond.
    pub(crate) fn pause(&self, interval: Duration) -> bool {
        let timeout = nix::sys::time::TimeSpec::from_duration(interval);
        let mut list = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let _ = nix::poll::ppoll(&mut list, Some(timeout), None);
        list[0].any().unwrap_or(true)
    }
}

impl<T: Send + 'static> Worker<T> {
    pub(crate) fn start(name: &str, f: impl FnOnce(StopEvent) -> T + Send + 'static) -> Result<Self> {
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let event = StopEvent(stop.clone());
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || f(event))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// What the thread returned; `None` when it panicked.
    pub(crate) fn finish(mut self) -> Option<T> {
        self.end()
    }

    /// Whether the thread has ended by itself.
    pub(crate) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl<T> Worker<T> {
    fn end(&mut self) -> Option<T> {
        let _ = self.stop.write(1);
        self.thread.take()?.join().ok()
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.end();
    }
}
