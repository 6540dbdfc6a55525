//! Endpoints, addresses and identities.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Condition, Named};

/// Answer of `GET /v1/endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointList {
    /// Local endpoints, ordered by VPC and name.
    pub endpoints: Vec<EndpointInfo>,
}

/// A local endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// Its VPC; the number is the VNI (0 while the VPC has none).
    pub vpc: Named,
    /// Its name there and its number on this node (0 while it has none).
    pub endpoint: Named,
    /// Where it stands.
    pub state: EndpointState,
    /// Who asked for it.
    pub source: EndpointSource,
    /// Its subnet.
    pub subnet: String,
    /// One per family.
    pub ips: Vec<IpAddr>,
    /// One per family.
    pub gateways: Vec<IpAddr>,
    /// The workload's MAC, empty while unknown.
    pub mac: String,
    /// Host-side device and its ifindex.
    pub device: Option<Named>,
    /// `peer`, `redirect` or `stack`.
    pub delivery: String,
    /// Network namespace of the workload, when the agent or a CNI request knows it.
    pub netns: Option<String>,
    /// Name of the interface inside.
    pub interface: Option<String>,
    /// Identity number.
    pub identity: u32,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Attached groups.
    pub security_groups: Vec<String>,
    /// Number of the egress policy in force.
    pub egress_slot: u32,
    /// Number of the ingress policy in force.
    pub ingress_slot: u32,
    /// Policy revision in force.
    pub revision: u32,
    /// Packets and bytes that passed.
    pub traffic: Traffic,
    /// Set for endpoints that a CNI request attached.
    pub attachment: Option<AttachmentInfo>,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// Where an endpoint stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndpointState {
    /// The document lacks something (address, VNI), or its CNI attachment has not come yet.
    Waiting,
    /// Being wired; passes nothing yet.
    Creating,
    /// Policy in force.
    Ready,
    /// Could not be wired; retried.
    Failed,
    /// On its way out.
    Deleting,
}

impl EndpointState {
    /// The word used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
        }
    }
}

/// Who asked for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndpointSource {
    /// The desired-state document.
    Document,
    /// A CNI request.
    Cni,
}

/// The CNI attachment of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentInfo {
    /// Container.
    pub container_id: String,
    /// Interface in the container.
    pub ifname: String,
    /// Network namespace path.
    pub netns: String,
    /// CNI network name.
    pub network: String,
    /// What the runtime asked for beside the network configuration: host ports.
    #[serde(default, skip_serializing_if = "super::CniRuntime::is_empty")]
    pub runtime: super::CniRuntime,
    /// The pod it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<super::CniPod>,
}

/// Packets and bytes that passed an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets it sent.
    pub egress_packets: u64,
    /// Bytes it sent.
    pub egress_bytes: u64,
    /// Packets it received.
    pub ingress_packets: u64,
    /// Bytes it received.
    pub ingress_bytes: u64,
}

/// Answer of `GET /v1/ipam`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpamReport {
    /// One per subnet and family (and range) this node may allocate from, plus subnets with local endpoints.
    pub pools: Vec<IpamPool>,
}

/// A range of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpamPool {
    /// VPC.
    pub vpc: String,
    /// Subnet.
    pub subnet: String,
    /// The range.
    pub cidr: String,
    /// Gateway.
    pub gateway: Option<IpAddr>,
    /// Whether this node allocates CNI attachments from it.
    pub allocates: bool,
    /// Size minus reserved and excluded addresses; saturates at `u64::MAX`.
    pub capacity: u64,
    /// Capacity minus used, saturating.
    pub available: u64,
    /// Addresses in use or cooling down that this node knows.
    pub used: Vec<IpamAddress>,
}

/// An address in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpamAddress {
    /// The address.
    pub address: IpAddr,
    /// Owner: `vpc/endpoint`, empty while cooling down.
    pub endpoint: String,
    /// `container id/interface` for CNI attachments, else empty.
    pub attachment: String,
    /// Milliseconds until it may be handed out again, for released ones.
    pub cooling_ms: Option<u64>,
}

/// Answer of `GET /v1/identities`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityList {
    /// In use on this node, by number.
    pub identities: Vec<IdentityInfo>,
}

/// What an identity number stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityInfo {
    /// The number.
    pub identity: u32,
    /// VPC; empty for reserved numbers of every VPC.
    pub vpc: String,
    /// `host`, `world`, `remote-node` ..., when it is also a reserved kind.
    pub reserved: Option<String>,
    /// Whether it stands for endpoints (not only CIDRs).
    pub endpoint: bool,
    /// Labels of its endpoints.
    pub labels: BTreeMap<String, String>,
    /// Groups of its endpoints.
    pub security_groups: Vec<String>,
    /// CIDRs that cover it.
    pub cidrs: Vec<String>,
    /// Endpoints (`vpc/name`) that have it, this node and others.
    pub endpoints: Vec<String>,
}
