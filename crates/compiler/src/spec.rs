//! Policy specs: the rules of one direction, resolved as far as they can be without knowing any peer.
//!
//! Two endpoints with equal specs share a slot. Everything a spec leaves open (who is in a group, who has a label, which port a
//! peer calls `web`) is a fact of identities, so peers come and go without a new spec.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flowloom_model::{
    Action, CidrEntry, CidrGroupName, DefaultPolicy, Direction, Endpoint, Entity, GroupName, Operator,
    PortName, Protocol, Remote, Rule, SecurityGroup, Selector, VpcName, World,
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{RuleId, RuleRef};

/// IP protocol numbers that rules can name.
pub(crate) mod protocol {
    pub(crate) const ICMP: u8 = 1;
    pub(crate) const TCP: u8 = 6;
    pub(crate) const UDP: u8 = 17;
    pub(crate) const ICMPV6: u8 = 58;
    pub(crate) const SCTP: u8 = 132;
}

/// The numbers of a rule's protocol; empty = every protocol.
#[must_use]
pub fn protocol_numbers(p: Protocol) -> &'static [u8] {
    match p {
        Protocol::Any => &[],
        Protocol::Tcp => &[protocol::TCP],
        Protocol::Udp => &[protocol::UDP],
        Protocol::Icmp => &[protocol::ICMP, protocol::ICMPV6],
        Protocol::Sctp => &[protocol::SCTP],
    }
}

/// The resolved rules of one direction. Equal specs share a slot.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct PolicySpec {
    /// VPC: two VPCs never share a slot.
    pub vpc: VpcName,
    /// Direction.
    pub direction: Direction,
    /// What is decided when no rule matches.
    pub default: DefaultVerdict,
    /// Rules, sorted.
    pub rules: Vec<SpecRule>,
}

/// What a direction does when no rule matches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DefaultVerdict {
    /// Pass.
    Allow,
    /// Drop.
    Drop,
}

/// One rule of a spec.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SpecRule {
    /// 0 platform, 1 tenant, 2 baseline.
    pub tier: u8,
    /// The lower number wins.
    pub priority: u16,
    /// Full name.
    pub name: Arc<RuleRef>,
    /// Number.
    pub id: RuleId,
    /// Action.
    pub action: Action,
    /// Record new connections.
    pub log: bool,
    /// Whether replies pass by themselves.
    pub stateful: bool,
    /// Peers.
    pub remote: SpecRemote,
    /// Protocols and ports; the rule matches when one of them does. Empty = nothing.
    pub services: BTreeSet<Service>,
    /// Ports that each peer defines for itself (egress), and the protocol they must have.
    pub peer_ports: BTreeSet<PortName>,
    /// Protocol that a peer's port must have, `Any` = whichever it has.
    pub peer_port_protocol: Protocol,
}

/// A protocol with a range of ports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Service {
    /// IP protocol number, none = every protocol.
    pub protocol: Option<u8>,
    /// Inclusive range of the 16 bits that follow the protocol in a policy key; none = all of them.
    pub ports: Option<(u16, u16)>,
}

/// Whom a rule of a spec speaks of.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpecRemote {
    /// Anyone.
    Any,
    /// Addresses, holes applied per entry.
    Cidrs(BTreeSet<SpecCidr>),
    /// Endpoints that carry the group.
    Group(GroupName),
    /// Endpoints by label.
    Selector(SpecSelector),
    /// Well-known sets.
    Entities(BTreeSet<Entity>),
}

/// A CIDR with holes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SpecCidr {
    /// The CIDR.
    pub cidr: IpNet,
    /// Holes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub except: BTreeSet<IpNet>,
}

/// A label selector in an order of its own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SpecSelector {
    /// Equal labels.
    pub labels: BTreeMap<String, String>,
    /// Expressions.
    pub expressions: Vec<SpecExpression>,
}

/// One expression.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SpecExpression {
    /// Label.
    pub key: String,
    /// Operator.
    pub operator: SpecOperator,
    /// Values.
    pub values: BTreeSet<String>,
}

/// Operators, as in the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum SpecOperator {
    /// The label has one of the values.
    In,
    /// The label is absent or has none of the values.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

impl From<&Selector> for SpecSelector {
    fn from(selector: &Selector) -> Self {
        let mut expressions: Vec<_> = selector
            .expressions
            .iter()
            .map(|e| SpecExpression {
                key: e.key.clone(),
                operator: match e.operator {
                    Operator::In => SpecOperator::In,
                    Operator::NotIn => SpecOperator::NotIn,
                    Operator::Exists => SpecOperator::Exists,
                    Operator::DoesNotExist => SpecOperator::DoesNotExist,
                },
                values: e.values.clone(),
            })
            .collect();
        expressions.sort();
        Self { labels: selector.labels.clone(), expressions }
    }
}

impl SpecSelector {
    /// Whether the labels match. Nothing to match on selects nothing.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        !(self.labels.is_empty() && self.expressions.is_empty())
            && self.labels.iter().all(|(k, v)| labels.get(k) == Some(v))
            && self.expressions.iter().all(|e| e.matches(labels.get(&e.key)))
    }
}

impl SpecExpression {
    pub(crate) fn matches(&self, value: Option<&String>) -> bool {
        match self.operator {
            SpecOperator::In => value.is_some_and(|v| self.values.contains(v)),
            SpecOperator::NotIn => value.is_none_or(|v| !self.values.contains(v)),
            SpecOperator::Exists => value.is_some(),
            SpecOperator::DoesNotExist => value.is_none(),
        }
    }
}

/// The prefixes that entity `private` stands for (RFC 1918, RFC 6598, RFC 4193).
#[must_use]
pub fn private_prefixes() -> [IpNet; 5] {
    use std::net::{Ipv4Addr, Ipv6Addr};
    let v4 = |a, b, len| IpNet::V4(ipnet::Ipv4Net::new_assert(Ipv4Addr::new(a, b, 0, 0), len));
    [
        v4(10, 0, 8),
        v4(172, 16, 12),
        v4(192, 168, 16),
        v4(100, 64, 10),
        IpNet::V6(ipnet::Ipv6Net::new_assert(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7)),
    ]
}

/// `0.0.0.0/0` and `::/0`.
#[must_use]
pub fn everywhere() -> [IpNet; 2] {
    [IpNet::V4(ipnet::Ipv4Net::default()), IpNet::V6(ipnet::Ipv6Net::default())]
}

/// What a rule's peers are, with CIDR groups looked up. `Err`: the group does not exist.
pub(crate) fn resolve_remote(
    world: &World,
    vpc: &VpcName,
    remote: &Remote,
) -> Result<SpecRemote, CidrGroupName> {
    Ok(match remote {
        Remote::Any => SpecRemote::Any,
        Remote::Cidr(entry) => SpecRemote::Cidrs([spec_cidr(entry)].into()),
        Remote::CidrGroup(name) => {
            let group = world.cidr_groups.get(&(vpc.clone(), name.clone())).ok_or_else(|| name.clone())?;
            SpecRemote::Cidrs(group.entries.iter().map(spec_cidr).collect())
        }
        Remote::Group(name) => SpecRemote::Group(name.clone()),
        Remote::Selector(selector) => SpecRemote::Selector(selector.into()),
        Remote::Entities(set) => SpecRemote::Entities(set.clone()),
    })
}

fn spec_cidr(entry: &CidrEntry) -> SpecCidr {
    SpecCidr { cidr: entry.cidr.trunc(), except: entry.except.iter().map(IpNet::trunc).collect() }
}

/// The services of a rule that need no peer. Own named ports are looked up in `own` (ingress).
///
/// Ports go with tcp, udp and sctp; without a protocol they mean all three. A type goes with icmp. Anything else matches nothing
/// (the document's validation refuses it).
pub(crate) fn services(rule: &Rule, own: Option<&Endpoint>) -> BTreeSet<Service> {
    let any_port = rule.ports.is_empty() && rule.named_ports.is_empty();
    if let Some((kind, code)) = rule.icmp {
        let ports = match code {
            Some(code) => (u16::from_be_bytes([kind, code]), u16::from_be_bytes([kind, code])),
            None => (u16::from_be_bytes([kind, 0]), u16::from_be_bytes([kind, u8::MAX])),
        };
        let fits = any_port && matches!(rule.protocol, Protocol::Icmp | Protocol::Any);
        let numbers = if fits { protocol_numbers(Protocol::Icmp) } else { &[] };
        return numbers.iter().map(|&n| Service { protocol: Some(n), ports: Some(ports) }).collect();
    }
    if any_port {
        let numbers = protocol_numbers(rule.protocol);
        if numbers.is_empty() {
            return [Service { protocol: None, ports: None }].into();
        }
        return numbers.iter().map(|&n| Service { protocol: Some(n), ports: None }).collect();
    }
    let with_ports: &[u8] = match rule.protocol {
        Protocol::Any => &[protocol::TCP, protocol::UDP, protocol::SCTP],
        Protocol::Icmp => &[],
        other => protocol_numbers(other),
    };
    let mut services: BTreeSet<Service> = with_ports
        .iter()
        .flat_map(|&n| rule.ports.iter().map(move |&ports| Service { protocol: Some(n), ports: Some(ports) }))
        .filter(|s| s.ports.is_some_and(|(from, to)| from <= to))
        .collect();
    for port in own.into_iter().flat_map(|e| &e.named_ports) {
        let fits = rule.protocol == Protocol::Any || rule.protocol == port.protocol;
        if fits && rule.named_ports.contains(&port.name) {
            let ports = Some((port.port, port.port));
            services.extend(
                protocol_numbers(port.protocol)
                    .iter()
                    .filter(|n| with_ports.contains(n))
                    .map(|&n| Service { protocol: Some(n), ports }),
            );
        }
    }
    services
}

/// What a direction does where no rule matches: closed when some attached group covers it without switching that off (a group
/// that does not exist cannot), else what the VPC says.
pub(crate) fn default_verdict<'a>(
    default_policy: DefaultPolicy,
    direction: Direction,
    mut groups: impl Iterator<Item = Option<&'a SecurityGroup>>,
) -> DefaultVerdict {
    let isolated = groups.any(|group| {
        let switch = group.and_then(|g| match direction {
            Direction::Ingress => g.default_deny_ingress,
            Direction::Egress => g.default_deny_egress,
        });
        switch != Some(false)
    });
    match (isolated, default_policy) {
        (true, _) | (false, DefaultPolicy::Deny) => DefaultVerdict::Drop,
        (false, DefaultPolicy::Allow) => DefaultVerdict::Allow,
    }
}
