//! Why a rule does or does not speak of a peer and a port: `Ok` says why it does, `Err` why not.

use std::net::IpAddr;

use flowloom_model::{Entity, Protocol};

use crate::policy::entity_matches;
use crate::spec::protocol_numbers;
use crate::{IdentityFacts, SpecCidr, SpecOperator, SpecRemote, SpecRule, SpecSelector};

pub(super) fn peer(remote: &SpecRemote, facts: &IdentityFacts, ip: IpAddr) -> Result<String, String> {
    match remote {
        SpecRemote::Any => Ok("anyone".to_owned()),
        SpecRemote::Cidrs(entries) => cidrs(entries, facts, ip),
        SpecRemote::Group(name) => match &facts.endpoint {
            Some(endpoint) if endpoint.groups.contains(name) => Ok(format!("the peer carries group {name}")),
            Some(_) => Err(format!("the peer does not carry group {name}")),
            None => Err(format!("{ip} is no endpoint, so it carries no group")),
        },
        SpecRemote::Selector(selector) => match &facts.endpoint {
            Some(endpoint) if selector.matches(&endpoint.labels) => Ok("the peer's labels match".to_owned()),
            Some(endpoint) => Err(label(selector, &endpoint.labels)),
            None => Err(format!("{ip} is no endpoint, so it has no labels")),
        },
        SpecRemote::Entities(set) => match set.iter().find(|e| entity_matches(**e, facts)) {
            Some(entity) => Ok(format!("{ip} is {}", entity_name(*entity))),
            None => {
                let names: Vec<_> = set.iter().map(|e| entity_name(*e)).collect();
                Err(format!("{ip} is none of {}", names.join(", ")))
            }
        },
    }
}

fn cidrs(
    entries: &std::collections::BTreeSet<SpecCidr>,
    facts: &IdentityFacts,
    ip: IpAddr,
) -> Result<String, String> {
    let mut hole = None;
    for entry in entries.iter().filter(|e| facts.cidrs.contains(&e.cidr)) {
        match entry.except.iter().find(|except| facts.cidrs.contains(except)) {
            None => return Ok(format!("{ip} is in {}", entry.cidr)),
            Some(except) => hole = Some(format!("{ip} is in the exception {except} of {}", entry.cidr)),
        }
    }
    Err(hole.unwrap_or_else(|| match entries.first() {
        None => "the rule names no address".to_owned(),
        Some(only) if entries.len() == 1 => format!("{ip} is not in {}", only.cidr),
        Some(first) => format!("{ip} is in none of the {} CIDRs ({}, ...)", entries.len(), first.cidr),
    }))
}

fn label(selector: &SpecSelector, labels: &flowloom_model::Labels) -> String {
    let has = |key: &str| labels.get(key).map_or_else(|| "absent".to_owned(), |value| format!("{value:?}"));
    if let Some((key, value)) = selector.labels.iter().find(|(k, v)| labels.get(*k) != Some(*v)) {
        return format!("label {key} is {}, not {value:?}", has(key));
    }
    match selector.expressions.iter().find(|e| !e.matches(labels.get(&e.key))) {
        Some(e) => {
            let values = e.values.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            let operator = match e.operator {
                SpecOperator::In => format!("not in ({values})"),
                SpecOperator::NotIn => format!("in ({values})"),
                SpecOperator::Exists => "but must exist".to_owned(),
                SpecOperator::DoesNotExist => "but must not exist".to_owned(),
            };
            format!("label {} is {}, {operator}", e.key, has(&e.key))
        }
        None => "an empty selector selects nothing".to_owned(),
    }
}

fn entity_name(entity: Entity) -> &'static str {
    match entity {
        Entity::All => "all",
        Entity::World => "world",
        Entity::WorldIpv4 => "world-ipv4",
        Entity::WorldIpv6 => "world-ipv6",
        Entity::Cluster => "cluster",
        Entity::Private => "private",
        Entity::Host => "host",
        Entity::RemoteNode => "remote-node",
        Entity::None => "none",
    }
}

pub(super) fn service(
    rule: &SpecRule,
    facts: &IdentityFacts,
    protocol: u8,
    bits: u16,
) -> Result<String, String> {
    let asked = packet(protocol, bits);
    for service in &rule.services {
        match (service.protocol, service.ports) {
            (None, _) => return Ok("any protocol".to_owned()),
            (Some(number), None) if number == protocol => {
                return Ok(format!("any {}", protocol_name(number)));
            }
            (Some(number), Some((from, to))) if number == protocol && (from..=to).contains(&bits) => {
                return Ok(if from == to {
                    asked
                } else {
                    format!("{asked} is in {}", range(number, from, to))
                });
            }
            _ => {}
        }
    }
    let fits = |number: u8| {
        number == protocol
            && (rule.peer_port_protocol == Protocol::Any
                || protocol_numbers(rule.peer_port_protocol).contains(&number))
    };
    let ports = facts.endpoint.iter().flat_map(|e| &e.named_ports);
    for (name, number, port) in ports {
        if fits(*number) && *port == bits && rule.peer_ports.iter().any(|p| p.as_str() == name) {
            return Ok(format!("{asked} is the peer's port {name:?}"));
        }
    }
    let mut wanted: Vec<String> = rule
        .services
        .iter()
        .filter_map(|s| {
            let number = s.protocol?;
            Some(s.ports.map_or_else(|| protocol_name(number), |(from, to)| range(number, from, to)))
        })
        .collect();
    wanted.extend(rule.peer_ports.iter().map(|name| format!("the peer's port {name:?}")));
    Err(if wanted.is_empty() {
        "no port it names is defined".to_owned()
    } else {
        format!("{asked} is not {}", wanted.join(" or "))
    })
}

fn protocol_name(number: u8) -> String {
    match number {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        132 => "sctp".to_owned(),
        other => format!("protocol {other}"),
    }
}

fn packet(protocol: u8, bits: u16) -> String {
    match protocol {
        1 | 58 => {
            let [kind, code] = bits.to_be_bytes();
            format!("{} type {kind} code {code}", protocol_name(protocol))
        }
        6 | 17 | 132 => format!("{}/{bits}", protocol_name(protocol)),
        _ => protocol_name(protocol),
    }
}

fn range(protocol: u8, from: u16, to: u16) -> String {
    let name = protocol_name(protocol);
    match (protocol, from == to) {
        (1 | 58, true) => packet(protocol, from),
        (1 | 58, false) => format!("{name} type {}", from >> 8),
        (_, true) => format!("{name}/{from}"),
        (_, false) => format!("{name}/{from}-{to}"),
    }
}
