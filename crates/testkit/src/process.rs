//! Processes that end with their guard.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::net::wait;
use crate::temp::TempDir;
use crate::undo::{Registered, Undo, register};
use anyhow::{Context, Result};
use nix::poll::PollFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A descriptor of a process, which means it and no later one with the same number.
pub(crate) fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the call above returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How long a process may take to end after SIGTERM, before SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// A child process, its output kept in files. On drop it is asked to end, then killed; when the thread panics its
/// output is printed.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pidfd: OwnedFd,
    command: String,
    output: TempDir,
    ended: Option<ExitStatus>,
    registered: Option<Registered>,
}

impl Process {
    pub(crate) fn start(mut command: Command, line: String) -> Result<Self> {
        let output = crate::temp::temp_dir("out")?;
        let file = |name| File::create(output.path().join(name));
        command.stdout(Stdio::from(file("stdout")?)).stderr(Stdio::from(file("stderr")?));
        let mut child = command.spawn().with_context(|| format!("cannot start: {line}"))?;
        let pid = i32::try_from(child.id())?;
        let registered = Some(register(Undo::Process(pid)));
        let pidfd = match open_pidfd(pid) {
            Ok(fd) => fd,
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(e).with_context(|| format!("watching {line}"));
            }
        };
        Ok(Self { child, pidfd, command: line, output, ended: None, registered })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its command line.
    #[must_use]
    pub fn command(&self) -> &str {
        &self.command
    }

    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// What it printed so far.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn stdout(&self) -> Result<String> {
        self.read("stdout")
    }

    /// What it printed as errors so far.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn stderr(&self) -> Result<String> {
        self.read("stderr")
    }

    fn read(&self, name: &str) -> Result<String> {
        let bytes = std::fs::read(self.output.path().join(name))
            .with_context(|| format!("{name} of {}", self.command))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// How it ended, `None` while it runs.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
            if self.ended.is_some() {
                self.registered = None;
            }
        }
        Ok(self.ended)
    }

    /// Waits, at most until `deadline`; `None` when it still runs.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        if self.status()?.is_none() {
            // Readable once the process has ended.
            wait(self.pidfd.as_fd(), PollFlags::POLLIN, deadline);
        }
        self.status()
    }

    /// Sends a signal; nothing when it has ended.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.status()?.is_none() {
            kill(Pid::from_raw(i32::try_from(self.pid())?), signal)?;
        }
        Ok(())
    }

    /// SIGKILL, and gone when this returns.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGKILL)?;
        if let Some(status) = self.ended {
            return Ok(status);
        }
        let status = self.child.wait()?;
        self.ended = Some(status);
        self.registered = None;
        Ok(status)
    }

    /// SIGTERM, then SIGKILL after 5 s; gone when this returns.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        match self.wait_until(Instant::now() + GRACE)? {
            Some(status) => Ok(status),
            None => self.kill(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            eprintln!("{} was not ended: {e:#}", self.command);
        }
        if std::thread::panicking() {
            for (name, text) in [("stdout", self.stdout()), ("stderr", self.stderr())] {
                eprintln!("--- {name} of {}\n{}", self.command, text.unwrap_or_default());
            }
        }
    }
}
