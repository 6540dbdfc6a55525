//! One service to its share of the maps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::service_flags;
use flowloom_model::{BackendState, Protocol, Service, ServicePort};
use serde::{Deserialize, Serialize};

use super::choose::{Here, Reach, judge};
use super::numbers::ServiceNumbers;
use crate::fault::{Fault, planted};
use crate::spec::{protocol, protocol_numbers};
use crate::{
    BackendPlan, Condition, ConditionReason, FrontendKey, FrontendPlan, ObjectRef, Scope, ServicePart,
    ServiceRef, VpcId,
};

/// What kind of address a frontend is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendKind {
    /// The service's own address, for its VPC only.
    ClusterIp,
    /// An address that a load balancer sends to the nodes.
    LoadBalancer,
    /// An address that somebody routes to the nodes.
    ExternalIp,
    /// A port of every node's own addresses.
    NodePort,
    /// A port of single addresses of this node.
    HostPort,
    /// Everything else of an address that belongs to services only: refused.
    Rest,
}

impl FrontendKind {
    /// For people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::ClusterIp => "cluster-ip",
            Self::LoadBalancer => "load-balancer",
            Self::ExternalIp => "external-ip",
            Self::NodePort => "node-port",
            Self::HostPort => "host-port",
            Self::Rest => "rest",
        }
    }
}

/// An address and port that a service wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    pub(crate) key: FrontendKey,
    pub(crate) kind: FrontendKind,
    /// Index of the port; for [`FrontendKind::Rest`] the first one that is served there.
    pub(crate) port: usize,
}

impl Claim {
    /// Backends that may be meant. A client inside that asks an external address is treated as if it had gone out and come back through
    /// whatever balances there: no Local policy holds for it, as the upstream proxy has it.
    pub(crate) fn reach(&self, service: &Service) -> Reach {
        let local = match (self.kind, self.key.scope) {
            (FrontendKind::ClusterIp, _) => service.internal_local,
            (FrontendKind::HostPort | FrontendKind::Rest, _) | (_, Scope::Inside) => false,
            (_, Scope::Outside) => service.external_local,
        };
        if local { Reach::Local } else { Reach::Cluster }
    }
}

/// Everything a service wants, in a fixed order, no key twice; what two of its own ports both want goes to the first, with a condition.
///
/// Node ports are wanted on this node's own addresses only, also for clients inside: another node's address is that node's to serve. It
/// alone can keep `externalTrafficPolicy: Local`, and whoever asks it wants to know whether *it* answers.
pub(crate) fn claims(service: &Service, vpc: VpcId, here: &Here) -> (Vec<Claim>, Vec<Condition>) {
    let mut out = Claims { service, vpc, seen: BTreeMap::new(), claims: Vec::new(), conditions: Vec::new() };
    let default = service.vpc.is_default();
    let both: &[Scope] = if default { &[Scope::Inside, Scope::Outside] } else { &[Scope::Inside] };
    for (index, port) in service.ports.iter().enumerate() {
        let &[protocol] = protocol_numbers(port.protocol) else {
            out.condition(format!("port {}: a port has one protocol: tcp, udp or sctp", port.port));
            continue;
        };
        // The checksum of SCTP covers the whole packet: programs cannot change a port of it.
        if protocol == protocol::SCTP
            && (port.node_port.is_some() || port.backends.iter().any(|((_, number), _)| *number != port.port))
        {
            out.condition(format!(
                "port {}: sctp is served at the service's own port only; what would need another (node port, target port) is dropped: \
                 give the backends this port",
                port.port
            ));
        }
        if protocol == protocol::SCTP && default && asks_elsewhere(service, port, here) {
            out.condition(format!(
                "port {}: sctp from outside is served by backends of the node that was asked only; what would go to another node's is \
                 dropped (ServiceUnsupported): set externalTrafficPolicy: Local",
                port.port
            ));
        }
        if !default && (port.node_port.is_some() || !port.host_addresses.is_empty()) {
            out.condition(format!(
                "port {}: ports of nodes exist in the default vpc only: leave node and host ports out",
                port.port
            ));
        }
        let mut add = |kind, ips: &mut dyn Iterator<Item = IpAddr>, number, scopes: &[Scope]| {
            for ip in ips {
                for &scope in scopes {
                    let key = FrontendKey { vpc, ip, protocol, port: number, scope };
                    out.add(Claim { key, kind, port: index });
                }
            }
        };
        if !port.host_addresses.is_empty() {
            let ips = if default { host_addresses(port, here) } else { BTreeSet::new() };
            add(FrontendKind::HostPort, &mut ips.into_iter(), port.port, both);
            continue;
        }
        add(FrontendKind::ClusterIp, &mut service.cluster_ips.iter().copied(), port.port, &[Scope::Inside]);
        add(FrontendKind::LoadBalancer, &mut service.load_balancer_ips.iter().copied(), port.port, both);
        add(FrontendKind::ExternalIp, &mut service.external_ips.iter().copied(), port.port, both);
        if let Some(number) = port.node_port.filter(|_| default) {
            let family = |ip: &IpAddr| service.cluster_ips.iter().any(|c| c.is_ipv4() == ip.is_ipv4());
            let mut own = here.addresses.iter().copied().filter(family);
            add(FrontendKind::NodePort, &mut own, number, both);
        }
    }
    if let Some(&Claim { port, .. }) = out.claims.iter().find(|c| c.kind == FrontendKind::ClusterIp) {
        for &ip in &service.cluster_ips {
            let key = FrontendKey { vpc, ip, protocol: 0, port: 0, scope: Scope::Inside };
            out.add(Claim { key, kind: FrontendKind::Rest, port });
        }
    }
    (out.claims, out.conditions)
}

/// Whether clients outside may be led to a backend of another node, which asks for a source port of this one.
fn asks_elsewhere(service: &Service, port: &ServicePort, here: &Here) -> bool {
    let mut outside = service.load_balancer_ips.iter().chain(&service.external_ips);
    !service.external_local
        && port.host_addresses.is_empty()
        && outside.any(|address| {
            port.backends.iter().any(|((ip, _), b)| {
                ip.is_ipv4() == address.is_ipv4() && serves(b.state) && b.node.as_ref() != Some(&here.node)
            })
        })
}

/// The node's addresses that a host port is on.
fn host_addresses(port: &ServicePort, here: &Here) -> BTreeSet<IpAddr> {
    let expand = |ip: &IpAddr| -> Vec<IpAddr> {
        if ip.is_unspecified() {
            here.addresses.iter().filter(|own| own.is_ipv4() == ip.is_ipv4()).copied().collect()
        } else {
            vec![*ip]
        }
    };
    port.host_addresses.iter().flat_map(expand).collect()
}

struct Claims<'a> {
    service: &'a Service,
    vpc: VpcId,
    seen: BTreeMap<FrontendKey, usize>,
    claims: Vec<Claim>,
    conditions: Vec<Condition>,
}

impl Claims<'_> {
    fn condition(&mut self, message: String) {
        self.conditions.push(Condition {
            object: object(self.service),
            reason: ConditionReason::Invalid,
            message,
        });
    }

    fn add(&mut self, claim: Claim) {
        debug_assert_eq!(claim.key.vpc, self.vpc);
        match self.seen.get(&claim.key) {
            None => {
                self.seen.insert(claim.key, claim.port);
                self.claims.push(claim);
            }
            // One address in two roles: the first one counts.
            Some(port) if *port == claim.port => {}
            Some(port) => {
                let first = self.service.ports.get(*port).map_or(0, |p| p.port);
                let message = format!("{} is wanted by its port {first}, too", shown(&claim.key));
                self.condition(message);
            }
        }
    }
}

/// A frontend for people: `tcp 10.0.0.1:80`.
pub(crate) fn shown(key: &FrontendKey) -> String {
    let protocol = match key.protocol {
        6 => "tcp",
        17 => "udp",
        132 => "sctp",
        _ => return format!("{}", key.ip),
    };
    format!("{protocol} {}", std::net::SocketAddr::new(key.ip, key.port))
}

pub(crate) fn object(service: &Service) -> ObjectRef {
    ObjectRef::Service { vpc: service.vpc.clone(), service: service.name.clone() }
}

/// A service's share: the claims it may have.
pub(crate) fn build(
    service: &Service,
    claims: &[Claim],
    here: &Here,
    numbers: &mut ServiceNumbers,
    fault: Fault,
) -> ServicePart {
    let before = numbers.of(&(service.vpc.clone(), service.name.clone()));
    let before = before.as_deref();
    let mut part = ServicePart::default();
    let mut lists: BTreeMap<(usize, bool, Reach), Vec<BackendPlan>> = BTreeMap::new();
    let mut ids = BTreeMap::new();
    for claim in claims {
        let Some(port) = service.ports.get(claim.port) else { continue };
        // Host ports may have one number on several addresses: they are one by name.
        let same = |index: usize| service.ports.get(index).is_some_and(|p| face(p) == face(port));
        let id = *ids.entry(face(port)).or_insert_with(|| {
            let (protocol, number) = face(port);
            let name = ServiceRef {
                vpc: service.vpc.clone(),
                service: service.name.clone(),
                protocol,
                port: number,
            };
            let keys = claims.iter().filter(|c| same(c.port)).map(|c| &c.key);
            let id = numbers.service(before, &name, keys);
            part.names.insert(id, name);
            part.keeps.insert(id, keeps(service.ports.iter().filter(|p| face(p) == face(port)), here));
            id
        });
        if claim.kind == FrontendKind::Rest {
            let plan = FrontendPlan { service: id, ..FrontendPlan::default() };
            part.frontends.insert(claim.key, plan);
            continue;
        }
        let (v4, reach) = (claim.key.ip.is_ipv4(), claim.reach(service));
        let list = lists.entry((claim.port, v4, reach)).or_insert_with(|| {
            judge(&port.backends, v4, reach, here, fault)
                .into_iter()
                .filter(|(_, _, used)| used.is_used())
                .map(|((ip, port), b, _)| BackendPlan {
                    ip,
                    port,
                    local: b.node.as_ref() == Some(&here.node),
                })
                .collect()
        });
        let count = list.len() as u32;
        let number = numbers.list(before, &mut part.lists, list.clone(), &claim.key, fault);
        let mut flags = 0;
        if matches!(claim.kind, FrontendKind::NodePort | FrontendKind::HostPort) {
            flags |= service_flags::NODE_PORT;
        }
        let outside = claim.key.scope == Scope::Outside;
        let keeps_source = reach == Reach::Local || claim.kind == FrontendKind::HostPort;
        if outside && keeps_source && !list.is_empty() && list.iter().all(|b| b.local) {
            flags |= service_flags::KEEP_SOURCE;
        }
        // Silence makes whoever balances outside try another node; where no node has a backend, an answer is better.
        let elsewhere = || port.backends.iter().any(|((ip, _), b)| ip.is_ipv4() == v4 && serves(b.state));
        if outside && reach == Reach::Local && list.is_empty() && elsewhere() {
            flags |= service_flags::SILENT;
        }
        // "If specified ..., this will restrict traffic through the cloud-provider load-balancer ... to the specified client IPs"
        // (Service.spec.loadBalancerSourceRanges): of addresses behind a balancer, and of whoever asks for one, Pods and nodes as well.
        if claim.kind == FrontendKind::LoadBalancer && !service.source_ranges.is_empty() {
            flags |= service_flags::RANGES;
            part.ranges.or_insert_with(id, || {
                let nets: BTreeSet<_> = service.source_ranges.iter().map(ipnet::IpNet::trunc).collect();
                nets.into_iter().collect()
            });
        }
        if planted!(fault, RangesIgnored) {
            flags &= !service_flags::RANGES;
        }
        let affinity = service.affinity.unwrap_or(0);
        let plan = FrontendPlan { service: id, list: number, count, affinity, flags };
        part.frontends.insert(claim.key, plan);
    }
    let ServicePart { keeps, lists, .. } = &mut part;
    for held in keeps.values_mut() {
        if let Some(list) = lists.values().find(|list| *list == held) {
            *held = list.clone();
        }
    }
    part.health_check = service.health_check_port.filter(|_| service.external_local).map(|port| {
        let ready = service
            .ports
            .iter()
            .flat_map(|p| &p.backends)
            .filter(|(_, b)| b.state == BackendState::Ready && b.node.as_ref() == Some(&here.node));
        (port, ready.map(|((ip, _), _)| *ip).collect::<BTreeSet<_>>().len())
    });
    part
}

/// Whether a backend serves: it does while it ends, too.
fn serves(state: BackendState) -> bool {
    state != BackendState::NotReady
}

/// What a port is known by: protocol and number.
fn face(port: &ServicePort) -> (u8, u16) {
    (protocol_numbers(port.protocol).first().copied().unwrap_or(0), port.port)
}

/// Backends whose connections live on. One that is not ready takes no new ones, but what a TCP or SCTP client has open there is its own
/// business until the backend is gone: a Pod that drains fails its readiness on purpose. A UDP client has no other end than this one.
fn keeps<'a>(ports: impl Iterator<Item = &'a ServicePort>, here: &Here) -> Arc<[BackendPlan]> {
    let listed: BTreeMap<(IpAddr, u16), bool> = ports
        .flat_map(|port| port.backends.iter().map(move |(at, b)| (port.protocol, at, b)))
        .filter(|(protocol, _, b)| *protocol != Protocol::Udp || serves(b.state))
        .map(|(_, at, b)| (*at, b.node.as_ref() == Some(&here.node)))
        .collect();
    listed.into_iter().map(|((ip, port), local)| BackendPlan { ip, port, local }).collect()
}
