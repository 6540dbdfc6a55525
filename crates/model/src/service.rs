//! Load balancers: addresses and ports of a VPC that stand for backends. A Kubernetes Service is one; so is a load balancer of a document.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::{NodeName, PackedMap, PortName, Protocol, ServiceName, VpcName};

/// A load balancer of a VPC. Its ports share affinity, policies and ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name; `namespace.name` for a Kubernetes Service.
    pub name: ServiceName,
    /// Ports, each with its own backends.
    pub ports: Vec<ServicePort>,
    /// Addresses reached from inside only (ClusterIP).
    pub cluster_ips: BTreeSet<IpAddr>,
    /// Addresses that are reached from outside, too.
    pub external_ips: BTreeSet<IpAddr>,
    /// Addresses of a load balancer's status: reached from outside, too, by whom `source_ranges` lets.
    pub load_balancer_ips: BTreeSet<IpAddr>,
    /// Same client address to the same backend for so many seconds after its last new connection (1..=86400).
    pub affinity: Option<u32>,
    /// Traffic from inside goes to backends on the sender's node only (`internalTrafficPolicy: Local`).
    pub internal_local: bool,
    /// Traffic from outside goes to backends on the receiving node only and keeps its source (`externalTrafficPolicy: Local`).
    pub external_local: bool,
    /// Who may use `load_balancer_ips` from outside; empty = everyone.
    pub source_ranges: Vec<IpNet>,
    /// Port on every node that says over HTTP how many local backends there are (`external_local` load balancers).
    pub health_check_port: Option<u16>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, when it has one.
    pub name: Option<PortName>,
    /// tcp, udp or sctp.
    pub protocol: Protocol,
    /// 1..=65535.
    pub port: u16,
    /// Port on every node's addresses, 1..=65535.
    pub node_port: Option<u16>,
    /// A port of single addresses of this node (host ports), instead of the service's own addresses; an unspecified address = all of its
    /// family that the node has; empty = not a host port.
    pub host_addresses: BTreeSet<IpAddr>,
    /// By address and port: one backend may serve under several ports.
    pub backends: PackedMap<(IpAddr, u16), Backend>,
}

/// A place where connections to a service go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Where it runs, when that is known.
    pub node: Option<NodeName>,
    /// Whether it takes connections.
    pub state: BackendState,
    /// Zones whose nodes should prefer it (topology hints); empty = all.
    pub zones: BTreeSet<String>,
    /// Nodes that should prefer it (node hints); empty = all.
    pub nodes: BTreeSet<NodeName>,
}

/// Whether a backend takes connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackendState {
    /// New connections go here.
    Ready,
    /// Ending, still serving: takes new connections only when nothing of the service is ready; keeps its own.
    Terminating,
    /// Takes none; keeps its own until it is gone, UDP apart.
    NotReady,
}
