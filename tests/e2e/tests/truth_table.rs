//! Every row of the truth table (rule order: tier, priority, deny first) by real packets: IPv4 and IPv6; TCP, UDP, SCTP and ICMP. Each row is a VPC of its own and
//! all of them use the same addresses; the peer sits on the other node, and once more on the same.

use std::net::SocketAddr;

use anyhow::Result;
use flowloom_testkit::{EchoServer, Mode, Outcome, Probe, Proto, SctpServer, TcpServer, probe_all};
use flowloom_tests_e2e::{Document, Lab, Workload};
use serde_json::{Value, json};

const PEER4: &str = "10.1.2.3";
const PEER6: &str = "fd00:1:2::3";
/// The truth table's ports and a few around them.
const PORTS: &[u16] = &[80, 442, 443, 444, 445];

/// What a packet meets.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Verdict {
    Allow,
    Drop,
}
use Verdict::{Allow, Drop};

/// One row: its groups, and the verdict for (protocol, port).
struct Row {
    name: &'static str,
    default_policy: &'static str,
    groups: Value,
    expected: fn(Proto, u16) -> Verdict,
}

fn rule(id: &str, priority: u16, action: &str, more: Value) -> Value {
    let mut rule = json!({"id": id, "priority": priority, "direction": "ingress", "action": action});
    for (key, value) in more.as_object().into_iter().flatten() {
        rule[key] = value.clone();
    }
    rule
}

/// The same rule for both families: `v4` and `v6` are CIDRs.
fn pair(id: &str, priority: u16, action: &str, v4: &str, v6: &str) -> Vec<Value> {
    vec![
        rule(&format!("{id}-4"), priority, action, json!({"remote_cidr": v4})),
        rule(&format!("{id}-6"), priority, action, json!({"remote_cidr": v6})),
    ]
}

fn rows() -> Vec<Row> {
    let group = |name: &str, tier: u8, rules: Vec<Value>| json!({"name": name, "tier": tier, "rules": rules});
    let ports = |protocol: &str, from: u16, to: u16| json!({"protocol": protocol, "ports": [{"from": from, "to": to}]});
    let each = |id: &str, priority: u16, action: &str, from: u16, to: u16| -> Vec<Value> {
        ["tcp", "udp", "sctp"]
            .iter()
            .map(|p| rule(&format!("{id}-{p}"), priority, action, ports(p, from, to)))
            .collect()
    };
    let any = |_: Proto, _: u16| Allow;
    let none = |_: Proto, _: u16| Drop;
    vec![
        Row {
            name: "priority-beats-specificity",
            default_policy: "allow",
            groups: json!([group(
                "g",
                1,
                [
                    pair("wide", 100, "allow", "10.0.0.0/8", "fd00::/16"),
                    pair("narrow", 200, "drop", "10.1.2.3/32", "fd00:1:2::3/128")
                ]
                .concat()
            )]),
            expected: any,
        },
        Row {
            name: "deny-first-at-equal-priority",
            default_policy: "allow",
            groups: json!([group(
                "g",
                1,
                [
                    pair("narrow", 100, "allow", "10.1.2.3/32", "fd00:1:2::3/128"),
                    pair("wide", 100, "drop", "10.0.0.0/8", "fd00::/16")
                ]
                .concat()
            )]),
            expected: none,
        },
        Row {
            name: "tier-beats-priority",
            default_policy: "allow",
            groups: json!([
                group("platform", 0, pair("all", 16384, "allow", "0.0.0.0/0", "::/0")),
                group("tenant", 1, pair("narrow", 1, "drop", "10.1.2.3/32", "fd00:1:2::3/128")),
            ]),
            expected: any,
        },
        Row {
            name: "a-hole-in-a-port-range",
            default_policy: "allow",
            groups: json!([group(
                "g",
                1,
                [each("hole", 100, "drop", 443, 443), each("range", 200, "allow", 80, 444)].concat()
            )]),
            expected: |proto, port| {
                if proto != Proto::Icmp && (80..=444).contains(&port) && port != 443 { Allow } else { Drop }
            },
        },
        Row {
            name: "a-protocol-out-of-any",
            default_policy: "allow",
            groups: json!([group(
                "g",
                1,
                vec![
                    rule("any", 100, "allow", json!({})),
                    rule("tcp", 50, "drop", json!({"protocol": "tcp"}))
                ]
            )]),
            expected: |proto, _| if proto == Proto::Tcp { Drop } else { Allow },
        },
        Row { name: "no-group-is-open", default_policy: "allow", groups: json!([]), expected: any },
        Row { name: "no-group-in-a-closed-vpc", default_policy: "deny", groups: json!([]), expected: none },
        Row {
            name: "a-group-without-a-rule-is-closed",
            default_policy: "allow",
            groups: json!([group("g", 1, vec![])]),
            expected: none,
        },
        Row {
            name: "isolation-switched-off",
            default_policy: "allow",
            groups: json!([{"name": "g", "default_deny_ingress": false, "rules": []}]),
            expected: any,
        },
        Row {
            name: "every-group-must-switch-it-off",
            default_policy: "allow",
            groups: json!([{"name": "g", "default_deny_ingress": false, "rules": []}, {"name": "h", "rules": []}]),
            expected: none,
        },
    ]
}

fn document(lab: &Lab, rows: &[Row]) -> Document {
    let mut document = lab.empty_document();
    for row in rows {
        let vpc = row.name;
        document.add("vpcs", json!({"name": vpc, "default_policy": row.default_policy}));
        document.add("subnets", json!({"vpc": vpc, "name": "app", "cidrs": ["10.1.0.0/16", "fd00:1::/32"]}));
        let names: Vec<&str> =
            row.groups.as_array().into_iter().flatten().filter_map(|g| g["name"].as_str()).collect();
        let endpoint = |name: &str, node: &str, ips: [&str; 2], groups: &[&str]| json!({"vpc": vpc, "name": name, "subnet": "app", "node": node, "ips": ips, "security_groups": groups});
        document.add(
            "endpoints",
            json!([
                endpoint("target", "n1", ["10.1.0.10", "fd00:1::10"], &names),
                endpoint("near", "n1", ["10.1.2.4", "fd00:1:2::4"], &[]),
                endpoint("peer", "n2", [PEER4, PEER6], &[]),
            ]),
        );
        for group in row.groups.as_array().into_iter().flatten() {
            let mut group = group.clone();
            group["vpc"] = json!(vpc);
            document.add("security_groups", group);
        }
    }
    document
}

/// Servers of one target; dropped when its row is done.
struct Servers {
    _tcp: Vec<TcpServer>,
    _udp: Vec<EchoServer>,
    _sctp: Vec<SctpServer>,
}

fn serve(target: &Workload) -> Result<Servers> {
    let mut servers = Servers { _tcp: Vec::new(), _udp: Vec::new(), _sctp: Vec::new() };
    for family in [4, 6] {
        for port in PORTS {
            let at = SocketAddr::new(target.ip(family)?, *port);
            servers._tcp.push(TcpServer::start(&target.netns, at, Mode::Echo)?);
            servers._udp.push(EchoServer::start(&target.netns, at)?);
            servers._sctp.push(SctpServer::start(&target.netns, at)?);
        }
    }
    Ok(servers)
}

#[test]
fn every_row_holds_for_both_families_and_every_protocol() -> Result<()> {
    let rows = rows();
    let lab = Lab::builder().start()?;
    lab.apply(&document(&lab, &rows))?;
    let mut faults = Vec::new();
    let mut packets = 0;
    for row in &rows {
        let target = lab.workload(&format!("{}/target", row.name))?;
        let peer = lab.workload(&format!("{}/peer", row.name))?;
        let _servers = serve(&target)?;
        let mut asked = Vec::new();
        let mut probes = Vec::new();
        for family in [4, 6] {
            for proto in [Proto::Tcp, Proto::Udp, Proto::Sctp, Proto::Icmp] {
                for port in if proto == Proto::Icmp { &[0][..] } else { PORTS } {
                    let expected =
                        if row.default_policy == "deny" { Drop } else { (row.expected)(proto, *port) };
                    let wanted = match expected {
                        Allow => Outcome::Connected,
                        Drop => Outcome::TimedOut,
                    };
                    let to = SocketAddr::new(target.ip(family)?, *port);
                    probes.push(Probe::new(proto, &peer.netns, to).wants(wanted));
                    asked.push((family, proto, *port, wanted));
                }
            }
        }
        for ((family, proto, port, wanted), outcome) in asked.into_iter().zip(probe_all(&probes)?) {
            if outcome != wanted {
                faults.push(format!(
                    "{}: IPv{family} {proto:?} {port}: {outcome:?}, expected {wanted:?}",
                    row.name
                ));
            }
            packets += 1;
        }
    }
    assert!(faults.is_empty(), "{} of {packets} wrong:\n{}", faults.len(), faults.join("\n"));
    println!("{} rows, {packets} probes, each as the table says", rows.len());
    Ok(())
}

#[test]
fn the_rule_for_an_address_does_not_reach_its_neighbour() -> Result<()> {
    // The sibling of a row: 10.1.2.4 is next to the peer and on the target's own node.
    let rows: Vec<Row> = rows()
        .into_iter()
        .filter(|r| r.name == "deny-first-at-equal-priority" || r.name == "tier-beats-priority")
        .collect();
    let lab = Lab::builder().nodes(1).start()?;
    let mut document = document(&lab, &rows);
    for row in &rows {
        document.remove("endpoints", row.name, "peer")?;
    }
    document.rules("deny-first-at-equal-priority", "g")?.push(rule(
        "neighbour",
        50,
        "allow",
        json!({"remote_cidr": "10.1.2.4/32"}),
    ));
    document.take_rule("tier-beats-priority/platform/all-6")?;
    lab.apply(&document)?;
    for (vpc, v4, v6) in [("deny-first-at-equal-priority", true, false), ("tier-beats-priority", true, false)]
    {
        let (target, near) = (lab.workload(&format!("{vpc}/target"))?, lab.workload(&format!("{vpc}/near"))?);
        let _servers = serve(&target)?;
        for (family, allowed) in [(4, v4), (6, v6)] {
            let wanted = if allowed { Outcome::Connected } else { Outcome::TimedOut };
            let outcome =
                Probe::tcp(&near.netns, SocketAddr::new(target.ip(family)?, 80)).wants(wanted).run()?;
            assert_eq!(outcome, wanted, "{vpc} IPv{family}");
        }
    }
    Ok(())
}
