//! Two workloads on one node: nothing but the programs may carry their packets.

use std::net::SocketAddr;

use flowloom_testkit::{Mode, Outcome, Probe, TcpServer};
use flowloom_tests_netns::lab::{DENY, Lab, RED, passes};

#[test]
fn tcp_udp_and_echo_pass_between_two_workloads_of_a_vpc() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    for v6 in [false, true] {
        let to = SocketAddr::new(b.ip(v6), 8080);
        passes(&[&lab], &a.ns, to, &b.ns, to);
    }
}

#[test]
fn ingress_of_the_receiver_denies_what_egress_of_the_sender_allows() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let mut b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    let to = SocketAddr::new(b.ip(false), 8080);
    let server = TcpServer::start(&b.ns, to, Mode::Echo).expect("server");
    let deny = DENY;
    lab.switch(&mut b, 1, deny).expect("switch");
    assert_eq!(Probe::tcp(&a.ns, to).run().expect("tcp"), Outcome::TimedOut);
    assert_eq!(server.accepted(), 0);
    assert!(lab.programs.drops().expect("drops").contains_key("PolicyIngress"));
}
