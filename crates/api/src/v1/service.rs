//! Services: what they are, which backends they have on this node, and why.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Condition, Named};

/// Answer of `GET /v1/services`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceList {
    /// Services, ordered by VPC and name.
    pub services: Vec<ServiceInfo>,
}

/// A service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceInfo {
    /// Its VPC; the number is the VNI (0 where the VPC is not in force on this node).
    pub vpc: Named,
    /// Its name there; `namespace.name` for a Kubernetes Service.
    pub name: String,
    /// Addresses for inside only.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses that are reached from outside, too.
    pub external_ips: Vec<IpAddr>,
    /// Addresses of a load balancer, reached from outside, too.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Seconds that a client keeps its backend; absent: not at all.
    pub affinity_seconds: Option<u32>,
    /// Traffic from inside stays on its node.
    pub internal_local: bool,
    /// Traffic from outside stays on the node that receives it, and keeps its source.
    pub external_local: bool,
    /// Who may use the load balancer's addresses from outside; empty: everyone.
    pub source_ranges: Vec<String>,
    /// Port of every node that says how many ready backends the node has.
    pub health_check_port: Option<u16>,
    /// Ports.
    pub ports: Vec<ServicePortInfo>,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicePortInfo {
    /// Its name.
    pub name: Option<String>,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
    /// Port.
    pub port: u16,
    /// Port on every node's addresses.
    pub node_port: Option<u16>,
    /// Addresses of this node that the port is on, for host ports.
    pub host_addresses: Vec<IpAddr>,
    /// Backends, whatever their state.
    pub backends: u32,
    /// Backends that take connections.
    pub ready: u32,
    /// Number of the port on this node; 0 while it has none.
    pub number: u32,
}

/// Answer of `GET /v1/services/{vpc}/{name}/explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceExplanation {
    /// The service.
    pub service: ServiceInfo,
    /// The node that speaks.
    pub node: String,
    /// Its zone, when it has one.
    pub zone: Option<String>,
    /// Whether the VPC is in force on the node; where it is not, the service has no frontends there.
    pub here: bool,
    /// Addresses and ports on this node.
    pub frontends: Vec<FrontendInfo>,
}

/// An address and port of a service, for one kind of client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendInfo {
    /// `cluster-ip`, `load-balancer`, `external-ip`, `node-port` or `host-port`.
    pub kind: String,
    /// `inside` or `outside`: who asks.
    pub scope: String,
    /// Address.
    pub ip: IpAddr,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
    /// Port.
    pub port: u16,
    /// The service's port behind it.
    pub service_port: u16,
    /// The service that has it instead, when two want it.
    pub taken_by: Option<String>,
    /// A Local traffic policy holds.
    pub local_policy: bool,
    /// Who may use it; empty: everyone.
    pub source_ranges: Vec<String>,
    /// `backend`, `refused` (no backend) or `silence` (no local backend, other nodes have some).
    pub answer: String,
    /// Backends of the address's family.
    pub backends: Vec<BackendInfo>,
}

/// A backend of a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendInfo {
    /// Address.
    pub ip: IpAddr,
    /// Port.
    pub port: u16,
    /// Where it runs.
    pub node: Option<String>,
    /// Whether that is this node.
    pub local: bool,
    /// The endpoint's name, when the address is one's that this node knows.
    pub endpoint: Option<String>,
    /// Zones that should prefer it.
    pub zones: Vec<String>,
    /// Nodes that should prefer it.
    pub nodes: Vec<String>,
    /// New connections may go there.
    pub used: bool,
    /// `ready`, `last-resort`, `not-ready`, `terminating`, `not-local`, `other-node` or `other-zone`.
    pub reason: String,
    /// The same for people.
    pub why: String,
}
