//! The oracle: one packet, every rule, one by one. Slow and obviously right; shares nothing with the compiler but the model.
//!
//! Points that semantics.md leaves to the implementation and both sides take the same way:
//! * `pass` stands behind drop and reject and before allow at equal priority;
//! * attribution at equal tier, priority and action class: identity (groups, selectors, entities but `all`, a peer's own port) before
//!   CIDR before anyone; then the longer CIDR; then the longer block of ports; then the rule's name;
//! * `icmp` is IP protocol 1 or 58; ports without a protocol mean tcp, udp and sctp;
//! * a rule whose CIDR group does not exist denies everyone when it denies, and matches nobody when it does not.

use std::net::IpAddr;

use flowloom_model::{
    Action, AllowLocalhost, CidrEntry, DefaultPolicy, Direction, Endpoint, EndpointKey, Entity, NodeName,
    Protocol, Remote, Rule, SecurityGroup, VpcName, World,
};

use crate::{RuleRef, Verdict};

/// The connection's part that an endpoint judges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// The other side.
    pub peer: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Responder's port, or ICMP type << 8 | code, or 0.
    pub port: u16,
}

/// What the rules say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// Verdict.
    pub verdict: Verdict,
    /// The deciding rule, none = the default.
    pub rule: Option<RuleRef>,
    /// Its tier.
    pub tier: Option<u8>,
    /// Recorded.
    pub log: bool,
    /// Replies pass.
    pub stateful: bool,
}

struct Hit<'a> {
    group: &'a SecurityGroup,
    rule: &'a Rule,
    specificity: u32,
    block_bits: u32,
}

/// Who has an address, seen from one VPC on one node.
struct Who<'a> {
    ip: IpAddr,
    endpoint: Option<&'a Endpoint>,
    inside: bool,
    host: bool,
    remote_node: bool,
}

/// What an endpoint's rules decide, without the host's privilege ([`host_passes`]).
///
/// # Panics
/// When the endpoint or its VPC is not in the world.
#[must_use]
pub fn decide(
    world: &World,
    node: &NodeName,
    key: &EndpointKey,
    direction: Direction,
    packet: Packet,
) -> Decision {
    let endpoint = world.endpoints.get(key).expect("endpoint of the world");
    let vpc = world.vpcs.get(&key.vpc).expect("vpc of the world");
    let who = who(world, node, &key.vpc, packet.peer);
    let mut hits = Vec::new();
    let mut isolated = false;
    for name in &endpoint.security_groups {
        let Some(group) = world.security_groups.get(&(key.vpc.clone(), name.clone())) else {
            isolated = true;
            continue;
        };
        let switch = match direction {
            Direction::Ingress => group.default_deny_ingress,
            Direction::Egress => group.default_deny_egress,
        };
        if switch != Some(false) {
            isolated = true;
        }
        for rule in &group.rules {
            if rule.direction == direction {
                hits.extend(hit(world, endpoint, group, rule, &who, packet));
            }
        }
    }
    hits.sort_by(|a, b| {
        let class = |h: &Hit<'_>| match h.rule.action {
            Action::Reject => 0,
            Action::Drop => 1,
            Action::Pass => 2,
            Action::Allow | Action::Log => 3,
        };
        (a.group.tier, a.rule.priority, class(a))
            .cmp(&(b.group.tier, b.rule.priority, class(b)))
            .then(b.specificity.cmp(&a.specificity))
            .then(b.block_bits.cmp(&a.block_bits))
            .then(a.group.name.cmp(&b.group.name))
            .then(a.rule.id.cmp(&b.rule.id))
    });
    let mut left_tier = None;
    for hit in hits {
        if left_tier == Some(hit.group.tier) {
            continue;
        }
        let verdict = match hit.rule.action {
            Action::Pass => {
                left_tier = Some(hit.group.tier);
                continue;
            }
            Action::Allow | Action::Log => Verdict::Allow,
            Action::Drop => Verdict::Drop,
            Action::Reject => Verdict::Reject,
        };
        return Decision {
            verdict,
            rule: Some(RuleRef {
                vpc: key.vpc.clone(),
                group: hit.group.name.clone(),
                rule: hit.rule.id.clone(),
            }),
            tier: Some(hit.group.tier),
            log: hit.rule.log || hit.rule.action == Action::Log,
            stateful: hit.rule.stateful,
        };
    }
    let closed = isolated || vpc.default_policy == DefaultPolicy::Deny;
    let verdict = if closed { Verdict::Drop } else { Verdict::Allow };
    Decision { verdict, rule: None, tier: None, log: false, stateful: true }
}

/// Whether a packet towards an endpoint passes because its own host sent it (`allow_localhost: always`).
#[must_use]
pub fn host_passes(
    world: &World,
    node: &NodeName,
    key: &EndpointKey,
    direction: Direction,
    peer: IpAddr,
) -> bool {
    direction == Direction::Ingress
        && world.endpoints.get(key).is_some_and(|e| e.allow_localhost == AllowLocalhost::Always)
        && who(world, node, &key.vpc, peer).host
}

fn who<'a>(world: &'a World, node: &NodeName, vpc: &VpcName, ip: IpAddr) -> Who<'a> {
    let subnets = || world.subnets.values().filter(|s| s.vpc == *vpc);
    let node_of =
        world.nodes.values().find(|n| vpc.is_default() && n.addresses.contains(&ip)).map(|n| &n.name);
    let gateway = subnets().any(|s| s.gateways.contains(&ip));
    let attached = |e: &&Endpoint| {
        e.vpc == *vpc
            && e.ips.contains(&ip)
            && world
                .subnets
                .get(&(e.vpc.clone(), e.subnet.clone()))
                .is_some_and(|s| e.ips.iter().all(|ip| s.cidrs.iter().any(|c| c.contains(ip))))
    };
    Who {
        ip,
        endpoint: world.endpoints.values().map(std::sync::Arc::as_ref).find(attached),
        inside: subnets().any(|s| s.cidrs.iter().any(|c| c.contains(&ip))),
        host: gateway || node_of == Some(node),
        remote_node: !gateway && node_of.is_some_and(|n| n != node),
    }
}

/// The best way in which a rule matches; `None` when it does not.
fn hit<'a>(
    world: &World,
    endpoint: &Endpoint,
    group: &'a SecurityGroup,
    rule: &'a Rule,
    who: &Who<'_>,
    packet: Packet,
) -> Option<Hit<'a>> {
    let specificity = remote(world, group, rule, who)?;
    let mut best: Option<(u32, u32)> = None;
    let mut offer = |specificity: u32, bits: u32| best = best.max(Some((specificity, bits)));
    let with_ports = |p: Protocol| match p {
        Protocol::Any => matches!(packet.protocol, 6 | 17 | 132),
        Protocol::Tcp => packet.protocol == 6,
        Protocol::Udp => packet.protocol == 17,
        Protocol::Sctp => packet.protocol == 132,
        Protocol::Icmp => false,
    };
    if let Some((kind, code)) = rule.icmp {
        let speaks = matches!(rule.protocol, Protocol::Icmp | Protocol::Any);
        let [is_kind, is_code] = packet.port.to_be_bytes();
        let no_ports = rule.ports.is_empty() && rule.named_ports.is_empty();
        let icmp = packet.protocol == 1 || packet.protocol == 58;
        if no_ports && speaks && icmp && is_kind == kind && code.is_none_or(|c| c == is_code) {
            offer(specificity, if code.is_some() { 56 } else { 48 });
        }
    } else if rule.ports.is_empty() && rule.named_ports.is_empty() {
        match rule.protocol {
            Protocol::Any => offer(specificity, 32),
            Protocol::Icmp if packet.protocol == 1 || packet.protocol == 58 => offer(specificity, 40),
            p if with_ports(p) => offer(specificity, 40),
            _ => {}
        }
    } else if with_ports(rule.protocol) {
        for &(from, to) in &rule.ports {
            if from <= packet.port && packet.port <= to {
                offer(specificity, 40 + block_bits(packet.port, from, to));
            }
        }
        // Ports by name: the endpoint's own for what it receives, the peer's for what it sends.
        let (owner, named_specificity) = match rule.direction {
            Direction::Ingress => (Some(endpoint), specificity),
            Direction::Egress => (who.endpoint, 1000),
        };
        for port in owner.into_iter().flat_map(|e| &e.named_ports) {
            let protocol = rule.protocol == Protocol::Any || rule.protocol == port.protocol;
            let number = port.protocol != Protocol::Any && with_ports(port.protocol);
            if rule.named_ports.contains(&port.name) && protocol && number && port.port == packet.port {
                offer(named_specificity, 56);
            }
        }
    }
    best.map(|(specificity, block_bits)| Hit { group, rule, specificity, block_bits })
}

/// Bits of the largest aligned block of ports around `port` that lies inside the range.
fn block_bits(port: u16, from: u16, to: u16) -> u32 {
    (0..=16)
        .rev()
        .find(|bits| {
            let size = 1u32 << bits;
            let start = u32::from(port) / size * size;
            u32::from(from) <= start && start + size - 1 <= u32::from(to)
        })
        .map_or(16, |bits| 16 - bits)
}

/// How specifically the rule speaks of the peer; `None` when it does not.
fn remote(world: &World, group: &SecurityGroup, rule: &Rule, who: &Who<'_>) -> Option<u32> {
    let cidr = |entry: &CidrEntry| {
        let inside = entry.cidr.contains(&who.ip) && !entry.except.iter().any(|hole| hole.contains(&who.ip));
        inside.then(|| u32::from(entry.cidr.prefix_len()) + 1)
    };
    match &rule.remote {
        Remote::Any => Some(0),
        Remote::Cidr(entry) => cidr(entry),
        Remote::CidrGroup(name) => match world.cidr_groups.get(&(group.vpc.clone(), name.clone())) {
            Some(set) => set.entries.iter().filter_map(cidr).max(),
            None => matches!(rule.action, Action::Drop | Action::Reject).then_some(0),
        },
        Remote::Group(name) => who.endpoint.is_some_and(|e| e.security_groups.contains(name)).then_some(1000),
        Remote::Selector(selector) => {
            who.endpoint.is_some_and(|e| selector.matches(&e.labels)).then_some(1000)
        }
        Remote::Entities(set) if set.contains(&Entity::All) => Some(0),
        Remote::Entities(set) => set.iter().any(|e| entity(*e, who)).then_some(1000),
    }
}

fn entity(entity: Entity, who: &Who<'_>) -> bool {
    match entity {
        Entity::All => true,
        Entity::World => !who.inside,
        Entity::WorldIpv4 => !who.inside && who.ip.is_ipv4(),
        Entity::WorldIpv6 => !who.inside && who.ip.is_ipv6(),
        Entity::Cluster => who.inside,
        Entity::Private => match who.ip {
            IpAddr::V4(ip) => {
                let [a, b, ..] = ip.octets();
                a == 10
                    || (a == 172 && (16..32).contains(&b))
                    || (a == 192 && b == 168)
                    || (a == 100 && (64..128).contains(&b))
            }
            IpAddr::V6(ip) => matches!(ip.octets()[0], 0xfc | 0xfd),
        },
        Entity::Host => who.host,
        Entity::RemoteNode => who.remote_node,
        Entity::None => false,
    }
}
