//! Services for packets that no socket hook has seen: raw sockets, virtual machines, other cgroups. Nothing but the programs may carry them.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};

use flowloom_bpf_abi::{self as abi, map_name, service_flags};
use flowloom_testkit::{
    Mode, Netfilter, Ns, Outcome, PATIENCE, Probe, TcpClient, TcpServer, Topology, eventually,
};
use flowloom_tests_netns::lab::{BLUE, DEFAULT_VPC, DENY, Lab, RED, Workload, identity, passes};
use flowloom_tests_netns::services::{PROTOCOLS, number, told, vip};

fn service(v6: bool) -> SocketAddr {
    SocketAddr::new(vip(v6), 80)
}

fn backend(w: &Workload, v6: bool) -> SocketAddr {
    SocketAddr::new(w.ip(v6), 8080)
}

/// One handshake, one datagram, and more than a segment each way through the service.
fn works(labs: &[&Lab], from: &Ns, to: &Ns, v6: bool, at: SocketAddr) {
    passes(labs, from, service(v6), to, at);
}

#[test]
fn a_workload_reaches_a_service_of_its_vpc() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        works(&[&lab], &a.ns, &b.ns, v6, backend(&b, v6));
    }
    // The server sees its client, not a translation of it.
    let server = TcpServer::start(&b.ns, backend(&b, false), Mode::Echo).expect("server");
    let _client = TcpClient::connect(&a.ns, service(false), PATIENCE).expect("connect");
    eventually(PATIENCE, || {
        let peers: Vec<IpAddr> = server.peers().iter().map(SocketAddr::ip).collect();
        if peers == [a.ip(false)] { Ok(()) } else { Err(peers) }
    });
}

#[test]
fn tenants_with_the_same_service_and_backend_addresses_do_not_meet() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for (n, vpc) in [(0, RED), (1, BLUE)] {
        let a = lab.workload(&node, 1 + 2 * n, vpc, 0, 10).expect("a");
        let b = lab.workload(&node, 2 + 2 * n, vpc, 0, 11).expect("b");
        lab.serve(vpc, service(false), 1 + n, &[backend(&b, false)], |_| ()).expect("service");
        servers.push(TcpServer::start(&b.ns, backend(&b, false), Mode::Echo).expect("server"));
        clients.push((a, b));
    }
    for (n, (a, _)) in clients.iter().enumerate() {
        let others = servers[1 - n].accepted();
        let own = servers[n].accepted();
        assert_eq!(
            Probe::tcp(&a.ns, service(false)).timeout(PATIENCE).run().expect("tcp"),
            Outcome::Connected
        );
        eventually(PATIENCE, || if servers[n].accepted() > own { Ok(()) } else { Err("not accepted") });
        assert_eq!(servers[1 - n].accepted(), others);
    }
}

#[test]
fn without_a_backend_clients_are_told_at_once() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 0, &[], |_| ()).expect("service");
        for probe in [Probe::tcp(&a.ns, service(v6)), Probe::udp(&a.ns, service(v6))] {
            let outcome = probe.timeout(PATIENCE).run().expect("probe");
            assert_eq!(outcome, Outcome::Refused, "{:?} v6={v6} {:?}", probe.proto, lab.programs.drops());
        }
    }
    assert_eq!(lab.programs.drops().expect("drops").keys().collect::<Vec<_>>(), ["ServiceNoBackend"]);
}

#[test]
fn a_workload_outside_the_source_ranges_is_dropped_and_one_inside_is_served() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    let stranger = lab.workload(&node, 3, RED, 0, 12).expect("stranger");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |r| {
            r.flags = service_flags::RANGES;
        })
        .expect("service");
        for protocol in PROTOCOLS {
            lab.programs.admit(number(RED, service(v6), protocol), a.ip(v6)).expect("range");
        }
        works(&[&lab], &a.ns, &b.ns, v6, backend(&b, v6));
        let probe = Probe::tcp(&stranger.ns, service(v6)).run().expect("tcp");
        assert_eq!(probe, Outcome::TimedOut, "v6={v6}");
    }
    assert!(lab.programs.drops().expect("drops").contains_key("ServiceSourceRange"));
}

#[test]
fn a_workload_that_is_its_own_backend_gets_its_answer() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    lab.switch(&mut a, DENY, DENY).expect("switch");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&a, v6)], |_| ()).expect("service");
        works(&[&lab], &a.ns, &a.ns, v6, backend(&a, v6));
    }
}

#[test]
fn a_backend_that_nobody_listens_at_refuses_in_the_name_of_the_service() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        assert_eq!(Probe::tcp(&a.ns, service(v6)).timeout(PATIENCE).run().expect("tcp"), Outcome::Refused);
        // An ICMP error that quotes the backend would mean nothing to this socket.
        let error =
            a.ns.run_in(|| {
                let socket = UdpSocket::bind(SocketAddr::new(a.ip(v6), 0))?;
                socket.connect(service(v6))?;
                Ok::<_, io::Error>(told(&socket, b"anyone?"))
            })
            .expect("enter")
            .expect("socket");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "v6={v6} {:?}", lab.programs.drops());
    }
}

#[test]
fn a_workload_that_is_its_own_backend_hears_that_nobody_listens() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&a, v6)], |_| ()).expect("service");
        let (drops, own) = (|| lab.programs.drops(), SocketAddr::new(a.ip(v6), 0));
        let socket = |at: SocketAddr| {
            let socket = a.ns.run_in(|| UdpSocket::bind(at)).expect("enter").expect("bind");
            socket.set_read_timeout(Some(PATIENCE)).expect("timeout");
            socket
        };
        let client = socket(own);
        client.connect(service(v6)).expect("connect");
        let error = told(&client, b"anyone?");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "client v6={v6} {:?}", drops());
        // The other way round: who asked is gone.
        let server = socket(backend(&a, v6));
        client.send(b"goodbye").expect("send");
        let (_, peer) = server.recv_from(&mut [0; 16]).expect("question");
        drop(client);
        server.connect(peer).expect("connect");
        let error = told(&server, b"answer");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "server v6={v6} {:?}", drops());
    }
}

#[test]
fn a_connection_stays_with_its_backend_when_new_ones_go_elsewhere() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    let c = lab.workload(&node, 3, RED, 0, 12).expect("c");
    lab.serve(RED, service(false), 1, &[backend(&b, false)], |_| ()).expect("service");
    let first = TcpServer::start(&b.ns, backend(&b, false), Mode::Echo).expect("server");
    let second = TcpServer::start(&c.ns, backend(&c, false), Mode::Echo).expect("server");
    let mut old = TcpClient::connect(&a.ns, service(false), PATIENCE).expect("connect");
    old.round_trip(b"before", PATIENCE).expect("before");
    lab.serve(RED, service(false), 2, &[backend(&c, false)], |_| ()).expect("service");
    old.round_trip(b"after", PATIENCE).expect("after");
    let mut new = TcpClient::connect(&a.ns, service(false), PATIENCE).expect("connect");
    new.round_trip(b"new", PATIENCE).expect("new");
    assert_eq!((first.accepted(), second.accepted()), (1, 1));
}

#[test]
fn a_client_with_affinity_always_meets_the_same_backend() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let others: Vec<Workload> =
        (0..3).map(|n| lab.workload(&node, 2 + n, RED, 0, 11 + n as u8).expect("backend")).collect();
    let backends: Vec<SocketAddr> = others.iter().map(|w| backend(w, false)).collect();
    lab.serve(RED, service(false), 1, &backends, |r| r.affinity = 60).expect("service");
    let servers: Vec<TcpServer> = others
        .iter()
        .map(|w| TcpServer::start(&w.ns, backend(w, false), Mode::Echo).expect("server"))
        .collect();
    for _ in 0..12 {
        let mut client = TcpClient::connect(&a.ns, service(false), PATIENCE).expect("connect");
        client.round_trip(b"x", PATIENCE).expect("round trip");
    }
    let mut counts: Vec<u64> = servers.iter().map(TcpServer::accepted).collect();
    counts.sort_unstable();
    assert_eq!(counts, [0, 0, 12]);
}

#[test]
fn a_backend_on_another_node_is_reached_through_the_tunnel() {
    let topology = Topology::builder().netfilter(Netfilter::ForwardDrop).build().expect("topology");
    let mut labs = [Lab::new(1).expect("one"), Lab::new(2).expect("two")];
    for (lab, node) in labs.iter_mut().zip(&topology.nodes) {
        lab.overlay(&node.ns, 1450).expect("overlay");
        for n in &topology.nodes {
            lab.node(n.ip4.into(), u32::from(n.number == node.number)).expect("node");
        }
    }
    let a = labs[0].workload(&topology.nodes[0].ns, 1, RED, 0, 10).expect("a");
    let b = labs[1].workload(&topology.nodes[1].ns, 7, RED, 0, 11).expect("b");
    for v6 in [false, true] {
        let (one, two) = (topology.nodes[0].ip4.into(), topology.nodes[1].ip4.into());
        labs[0].remote_peer(RED, b.ip(v6), identity(b.id), two, 0).expect("peer");
        labs[1].remote_peer(RED, a.ip(v6), identity(a.id), one, 0).expect("peer");
        labs[0].serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        works(&[&labs[0], &labs[1]], &a.ns, &b.ns, v6, backend(&b, v6));
    }
}

#[test]
fn a_backend_that_is_this_host_answers_through_the_stack() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("a");
    lab.host(&node, &a, 0).expect("host");
    for v6 in [false, true] {
        let gateway = if v6 { a.record.gateway6 } else { a.record.gateway4 };
        let at = SocketAddr::new(gateway.into(), 8080);
        lab.serve(DEFAULT_VPC, service(v6), 1 + u32::from(v6), &[at], |_| ()).expect("service");
        works(&[&lab], &a.ns, &node, v6, at);
    }
}

#[test]
fn a_forgotten_connection_is_reset_and_not_given_to_another_backend() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    lab.serve(RED, service(false), 1, &[backend(&b, false)], |_| ()).expect("service");
    let server = TcpServer::start(&b.ns, backend(&b, false), Mode::Echo).expect("server");
    let mut client = TcpClient::connect(&a.ns, service(false), PATIENCE).expect("connect");
    client.round_trip(b"x", PATIENCE).expect("round trip");
    for (key, _) in lab.programs.dump::<abi::FlowKey, abi::FlowValue>(map_name::SRV_FLOWS).expect("flows") {
        lab.programs.remove::<abi::FlowKey, abi::FlowValue>(map_name::SRV_FLOWS, &key).expect("remove");
    }
    let error = client.round_trip(b"y", PATIENCE).expect_err("reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    assert_eq!(server.accepted(), 1);
}
