//! The other ways of a packet: direct routes, the stack, fragments, long streams, revocation under load.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use aya::programs::TcAttachType;
use flowloom_bpf_abi::{config_flags, delivery, map_name, mark, peer_flags};
use flowloom_testkit::{
    Mode, Netfilter, Ns, Outcome, PATIENCE, Probe, TcpServer, Topology, UdpReceiver, UdpSender, eventually,
    never,
};
use flowloom_tests_netns::lab::{ALLOW, DEFAULT_VPC, DENY, Lab, RED, REJECT, Workload, identity, passes};

fn reaches(lab: &Lab, from: &Ns, to: &Workload) {
    for v6 in [false, true] {
        let addr = SocketAddr::new(to.ip(v6), 8080);
        passes(&[lab], from, addr, &to.ns, addr);
    }
}

#[test]
fn direct_routes_carry_the_default_vpc_between_nodes_without_the_stack() {
    let topology = Topology::builder().netfilter(Netfilter::ForwardDrop).build().expect("topology");
    let mut labs = [Lab::new(1).expect("one"), Lab::new(2).expect("two")];
    let mut workloads = Vec::new();
    for (i, (lab, node)) in labs.iter_mut().zip(&topology.nodes).enumerate() {
        lab.configure(|c| {
            c.uplink_ifindex = node.uplink_index.number();
            c.uplink_mtu = 1500;
        })
        .expect("config");
        lab.attach(&node.ns, node.uplink.as_str(), "from_uplink", TcAttachType::Ingress).expect("attach");
        lab.attach(&node.ns, node.uplink.as_str(), "to_uplink", TcAttachType::Egress).expect("attach");
        workloads.push(lab.workload(&node.ns, 1 + i as u32, DEFAULT_VPC, i as u8, 10).expect("workload"));
    }
    for (here, there) in [(0, 1), (1, 0)] {
        let (node, other) = (&topology.nodes[here], &topology.nodes[there]);
        for v6 in [false, true] {
            let peer = workloads[there].ip(v6);
            let via: IpAddr = if v6 { other.ip6.into() } else { other.ip4.into() };
            let route = ["ip", "route", "add", &peer.to_string(), "via", &via.to_string()].map(str::to_owned);
            node.ns.exec_ok(&route).expect("route");
            let id = identity(workloads[there].id);
            labs[here].remote_peer(DEFAULT_VPC, peer, id, via, peer_flags::DIRECT).expect("peer");
        }
    }
    reaches(&labs[1], &workloads[0].ns, &workloads[1]);
    reaches(&labs[0], &workloads[1].ns, &workloads[0]);
    labs[1].switch(&mut workloads[1], ALLOW, REJECT).expect("switch");
    hears_a_reject(&labs[1], &workloads[0].ns, &workloads[1]);
}

fn hears_a_reject(lab: &Lab, from: &Ns, to: &Workload) {
    for v6 in [false, true] {
        let addr = SocketAddr::new(to.ip(v6), 8090);
        let tcp = Probe::tcp(from, addr).timeout(PATIENCE).run().expect("tcp");
        assert_eq!(tcp, Outcome::Refused, "v6={v6} {:?}", lab.programs.drops());
        let udp = Probe::udp(from, addr).timeout(PATIENCE).run().expect("udp");
        assert!(matches!(udp, Outcome::Unreachable(_)), "v6={v6} {udp:?} {:?}", lab.programs.drops());
    }
}

#[test]
fn in_stack_mode_the_kernel_forwards_and_both_sides_are_judged() {
    let mut lab = Lab::new(1).expect("lab");
    // The stack forwards here: no filter.
    let node = Ns::new("stack").expect("node");
    for key in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
        node.exec_ok(&["sysctl", "-qw", key]).expect("sysctl");
    }
    lab.configure(|c| c.flags |= config_flags::FORWARD_STACK).expect("config");
    let a = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("a");
    let mut b = lab.workload(&node, 2, DEFAULT_VPC, 0, 11).expect("b");
    lab.host(&node, &a, 0).expect("host");
    lab.host(&node, &b, 0).expect("host");
    reaches(&lab, &a.ns, &b);
    lab.switch(&mut b, ALLOW, DENY).expect("switch");
    let to = SocketAddr::new(b.ip(false), 8080);
    let server = TcpServer::start(&b.ns, to, Mode::Echo).expect("server");
    assert_eq!(Probe::tcp(&a.ns, to).run().expect("tcp"), Outcome::TimedOut);
    assert_eq!(server.accepted(), 0);
    assert!(lab.programs.drops().expect("drops").contains_key("PolicyIngress"));
    lab.switch(&mut b, ALLOW, REJECT).expect("switch");
    hears_a_reject(&lab, &a.ns, &b);
}

#[test]
fn nothing_depends_on_what_the_hosts_connection_tracking_thinks() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.filtered_node(Netfilter::InvalidDrop).expect("node");
    let a = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("a");
    let b = lab.workload(&node, 2, DEFAULT_VPC, 1, 10).expect("b");
    lab.host(&node, &a, 0).expect("host");
    lab.host(&node, &b, 1).expect("host");
    reaches(&lab, &a.ns, &b);
    // The host's own connections, both ways through netfilter.
    reaches(&lab, &node, &b);
}

#[test]
fn a_device_that_has_no_peer_elsewhere_is_reached_by_its_egress() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let mut b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    for w in [&mut a, &mut b] {
        w.record.delivery = delivery::REDIRECT;
        lab.enter(w).expect("enter");
    }
    reaches(&lab, &a.ns, &b);
    lab.switch(&mut b, ALLOW, REJECT).expect("switch");
    let to = SocketAddr::new(b.ip(true), 8080);
    assert_eq!(Probe::tcp(&a.ns, to).timeout(PATIENCE).run().expect("tcp"), Outcome::Refused);
}

#[test]
fn a_workload_cannot_forge_the_programs_marks() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut a = lab.workload(&node, 1, DEFAULT_VPC, 0, 10).expect("a");
    lab.host(&node, &a, 0).expect("host");
    let gateway: IpAddr = flowloom_tests_netns::lab::ip4(0, 1).into();
    let to = SocketAddr::new(gateway, 9090);
    let server = TcpServer::start(&node, to, Mode::Echo).expect("server");
    assert_eq!(Probe::tcp(&a.ns, to).timeout(PATIENCE).run().expect("tcp"), Outcome::Connected);
    lab.switch(&mut a, DENY, ALLOW).expect("switch");
    for mark in [mark::ANSWER, mark::JUDGED] {
        let rules = format!(
            "table inet forge {{ chain out {{ type filter hook output priority 0; meta mark set {mark:#x}; }}\n}}\n"
        );
        a.ns.exec(&["nft", "delete", "table", "inet", "forge"]).expect("nft");
        a.ns.exec_ok(&["nft", &rules]).expect("nft");
        assert_eq!(Probe::tcp(&a.ns, to).run().expect("tcp"), Outcome::TimedOut);
    }
    eventually(PATIENCE, || if server.accepted() == 1 { Ok(()) } else { Err(server.accepted()) });
    assert!(lab.programs.drops().expect("drops").contains_key("PolicyEgress"));
}

#[test]
fn datagrams_in_several_fragments_arrive() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 1, 10).expect("b");
    for v6 in [false, true] {
        let family = if v6 { "-6" } else { "-4" };
        let to = b.ip(v6).to_string();
        let out =
            a.ns.exec(&["ping", family, "-c", "2", "-i", "0.2", "-W", "1", "-s", "8000", &to]).expect("ping");
        assert!(out.stdout.contains("2 received"), "v6={v6} {} {:?}", out.stdout, lab.programs.drops());
    }
}

#[test]
fn a_one_way_stream_stops_with_the_change_and_not_after_it() {
    let mut lab = Lab::new(1).expect("lab");
    let node = lab.closed_node().expect("node");
    let mut a = lab.workload(&node, 1, RED, 0, 10).expect("a");
    let b = lab.workload(&node, 2, RED, 0, 11).expect("b");
    let to = SocketAddr::new(b.ip(false), 7000);
    let receiver = UdpReceiver::start(&b.ns, to).expect("receiver");
    let _sender = UdpSender::start(&a.ns, None, to, Duration::from_millis(1), 1, 64).expect("sender");
    eventually(PATIENCE, || if receiver.count() > 50 { Ok(()) } else { Err(receiver.count()) });
    // By a rule.
    lab.switch(&mut a, DENY, ALLOW).expect("switch");
    let stopped = settled(&receiver);
    never(Duration::from_millis(300), || {
        if receiver.count() == stopped { Ok(()) } else { Err(receiver.count()) }
    });
    lab.switch(&mut a, ALLOW, ALLOW).expect("switch");
    eventually(PATIENCE, || if receiver.count() > stopped + 50 { Ok(()) } else { Err(receiver.count()) });
    // By a label: the receiver's address has another identity, which the sender may not speak to.
    let other = identity(77);
    let entries = [
        flowloom_tests_netns::programs::entry(0, 0, None, 1, flowloom_bpf_abi::verdict::ALLOW),
        flowloom_tests_netns::programs::entry(other, 0, None, 2, flowloom_bpf_abi::verdict::DROP),
    ];
    lab.programs.policy(9, &entries).expect("policy");
    lab.switch(&mut a, 9, ALLOW).expect("switch");
    let before = receiver.count();
    eventually(PATIENCE, || if receiver.count() > before + 50 { Ok(()) } else { Err(receiver.count()) });
    lab.endpoint_peer(RED, b.ip(false), other).expect("peer");
    lab.programs.bump(RED).expect("bump");
    let stopped = settled(&receiver);
    never(Duration::from_millis(300), || {
        if receiver.count() == stopped { Ok(()) } else { Err(receiver.count()) }
    });
    let counts: Vec<(flowloom_bpf_abi::CtKey, flowloom_bpf_abi::CtEntry)> =
        lab.programs.dump(map_name::CONNTRACK_NEW).expect("dump");
    assert_eq!(counts.len(), 1);
}

/// What has arrived once the datagrams that were delivered before the change are read from the socket: five equal readings.
fn settled(receiver: &UdpReceiver) -> usize {
    let (mut last, mut equal) = (receiver.count(), 0);
    eventually(PATIENCE, || {
        let now = receiver.count();
        equal = if now == last { equal + 1 } else { 0 };
        last = now;
        if equal >= 5 { Ok(now) } else { Err(now) }
    })
}
