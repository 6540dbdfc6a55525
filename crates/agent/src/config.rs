//! The agent's configuration file. `docs/agent-config.md` documents every key; a test compares the two.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use flowloom_api::config::with_suggestion;
use flowloom_model::NodeName;
use flowloom_netlink::LinkName;
use flowloom_netlink::sysctl::PortSet;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Everything the agent is told. Only `node` has no default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// This node's name in the document; `--node` wins.
    #[serde(default = "defaults::nameless")]
    pub node: NodeName,
    /// The desired-state document; its lock file lies beside it.
    #[serde(default = "defaults::document")]
    pub document: PathBuf,
    /// Directory of what must survive a restart; mode 0700.
    #[serde(default = "defaults::state_dir")]
    pub state_dir: PathBuf,
    /// Unix socket of the API; mode 0600.
    #[serde(default = "defaults::socket")]
    pub socket: PathBuf,
    /// Directory on a bpffs for maps and links.
    #[serde(default = "defaults::pin_root")]
    pub pin_root: PathBuf,
    /// cgroup v2 directory whose sockets belong to this node.
    #[serde(default = "defaults::cgroup_root")]
    pub cgroup_root: PathBuf,
    /// Where the namespaces of managed workloads are mounted.
    #[serde(default = "defaults::netns_dir")]
    pub netns_dir: PathBuf,
    /// Log filter (`info`, `flowloom_agent=debug`).
    #[serde(default = "defaults::log")]
    pub log: String,
    /// Who forwards what the programs have judged.
    #[serde(default)]
    pub forwarding: Forwarding,
    /// How other nodes' endpoints of the default VPC are reached.
    #[serde(default)]
    pub routes: Routes,
    /// Links that lead to other nodes and outside; empty = the link that has this node's address.
    #[serde(default)]
    pub uplinks: Vec<String>,
    /// UDP port of the tunnel.
    #[serde(default = "defaults::tunnel_port")]
    pub tunnel_port: u16,
    /// Who takes packets of open connections out of their tunnel.
    #[serde(default)]
    pub tunnel_receive: Receive,
    /// Name of the tunnel's device.
    #[serde(default = "defaults::overlay_device")]
    pub overlay_device: String,
    /// Largest IP packet of workloads, bytes; 0 = what the path allows.
    #[serde(default)]
    pub mtu: u16,
    /// Source address translation of the default VPC's traffic that leaves the node.
    #[serde(default)]
    pub masquerade: Masquerade,
    /// Connection tables.
    #[serde(default)]
    pub conntrack: Conntrack,
    /// Events of verdicts and drops.
    #[serde(default)]
    pub events: Events,
    /// The API's limits.
    #[serde(default)]
    pub api: Api,
    /// What is kept for container runtimes.
    #[serde(default)]
    pub cni: Cni,
    /// Kubernetes as a source.
    #[serde(default)]
    pub kubernetes: Kubernetes,
}

/// Kubernetes as a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kubernetes {
    /// Whether the API server is asked; the document is optional then.
    pub enabled: bool,
    /// Kubeconfig file; empty = the service account of this Pod.
    pub kubeconfig: PathBuf,
    /// Where Pods of other nodes come from.
    pub peers: Peers,
    /// Requests per second.
    pub qps: u32,
    /// Requests at once after a quiet time.
    pub burst: u32,
    /// How long an ADD waits for its Pod's object, seconds.
    pub pod_wait_seconds: u64,
    /// Key of the taint that goes when the node is ready; empty = none.
    pub startup_taint: String,
    /// Where load balancers and people ask whether this node serves; empty = nowhere.
    pub health_address: String,
    /// Where tools ask who serves Services here; empty = nowhere.
    pub proxy_mode_address: String,
    /// Ports that the kernel gives to no socket by itself; empty = the setting is left alone.
    pub reserved_ports: String,
}

/// Where Pods of other nodes come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Peers {
    /// Every Pod of the cluster is watched.
    #[default]
    Pods,
    /// From the workload slices of flowloom-controller, which must run.
    Slices,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            enabled: false,
            kubeconfig: PathBuf::new(),
            peers: Peers::default(),
            qps: 20,
            burst: 40,
            pod_wait_seconds: 5,
            startup_taint: "node.flowloom.io/agent-not-ready".into(),
            health_address: "[::]:10256".into(),
            proxy_mode_address: "127.0.0.1:10249".into(),
            reserved_ports: "30000-32767,61000-65535".into(),
        }
    }
}

impl Kubernetes {
    /// Both listeners' addresses by key; `None` = no listener.
    ///
    /// # Errors
    /// One line, with the key.
    pub(crate) fn listeners(&self) -> Result<[(&'static str, Option<SocketAddr>); 2], String> {
        let parse = |key: &'static str, text: &str| match text {
            "" => Ok((key, None)),
            _ => match text.parse::<SocketAddr>() {
                Ok(at) => Ok((key, Some(at))),
                Err(_) => Err(format!("{key}: {text:?} is not ADDRESS:PORT")),
            },
        };
        Ok([
            parse("kubernetes.health_address", &self.health_address)?,
            parse("kubernetes.proxy_mode_address", &self.proxy_mode_address)?,
        ])
    }
}

/// Who takes packets of open connections out of their tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Receive {
    /// The host's stack, by the tunnel's device.
    #[default]
    Device,
    /// The programs, where they arrive.
    Uplink,
}

/// Who forwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forwarding {
    /// The programs.
    #[default]
    Ebpf,
    /// The host's stack.
    Stack,
}

impl Forwarding {
    /// As in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Stack => "stack",
        }
    }
}

/// How other nodes are reached in the default VPC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Routes {
    /// Through the tunnel, as for every other VPC.
    #[default]
    Vxlan,
    /// By routes to the nodes' underlay addresses; the nodes share a link.
    Direct,
}

/// Masquerade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Masquerade {
    /// Whether the agent keeps the table.
    pub enabled: bool,
    /// Destinations that see the workload's own address, beside the VPC's subnets and the nodes.
    pub except: Vec<IpNet>,
    /// Name of the nftables table (family inet).
    pub table: String,
}

impl Default for Masquerade {
    fn default() -> Self {
        Self { enabled: false, except: Vec::new(), table: "flowloom".into() }
    }
}

/// Connection tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conntrack {
    /// Established connections, all endpoints together; preallocated, 180 bytes each.
    pub entries: u32,
    /// Half-open connections.
    pub new_entries: u32,
    /// Established connections of one endpoint; 0 = no limit.
    pub endpoint_quota: u32,
    /// Established connections of one VPC on this node; 0 = no limit.
    pub vpc_quota: u32,
    /// Seconds between sweeps of timed-out connections.
    pub sweep_seconds: u64,
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            entries: flowloom_bpf_abi::MAX_CONNTRACK,
            new_entries: flowloom_bpf_abi::MAX_CONNTRACK_NEW,
            endpoint_quota: 16_384,
            vpc_quota: 65_536,
            sweep_seconds: 10,
        }
    }
}

/// Events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Events {
    /// Per second, endpoint and reason; 0 = no limit.
    pub rate: u32,
    /// Answers (RST, ICMP errors) per second and endpoint; 0 = no limit.
    pub answer_rate: u32,
    /// Every new connection, not only those of rules that log.
    pub verdicts: bool,
    /// Newest events kept for `flowloom observe`.
    pub history: usize,
}

impl Default for Events {
    fn default() -> Self {
        Self { rate: 100, answer_rate: 100, verdicts: true, history: 4096 }
    }
}

/// Limits of the API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Api {
    /// Connections at once; more wait in the socket's backlog.
    pub connections: usize,
    /// Largest request body, bytes.
    pub body_bytes: usize,
    /// Seconds for a request's header to arrive.
    pub header_seconds: u64,
}

impl Default for Api {
    fn default() -> Self {
        Self { connections: 256, body_bytes: 256 * 1024, header_seconds: 10 }
    }
}

/// What is kept for container runtimes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cni {
    /// Where runtimes look for network configurations; empty = none is kept.
    pub conf_dir: PathBuf,
    /// Name of the file there.
    pub conf_name: String,
    /// Where runtimes look for plugins; empty = the plugin is not copied there.
    pub bin_dir: PathBuf,
    /// `cniVersion` of the configuration.
    pub version: String,
    /// Name of the network.
    pub network: String,
    /// Whether host ports are taken, and the capability declared.
    pub port_mappings: bool,
}

impl Default for Cni {
    fn default() -> Self {
        Self {
            conf_dir: PathBuf::new(),
            conf_name: flowloom_cni::conflist::FILE.into(),
            bin_dir: PathBuf::new(),
            version: "1.0.0".into(),
            network: "flowloom".into(),
            port_mappings: false,
        }
    }
}

/// Stands for a name that is not given.
const NAMELESS: &str = "node-without-a-name";

mod defaults {
    use std::path::PathBuf;

    pub(super) fn nameless() -> flowloom_model::NodeName {
        flowloom_model::NodeName::new(super::NAMELESS).expect("a constant that is a name")
    }

    pub(super) fn document() -> PathBuf {
        "/etc/flowloom/desired.yaml".into()
    }
    pub(super) fn state_dir() -> PathBuf {
        "/var/lib/flowloom".into()
    }
    pub(super) fn socket() -> PathBuf {
        flowloom_api::DEFAULT_SOCKET.into()
    }
    pub(super) fn pin_root() -> PathBuf {
        "/sys/fs/bpf/flowloom".into()
    }
    pub(super) fn cgroup_root() -> PathBuf {
        "/sys/fs/cgroup".into()
    }
    pub(super) fn netns_dir() -> PathBuf {
        flowloom_netlink::DEFAULT_DIR.into()
    }
    pub(super) fn log() -> String {
        "info".into()
    }
    pub(super) fn tunnel_port() -> u16 {
        4789
    }
    pub(super) fn overlay_device() -> String {
        "flowloom_vxlan".into()
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration {} cannot be read: {source}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not what it must be.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// File.
        path: PathBuf,
        /// What is wrong, with the key.
        message: String,
    },
}

impl Config {
    /// A configuration with every default.
    #[must_use]
    pub fn for_node(node: NodeName) -> Self {
        Self {
            node,
            document: defaults::document(),
            state_dir: defaults::state_dir(),
            socket: defaults::socket(),
            pin_root: defaults::pin_root(),
            cgroup_root: defaults::cgroup_root(),
            netns_dir: defaults::netns_dir(),
            log: defaults::log(),
            forwarding: Forwarding::default(),
            routes: Routes::default(),
            uplinks: Vec::new(),
            tunnel_port: defaults::tunnel_port(),
            tunnel_receive: Receive::default(),
            overlay_device: defaults::overlay_device(),
            mtu: 0,
            masquerade: Masquerade::default(),
            conntrack: Conntrack::default(),
            events: Events::default(),
            api: Api::default(),
            cni: Cni::default(),
            kubernetes: Kubernetes::default(),
        }
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// What is wrong with it, naming the key and, for unknown ones, the nearest known.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::load_for(path, None)
    }

    /// The same for a node whose name may stand outside the file, so that one file serves all nodes.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn load_for(path: &Path, node: Option<NodeName>) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse_for(&text, node)
            .map_err(|message| ConfigError::Invalid { path: path.to_owned(), message })
    }

    /// Parses and checks a text.
    ///
    /// # Errors
    /// One line.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::parse_for(text, None)
    }

    fn parse_for(text: &str, node: Option<NodeName>) -> Result<Self, String> {
        let mut config: Self = serde_saphyr::from_str(text).map_err(|e| with_suggestion(&e.to_string()))?;
        if let Some(node) = node {
            config.node = node;
        }
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if self.node.as_str() == NAMELESS {
            return Err("node: missing; name this node here or with --node".into());
        }
        for (key, path) in [
            ("document", &self.document),
            ("state_dir", &self.state_dir),
            ("socket", &self.socket),
            ("pin_root", &self.pin_root),
            ("cgroup_root", &self.cgroup_root),
            ("netns_dir", &self.netns_dir),
            ("kubernetes.kubeconfig", &self.kubernetes.kubeconfig),
        ] {
            let absent = key == "kubernetes.kubeconfig" && path.as_os_str().is_empty();
            if !path.is_absolute() && !absent {
                return Err(format!("{key}: {:?} is not an absolute path", path.display().to_string()));
            }
        }
        let (conf_dir, bin_dir) = (&self.cni.conf_dir, &self.cni.bin_dir);
        for (key, path) in [("cni.conf_dir", conf_dir), ("cni.bin_dir", bin_dir)] {
            if !path.as_os_str().is_empty() && !path.is_absolute() {
                return Err(format!("{key}: {:?} is not an absolute path", path.display().to_string()));
            }
        }
        if conf_dir.as_os_str().is_empty() && !bin_dir.as_os_str().is_empty() {
            return Err(
                "cni.bin_dir: needs cni.conf_dir, too: a plugin without a configuration is not called".into(),
            );
        }
        if !flowloom_cni::install::is_conf_name(&self.cni.conf_name) {
            return Err(format!(
                "cni.conf_name: {:?} must end in .conflist and hold no '/'",
                self.cni.conf_name
            ));
        }
        crate::keeper::list(self)
            .and_then(|l| l.check().map_err(|e| e.to_string()))
            .map_err(|e| format!("cni: {e}"))?;
        // sun_path has 108 bytes with its zero (unix(7)).
        if self.socket.as_os_str().len() > 107 {
            return Err("socket: a Unix socket's path has at most 107 bytes".into());
        }
        for (key, name) in
            self.uplinks.iter().map(|u| ("uplinks", u)).chain([("overlay_device", &self.overlay_device)])
        {
            LinkName::new(name.clone()).map_err(|e| format!("{key}: {e}"))?;
        }
        let reserved = &self.kubernetes.reserved_ports;
        reserved.parse::<PortSet>().map_err(|e| format!("kubernetes.reserved_ports: {e}"))?;
        if self.tunnel_port == 0 {
            return Err("tunnel_port: 0 is no port".into());
        }
        if self.mtu != 0 && self.mtu < 1280 {
            return Err(format!("mtu: {} is less than 1280, the least IPv6 works with (RFC 8200)", self.mtu));
        }
        let table = &self.masquerade.table;
        let name = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if table.is_empty()
            || table.len() > 32
            || !table.bytes().all(name)
            || table.as_bytes()[0].is_ascii_digit()
        {
            return Err(format!(
                "masquerade.table: {table:?} is not 1..32 letters, digits and '_', a letter first"
            ));
        }
        for (key, n) in [
            ("conntrack.entries", self.conntrack.entries as u64),
            ("conntrack.new_entries", self.conntrack.new_entries as u64),
            ("conntrack.sweep_seconds", self.conntrack.sweep_seconds),
            ("api.connections", self.api.connections as u64),
            ("api.body_bytes", self.api.body_bytes as u64),
            ("api.header_seconds", self.api.header_seconds),
            ("kubernetes.qps", u64::from(self.kubernetes.qps)),
            ("kubernetes.burst", u64::from(self.kubernetes.burst)),
        ] {
            if n == 0 {
                return Err(format!("{key}: 0 would stop it from working"));
            }
        }
        self.kubernetes.listeners().map(drop)
    }

    /// Where the lock file of the document lies.
    #[must_use]
    pub fn lock_file(&self) -> PathBuf {
        let mut name = self.document.clone().into_os_string();
        name.push(".lock.yaml");
        name.into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(prefix: &str, value: &serde_json::Value, out: &mut BTreeSet<String>) {
        for (key, value) in value.as_object().into_iter().flatten() {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            if value.is_object() {
                keys(&path, value, out);
            } else {
                out.insert(path);
            }
        }
    }

    #[test]
    fn the_documentation_lists_every_key_with_its_default_and_no_other() {
        let config = Config::for_node("n1".parse().unwrap());
        let value = serde_json::to_value(&config).unwrap();
        let mut wanted = BTreeSet::new();
        keys("", &value, &mut wanted);
        let page = include_str!("../../../docs/agent-config.md");
        let mut documented = BTreeSet::new();
        for line in page.lines().filter(|l| l.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let key = cells[1].trim_matches('`').to_owned();
            let pointer = format!("/{}", key.replace('.', "/"));
            let default =
                value.pointer(&pointer).unwrap_or_else(|| panic!("{key} is documented and does not exist"));
            if key != "node" {
                let shown = default.as_str().map_or_else(|| default.to_string(), str::to_owned);
                assert_eq!(cells[2].trim_matches('`'), shown, "documented default of {key}");
            }
            assert!(cells[3].len() > 10, "{key} has no description");
            documented.insert(key);
        }
        assert_eq!(documented, wanted);
    }

    #[test]
    fn the_smallest_file_gives_every_default() {
        assert_eq!(Config::parse("node: n1\n").unwrap(), Config::for_node("n1".parse().unwrap()));
        assert!(Config::parse("document: /a\n").unwrap_err().contains("node"));
        let named = Config::parse_for("document: /a\n", Some("n2".parse().unwrap())).unwrap();
        assert_eq!(named.node.as_str(), "n2");
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_known_one() {
        let e = Config::parse("node: n1\nstate_dri: /x\n").unwrap_err();
        assert!(e.contains("state_dri") && e.contains("did you mean `state_dir`?"), "{e}");
        let e = Config::parse("node: n1\nmasquerade:\n  enable: true\n").unwrap_err();
        assert!(e.contains("did you mean `enabled`?"), "{e}");
    }

    #[test]
    fn values_that_cannot_work_are_refused_by_key() {
        for (text, key) in [
            ("socket: run/x", "socket"),
            ("mtu: 1000", "mtu"),
            ("tunnel_port: 0", "tunnel_port"),
            ("overlay_device: a-name-that-is-too-long", "overlay_device"),
            ("uplinks: ['a/b']", "uplinks"),
            ("masquerade: {table: 'x; drop'}", "masquerade.table"),
            ("conntrack: {entries: 0}", "conntrack.entries"),
            ("api: {connections: 0}", "api.connections"),
            ("kubernetes: {health_address: '10256'}", "kubernetes.health_address"),
            ("kubernetes: {proxy_mode_address: 'localhost:1'}", "kubernetes.proxy_mode_address"),
            ("kubernetes: {reserved_ports: '9-3'}", "kubernetes.reserved_ports"),
        ] {
            let e = Config::parse(&format!("node: n1\n{text}\n")).unwrap_err();
            assert!(e.contains(key), "{text}: {e}");
        }
    }
}
