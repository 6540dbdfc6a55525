//! A member of the lab (control plane or node): a set of namespaces whose first process is this program.
//!
//! [`launch`] starts it from outside; [`enter`] runs a command in it. What happens inside is in [`crate::init`].

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::cgroups::{self, Group};
use crate::{supervisor, wait};

/// What a member needs to know of itself: `member.json` in its directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Member {
    /// `cp`, `n1`, `n2`...
    pub(crate) name: String,
    /// Its directory below the lab's state.
    pub(crate) dir: PathBuf,
    /// Its network namespace, by name.
    pub(crate) netns: String,
    pub(crate) groups: Vec<Group>,
    /// Addresses of name servers for its `/etc/resolv.conf`.
    pub(crate) resolvers: Vec<String>,
}

const FILE: &str = "member.json";
const INIT_PID: &str = "init.pid";

impl Member {
    pub(crate) fn load(dir: &Path) -> Result<Self> {
        let file = dir.join(FILE);
        let text = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("init.sock")
    }

    /// The host's number of the member's first process, when it is still that.
    pub(crate) fn init_pid(&self) -> Option<i32> {
        let pid = fs::read_to_string(self.dir.join(INIT_PID)).ok()?.trim().parse::<i32>().ok()?;
        // The number may have been given away since: only a process of this namespace counts.
        let named = fs::metadata(Path::new("/run/netns").join(&self.netns)).ok()?;
        let of_pid = fs::metadata(format!("/proc/{pid}/ns/net")).ok()?;
        use std::os::unix::fs::MetadataExt;
        ((named.dev(), named.ino()) == (of_pid.dev(), of_pid.ino())).then_some(pid)
    }

    pub(crate) fn record_init(&self, pid: u32) -> Result<()> {
        Ok(fs::write(self.dir.join(INIT_PID), pid.to_string())?)
    }
}

/// Starts the member's first process and waits until it answers.
pub(crate) fn launch(program: &Path, member: &Member) -> Result<()> {
    fs::create_dir_all(&member.dir)?;
    fs::write(member.dir.join(FILE), serde_json::to_vec_pretty(member)?)?;
    let log = fs::File::create(member.dir.join("init.log"))?;
    let status = Command::new(program)
        .arg("member-start")
        .arg(&member.dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .status()
        .with_context(|| format!("starting {}", program.display()))?;
    let said = || fs::read_to_string(member.dir.join("init.log")).unwrap_or_default();
    ensure!(status.success(), "member {}: {}", member.name, said());
    wait::until(Duration::from_secs(20), "the member's first process", || {
        supervisor::ping(&member.socket()).with_context(said)
    })
}

/// Hidden command `member-start DIR`: makes the namespaces, starts the first process in them, ends.
///
/// # Errors
/// When the kernel refuses a namespace.
pub fn start_command(dir: &Path) -> Result<()> {
    let member = Member::load(dir)?;
    cgroups::join_roots(&member.groups)?;
    let netns = fs::File::open(Path::new("/run/netns").join(&member.netns))?;
    setns(netns, CloneFlags::CLONE_NEWNET)?;
    let new = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWCGROUP
        | CloneFlags::CLONE_NEWPID;
    unshare(new).context("making namespaces")?;
    let child = Command::new("/proc/self/exe").arg("member-init").arg(dir).process_group(0).spawn()?;
    // It outlives this process on purpose; its number is the host's.
    member.record_init(child.id())
}

/// Hidden command `member-enter DIR -- COMMAND`: becomes the command, inside the member's namespaces and groups.
///
/// # Errors
/// When the member is gone, or the command cannot be started.
pub fn enter_command(dir: &Path, command: &[String]) -> Result<std::convert::Infallible> {
    let member = Member::load(dir)?;
    let pid = member.init_pid().with_context(|| format!("{} is not running", member.name))?;
    cgroups::join_member(&member.groups)?;
    let pid = Pid::from_raw(pid).to_string();
    let failed = Command::new("nsenter")
        .args(["--target", &pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--"])
        .args(command)
        .exec();
    Err(failed).context("starting nsenter (package util-linux)")
}

/// The argument vector that runs a command in the member.
pub(crate) fn enter(program: &Path, member: &Member, command: &[&str]) -> Vec<String> {
    let mut argv = vec![
        program.display().to_string(),
        "member-enter".into(),
        member.dir.display().to_string(),
        "--".into(),
    ];
    argv.extend(command.iter().map(|&c| c.to_owned()));
    argv
}
