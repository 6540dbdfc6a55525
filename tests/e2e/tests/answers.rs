//! A rejected client is told so at once, whatever way the packet took; path MTU and TTL errors arrive.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::LinkName;
use flowloom_testkit::{
    Capture, EchoServer, Frame, Mode, Netfilter, Outcome, PATIENCE, Packet, Probe, Proto, RawSender,
    TcpClient, TcpServer, eventually,
};
use flowloom_tests_e2e::{Document, Lab};
use nix::errno::Errno;
use serde_json::json;

fn document(lab: &Lab) -> Document {
    let endpoint = |name: &str, node: &str, ips: [&str; 2], groups: &[&str], localhost: &str| {
        json!({"vpc": "default", "name": name, "subnet": if ips[0].starts_with("10.1.1") { "other" } else { "app" }, "node": node, "ips": ips,
               "security_groups": groups, "allow_localhost": localhost})
    };
    lab.empty_document()
        .with("subnets", json!([
            {"vpc": "default", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]},
            {"vpc": "default", "name": "other", "cidrs": ["10.1.1.0/24", "fd10:1:1::/64"]},
        ]))
        .with("endpoints", json!([
            endpoint("a", "n1", ["10.1.0.10", "fd10:1::10"], &["a"], "always"),
            endpoint("b", "n1", ["10.1.0.20", "fd10:1::20"], &["b"], "policy"),
            endpoint("c", "n2", ["10.1.0.30", "fd10:1::30"], &["b"], "policy"),
            endpoint("d", "n1", ["10.1.1.40", "fd10:1:1::40"], &[], "always"),
            endpoint("e", "n2", ["10.1.1.50", "fd10:1:1::50"], &[], "always"),
        ]))
        .with("security_groups", json!([
            {"vpc": "default", "name": "a", "default_deny_ingress": false, "default_deny_egress": false, "rules": [
                {"id": "no-world", "priority": 1, "direction": "egress", "remote_entities": ["world"], "action": "reject"}]},
            {"vpc": "default", "name": "b", "default_deny_egress": false, "rules": [
                {"id": "no", "priority": 1, "direction": "ingress", "action": "reject"}]},
        ]))
}

#[test]
fn a_rejected_client_is_told_within_a_second_on_every_way() -> Result<()> {
    let lab =
        Lab::builder().external().config("masquerade: {enabled: true}").netfilter(Netfilter::Open).start()?;
    lab.apply(&document(&lab))?;
    let (a, b, c) = (lab.workload("default/a")?, lab.workload("default/b")?, lab.workload("default/c")?);
    let external = lab.topology.external.as_ref().context("no external host")?;
    let mut faults = Vec::new();
    for (family, outside) in [(4, external.ip4.into()), (6, external.ip6.into())] {
        for proto in [Proto::Tcp, Proto::Udp] {
            for (way, from, to) in [
                ("local", &a.netns, b.ip(family)?),
                ("vxlan", &a.netns, c.ip(family)?),
                ("host", &*lab.node(0).ns, b.ip(family)?),
                ("host to the other node", &*lab.node(0).ns, c.ip(family)?),
                ("off-node", &a.netns, outside),
            ] {
                let start = Instant::now();
                let outcome = Probe::new(proto, from, SocketAddr::new(to, 9000))
                    .timeout(Duration::from_secs(2))
                    .run()?;
                let told = match outcome {
                    Outcome::Refused => true,
                    // Administratively prohibited is EHOSTUNREACH for IPv4 and EACCES for IPv6 (Linux icmp.c, icmpv6.c).
                    Outcome::Unreachable(Errno::EHOSTUNREACH) => proto == Proto::Udp,
                    Outcome::Unreachable(Errno::EACCES) => family == 6 && proto == Proto::Udp,
                    _ => false,
                };
                if !told || start.elapsed() > Duration::from_secs(1) {
                    faults.push(format!(
                        "{way} {proto:?} IPv{family}: {outcome:?} after {:?}",
                        start.elapsed()
                    ));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

#[test]
fn an_expired_packet_is_answered_when_routed_and_not_touched_when_switched() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab))?;
    let a = lab.workload("default/a")?;
    let link = LinkName::new(a.info.interface.clone().context("no interface")?)?;
    let mac = a.info.mac.parse().map_err(anyhow::Error::msg)?;
    let gateway = "02:00:00:00:00:fe".parse().map_err(anyhow::Error::msg)?;
    for family in [4, 6] {
        for target in ["default/d", "default/e"] {
            let to = lab.workload(target)?;
            let seen = Capture::start(&a.netns, &link)?;
            let packet = Packet::udp(
                SocketAddr::new(a.ip(family)?, 30_000),
                SocketAddr::new(to.ip(family)?, 33_434),
                b"traceroute",
            )
            .macs(mac, gateway)
            .ttl(1);
            RawSender::open(&a.netns, &link)?.send(&packet.frame())?;
            let expected = if family == 4 { (11, 0) } else { (3, 0) };
            eventually(PATIENCE, || {
                let found = seen
                    .frames()
                    .iter()
                    .filter_map(Frame::parsed)
                    .find(|p| p.icmp == expected && p.payload.len() >= 28);
                let error = found.ok_or(format!("no time exceeded for {target} IPv{family}"))?;
                // The tool that waits for it checks both checksums, and so does the kernel before it hands it on.
                if error.ip_checksum_ok && error.transport_checksum_ok == Some(true) {
                    Ok(())
                } else {
                    Err(format!("{error:?}"))
                }
            });
        }
        // Inside one subnet traffic is switched: TTL 1 is enough.
        let d = lab.workload("default/d")?;
        let e = lab.workload("default/e")?;
        let echo = EchoServer::start(&e.netns, SocketAddr::new(e.ip(family)?, 33_000))?;
        let link = LinkName::new(d.info.interface.clone().context("no interface")?)?;
        let mac = d.info.mac.parse().map_err(anyhow::Error::msg)?;
        let packet = Packet::udp(SocketAddr::new(d.ip(family)?, 30_001), echo.addr(), b"switched")
            .macs(mac, gateway)
            .ttl(1);
        RawSender::open(&d.netns, &link)?.send(&packet.frame())?;
        eventually(PATIENCE, || if echo.received() == 1 { Ok(()) } else { Err("not delivered") });
    }
    Ok(())
}

#[test]
fn a_packet_too_large_for_the_tunnel_is_answered_and_tcp_learns_from_it() -> Result<()> {
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab))?;
    let (d, e) = (lab.workload("default/d")?, lab.workload("default/e")?);
    // The workload believes in a larger MTU than the path has.
    let inside = d.info.interface.clone().context("no interface")?;
    let outside = d.info.device.as_ref().context("no device")?.name.clone();
    for (ns, link) in [(&d.netns, &inside), (&*lab.node(0).ns, &outside)] {
        flowloom_testkit::Cmd::new(&["ip", "link", "set", link, "mtu", "3000"])
            .in_netns(ns)?
            .run()?
            .success()?;
    }
    for family in [4, 6] {
        let at = SocketAddr::new(e.ip(family)?, 7000);
        let _server = TcpServer::start(&e.netns, at, Mode::Echo)?;
        let seen = Capture::start(&d.netns, &LinkName::new(inside.clone())?)?;
        let mut packet = Packet::udp(
            SocketAddr::new(d.ip(family)?, 30_000),
            SocketAddr::new(e.ip(family)?, 7001),
            &[7; 2000],
        )
        .macs(
            d.info.mac.parse().map_err(anyhow::Error::msg)?,
            "02:00:00:00:00:fe".parse().map_err(anyhow::Error::msg)?,
        );
        packet.dont_fragment = true;
        RawSender::open(&d.netns, &LinkName::new(inside.clone())?)?.send(&packet.frame())?;
        let expected = if family == 4 { (3, 4) } else { (2, 0) };
        eventually(PATIENCE, || {
            let error = seen
                .frames()
                .iter()
                .filter_map(Frame::parsed)
                .find(|p| p.icmp == expected)
                .ok_or(format!("no answer, IPv{family}"))?;
            let [_, _, high, low] = error.icmp_rest;
            let mtu = u16::from_be_bytes([high, low]);
            if (1280..=1450).contains(&mtu) { Ok(()) } else { Err(format!("MTU {mtu}")) }
        });
        let mut client = TcpClient::connect(&d.netns, at, PATIENCE)?;
        for _ in 0..5 {
            client.round_trip(&[9; 100_000], PATIENCE).with_context(|| format!("IPv{family}"))?;
        }
    }
    Ok(())
}
