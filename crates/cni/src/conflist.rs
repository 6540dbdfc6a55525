//! The network configuration list that container runtimes read: written whole, removed when it is ours.

use std::fs;
use std::path::Path;

use flowloom_api::DEFAULT_SOCKET;
use serde_json::{Map, Value, json};

use crate::config::{NetworkConfig, RawConfig};
use crate::error::{CniError, code};
use crate::files;
use crate::install::PLUGIN;
use crate::queue;
use crate::version::Version;

/// Name of the file, unless another is asked for.
pub const FILE: &str = "10-flowloom.conflist";

/// What the runtime may hand over beside the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    /// `portMappings`: host ports.
    PortMappings,
    /// `ips`: addresses asked for by name.
    Ips,
    /// `mac`: the MAC asked for.
    Mac,
}

impl Capability {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::PortMappings, Self::Ips, Self::Mac];

    /// As in the specification's conventions.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PortMappings => "portMappings",
            Self::Ips => "ips",
            Self::Mac => "mac",
        }
    }

    /// The one with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }
}

/// What the list says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflist {
    /// `cniVersion`.
    pub version: Version,
    /// `name`.
    pub network: String,
    /// `socket`.
    pub socket: String,
    /// `queue`.
    pub queue: String,
    /// `vpc`.
    pub vpc: Option<String>,
    /// `subnet`.
    pub subnet: Option<String>,
    /// `security_groups`.
    pub security_groups: Vec<String>,
    /// `labels`.
    pub labels: Vec<(String, String)>,
    /// `capabilities`.
    pub capabilities: Vec<Capability>,
}

impl Default for Conflist {
    fn default() -> Self {
        Self {
            version: Version::V1_0_0,
            network: "flowloom".to_owned(),
            socket: DEFAULT_SOCKET.to_owned(),
            queue: queue::DEFAULT.to_owned(),
            vpc: None,
            subnet: None,
            security_groups: Vec::new(),
            labels: Vec::new(),
            capabilities: Vec::new(),
        }
    }
}

impl Conflist {
    /// As JSON for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut plugin = Map::new();
        plugin.insert("type".into(), PLUGIN.into());
        plugin.insert("socket".into(), self.socket.as_str().into());
        plugin.insert("queue".into(), self.queue.as_str().into());
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
        if !self.capabilities.is_empty() {
            let capabilities: Map<String, Value> =
                self.capabilities.iter().map(|c| (c.name().to_owned(), true.into())).collect();
            plugin.insert("capabilities".into(), capabilities.into());
        }
        let list = json!({ "cniVersion": self.version.as_str(), "name": self.network, "plugins": [plugin] });
        format!("{list:#}\n")
    }

    /// The plugin must accept what is written.
    ///
    /// # Errors
    /// Those of the plugin.
    pub fn check(&self) -> Result<(), CniError> {
        let mut list: Value = serde_json::from_str(&self.text()).map_err(|e| {
            CniError::config("the network configuration is not JSON").with_details(e.to_string())
        })?;
        let mut plugin = list["plugins"][0].take();
        plugin["cniVersion"] = list["cniVersion"].take();
        plugin["name"] = list["name"].take();
        let raw = RawConfig::decode(plugin.to_string().as_bytes())?;
        NetworkConfig::check(&raw).map(drop)
    }

    /// Puts the list at `path`, whole or not at all; makes the directory when it is missing. Returns whether anything was written.
    ///
    /// # Errors
    /// Code 7 when the plugin would refuse it, 104 for the file system and for a file of that name that is not this plugin's.
    pub fn write(&self, path: &Path) -> Result<bool, CniError> {
        self.check()?;
        refuse_foreign(path)?;
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(|e| failed(directory, &e))?;
        }
        files::replace(path, self.text().as_bytes(), 0o644)
            .map_err(|e| CniError::new(code::INSTALL, e.to_string()))
    }
}

/// Removes a list. Returns whether it was there.
///
/// # Errors
/// Code 104 for the file system and for a file of that name that is not this plugin's.
pub fn remove(path: &Path) -> Result<bool, CniError> {
    refuse_foreign(path)?;
    files::remove(path).map_err(|e| CniError::new(code::INSTALL, e.to_string()))
}

fn refuse_foreign(path: &Path) -> Result<(), CniError> {
    match fs::read(path) {
        // What is not JSON was cut by a crash.
        Ok(bytes)
            if serde_json::from_slice::<Value>(&bytes).is_ok_and(|v| !v.to_string().contains(PLUGIN)) =>
        {
            Err(CniError::new(
                code::INSTALL,
                format!(
                    "{} does not name {PLUGIN}: it is not this plugin's, remove it by hand",
                    path.display()
                ),
            ))
        }
        _ => Ok(()),
    }
}

pub(crate) fn failed(path: &Path, e: &std::io::Error) -> CniError {
    CniError::new(code::INSTALL, format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_accepts_every_list_and_a_directory_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("net.d").join(FILE);
        let list = Conflist {
            vpc: Some("blue".into()),
            labels: vec![("a".into(), "b".into())],
            capabilities: Capability::ALL.to_vec(),
            ..Conflist::default()
        };
        assert!(list.write(&path).unwrap());
        assert!(!list.write(&path).unwrap(), "the same again is left alone");
        let read: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            read["plugins"][0]["capabilities"],
            json!({"portMappings": true, "ips": true, "mac": true})
        );
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn somebody_elses_file_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        fs::write(&path, "{\"name\":\"theirs\"}").unwrap();
        assert_eq!(Conflist::default().write(&path).unwrap_err().code, code::INSTALL);
        assert_eq!(remove(&path).unwrap_err().code, code::INSTALL);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"name\":\"theirs\"}");
    }

    #[test]
    fn a_list_that_the_plugin_would_refuse_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let list = Conflist { network: "no name".into(), ..Conflist::default() };
        assert_eq!(list.write(&path).unwrap_err().code, code::INVALID_CONFIG);
        assert!(!path.exists());
    }
}
