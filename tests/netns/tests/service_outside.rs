//! Services for clients beyond an uplink: node ports. The packet filter of the nodes forwards nothing.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use aya::programs::TcAttachType;
use flowloom_bpf_abi::{Addr, PeerRecord, address_flags, identity as reserved, peer_flags};
use flowloom_testkit::{
    EchoServer, Mode, Netfilter, Ns, Outcome, Probe, TcpClient, TcpServer, Topology, eventually,
};
use flowloom_tests_netns::lab::{DEFAULT_VPC, DENY, Lab, Workload, identity};

const SECOND: Duration = Duration::from_secs(1);
const NODE_PORT: u16 = 30_080;

struct World {
    topology: Topology,
    labs: [Lab; 2],
    workloads: Vec<Workload>,
}

impl World {
    fn node(&self, n: usize, v6: bool) -> IpAddr {
        let node = &self.topology.nodes[n];
        if v6 { node.ip6.into() } else { node.ip4.into() }
    }

    fn outside(&self) -> &Ns {
        &self.topology.external.as_ref().expect("external").ns
    }

    fn client(&self, v6: bool) -> IpAddr {
        let external = self.topology.external.as_ref().expect("external");
        if v6 { external.ip6.into() } else { external.ip4.into() }
    }
}

/// Two nodes with a workload each, reached directly or through the tunnel, and the world.
fn world(tunnel: bool) -> World {
    let topology =
        Topology::builder().external().netfilter(Netfilter::ForwardDrop).build().expect("topology");
    let mut labs = [Lab::new(1).expect("one"), Lab::new(2).expect("two")];
    let mut workloads = Vec::new();
    for (i, (lab, node)) in labs.iter_mut().zip(&topology.nodes).enumerate() {
        lab.configure(|c| {
            c.uplink_ifindex = node.uplink_index.number();
            c.uplink_mtu = 1500;
            c.node4 = IpAddr::from(node.ip4).into();
            c.node6 = IpAddr::from(node.ip6).into();
        })
        .expect("config");
        lab.attach(&node.ns, node.uplink.as_str(), "from_uplink", TcAttachType::Ingress).expect("attach");
        lab.attach(&node.ns, node.uplink.as_str(), "to_uplink", TcAttachType::Egress).expect("attach");
        if tunnel {
            lab.overlay(&node.ns, 1450).expect("overlay");
        }
        for n in &topology.nodes {
            let own = n.number == node.number;
            for ip in [IpAddr::from(n.ip4), n.ip6.into()] {
                lab.node(ip, u32::from(own)).expect("node");
                let full = if ip.is_ipv4() { 32 } else { 128 };
                let (identity, flags) = if own {
                    lab.local(DEFAULT_VPC, ip, 0, address_flags::HOST).expect("address");
                    (reserved::HOST, peer_flags::HOST)
                } else {
                    let way = if tunnel { 0 } else { peer_flags::DIRECT };
                    (reserved::REMOTE_NODE, peer_flags::REMOTE_NODE | peer_flags::REMOTE | way)
                };
                let outer = if own { Addr::ZERO } else { IpAddr::from(n.ip4).into() };
                let record = PeerRecord { identity, flags, tunnel: outer };
                lab.programs.peer(DEFAULT_VPC, ip, full, record).expect("peer");
            }
        }
        for any in [IpAddr::from([0; 4]), [0u16; 8].into()] {
            let record =
                PeerRecord { identity: reserved::WORLD, flags: peer_flags::STACK, tunnel: Addr::ZERO };
            lab.programs.peer(DEFAULT_VPC, any, 0, record).expect("peer");
        }
        workloads.push(lab.workload(&node.ns, 1 + i as u32, DEFAULT_VPC, i as u8, 10).expect("workload"));
    }
    for (here, there) in [(0, 1), (1, 0)] {
        let (node, other) = (&topology.nodes[here], &topology.nodes[there]);
        for v6 in [false, true] {
            let peer = workloads[there].ip(v6);
            let via: IpAddr = if v6 { other.ip6.into() } else { other.ip4.into() };
            let (flags, to) = if tunnel { (0, other.ip4.into()) } else { (peer_flags::DIRECT, via) };
            let id = identity(workloads[there].id);
            labs[here].remote_peer(DEFAULT_VPC, peer, id, to, flags).expect("peer");
            if !tunnel {
                let route = ["ip", "route", "add", &peer.to_string(), "via", &via.to_string()];
                node.ns.exec_ok(&route).expect("route");
            }
        }
    }
    World { topology, labs, workloads }
}

fn backend(w: &Workload, v6: bool) -> SocketAddr {
    SocketAddr::new(w.ip(v6), 8080)
}

/// The world reaches `at` through the first node's port, and the server sees `peer`.
fn works(world: &mut World, server: &str, at: SocketAddr, peer: IpAddr) {
    let v6 = at.is_ipv6();
    let entry = SocketAddr::new(world.node(0, v6), NODE_PORT);
    world.labs[0].serve_outside(DEFAULT_VPC, entry, 1 + u32::from(v6), &[at]).expect("service");
    let ns = match server {
        "local" => &world.workloads[0].ns,
        "remote" => &world.workloads[1].ns,
        "other node" => &world.topology.nodes[1].ns,
        _ => &world.topology.nodes[0].ns,
    };
    let tcp = TcpServer::start(ns, at, Mode::Echo).expect("server");
    let _udp = EchoServer::start(ns, at).expect("server");
    let drops = || world.labs.iter().map(|l| l.programs.drops()).collect::<Vec<_>>();
    let probe = Probe::tcp(world.outside(), entry).timeout(SECOND).run().expect("tcp");
    assert_eq!(probe, Outcome::Connected, "{server} tcp {entry} {:?}", drops());
    let probe = Probe::udp(world.outside(), entry).timeout(SECOND).run().expect("udp");
    assert_eq!(probe, Outcome::Connected, "{server} udp {entry} {:?}", drops());
    let mut client = TcpClient::connect(world.outside(), entry, SECOND).expect("connect");
    client.round_trip(&vec![7; 300_000], Duration::from_secs(5)).expect("bulk");
    eventually(SECOND, || {
        let seen: Vec<IpAddr> = tcp.peers().iter().map(SocketAddr::ip).collect();
        if !seen.is_empty() && seen.iter().all(|ip| *ip == peer) { Ok(()) } else { Err(seen) }
    });
}

#[test]
fn a_node_port_reaches_a_local_backend_which_sees_the_client() {
    let mut world = world(false);
    for v6 in [false, true] {
        let (at, client) = (backend(&world.workloads[0], v6), world.client(v6));
        works(&mut world, "local", at, client);
    }
    // Its policy judges the client.
    let World { labs, workloads, .. } = &mut world;
    labs[0].switch(&mut workloads[0], 1, DENY).expect("switch");
    let entry = SocketAddr::new(world.node(0, false), NODE_PORT);
    assert_eq!(Probe::tcp(world.outside(), entry).run().expect("tcp"), Outcome::TimedOut);
}

#[test]
fn a_node_port_reaches_a_backend_on_another_node_directly() {
    let mut world = world(false);
    for v6 in [false, true] {
        let (at, node) = (backend(&world.workloads[1], v6), world.node(0, v6));
        works(&mut world, "remote", at, node);
    }
}

#[test]
fn a_node_port_reaches_a_backend_on_another_node_through_the_tunnel() {
    let mut world = world(true);
    let (at, node) = (backend(&world.workloads[1], false), world.node(0, false));
    works(&mut world, "remote", at, node);
}

#[test]
fn a_node_port_reaches_this_host_and_another() {
    let mut world = world(false);
    for v6 in [false, true] {
        let (at, client) = (SocketAddr::new(world.node(0, v6), 8443), world.client(v6));
        works(&mut world, "this node", at, client);
        let (at, node) = (SocketAddr::new(world.node(1, v6), 8443), world.node(0, v6));
        works(&mut world, "other node", at, node);
    }
}

#[test]
fn a_node_port_without_backends_refuses_and_other_ports_stay_the_hosts() {
    let mut world = world(false);
    for v6 in [false, true] {
        let entry = SocketAddr::new(world.node(0, v6), NODE_PORT);
        world.labs[0].serve_outside(DEFAULT_VPC, entry, 0, &[]).expect("service");
        for probe in [Probe::tcp(world.outside(), entry), Probe::udp(world.outside(), entry)] {
            let outcome = probe.timeout(SECOND).run().expect("probe");
            assert_eq!(outcome, Outcome::Refused, "{:?} v6={v6}", probe.proto);
        }
        let own = SocketAddr::new(world.node(0, v6), 22);
        let _server = TcpServer::start(&world.topology.nodes[0].ns, own, Mode::Echo).expect("server");
        let outcome = Probe::tcp(world.outside(), own).timeout(SECOND).run().expect("tcp");
        assert_eq!(outcome, Outcome::Connected);
    }
}
