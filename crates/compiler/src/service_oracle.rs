//! The oracle of services: one client, every service, one by one. Slow and obviously right; shares nothing with the compiler but the
//! model. And random changes of small, crowded worlds.
//!
//! Points that the API leaves to the implementation and both sides take the same way:
//! * what two services claim is the first one's by name, what two ports of one service claim the first port's;
//! * an address that is several things at once is the service's own address before a load balancer's, an external one, a node port;
//! * clients inside are under no Local policy but `internal_local` at the service's own addresses;
//! * source ranges are asked of every client, at load balancer addresses, and exclude every family they do not name;
//! * without a local backend under a Local policy, clients outside hear nothing while another node has one.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{
    Backend, BackendState, DefaultPolicy, Endpoint, NodeName, PackedMap, Protocol, Service, ServiceName,
    ServicePort, Vni, Vpc, VpcName, World,
};

use crate::Scope;
use crate::worldgen::Rng;

/// What a client asks for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ask {
    /// VPC.
    pub vpc: VpcName,
    /// Address.
    pub ip: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Port.
    pub port: u16,
    /// Where it is.
    pub scope: Scope,
    /// Its address.
    pub client: IpAddr,
}

/// What it gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Source ranges let it.
    pub admitted: bool,
    /// What those get that are admitted.
    pub outcome: Outcome,
}

/// What stands behind a frontend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// No service has it: routed like anything else.
    Unserved,
    /// Refused.
    Refused,
    /// Dropped without a word.
    Silence,
    /// One of these.
    Backends {
        /// Addresses and ports.
        set: BTreeSet<(IpAddr, u16)>,
        /// The client's address stays as it is.
        keep_source: bool,
        /// Seconds, 0 = none.
        affinity: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Own,
    Balancer,
    External,
    NodePort,
    HostPort,
}

/// The answer on a node where these VPCs are in force.
#[must_use]
pub fn answer(world: &World, here: &NodeName, vpcs: &BTreeSet<VpcName>, ask: &Ask) -> Answer {
    let nobody = |outcome| Answer { admitted: true, outcome };
    if !vpcs.contains(&ask.vpc) {
        return nobody(Outcome::Unserved);
    }
    let of_vpc = || world.services.values().filter(|s| s.vpc == ask.vpc);
    for service in of_vpc() {
        for port in &service.ports {
            if let Some(role) = role(world, here, service, port, ask) {
                return decide(world, here, service, port, role, ask);
            }
        }
    }
    let own = |s: &&Arc<Service>| {
        s.cluster_ips.contains(&ask.ip)
            && s.ports.iter().any(|p| p.protocol.has_ports() && p.host_addresses.is_empty())
    };
    if ask.scope == Scope::Inside && of_vpc().any(|s| own(&s)) {
        return nobody(Outcome::Refused);
    }
    nobody(Outcome::Unserved)
}

fn role(world: &World, here: &NodeName, service: &Service, port: &ServicePort, ask: &Ask) -> Option<Role> {
    let number = match port.protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
        Protocol::Any | Protocol::Icmp => return None,
    };
    if number != ask.protocol {
        return None;
    }
    let default = service.vpc.is_default();
    let own_address = world.nodes.get(here).is_some_and(|n| n.addresses.contains(&ask.ip));
    if !port.host_addresses.is_empty() {
        let named = port.host_addresses.contains(&ask.ip)
            || (own_address
                && port.host_addresses.iter().any(|a| a.is_unspecified() && a.is_ipv4() == ask.ip.is_ipv4()));
        return (default && named && port.port == ask.port).then_some(Role::HostPort);
    }
    let reachable = default || ask.scope == Scope::Inside;
    if port.port == ask.port {
        if ask.scope == Scope::Inside && service.cluster_ips.contains(&ask.ip) {
            return Some(Role::Own);
        }
        if reachable && service.load_balancer_ips.contains(&ask.ip) {
            return Some(Role::Balancer);
        }
        if reachable && service.external_ips.contains(&ask.ip) {
            return Some(Role::External);
        }
    }
    let family = service.cluster_ips.iter().any(|a| a.is_ipv4() == ask.ip.is_ipv4());
    (default && port.node_port == Some(ask.port) && own_address && family).then_some(Role::NodePort)
}

fn decide(
    world: &World,
    here: &NodeName,
    service: &Service,
    port: &ServicePort,
    role: Role,
    ask: &Ask,
) -> Answer {
    let outside = ask.scope == Scope::Outside;
    let admitted = role != Role::Balancer
        || service.source_ranges.is_empty()
        || service.source_ranges.iter().any(|net| net.contains(&ask.client));
    let local_policy = match role {
        Role::Own => service.internal_local,
        Role::HostPort => false,
        Role::Balancer | Role::External | Role::NodePort => outside && service.external_local,
    };
    let family: Vec<(&(IpAddr, u16), &Backend)> =
        port.backends.iter().filter(|((ip, _), _)| ip.is_ipv4() == ask.ip.is_ipv4()).collect();
    let with = |state: BackendState| family.iter().filter(move |(_, b)| b.state == state).copied();
    let is_mine = |b: &Backend| b.node.as_ref() == Some(here);
    let (ready, ending): (Vec<_>, Vec<_>) =
        (with(BackendState::Ready).collect(), with(BackendState::Terminating).collect());
    let chosen: Vec<_> = if local_policy {
        let mine = |list: &[(&(IpAddr, u16), &Backend)]| {
            list.iter().filter(|(_, b)| is_mine(b)).map(|(at, _)| **at).collect::<Vec<_>>()
        };
        if mine(&ready).is_empty() { mine(&ending) } else { mine(&ready) }
    } else if ready.is_empty() {
        ending.iter().map(|(at, _)| **at).collect()
    } else {
        let zone = world.nodes.get(here).and_then(|n| n.zone.as_ref());
        let for_node = |b: &Backend| b.nodes.contains(here);
        let for_zone = |b: &Backend| zone.is_some_and(|z| b.zones.contains(z));
        let all = |has: &dyn Fn(&Backend) -> bool| ready.iter().all(|(_, b)| has(b));
        let some = |is: &dyn Fn(&Backend) -> bool| ready.iter().any(|(_, b)| is(b));
        let keep: &dyn Fn(&Backend) -> bool = if all(&|b| !b.nodes.is_empty()) && some(&for_node) {
            &for_node
        } else if all(&|b| !b.zones.is_empty()) && some(&for_zone) {
            &for_zone
        } else {
            &|_| true
        };
        ready.iter().filter(|(_, b)| keep(b)).map(|(at, _)| **at).collect()
    };
    let outcome = if chosen.is_empty() {
        let somewhere = !ready.is_empty() || !ending.is_empty();
        if outside && local_policy && somewhere { Outcome::Silence } else { Outcome::Refused }
    } else {
        let all_mine = chosen.iter().all(|at| port.backends.get(at).is_some_and(is_mine));
        Outcome::Backends {
            keep_source: outside && (local_policy || role == Role::HostPort) && all_mine,
            set: chosen.into_iter().collect(),
            affinity: service.affinity.unwrap_or(0),
        }
    };
    Answer { admitted, outcome }
}

fn name<T: std::str::FromStr<Err = flowloom_model::NameError>>(text: &str) -> T {
    text.parse().expect("a valid name")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a valid address")
}

/// Addresses that services want: few, so that they meet.
const ADDRESSES: [&str; 7] =
    ["10.96.0.1", "10.96.0.2", "10.96.0.3", "198.51.100.1", "198.51.100.2", "fd00:96::1", "2001:db8:f::1"];
const PORTS: [u16; 4] = [80, 443, 8080, 30080];
const PROTOCOLS: [Protocol; 5] = [Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Sctp, Protocol::Any];
const CLIENTS: [&str; 4] = ["192.0.2.77", "203.0.113.77", "10.1.0.5", "2001:db8:77::7"];
const RANGES: [&str; 5] =
    ["192.0.2.0/24", "192.0.2.77/32", "203.0.113.0/24", "2001:db8:77::/48", "0.0.0.0/0"];
const SERVICES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// Nodes in zones, and VPCs `default` and `red` without services.
#[must_use]
pub fn world(rng: &mut Rng) -> World {
    let mut world = crate::worldgen::world(&mut Rng::new(rng.bits()));
    for vpc in ["default", "red"] {
        let vpc: VpcName = name(vpc);
        let vni = if vpc.is_default() { 1 } else { 7 };
        let vpc = Vpc { name: vpc, vni: Vni::new(vni), default_policy: DefaultPolicy::Allow };
        world.vpcs.insert(vpc.name.clone(), vpc);
    }
    world
        .nodes
        .values_mut()
        .enumerate()
        .for_each(|(at, n)| n.zone = Some(["east", "west"][at % 2].to_owned()));
    world
}

/// Changes a world in one to three places.
pub fn change(world: &mut World, rng: &mut Rng) {
    for _ in 0..=rng.below(3) {
        let vpc: VpcName = name(if rng.one_in(4) { "red" } else { "default" });
        let service: ServiceName = name(rng.word(&SERVICES));
        let key = (vpc.clone(), service.clone());
        match rng.below(14) {
            0 => drop(world.services.remove(&key)),
            1 => zone(world, rng),
            2 if rng.one_in(3) => tenant(world, rng),
            3 => swap(world, &key, rng),
            _ => {
                world.services.or_insert_with(key.clone(), || Arc::new(empty(vpc, service)));
                if let Some(entry) = world.services.get_mut(&key) {
                    edit(Arc::make_mut(entry), rng);
                }
            }
        }
    }
}

fn empty(vpc: VpcName, name: ServiceName) -> Service {
    Service {
        vpc,
        name,
        ports: Vec::new(),
        cluster_ips: BTreeSet::new(),
        external_ips: BTreeSet::new(),
        load_balancer_ips: BTreeSet::new(),
        affinity: None,
        internal_local: false,
        external_local: false,
        source_ranges: Vec::new(),
        health_check_port: None,
    }
}

fn zone(world: &mut World, rng: &mut Rng) {
    let node: NodeName = name(rng.word(&["n1", "n2", "n3"]));
    let zone = [None, Some("east"), Some("west")][rng.below(3)];
    if let Some(node) = world.nodes.get_mut(&node) {
        node.zone = zone.map(str::to_owned);
    }
}

/// The tenant comes to this node, or leaves it.
fn tenant(world: &mut World, rng: &mut Rng) {
    let red: VpcName = name("red");
    let mine: Vec<_> = world.endpoints.values().filter(|e| e.vpc == red).map(|e| e.key()).collect();
    let away = rng.one_in(2);
    for key in mine {
        if let Some(endpoint) = world.endpoints.get_mut(&key) {
            let endpoint: &mut Endpoint = Arc::make_mut(endpoint);
            endpoint.node = name(if away { "n2" } else { "n1" });
        }
    }
}

/// Two services exchange their addresses.
fn swap(world: &mut World, one: &(VpcName, ServiceName), rng: &mut Rng) {
    let other = (one.0.clone(), name(rng.word(&SERVICES)));
    let (Some(a), Some(b)) = (world.services.get(one).cloned(), world.services.get(&other).cloned()) else {
        return;
    };
    let with = |s: &Service, from: &Service| {
        Arc::new(Service { cluster_ips: from.cluster_ips.clone(), ports: s.ports.clone(), ..s.clone() })
    };
    world.services.insert(one.clone(), with(&a, &b));
    world.services.insert(other, with(&b, &a));
}

fn edit(service: &mut Service, rng: &mut Rng) {
    let toggle = |set: &mut BTreeSet<IpAddr>, of: &[&'static str], rng: &mut Rng| {
        let address = ip(rng.word(of));
        if !set.remove(&address) {
            set.insert(address);
        }
    };
    match rng.below(12) {
        0 => toggle(&mut service.external_ips, &ADDRESSES[3..], rng),
        1 => toggle(&mut service.load_balancer_ips, &ADDRESSES[3..], rng),
        2 => toggle(&mut service.cluster_ips, &ADDRESSES, rng),
        3 => service.affinity = [None, Some(10), Some(10800)][rng.below(3)],
        4 => service.internal_local = rng.one_in(2),
        5 => service.external_local = rng.one_in(2),
        6 => {
            service.source_ranges =
                (0..rng.below(3)).map(|_| rng.word(&RANGES).parse().expect("a prefix")).collect();
        }
        7 if !service.ports.is_empty() => drop(service.ports.remove(rng.below(service.ports.len()))),
        8 => service.ports.push(port(rng)),
        _ => {
            if service.cluster_ips.is_empty() {
                toggle(&mut service.cluster_ips, &ADDRESSES, rng);
            }
            if service.ports.is_empty() {
                service.ports.push(port(rng));
            }
            let at = rng.below(service.ports.len());
            backends(&mut service.ports[at].backends, rng);
        }
    }
}

fn port(rng: &mut Rng) -> ServicePort {
    let mut port = ServicePort {
        name: None,
        protocol: *rng.pick(&PROTOCOLS),
        port: *rng.pick(&PORTS),
        node_port: rng.one_in(2).then(|| *rng.pick(&PORTS)),
        host_addresses: BTreeSet::new(),
        backends: PackedMap::new(),
    };
    if rng.one_in(6) {
        port.host_addresses.insert(ip(rng.word(&["203.0.113.1", "0.0.0.0", "::", "127.0.0.1"])));
    }
    for _ in 0..rng.below(3) {
        backends(&mut port.backends, rng);
    }
    port
}

fn backends(backends: &mut PackedMap<(IpAddr, u16), Backend>, rng: &mut Rng) {
    let last = 1 + rng.below(5);
    let address = if rng.one_in(4) { format!("fd00:1::{last}") } else { format!("10.1.0.{last}") };
    let at = (ip(&address), if rng.one_in(4) { 9090 } else { 8080 });
    if rng.one_in(4) {
        backends.remove(&at);
        return;
    }
    let node = ["n1", "n1", "n2", "n3"][rng.below(4)];
    let states =
        [BackendState::Ready, BackendState::Ready, BackendState::Terminating, BackendState::NotReady];
    // Mostly everyone has hints, or nobody.
    let hinted = rng.below(6);
    let zones = if hinted == 0 { [rng.word(&["east", "west"]).to_owned()].into() } else { BTreeSet::new() };
    let nodes = if hinted == 1 { [name(rng.word(&["n1", "n2"]))].into() } else { BTreeSet::new() };
    let same = rng.one_in(2) && (!zones.is_empty() || !nodes.is_empty());
    let backend = Backend { node: Some(name(node)), state: *rng.pick(&states), zones, nodes };
    if same {
        for b in backends.values_mut() {
            if !backend.zones.is_empty() && b.zones.is_empty() {
                b.zones = [rng.word(&["east", "west"]).to_owned()].into();
            }
            if !backend.nodes.is_empty() && b.nodes.is_empty() {
                b.nodes = [name(rng.word(&["n1", "n2"]))].into();
            }
        }
    }
    backends.insert(at, backend);
}

/// Everything that clients could ask in such worlds.
#[must_use]
pub fn asks() -> Vec<Ask> {
    let mut out = Vec::new();
    let own = ["203.0.113.1", "2001:db8::1", "203.0.113.2", "127.0.0.1"];
    for vpc in ["default", "red"] {
        for address in ADDRESSES.iter().chain(&own) {
            for (protocol, port) in PORTS
                .iter()
                .flat_map(|port| [(6, *port), (17, *port), (132, *port)])
                .chain([(1, 0), (6, 4321)])
            {
                for (scope, clients) in [(Scope::Inside, &CLIENTS[2..3]), (Scope::Outside, &CLIENTS[..])] {
                    for client in clients {
                        let (vpc, client) = (name(vpc), ip(client));
                        out.push(Ask { vpc, ip: ip(address), protocol, port, scope, client });
                    }
                }
            }
        }
    }
    out
}
