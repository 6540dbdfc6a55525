//! Beyond the node's own workloads: outside through masquerade, the host itself, other nodes by routes and by tunnel, and the stack as forwarder.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_api::v1::DropFilter;
use flowloom_netlink::LinkName;
use flowloom_testkit::{
    Capture, EchoServer, Frame, Mode, Netfilter, Outcome, PATIENCE, Parsed, Probe, Proto, TcpServer,
    eventually, probe_all,
};
use flowloom_tests_e2e::{Document, Lab, Workload};
use nix::errno::Errno;
use serde_json::json;

/// Long enough for any answer on this machine, short enough to wait for none.
const SILENCE: Duration = Duration::from_millis(400);
const TUNNEL: u16 = 4789;

fn document(lab: &Lab) -> Document {
    let endpoint = |vpc: &str, name: &str, node: &str, host: u8, groups: &[&str], localhost: &str| {
        json!({"vpc": vpc, "name": name, "subnet": "app", "node": node, "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")],
               "security_groups": groups, "allow_localhost": localhost})
    };
    let subnet = |vpc: &str| json!({"vpc": vpc, "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]});
    let mut document = lab
        .empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([subnet("default"), subnet("red")]))
        .with(
            "endpoints",
            json!([
                endpoint("default", "a", "n1", 10, &[], "always"),
                endpoint("default", "closed", "n1", 20, &["closed"], "policy"),
                endpoint("default", "probed", "n1", 30, &["closed"], "always"),
                endpoint("red", "a", "n1", 10, &[], "always"),
                endpoint("red", "b", "n1", 20, &[], "always"),
            ]),
        )
        .with(
            "security_groups",
            json!([{"vpc": "default", "name": "closed", "default_deny_egress": false, "rules": []}]),
        );
    if lab.topology.nodes.len() > 1 {
        document.add("endpoints", endpoint("default", "far", "n2", 40, &[], "always"));
        document.add("endpoints", endpoint("default", "far-closed", "n2", 50, &["closed"], "policy"));
    }
    document
}

fn drops(lab: &Lab, vpc: &str, reasons: &[&str]) -> Result<u64> {
    let filter = DropFilter { vpc: Some(vpc.into()), ..DropFilter::default() };
    let list = lab.agents[0].client().drops(&filter)?.drops;
    Ok(list.iter().filter(|d| reasons.contains(&d.reason.name.as_str())).map(|d| d.packets).sum())
}

fn parsed(frames: &[Frame]) -> Vec<Parsed> {
    frames.iter().filter_map(Frame::parsed).collect()
}

/// TCP, UDP and echo.
fn every(from: &flowloom_netlink::Netns, to: SocketAddr, timeout: Duration) -> Result<Vec<(Proto, Outcome)>> {
    let protocols = [Proto::Tcp, Proto::Udp, Proto::Icmp];
    let outcomes = probe_all(&protocols.map(|p| Probe::new(p, from, to).timeout(timeout)))?;
    Ok(protocols.into_iter().zip(outcomes).collect())
}

#[test]
fn outside_is_reached_by_the_default_vpc_under_the_nodes_address_and_by_no_other() -> Result<()> {
    let lab = Lab::builder().nodes(1).external().config("masquerade: {enabled: true}").start()?;
    lab.apply(&document(&lab))?;
    // Only what is masqueraded may use the stack's forwarding; everything else meets `forward drop`.
    for net in ["10.1.0.0/24", "fd10:1::/64"] {
        lab.node(0).exempt_from_netfilter(net.parse()?)?;
    }
    let external = lab.topology.external.as_ref().context("no external host")?;
    let (a, red) = (lab.workload("default/a")?, lab.workload("red/a")?);
    let wire = Capture::start(&external.ns, &LinkName::new("eth0")?)?;
    let node = lab.node(0);
    for (family, outside, own) in
        [(4, IpAddr::from(external.ip4), IpAddr::from(node.ip4)), (6, external.ip6.into(), node.ip6.into())]
    {
        let to = SocketAddr::new(outside, 9000);
        let server = TcpServer::start(&external.ns, to, Mode::Echo)?;
        let echo = EchoServer::start(&external.ns, to)?;
        for (proto, outcome) in every(&a.netns, to, PATIENCE)? {
            assert_eq!(outcome, Outcome::Connected, "IPv{family} {proto:?}");
        }
        assert!(server.peers().iter().all(|p| p.ip() == own), "{:?} is not {own}", server.peers());
        let counts = || (server.accepted(), echo.received());
        eventually(PATIENCE, || if counts() == (1, 1) { Ok(()) } else { Err(counts()) });
        // Another VPC has no way out, whatever it asks for.
        let before = drops(&lab, "red", &["NoRoute", "ForeignVpcToHost"])?;
        for (proto, outcome) in every(&red.netns, to, SILENCE)? {
            assert_ne!(outcome, Outcome::Connected, "red got out: IPv{family} {proto:?}");
        }
        assert_eq!(counts(), (1, 1), "red got out, IPv{family}");
        let after = drops(&lab, "red", &["NoRoute", "ForeignVpcToHost"])?;
        assert!(after >= before + 3, "IPv{family}: {before} then {after} drops with a reason");
        // Nobody comes in that was not asked.
        let inside = SocketAddr::new(a.ip(family)?, 9001);
        let _inside = TcpServer::start(&a.netns, inside, Mode::Echo)?;
        let uninvited = Probe::tcp(&external.ns, inside).timeout(SILENCE).run()?;
        assert_ne!(uninvited, Outcome::Connected, "IPv{family}");
    }
    let seen = parsed(&wire.stop()?);
    assert!(
        seen.iter().any(|p| p.source == IpAddr::from(node.ip4))
            && seen.iter().any(|p| p.source == IpAddr::from(node.ip6))
    );
    let inner = |ip: &IpAddr| {
        ["10.1.0.0/24", "fd10:1::/64"].iter().any(|n| n.parse::<ipnet::IpNet>().is_ok_and(|n| n.contains(ip)))
    };
    let leaked: Vec<_> = seen.iter().filter(|p| inner(&p.source)).collect();
    assert!(leaked.is_empty(), "the workload's own address is outside: {leaked:?}");
    Ok(())
}

#[test]
fn another_vpc_reaches_neither_the_hosts_stack_nor_its_gateway_addresses() -> Result<()> {
    let lab = Lab::builder().nodes(1).netfilter(Netfilter::Open).start()?;
    lab.apply(&document(&lab))?;
    let (own, red, red_b) = (lab.workload("default/a")?, lab.workload("red/a")?, lab.workload("red/b")?);
    let node = lab.node(0);
    for (family, underlay) in [(4, IpAddr::from(node.ip4)), (6, IpAddr::from(node.ip6))] {
        let gateway =
            *own.info.gateways.iter().find(|g| g.is_ipv4() == (family == 4)).context("no gateway")?;
        let any: IpAddr = if family == 4 { "0.0.0.0".parse()? } else { "::".parse()? };
        let server = TcpServer::start(&node.ns, SocketAddr::new(any, 9100), Mode::Echo)?;
        let echo = EchoServer::start(&node.ns, SocketAddr::new(any, 9200))?;
        for (i, address) in [underlay, gateway].into_iter().enumerate() {
            // The default VPC does reach it: the server and the way are there.
            let reached = Probe::tcp(&own.netns, SocketAddr::new(address, 9100)).timeout(PATIENCE).run()?;
            assert_eq!(reached, Outcome::Connected, "default to {address}");
            let own = i as u64 + 1;
            eventually(PATIENCE, || if server.accepted() == own { Ok(()) } else { Err(server.accepted()) });
            // The gateway's own address is never handed to the stack; another address of the host is nowhere.
            let reasons: &[&str] = if address == gateway {
                &["UnknownDestination", "ForeignVpcToHost"]
            } else {
                &["NoRoute", "ForeignVpcToHost"]
            };
            let before = drops(&lab, "red", reasons)?;
            let probes = [
                Probe::tcp(&red.netns, SocketAddr::new(address, 9100)).timeout(SILENCE),
                Probe::udp(&red.netns, SocketAddr::new(address, 9200)).timeout(SILENCE),
            ];
            let outcomes = probe_all(&probes)?;
            assert!(!outcomes.contains(&Outcome::Connected), "red to {address}: {outcomes:?}");
            assert_eq!((server.accepted(), echo.received()), (own, 0), "red reached {address}");
            let after = drops(&lab, "red", reasons)?;
            assert!(
                after >= before + 2,
                "{address}: {before} then {after} drops for {reasons:?}: {:?}",
                lab.agents[0].client().drops(&DropFilter::default())?
            );
        }
        // The host does not reach the other VPC either: its addresses mean the default VPC's workloads to it.
        let inside = SocketAddr::new(red_b.ip(family)?, 9300);
        let red_server = TcpServer::start(&red_b.netns, inside, Mode::Echo)?;
        let outcome = Probe::tcp(&node.ns, inside).timeout(SILENCE).run()?;
        assert_ne!(outcome, Outcome::Connected, "the host reached red");
        assert_eq!(Probe::tcp(&red.netns, inside).timeout(PATIENCE).run()?, Outcome::Connected);
        eventually(PATIENCE, || if red_server.accepted() == 1 { Ok(()) } else { Err(red_server.accepted()) });
    }
    Ok(())
}

/// The host reaches local and remote endpoints, judged by policy only where that is asked for.
fn the_host_reaches(lab: &Lab) -> Result<()> {
    let host = &lab.node(0).ns;
    for family in [4, 6] {
        for (name, open) in
            [("a", true), ("probed", true), ("closed", false), ("far", true), ("far-closed", false)]
        {
            let workload = lab.workload(&format!("default/{name}"))?;
            let to = SocketAddr::new(workload.ip(family)?, 9400);
            let _server = TcpServer::start(&workload.netns, to, Mode::Echo)?;
            let _echo = EchoServer::start(&workload.netns, to)?;
            for (proto, outcome) in every(host, to, if open { PATIENCE } else { SILENCE })? {
                let right = match outcome {
                    Outcome::Connected => open,
                    // The kernel tells a sender on the host at once that its datagram was dropped on the way out.
                    Outcome::TimedOut | Outcome::Unreachable(Errno::ENOBUFS) => !open,
                    _ => false,
                };
                assert!(right, "host to {name}, IPv{family} {proto:?}: {outcome:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_host_reaches_local_and_remote_endpoints_by_tunnel() -> Result<()> {
    let lab = Lab::builder().netfilter(Netfilter::InvalidDrop).start()?;
    lab.apply(&document(&lab))?;
    the_host_reaches(&lab)
}

/// What the underlay carries between the nodes while `a` talks to `far` and is refused by `far-closed`.
fn between_nodes(lab: &Lab) -> Result<Vec<Parsed>> {
    let (a, far, closed) =
        (lab.workload("default/a")?, lab.workload("default/far")?, lab.workload("default/far-closed")?);
    let wire = Capture::start(&lab.node(1).ns, &lab.node(1).uplink)?;
    for family in [4, 6] {
        let (to, shut) = (SocketAddr::new(far.ip(family)?, 9500), SocketAddr::new(closed.ip(family)?, 9500));
        let _servers = [
            TcpServer::start(&far.netns, to, Mode::Echo)?,
            TcpServer::start(&closed.netns, shut, Mode::Echo)?,
        ];
        let _echoes = [EchoServer::start(&far.netns, to)?, EchoServer::start(&closed.netns, shut)?];
        for (proto, outcome) in every(&a.netns, to, PATIENCE)? {
            assert_eq!(outcome, Outcome::Connected, "IPv{family} {proto:?}");
        }
        for (proto, outcome) in every(&a.netns, shut, SILENCE)? {
            assert_eq!(outcome, Outcome::TimedOut, "IPv{family} {proto:?}");
        }
        // And back, as a connection of its own.
        let back = SocketAddr::new(a.ip(family)?, 9600);
        let _server = TcpServer::start(&a.netns, back, Mode::Echo)?;
        assert_eq!(
            Probe::tcp(&far.netns, back).timeout(PATIENCE).run()?,
            Outcome::Connected,
            "IPv{family} back"
        );
    }
    Ok(parsed(&wire.stop()?))
}

fn of_workloads(p: &Parsed, workloads: [&Workload; 2]) -> Result<bool> {
    let ips: Vec<IpAddr> = workloads.iter().flat_map(|w| w.info.ips.iter().copied()).collect();
    Ok(ips.contains(&p.source) && ips.contains(&p.destination))
}

#[test]
fn direct_routes_carry_the_default_vpc_without_a_tunnel() -> Result<()> {
    let lab = Lab::builder().config("routes: direct").start()?;
    lab.apply(&document(&lab))?;
    let seen = between_nodes(&lab)?;
    let pair = [&lab.workload("default/a")?, &lab.workload("default/far")?];
    for v4 in [true, false] {
        let plain = seen
            .iter()
            .filter(|p| p.source.is_ipv4() == v4 && of_workloads(p, pair).unwrap_or(false))
            .count();
        assert!(plain >= 10, "only {plain} packets travel as they are (IPv4: {v4})");
    }
    let tunnelled: Vec<_> = seen.iter().filter(|p| p.destination_port == TUNNEL).collect();
    assert!(tunnelled.is_empty(), "VXLAN on the wire: {tunnelled:?}");
    the_host_reaches(&lab)
}

#[test]
fn without_direct_routes_no_workload_address_is_on_the_wire() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab))?;
    let seen = between_nodes(&lab)?;
    let tunnelled = seen.iter().filter(|p| p.destination_port == TUNNEL).count();
    assert!(tunnelled >= 20, "only {tunnelled} packets in the tunnel");
    let workloads: Vec<IpAddr> = ["a", "far", "far-closed"]
        .iter()
        .filter_map(|n| lab.workload(&format!("default/{n}")).ok())
        .flat_map(|w| w.info.ips)
        .collect();
    let plain: Vec<_> =
        seen.iter().filter(|p| workloads.contains(&p.source) || workloads.contains(&p.destination)).collect();
    assert!(plain.is_empty(), "outside of the tunnel: {plain:?}");
    Ok(())
}

#[test]
fn with_the_stack_as_forwarder_the_host_sees_every_packet_and_policy_holds() -> Result<()> {
    let lab = Lab::builder().netfilter(Netfilter::Open).config("forwarding: stack").start()?;
    lab.apply(&document(&lab))?;
    let (a, closed, probed) =
        (lab.workload("default/a")?, lab.workload("default/closed")?, lab.workload("default/probed")?);
    // The host's own packet filter sees what it forwards: a counter of its own says so.
    let node = &lab.node(0).ns;
    for argv in [
        &["nft", "add", "table", "inet", "flcount"][..],
        &["nft", "add", "chain", "inet", "flcount", "forward", "{ type filter hook forward priority 0; }"],
        &["nft", "add", "rule", "inet", "flcount", "forward", "ip", "daddr", "10.1.0.10", "counter"],
    ] {
        node.exec_ok(argv)?;
    }
    for family in [4, 6] {
        let to = SocketAddr::new(a.ip(family)?, 9700);
        let _server = TcpServer::start(&a.netns, to, Mode::Echo)?;
        let _echo = EchoServer::start(&a.netns, to)?;
        for (proto, outcome) in every(&probed.netns, to, PATIENCE)? {
            assert_eq!(outcome, Outcome::Connected, "IPv{family} {proto:?}");
        }
        let shut = SocketAddr::new(closed.ip(family)?, 9700);
        let server = TcpServer::start(&closed.netns, shut, Mode::Echo)?;
        let echo = EchoServer::start(&closed.netns, shut)?;
        for (proto, outcome) in every(&a.netns, shut, SILENCE)? {
            assert_eq!(outcome, Outcome::TimedOut, "IPv{family} {proto:?}");
        }
        assert_eq!((server.accepted(), echo.received()), (0, 0), "IPv{family}");
    }
    let counted = node.exec_ok(&["nft", "list", "chain", "inet", "flcount", "forward"])?.stdout;
    assert!(!counted.contains("packets 0"), "the host forwarded nothing: {counted}");
    between_nodes(&lab)?;
    the_host_reaches(&lab)
}
