//! Keeps the network configuration of container runtimes: there while the agent can serve an ADD, gone while it runs and cannot.
//!
//! An agent that stops leaves it: its next life is seconds away, ADDs wait that long, and a node without a configuration is not ready.

use std::path::{Path, PathBuf};

use flowloom_api::v1::CniConflist;
use flowloom_cni::conflist::{self, Capability, Conflist};
use flowloom_cni::install;
use flowloom_cni::queue;
use flowloom_cni::version::Version;

use crate::config::Config;
use crate::writes;

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Keeper {
    /// `None`: the configuration wants none kept.
    wanted: Option<Wanted>,
    /// What is there; `None` while that is not known.
    installed: Option<bool>,
    error: String,
}

#[derive(Debug)]
struct Wanted {
    path: PathBuf,
    list: Conflist,
    bin_dir: Option<PathBuf>,
}

/// Path of the list that a configuration wants kept.
#[must_use]
pub(crate) fn path(config: &Config) -> Option<PathBuf> {
    let directory = &config.cni.conf_dir;
    (!directory.as_os_str().is_empty()).then(|| directory.join(&config.cni.conf_name))
}

/// What the list says.
///
/// # Errors
/// One line when the version is none of the plugin's.
pub(crate) fn list(config: &Config) -> Result<Conflist, String> {
    let text = |path: &Path| path.display().to_string();
    Ok(Conflist {
        version: Version::parse(&config.cni.version, false).map_err(|e| e.to_string())?,
        network: config.cni.network.clone(),
        socket: text(&config.socket),
        queue: text(&config.state_dir.join(queue::DIRECTORY)),
        capabilities: if config.cni.port_mappings { vec![Capability::PortMappings] } else { Vec::new() },
        ..Conflist::default()
    })
}

impl Keeper {
    /// Looks at nothing yet.
    #[must_use]
    pub(crate) fn new(config: &Config) -> Self {
        // Checked when the configuration was read.
        let wanted = path(config).zip(list(config).ok()).map(|(path, list)| {
            let bin_dir = &config.cni.bin_dir;
            Wanted { path, list, bin_dir: (!bin_dir.as_os_str().is_empty()).then(|| bin_dir.clone()) }
        });
        Self { wanted, installed: None, error: String::new() }
    }

    /// Makes it so. Looks at the disk when that was never done, something went wrong, or `ready` is new.
    pub(crate) fn follow(&mut self, ready: bool) {
        let Some(wanted) = &self.wanted else { return };
        if self.installed == Some(ready) && self.error.is_empty() {
            return;
        }
        writes::before("network configuration");
        let result =
            if ready { wanted.install() } else { conflist::remove(&wanted.path).map_err(|e| e.to_string()) };
        match result {
            Ok(wrote) => {
                if wrote {
                    tracing::info!(path = %wanted.path.display(), ready, "network configuration");
                }
                writes::made(usize::from(wrote));
                self.installed = Some(ready);
                self.error.clear();
            }
            Err(e) => {
                if self.error != e {
                    tracing::error!(error = %e, "the network configuration is not as it should be");
                }
                self.error = e;
            }
        }
    }

    /// Somebody may have removed it: the next [`Self::follow`] looks.
    pub(crate) fn doubt(&mut self) {
        self.installed = None;
    }

    /// For the API; `None` when none is kept.
    #[must_use]
    pub(crate) fn report(&self) -> Option<CniConflist> {
        let wanted = self.wanted.as_ref()?;
        Some(CniConflist {
            path: wanted.path.display().to_string(),
            installed: wanted.path.is_file(),
            error: self.error.clone(),
        })
    }
}

impl Wanted {
    /// The plugin first: a runtime that finds the list may call it at once.
    fn install(&self) -> Result<bool, String> {
        if let Some(bin_dir) = &self.bin_dir {
            let plugin = beside_the_agent().map_err(|e| format!("{}: {e}", install::PLUGIN))?;
            install::install_plugin(&plugin, bin_dir).map_err(|e| e.to_string())?;
        }
        self.list.write(&self.path).map_err(|e| e.to_string())
    }
}

fn beside_the_agent() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(install::PLUGIN))
}

/// Removes what [`Keeper`] keeps, for `uninstall`. Returns what could not be removed.
pub(crate) fn remove(config: &Config) -> Vec<String> {
    let mut errors = Vec::new();
    let Some(path) = path(config) else { return errors };
    errors.extend(conflist::remove(&path).err().map(|e| e.to_string()));
    if !config.cni.bin_dir.as_os_str().is_empty() {
        errors.extend(install::uninstall_plugin(&config.cni.bin_dir).err().map(|e| e.to_string()));
    }
    errors
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn keeper(dir: &Path) -> (Keeper, PathBuf) {
        let mut config = Config::for_node("n1".parse().unwrap());
        config.cni.conf_dir = dir.join("net.d");
        (Keeper::new(&config), config.cni.conf_dir.join(&config.cni.conf_name))
    }

    #[test]
    fn the_list_is_there_exactly_while_the_agent_is_ready() {
        let dir = tempfile::tempdir().unwrap();
        let (mut keeper, path) = keeper(dir.path());
        fs::create_dir(dir.path().join("net.d")).unwrap();
        fs::write(&path, "{\"plugins\":[{\"type\":\"flowloom-cni\"}]}").unwrap();
        keeper.follow(false);
        assert!(!path.exists(), "what an earlier life left");
        keeper.follow(true);
        let list: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(list["plugins"][0]["queue"], "/var/lib/flowloom/cni-queue");
        assert!(
            list["plugins"][0].get("capabilities").is_none(),
            "host ports are not declared before they are served"
        );
        assert!(keeper.report().unwrap().installed);
        // Somebody removed it.
        fs::remove_file(&path).unwrap();
        keeper.follow(true);
        assert!(!path.exists(), "a pass looks at no file");
        keeper.doubt();
        keeper.follow(true);
        assert!(path.exists());
        keeper.follow(false);
        assert!(!path.exists());
    }

    #[test]
    fn somebody_elses_list_is_told_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let (mut keeper, path) = keeper(dir.path());
        fs::create_dir(dir.path().join("net.d")).unwrap();
        fs::write(&path, "{}").unwrap();
        keeper.follow(true);
        assert!(keeper.report().unwrap().error.contains("not this plugin's"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
        fs::remove_file(&path).unwrap();
        keeper.follow(true);
        assert!(keeper.report().unwrap().error.is_empty() && path.exists());
    }
}
