//! `flowloom-cni install` and `uninstall`: the plugin and its network configuration, put in place whole.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flowloom_api::{Client, DEFAULT_SOCKET};
use serde_json::{Map, Value, json};

use crate::error::{CniError, code};
use crate::files;
use crate::retry::Backoff;
use crate::version::Version;

/// Name of the plugin's file, and `type` in network configurations.
pub const PLUGIN: &str = "flowloom-cni";
/// Name of the network configuration's file.
pub const CONFLIST: &str = "10-flowloom.conflist";

/// What `--help` prints.
pub const USAGE: &str = "\
flowloom-cni is a CNI plugin: a container runtime runs it with CNI_COMMAND set. By hand:

  flowloom-cni install   [OPTIONS]   copy the plugin, and write the network configuration once the agent is ready
  flowloom-cni uninstall [OPTIONS]   remove both
  flowloom-cni --version

OPTIONS
  --bin-dir DIR          where runtimes look for plugins         [/opt/cni/bin]
  --conf-dir DIR         where they look for configurations      [/etc/cni/net.d]
  --socket PATH          the agent's socket                      [/run/flowloom/agent.sock]
  --wait SECONDS         how long to wait for the agent          [60]
  --cni-version VERSION  0.4.0, 1.0.0 or 1.1.0                   [1.0.0]
  --network NAME         name of the network                     [flowloom]
  --vpc NAME, --subnet NAME, --security-group NAME (repeatable), --label KEY=VALUE (repeatable)
                         keys of the network configuration       [none]

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
    /// `--socket`.
    pub socket: String,
    /// `--wait`.
    pub wait: Duration,
    /// `--cni-version`.
    pub version: Version,
    /// `--network`.
    pub network: String,
    /// `--vpc`.
    pub vpc: Option<String>,
    /// `--subnet`.
    pub subnet: Option<String>,
    /// `--security-group`.
    pub security_groups: Vec<String>,
    /// `--label`.
    pub labels: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bin_dir: "/opt/cni/bin".into(),
            conf_dir: "/etc/cni/net.d".into(),
            socket: DEFAULT_SOCKET.to_owned(),
            wait: Duration::from_secs(60),
            version: Version::V1_0_0,
            network: "flowloom".to_owned(),
            vpc: None,
            subnet: None,
            security_groups: Vec::new(),
            labels: Vec::new(),
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
            match name.as_str() {
                "--bin-dir" => options.bin_dir = value.into(),
                "--conf-dir" => options.conf_dir = value.into(),
                "--socket" if value.starts_with('/') => options.socket = value,
                "--socket" => return Err(format!("--socket: {value:?} is not an absolute path")),
                "--wait" => {
                    let seconds =
                        value.parse().map_err(|_| format!("--wait: {value:?} is not a number of seconds"))?;
                    options.wait = Duration::from_secs(seconds);
                }
                "--cni-version" => {
                    options.version = Version::parse(&value).map_err(|e| format!("--cni-version: {e}"))?;
                }
                "--network" => options.network = value,
                "--vpc" => options.vpc = Some(value),
                "--subnet" => options.subnet = Some(value),
                "--security-group" => options.security_groups.push(value),
                "--label" => {
                    let (k, v) = value
                        .split_once('=')
                        .ok_or_else(|| format!("--label: {value:?} is not key=value"))?;
                    options.labels.push((k.to_owned(), v.to_owned()));
                }
                _ => return Err(format!("{name} is not an option; see flowloom-cni --help")),
            }
        }
        Ok(options)
    }

    fn plugin_path(&self) -> PathBuf {
        self.bin_dir.join(PLUGIN)
    }

    fn conflist_path(&self) -> PathBuf {
        self.conf_dir.join(CONFLIST)
    }

    /// The network configuration list.
    #[must_use]
    pub fn conflist(&self) -> String {
        let mut plugin = Map::new();
        plugin.insert("type".into(), PLUGIN.into());
        plugin.insert("socket".into(), self.socket.as_str().into());
        if let Some(vpc) = &self.vpc {
            plugin.insert("vpc".into(), vpc.as_str().into());
        }
        if let Some(subnet) = &self.subnet {
            plugin.insert("subnet".into(), subnet.as_str().into());
        }
        if !self.security_groups.is_empty() {
            plugin.insert("security_groups".into(), self.security_groups.clone().into());
        }
        if !self.labels.is_empty() {
            let labels: Map<String, Value> =
                self.labels.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
            plugin.insert("labels".into(), labels.into());
        }
        let list = json!({ "cniVersion": self.version.as_str(), "name": self.network, "plugins": [plugin] });
        format!("{list:#}\n")
    }
}

/// Copies the plugin, waits for the agent, writes the network configuration. A runtime that finds a configuration may start containers at once,
/// so it appears last and only when the agent can serve them. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system, 7 for options that make no valid configuration, 11 when the agent is not ready in time (the plugin is in place then, the configuration is not).
pub fn install(program: &Path, options: &Options) -> Result<Vec<String>, CniError> {
    let conflist = options.conflist();
    self_check(&conflist)?;
    let mut lines = Vec::new();
    let failed = |e: std::io::Error| CniError::new(code::INSTALL, e.to_string());
    for path in [options.plugin_path(), options.conflist_path()] {
        for left in files::remove_leftovers(&path).map_err(failed)? {
            lines.push(format!("removed  {} (left by a run that did not finish)", left.display()));
        }
    }
    let contents = std::fs::read(program)
        .map_err(|e| CniError::new(code::INSTALL, format!("{}: {e}", program.display())))?;
    let report = |path: &Path, written: bool| {
        format!("{} {}", if written { "wrote   " } else { "kept    " }, path.display())
    };
    let path = options.plugin_path();
    lines.push(report(&path, files::replace(&path, &contents, 0o755).map_err(failed)?));
    wait_ready(&options.socket, options.wait)?;
    let path = options.conflist_path();
    lines.push(report(&path, files::replace(&path, conflist.as_bytes(), 0o644).map_err(failed)?));
    Ok(lines)
}

/// Removes the configuration, then the plugin. Returns lines for people.
///
/// # Errors
/// Code 104 for the file system and for a configuration of that name that is not this plugin's.
pub fn uninstall(options: &Options) -> Result<Vec<String>, CniError> {
    let failed = |e: std::io::Error| CniError::new(code::INSTALL, e.to_string());
    let conflist = options.conflist_path();
    if let Ok(text) = std::fs::read_to_string(&conflist)
        && !text.contains(PLUGIN)
    {
        let message = format!(
            "{} does not name {PLUGIN}: it is not this plugin's, remove it by hand",
            conflist.display()
        );
        return Err(CniError::new(code::INSTALL, message));
    }
    let mut lines = Vec::new();
    for path in [conflist, options.plugin_path()] {
        let removed = files::remove(&path).map_err(failed)?;
        lines.push(format!("{} {}", if removed { "removed " } else { "absent  " }, path.display()));
        for left in files::remove_leftovers(&path).map_err(failed)? {
            lines.push(format!("removed  {} (left by a run that did not finish)", left.display()));
        }
    }
    Ok(lines)
}

/// The plugin must accept what it writes.
fn self_check(conflist: &str) -> Result<(), CniError> {
    let mut list: Value = serde_json::from_str(conflist)
        .map_err(|e| CniError::config("the network configuration is not JSON").with_details(e.to_string()))?;
    let mut plugin = list["plugins"][0].take();
    plugin["cniVersion"] = list["cniVersion"].take();
    plugin["name"] = list["name"].take();
    let raw = crate::config::RawConfig::decode(plugin.to_string().as_bytes())?;
    crate::config::NetworkConfig::check(&raw).map(drop)
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
