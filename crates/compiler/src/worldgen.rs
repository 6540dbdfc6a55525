//! Random worlds, small and crowded: few addresses, few ports, few priorities, so that everything meets everything.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{
    Action, AllowLocalhost, Attachment, CidrEntry, CidrGroup, DefaultPolicy, Direction, Endpoint,
    EndpointKey, Entity, Expression, Labels, NamedPort, Node, NodeName, Operator, Protocol, Remote, Rule,
    SecurityGroup, Selector, SharedMap, Subnet, Vni, Vpc, VpcName, World,
};
use ipnet::IpNet;

use crate::oracle::Packet;

/// A small generator of numbers (splitmix64): the same seed, the same world, on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts at a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n` (which is not 0).
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of these words.
    pub fn word(&mut self, of: &[&'static str]) -> &'static str {
        of[self.below(of.len())]
    }

    /// One of these (there is at least one).
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// The node that worlds are compiled for.
#[must_use]
pub fn local_node() -> NodeName {
    name("n1")
}

fn name<T: std::str::FromStr<Err = flowloom_model::NameError>>(text: &str) -> T {
    text.parse().expect("a valid name")
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a valid prefix")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a valid address")
}

const PORTS: [u16; 14] = [1, 2, 22, 53, 79, 80, 81, 443, 444, 1023, 1024, 8080, 32768, 65535];
const PROTOCOLS: [Protocol; 7] = [
    Protocol::Any,
    Protocol::Any,
    Protocol::Tcp,
    Protocol::Tcp,
    Protocol::Udp,
    Protocol::Icmp,
    Protocol::Sctp,
];
const PREFIXES: [&str; 22] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.0.0/24",
    "10.1.0.0/28",
    "10.1.0.8/29",
    "10.1.1.0/24",
    "10.1.0.10/32",
    "10.1.0.11/32",
    "10.1.0.1/32",
    "192.168.0.0/16",
    "192.168.5.0/28",
    "8.8.8.0/24",
    "8.8.8.8/32",
    "203.0.113.0/24",
    "203.0.113.1/32",
    "::/0",
    "fd00::/8",
    "fd00:1::/64",
    "fd00:1::a/128",
    "2001:db8::/32",
    "2001:db8::1/128",
];
const ADDRESSES: [&str; 12] = [
    "8.8.8.8",
    "8.8.4.4",
    "10.200.0.1",
    "10.1.0.200",
    "192.168.5.3",
    "192.168.77.1",
    "172.16.1.1",
    "100.64.0.9",
    "fd00:1::77",
    "fd00:2::1",
    "2001:db8::5",
    "2606::1",
];
const ENTITIES: [Entity; 9] = [
    Entity::All,
    Entity::World,
    Entity::WorldIpv4,
    Entity::WorldIpv6,
    Entity::Cluster,
    Entity::Private,
    Entity::Host,
    Entity::RemoteNode,
    Entity::None,
];

/// A random world.
#[must_use]
pub fn world(rng: &mut Rng) -> World {
    let mut world = World::default();
    for (n, addresses) in [
        ("n1", ["203.0.113.1", "2001:db8::1"]),
        ("n2", ["203.0.113.2", "2001:db8::2"]),
        ("n3", ["2001:db8::3", "203.0.113.3"]),
    ] {
        let mut addresses: Vec<IpAddr> = addresses.iter().map(|a| ip(a)).collect();
        if rng.one_in(3) {
            addresses.pop();
        }
        world.nodes.insert(name(n), Node { name: name(n), addresses, zone: None });
    }
    for (at, vpc) in ["default", "red", "blue"].into_iter().enumerate().take(1 + rng.below(3)) {
        let default_policy = if rng.one_in(4) { DefaultPolicy::Deny } else { DefaultPolicy::Allow };
        world.vpcs.insert(name(vpc), Vpc { name: name(vpc), vni: Vni::new(at as u32 + 1), default_policy });
        fill(&mut world, &name(vpc), rng);
    }
    world
}

fn fill(world: &mut World, vpc: &VpcName, rng: &mut Rng) {
    let subnets: [(&str, &[&str], &[&str]); 3] = [
        ("a", &["10.1.0.0/24", "fd00:1::/64"], &["10.1.0.1", "fd00:1::1"]),
        ("b", &["10.1.1.0/24"], &["10.1.1.1"]),
        ("c", &["192.168.5.0/28", "fd00:2::/64"], &["192.168.5.1", "fd00:2::1"]),
    ];
    for (subnet, cidrs, gateways) in subnets.into_iter().take(1 + rng.below(3)) {
        add_subnet(world, vpc, subnet, cidrs, gateways);
    }
    for group in 0..1 + rng.below(6) {
        add_group(world, vpc, &format!("g{group}"), rng);
    }
    for group in 0..rng.below(3) {
        add_cidr_group(world, vpc, &format!("c{group}"), rng);
    }
    for endpoint in 0..2 + rng.below(6) {
        add_endpoint(world, vpc, endpoint, rng);
    }
}

fn add_subnet(world: &mut World, vpc: &VpcName, subnet: &str, cidrs: &[&str], gateways: &[&str]) {
    let subnet = Subnet {
        vpc: vpc.clone(),
        name: name(subnet),
        cidrs: cidrs.iter().map(|c| net(c)).collect(),
        gateways: gateways.iter().map(|g| ip(g)).collect(),
        exclude: Vec::new(),
        node: None,
        cni_ranges: Vec::new(),
        mtu: None,
    };
    world.subnets.insert((vpc.clone(), subnet.name.clone()), subnet);
}

fn add_group(world: &mut World, vpc: &VpcName, group: &str, rng: &mut Rng) {
    let switch = |rng: &mut Rng| *rng.pick(&[None, None, Some(true), Some(false)]);
    let group = SecurityGroup {
        vpc: vpc.clone(),
        name: name(group),
        tier: rng.below(2) as u8,
        default_deny_ingress: switch(rng),
        default_deny_egress: switch(rng),
        rules: (0..rng.below(16)).map(|at| rule(&format!("r{at}"), rng)).collect(),
    };
    world.security_groups.insert((vpc.clone(), group.name.clone()), group);
}

fn add_cidr_group(world: &mut World, vpc: &VpcName, group: &str, rng: &mut Rng) {
    let entries = (0..rng.below(4)).map(|_| cidr_entry(rng)).collect();
    let group = CidrGroup { vpc: vpc.clone(), name: name(group), entries };
    world.cidr_groups.insert((vpc.clone(), group.name.clone()), group);
}

fn add_endpoint(world: &mut World, vpc: &VpcName, number: usize, rng: &mut Rng) {
    let subnets: Vec<&Subnet> = world.subnets.values().filter(|s| s.vpc == *vpc).collect();
    let subnet = (*rng.pick(&subnets)).clone();
    let host = 10 + number as u32;
    let mut ips: Vec<IpAddr> = subnet
        .cidrs
        .iter()
        .map(|cidr| nth(*cidr, if cidr.prefix_len() == 28 { 2 + number as u32 } else { host }))
        .collect();
    if ips.len() == 2 && rng.one_in(3) {
        ips.remove(rng.below(2));
    }
    if rng.one_in(30) {
        ips.clear();
    }
    let groups: Vec<_> =
        world.security_groups.keys().filter(|(v, _)| v == vpc).map(|(_, g)| g.clone()).collect();
    let mut attached: BTreeSet<_> = (0..rng.below(5)).map(|_| rng.pick(&groups).clone()).collect();
    if rng.one_in(40) {
        attached.insert(name("missing"));
    }
    let endpoint = Endpoint {
        vpc: vpc.clone(),
        name: name(&format!("e{number}")),
        subnet: subnet.name,
        ips,
        mac: None,
        node: name(rng.word(&["n1", "n1", "n2", "n3"])),
        security_groups: attached,
        labels: labels(rng),
        named_ports: (0..rng.below(3))
            .map(|_| NamedPort {
                name: name(rng.word(&["web", "dns"])),
                protocol: *rng.pick(&[Protocol::Tcp, Protocol::Udp, Protocol::Sctp]),
                port: *rng.pick(&PORTS),
            })
            .collect(),
        attachment: Attachment::Managed,
        allow_localhost: if rng.one_in(2) { AllowLocalhost::Policy } else { AllowLocalhost::Always },
    };
    world.endpoints.insert(endpoint.key(), endpoint.into());
}

fn nth(cidr: IpNet, n: u32) -> IpAddr {
    match cidr.network() {
        IpAddr::V4(base) => IpAddr::V4((u32::from(base) + n).into()),
        IpAddr::V6(base) => IpAddr::V6((u128::from(base) + u128::from(n)).into()),
    }
}

fn labels(rng: &mut Rng) -> Labels {
    let mut labels = Labels::new();
    for key in ["app", "env", "team"] {
        if !rng.one_in(3) {
            labels.insert(key.to_owned(), rng.word(&["x", "y", "z"]).to_owned());
        }
    }
    labels
}

fn selector(rng: &mut Rng) -> Selector {
    let mut selector = Selector::default();
    for _ in 0..rng.below(3) {
        selector.labels.insert(rng.word(&["app", "env"]).to_owned(), rng.word(&["x", "y"]).to_owned());
    }
    for _ in 0..rng.below(2) {
        let operator = *rng.pick(&[Operator::In, Operator::NotIn, Operator::Exists, Operator::DoesNotExist]);
        let values = if matches!(operator, Operator::In | Operator::NotIn) {
            (0..1 + rng.below(2)).map(|_| rng.word(&["x", "y", "z"]).to_owned()).collect()
        } else {
            BTreeSet::new()
        };
        selector.expressions.push(Expression {
            key: rng.word(&["app", "env", "team"]).to_owned(),
            operator,
            values,
        });
    }
    selector
}

fn cidr_entry(rng: &mut Rng) -> CidrEntry {
    let cidr = net(rng.word(&PREFIXES));
    let inside =
        PREFIXES.iter().map(|p| net(p)).filter(|p| *p != cidr && cidr.contains(p)).collect::<Vec<_>>();
    let except = if inside.is_empty() || rng.one_in(2) {
        Vec::new()
    } else {
        (0..1 + rng.below(2)).map(|_| *rng.pick(&inside)).collect()
    };
    CidrEntry { cidr, except }
}

fn remote(rng: &mut Rng) -> Remote {
    match rng.below(13) {
        0..=2 => Remote::Any,
        3 | 4 | 12 => Remote::Cidr(cidr_entry(rng)),
        5 => Remote::CidrGroup(name(rng.word(&["c0", "c1"]))),
        6 | 7 => Remote::Group(name(rng.word(&["g0", "g1", "g2", "g3"]))),
        8 | 9 => Remote::Selector(selector(rng)),
        _ => Remote::Entities((0..1 + rng.below(2)).map(|_| *rng.pick(&ENTITIES)).collect()),
    }
}

/// A random rule.
pub fn rule(id: &str, rng: &mut Rng) -> Rule {
    let protocol = *rng.pick(&PROTOCOLS);
    let mut rule = Rule {
        id: name(id),
        priority: *rng.pick(&[1, 100, 100, 200, 16384]),
        direction: *rng.pick(&[Direction::Egress, Direction::Ingress]),
        protocol,
        remote: remote(rng),
        ports: Vec::new(),
        named_ports: Vec::new(),
        icmp: None,
        action: *rng.pick(&[
            Action::Allow,
            Action::Allow,
            Action::Drop,
            Action::Drop,
            Action::Reject,
            Action::Log,
            Action::Pass,
        ]),
        stateful: !rng.one_in(5),
        log: rng.one_in(5),
    };
    if protocol == Protocol::Icmp {
        if rng.one_in(2) {
            rule.icmp = Some((
                *rng.pick(&[0, 8, 3, 128]),
                if rng.one_in(2) { Some(rng.below(3) as u8) } else { None },
            ));
        }
        return rule;
    }
    if rng.one_in(2) {
        return rule;
    }
    for _ in 0..1 + rng.below(2) {
        let (a, b) = (*rng.pick(&PORTS), *rng.pick(&PORTS));
        rule.ports.push(if rng.one_in(3) { (a, a) } else { (a.min(b), a.max(b)) });
    }
    if rng.one_in(3) {
        rule.named_ports.push(name(rng.word(&["web", "dns"])));
        if rng.one_in(2) {
            rule.ports.clear();
        }
    }
    rule
}

/// A packet that may interest an endpoint of the world.
pub fn packet(world: &World, key: &EndpointKey, rng: &mut Rng) -> Packet {
    let Some(endpoint) = world.endpoints.get(key) else {
        return Packet { peer: ip(ADDRESSES[0]), protocol: 6, port: 80 };
    };
    let mut peers: Vec<IpAddr> = match rng.below(8) {
        0..=3 => world
            .endpoints
            .values()
            .filter(|e| e.vpc == key.vpc)
            .flat_map(|e| e.ips.iter().copied())
            .collect(),
        4 => world
            .subnets
            .values()
            .filter(|s| s.vpc == key.vpc)
            .flat_map(|s| s.gateways.iter().copied())
            .collect(),
        5 => world.nodes.values().flat_map(|n| n.addresses.iter().copied()).collect(),
        6 => PREFIXES
            .iter()
            .map(|p| nth(net(p), rng.below(12) as u32 * u32::from(!p.ends_with("32") && !p.ends_with("128"))))
            .collect(),
        _ => ADDRESSES.iter().map(|a| ip(a)).collect(),
    };
    peers.retain(|peer| endpoint.ips.iter().any(|own| own.is_ipv4() == peer.is_ipv4()));
    let peer = if peers.is_empty() {
        if endpoint.ips.iter().any(IpAddr::is_ipv4) { ip("8.8.8.8") } else { ip("2606::1") }
    } else {
        *rng.pick(&peers)
    };
    let icmp = if peer.is_ipv4() { 1 } else { 58 };
    let protocol = *rng.pick(&[6, 6, 6, 17, 17, icmp, icmp, 132, 47]);
    let port = match protocol {
        1 | 58 => u16::from_be_bytes([*rng.pick(&[0, 8, 3, 128, 5]), rng.below(4) as u8]),
        47 => 0,
        _ => match rng.below(3) {
            0 => *rng.pick(&PORTS),
            1 => rng.pick(&PORTS).saturating_add(1),
            _ => rng.pick(&PORTS).saturating_sub(1).max(1),
        },
    };
    Packet { peer, protocol, port }
}

/// Changes some things in a world, as an edit of the document would.
pub fn mutate(world: &mut World, rng: &mut Rng) {
    for _ in 0..1 + rng.below(4) {
        let vpcs: Vec<VpcName> = world.vpcs.keys().cloned().collect();
        let vpc = rng.pick(&vpcs).clone();
        mutate_once(world, &vpc, rng);
    }
}

fn mutate_once(world: &mut World, vpc: &VpcName, rng: &mut Rng) {
    let endpoints: Vec<EndpointKey> = world.endpoints.keys().filter(|k| k.vpc == *vpc).cloned().collect();
    let groups: Vec<_> = world.security_groups.keys().filter(|(v, _)| v == vpc).cloned().collect();
    match rng.below(12) {
        0 | 1 => {
            if let Some(e) = random_of(&mut world.endpoints, &endpoints, rng) {
                Arc::make_mut(e).labels = labels(rng);
            }
        }
        2 => {
            if let Some(e) = random_of(&mut world.endpoints, &endpoints, rng) {
                let group = rng.pick(&groups).1.clone();
                let e = Arc::make_mut(e);
                if !e.security_groups.remove(&group) {
                    e.security_groups.insert(group);
                }
            }
        }
        3..=5 => {
            if let Some(g) = random_of(&mut world.security_groups, &groups, rng) {
                if rng.one_in(2) && !g.rules.is_empty() {
                    let at = rng.below(g.rules.len());
                    g.rules.remove(at);
                }
                if !rng.one_in(3) {
                    let id = format!("n{}", rng.below(1000));
                    g.rules.retain(|r| r.id.as_str() != id);
                    g.rules.push(rule(&id, rng));
                }
            }
        }
        6 => {
            if let Some(g) = random_of(&mut world.security_groups, &groups, rng)
                && let Some(r) = g.rules.first_mut()
            {
                r.priority = *rng.pick(&[1, 100, 200]);
                r.action = *rng.pick(&[Action::Allow, Action::Drop, Action::Pass]);
            }
        }
        7 => {
            let group = rng.word(&["c0", "c1"]);
            add_cidr_group(world, vpc, group, rng);
        }
        8 => {
            if !endpoints.is_empty() {
                world.endpoints.remove(rng.pick(&endpoints));
            }
        }
        9 => {
            // A new one, or one that exists made anew: other labels, groups, node, perhaps addresses.
            let number = rng.below(9);
            let key = EndpointKey { vpc: vpc.clone(), name: name(&format!("e{number}")) };
            world.endpoints.remove(&key);
            add_endpoint(world, vpc, number, rng);
        }
        10 => {
            let swap = world.endpoints.values().find(|e| e.vpc == *vpc).map(|e| e.security_groups.clone());
            if let (Some(groups), Some(e)) = (swap, random_of(&mut world.endpoints, &endpoints, rng)) {
                let had = std::mem::replace(&mut Arc::make_mut(e).security_groups, groups);
                if let Some(first) = world.endpoints.values_mut().find(|e| e.vpc == *vpc) {
                    Arc::make_mut(first).security_groups = had;
                }
            }
        }
        _ => {
            if let Some(g) = random_of(&mut world.security_groups, &groups, rng) {
                g.default_deny_ingress = *rng.pick(&[None, Some(false)]);
                g.default_deny_egress = *rng.pick(&[None, Some(false)]);
            }
        }
    }
}

fn random_of<'a, K: Ord + Clone, V: Clone>(
    map: &'a mut SharedMap<K, V>,
    keys: &[K],
    rng: &mut Rng,
) -> Option<&'a mut V> {
    if keys.is_empty() { None } else { map.get_mut(rng.pick(keys)) }
}
