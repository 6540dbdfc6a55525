//! What a service is on a node: every frontend, and for every backend why it is used there or not.

use std::net::IpAddr;

use flowloom_model::{BackendState, NodeName, PortName, ServiceName, World};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::build::{Claim, claims};
use super::choose::{Reach, judge};
use super::state::{Frame, Place};
use crate::fault::Fault;
use crate::{BackendUse, FrontendKind, NodePlan, Scope, ServiceKey};

/// A service, seen from a node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ServiceExplanation {
    /// Whether its VPC is in force on this node; where it is not, there is no frontend.
    pub here: bool,
    /// The node's zone, when it has one.
    pub zone: Option<String>,
    /// In the order of ports.
    pub frontends: Vec<FrontendExplanation>,
}

/// A frontend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FrontendExplanation {
    /// What kind of address it is.
    pub kind: FrontendKind,
    /// Who asks.
    pub scope: Scope,
    /// Address.
    pub ip: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Port that clients ask for.
    pub port: u16,
    /// The service's port behind it.
    pub service_port: u16,
    /// That port's name.
    pub port_name: Option<PortName>,
    /// The service that has the frontend, when it is another one.
    pub taken_by: Option<ServiceName>,
    /// Whether a Local traffic policy holds.
    pub local_policy: bool,
    /// Who may use it; empty = everyone.
    pub source_ranges: Vec<IpNet>,
    /// What clients get.
    pub answer: FrontendAnswer,
    /// Backends of the address's family.
    pub backends: Vec<BackendExplanation>,
}

/// What clients of a frontend get.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendAnswer {
    /// One of the backends that are used.
    Backend,
    /// A refusal: no backend.
    Refused,
    /// Nothing: a Local traffic policy, and other nodes have backends.
    Silence,
}

/// A backend of a frontend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackendExplanation {
    /// Address.
    pub ip: IpAddr,
    /// Port.
    pub port: u16,
    /// Where it runs.
    pub node: Option<NodeName>,
    /// Whether that is this node.
    pub local: bool,
    /// Zones that should prefer it.
    pub zones: Vec<String>,
    /// Nodes that should prefer it.
    pub nodes: Vec<NodeName>,
    /// Why it is used, or not.
    pub used: BackendUse,
}

/// Explains a service; `None`: the world has none of this name. `plan` is what was compiled from the world for the node.
#[must_use]
pub fn explain_service(
    world: &World,
    local: &NodeName,
    plan: &NodePlan,
    key: &ServiceKey,
) -> Option<ServiceExplanation> {
    let service = world.services.get(key)?;
    let frame = Frame::new(world, local, plan);
    let zone = frame.here.zone.clone();
    let Some(Place::Here(vpc)) = frame.vpcs.get(&service.vpc) else {
        return Some(ServiceExplanation { here: false, zone, frontends: Vec::new() });
    };
    let wanted = claims(service, *vpc, &frame.here).0;
    // The first by name has an address: only services before this one can have taken it.
    let before: Vec<_> = world
        .services
        .starting_at(&(key.0.clone(), first_name(key)))
        .take_while(|(other, _)| *other < key)
        .map(|(_, other)| other)
        .filter(|other| shares_an_address(other, service))
        .flat_map(|other| claims(other, *vpc, &frame.here).0.into_iter().map(|c| (c.key, other.name.clone())))
        .collect();
    let explain = |claim: &Claim| {
        let port = service.ports.get(claim.port)?;
        let (v4, reach) = (claim.key.ip.is_ipv4(), claim.reach(service));
        let judged = judge(&port.backends, v4, reach, &frame.here, Fault::None);
        let outside = claim.key.scope == Scope::Outside;
        let serving = judged.iter().any(|(_, b, _)| b.state != BackendState::NotReady);
        let answer = if judged.iter().any(|(_, _, used)| used.is_used()) {
            FrontendAnswer::Backend
        } else if outside && reach == Reach::Local && serving {
            FrontendAnswer::Silence
        } else {
            FrontendAnswer::Refused
        };
        let ranged = claim.kind == FrontendKind::LoadBalancer;
        Some(FrontendExplanation {
            kind: claim.kind,
            scope: claim.key.scope,
            ip: claim.key.ip,
            protocol: claim.key.protocol,
            port: claim.key.port,
            service_port: port.port,
            port_name: port.name.clone(),
            taken_by: before.iter().find(|(key, _)| *key == claim.key).map(|(_, name)| name.clone()),
            local_policy: reach == Reach::Local,
            source_ranges: if ranged { service.source_ranges.clone() } else { Vec::new() },
            answer,
            backends: judged
                .into_iter()
                .map(|((ip, port), b, used)| BackendExplanation {
                    ip,
                    port,
                    node: b.node.clone(),
                    local: b.node.as_ref() == Some(local),
                    zones: b.zones.iter().cloned().collect(),
                    nodes: b.nodes.iter().cloned().collect(),
                    used,
                })
                .collect(),
        })
    };
    let frontends = wanted.iter().filter(|c| c.kind != FrontendKind::Rest).filter_map(explain).collect();
    Some(ServiceExplanation { here: true, zone, frontends })
}

/// The first name there can be, to start a range of a VPC's services.
fn first_name(key: &ServiceKey) -> ServiceName {
    // Names are made of `-`, `.`, digits and letters and begin with a digit or letter: nothing sorts before this.
    "0".parse().unwrap_or_else(|_| key.1.clone())
}

fn shares_an_address(a: &flowloom_model::Service, b: &flowloom_model::Service) -> bool {
    let node_ports = |s: &flowloom_model::Service| {
        s.ports.iter().any(|p| p.node_port.is_some() || !p.host_addresses.is_empty())
    };
    let all = |s: &flowloom_model::Service| {
        s.cluster_ips
            .iter()
            .chain(&s.external_ips)
            .chain(&s.load_balancer_ips)
            .copied()
            .collect::<std::collections::BTreeSet<_>>()
    };
    (node_ports(a) || node_ports(b)) || !all(a).is_disjoint(&all(b))
}
