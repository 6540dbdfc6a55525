//! What senders are told: resets, prohibitions, path MTU, time exceeded.

use std::net::SocketAddr;

use flowloom_testkit::{EchoServer, Mode, Outcome, PATIENCE, Probe, TcpServer, eventually};
use flowloom_tests_netns::lab::{ALLOW, DEFAULT_VPC, Lab, RED, REJECT};

fn refused(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Refused | Outcome::Unreachable(_))
}

#[test]
fn a_reject_of_either_side_is_heard_by_a_local_sender() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let mut b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    for (egress, ingress) in [(REJECT, ALLOW), (ALLOW, REJECT)] {
        lab.switch(&mut a, egress, ALLOW).expect("switch");
        lab.switch(&mut b, ALLOW, ingress).expect("switch");
        for v6 in [false, true] {
            let to = SocketAddr::new(b.ip(v6), 8080);
            let server = TcpServer::start(&b.ns, to, Mode::Echo).expect("server");
            let _udp = EchoServer::start(&b.ns, to).expect("server");
            let tcp = Probe::tcp(&a.ns, to).timeout(PATIENCE).run().expect("tcp");
            assert_eq!(tcp, Outcome::Refused, "v6={v6} {:?}", lab.programs.drops());
            let udp = Probe::udp(&a.ns, to).timeout(PATIENCE).run().expect("udp");
            assert!(refused(udp), "v6={v6} {udp:?} {:?}", lab.programs.drops());
            assert_eq!(server.accepted(), 0);
        }
    }
}

#[test]
fn the_host_reaches_its_endpoints_and_hears_their_rejects_when_it_is_judged() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut w = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("w");
    lab.host(&node, &w, 0).expect("host");
    lab.switch(&mut w, ALLOW, REJECT).expect("switch");
    for v6 in [false, true] {
        let to = SocketAddr::new(w.ip(v6), 8080);
        let _tcp = TcpServer::start(&w.ns, to, Mode::Echo).expect("server");
        let _udp = EchoServer::start(&w.ns, to).expect("server");
        let tcp = Probe::tcp(&node, to).timeout(PATIENCE).run().expect("tcp");
        assert_eq!(tcp, Outcome::Connected, "v6={v6} {:?}", lab.programs.drops());
        assert_eq!(
            Probe::udp(&node, to).timeout(PATIENCE).run().expect("udp"),
            Outcome::Connected,
            "v6={v6}"
        );
    }
    w.record.flags |= flowloom_bpf_abi::endpoint_flags::JUDGE_HOST;
    lab.switch(&mut w, ALLOW, REJECT).expect("switch");
    for v6 in [false, true] {
        let to = SocketAddr::new(w.ip(v6), 8081);
        let _tcp = TcpServer::start(&w.ns, to, Mode::Echo).expect("server");
        let tcp = Probe::tcp(&node, to).timeout(PATIENCE).run().expect("tcp");
        assert_eq!(tcp, Outcome::Refused, "v6={v6} {:?}", lab.programs.drops());
        let udp = Probe::udp(&node, to).timeout(PATIENCE).run().expect("udp");
        assert!(refused(udp), "v6={v6} {udp:?} {:?}", lab.programs.drops());
    }
}

#[test]
fn a_workload_reaches_the_hosts_stack_by_its_gateway_address_in_the_default_vpc_only() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let w = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("w");
    let other = lab.workload(&node, 2, RED, 0, 10).expect("other");
    lab.host(&node, &w, 0).expect("host");
    for v6 in [false, true] {
        let gateway = if v6 {
            flowloom_tests_netns::lab::ip6(0, 1).into()
        } else {
            std::net::IpAddr::from(flowloom_tests_netns::lab::ip4(0, 1))
        };
        let to = SocketAddr::new(gateway, 9090);
        let server = TcpServer::start(&node, to, Mode::Echo).expect("server");
        assert_eq!(
            Probe::tcp(&w.ns, to).timeout(PATIENCE).run().expect("tcp"),
            Outcome::Connected,
            "{:?}",
            lab.programs.drops()
        );
        assert_eq!(Probe::icmp(&w.ns, gateway).timeout(PATIENCE).run().expect("icmp"), Outcome::Connected);
        // The other VPC's gateway has the same address: it answers echo, and nothing else.
        assert_eq!(
            Probe::icmp(&other.ns, gateway).timeout(PATIENCE).run().expect("icmp"),
            Outcome::Connected,
            "v6={v6} {:?}",
            lab.programs.drops()
        );
        assert_eq!(Probe::tcp(&other.ns, to).run().expect("tcp"), Outcome::TimedOut);
        eventually(PATIENCE, || if server.accepted() == 1 { Ok(()) } else { Err(server.accepted()) });
    }
}

#[test]
fn a_packet_that_may_travel_one_hop_only_is_answered_by_the_gateway() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 1, 10).expect("b");
    let same = lab.workload(&node, 3, RED, 0, 11).expect("same");
    for v6 in [false, true] {
        let family = if v6 { "-6" } else { "-4" };
        let run = |ip: std::net::IpAddr| {
            let ip = ip.to_string();
            a.ns.exec(&["ping", family, "-c", "1", "-W", "1", "-t", "1", &ip]).expect("ping").stdout
        };
        // Switched inside the subnet: no hop.
        assert!(run(same.ip(v6)).contains("1 received"), "v6={v6}");
        let routed = run(b.ip(v6));
        assert!(routed.contains("exceeded"), "v6={v6} {routed} {:?}", lab.programs.drops());
        let gateway = if v6 { "fd00:1::1" } else { "10.1.0.1" };
        assert!(routed.contains(&format!("From {gateway}")), "{routed}");
    }
}
