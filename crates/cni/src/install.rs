//! `flowloom-cni install` and `uninstall`: the plugin and its network configuration, put in place whole.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flowloom_api::Client;

use crate::conflist::{self, Capability, Conflist, failed};
use crate::error::{CniError, code};
use crate::files;
use crate::retry::Backoff;
use crate::version::Version;

/// Name of the plugin's file, and `type` in network configurations.
pub const PLUGIN: &str = "flowloom-cni";
/// Name by which runtimes call the plugin of the loopback device; a link to [`PLUGIN`] where no other plugin has it.
pub const LOOPBACK: &str = "loopback";

/// What `--help` prints.
pub const USAGE: &str = "\
flowloom-cni is a CNI plugin: a container runtime runs it with CNI_COMMAND set. By hand:

  flowloom-cni install   [OPTIONS]   copy the plugin, and write the network configuration once the agent is ready
  flowloom-cni uninstall [OPTIONS]   remove both
  flowloom-cni --version

OPTIONS
  --bin-dir DIR          where runtimes look for plugins         [/opt/cni/bin]
  --conf-dir DIR         where they look for configurations      [/etc/cni/net.d]
                         (both are made when they are missing)
  --conf-name NAME       name of the configuration's file        [10-flowloom.conflist]
  --socket PATH          the agent's socket                      [/run/flowloom/agent.sock]
  --queue DIR            <state_dir>/cni-queue of the agent      [/var/lib/flowloom/cni-queue]
  --wait SECONDS         how long to wait for the agent          [60]
  --cni-version VERSION  0.4.0, 1.0.0 or 1.1.0                   [1.0.0]
  --network NAME         name of the network                     [flowloom]
  --vpc NAME, --subnet NAME, --security-group NAME (repeatable), --label KEY=VALUE (repeatable),
  --capability NAME (repeatable: portMappings, ips, mac)
                         keys of the network configuration       [none]

`install` also links `loopback` to the plugin where no plugin of that name is there; `uninstall` removes that link.

EXAMPLE
  flowloom-cni install --bin-dir /opt/cni/bin --conf-dir /etc/cni/net.d --wait 120
";

/// Options of both commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `--bin-dir`.
    pub bin_dir: PathBuf,
    /// `--conf-dir`.
    pub conf_dir: PathBuf,
    /// `--conf-name`.
    pub conf_name: String,
    /// `--wait`.
    pub wait: Duration,
    /// What the list says.
    pub list: Conflist,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bin_dir: "/opt/cni/bin".into(),
            conf_dir: "/etc/cni/net.d".into(),
            conf_name: conflist::FILE.to_owned(),
            wait: Duration::from_secs(60),
            list: Conflist::default(),
        }
    }
}

impl Options {
    /// Reads `--name value` and `--name=value`.
    ///
    /// # Errors
    /// One line that names the option.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (arg, None),
            };
            if !name.starts_with("--") {
                return Err(format!("{name:?} is not an option; see flowloom-cni --help"));
            }
            let value = inline
                .or_else(|| args.next())
                .filter(|v| !v.is_empty())
                .ok_or_else(|| format!("{name} needs a value"))?;
            let list = &mut options.list;
            match name.as_str() {
                "--bin-dir" => options.bin_dir = value.into(),
                "--conf-dir" => options.conf_dir = value.into(),
                "--conf-name" if is_conf_name(&value) => options.conf_name = value,
                "--conf-name" => {
                    return Err(format!("--conf-name: {value:?} must end in .conflist and hold no '/'"));
                }
                "--socket" | "--queue" if !value.starts_with('/') => {
                    return Err(format!("{name}: {value:?} is not an absolute path"));
                }
                "--socket" => list.socket = value,
                "--queue" => list.queue = value,
                "--wait" => {
                    let seconds =
                        value.parse().map_err(|_| format!("--wait: {value:?} is not a number of seconds"))?;
                    options.wait = Duration::from_secs(seconds);
                }
                "--cni-version" => {
                    list.version =
                        Version::parse(&value, false).map_err(|e| format!("--cni-version: {e}"))?;
                }
                "--network" => list.network = value,
                "--vpc" => list.vpc = Some(value),
                "--subnet" => list.subnet = Some(value),
                "--security-group" => list.security_groups.push(value),
                "--label" => {
                    let (k, v) = value
                        .split_once('=')
                        .ok_or_else(|| format!("--label: {value:?} is not key=value"))?;
                    list.labels.push((k.to_owned(), v.to_owned()));
                }
                "--capability" => {
                    list.capabilities.push(Capability::parse(&value).ok_or_else(|| {
                        format!("--capability: {value:?} is none of portMappings, ips, mac")
                    })?)
                }
                _ => return Err(format!("{name} is not an option; see flowloom-cni --help")),
            }
        }
        Ok(options)
    }

    fn conflist_path(&self) -> PathBuf {
        self.conf_dir.join(&self.conf_name)
    }
}

/// Whether runtimes read a list from a file of this name.
#[must_use]
pub fn is_conf_name(name: &str) -> bool {
    name.len() > ".conflist".len()
        && name.ends_with(".conflist")
        && !name.contains('/')
        && !name.starts_with('.')
}

/// Copies the plugin, waits for the agent, writes the network configuration. A runtime that finds a configuration may start containers at once,
/// so it appears last and only when the agent can serve them. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system, 7 for options that make no valid configuration, 11 when the agent is not ready in time (the plugin is in place then, the configuration is not).
pub fn install(program: &Path, options: &Options) -> Result<Vec<String>, CniError> {
    options.list.check()?;
    let mut lines = install_plugin(program, &options.bin_dir)?;
    let path = options.conflist_path();
    lines.extend(leftovers(&path)?);
    wait_ready(&options.list.socket, options.wait)?;
    lines.push(report(&path, options.list.write(&path)?));
    Ok(lines)
}

/// Copies the plugin to a directory of plugins, made when it is missing, and links `loopback` to it where no such plugin is. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system.
pub fn install_plugin(program: &Path, bin_dir: &Path) -> Result<Vec<String>, CniError> {
    std::fs::create_dir_all(bin_dir).map_err(|e| failed(bin_dir, &e))?;
    let path = bin_dir.join(PLUGIN);
    let mut lines = leftovers(&path)?;
    let contents = std::fs::read(program).map_err(|e| failed(program, &e))?;
    let wrote =
        files::replace(&path, &contents, 0o755).map_err(|e| CniError::new(code::INSTALL, e.to_string()))?;
    lines.push(report(&path, wrote));
    let link = bin_dir.join(LOOPBACK);
    // Only made where nothing is: there is no moment in which another's plugin is missing.
    match symlink(PLUGIN, &link) {
        Ok(()) => lines.push(report(&link, true)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => lines.push(report(&link, false)),
        Err(e) => return Err(failed(&link, &e)),
    }
    Ok(lines)
}

/// Removes the configuration, then the plugin. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system and for a configuration of that name that is not this plugin's.
pub fn uninstall(options: &Options) -> Result<Vec<String>, CniError> {
    let path = options.conflist_path();
    let mut lines = vec![removal(&path, conflist::remove(&path)?)];
    lines.extend(leftovers(&path)?);
    lines.extend(uninstall_plugin(&options.bin_dir)?);
    Ok(lines)
}

/// Undoes [`install_plugin`]; somebody else's `loopback` stays. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system.
pub fn uninstall_plugin(bin_dir: &Path) -> Result<Vec<String>, CniError> {
    let remove = |path: &Path| files::remove(path).map_err(|e| CniError::new(code::INSTALL, e.to_string()));
    let (plugin, link) = (bin_dir.join(PLUGIN), bin_dir.join(LOOPBACK));
    let mut lines = Vec::new();
    if std::fs::read_link(&link).is_ok_and(|to| to == Path::new(PLUGIN)) {
        lines.push(removal(&link, remove(&link)?));
    }
    lines.push(removal(&plugin, remove(&plugin)?));
    lines.extend(leftovers(&plugin)?);
    Ok(lines)
}

fn report(path: &Path, written: bool) -> String {
    format!("{} {}", if written { "wrote   " } else { "kept    " }, path.display())
}

fn removal(path: &Path, removed: bool) -> String {
    format!("{} {}", if removed { "removed " } else { "absent  " }, path.display())
}

fn leftovers(path: &Path) -> Result<Vec<String>, CniError> {
    let left = files::remove_leftovers(path).map_err(|e| CniError::new(code::INSTALL, e.to_string()))?;
    Ok(left.iter().map(|l| format!("removed  {} (left by a run that did not finish)", l.display())).collect())
}

fn wait_ready(socket: &str, wait: Duration) -> Result<(), CniError> {
    let deadline = Instant::now() + wait;
    let mut backoff = Backoff::new(deadline);
    loop {
        let problem = match Client::new(socket).with_timeout(backoff.remaining().max(MIN_TIMEOUT)).health() {
            Ok(health) if health.ready => return Ok(()),
            Ok(health) if health.waiting_for.is_empty() => "it says it is not ready".to_owned(),
            Ok(health) => format!("it waits for {}", health.waiting_for.join(", ")),
            Err(e) => e.to_string(),
        };
        if !backoff.pause() {
            let message = format!(
                "the agent at {socket} was not ready within {} s: {problem}; no network configuration was written",
                wait.as_secs()
            );
            return Err(CniError::new(code::TRY_LATER, message));
        }
    }
}

/// A health answer takes far less; `--wait 0` still asks once.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
