//! What the CNI plugin asks. Field names follow the CNI specification (1.1.0) where it has one.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The attachment a request is about: the runtime's container id and interface name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CniAttachment {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl std::fmt::Display for CniAttachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.container_id, self.ifname)
    }
}

/// What the network configuration asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniNetwork {
    /// `name` of the network configuration.
    pub name: String,
    /// `vpc`; the default VPC when absent.
    #[serde(default)]
    pub vpc: Option<String>,
    /// `subnet`; any subnet of the VPC this node may allocate from when absent.
    #[serde(default)]
    pub subnet: Option<String>,
    /// `security_groups`.
    #[serde(default)]
    pub security_groups: Vec<String>,
    /// `labels`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// A time that every process of a machine reads alike and that nobody sets: time since boot, and which boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The kernel's id of the boot.
    pub boot: String,
    /// Nanoseconds since then, suspended time included.
    pub ns: u64,
}

impl Moment {
    /// Whether this is later than `other`; `None` when they are of different boots.
    #[must_use]
    pub fn is_after(&self, other: &Self) -> Option<bool> {
        (self.boot == other.boot).then_some(self.ns > other.ns)
    }
}

/// Transport protocol of a host port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A port of the node that leads to a port of the container (capability `portMappings`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CniPortMapping {
    /// Port of the node, 1..=65535.
    pub host_port: u16,
    /// Port of the container, 1..=65535.
    pub container_port: u16,
    /// Protocol.
    pub protocol: PortProtocol,
    /// The one address of the node it is open on; every address when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<IpAddr>,
}

/// What the runtime asks for beside the network configuration (`runtimeConfig`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniRuntime {
    /// Capability `portMappings`, in order and without repetition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_mappings: Vec<CniPortMapping>,
    /// Capability `ips`: addresses to give, at most one per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<IpAddr>,
    /// Capability `mac`: the MAC to give.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

impl CniRuntime {
    /// Nothing is asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The pod that an attachment is of, as the runtime named it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CniPod {
    /// `K8S_POD_NAMESPACE`.
    pub namespace: String,
    /// `K8S_POD_NAME`.
    pub name: String,
    /// `K8S_POD_UID`; some runtimes give none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// Body of `POST /v1/cni/add`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniAddRequest {
    /// The attachment.
    #[serde(flatten)]
    pub attachment: CniAttachment,
    /// `CNI_NETNS`: path of the container's network namespace.
    pub netns: String,
    /// The network configuration.
    pub network: CniNetwork,
    /// `CNI_ARGS` as key and value (`K8S_POD_NAMESPACE`, `K8S_POD_NAME`, `K8S_POD_UID`, `FLOWLOOM_ENDPOINT`, ...).
    #[serde(default)]
    pub args: BTreeMap<String, String>,
    /// `runtimeConfig`.
    #[serde(default, skip_serializing_if = "CniRuntime::is_empty")]
    pub runtime: CniRuntime,
}

/// Answer of `POST /v1/cni/add`: what a CNI result needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniAddResult {
    /// `vpc/name` of the endpoint.
    pub endpoint: String,
    /// Host-side device, then the one in the container.
    pub interfaces: Vec<CniInterface>,
    /// Addresses, all on the container's interface.
    pub ips: Vec<CniIp>,
    /// Routes inside the container.
    pub routes: Vec<CniRoute>,
    /// MTU of the container's interface.
    pub mtu: u32,
    /// Policy revision in force when this was answered.
    pub revision: u32,
}

/// An interface of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniInterface {
    /// Name.
    pub name: String,
    /// MAC.
    pub mac: String,
    /// Namespace path; empty for the host side.
    #[serde(default)]
    pub sandbox: String,
}

/// An address of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniIp {
    /// Address with the prefix length of the interface (`10.0.0.5/24`).
    pub address: String,
    /// Gateway.
    pub gateway: Option<IpAddr>,
    /// Index into `interfaces`.
    pub interface: u32,
}

/// A route of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniRoute {
    /// Destination prefix.
    pub dst: String,
    /// Next hop.
    pub gw: Option<IpAddr>,
}

/// Body of `POST /v1/cni/check`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniCheckRequest {
    /// The attachment.
    #[serde(flatten)]
    pub attachment: CniAttachment,
    /// `CNI_NETNS`.
    pub netns: String,
    /// The network configuration.
    pub network: CniNetwork,
    /// Addresses of `prevResult`, with prefix length; each must be there.
    #[serde(default)]
    pub addresses: Vec<String>,
}

/// Answer of `POST /v1/cni/check`: everything is as ADD left it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniChecked {
    /// `vpc/name` of the endpoint.
    pub endpoint: String,
}

/// Body of `POST /v1/cni/del`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniDelRequest {
    /// The attachment.
    #[serde(flatten)]
    pub attachment: CniAttachment,
    /// `CNI_NETNS`; absent when the runtime has none any more.
    #[serde(default)]
    pub netns: Option<String>,
    /// `CNI_ARGS`; used to find an attachment whose container id the agent does not know.
    #[serde(default)]
    pub args: BTreeMap<String, String>,
}

/// Answer of `POST /v1/cni/del`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniDeleted {
    /// Endpoints removed (`vpc/name`); empty when nothing was left to remove.
    pub removed: Vec<String>,
}

/// Body of `POST /v1/cni/gc`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniGcRequest {
    /// `name` of the network configuration: attachments of other networks are not looked at.
    pub network: String,
    /// Attachments that the runtime knows; at most [`MAX_VALID_ATTACHMENTS`].
    pub valid: Vec<CniAttachment>,
    /// When the runtime called the plugin: the list is not newer. An attachment whose ADD had not been answered by then is left alone.
    pub started: Moment,
}

/// Most entries of [`CniGcRequest::valid`]: twice what a node can have.
pub const MAX_VALID_ATTACHMENTS: usize = 8192;

/// Answer of `POST /v1/cni/gc`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniCollected {
    /// Endpoints removed (`vpc/name`).
    pub removed: Vec<String>,
    /// Endpoints that no valid attachment owns and that stay: their ADD is going on, or was answered after the list was made.
    pub spared: Vec<String>,
    /// What could not be removed, and why.
    pub errors: Vec<String>,
}

/// Body of `POST /v1/cni/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniStatusRequest {
    /// The network that an ADD would name.
    pub network: CniNetwork,
}

/// Answer of `GET` (for the default VPC) and `POST /v1/cni/status`: whether ADD can succeed now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniStatus {
    /// ADD can be served.
    pub ready: bool,
    /// Why not; empty when ready.
    pub message: String,
    /// Not ready, and attachments that exist may be cut off: the node could not put its plan in force.
    #[serde(default)]
    pub limited: bool,
    /// Free addresses that such an ADD may get on this node, saturating.
    pub available_addresses: u64,
}

/// Answer of `GET /v1/cni`: the requests of container runtimes since the agent started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniReport {
    /// As in [`CniStatus`], for the default VPC.
    pub ready: bool,
    /// As in [`CniStatus`].
    pub message: String,
    /// Attachments there are.
    pub attachments: u64,
    /// ADDs being served now.
    pub adding: u64,
    /// By verb, in the order ADD, CHECK, DEL, GC, STATUS, REPLAY (a DEL from the queue).
    pub verbs: Vec<CniVerb>,
    /// DELs that waited for the agent.
    pub queue: CniQueue,
    /// The network configuration that the agent keeps for the runtime.
    #[serde(default)]
    pub conflist: Option<CniConflist>,
}

/// Upper bounds of [`CniVerb::buckets`] in microseconds; one more bucket takes what is slower.
pub const CNI_BUCKETS_US: [u64; 13] = [
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000,
    30_000_000,
];

/// One verb's requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniVerb {
    /// `ADD` ...
    pub verb: String,
    /// All that were answered.
    pub count: u64,
    /// Those that failed, by error code.
    pub errors: BTreeMap<String, u64>,
    /// Requests by duration, waiting included: bucket `i` holds those of at most [`CNI_BUCKETS_US`]`[i]`.
    pub buckets: Vec<u64>,
    /// All durations together, microseconds.
    pub sum_us: u64,
    /// The longest, microseconds.
    pub max_us: u64,
}

impl CniVerb {
    /// The bound that `share` (0..=1) of the requests stay within, microseconds: the upper bound of a bucket, or [`Self::max_us`] in the
    /// last one. `None` without requests.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let wanted = (self.count as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (i, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return Some(CNI_BUCKETS_US.get(i).copied().unwrap_or(self.max_us).min(self.max_us));
            }
        }
        None
    }
}

/// DELs that the plugin wrote down while no agent answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniQueue {
    /// The directory.
    pub path: String,
    /// Waiting now.
    pub waiting: u64,
    /// Served since start.
    pub replayed: u64,
    /// Of those, about an attachment that was gone already or made anew since.
    pub outdated: u64,
    /// Entries that could not be read and lie there as `*.unreadable`.
    pub unreadable: u64,
}

/// The network configuration that the agent keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniConflist {
    /// Its file.
    pub path: String,
    /// It is there.
    pub installed: bool,
    /// Why it is not as it should be; empty when it is.
    pub error: String,
}

/// Answer of `GET /v1/cni/timing`: the newest requests, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniTimings {
    /// At most 256.
    pub requests: Vec<CniTiming>,
}

/// Where the time of one request went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniTiming {
    /// `ADD` or `DEL`.
    pub command: String,
    /// Attachment.
    pub attachment: String,
    /// Whether it succeeded.
    pub ok: bool,
    /// Microseconds in all, inside the agent.
    pub total_us: u64,
    /// Stages in order with their microseconds.
    pub stages: Vec<(String, u64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_one_boot_have_an_order_and_others_none() {
        let at = |boot: &str, ns| Moment { boot: boot.into(), ns };
        assert_eq!(at("a", 2).is_after(&at("a", 1)), Some(true));
        assert_eq!(at("a", 1).is_after(&at("a", 1)), Some(false));
        assert_eq!(at("a", 2).is_after(&at("b", 1)), None);
    }

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket_and_never_above_the_longest() {
        let mut buckets = vec![0; CNI_BUCKETS_US.len() + 1];
        let none = CniVerb {
            verb: "ADD".into(),
            count: 0,
            errors: BTreeMap::new(),
            buckets: buckets.clone(),
            sum_us: 0,
            max_us: 0,
        };
        assert_eq!(none.quantile_us(0.5), None);
        (buckets[1], buckets[3], buckets[13]) = (90, 9, 1);
        let verb = CniVerb { count: 100, buckets, max_us: 40_000_000, ..none };
        assert_eq!(verb.quantile_us(0.5), Some(1_000));
        assert_eq!(verb.quantile_us(0.99), Some(5_000));
        assert_eq!(verb.quantile_us(1.0), Some(40_000_000));
        let quick = CniVerb { max_us: 700, ..verb };
        assert_eq!(quick.quantile_us(0.5), Some(700));
    }

    #[test]
    fn a_request_without_runtime_configuration_reads_and_writes_as_before_there_was_one() {
        let text = r#"{"container_id":"c","ifname":"eth0","netns":"/n","network":{"name":"n"}}"#;
        let request: CniAddRequest = serde_json::from_str(text).unwrap();
        assert!(request.runtime.is_empty());
        assert!(serde_json::to_value(&request).unwrap().get("runtime").is_none());
    }
}
