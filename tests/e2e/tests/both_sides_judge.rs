//! One side's decision never stands in for the other's, and a revoked flow stops in both directions.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use flowloom_testkit::{
    Mode, Outcome, PATIENCE, Probe, TcpServer, UdpReceiver, UdpSender, eventually, probe_all,
};
use flowloom_tests_e2e::{Document, Lab};
use serde_json::json;

fn two(lab: &Lab, second: &str) -> Document {
    lab.empty_document()
        .with("subnets", json!([{"vpc": "default", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]}]))
        .with("endpoints", json!([
            {"vpc": "default", "name": "a", "subnet": "app", "node": "n1", "ips": ["10.1.0.10", "fd10:1::10"], "security_groups": ["a"], "labels": {"role": "a"}},
            {"vpc": "default", "name": "b", "subnet": "app", "node": second, "ips": ["10.1.0.20", "fd10:1::20"], "security_groups": ["b"], "labels": {"role": "b"}},
        ]))
}

/// A may send to B; B lets nobody in: no byte reaches B, on the first try or the hundredth.
fn a_allowed_egress_is_not_an_allowed_ingress(forwarding: &str) -> Result<()> {
    let lab = Lab::builder()
        .nodes(1)
        .netfilter(if forwarding == "stack" {
            flowloom_testkit::Netfilter::Open
        } else {
            flowloom_testkit::Netfilter::ForwardDrop
        })
        .config(&format!("forwarding: {forwarding}"))
        .start()?;
    let document = two(&lab, "n1").with("security_groups", json!([
        {"vpc": "default", "name": "a", "rules": [{"id": "out", "priority": 1, "direction": "egress", "action": "allow"}]},
        {"vpc": "default", "name": "b", "default_deny_egress": false, "rules": [{"id": "in", "priority": 1, "direction": "ingress", "action": "drop"}]},
    ]));
    lab.apply(&document)?;
    let (a, b) = (lab.workload("default/a")?, lab.workload("default/b")?);
    for family in [4, 6] {
        let to = SocketAddr::new(b.ip(family)?, 7000);
        let server = TcpServer::start(&b.netns, to, Mode::Echo)?;
        let datagrams = UdpReceiver::start(&b.netns, to)?;
        let probes: Vec<_> = (0..100)
            .flat_map(|_| [Probe::tcp(&a.netns, to), Probe::udp(&a.netns, to)])
            .map(|p| p.timeout(Duration::from_millis(300)))
            .collect();
        let outcomes = probe_all(&probes)?;
        assert!(outcomes.iter().all(|o| *o == Outcome::TimedOut), "IPv{family}: {outcomes:?}");
        assert_eq!(server.accepted(), 0, "IPv{family}");
        assert_eq!(datagrams.count(), 0, "IPv{family}");
        assert_eq!(datagrams.foreign(), 0, "IPv{family}");
    }
    // It is the rule that blocks, not the wiring.
    let mut open = document.clone();
    open.rules("default", "b")?[0]["action"] = json!("allow");
    lab.apply(&open)?;
    for family in [4, 6] {
        let to = SocketAddr::new(b.ip(family)?, 7000);
        let _server = TcpServer::start(&b.netns, to, Mode::Echo)?;
        assert_eq!(Probe::tcp(&a.netns, to).timeout(PATIENCE).run()?, Outcome::Connected, "IPv{family}");
    }
    Ok(())
}

#[test]
fn a_allowed_egress_is_not_an_allowed_ingress_ebpf() -> Result<()> {
    a_allowed_egress_is_not_an_allowed_ingress("ebpf")
}

#[test]
fn a_allowed_egress_is_not_an_allowed_ingress_stack() -> Result<()> {
    a_allowed_egress_is_not_an_allowed_ingress("stack")
}

/// A server streams to a client that never answers; the flow is revoked at the receiver and by a label of the sender.
#[test]
fn a_one_way_stream_stops_when_its_rule_or_label_goes() -> Result<()> {
    for second in ["n1", "n2"] {
        let lab = Lab::builder().start()?;
        let allowed = two(&lab, second).with("security_groups", json!([
            {"vpc": "default", "name": "a", "default_deny_ingress": false, "default_deny_egress": false, "rules": []},
            {"vpc": "default", "name": "b", "default_deny_egress": false, "rules": [
                {"id": "stream", "priority": 10, "direction": "ingress", "protocol": "udp", "remote_endpoint_selector": {"role": "a"}, "action": "allow"}]},
        ]));
        let mut by_rule = allowed.clone();
        by_rule.take_rule("default/b/stream")?;
        let mut by_label = allowed.clone();
        by_label.endpoint("default", "a")?["labels"] = json!({"role": "other"});
        for revoked in [&by_rule, &by_label] {
            lab.apply(&allowed)?;
            let (a, b) = (lab.workload("default/a")?, lab.workload("default/b")?);
            let to = SocketAddr::new(b.ip(4)?, 7100);
            let receiver = UdpReceiver::start(&b.netns, to)?;
            let interval = Duration::from_micros(500);
            let sender = UdpSender::start(&a.netns, None, to, interval, 1, 64)?;
            eventually(PATIENCE, || if receiver.count() > 50 { Ok(()) } else { Err(receiver.count()) });
            lab.apply(revoked)?;
            // Numbers from here on are sent after the change was said to be in force.
            let border = sender.sent() + 1;
            eventually(PATIENCE, || if sender.sent() > border + 500 { Ok(()) } else { Err(sender.sent()) });
            drop(sender);
            let late: Vec<_> = receiver
                .arrivals()
                .iter()
                .filter(|f| f.mark == 1 && f.number >= border)
                .map(|f| f.number)
                .collect();
            assert!(
                late.is_empty(),
                "{} datagrams passed after the change was in force ({second}): {late:?}",
                late.len()
            );
            lab.apply(&allowed)?;
            let again = UdpSender::start(&a.netns, None, to, interval, 2, 64)?;
            eventually(PATIENCE, || {
                if receiver.arrivals().iter().any(|f| f.mark == 2) {
                    Ok(())
                } else {
                    Err("nothing passes again")
                }
            });
            drop(again);
        }
    }
    Ok(())
}
