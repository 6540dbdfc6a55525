//! Two nodes, VXLAN with the VPC as VNI, the same addresses in two VPCs.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use flowloom_testkit::{Mode, Netfilter, Outcome, PATIENCE, Probe, TcpServer, Topology, eventually};
use flowloom_tests_netns::lab::{BLUE, Lab, RED, REJECT, Workload, identity, passes};

struct Two {
    one: Lab,
    two: Lab,
    topology: Topology,
}

fn two(tunnel_v6: bool) -> Two {
    let topology = Topology::builder().netfilter(Netfilter::ForwardDrop).build().expect("topology");
    let mut labs = [Lab::new(1).expect("one"), Lab::new(2).expect("two")];
    for (lab, node) in labs.iter_mut().zip(&topology.nodes) {
        lab.overlay(&node.ns, if tunnel_v6 { 1430 } else { 1450 }).expect("overlay");
        for n in &topology.nodes {
            let tunnel: IpAddr = if tunnel_v6 { n.ip6.into() } else { n.ip4.into() };
            lab.node(tunnel, u32::from(n.number == node.number)).expect("node");
        }
    }
    let [one, two] = labs;
    Two { one, two, topology }
}

/// Each node learns the other's workload.
fn introduce(t: &mut Two, a: &Workload, b: &Workload, tunnel_v6: bool) {
    let tunnel = |n: usize| -> IpAddr {
        let node = &t.topology.nodes[n];
        if tunnel_v6 { node.ip6.into() } else { node.ip4.into() }
    };
    let (to_one, to_two) = (tunnel(0), tunnel(1));
    for v6 in [false, true] {
        t.one.remote_peer(b.record.vpc, b.ip(v6), identity(b.id), to_two, 0).expect("peer");
        t.two.remote_peer(a.record.vpc, a.ip(v6), identity(a.id), to_one, 0).expect("peer");
    }
}

fn crosses(tunnel_v6: bool) {
    let mut t = two(tunnel_v6);
    let a = t.one.workload(&t.topology.nodes[0].ns, 1, RED, 0, 10).expect("a");
    let b = t.two.workload(&t.topology.nodes[1].ns, 7, RED, 0, 11).expect("b");
    introduce(&mut t, &a, &b, tunnel_v6);
    for v6 in [false, true] {
        let to = SocketAddr::new(b.ip(v6), 8080);
        // What is larger than the tunnel's MTU in one segment, too: the sender learns the path's MTU and goes on.
        passes(&[&t.one, &t.two], &a.ns, to, &b.ns, to);
    }
}

#[test]
fn a_vpc_spans_two_nodes_over_ipv4() {
    crosses(false);
}

#[test]
fn a_vpc_spans_two_nodes_over_ipv6() {
    crosses(true);
}

#[test]
fn equal_addresses_of_two_vpcs_meet_their_own() {
    let mut t = two(false);
    let (n1, n2) = (0, 1);
    let red_a = t.one.workload(&t.topology.nodes[n1].ns, 1, RED, 0, 10).expect("red a");
    let blue_a = t.one.workload(&t.topology.nodes[n1].ns, 2, BLUE, 0, 10).expect("blue a");
    let red_b = t.two.workload(&t.topology.nodes[n2].ns, 3, RED, 0, 11).expect("red b");
    let blue_b = t.two.workload(&t.topology.nodes[n2].ns, 4, BLUE, 0, 11).expect("blue b");
    introduce(&mut t, &red_a, &red_b, false);
    introduce(&mut t, &blue_a, &blue_b, false);
    let to = SocketAddr::new(red_b.ip(false), 8080);
    let red_server = TcpServer::start(&red_b.ns, to, Mode::Echo).expect("server");
    assert_eq!(Probe::tcp(&red_a.ns, to).timeout(PATIENCE).run().expect("tcp"), Outcome::Connected);
    eventually(PATIENCE, || if red_server.accepted() == 1 { Ok(()) } else { Err(red_server.accepted()) });
    // Nobody listens in blue: the refusal is blue's own.
    assert_eq!(Probe::tcp(&blue_a.ns, to).timeout(PATIENCE).run().expect("tcp"), Outcome::Refused);
    assert_eq!(red_server.accepted(), 1);
}

#[test]
fn what_the_other_node_rejects_is_refused_to_the_sender() {
    let mut t = two(false);
    let a = t.one.workload(&t.topology.nodes[0].ns, 1, RED, 0, 10).expect("a");
    let mut b = t.two.workload(&t.topology.nodes[1].ns, 7, RED, 0, 11).expect("b");
    introduce(&mut t, &a, &b, false);
    t.two.switch(&mut b, 1, REJECT).expect("switch");
    for v6 in [false, true] {
        let to = SocketAddr::new(b.ip(v6), 8080);
        let timeout = Duration::from_secs(1);
        let tcp = Probe::tcp(&a.ns, to).timeout(timeout).run().expect("tcp");
        assert_eq!(
            tcp,
            Outcome::Refused,
            "v6={v6} {:?} {:?}",
            t.one.programs.drops(),
            t.two.programs.drops()
        );
        let udp = Probe::udp(&a.ns, to).timeout(timeout).run().expect("udp");
        assert!(matches!(udp, Outcome::Unreachable(_)), "v6={v6} {udp:?} {:?}", t.one.programs.drops());
    }
}
