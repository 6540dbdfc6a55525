//! Commands: an argument vector, a namespace, a time limit, captured output.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use flowloom_netlink::Netns;

use crate::process::Process;

/// What a command printed and how it ended.
#[derive(Debug, Clone)]
pub struct Output {
    /// The command line, for messages.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Itself when the exit status is 0.
    ///
    /// # Errors
    /// With both outputs quoted.
    pub fn success(self) -> Result<Self> {
        if self.status.success() {
            return Ok(self);
        }
        bail!("{} ended with {}\nstdout: {}\nstderr: {}", self.command, self.status, self.stdout, self.stderr)
    }
}

/// A command to be run.
#[derive(Debug)]
pub struct Cmd {
    argv: Vec<String>,
    netns: Option<Netns>,
    envs: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    input: Option<Vec<u8>>,
    timeout: Duration,
}

impl Cmd {
    /// Program and arguments; no shell reads them.
    #[must_use]
    pub fn new<S: AsRef<str>>(argv: &[S]) -> Self {
        Self {
            argv: argv.iter().map(|s| s.as_ref().to_owned()).collect(),
            netns: None,
            envs: Vec::new(),
            dir: None,
            input: None,
            timeout: Duration::from_secs(30),
        }
    }

    /// Inside a namespace.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn in_netns(mut self, netns: &Netns) -> Result<Self> {
        self.netns = Some(netns.try_clone()?);
        Ok(self)
    }

    /// With an environment variable.
    #[must_use]
    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.envs.push((key.into(), value.into()));
        self
    }

    /// In a directory.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// With standard input.
    #[must_use]
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.input = Some(bytes.into());
        self
    }

    /// Killed when it takes longer; 30 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// When it cannot be started or takes too long; a failing exit status is no error here.
    pub fn run(mut self) -> Result<Output> {
        let (timeout, input) = (self.timeout, self.input.take());
        let mut process = self.start(input.is_some())?;
        if let (Some(bytes), Some(mut stdin)) = (input, process.take_stdin()) {
            // In a thread of its own: a command that prints before it reads must not wait for us.
            std::thread::spawn(move || stdin.write_all(&bytes));
        }
        let deadline = Instant::now() + timeout;
        match process.wait_until(deadline)? {
            Some(status) => Ok(Output {
                command: process.command().to_owned(),
                status,
                stdout: process.stdout()?,
                stderr: process.stderr()?,
            }),
            None => bail!(
                "{} did not end within {timeout:?}\nstdout: {}\nstderr: {}",
                process.command(),
                process.stdout()?,
                process.stderr()?
            ),
        }
    }

    /// Starts it as a guarded process that goes on.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(self) -> Result<Process> {
        self.start(false)
    }

    fn start(self, piped_input: bool) -> Result<Process> {
        let line = self.argv.join(" ");
        let (program, args) = self.argv.split_first().context("an empty command line")?;
        let mut command = Command::new(program);
        command.args(args).envs(self.envs);
        command.stdin(if piped_input { Stdio::piped() } else { Stdio::null() });
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        if let Some(ns) = self.netns {
            enter_before_exec(&mut command, ns)?;
        }
        Process::start(command, line)
    }
}

fn enter_before_exec(command: &mut Command, netns: Netns) -> Result<()> {
    let fd: OwnedFd = std::os::fd::AsFd::as_fd(&netns).try_clone_to_owned()?;
    // SAFETY: between fork and exec the closure only calls setns(2), which is async-signal-safe, on a descriptor that
    // the closure owns.
    unsafe {
        command.pre_exec(move || {
            if libc::setns(fd.as_raw_fd(), libc::CLONE_NEWNET) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
    Ok(())
}
