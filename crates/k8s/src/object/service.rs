//! Services and their EndpointSlices.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flowloom_model::{BackendState, NodeName, PortName, Protocol};
use ipnet::IpNet;

use super::{Kind, address, cidr, node_name, protocol, read};
use crate::wire;

/// Label of what another proxy serves.
const PROXY: &str = "service.kubernetes.io/service-proxy-name";
/// Label of what no proxy serves.
const HEADLESS: &str = "service.kubernetes.io/headless";
/// Affinity when none is said, seconds.
const AFFINITY: u32 = 10800;

/// A Service that this node serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// Why it is none of ours; empty = it is.
    pub ignored: &'static str,
    /// Addresses inside the cluster; these lists ascend, and have no address twice.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses from outside that the user wrote.
    pub external_ips: Vec<IpAddr>,
    /// Addresses from outside that a load balancer gave.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Ports.
    pub ports: Vec<LoadBalancerPort>,
    /// Seconds.
    pub affinity: Option<u32>,
    /// `internalTrafficPolicy: Local`.
    pub internal_local: bool,
    /// `externalTrafficPolicy: Local`.
    pub external_local: bool,
    /// Who may use a load balancer's addresses.
    pub source_ranges: Vec<IpNet>,
    /// Of `externalTrafficPolicy: Local`.
    pub health_check_port: Option<u16>,
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancerPort {
    /// Empty for the only one.
    pub name: String,
    /// Protocol.
    pub protocol: Protocol,
    /// Port.
    pub port: u16,
    /// Port of every node.
    pub node_port: Option<u16>,
}

impl LoadBalancerPort {
    /// The name as the model takes it; an unusable one stays away, ports are told apart by number, too.
    pub(crate) fn port_name(&self) -> Option<PortName> {
        PortName::new(&self.name).ok()
    }
}

impl Kind for LoadBalancer {
    const NAME: &'static str = "Service";
    const PATH: &'static str = "/api/v1/services";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Service = read(json)?;
        let spec = w.spec;
        let ignored = if w.metadata.labels.contains_key(PROXY) {
            "another proxy serves it (service-proxy-name)"
        } else if w.metadata.labels.contains_key(HEADLESS) || spec.cluster_ip == "None" {
            "it is headless"
        } else if spec.kind == "ExternalName" {
            "it is a name only (ExternalName)"
        } else {
            ""
        };
        let mut texts = spec.cluster_ips;
        if texts.is_empty() && !spec.cluster_ip.is_empty() {
            texts.push(spec.cluster_ip);
        }
        texts.retain(|t| t != "None" && !t.is_empty());
        let addresses = |field: &str, texts: &[String]| {
            let set = texts.iter().map(|t| address(field, t)).collect::<Result<BTreeSet<_>, _>>()?;
            Ok::<Vec<IpAddr>, String>(set.into_iter().collect())
        };
        let mut load_balancer_ips = BTreeSet::new();
        let ingress =
            w.status.load_balancer.ingress.iter().filter(|i| !i.ip.is_empty() && i.ip_mode != "Proxy");
        for ip in ingress.map(|i| address("status.loadBalancer.ingress.ip", &i.ip)) {
            load_balancer_ips.insert(ip?);
        }
        let mut ports = Vec::with_capacity(spec.ports.len());
        for p in spec.ports {
            ports.push(LoadBalancerPort {
                protocol: protocol("spec.ports.protocol", &p.protocol)?,
                name: p.name,
                port: p.port,
                node_port: Some(p.node_port).filter(|n| *n != 0),
            });
        }
        let affinity = (spec.session_affinity == "ClientIP")
            .then(|| spec.session_affinity_config.client_ip.timeout_seconds.unwrap_or(AFFINITY));
        if affinity.is_some_and(|s| !(1..=86400).contains(&s)) {
            return Err("spec.sessionAffinityConfig.clientIP.timeoutSeconds: 1..=86400".into());
        }
        let source_ranges = spec.load_balancer_source_ranges.iter();
        Ok(Self {
            ignored,
            cluster_ips: addresses("spec.clusterIPs", &texts)?,
            external_ips: addresses("spec.externalIPs", &spec.external_ips)?,
            load_balancer_ips: load_balancer_ips.into_iter().collect(),
            ports,
            affinity,
            internal_local: spec.internal_traffic_policy == "Local",
            external_local: spec.external_traffic_policy == "Local",
            source_ranges: source_ranges
                .map(|t| cidr("spec.loadBalancerSourceRanges", t.trim()))
                .collect::<Result<_, _>>()?,
            health_check_port: Some(spec.health_check_node_port).filter(|n| *n != 0),
        })
    }
}

/// Ranges that Services get their addresses from. Kubernetes before 1.33 has no such objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    /// One per family.
    pub cidrs: Vec<IpNet>,
    /// RFC 3339, UTC: sorts as text.
    pub created: String,
}

impl Kind for ServiceCidr {
    const NAME: &'static str = "ServiceCIDR";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/servicecidrs";
    const OPTIONAL: bool = true;

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::ServiceCidr = read(json)?;
        let cidrs = w.spec.cidrs.iter().map(|t| cidr("spec.cidrs", t)).collect::<Result<_, _>>()?;
        Ok(Self { cidrs, created: w.metadata.creation_timestamp })
    }
}

/// A part of a Service's backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Name of the Service; empty for none of ours.
    pub service: String,
    /// Places.
    pub endpoints: Vec<SliceEndpoint>,
    /// Ports, the same for all of them.
    pub ports: Vec<SlicePort>,
}

/// A place where a Service's connections may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Address.
    pub address: IpAddr,
    /// Node.
    pub node: Option<NodeName>,
    /// Whether it takes connections.
    pub state: BackendState,
    /// Zones that should use it.
    pub zones: BTreeSet<String>,
    /// Nodes that should use it.
    pub nodes: BTreeSet<NodeName>,
}

/// A port of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// As the Service's port.
    pub name: String,
    /// As the Service's port.
    pub protocol: Protocol,
    /// The backend's.
    pub port: u16,
}

impl Kind for EndpointSlice {
    const NAME: &'static str = "EndpointSlice";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Slice = read(json)?;
        let labels = &w.metadata.labels;
        let ours = w.address_type != "FQDN" && !labels.contains_key(PROXY) && !labels.contains_key(HEADLESS);
        let service = labels.get("kubernetes.io/service-name").filter(|_| ours).cloned().unwrap_or_default();
        if service.is_empty() {
            return Ok(Self { service, endpoints: Vec::new(), ports: Vec::new() });
        }
        let mut endpoints = Vec::with_capacity(w.endpoints.len());
        for e in w.endpoints {
            // Only the first address counts (API reference of EndpointSlice).
            let Some(first) = e.addresses.first() else { continue };
            let ready = e.conditions.ready.unwrap_or(true);
            let serving = e.conditions.serving.unwrap_or(ready);
            let state = match (ready, serving && e.conditions.terminating.unwrap_or(false)) {
                (true, _) => BackendState::Ready,
                (false, true) => BackendState::Terminating,
                (false, false) => BackendState::NotReady,
            };
            let nodes = e.hints.for_nodes.iter().map(|h| node_name("endpoints.hints.forNodes", &h.name));
            endpoints.push(SliceEndpoint {
                address: address("endpoints.addresses", first)?,
                node: node_name("endpoints.nodeName", &e.node_name)?,
                state,
                zones: e.hints.for_zones.into_iter().map(|h| h.name).collect(),
                nodes: nodes.filter_map(Result::transpose).collect::<Result<_, _>>()?,
            });
        }
        let mut ports = Vec::with_capacity(w.ports.len());
        for p in w.ports {
            // A slice without a port number says nothing that could be served.
            let Some(port) = p.port else { continue };
            ports.push(SlicePort { protocol: protocol("ports.protocol", &p.protocol)?, name: p.name, port });
        }
        Ok(Self { service, endpoints, ports })
    }
}
