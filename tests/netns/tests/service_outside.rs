//! Services for clients beyond an uplink: node ports. The packet filter of the nodes forwards nothing.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use aya::programs::TcAttachType;
use flowloom_bpf_abi::{
    self as abi, Addr, PeerRecord, address_flags, flow_kind, identity as reserved, map_name, peer_flags,
};
use flowloom_testkit::{Mode, Netfilter, Ns, Outcome, PATIENCE, Probe, TcpServer, Topology, eventually};
use flowloom_tests_netns::lab::{DEFAULT_VPC, DENY, Lab, Workload, identity, passes};
use flowloom_tests_netns::services::told;

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

/// The first node's port stands for `at`; its address is returned.
fn serve(world: &mut World, at: SocketAddr) -> SocketAddr {
    let v6 = at.is_ipv6();
    let entry = SocketAddr::new(world.node(0, v6), NODE_PORT);
    world.labs[0].serve_outside(DEFAULT_VPC, entry, 1 + u32::from(v6), &[at]).expect("service");
    entry
}

/// Where a server runs.
fn namespace<'w>(world: &'w World, server: &str) -> &'w Ns {
    match server {
        "local" => &world.workloads[0].ns,
        "remote" => &world.workloads[1].ns,
        "other node" => &world.topology.nodes[1].ns,
        _ => &world.topology.nodes[0].ns,
    }
}

/// The world reaches `at` through the first node's port, and the server sees `peer`.
fn works(world: &mut World, server: &str, at: SocketAddr, peer: IpAddr) {
    let entry = serve(world, at);
    let ns = namespace(world, server);
    let labs: Vec<&Lab> = world.labs.iter().collect();
    let tcp = passes(&labs, world.outside(), entry, ns, at);
    eventually(PATIENCE, || {
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
            let outcome = probe.timeout(PATIENCE).run().expect("probe");
            assert_eq!(outcome, Outcome::Refused, "{:?} v6={v6}", probe.proto);
        }
        let own = SocketAddr::new(world.node(0, v6), 22);
        let _server = TcpServer::start(&world.topology.nodes[0].ns, own, Mode::Echo).expect("server");
        let outcome = Probe::tcp(world.outside(), own).timeout(PATIENCE).run().expect("tcp");
        assert_eq!(outcome, Outcome::Connected);
    }
}

/// A socket that speaks to one address only.
fn udp(ns: &Ns, from: SocketAddr, to: SocketAddr) -> UdpSocket {
    ns.run_in(|| {
        let socket = UdpSocket::bind(from)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok::<_, std::io::Error>(socket)
    })
    .expect("enter")
    .expect("socket")
}

fn any_port(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, 0)
}

/// Both ends of a datagram flow through a node port hear that the other's socket is gone.
fn both_hear_that_nobody_listens(world: &mut World, server: &str, at: SocketAddr) {
    let entry = serve(world, at);
    let (ns, outside) = (namespace(world, server), world.outside());
    let client = udp(outside, any_port(world.client(at.is_ipv6())), entry);
    let drops = || world.labs.iter().map(|l| l.programs.drops()).collect::<Vec<_>>();
    let refused = told(&client, b"anyone?");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "client, {server} {entry} {:?}", drops());
    // A fault of another flow is none of this one's.
    let bystander = udp(outside, any_port(world.client(at.is_ipv6())), entry);
    let backend = ns.run_in(|| UdpSocket::bind(at)).expect("enter").expect("bind");
    backend.set_read_timeout(Some(PATIENCE)).expect("timeout");
    bystander.send(b"still here").expect("send");
    let (_, other) = backend.recv_from(&mut [0; 16]).expect("bystander");
    client.send(b"goodbye").expect("send");
    let (_, peer) = backend.recv_from(&mut [0; 16]).expect("question");
    assert_ne!(peer, other);
    drop(client);
    backend.connect(peer).expect("connect");
    let refused = told(&backend, b"answer");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "backend, {server} {entry} {:?}", drops());
    backend.connect(other).expect("connect");
    backend.send(b"answer").expect("send");
    let mut buffer = [0; 16];
    let n = bystander.recv(&mut buffer).expect("the other flow goes on");
    assert_eq!(&buffer[..n], b"answer");
}

#[test]
fn both_ends_of_a_node_port_hear_that_nobody_listens() {
    let mut world = world(false);
    for v6 in [false, true] {
        for (server, at) in [
            ("local", backend(&world.workloads[0], v6)),
            ("remote", backend(&world.workloads[1], v6)),
            ("this node", SocketAddr::new(world.node(0, v6), 8443)),
            ("other node", SocketAddr::new(world.node(1, v6), 8443)),
        ] {
            both_hear_that_nobody_listens(&mut world, server, at);
        }
    }
}

#[test]
fn both_ends_of_a_node_port_hear_through_the_tunnel_that_nobody_listens() {
    let mut world = world(true);
    let at = backend(&world.workloads[1], false);
    both_hear_that_nobody_listens(&mut world, "remote", at);
}

/// What the route cache of a namespace says about the largest packet to an address.
fn path_mtu(ns: &Ns, to: IpAddr) -> Option<u32> {
    let family = if to.is_ipv6() { "-6" } else { "-4" };
    let route = ns.exec_ok(&["ip", family, "route", "get", &to.to_string()]).expect("route").stdout;
    let mut words = route.split_whitespace();
    words.find(|w| *w == "mtu")?;
    words.next()?.parse().ok()
}

/// A client that sends so many bytes learns that no more than `mtu` fit on the way to `at`.
fn learns(world: &mut World, at: SocketAddr, bytes: usize, mtu: u32) {
    let entry = serve(world, at);
    let outside = world.outside();
    assert_eq!(path_mtu(outside, entry.ip()), None);
    let client = udp(outside, any_port(world.client(at.is_ipv6())), entry);
    client.send(&vec![7; bytes]).expect("send");
    eventually(PATIENCE, || match path_mtu(outside, entry.ip()) {
        Some(found) if found == mtu => Ok(()),
        other => Err((other, world.labs.iter().map(|l| l.programs.drops()).collect::<Vec<_>>())),
    });
}

#[test]
fn a_client_of_a_node_port_hears_what_fits_behind_this_nodes_address() {
    let mut world = world(false);
    world.workloads[1].record.mtu = 1300;
    let World { labs, workloads, .. } = &mut world;
    labs[1].enter(&workloads[1]).expect("record");
    for v6 in [false, true] {
        let at = backend(&world.workloads[1], v6);
        learns(&mut world, at, 1400, 1300);
    }
}

#[test]
fn a_client_of_a_node_port_hears_what_fits_into_the_tunnel() {
    let mut world = world(true);
    let at = backend(&world.workloads[1], false);
    learns(&mut world, at, 1440, 1450);
}

#[test]
fn a_client_of_a_node_port_hears_what_fits_behind_the_tunnel() {
    let mut world = world(true);
    world.workloads[1].record.mtu = 1300;
    let World { labs, workloads, .. } = &mut world;
    labs[1].enter(&workloads[1]).expect("record");
    let at = backend(&world.workloads[1], false);
    learns(&mut world, at, 1400, 1300);
}

/// Ports of this node that flows from outside have.
fn node_ports(world: &mut World, protocol: u8) -> Vec<u16> {
    let programs = &mut world.labs[0].programs;
    let flows = programs.dump::<abi::FlowKey, abi::FlowValue>(map_name::SRV_FLOWS).expect("flows");
    let outside = flows.into_iter().filter(|(k, _)| k.kind == flow_kind::OUTSIDE && k.protocol == protocol);
    outside.map(|(_, v)| u16::from_be_bytes(v.node_port)).collect()
}

/// How many of this host's ports are in use, and how many clients come: without a look at the sockets, all of them would get another port
/// by a chance of one in 10^10.
const USED: u16 = 500;
const CLIENTS: usize = 200;

#[test]
fn a_port_that_a_socket_of_this_node_has_is_not_taken_for_clients() {
    let mut world = world(false);
    let (first, last) = abi::SNAT_PORTS;
    let used: BTreeSet<u16> = (first..=last).step_by(usize::from((last - first) / USED)).collect();
    for v6 in [false, true] {
        let at = backend(&world.workloads[1], v6);
        let entry = serve(&mut world, at);
        let before = [6, 17].map(|protocol| node_ports(&mut world, protocol).len());
        let (node, outside) = (&world.topology.nodes[0].ns, world.outside());
        let (address, client) = (world.node(0, v6), any_port(world.client(v6)));
        let at_port = |port: &u16| SocketAddr::new(address, *port);
        let _held = node
            .run_in(|| {
                let udp = used.iter().map(|p| UdpSocket::bind(at_port(p))).collect::<Result<Vec<_>, _>>()?;
                let tcp =
                    used.iter().map(|p| TcpListener::bind(at_port(p))).collect::<Result<Vec<_>, _>>()?;
                Ok::<_, std::io::Error>((udp, tcp))
            })
            .expect("enter")
            .expect("bind");
        let server = TcpServer::start(&world.workloads[1].ns, at, Mode::Echo).expect("server");
        outside
            .run_in(|| {
                for _ in 0..CLIENTS {
                    UdpSocket::bind(client)?.send_to(b"question", entry)?;
                    TcpStream::connect_timeout(&entry, PATIENCE)?;
                }
                Ok::<_, std::io::Error>(())
            })
            .expect("enter")
            .expect("clients");
        eventually(PATIENCE, || {
            let seen = server.accepted();
            if seen >= CLIENTS as u64 { Ok(()) } else { Err(seen) }
        });
        for (protocol, before) in [6, 17].into_iter().zip(before) {
            let ports = node_ports(&mut world, protocol);
            // Two clients may have had one port, one after the other.
            assert!(ports.len() - before > CLIENTS / 2, "{protocol}: {}", ports.len() - before);
            let taken: Vec<_> = ports.iter().filter(|p| used.contains(p)).collect();
            assert!(taken.is_empty(), "protocol {protocol} v6={v6}: {taken:?}");
        }
    }
}
