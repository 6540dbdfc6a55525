//! What people mean by the sides of a question: endpoints, Pods, Services, addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_api::{Side, SideKind, nearest};
use flowloom_compiler::{FrontendAnswer, FrontendExplanation, Scope, ServiceKey, explain_service};
use flowloom_k8s::{POD_NAME, POD_NAMESPACE};
use flowloom_model::{DEFAULT_VPC, Endpoint, EndpointKey, Family, VpcName, joined};

use crate::core::Core;
use crate::events::Passes;
use crate::names;

/// Backends whose policies are asked at most: one on another node is compiled for the answer.
pub(crate) const JUDGED: usize = 16;

pub(crate) fn invalid(message: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message.to_string())
}

fn unknown(message: String) -> ApiError {
    ApiError::new(ErrorCode::NotFound, message)
}

/// One side, found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    /// Whoever has it.
    Address(IpAddr),
    /// An endpoint of the world.
    Endpoint(EndpointKey),
    /// A Service of the world.
    Service(ServiceKey),
}

/// Both sides, in one VPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    pub(crate) vpc: VpcName,
    pub(crate) from: Meant,
    pub(crate) to: Meant,
}

/// As people write it: `namespace/pod` of a Pod, else `vpc/name`.
fn shown(e: &Endpoint) -> String {
    match (e.labels.get(POD_NAMESPACE), e.labels.get(POD_NAME)) {
        (Some(namespace), Some(name)) if e.vpc.is_default() => format!("{namespace}/{name}"),
        _ => e.key().to_string(),
    }
}

/// `namespace/name` of a Kubernetes Service, else `vpc/name`.
pub(crate) fn shown_service((vpc, name): &ServiceKey) -> String {
    match name.as_str().split_once('.') {
        Some((namespace, name)) if vpc.is_default() => format!("{namespace}/{name}"),
        _ => format!("{vpc}/{name}"),
    }
}

fn did_you_mean(near: Option<&str>) -> String {
    near.map(|n| format!("; did you mean {n}?")).unwrap_or_default()
}

impl Core {
    /// Finds both sides of a question. A side without a VPC is in the other side's, else in `vpc`, else in the default VPC.
    ///
    /// # Errors
    /// What is not there, with the nearest that is; sides of two VPCs.
    pub(crate) fn sides(&self, vpc: &str, from: &str, to: &str) -> Result<Sides, ApiError> {
        let told: Option<VpcName> = match vpc {
            "" => None,
            name => Some(name.parse().map_err(invalid)?),
        };
        let (from, to): (Side, Side) = (from.parse().map_err(invalid)?, to.parse().map_err(invalid)?);
        let mut known = [None, None];
        for (found, side) in known.iter_mut().zip([&from, &to]) {
            if side.before.is_some() {
                *found = Some(self.meant(side, told.as_ref())?);
            }
        }
        let mut vpcs: BTreeSet<VpcName> = known.iter().flatten().map(|(vpc, _)| vpc.clone()).collect();
        // A VPC told beside sides that say theirs is theirs, too.
        vpcs.extend(told);
        let vpc = match (vpcs.pop_first(), vpcs.pop_first()) {
            (Some(a), Some(b)) => {
                return Err(invalid(format!(
                    "VPC {a} and VPC {b}: both sides must be in one VPC; nothing is ever forwarded between VPCs"
                )));
            }
            (Some(one), None) => one,
            (None, _) => DEFAULT_VPC.parse().map_err(invalid)?,
        };
        let [from, to] =
            [(known[0].take(), &from), (known[1].take(), &to)].map(|(found, side)| match found {
                Some((_, meant)) => Ok(meant),
                None => self.meant(side, Some(&vpc)).map(|(_, meant)| meant),
            });
        Ok(Sides { from: from?, to: to?, vpc })
    }

    /// Finds one side, and its VPC.
    ///
    /// # Errors
    /// When it is not there, with the nearest that is.
    pub(crate) fn meant(&self, side: &Side, vpc: Option<&VpcName>) -> Result<(VpcName, Meant), ApiError> {
        let bare = vpc.map_or(DEFAULT_VPC, VpcName::as_str);
        let before = side.before.as_deref().unwrap_or(bare);
        if let Some(ip) = side.address() {
            let vpc: VpcName = before.parse().map_err(invalid)?;
            return match self.world.vpcs.contains_key(&vpc) {
                true => Ok((vpc, Meant::Address(ip))),
                false => {
                    let near = nearest(before, self.world.vpcs.keys().map(VpcName::as_str));
                    Err(unknown(format!("vpc {before} does not exist{}", did_you_mean(near))))
                }
            };
        }
        match side.kind {
            SideKind::Service => {
                let key = self.service_key(before, &side.name)?;
                Ok((key.0.clone(), Meant::Service(key)))
            }
            SideKind::Pod => {
                let key = pod_key(before, &side.name)?;
                self.there(key.clone(), side).map(|()| (key.vpc.clone(), Meant::Endpoint(key)))
            }
            SideKind::Any => {
                let key = self.endpoint_meant(before, &side.name)?;
                self.there(key.clone(), side).map(|()| (key.vpc.clone(), Meant::Endpoint(key)))
            }
        }
    }

    /// The endpoint that `vpc/name` or `namespace/pod` stands for, whether it is there or not.
    ///
    /// # Errors
    /// What can be no name.
    pub(crate) fn endpoint_meant(&self, before: &str, name: &str) -> Result<EndpointKey, ApiError> {
        let own = format!("{before}/{name}").parse::<EndpointKey>();
        if let Ok(key) = &own
            && self.world.endpoints.contains_key(key)
        {
            return Ok(key.clone());
        }
        let pod = pod_key(before, name)?;
        match own {
            // What is nowhere is looked for in the VPC, where there is one of that name.
            Ok(own) if !self.world.endpoints.contains_key(&pod) && self.world.vpcs.contains_key(&own.vpc) => {
                Ok(own)
            }
            _ => Ok(pod),
        }
    }

    /// Why an endpoint is none of this node's.
    pub(crate) fn not_here(&self, before: &str, name: &str, key: &EndpointKey) -> String {
        if let Some(e) = self.world.endpoints.get(key) {
            return format!("endpoint {} runs on node {}: ask there", shown(e), e.node);
        }
        let local: Vec<String> =
            self.world.endpoints.values().filter(|e| e.node == self.config.node).map(|e| shown(e)).collect();
        let near = did_you_mean(nearest(&format!("{before}/{name}"), local.iter().map(String::as_str)));
        format!("endpoint {before}/{name} is not one of this node{near}; see `flowloom endpoint list`")
    }

    fn there(&self, key: EndpointKey, side: &Side) -> Result<(), ApiError> {
        if self.world.endpoints.contains_key(&key) {
            return Ok(());
        }
        let called = match &side.before {
            Some(before) => format!("{before}/{}", side.name),
            None => key.to_string(),
        };
        if self.service_key(side.before.as_deref().unwrap_or(key.vpc.as_str()), &side.name).is_ok() {
            return Err(unknown(format!(
                "endpoint {called} does not exist; a Service does: write svc/{called}"
            )));
        }
        let names: Vec<String> = self.world.endpoints.values().map(|e| shown(e)).collect();
        let near = nearest(&called, names.iter().map(String::as_str));
        Err(unknown(format!(
            "endpoint {called} does not exist, nor a Pod of that name{}",
            did_you_mean(near)
        )))
    }

    /// The nearest Service, for people.
    pub(crate) fn near_service(&self, before: &str, name: &str) -> String {
        let names: Vec<String> = self.world.services.keys().map(shown_service).collect();
        did_you_mean(nearest(&format!("{before}/{name}"), names.iter().map(String::as_str)))
    }

    /// The address of a side in one family: the receiver's, or the sender's.
    ///
    /// # Errors
    /// When it has none.
    pub(crate) fn address_of(&self, meant: &Meant, family: Family, sends: bool) -> Result<IpAddr, ApiError> {
        match meant {
            Meant::Address(ip) if Family::of(*ip) == family => Ok(*ip),
            Meant::Address(ip) => Err(invalid(format!("{ip} is no {family} address"))),
            Meant::Endpoint(key) => {
                let ips = self.world.endpoints.get(key).map(|e| e.ips.as_slice()).unwrap_or_default();
                let found = ips.iter().find(|ip| Family::of(**ip) == family);
                found.copied().ok_or_else(|| invalid(format!("endpoint {key} has no {family} address")))
            }
            Meant::Service(key) => {
                let fronts = self.fronts(key).into_iter().filter(|f| Family::of(f.ip) == family);
                let found = if sends {
                    // Who answers for it: a backend, one of this node first.
                    let mut used: Vec<_> =
                        fronts.flat_map(|f| f.backends).filter(|b| b.used.is_used()).collect();
                    used.sort_by_key(|b| !b.local);
                    used.first().map(|b| b.ip)
                } else {
                    fronts.map(|f| f.ip).next()
                };
                let what = if sends { "backend in use" } else { "address" };
                found.ok_or_else(|| {
                    invalid(format!("service {} has no {family} {what} on this node", shown_service(key)))
                })
            }
        }
    }

    /// The family that both sides have: the one asked for, else the first in common.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn family_of(
        &self,
        sides: &Sides,
        asked: Option<u8>,
    ) -> Result<(Family, IpAddr, IpAddr), ApiError> {
        let families: &[Family] = match asked {
            None => &[Family::V4, Family::V6],
            Some(4) => &[Family::V4],
            Some(6) => &[Family::V6],
            Some(n) => return Err(invalid(format!("family {n} is neither 4 nor 6"))),
        };
        let mut last = invalid("no family");
        for family in families {
            let from = self.address_of(&sides.from, *family, true);
            match from.and_then(|from| Ok((*family, from, self.address_of(&sides.to, *family, false)?))) {
                Ok(found) => return Ok(found),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn fronts(&self, key: &ServiceKey) -> Vec<FrontendExplanation> {
        let explained = explain_service(&self.world, &self.config.node, &self.wanted, key);
        explained.map(|e| e.frontends).unwrap_or_default()
    }

    /// What a Service answers to a client at `source` who asks for a port of one of its addresses; none: it is no Service.
    ///
    /// # Errors
    /// A port it does not have.
    pub(crate) fn service_side(
        &self,
        meant: &Meant,
        source: IpAddr,
        vpc: &VpcName,
        protocol: u8,
        port: Option<u16>,
    ) -> Result<Option<v1::ServiceSide>, ApiError> {
        let Meant::Service(key) = meant else { return Ok(None) };
        let (name, word) = (shown_service(key), names::protocol(protocol));
        let inside = self.world.endpoints.values().any(|e| e.vpc == *vpc && e.ips.contains(&source))
            || self.world.nodes.values().any(|n| n.addresses.contains(&source));
        let scope = if inside { Scope::Inside } else { Scope::Outside };
        let fronts = self.fronts(key).into_iter().filter(|f| {
            f.ip.is_ipv4() == source.is_ipv4()
                && f.protocol == protocol
                && f.scope == scope
                && f.taken_by.is_none()
        });
        // By its own ports, whatever the kind of address: node ports are said by people as the Service's port.
        let mut fronts: Vec<_> = fronts.collect();
        let ports: BTreeSet<u16> = fronts.iter().map(|f| f.service_port).collect();
        let port = match (port, ports.iter().next()) {
            (Some(port), _) => port,
            (None, Some(only)) if ports.len() == 1 => *only,
            (None, _) => {
                let list: Vec<String> = ports.iter().map(ToString::to_string).collect();
                let has = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
                return Err(invalid(format!("name a port: service {name} has these of {word}: {has}")));
            }
        };
        fronts.retain(|f| f.service_port == port);
        let Some(front) = fronts.into_iter().next() else {
            let list: Vec<String> = ports.iter().map(ToString::to_string).collect();
            let has = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
            let whom = if inside { "from inside" } else { "from outside" };
            let message =
                format!("service {name} has no {word} port {port} for clients {whom}; it has: {has}");
            return Err(ApiError::new(ErrorCode::NotFound, message));
        };
        let backends = front.backends.iter().map(|b| v1::SideBackend {
            ip: b.ip,
            port: b.port,
            node: b.node.as_ref().map(ToString::to_string),
            endpoint: self
                .world
                .endpoints
                .values()
                .find(|e| e.vpc == key.0 && e.ips.contains(&b.ip))
                .map(|e| shown(e)),
            used: b.used.is_used(),
            why: b.used.reason().to_owned(),
            verdict: None,
        });
        Ok(Some(v1::ServiceSide {
            service: name,
            kind: front.kind.word().to_owned(),
            ip: front.ip,
            port: front.port,
            answer: answer_word(front.answer).to_owned(),
            backends: backends.collect(),
        }))
    }

    /// A filter of events with its sides found.
    ///
    /// # Errors
    /// As for [`Core::who`].
    pub(crate) fn passes_of(&self, filter: &v1::EventFilter) -> Result<Passes, ApiError> {
        let who = |side: &Option<String>| {
            side.as_deref().map(|text| self.who(text, filter.vpc.as_deref())).transpose()
        };
        let (either, from, to) = (who(&filter.endpoint)?, who(&filter.from)?, who(&filter.to)?);
        Ok(Passes { either, from, to, ..Passes::of(filter) })
    }

    /// Who events are of: the side of a filter.
    ///
    /// # Errors
    /// What can be no side; a Service that is not there.
    pub(crate) fn who(&self, text: &str, vpc: Option<&str>) -> Result<Who, ApiError> {
        let side: Side = text.parse().map_err(invalid)?;
        let before = side.before.as_deref().or(vpc);
        if let Some(ip) = side.address() {
            return Ok(Who::Address(side.before.clone(), ip));
        }
        match (side.kind, before) {
            (SideKind::Service, before) => {
                let key = self.service_key(before.unwrap_or(DEFAULT_VPC), &side.name)?;
                let fronts = self.fronts(&key);
                let backends = fronts.iter().flat_map(|f| &f.backends).map(|b| (b.ip, b.port));
                let places = fronts.iter().map(|f| (f.ip, f.port)).chain(backends).collect();
                Ok(Who::Places(key.0.to_string(), places))
            }
            (SideKind::Pod, Some(before)) => pod_key(before, &side.name).map(|k| Who::named(&k)),
            // One that comes later may be meant.
            (_, Some(before)) => self.endpoint_meant(before, &side.name).map(|k| Who::named(&k)),
            (_, None) => Ok(Who::Name(None, side.name)),
        }
    }
}

/// A side of a filter of events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// An endpoint's name, of this VPC.
    Name(Option<String>, String),
    /// An address, of this VPC.
    Address(Option<String>, IpAddr),
    /// Addresses and ports of this VPC.
    Places(String, BTreeSet<(IpAddr, u16)>),
}

impl Who {
    fn named(key: &EndpointKey) -> Self {
        Self::Name(Some(key.vpc.to_string()), key.name.to_string())
    }

    /// Whether it is the sender or receiver of an event.
    pub(crate) fn is(&self, e: &v1::Event, sends: bool) -> bool {
        let (ip, port, endpoint) = match sends {
            true => (e.src, e.src_port, &e.src_endpoint),
            false => (e.dst, e.dst_port, &e.dst_endpoint),
        };
        match self {
            Self::Name(vpc, name) => {
                vpc.as_ref().is_none_or(|v| *v == e.vpc.name)
                    && endpoint.as_ref().is_some_and(|n| n.name == *name)
            }
            Self::Address(vpc, own) => vpc.as_ref().is_none_or(|v| *v == e.vpc.name) && *own == ip,
            Self::Places(vpc, places) => *vpc == e.vpc.name && places.contains(&(ip, port)),
        }
    }

    /// Whether it is at either side, or the endpoint whose hook or policy it was.
    pub(crate) fn is_either(&self, e: &v1::Event) -> bool {
        let hooked = match self {
            Self::Name(vpc, name) => {
                vpc.as_ref().is_none_or(|v| *v == e.vpc.name)
                    && [&e.endpoint, &e.peer_endpoint].into_iter().flatten().any(|n| n.name == *name)
            }
            _ => false,
        };
        hooked || self.is(e, true) || self.is(e, false)
    }
}

pub(crate) const fn answer_word(answer: FrontendAnswer) -> &'static str {
    match answer {
        FrontendAnswer::Backend => "backend",
        FrontendAnswer::Refused => "refused",
        FrontendAnswer::Silence => "silence",
    }
}

/// The endpoint of a Pod.
fn pod_key(namespace: &str, name: &str) -> Result<EndpointKey, ApiError> {
    // Any text can be joined; what can be no Pod's name is refused first.
    let _: Side = format!("pod/{namespace}/{name}").parse().map_err(invalid)?;
    format!("{DEFAULT_VPC}/{}", joined(&[namespace, name])).parse().map_err(invalid)
}

#[cfg(test)]
mod tests;
