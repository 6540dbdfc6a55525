//! Two tenants with the same addresses, MACs and ports on the same nodes, tried hard.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_api::v1::{ConntrackFilter, DropFilter, EventFilter, StreamItem};
use flowloom_netlink::{LinkName, Mac};
use flowloom_testkit::{
    Capture, EchoServer, Frame, Mode, Outcome, PATIENCE, Packet, Probe, RawSender, TcpFlow, TcpServer,
    UdpReceiver, UdpSender, eventually, icmp, vxlan,
};
use flowloom_tests_e2e::{Document, Lab, Workload};
use serde_json::{Value, json};

const TENANTS: [(&str, u64); 2] =
    [("red", u64::from_be_bytes(*b"REDREDRE")), ("blue", u64::from_be_bytes(*b"BLUEBLUE"))];
/// Allowed in red, denied in blue; and the other way round.
const PORTS: [u16; 2] = [7000, 7001];

fn tenant(vpc: &str, open: u16) -> Vec<(&'static str, Value)> {
    let endpoint = |name: &str, node: &str, host: u8| {
        json!({"vpc": vpc, "name": name, "subnet": "app", "node": node, "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")],
               "mac": format!("02:00:00:00:00:{host}"), "security_groups": ["g"]})
    };
    let rules: Vec<Value> = ["tcp", "udp"]
        .iter()
        .map(|p| json!({"id": format!("open-{p}"), "priority": 10, "direction": "ingress", "protocol": p, "ports": [{"from": open, "to": open}], "action": "allow"}))
        .collect();
    vec![
        ("vpcs", json!({"name": vpc})),
        ("subnets", json!({"vpc": vpc, "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]})),
        ("endpoints", json!([endpoint("a", "n1", 10), endpoint("b", "n1", 20), endpoint("c", "n2", 30)])),
        ("security_groups", json!({"vpc": vpc, "name": "g", "default_deny_egress": false, "rules": rules})),
    ]
}

fn document(lab: &Lab, tenants: &[usize]) -> Document {
    let mut document = lab.empty_document();
    for i in tenants {
        for (kind, objects) in tenant(TENANTS[*i].0, PORTS[*i]) {
            document.add(kind, objects);
        }
    }
    document
}

fn link(workload: &Workload) -> Result<LinkName> {
    Ok(LinkName::new(workload.info.interface.clone().context("no interface")?)?)
}

fn capture(workload: &Workload) -> Result<Capture> {
    Capture::start(&workload.netns, &link(workload)?)
}

fn carries(frames: &[Frame], mark: u64) -> usize {
    frames.iter().filter(|f| f.contains(&mark.to_be_bytes())).count()
}

#[test]
fn a_capture_in_red_holds_no_blue_payload_and_the_tables_are_disjoint() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab, &[0, 1]))?;
    let mut sides = Vec::new();
    for (vpc, mark) in TENANTS {
        let [a, b, c] = ["a", "b", "c"].map(|n| lab.workload(&format!("{vpc}/{n}")));
        sides.push((vpc, mark, a?, b?, c?));
    }
    let mut captures = Vec::new();
    let mut receivers = Vec::new();
    let mut senders = Vec::new();
    for (vpc, mark, a, b, c) in &sides {
        for target in [b, c] {
            captures.push((*vpc, *mark, capture(target)?));
            for family in [4, 6] {
                for (i, port) in PORTS.iter().enumerate() {
                    let to = SocketAddr::new(target.ip(family)?, *port);
                    receivers.push((*vpc, *mark, to, UdpReceiver::start(&target.netns, to)?));
                    // Source ports are equal in both tenants too.
                    let from = SocketAddr::new(
                        a.ip(family)?,
                        40_000
                            + i as u16
                            + u16::from(family) * 10
                            + u16::from(target.info.endpoint.name == "c") * 100,
                    );
                    senders.push(UdpSender::start(
                        &a.netns,
                        Some(from),
                        to,
                        Duration::from_millis(1),
                        *mark,
                        200,
                    )?);
                }
            }
        }
    }
    eventually(PATIENCE, || if senders.iter().all(|s| s.sent() > 300) { Ok(()) } else { Err("sending") });
    drop(senders);
    for (vpc, mark, to, receiver) in &receivers {
        let own = PORTS[usize::from(*vpc == "blue")] == to.port();
        let arrivals = receiver.arrivals();
        assert_eq!(!arrivals.is_empty(), own, "{vpc} at {to}: {} datagrams", arrivals.len());
        assert!(arrivals.iter().all(|f| f.mark == *mark), "{vpc} at {to} got another tenant's datagram");
    }
    for (vpc, mark, capture) in captures {
        let frames = capture.stop()?;
        let other = TENANTS.iter().find(|t| t.0 != vpc).context("two tenants")?.1;
        assert!(carries(&frames, mark) > 0, "the capture in {vpc} works");
        assert_eq!(carries(&frames, other), 0, "the capture in {vpc} holds the other tenant's payload");
    }
    let mut flows = 0;
    for agent in &lab.agents {
        for (i, (vpc, _)) in TENANTS.iter().enumerate() {
            let list = agent
                .client()
                .conntrack(&ConntrackFilter { vpc: Some((*vpc).to_owned()), ..ConntrackFilter::default() })?;
            assert!(!list.connections.is_empty(), "{} has no connection of {vpc}", agent.name);
            for connection in &list.connections {
                assert_eq!(connection.vpc.name, *vpc);
                let denied = [&connection.egress, &connection.ingress]
                    .into_iter()
                    .flatten()
                    .any(|j| j.verdict != flowloom_api::v1::Verdict::Allow);
                assert!(
                    denied || connection.dst_port == PORTS[i] || agent.name == "n1",
                    "{vpc} tracks {connection:?}"
                );
            }
            // Counters and flows: what each denies is at the port that the other one allows.
            let (denied, vpc) = (PORTS[1 - i], (*vpc).to_owned());
            let filter = DropFilter {
                vpc: Some(vpc.clone()),
                reason: Some("PolicyIngress".into()),
                ..DropFilter::default()
            };
            let drops = agent.client().drops(&filter)?.drops;
            assert!(drops.iter().any(|d| d.packets > 0), "{} counts no drop of {vpc}", agent.name);
            assert!(drops.iter().all(|d| d.vpc.as_ref().is_some_and(|v| v.name == vpc)), "{drops:?}");
            let filter = EventFilter {
                vpc: Some(vpc.clone()),
                reason: Some("PolicyIngress".into()),
                ..EventFilter::default()
            };
            for item in agent.client().events(&filter)? {
                let StreamItem::Event(event) = item? else { continue };
                assert!(event.vpc.name == vpc && event.dst_port == denied, "{vpc} is told of {event:?}");
                flows += 1;
            }
        }
    }
    assert!(flows > 0, "no flow was told");
    Ok(())
}

#[test]
fn interleaved_fragments_with_equal_ids_keep_to_their_tenant() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab, &[0, 1]))?;
    for (target, node) in [("b", "same node"), ("c", "other node")] {
        let mut streams = Vec::new();
        let mut receivers = Vec::new();
        for (i, (vpc, mark)) in TENANTS.iter().enumerate() {
            let (from, to) = (lab.workload(&format!("{vpc}/a"))?, lab.workload(&format!("{vpc}/{target}"))?);
            for family in [4, 6] {
                for port in PORTS {
                    let at = SocketAddr::new(to.ip(family)?, port);
                    receivers.push((i, port, *mark, UdpReceiver::start(&to.netns, at)?));
                    let mut payload = 0u64.to_be_bytes().to_vec();
                    payload.extend((0..200).flat_map(|_| mark.to_be_bytes()));
                    let gateway: Mac = "02:00:00:00:00:fe".parse().map_err(anyhow::Error::msg)?;
                    let own: Mac = from.info.mac.parse().map_err(anyhow::Error::msg)?;
                    let mut packet = Packet::udp(SocketAddr::new(from.ip(family)?, 41_000), at, &payload)
                        .macs(own, gateway);
                    packet.id = 0x77;
                    let sender = RawSender::open(&from.netns, &link(&from)?)?;
                    streams.push((sender, packet.fragments(400)));
                }
            }
        }
        let longest = streams.iter().map(|(_, f)| f.len()).max().unwrap_or(0);
        assert!(longest >= 4, "several fragments");
        // Fragment by fragment, all tenants and ports in turn. Ports 7000 and 7001 of one pair share the id as well, so they go one after the other.
        for port in 0..PORTS.len() {
            for at in 0..longest {
                for (sender, fragments) in streams.iter().skip(port).step_by(PORTS.len()) {
                    if let Some(fragment) = fragments.get(at) {
                        sender.send(fragment)?;
                    }
                }
            }
        }
        for (i, port, mark, receiver) in &receivers {
            if *port == PORTS[*i] {
                eventually(PATIENCE, || {
                    if receiver.count() > 0 {
                        Ok(())
                    } else {
                        Err(format!("{node}: no datagram at {port} of {}", TENANTS[*i].0))
                    }
                });
                assert!(
                    receiver.arrivals().iter().all(|f| f.mark == *mark),
                    "{node}: a datagram of the other tenant"
                );
            }
        }
        for (i, port, _, receiver) in &receivers {
            if *port != PORTS[*i] {
                assert_eq!(
                    receiver.count() as u64 + receiver.foreign(),
                    0,
                    "{node}: {} got a denied datagram",
                    TENANTS[*i].0
                );
            }
        }
    }
    Ok(())
}

#[test]
fn an_icmp_error_that_quotes_the_other_tenants_flow_dies() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab, &[0, 1]))?;
    for target in ["b", "c"] {
        // A flow of red that blue does not have: its port is closed there.
        let red = (lab.workload("red/a")?, lab.workload(&format!("red/{target}"))?);
        let blue = (lab.workload("blue/a")?, lab.workload(&format!("blue/{target}"))?);
        let to = SocketAddr::new(red.1.ip(4)?, PORTS[0]);
        let _echo = EchoServer::start(&red.1.netns, to)?;
        let from = SocketAddr::new(red.0.ip(4)?, 42_000);
        assert_eq!(Probe::udp(&red.0.netns, to).source(from).timeout(PATIENCE).run()?, Outcome::Connected);
        let quoted = Packet::udp(from, to, b"quoted").ip();
        let gateway: Mac = "02:00:00:00:00:fe".parse().map_err(anyhow::Error::msg)?;
        for (name, (a, other), passes) in [("red", &red, true), ("blue", &blue, false)] {
            let seen = capture(a)?;
            let own: Mac = other.info.mac.parse().map_err(anyhow::Error::msg)?;
            let error = icmp::error(other.ip(4)?, a.ip(4)?, 3, 3, 0, &quoted[..28]).macs(own, gateway);
            RawSender::open(&other.netns, &link(other)?)?.send(&error.frame())?;
            // A second packet that is allowed (an echo's answer would need a rule; a datagram to the open port does not) says when the first one has passed or died.
            let open = if name == "red" { PORTS[0] } else { PORTS[1] };
            let marker = Packet::udp(
                SocketAddr::new(other.ip(4)?, 42_001),
                SocketAddr::new(a.ip(4)?, open),
                b"after the error",
            )
            .macs(own, gateway);
            RawSender::open(&other.netns, &link(other)?)?.send(&marker.frame())?;
            eventually(PATIENCE, || {
                if seen.frames().iter().any(|f| f.contains(b"after the error")) {
                    Ok(())
                } else {
                    Err(format!("{name}: the marker did not arrive"))
                }
            });
            let arrived = seen
                .stop()?
                .iter()
                .filter_map(Frame::parsed)
                .any(|p| p.protocol == 1 && p.icmp == (3, 3) && p.source == other.info.ips[0]);
            assert_eq!(arrived, passes, "{name}, {target}");
        }
    }
    Ok(())
}

#[test]
fn a_workload_cannot_speak_vxlan_to_a_node() -> Result<()> {
    let lab = Lab::builder()
        .config("masquerade: {enabled: true}")
        .netfilter(flowloom_testkit::Netfilter::Open)
        .start()?;
    let mut document = document(&lab, &[0, 1]);
    for (kind, objects) in tenant("default", 7002).into_iter().filter(|(kind, _)| *kind != "vpcs") {
        document.add(kind, objects);
    }
    lab.apply(&document)?;
    let victim = lab.workload("blue/c")?;
    let vni = victim.info.vpc.number;
    let underlay = Capture::start(&lab.node(1).ns, &lab.node(1).uplink)?;
    let inside = capture(&victim)?;
    for attacker in ["red/a", "default/a"] {
        let attacker = lab.workload(attacker)?;
        let inner = Packet::udp(
            SocketAddr::new("10.1.0.10".parse::<IpAddr>()?, 9),
            SocketAddr::new(victim.ip(4)?, PORTS[1]),
            b"forged by a workload",
        );
        for node in [0, 1] {
            let from = SocketAddr::new(attacker.ip(4)?, 50_000);
            let outer = vxlan::encapsulate(
                from,
                SocketAddr::new(lab.node(node).ip4.into(), 4789),
                vni,
                &inner.frame(),
            );
            let own: Mac = attacker.info.mac.parse().map_err(anyhow::Error::msg)?;
            let outer = outer.macs(own, "02:00:00:00:00:fe".parse().map_err(anyhow::Error::msg)?);
            RawSender::open(&attacker.netns, &link(&attacker)?)?.send(&outer.frame())?;
        }
    }
    let drops = |reason: &str| -> Result<u64> {
        let drops = lab.agents[0].client().drops(&flowloom_api::v1::DropFilter::default())?;
        Ok(drops.drops.iter().filter(|d| d.reason.name == reason).map(|d| d.packets).sum())
    };
    eventually(PATIENCE, || match drops("TunnelFromWorkload") {
        Ok(n) if n >= 2 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(carries_text(&inside.stop()?, b"forged by a workload"), 0);
    assert_eq!(carries_text(&underlay.stop()?, b"forged by a workload"), 0, "it left the node");
    Ok(())
}

fn carries_text(frames: &[Frame], text: &[u8]) -> usize {
    frames.iter().filter(|f| f.contains(text)).count()
}

#[test]
fn a_vpc_deleted_and_made_again_under_load_touches_no_other() -> Result<()> {
    let lab = Lab::builder().start()?;
    let both = document(&lab, &[0, 1]);
    let red_only = document(&lab, &[0]);
    lab.apply(&both)?;
    let (red_a, red_b, red_c) = (lab.workload("red/a")?, lab.workload("red/b")?, lab.workload("red/c")?);
    let mut servers = Vec::new();
    let mut flows = Vec::new();
    for target in [&red_b, &red_c] {
        let at = SocketAddr::new(target.ip(4)?, PORTS[0]);
        servers.push(TcpServer::start(&target.netns, at, Mode::Echo)?);
        flows.push(TcpFlow::start(&red_a.netns, at, Duration::from_millis(1), PATIENCE)?);
    }
    let seen = [capture(&red_b)?, capture(&red_c)?];
    for round in 0..5 {
        let (a, c) = (lab.workload("blue/a")?, lab.workload("blue/c")?);
        let to = SocketAddr::new(c.ip(4)?, PORTS[1]);
        let receiver = UdpReceiver::start(&c.netns, to)?;
        let sender = UdpSender::start(&a.netns, None, to, Duration::from_micros(300), TENANTS[1].1, 100)?;
        eventually(PATIENCE, || {
            if receiver.count() > 20 { Ok(()) } else { Err(format!("round {round}: blue is silent")) }
        });
        lab.apply(&red_only)?;
        drop(sender);
        drop(receiver);
        drop((a, c));
        lab.apply(&both)?;
    }
    for flow in flows {
        let report = flow.stop();
        assert!(report.error.is_none() && report.round_trips > 0, "red was touched: {report:?}");
    }
    for capture in seen {
        assert_eq!(carries(&capture.stop()?, TENANTS[1].1), 0, "red saw blue");
    }
    Ok(())
}
