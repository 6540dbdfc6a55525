//! Services of a member: started and reaped by its first process, asked for over a Unix socket. One request and one
//! answer per connection, both JSON.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// A program to keep in a member.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) log: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Start(Service),
    Signal { name: String, signal: i32 },
    List,
}

/// How a service is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Its process id inside the member.
    pub pid: i32,
    /// How it ended, in words; `None` while it runs.
    pub ended: Option<String>,
}

type Answer = std::result::Result<BTreeMap<String, State>, String>;

/// Serves until it is killed.
pub(crate) fn serve(socket: &Path) -> Result<()> {
    let _ = fs::remove_file(socket);
    let listener =
        UnixListener::bind(socket).with_context(|| format!("listening on {}", socket.display()))?;
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block()?;
    let signals = SignalFd::new(&children)?;
    let mut services = BTreeMap::new();
    loop {
        let mut fds = [
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e).context("waiting for requests"),
        }
        let ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|r| !r.is_empty());
        let (asked, ended) = (ready(&fds[0]), ready(&fds[1]));
        if ended {
            let _ = signals.read_signal();
            reap(&mut services);
        }
        if asked && let Ok((stream, _)) = listener.accept() {
            // A client that says nothing must not stop the reaping for long.
            if let Err(e) = answer(stream, &mut services) {
                eprintln!("request: {e:#}");
            }
        }
    }
}

/// Orphans of the member end here, too.
fn reap(services: &mut BTreeMap<String, State>) {
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        let (pid, how) = match status {
            WaitStatus::Exited(pid, code) => (pid, format!("exit status {code}")),
            WaitStatus::Signaled(pid, signal, _) => (pid, format!("{signal}")),
            _ => return,
        };
        for state in services.values_mut().filter(|s| s.pid == pid.as_raw()) {
            state.ended = Some(how.clone());
        }
    }
}

fn answer(mut stream: UnixStream, services: &mut BTreeMap<String, State>) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let answer: Answer = match serde_json::from_slice(&text) {
        Ok(request) => act(request, services).map(|()| services.clone()).map_err(|e| format!("{e:#}")),
        Err(e) => Err(e.to_string()),
    };
    stream.write_all(&serde_json::to_vec(&answer)?)?;
    Ok(())
}

fn act(request: Request, services: &mut BTreeMap<String, State>) -> Result<()> {
    reap(services);
    match request {
        Request::List => Ok(()),
        Request::Start(service) => {
            if services.get(&service.name).is_some_and(|s| s.ended.is_none()) {
                bail!("{} runs already", service.name);
            }
            let pid = start(&service).with_context(|| format!("starting {}", service.name))?;
            services.insert(service.name, State { pid, ended: None });
            Ok(())
        }
        Request::Signal { name, signal } => {
            let state = services.get(&name).with_context(|| format!("no service {name}"))?;
            if state.ended.is_none() {
                kill(Pid::from_raw(state.pid), Signal::try_from(signal)?)?;
            }
            Ok(())
        }
    }
}

fn start(service: &Service) -> Result<i32> {
    let (program, args) = service.argv.split_first().context("an empty command line")?;
    let log = fs::OpenOptions::new().create(true).append(true).open(&service.log)?;
    let child = Command::new(program)
        .args(args)
        .envs(service.env.iter().map(|(k, v)| (k, v)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()?;
    // Reaped by number, above.
    Ok(i32::try_from(child.id())?)
}

fn ask(socket: &Path, request: &Request) -> Result<BTreeMap<String, State>> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("no member answers on {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(&serde_json::to_vec(request)?)?;
    stream.shutdown(Shutdown::Write)?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let answer: Answer = serde_json::from_slice(&text)?;
    answer.map_err(anyhow::Error::msg)
}

pub(crate) fn ping(socket: &Path) -> Result<()> {
    list(socket).map(drop)
}

pub(crate) fn list(socket: &Path) -> Result<BTreeMap<String, State>> {
    ask(socket, &Request::List)
}

pub(crate) fn begin(socket: &Path, service: Service) -> Result<()> {
    ask(socket, &Request::Start(service)).map(drop)
}

pub(crate) fn signal(socket: &Path, name: &str, signal: Signal) -> Result<()> {
    ask(socket, &Request::Signal { name: name.to_owned(), signal: signal as i32 }).map(drop)
}
