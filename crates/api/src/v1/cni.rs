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

/// Answer of `GET /v1/cni/status`: whether ADD can succeed now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniStatus {
    /// ADD can be served.
    pub ready: bool,
    /// Why not; empty when ready.
    pub message: String,
    /// Free addresses of the default VPC's ranges of this node, saturating.
    pub available_addresses: u64,
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
