//! What the tools show is what happens, and looking changes nothing.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use flowloom_api::v1::{
    ConntrackFilter, DropFilter, EventFilter, EventKind, StreamItem, TraceRequest, Verdict,
};
use flowloom_testkit::{
    Cmd, EchoServer, Mode, Outcome, PATIENCE, Probe, Proto, TcpClient, TcpServer, UdpSender, eventually,
    probe_all,
};
use flowloom_tests_e2e::{Document, Lab};
use serde_json::{Value, json};

const OPEN: u16 = 7000;
const SHUT: u16 = 7001;
const REFUSED: u16 = 7002;

fn document(lab: &Lab) -> Document {
    let endpoint = |vpc: &str, name: &str, host: u8| json!({"vpc": vpc, "name": name, "subnet": "app", "node": "n1", "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")], "security_groups": ["g"]});
    let vpc = |vpc: &str| {
        json!({"vpc": vpc, "name": "g", "default_deny_egress": false, "rules": [
            {"id": "open", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": OPEN, "to": OPEN}], "action": "allow"},
            {"id": "shut", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": SHUT, "to": SHUT}], "action": "drop"},
            {"id": "refused", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": REFUSED, "to": REFUSED}], "action": "reject"}]})
    };
    let subnet = |vpc: &str| json!({"vpc": vpc, "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]});
    lab.empty_document()
        .with_two_tenants(subnet, endpoint)
        .with("security_groups", json!([vpc("red"), vpc("blue")]))
}

fn start() -> Result<Lab> {
    let lab = Lab::builder().nodes(1).config("conntrack: {sweep_seconds: 3600}").start()?;
    lab.apply(&document(&lab))?;
    Ok(lab)
}

fn trace(vpc: &str, from: &str, to: &str, protocol: &str, port: Option<u16>, family: u8) -> TraceRequest {
    TraceRequest {
        vpc: vpc.into(),
        from: from.into(),
        to: to.into(),
        protocol: protocol.into(),
        src_port: None,
        port,
        tcp_flags: None,
        family: Some(family),
        payload: None,
        direction: None,
    }
}

/// What every pinned map holds (and every inner one), as text; of the map whose order is that of use, the entries in an order of their own.
fn dump(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let version = lab.agents[0].client().status()?.abi_version;
    let read = |which: &[&str]| -> Result<Option<String>> {
        let argv: Vec<&str> = ["bpftool", "-j", "map", "dump"].iter().chain(which).copied().collect();
        let output = Cmd::new(&argv).run()?;
        // A ring buffer cannot be listed.
        Ok(output.status.success().then(|| output.stdout.trim().to_owned()))
    };
    let mut dumps = BTreeMap::new();
    for entry in std::fs::read_dir(lab.agents[0].pin_root.join(format!("v{version}")).join("maps"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = match read(&["pinned", &path.display().to_string()])? {
            None if name == "fl_events" => continue,
            None => bail!("{name} cannot be dumped"),
            Some(text) if name == "fl_ct_new" => {
                let mut entries: Vec<&str> = text.trim_matches(['[', ']']).split("},{").collect();
                entries.sort_unstable();
                entries.join("\n")
            }
            Some(text) => text,
        };
        if name == "fl_policy" {
            // The values of the map of maps are the numbers of the inner ones.
            for entry in serde_json::from_str::<Vec<Value>>(&text)? {
                let id = number(&entry["value"]).with_context(|| format!("no inner map in {entry}"))?;
                let inner = read(&["id", &id.to_string()])?.context("an inner map cannot be read")?;
                dumps.insert(format!("{name}/{id}"), inner);
            }
        }
        dumps.insert(name, text);
    }
    Ok(dumps)
}

/// `["0x34", "0xd6", "0x00", "0x00"]`: a number in this machine's order.
fn number(bytes: &Value) -> Option<u32> {
    let byte = |i: usize| u8::from_str_radix(bytes[i].as_str()?.strip_prefix("0x")?, 16).ok();
    Some(u32::from_ne_bytes([byte(0)?, byte(1)?, byte(2)?, byte(3)?]))
}

#[test]
fn a_thousand_traces_change_no_map_and_name_each_step() -> Result<()> {
    let lab = start()?;
    let (a, b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    // Something tracked, so that traces meet a connection too; nothing else may move.
    let at = SocketAddr::new(b.ip(4)?, OPEN);
    let _server = TcpServer::start(&b.netns, at, Mode::Echo)?;
    let source = SocketAddr::new(a.ip(4)?, 45_000);
    let mut open = TcpClient::connect_from(&a.netns, Some(source), at, PATIENCE)?;
    open.round_trip(b"hello", PATIENCE)?;
    for vpc in ["red", "blue"] {
        for name in ["a", "b"] {
            // Kernels of workloads speak by themselves (router solicitations, group reports): not now.
            let ns = lab.workload(&format!("{vpc}/{name}"))?.netns;
            for key in ["router_solicitations", "mldv2_unsolicited_report_interval"] {
                let value = if key.starts_with("mld") { "3600000" } else { "0" };
                Cmd::new(&["sysctl", "-qw", &format!("net.ipv6.conf.eth0.{key}={value}")])
                    .in_netns(&ns)?
                    .run()?
                    .success()?;
            }
        }
    }
    let client = lab.agents[0].client();
    let requests = [
        trace("red", "a", "b", "tcp", Some(OPEN), 4),
        TraceRequest {
            src_port: Some(45_000),
            tcp_flags: Some("A".into()),
            ..trace("red", "a", "b", "tcp", Some(OPEN), 4)
        },
        trace("red", "a", "b", "tcp", Some(SHUT), 4),
        trace("red", "a", "b", "tcp", Some(REFUSED), 6),
        trace("red", "a", "10.1.0.77", "udp", Some(53), 4),
        trace("blue", "a", "192.0.2.1", "icmp", None, 4),
        trace("blue", "a", "b", "sctp", Some(OPEN), 6),
        TraceRequest {
            direction: Some(flowloom_api::v1::Direction::Ingress),
            ..trace("red", "a", "b", "tcp", Some(SHUT), 6)
        },
    ];
    // Loads the tracer.
    for request in &requests {
        client.trace(request)?;
    }
    // Workloads may still say something of their own, so there are five tries. A trace that wrote would spoil every one.
    let mut written = Vec::new();
    let mut unchanged = false;
    for _ in 0..5 {
        let before = (dump(&lab)?, client.status()?.events.read);
        let filled = before.0.values().filter(|text| text.len() > 2).count();
        assert!(filled > 10, "too little to compare: {:?}", before.0.keys());
        for request in requests.iter().cycle().take(1000) {
            client.trace(request)?;
        }
        let after = (dump(&lab)?, client.status()?.events.read);
        unchanged = before == after;
        if unchanged {
            break;
        }
        written =
            before.0.iter().filter(|(k, v)| after.0.get(*k) != Some(v)).map(|(k, _)| k.clone()).collect();
    }
    assert!(unchanged, "traces wrote into {written:?}, or told events");
    // And a real packet does show: the comparison can see.
    let before = dump(&lab)?;
    assert_eq!(Probe::tcp(&a.netns, at).timeout(PATIENCE).run()?, Outcome::Connected);
    assert_ne!(dump(&lab)?, before, "the dump does not see a connection");

    let reports: Vec<_> = requests.iter().map(|r| client.trace(r)).collect::<Result<_, _>>()?;
    for (report, (outcome, verdict, reason)) in reports.iter().zip([
        ("delivered", Verdict::Allow, None),
        ("delivered", Verdict::Allow, None),
        ("dropped", Verdict::Drop, Some("PolicyIngress")),
        ("answered", Verdict::Reject, Some("PolicyIngress")),
        ("dropped", Verdict::Drop, Some("NoRoute")),
        ("dropped", Verdict::Drop, Some("NoRoute")),
        ("dropped", Verdict::Drop, Some("PolicyIngress")),
        // Asked for the receiver's side, in a VPC that has no stack: the sender's hook is the one that judges.
        ("dropped", Verdict::Drop, Some("PolicyIngress")),
    ]) {
        assert_eq!(
            (report.outcome.as_str(), report.verdict, report.reason.as_deref()),
            (outcome, verdict, reason),
            "{report:#?}"
        );
        assert!(
            report.steps.len() >= 2 && report.steps.iter().all(|s| !s.step.is_empty() && !s.text.is_empty()),
            "{report:#?}"
        );
    }
    let steps: Vec<&str> = reports[0].steps.iter().map(|s| s.step.as_str()).collect();
    for step in ["device", "source", "conntrack", "egress", "ingress", "deliver"] {
        assert!(steps.contains(&step), "no {step} step: {steps:?}");
    }
    let rule = reports[2]
        .steps
        .iter()
        .find_map(|s| s.rule.as_ref().filter(|_| s.step == "ingress"))
        .context("no rule named")?;
    assert_eq!(rule.name, "red/g/shut");
    // The known connection is found, not judged anew.
    assert!(!reports[1].steps.iter().any(|s| s.step == "ingress"), "{:#?}", reports[1].steps);
    let shown = lab.flowloom(0, &["trace", "red/a", "red/b", &format!("tcp/{SHUT}")])?;
    assert_eq!(shown.status.code(), Some(4), "{shown:?}");
    assert!(shown.stdout.contains("red/g/shut"), "{}", shown.stdout);
    Ok(())
}

/// A small generator of its own: the same seed, the same worlds.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[test]
fn trace_and_explain_say_what_the_packet_then_meets() -> Result<()> {
    let seed = std::env::var("FLOWLOOM_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed_0003);
    println!("FLOWLOOM_TEST_SEED={seed}");
    let mut random = Random(seed);
    let lab = Lab::builder().nodes(1).start()?;
    let names = ["a", "b", "c", "d"];
    let mut document = lab
        .empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([{"vpc": "red", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]}]));
    let actions = ["allow", "drop", "reject", "log", "allow"];
    for (i, name) in names.iter().enumerate() {
        let rules: Vec<Value> = (0..8)
            .map(|n| {
                let mut rule = json!({"id": format!("r{n}"), "priority": 1 + random.below(4), "direction": if random.below(3) == 0 { "egress" } else { "ingress" },
                    "action": actions[random.below(5) as usize]});
                match random.below(3) {
                    0 => rule["remote_endpoint_selector"] = json!({"name": names[random.below(4) as usize]}),
                    1 => rule["remote_cidr"] = json!(["10.1.0.0/28", "10.1.0.16/29", "fd10:1::/64", "fd10:1::20/124"][random.below(4) as usize]),
                    _ => {}
                }
                if random.below(3) > 0 {
                    rule["protocol"] = json!(["tcp", "udp"][random.below(2) as usize]);
                    let from = 7000 + random.below(4);
                    rule["ports"] = json!([{"from": from, "to": from + random.below(3)}]);
                }
                rule
            })
            .collect();
        document.add(
            "security_groups",
            json!({"vpc": "red", "name": name, "tier": i % 2, "default_deny_egress": false, "rules": rules}),
        );
        document.add("endpoints", json!({"vpc": "red", "name": name, "subnet": "app", "node": "n1", "labels": {"name": name},
            "ips": [format!("10.1.0.{}", 10 + i * 5), format!("fd10:1::{}", 10 + i * 5)], "security_groups": [name]}));
    }
    lab.apply(&document)?;
    let client = lab.agents[0].client();
    let workloads: Vec<_> = names.iter().map(|n| lab.workload(&format!("red/{n}"))).collect::<Result<_>>()?;
    let mut servers: Vec<TcpServer> = Vec::new();
    let mut echoes: Vec<EchoServer> = Vec::new();
    for w in &workloads {
        for family in [4, 6] {
            for port in 7000..7006 {
                servers.push(TcpServer::start(&w.netns, SocketAddr::new(w.ip(family)?, port), Mode::Echo)?);
                echoes.push(EchoServer::start(&w.netns, SocketAddr::new(w.ip(family)?, port))?);
            }
        }
    }
    let mut seen = BTreeMap::new();
    let mut cases = Vec::new();
    for case in 0..30 {
        let from = random.below(4) as usize;
        let to = (from + 1 + random.below(3) as usize) % 4;
        let (protocol, word) = if random.below(2) == 0 { (Proto::Tcp, "tcp") } else { (Proto::Udp, "udp") };
        cases.push((
            case,
            from,
            to,
            protocol,
            word,
            7000 + random.below(6) as u16,
            if random.below(2) == 0 { 4 } else { 6 },
        ));
    }
    // First what the tools say, all of it, then the packets.
    let mut said = Vec::new();
    for (_, from, to, _, word, port, family) in &cases {
        let explained = lab.explain(
            &format!("red/{}", names[*from]),
            &format!("red/{}", names[*to]),
            word,
            Some(*port),
            *family,
        )?;
        let traced = client.trace(&trace("red", names[*from], names[*to], word, Some(*port), *family))?;
        said.push((explained, traced));
    }
    let probes: Vec<Probe<'_>> = cases
        .iter()
        .map(|(_, from, to, protocol, _, port, family)| -> Result<Probe<'_>> {
            Ok(Probe::new(
                *protocol,
                &workloads[*from].netns,
                SocketAddr::new(workloads[*to].ip(*family)?, *port),
            )
            .timeout(Duration::from_secs(1)))
        })
        .collect::<Result<_>>()?;
    let outcomes = probe_all(&probes)?;
    for ((case, (explained, traced)), outcome) in cases.iter().zip(&said).zip(outcomes) {
        let measured = match outcome {
            Outcome::Connected => Verdict::Allow,
            Outcome::Refused | Outcome::Unreachable(_) => Verdict::Reject,
            Outcome::TimedOut => Verdict::Drop,
        };
        let kind = |v: Verdict| v.name().to_owned();
        *seen.entry(kind(measured)).or_insert(0) += 1;
        assert_eq!(explained.verdict, measured, "explain, {case:?}: {}", explained.summary);
        assert_eq!(traced.verdict, measured, "trace, {case:?}: {}", traced.summary);
    }
    println!("{seen:?}");
    assert!(seen.len() == 3, "the seed should give all three verdicts: {seen:?}");
    Ok(())
}

#[test]
fn observe_drops_connections_and_rule_hits_move_when_packets_do() -> Result<()> {
    let lab = start()?;
    let client = lab.agents[0].client();
    let hits = |rule: &str| -> Result<u64> {
        Ok(client.policy_rules(None)?.rules.iter().filter(|r| r.rule.name == rule).map(|r| r.hits).sum())
    };
    let drops = |vpc: &str| -> Result<u64> {
        let filter = DropFilter {
            vpc: Some(vpc.into()),
            endpoint: Some("b".into()),
            reason: Some("PolicyIngress".into()),
        };
        Ok(client.drops(&filter)?.drops.iter().map(|d| d.packets).sum())
    };
    let (a, b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    let to = |port: u16| -> Result<SocketAddr> { Ok(SocketAddr::new(b.ip(4)?, port)) };
    let _server = TcpServer::start(&b.netns, to(OPEN)?, Mode::Echo)?;
    let before = (hits("red/g/open")?, hits("red/g/shut")?, hits("red/g/refused")?, drops("red")?);
    assert_eq!(Probe::tcp(&a.netns, to(OPEN)?).timeout(PATIENCE).run()?, Outcome::Connected);
    assert_eq!(Probe::tcp(&a.netns, to(SHUT)?).timeout(Duration::from_millis(200)).run()?, Outcome::TimedOut);
    assert_eq!(Probe::tcp(&a.netns, to(REFUSED)?).timeout(PATIENCE).run()?, Outcome::Refused);
    let after = (hits("red/g/open")?, hits("red/g/shut")?, hits("red/g/refused")?, drops("red")?);
    assert!(
        after.0 == before.0 + 1 && after.1 > before.1 && after.2 > before.2 && after.3 >= before.3 + 2,
        "{before:?} {after:?}"
    );
    assert_eq!(
        (hits("blue/g/open")?, hits("blue/g/shut")?, drops("blue")?),
        (0, 0, 0),
        "the other tenant's counters"
    );

    // Events: with names, through each filter, none of another's.
    let observe = |args: &[&str]| -> Result<Vec<flowloom_api::v1::Event>> {
        let argv: Vec<&str> = ["-o", "json", "observe"].iter().chain(args).copied().collect();
        let shown = lab.flowloom(0, &argv)?.success()?.stdout;
        shown
            .lines()
            .map(|l| match serde_json::from_str(l).with_context(|| l.to_owned())? {
                StreamItem::Event(e) => Ok(*e),
                StreamItem::Lost { count } => bail!("lost {count}"),
            })
            .collect()
    };
    eventually(PATIENCE, || {
        let n = observe(&["--vpc", "red", "--reason", "PolicyIngress"]).map_err(|e| e.to_string())?.len();
        if n >= 2 { Ok(()) } else { Err(format!("{n} events")) }
    });
    let events = observe(&["--vpc", "red", "--endpoint", "red/b"])?;
    let about = |port: u16| {
        events
            .iter()
            .find(|e| e.dst_port == port && e.src == a.info.ips[0])
            .with_context(|| format!("no event of port {port}: {events:#?}"))
    };
    for (port, verdict, rule) in [
        (OPEN, Verdict::Allow, "red/g/open"),
        (SHUT, Verdict::Drop, "red/g/shut"),
        (REFUSED, Verdict::Reject, "red/g/refused"),
    ] {
        let all: Vec<_> = events.iter().filter(|e| e.dst_port == port).collect();
        assert!(
            all.iter().any(|e| e.rule.as_ref().is_some_and(|r| r.name == rule) && e.verdict == verdict),
            "{rule}: {all:#?}"
        );
        let e = about(port)?;
        assert_eq!((e.vpc.name.as_str(), e.protocol.as_str()), ("red", "tcp"));
        assert_eq!(e.src_endpoint.as_ref().map(|n| n.name.as_str()), Some("a"), "{e:?}");
        assert_eq!(e.dst_endpoint.as_ref().map(|n| n.name.as_str()), Some("b"), "{e:?}");
    }
    assert!(
        events.iter().any(|e| e.kind == EventKind::Drop)
            && events.iter().any(|e| e.kind == EventKind::Verdict)
    );
    let denied = observe(&["--vpc", "red", "--verdict", "drop"])?;
    assert!(!denied.is_empty() && denied.iter().all(|e| e.verdict == Verdict::Drop));
    let of_blue = observe(&["--vpc", "blue"])?;
    assert!(
        of_blue.iter().all(|e| e.vpc.name == "blue" && ![OPEN, SHUT, REFUSED].contains(&e.dst_port)),
        "{of_blue:#?}"
    );

    // Connections: listed by VPC, flushed by filter, and only those.
    let blue_b = lab.workload("blue/b")?;
    let blue_a = lab.workload("blue/a")?;
    let _blue = TcpServer::start(&blue_b.netns, to(OPEN)?, Mode::Echo)?;
    assert_eq!(Probe::tcp(&blue_a.netns, to(OPEN)?).timeout(PATIENCE).run()?, Outcome::Connected);
    let list = |vpc: &str| -> Result<usize> {
        let filter =
            ConntrackFilter { vpc: Some(vpc.into()), port: Some(OPEN), ..ConntrackFilter::default() };
        Ok(client.conntrack(&filter)?.connections.len())
    };
    assert_eq!((list("red")?, list("blue")?), (1, 1));
    let shown =
        lab.flowloom(0, &["ct", "list", "--vpc", "red", "--port", &OPEN.to_string()])?.success()?.stdout;
    assert!(shown.contains("10.1.0.10") && shown.contains("10.1.0.20"), "{shown}");
    lab.flowloom(0, &["ct", "flush", "--vpc", "red", "--port", &OPEN.to_string()])?.success()?;
    assert_eq!((list("red")?, list("blue")?), (0, 1));
    let shown = lab.flowloom(0, &["drops", "--endpoint", "red/b"])?.success()?.stdout;
    assert!(shown.contains("PolicyIngress"), "{shown}");
    let shown = lab.flowloom(0, &["policy", "rules", "--vpc", "red"])?.success()?.stdout;
    assert!(shown.contains("red/g/shut") && !shown.contains("blue/g"), "{shown}");
    Ok(())
}

#[test]
fn policy_wait_returns_when_the_change_is_in_force_and_not_before() -> Result<()> {
    let lab = start()?;
    let (a, b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    let to = SocketAddr::new(b.ip(4)?, SHUT);
    let _server = TcpServer::start(&b.netns, to, Mode::Echo)?;
    let mut current = document(&lab);
    for action in ["allow", "drop", "allow", "drop"] {
        let revision = lab.agents[0].client().endpoint("red", "b")?.revision;
        let rules = current.rules("red", "g")?;
        rules.iter_mut().filter(|r| r["id"] == "shut").for_each(|r| r["action"] = json!(action));
        lab.install(&current)?;
        lab.flowloom(
            0,
            &["policy", "wait", "red/b", "--revision", &(revision + 1).to_string(), "--timeout", "20s"],
        )?
        .success()?;
        let outcome = Probe::tcp(&a.netns, to)
            .timeout(Duration::from_millis(if action == "allow" { 5000 } else { 200 }))
            .run()?;
        assert_eq!(
            outcome,
            if action == "allow" { Outcome::Connected } else { Outcome::TimedOut },
            "{action}"
        );
    }
    // A revision that does not come ends the wait with a code of its own.
    let late =
        lab.flowloom(0, &["policy", "wait", "red/b", "--revision", "4000000", "--timeout", "200ms"])?;
    assert_eq!(late.status.code(), Some(5), "{late:?}");
    Ok(())
}

#[test]
fn a_client_that_does_not_read_its_stream_stalls_nobody() -> Result<()> {
    // No rate limit: more events than any buffer holds.
    let lab = Lab::builder().nodes(1).config("events: {rate: 0, history: 1024}").start()?;
    lab.apply(&document(&lab))?;
    let (a, b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    let client = lab.agents[0].client();
    let follow = EventFilter { follow: true, ..EventFilter::default() };
    let mut slow: Vec<_> = (0..4).map(|_| client.events(&follow)).collect::<Result<_, _>>()?;
    let mut quick = client.events(&EventFilter { reason: Some("PolicyIngress".into()), ..follow })?;
    quick.set_idle_timeout(Some(PATIENCE))?;
    // Denied datagrams: each is a drop and an event.
    let shut: IpAddr = b.ip(4)?;
    let senders: Vec<UdpSender> = (0..4)
        .map(|i| {
            UdpSender::start(
                &a.netns,
                None,
                SocketAddr::new(shut, 9000 + i),
                Duration::from_micros(100),
                1,
                16,
            )
        })
        .collect::<Result<_>>()?;
    let start = client.status()?.events.read;
    eventually(PATIENCE, || {
        let read = client.status().map_err(|e| e.to_string())?.events.read;
        if read > start + 20_000 { Ok(()) } else { Err(format!("{} events", read - start)) }
    });
    // Everybody else is served meanwhile, and quickly.
    for _ in 0..20 {
        let asked = Instant::now();
        client.health()?;
        client.endpoints()?;
        client.drops(&DropFilter::default())?;
        assert!(
            asked.elapsed() < Duration::from_secs(2),
            "a slow reader holds the others up: {:?}",
            asked.elapsed()
        );
    }
    let asked = Instant::now();
    let mut changed = document(&lab);
    changed.rules("red", "g")?.push(
        json!({"id": "more", "priority": 9, "direction": "ingress", "protocol": "tcp", "action": "drop"}),
    );
    lab.apply(&changed)?;
    assert!(asked.elapsed() < Duration::from_secs(10), "a change took {:?}", asked.elapsed());
    let mut got = 0;
    for item in quick.by_ref().take(500) {
        if let StreamItem::Event(e) = item? {
            assert_eq!(e.reason.as_deref(), Some("PolicyIngress"));
            got += 1;
        }
    }
    assert!(got > 0, "the reader that reads got nothing");
    drop(senders);
    // The slow ones learn that they lost some.
    for stream in &mut slow {
        stream.set_idle_timeout(Some(Duration::from_secs(3)))?;
        let mut lost = 0;
        for item in stream {
            match item {
                Ok(StreamItem::Lost { count }) => {
                    lost += count;
                    break;
                }
                Ok(StreamItem::Event(_)) => {}
                Err(e) => bail!("the stream ended before it said what was lost: {e}"),
            }
        }
        assert!(lost > 0, "a stream that nobody read lost nothing");
    }
    Ok(())
}
