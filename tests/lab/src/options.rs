//! What a lab is asked to be.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Who wires Pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cni {
    /// `flowloom-agent` and `flowloom-cni`, freshly built.
    Flowloom,
    /// The reference `bridge`, `host-local` and `portmap` plugins with static routes between nodes: the peer.
    Reference,
    /// Nobody: nodes stay not ready until a configuration appears in a node's CNI directory.
    None,
}

/// Who serves Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Proxy {
    /// kube-proxy in nftables mode.
    KubeProxy,
    /// Nobody of Kubernetes' own.
    None,
}

/// Address families of Pods and Services; nodes always have both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Families {
    /// IPv4 first, then IPv6.
    Dual,
    /// IPv4 alone.
    Ipv4,
}

/// How flowloom reaches other nodes' Pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Routes {
    /// Through the tunnel, as the manifests have it.
    Vxlan,
    /// By routes to the nodes' addresses.
    Direct,
}

/// Everything `up` takes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Options {
    /// Name of the lab: at most 8 letters and digits; labs of different names run side by side.
    pub name: String,
    /// Number of nodes, 1 to 9.
    pub nodes: u8,
    /// Who wires Pods.
    pub cni: Cni,
    /// Who serves Services.
    pub proxy: Proxy,
    /// Address families.
    pub families: Families,
    /// flowloom's `routes`.
    pub routes: Routes,
    /// Directory of manifests to apply: namespaces, RBAC, CRDs and the rest, but no workloads. With flowloom, the
    /// repository's `deploy/` unless another is named.
    pub manifests: Option<PathBuf>,
    /// Nobody acts on objects: no scheduler, controllers, runtimes, kubelets, CNI. The API server notes who of flowloom asked what
    /// ([`crate::Lab::requests`]); its programs are started by [`crate::Lab::start_controller`] and [`crate::Lab::start_agents`].
    #[serde(default)]
    pub objects_only: bool,
    /// Load the images that upstream's suites run, and start the cluster's DNS.
    pub suites: bool,
    /// Where flowloom's own programs are, and this crate's.
    pub bin_dir: PathBuf,
    /// The process whose end makes this lab garbage; `None` lives until `down`.
    pub owner: Option<u32>,
}

impl Options {
    /// A lab of this name: two nodes, dual stack, reference plugins, kube-proxy.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            nodes: 2,
            cni: Cni::Reference,
            proxy: Proxy::KubeProxy,
            families: Families::Dual,
            routes: Routes::Vxlan,
            manifests: None,
            objects_only: false,
            suites: false,
            bin_dir: crate::paths::own_bin_dir(),
            owner: None,
        }
    }

    /// For a test: its own name, and garbage when the test process is gone.
    #[must_use]
    pub fn for_test() -> Self {
        let pid = std::process::id();
        Self { owner: Some(pid), ..Self::new(&format!("t{pid}")) }
    }

    /// The same with flowloom for Pods and Services.
    #[must_use]
    pub fn flowloom(self) -> Self {
        Self { cni: Cni::Flowloom, proxy: Proxy::None, ..self }
    }

    /// One node of a test's, IPv4, with the programs of `bin_dir`; nobody runs its Pods: they are objects, and a test wires them itself.
    #[must_use]
    pub fn objects_for_test(letter: char, bin_dir: PathBuf) -> Self {
        Self {
            name: format!("{letter}{}", std::process::id()),
            bin_dir,
            nodes: 1,
            families: Families::Ipv4,
            objects_only: true,
            ..Self::for_test().flowloom()
        }
    }

    /// Refuses what cannot work before anything is made.
    ///
    /// # Errors
    /// Names the option and its bounds.
    pub fn check(&self) -> anyhow::Result<()> {
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        anyhow::ensure!(
            (1..=8).contains(&self.name.len()) && self.name.chars().all(good),
            "lab name {:?}: 1 to 8 lower-case letters and digits",
            self.name
        );
        anyhow::ensure!((1..=9).contains(&self.nodes), "{} nodes: 1 to 9 are possible", self.nodes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_break_device_or_socket_names_are_refused() {
        for bad in ["", "a-b", "Upper", "ninechars", "a/b", ".."] {
            assert!(Options::new(bad).check().is_err(), "{bad}");
        }
        Options::new("lab").check().unwrap();
        assert!(Options { nodes: 10, ..Options::new("lab") }.check().is_err());
    }
}
