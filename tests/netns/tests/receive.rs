//! Packets of open connections that an uplink's program takes out of their tunnel, between two nodes.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use aya::programs::TcAttachType;
use flowloom_bpf_abi::{Addr, config_flags};
use flowloom_testkit::{Mode, Netfilter, Ns, PATIENCE, TcpClient, TcpServer, Topology, eventually};
use flowloom_tests_netns::lab::{ALLOW, DENY, Lab, RED, Workload, identity, passes};

/// Two nodes, a workload on each.
struct Two {
    labs: [Lab; 2],
    workloads: Vec<Workload>,
    topology: Topology,
}

fn two(flags: u32) -> Two {
    let topology = Topology::builder().netfilter(Netfilter::ForwardDrop).build().expect("topology");
    let mut labs = [Lab::new(1).expect("one"), Lab::new(2).expect("two")];
    let mut workloads = Vec::new();
    for (i, (lab, node)) in labs.iter_mut().zip(&topology.nodes).enumerate() {
        lab.overlay(&node.ns, 1450).expect("overlay");
        lab.configure(|c| {
            c.flags |= flags;
            c.node4 = Addr::v4(node.ip4.octets());
        })
        .expect("config");
        lab.attach(&node.ns, node.uplink.as_str(), "from_uplink", TcAttachType::Ingress).expect("attach");
        lab.attach(&node.ns, node.uplink.as_str(), "to_uplink", TcAttachType::Egress).expect("attach");
        for n in &topology.nodes {
            lab.node(n.ip4.into(), u32::from(n.number == node.number)).expect("node");
        }
        workloads.push(lab.workload(&node.ns, 1 + i as u32, RED, 0, 10 + i as u8).expect("workload"));
    }
    for (here, there) in [(0, 1), (1, 0)] {
        let tunnel = topology.nodes[there].ip4.into();
        for v6 in [false, true] {
            let (peer, id) = (workloads[there].ip(v6), identity(workloads[there].id));
            labs[here].remote_peer(RED, peer, id, tunnel, 0).expect("peer");
        }
    }
    Two { labs, workloads, topology }
}

impl Two {
    /// Packets that the tunnel's devices have received.
    fn by_device(&self) -> [u64; 2] {
        [0, 1].map(|n| received(&self.topology.nodes[n].ns).expect("counters"))
    }
}

fn received(node: &Ns) -> anyhow::Result<u64> {
    let shown = node.exec_ok(&["ip", "-s", "link", "show", "dev", "flvx"])?.stdout;
    let mut lines = shown.lines().skip_while(|l| !l.trim_start().starts_with("RX:"));
    let counts = lines.nth(1).context("no counters")?;
    Ok(counts.split_whitespace().nth(1).context("no packets")?.parse()?)
}

/// Questions, each answered before the next: what came by a device has been counted there by then.
fn talks(client: &mut TcpClient, times: u32) {
    for n in 0..times {
        client.round_trip(format!("question {n}").as_bytes(), PATIENCE).expect("round trip");
    }
}

#[test]
fn the_tunnels_device_sees_only_the_first_packets_of_a_connection() {
    for v6 in [false, true] {
        let mut t = two(config_flags::RECEIVE_AT_UPLINK);
        let to = SocketAddr::new(t.workloads[1].ip(v6), 8080);
        let server = TcpServer::start(&t.workloads[1].ns, to, Mode::Echo).expect("server");
        let mut client = TcpClient::connect(&t.workloads[0].ns, to, PATIENCE).expect("connect");
        talks(&mut client, 1);
        let first = t.by_device();
        assert!(first.iter().all(|n| (1..=4).contains(n)), "v6={v6} {first:?}");
        talks(&mut client, 50);
        assert_eq!(t.by_device(), first, "v6={v6}");
        // Revoked: dropped there, too; a new decision forgets the answers' way, so what comes then is the device's to judge.
        let before = server.bytes();
        t.labs[1].switch(&mut t.workloads[1], ALLOW, DENY).expect("switch");
        assert!(client.round_trip(b"more", Duration::from_secs(1)).is_err());
        let drops = t.labs[1].programs.drops().expect("drops");
        assert!(drops.contains_key("PolicyIngress"), "v6={v6} {drops:?}");
        assert_eq!(server.bytes(), before, "v6={v6}");
    }
}

#[test]
fn without_being_asked_for_the_tunnels_device_receives_everything() {
    let t = two(0);
    let to = SocketAddr::new(t.workloads[1].ip(false), 8080);
    let _server = TcpServer::start(&t.workloads[1].ns, to, Mode::Echo).expect("server");
    let mut client = TcpClient::connect(&t.workloads[0].ns, to, PATIENCE).expect("connect");
    let first = t.by_device();
    talks(&mut client, 20);
    eventually(PATIENCE, || {
        let now = t.by_device();
        if now.iter().zip(first).all(|(n, f)| *n >= f + 20) { Ok(()) } else { Err(now) }
    });
}

/// Datagrams, and streams of segments: their direction stays with the device.
#[test]
fn streams_and_datagrams_come_through_and_segments_stay_with_the_device() {
    let t = two(config_flags::RECEIVE_AT_UPLINK);
    for v6 in [false, true] {
        for (here, there) in [(0, 1), (1, 0)] {
            let to = SocketAddr::new(t.workloads[there].ip(v6), 8080);
            let labs = [&t.labs[0], &t.labs[1]];
            let _server = passes(&labs, &t.workloads[here].ns, to, &t.workloads[there].ns, to);
            let mut client = TcpClient::connect(&t.workloads[here].ns, to, PATIENCE).expect("connect");
            talks(&mut client, 5);
            let before = t.by_device()[there];
            client.round_trip(&vec![7; 300_000], PATIENCE).expect("bulk");
            let bulk = t.by_device()[there];
            assert!(bulk > before, "v6={v6} {before}");
            // Small packets, too, from now on.
            talks(&mut client, 5);
            assert!(t.by_device()[there] >= bulk + 5, "v6={v6} {bulk}");
        }
    }
}
