//! What a workload may not send, byte by byte through its own device: nothing of it arrives, each has its reason counted, and honest traffic goes on. What it may
//! send in large pieces arrives whole.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_api::v1::DropFilter;
use flowloom_netlink::{LinkName, Mac};
use flowloom_testkit::{
    Capture, Direction, Fault, Frame, Mode, PATIENCE, Packet, RawSender, TcpClient, TcpFlow, TcpServer, arp,
    eventually, icmp, ip_protocol, nd, tcp_flags,
};
use flowloom_tests_e2e::{Document, Lab, Workload};
use serde_json::json;

const OPEN: u16 = 7000;
const SHUT: u16 = 7999;
const EVIL: &[u8] = b"this must never arrive";
const GOOD: &[u8] = b"odd, and allowed all the same";
const GATEWAY: Mac = Mac([2, 0, 0, 0, 0, 0xfe]);
/// Each frame is sent so often.
const TIMES: u64 = 3;

fn document(lab: &Lab) -> Document {
    let endpoint = |name: &str, node: &str, host: u8| {
        json!({"vpc": "red", "name": name, "subnet": "app", "node": node, "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")],
               "mac": format!("02:00:00:00:01:{host}"), "security_groups": ["g"]})
    };
    let rule = |p: &str| json!({"id": p, "priority": 1, "direction": "ingress", "protocol": p, "ports": [{"from": OPEN, "to": OPEN}], "action": "allow"});
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([{"vpc": "red", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]}]))
        .with("endpoints", json!([endpoint("a", "n1", 10), endpoint("b", "n1", 20), endpoint("c", "n2", 30)]))
        .with("security_groups", json!([{"vpc": "red", "name": "g", "default_deny_egress": false, "rules": [rule("tcp"), rule("udp")]}]))
}

fn link(workload: &Workload) -> Result<LinkName> {
    Ok(LinkName::new(workload.info.interface.clone().context("no interface")?)?)
}

fn mac(workload: &Workload) -> Result<Mac> {
    workload.info.mac.parse().map_err(anyhow::Error::msg)
}

fn drops(lab: &Lab, reasons: &[&str]) -> Result<u64> {
    let list = lab.agents[0].client().drops(&DropFilter::default())?.drops;
    Ok(list
        .iter()
        .filter(|d| reasons.is_empty() || reasons.contains(&d.reason.name.as_str()))
        .map(|d| d.packets)
        .sum())
}

/// A frame and the reasons of which it must be counted under one; none = it arrives.
type Case = (String, Vec<u8>, &'static [&'static str]);

/// What is wrong for any target, in both families.
fn malformed(a: &Workload, target: &Workload, family: u8) -> Result<Vec<Case>> {
    let (own, to) = (a.ip(family)?, target.ip(family)?);
    let (from, open, shut) =
        (SocketAddr::new(own, 41_000), SocketAddr::new(to, OPEN), SocketAddr::new(to, SHUT));
    let m = mac(a)?;
    let udp = |to: SocketAddr, text: &[u8]| Packet::udp(from, to, text).macs(m, GATEWAY);
    let tcp = |to: SocketAddr, flags: u8| Packet::tcp(from, to, flags).payload(EVIL).macs(m, GATEWAY);
    let at = |ip: IpAddr| SocketAddr::new(ip, OPEN);
    let mut cases: Vec<Case> = Vec::new();
    let mut add = |name: &str, frame: Vec<u8>, reasons: &'static [&'static str]| {
        cases.push((format!("{name} (IPv{family} to {})", target.info.endpoint.name), frame, reasons));
    };
    let (v4, other, nobody): (bool, IpAddr, IpAddr) = match family {
        4 => (true, "10.1.0.99".parse()?, "0.0.0.0".parse()?),
        _ => (false, "fd10:1::99".parse()?, "::".parse()?),
    };
    add("allowed", udp(open, GOOD).frame(), &[]);
    add("denied", udp(shut, EVIL).frame(), &["PolicyIngress"]);
    // Sources.
    let mut spoofed = udp(open, EVIL);
    spoofed.source = other;
    add("another source", spoofed.frame(), &["SpoofedSource"]);
    spoofed.source = to;
    add("the target's own address as source", spoofed.frame(), &["SpoofedSource", "ToSelf"]);
    spoofed.source = nobody;
    add("no source", spoofed.frame(), &["SpoofedSource", "InvalidAddress"]);
    add("another MAC", udp(open, EVIL).macs(Mac([2, 9, 9, 9, 9, 9]), GATEWAY).frame(), &["SpoofedSource"]);
    // Headers.
    add("another IP version", udp(open, EVIL).fault(Fault::IpVersion(5)).frame(), &["InvalidHeader"]);
    add(
        "a length beyond the frame",
        udp(open, EVIL).fault(Fault::IpLength(1400)).frame(),
        &["Truncated", "InvalidHeader"],
    );
    add(
        "a UDP length beyond the packet",
        udp(open, EVIL).fault(Fault::UdpLength(1000)).frame(),
        &["InvalidHeader", "Truncated"],
    );
    add(
        "a UDP length below its header",
        udp(open, EVIL).fault(Fault::UdpLength(3)).frame(),
        &["InvalidHeader"],
    );
    add(
        "a TCP header of two words",
        tcp(open, tcp_flags::SYN).fault(Fault::TcpWords(2)).frame(),
        &["InvalidHeader"],
    );
    add(
        "a TCP header beyond the packet",
        tcp(open, tcp_flags::SYN).fault(Fault::TcpWords(15)).frame(),
        &["Truncated", "InvalidHeader"],
    );
    if v4 {
        add(
            "an IPv4 header of four words",
            udp(open, EVIL).fault(Fault::IpHeaderWords(4)).frame(),
            &["InvalidHeader"],
        );
        let mut options = udp(open, GOOD);
        options.ip_options = vec![1, 1, 148, 4, 0, 0];
        add("IPv4 options", options.frame(), &[]);
        let mut options = udp(shut, EVIL);
        options.ip_options = vec![1; 40];
        add("IPv4 options to a closed port", options.frame(), &["PolicyIngress"]);
    } else {
        let mut extensions = udp(open, GOOD);
        extensions.extensions = vec![(ip_protocol::DESTINATION_OPTIONS, vec![1, 4, 0, 0, 0, 0])];
        add("an IPv6 extension header", extensions.frame(), &[]);
        let mut extensions = udp(shut, EVIL);
        extensions.extensions = vec![
            (ip_protocol::HOP_BY_HOP, vec![1, 4, 0, 0, 0, 0]),
            (ip_protocol::DESTINATION_OPTIONS, vec![1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ];
        add("extension headers to a closed port", extensions.frame(), &["PolicyIngress"]);
        extensions.extensions =
            (0..20).map(|_| (ip_protocol::DESTINATION_OPTIONS, vec![1, 4, 0, 0, 0, 0])).collect();
        add("extension headers without end", extensions.frame(), &["InvalidHeader"]);
    }
    // Tags and foreign protocols.
    for (word, tags) in [
        ("a VLAN tag", vec![(0x8100, 5)]),
        ("a priority tag", vec![(0x8100, 0)]),
        ("two tags", vec![(0x88a8, 5), (0x8100, 6)]),
    ] {
        let mut tagged = udp(open, EVIL);
        tagged.vlans = tags;
        add(word, tagged.frame(), &["UnsupportedEtherType"]);
    }
    let mut unknown = udp(open, EVIL).frame();
    unknown[12..14].copy_from_slice(&[0x88, 0xcc]);
    add("an unknown EtherType", unknown, &["UnsupportedEtherType"]);
    add("GRE", Packet::other(own, to, ip_protocol::GRE, EVIL).macs(m, GATEWAY).frame(), &["PolicyIngress"]);
    add("SCTP", Packet::sctp_init(from, shut).macs(m, GATEWAY).frame(), &["PolicyIngress"]);
    add(
        "the other family's ICMP",
        Packet::other(own, to, if v4 { ip_protocol::ICMPV6 } else { ip_protocol::ICMP }, EVIL)
            .macs(m, GATEWAY)
            .frame(),
        &["InvalidHeader"],
    );
    // Ports and flags.
    add("UDP to port 0", udp(SocketAddr::new(to, 0), EVIL).frame(), &["InvalidHeader"]);
    add("TCP to port 0", tcp(SocketAddr::new(to, 0), tcp_flags::SYN).frame(), &["InvalidHeader"]);
    let port0 = Packet::tcp(SocketAddr::new(own, 0), open, tcp_flags::SYN).payload(EVIL).macs(m, GATEWAY);
    add("TCP from port 0", port0.frame(), &["InvalidHeader"]);
    for (word, flags) in [
        ("no flags", 0),
        ("SYN and FIN", 3),
        ("SYN and RST", 6),
        ("all flags", 63),
        ("FIN alone", 1),
        ("URG and PSH", 40),
    ] {
        add(word, tcp(open, flags).frame(), &["InvalidHeader"]);
    }
    add("RST of nothing", tcp(SocketAddr::new(to, OPEN), tcp_flags::RST).frame(), &["ConntrackInvalid"]);
    // Destinations.
    for (word, ip, reasons) in if v4 {
        vec![
            ("broadcast", "255.255.255.255", &["Broadcast"][..]),
            ("the subnet's broadcast", "10.1.0.255", &["Broadcast"]),
            ("multicast", "224.0.0.5", &["Multicast"]),
            ("link-local", "169.254.1.1", &["LinkLocal"]),
            ("loopback", "127.0.0.1", &["InvalidAddress"]),
            ("itself", "10.1.0.10", &["ToSelf"]),
            ("nowhere", "192.0.2.77", &["NoRoute"]),
        ]
    } else {
        vec![
            ("multicast", "ff02::5", &["Multicast"][..]),
            ("wide multicast", "ff0e::5", &["Multicast"]),
            ("link-local", "fe80::1", &["LinkLocal"]),
            ("loopback", "::1", &["InvalidAddress"]),
            ("itself", "fd10:1::10", &["ToSelf"]),
            ("nowhere", "2001:db8:77::1", &["NoRoute"]),
        ]
    } {
        add(&format!("to {word}"), udp(at(ip.parse()?), EVIL).frame(), reasons);
    }
    // An error about a connection that does not exist.
    let quoted = Packet::udp(open, SocketAddr::new(own, 41_999), EVIL).ip();
    let kind = if v4 { icmp::V4_UNREACHABLE } else { 1 };
    let error = icmp::error(own, to, kind, 0, 0, &quoted[..quoted.len().min(60)]).macs(m, GATEWAY);
    add("an ICMP error about nothing", error.frame(), &["ConntrackInvalid"]);
    // A fragment without its first one.
    let parts = Packet::udp(from, open, &[EVIL, EVIL, EVIL, EVIL].concat()).macs(m, GATEWAY).fragments(32);
    add("a later fragment alone", parts.get(1).context("one fragment only")?.clone(), &["FragmentUnknown"]);
    Ok(cases)
}

/// What speaks for others on the link.
fn claims(a: &Workload, b: &Workload) -> Result<Vec<Case>> {
    let (m, all) = (mac(a)?, Mac([0xff; 6]));
    let v4 = |w: &Workload| -> Result<Ipv4Addr> { Ok(w.ip(4)?.to_string().parse()?) };
    let v6 = |w: &Workload| -> Result<Ipv6Addr> { Ok(w.ip(6)?.to_string().parse()?) };
    let gateway4: Ipv4Addr = "10.1.0.1".parse()?;
    let gateway6 = a
        .info
        .gateways
        .iter()
        .find_map(|g| if let IpAddr::V6(g) = g { Some(*g) } else { None })
        .context("no IPv6 gateway")?;
    let nodes: Ipv6Addr = "ff02::1".parse()?;
    let reply = |ip: Ipv4Addr| arp::Arp::reply(m, ip, all, ip).frame(m, all);
    let na = |target: Ipv6Addr, from: Ipv6Addr| nd::advertisement(from, nodes, target, m).frame();
    Ok(vec![
        ("ARP for a neighbour's address".into(), reply(v4(b)?), &["SpoofedNeighbour"]),
        ("ARP for the gateway's address".into(), reply(gateway4), &["SpoofedNeighbour"]),
        (
            "an ARP question in a neighbour's name".into(),
            arp::Arp::request(m, v4(b)?, gateway4).frame(m, all),
            &["SpoofedNeighbour"],
        ),
        (
            "an ARP question from another MAC".into(),
            arp::Arp::request(Mac([2, 9, 9, 9, 9, 9]), v4(a)?, gateway4).frame(m, all),
            &["SpoofedNeighbour", "SpoofedSource"],
        ),
        ("an advertisement of a neighbour's address".into(), na(v6(b)?, v6(a)?), &["SpoofedNeighbour"]),
        ("an advertisement of the gateway's address".into(), na(gateway6, v6(a)?), &["SpoofedNeighbour"]),
        (
            "a router advertisement".into(),
            nd::router_advertisement("fe80::1".parse()?, m).frame(),
            &["RouterAdvertisement"],
        ),
        (
            "a router advertisement from its own address".into(),
            nd::router_advertisement(v6(a)?, m).frame(),
            &["RouterAdvertisement"],
        ),
        (
            "a redirect".into(),
            nd::redirect("fe80::1".parse()?, v6(b)?, v6(a)?, gateway6, m).frame(),
            &["RouterAdvertisement"],
        ),
    ])
}

#[test]
fn nothing_a_workload_makes_up_arrives_and_honest_traffic_goes_on() -> Result<()> {
    let lab = Lab::builder().config("events: {rate: 20}").start()?;
    lab.apply(&document(&lab))?;
    let (a, b, c) = (lab.workload("red/a")?, lab.workload("red/b")?, lab.workload("red/c")?);
    let mut servers = Vec::new();
    let mut flows = Vec::new();
    for (target, family) in [(&b, 4), (&b, 6), (&c, 4), (&c, 6)] {
        let at = SocketAddr::new(target.ip(family)?, OPEN);
        servers.push(TcpServer::start(&target.netns, at, Mode::Echo)?);
        flows.push(TcpFlow::start(&a.netns, at, Duration::from_millis(2), PATIENCE)?);
    }
    let captures =
        [("b", Capture::start(&b.netns, &link(&b)?)?), ("c", Capture::start(&c.netns, &link(&c)?)?)];
    let underlay = Capture::start(&lab.node(1).ns, &lab.node(1).uplink)?;
    let senders = [RawSender::open(&a.netns, &link(&a)?)?, RawSender::open_bypassing(&a.netns, &link(&a)?)?];
    // On the same node the receiver's reasons are counted here too; the other node counts its own.
    let mut cases = claims(&a, &b)?;
    for family in [4, 6] {
        cases.extend(malformed(&a, &b, family)?);
    }
    let mut faults = Vec::new();
    let mut allowed = 0;
    for (i, (name, frame, reasons)) in cases.iter().enumerate() {
        let before = drops(&lab, reasons)?;
        for _ in 0..TIMES {
            senders[i % 2].send(frame).with_context(|| name.clone())?;
        }
        if reasons.is_empty() {
            allowed += TIMES;
            continue;
        }
        // The programs run in the sender's own call: the count is there already.
        let counted = drops(&lab, reasons)? - before;
        if counted < TIMES {
            let all = lab.agents[0].client().drops(&DropFilter::default())?.drops;
            let all: Vec<_> = all.iter().map(|d| format!("{} {}", d.reason.name, d.packets)).collect();
            faults.push(format!("{name}: {counted} of {TIMES} counted as {reasons:?}; so far {all:?}"));
        }
    }
    // Cut at every byte: none is more than a drop.
    for family in [4, 6] {
        let from = SocketAddr::new(a.ip(family)?, 41_001);
        let whole = Packet::tcp(from, SocketAddr::new(b.ip(family)?, OPEN), tcp_flags::SYN)
            .payload(EVIL)
            .macs(mac(&a)?, GATEWAY)
            .frame();
        let before = drops(&lab, &["Truncated", "InvalidHeader"])?;
        for n in 15..whole.len() {
            senders[0].send(&whole[..n])?;
        }
        let counted = drops(&lab, &["Truncated", "InvalidHeader"])? - before;
        if counted < (whole.len() - 15) as u64 {
            faults.push(format!("IPv{family}: {counted} of {} cut frames counted", whole.len() - 15));
        }
    }
    // Across nodes: only what does not depend on the receiver's policy.
    for family in [4, 6] {
        for (name, frame, reasons) in malformed(&a, &c, family)? {
            senders[0].send(&frame).with_context(|| name)?;
            allowed += u64::from(reasons.is_empty());
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));

    let good = |frames: &[Frame]| frames.iter().filter(|f| f.contains(GOOD)).count() as u64;
    eventually(PATIENCE, || {
        let n: u64 = captures.iter().map(|(_, c)| good(&c.frames())).sum();
        if n >= allowed { Ok(()) } else { Err(format!("{n} of {allowed} allowed packets arrived")) }
    });
    let trips: Vec<u64> = flows.iter().map(TcpFlow::round_trips).collect();
    eventually(PATIENCE, || {
        if flows.iter().zip(&trips).all(|(f, t)| f.round_trips() > t + 10) {
            Ok(())
        } else {
            Err("the honest flows stand")
        }
    });
    for flow in flows {
        let report = flow.stop();
        assert!(report.error.is_none(), "{report:?}");
    }
    let own = mac(&a)?;
    for (name, capture) in captures {
        let frames = capture.stop()?;
        let evil = frames.iter().filter(|f| f.contains(EVIL)).count();
        assert_eq!(evil, 0, "{name} got what it must not get");
        let claims = frames.iter().filter(|f| f.direction == Direction::In && f.contains(&own.0)).count();
        assert_eq!(claims, 0, "{name} heard the sender's MAC");
    }
    // Policy of the receiver is judged on its node, so what it refuses may travel; nothing else may.
    let travelled = underlay.stop()?.iter().filter(|f| f.contains(EVIL)).count();
    assert!(travelled <= 20, "{travelled} malformed frames left the node");
    // Nobody believed a claim.
    for w in [&b, &c] {
        let neighbours =
            flowloom_testkit::Cmd::new(&["ip", "neigh"]).in_netns(&w.netns)?.run()?.success()?.stdout;
        assert!(!neighbours.contains(&own.to_string()), "{}: {neighbours}", w.info.endpoint.name);
    }
    for agent in &lab.agents {
        assert!(agent.client().health()?.ready, "{} is not well", agent.name);
    }
    Ok(())
}

#[test]
fn large_segments_and_a_hundred_megabytes_arrive_whole_on_one_node_and_over_the_tunnel() -> Result<()> {
    const CHUNK: usize = 1 << 20;
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab))?;
    let a = lab.workload("red/a")?;
    for (target, family) in [("red/b", 4), ("red/c", 6)] {
        let to = lab.workload(target)?;
        let at = SocketAddr::new(to.ip(family)?, OPEN);
        let server = TcpServer::start(&to.netns, at, Mode::Echo)?;
        let mut client = TcpClient::connect(&a.netns, at, PATIENCE)?;
        let mut payload: Vec<u8> = vec![0; CHUNK];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut fill = |payload: &mut Vec<u8>| {
            for word in payload.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_be_bytes());
            }
        };
        let seen = Capture::start(&a.netns, &link(&a)?)?;
        // Each round compares every byte that came back, so both directions are checked.
        let mut round_trip = |round: usize| -> Result<()> {
            fill(&mut payload);
            client.round_trip(&payload, PATIENCE).with_context(|| format!("{target} round {round}")).map(drop)
        };
        for round in 0..3 {
            round_trip(round)?;
        }
        let largest =
            seen.stop()?.iter().filter(|f| f.direction == Direction::Out).map(|f| f.bytes.len()).max();
        assert!(
            largest.is_some_and(|n| n > 30_000),
            "{target}: no large segments left the workload: {largest:?}"
        );
        for round in 3..50 {
            round_trip(round)?;
        }
        // A hundred megabytes: fifty there and fifty back.
        assert_eq!(server.bytes(), 50 * CHUNK as u64, "{target}");
        // And what the rules close stays closed for it.
        let shut =
            TcpClient::connect(&a.netns, SocketAddr::new(to.ip(family)?, SHUT), Duration::from_millis(200));
        assert!(shut.is_err(), "{target}: the closed port is open");
    }
    Ok(())
}
