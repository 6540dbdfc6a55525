//! Services for sockets: translated when they are connected, shown as what was asked for.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use flowloom_bpf_abi::{self as abi, map_name, service_flags};
use flowloom_netlink::Diag;
use flowloom_testkit::{EchoServer, Mode, Ns, Outcome, PATIENCE, Probe, TcpServer, eventually};
use flowloom_tests_netns::lab::{BLUE, DEFAULT_VPC, Lab, RED, Workload};
use flowloom_tests_netns::services::{PROTOCOLS, number, service_key, vip};

fn service(v6: bool) -> SocketAddr {
    SocketAddr::new(vip(v6), 80)
}

fn backend(w: &Workload, v6: bool) -> SocketAddr {
    SocketAddr::new(w.ip(v6), 8080)
}

/// A connection is counted when the server gets to it.
fn accepted(server: &TcpServer, n: u64) {
    eventually(PATIENCE, || if server.accepted() == n { Ok(()) } else { Err(server.accepted()) });
}

/// A client and a server of a VPC, whose sockets are served.
fn pair(lab: &mut Lab, node: &Ns, vpc: u32, first: u32) -> (Workload, Workload) {
    let a = lab.workload(node, first, vpc, 0, 10).expect("a");
    let b = lab.workload(node, first + 1, vpc, 0, 11).expect("b");
    lab.bind_netns(&a.ns, a.id).expect("bind");
    lab.bind_netns(&b.ns, b.id).expect("bind");
    (a, b)
}

fn connect(ns: &Ns, to: SocketAddr) -> io::Result<TcpStream> {
    ns.run_in(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("enter")
}

fn udp(ns: &Ns, bind: &str) -> UdpSocket {
    let socket = ns.run_in(|| UdpSocket::bind(bind)).expect("enter").expect("bind");
    socket.set_read_timeout(Some(PATIENCE)).expect("timeout");
    socket
}

/// What no packet passed for: the translation of packets knows nothing of it.
fn no_flows(lab: &mut Lab) {
    assert_eq!(lab.programs.dump::<abi::FlowKey, abi::FlowValue>(map_name::SRV_FLOWS).expect("flows"), []);
}

#[test]
fn a_tcp_socket_reaches_a_backend_and_sees_the_service() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, b) = pair(&mut lab, &node, RED, 1);
    let mut served = 0;
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        let server = TcpServer::start(&b.ns, backend(&b, v6), Mode::Echo).expect("server");
        let mapped = match vip(v6) {
            IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), 80),
            IpAddr::V6(_) => service(v6),
        };
        for to in [service(v6), mapped] {
            let mut stream = connect(&a.ns, to).expect("connect");
            assert_eq!(stream.peer_addr().expect("peer"), to);
            stream.write_all(b"hello").expect("write");
            stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
            let mut answer = [0; 5];
            stream.read_exact(&mut answer).expect("read");
            served += 1;
        }
        accepted(&server, 2);
    }
    assert_eq!(served, 4);
    no_flows(&mut lab);
}

#[test]
fn udp_sockets_connected_and_not_hear_from_the_service() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, b) = pair(&mut lab, &node, RED, 1);
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        let server = EchoServer::start(&b.ns, backend(&b, v6)).expect("server");
        let any = if v6 { "[::]:0" } else { "0.0.0.0:0" };
        let mapped = match vip(v6) {
            IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), 80),
            IpAddr::V6(_) => service(v6),
        };
        for (bind, to) in [(any, service(v6)), ("[::]:0", mapped)] {
            let connected = udp(&a.ns, bind);
            connected.connect(to).expect("connect");
            assert_eq!(connected.peer_addr().expect("peer"), to);
            connected.send(b"one").expect("send");
            let (n, from) = connected.recv_from(&mut [0; 16]).expect("answer");
            assert_eq!((n, from), (3, to));
            let free = udp(&a.ns, bind);
            free.send_to(b"three", to).expect("send");
            let (n, from) = free.recv_from(&mut [0; 16]).expect("answer");
            assert_eq!((n, from), (5, to));
        }
        assert_eq!(server.received(), 4);
    }
    no_flows(&mut lab);
}

#[test]
fn without_a_backend_connect_and_sendto_are_refused() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, _b) = pair(&mut lab, &node, RED, 1);
    for v6 in [false, true] {
        lab.serve(RED, service(v6), 0, &[], |_| ()).expect("service");
        let error = connect(&a.ns, service(v6)).expect_err("no backend");
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "v6={v6}");
        let socket = udp(&a.ns, if v6 { "[::]:0" } else { "0.0.0.0:0" });
        let error = socket.send_to(b"x", service(v6)).expect_err("no backend");
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "v6={v6}");
        let error = socket.connect(service(v6)).expect_err("no backend");
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "v6={v6}");
    }
}

#[test]
fn tenants_of_one_cgroup_use_their_own_services_and_strangers_none() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (red_a, red_b) = pair(&mut lab, &node, RED, 1);
    let (blue_a, blue_b) = pair(&mut lab, &node, BLUE, 3);
    lab.serve(RED, service(false), 1, &[backend(&red_b, false)], |_| ()).expect("service");
    let red = TcpServer::start(&red_b.ns, backend(&red_b, false), Mode::Echo).expect("server");
    let blue = TcpServer::start(&blue_b.ns, backend(&blue_b, false), Mode::Echo).expect("server");
    connect(&red_a.ns, service(false)).expect("red's own service");
    // The other tenant has no such service: nothing is translated, and its VPC has no such address.
    let outcome = Probe::tcp(&blue_a.ns, service(false)).run().expect("probe");
    assert_eq!(outcome, Outcome::TimedOut, "blue has none");
    lab.serve(BLUE, service(false), 2, &[backend(&blue_b, false)], |_| ()).expect("service");
    connect(&blue_a.ns, service(false)).expect("blue's own service");
    accepted(&red, 1);
    accepted(&blue, 1);
    // A namespace that nobody has named, with a listener at the very address.
    let stranger = Ns::new("stranger").expect("namespace");
    let address = format!("{}/32", vip(false));
    stranger.exec_ok(&["ip", "link", "set", "lo", "up"]).expect("lo");
    stranger.exec_ok(&["ip", "addr", "add", &address, "dev", "lo"]).expect("address");
    let listener = stranger.run_in(|| TcpListener::bind(service(false))).expect("enter").expect("bind");
    let stream = connect(&stranger, service(false)).expect("its own listener");
    let (_, from) = listener.accept().expect("accept");
    assert_eq!(from, stream.local_addr().expect("address"));
    accepted(&red, 1);
    accepted(&blue, 1);
}

#[test]
fn this_hosts_sockets_use_the_default_vpc() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let b = lab.workload(&node, 1, DEFAULT_VPC, 0, 11).expect("b");
    lab.host(&node, &b, 0).expect("host");
    lab.bind_netns(&node, 0).expect("bind");
    for v6 in [false, true] {
        lab.serve(DEFAULT_VPC, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |_| ()).expect("service");
        let server = TcpServer::start(&b.ns, backend(&b, v6), Mode::Echo).expect("server");
        let stream = connect(&node, service(v6)).expect("connect");
        assert_eq!(stream.peer_addr().expect("peer"), service(v6));
        accepted(&server, 1);
    }
}

#[test]
fn a_connected_udp_socket_of_a_backend_that_is_gone_is_ended_and_no_other() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, b) = pair(&mut lab, &node, RED, 1);
    lab.serve(RED, service(false), 1, &[backend(&b, false)], |_| ()).expect("service");
    let through = udp(&a.ns, "0.0.0.0:0");
    through.connect(service(false)).expect("connect");
    let direct = udp(&a.ns, "0.0.0.0:0");
    direct.connect(backend(&b, false)).expect("connect");
    // Only the service's client is known by the maps.
    let known: Vec<u64> = lab
        .programs
        .dump::<abi::SocketKey, abi::SocketValue>(map_name::SOCKETS)
        .expect("sockets")
        .into_iter()
        .filter(|(k, _)| k.kind == abi::socket_kind::REVERSE)
        .map(|(k, _)| k.cookie)
        .collect();
    assert_eq!(known.len(), 1);
    let mut diag = Diag::in_netns(&a.ns).expect("diag");
    let sockets = diag.connected_udp().expect("list");
    assert_eq!(sockets.iter().filter(|s| s.remote == backend(&b, false)).count(), 2, "{sockets:?}");
    let target = sockets.iter().find(|s| s.cookie == known[0]).expect("the service's client");
    assert!(diag.destroy(target).expect("destroy"));
    assert!(!diag.destroy(target).expect("again"));
    let error = through.recv(&mut [0; 4]).expect_err("ended");
    assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{error}");
    assert!(direct.take_error().expect("error of the socket").is_none(), "the other one goes on");
    direct.send(b"x").expect("the other one goes on");
}

#[test]
fn datagrams_leave_a_backend_that_is_gone() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, b) = pair(&mut lab, &node, RED, 1);
    let c = lab.workload(&node, 3, RED, 0, 12).expect("c");
    let first = EchoServer::start(&b.ns, backend(&b, false)).expect("server");
    let second = EchoServer::start(&c.ns, backend(&c, false)).expect("server");
    lab.serve(RED, service(false), 1, &[backend(&b, false)], |_| ()).expect("service");
    let socket = udp(&a.ns, "0.0.0.0:0");
    let ask = || {
        socket.send_to(b"x", service(false)).expect("send");
        assert_eq!(socket.recv_from(&mut [0; 4]).expect("answer").1, service(false));
    };
    ask();
    // Another list that still has it: it stays.
    lab.serve(RED, service(false), 2, &[backend(&c, false), backend(&b, false)], |_| ()).expect("service");
    (0..8).for_each(|_| ask());
    assert_eq!((first.received(), second.received()), (9, 0));
    lab.serve(RED, service(false), 3, &[backend(&c, false)], |_| ()).expect("service");
    ask();
    assert_eq!((first.received(), second.received()), (9, 1));
    // A service that is taken away translates nothing any more.
    lab.programs
        .remove::<abi::ServiceKey, abi::ServiceRecord>(
            map_name::SERVICES,
            &service_key(RED, service(false), 17),
        )
        .expect("remove");
    socket.send_to(b"x", service(false)).expect("send");
    assert!(socket.recv_from(&mut [0; 4]).is_err());
}

#[test]
fn source_ranges_judge_workloads_by_their_address_and_this_host_by_its_nodes() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    lab.serve_sockets().expect("sockets");
    let (a, b) = pair(&mut lab, &node, DEFAULT_VPC, 1);
    lab.host(&node, &b, 0).expect("host");
    lab.bind_netns(&node, 0).expect("bind");
    for v6 in [false, true] {
        let gateway: IpAddr = if v6 { b.record.gateway6 } else { b.record.gateway4 }.into();
        lab.configure(|c| if v6 { c.node6 = gateway.into() } else { c.node4 = gateway.into() })
            .expect("config");
        lab.serve(DEFAULT_VPC, service(v6), 1 + u32::from(v6), &[backend(&b, v6)], |r| {
            r.flags = service_flags::RANGES;
        })
        .expect("service");
        let _tcp = TcpServer::start(&b.ns, backend(&b, v6), Mode::Echo).expect("server");
        for (ns, address, who) in [(&a.ns, a.ip(v6), "workload"), (&node, gateway, "host")] {
            let refused = connect(ns, service(v6)).expect_err("outside the ranges");
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{who} v6={v6}");
            let datagram = udp(ns, if v6 { "[::]:0" } else { "0.0.0.0:0" }).send_to(b"x", service(v6));
            assert_eq!(datagram.expect_err("outside").kind(), ErrorKind::ConnectionRefused, "{who} v6={v6}");
            for protocol in PROTOCOLS {
                lab.programs.admit(number(DEFAULT_VPC, service(v6), protocol), address).expect("range");
            }
            connect(ns, service(v6)).expect("inside the ranges");
        }
    }
}
