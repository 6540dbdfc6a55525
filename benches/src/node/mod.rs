//! `bench node`: what a node costs, against the kernel's own forwarding and the reference plugins.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;
use flowloom_testkit::{Netfilter, Topology, temp_dir};
use flowloom_tests_e2e::{Document, Lab, binary};
use serde_json::{Value, json};

use crate::cni::{Plugin, Times, reference};
use crate::peers;
use crate::report::Measure;
use crate::stats::{self, Median};
use crate::traffic::{Load, run};

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Interleaved rounds.
    pub rounds: usize,
    /// Length of one traffic run.
    pub run: Duration,
    /// Changes measured for latencies.
    pub changes: usize,
}

impl Effort {
    /// For the record.
    #[must_use]
    pub const fn full() -> Self {
        Self { rounds: 9, run: Duration::from_millis(1500), changes: 60 }
    }

    /// For `--verify`.
    #[must_use]
    pub const fn short() -> Self {
        Self { rounds: 5, run: Duration::from_millis(700), changes: 20 }
    }
}

/// One part of the benchmark.
type Part = fn(Effort) -> Result<Vec<Measure>>;

/// Everything.
///
/// # Errors
/// When something cannot be set up or traffic does not flow.
pub fn bench(effort: Effort) -> Result<Vec<Measure>> {
    let parts: [(&str, Part); 5] = [
        ("same node", same_node),
        ("across nodes", across_nodes),
        ("CNI", cni),
        ("changes", changes),
        ("footprint", footprint),
    ];
    let mut measures = Vec::new();
    for (name, part) in parts {
        let begin = Instant::now();
        let new = part(effort).with_context(|| name.to_owned())?;
        eprintln!("{name}: {:.0} s", begin.elapsed().as_secs_f32());
        for m in &new {
            eprintln!("  {}: {:.3} {} ratio {:?} {:?}", m.measure, m.ours, m.unit, m.ratio, m.peer);
        }
        measures.extend(new);
    }
    Ok(measures)
}

/// A group of `n` rules, the last of which allows the benchmark's port.
fn group(n: usize) -> Value {
    let mut rules: Vec<Value> = (1..n)
        .map(|i| {
            json!({"id": format!("r{i}"), "priority": i.min(16000), "direction": "ingress", "protocol": "tcp",
                   "remote_cidr": format!("172.{}.{}.0/24", 16 + (i / 256) % 16, i % 256), "ports": [{"from": 1 + i % 60000, "to": 1 + i % 60000}],
                   "action": if i % 2 == 0 { "allow" } else { "drop" }})
        })
        .collect();
    rules.push(json!({"id": "bench", "priority": 16384, "direction": "ingress", "protocol": "tcp", "remote_cidr": "10.1.0.0/16", "action": "allow"}));
    json!([{"vpc": "red", "name": "bench", "default_deny_egress": false, "rules": rules}])
}

fn document(lab: &Lab, second: &str, rules: usize) -> Document {
    let endpoint = |name: &str, node: &str, host: u8| json!({"vpc": "red", "name": name, "subnet": "app", "node": node, "ip": format!("10.1.0.{host}"), "security_groups": ["bench"], "labels": {"role": name}});
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([{"vpc": "red", "name": "app", "cidr": "10.1.0.0/16"}]))
        .with("endpoints", json!([endpoint("client", "n1", 10), endpoint("server", second, 20)]))
        .with("security_groups", group(rules))
}

/// Where every contender's server listens.
const PORT: u16 = 5201;

struct Contender<'a> {
    name: &'static str,
    client: &'a Netns,
    server: &'a Netns,
    address: SocketAddr,
}

impl<'a> Contender<'a> {
    fn new(name: &'static str, client: &'a Netns, server: &'a Netns, address: IpAddr) -> Self {
        Self { name, client, server, address: SocketAddr::new(address, PORT) }
    }
}

/// Rate and CPU per operation of every load, ours against each peer, interleaved.
fn traffic(label: &str, contenders: &[Contender<'_>], effort: Effort) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for (load, what) in [
        (Load::Stream, "TCP stream"),
        (Load::RequestResponse, "TCP request/response"),
        (Load::ConnectRequestClose, "TCP connect-request-close"),
    ] {
        let mut rates = vec![Vec::new(); contenders.len()];
        let mut costs = vec![Vec::new(); contenders.len()];
        for round in 0..=effort.rounds {
            for (i, c) in contenders.iter().enumerate() {
                let outcome = run(load, c.server, c.client, c.address, effort.run)
                    .with_context(|| format!("{what} over {}", c.name))?;
                // The first round warms caches and neighbour entries.
                if round > 0 {
                    rates[i].push(outcome.rate);
                    costs[i].push(outcome.cpu_ns);
                }
            }
        }
        let cpu_goal = if load == Load::ConnectRequestClose { 1.05 } else { 1.0 };
        for (i, peer) in contenders.iter().enumerate().skip(1) {
            measures.push(against(
                label,
                &format!("{what}, CPU per operation"),
                "ns",
                &costs[0],
                peer.name,
                &costs[i],
                Goal::AtMost(cpu_goal),
            ));
            measures.push(against(
                label,
                &format!("{what}, rate"),
                "1/s",
                &rates[0],
                peer.name,
                &rates[i],
                Goal::AtLeast(1.0),
            ));
        }
    }
    Ok(measures)
}

fn same_node(effort: Effort) -> Result<Vec<Measure>> {
    let lab = Lab::builder().nodes(1).start()?;
    lab.apply(&document(&lab, "n1", 100))?;
    let (client, server) = (lab.workload("red/client")?, lab.workload("red/server")?);
    let (routed, bridged) = (peers::routed()?, peers::bridged()?);
    let contenders = [
        Contender::new("flowloom", &client.netns, &server.netns, server.ip(4)?),
        Contender::new("kernel-routed veth, no policy", &routed.client, &routed.server, routed.address),
        Contender::new("bridge, no policy", &bridged.client, &bridged.server, bridged.address),
    ];
    traffic("same node, 100 rules", &contenders, effort)
}

fn across_nodes(effort: Effort) -> Result<Vec<Measure>> {
    let lab = Lab::builder().nodes(2).start()?;
    lab.apply(&document(&lab, "n2", 100))?;
    let (client, server) = (lab.workload("red/client")?, lab.workload("red/server")?);
    let vxlan = peers::vxlan()?;
    let contenders = [
        Contender::new("flowloom", &client.netns, &server.netns, server.ip(4)?),
        Contender::new("kernel VXLAN and bridge, no policy", &vxlan.client, &vxlan.server, vxlan.address),
    ];
    traffic("across nodes, 100 rules", &contenders, effort)
}

fn cni(effort: Effort) -> Result<Vec<Measure>> {
    let lab = Lab::builder().nodes(1).netfilter(Netfilter::Open).start()?;
    let doc = lab
        .empty_document()
        .with("subnets", json!([{"vpc": "default", "name": "pods", "cidr": "10.7.0.0/16", "node": "n1"}]))
        // As on any node that is in use: its workloads' policy is in force for others already.
        .with(
            "endpoints",
            json!([{"vpc": "default", "name": "other", "subnet": "pods", "node": "n1", "ip": "10.7.0.10"}]),
        );
    lab.apply(&doc)?;
    let agent = lab.agents.first().context("no agent")?;
    let config =
        json!({"cniVersion": "1.0.0", "name": "flowloom", "type": "flowloom-cni", "socket": agent.socket})
            .to_string();
    let hosts = Topology::builder().nodes(2).netfilter(Netfilter::Open).build()?;
    let data = [temp_dir("host-local")?, temp_dir("host-local")?];
    let plugins = [
        ("flowloom", Plugin { program: binary("flowloom-cni")?, config, node: &lab.node(0).ns }),
        (
            "bridge + host-local",
            Plugin {
                program: "/usr/lib/cni/bridge".into(),
                config: reference("bridge", data[0].path()),
                node: &hosts.nodes[0].ns,
            },
        ),
        (
            "ptp + host-local",
            Plugin {
                program: "/usr/lib/cni/ptp".into(),
                config: reference("ptp", data[1].path()),
                node: &hosts.nodes[1].ns,
            },
        ),
    ];
    let mut alone = vec![Times::default(); plugins.len()];
    let mut parallel = vec![Times::default(); plugins.len()];
    for round in 0..=effort.rounds {
        for (i, (_, plugin)) in plugins.iter().enumerate() {
            let (mut a, mut p) = (Times::default(), Times::default());
            plugin.alone(3, &mut a)?;
            plugin.parallel(16, &mut p)?;
            if round > 0 {
                alone[i].add.extend(a.add);
                alone[i].del.extend(a.del);
                parallel[i].add.extend(p.add);
                parallel[i].del.extend(p.del);
            }
        }
    }
    let mut measures = Vec::new();
    for (i, (name, _)) in plugins.iter().enumerate().skip(1) {
        for (what, ours, theirs, goal) in [
            ("ADD alone", &alone[0].add, &alone[i].add, 0.5),
            ("DEL alone", &alone[0].del, &alone[i].del, 0.9),
            ("ADD, 16 at once, each", &parallel[0].add, &parallel[i].add, 0.5),
            ("DEL, 16 at once, each", &parallel[0].del, &parallel[i].del, 0.7),
        ] {
            measures.push(against("CNI", what, "ms", ours, name, theirs, Goal::AtMost(goal)));
        }
    }
    Ok(measures)
}

/// `local` endpoints of this node, which share the group, and as many on nodes that exist in the document only as make `all`.
fn crowd(document: &mut Document, local: u32, all: u32) {
    let far: Value = (0..5)
        .map(|i| json!({"name": format!("far{i}"), "addresses": [format!("198.51.100.{}", 100 + i)]}))
        .collect();
    let endpoints: Value = (0..all)
        .map(|i| {
            let (node, groups) =
                if i < local { ("n1".to_owned(), json!(["bench"])) } else { (format!("far{}", i % 5), json!([])) };
            json!({"vpc": "red", "name": format!("e{i}"), "subnet": "app", "node": node, "security_groups": groups,
                   "ip": format!("10.1.{}.{}", 16 + i / 250, 1 + i % 250), "labels": {"role": format!("r{}", i % 50)}})
        })
        .collect();
    document.add("nodes", far);
    document.add("endpoints", endpoints);
}

/// From a document on disk to the agent's word that the datapath enforces it; the allocator's own run is not part of it.
fn changes(effort: Effort) -> Result<Vec<Measure>> {
    let lab = Lab::builder().nodes(1).start()?;
    let mut doc = document(&lab, "n1", 100);
    crowd(&mut doc, 100, 10_000);
    doc.rules("red", "bench")?
        .push(json!({"id": "by-label", "priority": 9000, "direction": "ingress", "protocol": "tcp",
        "remote_endpoint_selector": {"role": "r7"}, "ports": [{"from": 80, "to": 80}], "action": "allow"}));
    lab.apply(&doc)?;
    let client = lab.agents.first().context("no agent")?.client();
    let mut label = Vec::new();
    let mut rule = Vec::new();
    for i in 0..effort.changes {
        doc.endpoint("red", "e5000")?["labels"]["role"] = json!(if i % 2 == 0 { "r7" } else { "r1" });
        lab.apply(&doc)?;
        label.push(client.status()?.reconcile.last_duration_us as f64 / 1e3);
        if let Some(last) = doc.rules("red", "bench")?.last_mut() {
            last["ports"] = json!([{"from": 80, "to": 81 + i}]);
        }
        lab.apply(&doc)?;
        rule.push(client.status()?.reconcile.last_duration_us as f64 / 1e3);
    }
    Ok(vec![
        alone(
            "changes",
            "one label change until enforced, 10,000 endpoints of which 100 local, median",
            &label,
            "ms",
            Some(Goal::AtMost(5.0)),
        ),
        p99("changes", "one label change until enforced, p99", &label),
        alone(
            "changes",
            "one rule change until enforced, 100 endpoints share it, median",
            &rule,
            "ms",
            Some(Goal::AtMost(40.0)),
        ),
        p99("changes", "one rule change until enforced, p99", &rule),
    ])
}

/// Memory and idle work with 250 local endpoints and 10,000 peers.
fn footprint(_effort: Effort) -> Result<Vec<Measure>> {
    let mut lab = Lab::builder().nodes(1).start()?;
    let mut doc = document(&lab, "n1", 100);
    crowd(&mut doc, 250, 10_250);
    lab.apply(&doc)?;
    let agent = lab.agents.first_mut().context("no agent")?;
    let start = Instant::now();
    agent.restart()?;
    let adopt = start.elapsed().as_secs_f64() * 1e3;
    let pid = agent.process.as_ref().context("no process")?.pid();
    let memory = resident(pid)? / 1024.0 / 1024.0;
    let before = cpu_ms(pid)?;
    let quiet = Duration::from_secs(10);
    // Idle CPU is measured by waiting; nothing happens on purpose.
    #[expect(clippy::disallowed_methods, reason = "the measured thing is what happens while nothing does")]
    std::thread::sleep(quiet);
    let idle = cpu_ms(pid)? - before;
    Ok(vec![
        alone(
            "footprint",
            "agent memory, 250 local endpoints and 10,000 peers",
            &[memory],
            "MiB",
            Some(Goal::AtMost(40.0)),
        ),
        alone(
            "footprint",
            "restart until ready with everything adopted",
            &[adopt],
            "ms",
            Some(Goal::AtMost(1000.0)),
        ),
        alone("footprint", "CPU in 10 idle seconds", &[idle], "ms", Some(Goal::AtMost(10.0))),
    ])
}

fn resident(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(PathBuf::from(format!("/proc/{pid}/statm")))?;
    let pages: f64 = text.split_whitespace().nth(1).context("statm")?.parse()?;
    Ok(pages * 4096.0)
}

/// CPU time of all threads, milliseconds (schedstat counts nanoseconds).
fn cpu_ms(pid: u32) -> Result<f64> {
    let mut sum = 0.0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split_whitespace().next().context("schedstat")?.parse::<f64>()?;
    }
    Ok(sum / 1e6)
}

#[derive(Clone, Copy)]
enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn text(self) -> String {
        match self {
            Self::AtMost(v) => format!("at most {v}"),
            Self::AtLeast(v) => format!("at least {v}"),
        }
    }

    fn met(self, v: f64) -> bool {
        match self {
            Self::AtMost(limit) => v <= limit,
            Self::AtLeast(limit) => v >= limit,
        }
    }
}

fn against(
    bench: &str,
    measure: &str,
    unit: &str,
    ours: &[f64],
    peer: &str,
    theirs: &[f64],
    goal: Goal,
) -> Measure {
    let ratio = stats::ratio(ours, theirs);
    Measure {
        bench: format!("node: {bench}"),
        measure: measure.to_owned(),
        unit: unit.to_owned(),
        ours: stats::median(ours).map_or(0.0, |m| m.value),
        peer: Some(peer.to_owned()),
        peer_value: stats::median(theirs).map(|m| m.value),
        ratio: ratio.map(|r| r.value),
        interval: ratio.map(|r| [r.low, r.high]),
        goal: Some(format!("ratio {}", goal.text())),
        met: ratio.map(|r| goal.met(r.value)),
    }
}

fn alone(bench: &str, measure: &str, samples: &[f64], unit: &str, goal: Option<Goal>) -> Measure {
    let median = stats::median(samples).unwrap_or(Median { value: 0.0, low: 0.0, high: 0.0, samples: 0 });
    Measure {
        bench: format!("node: {bench}"),
        measure: measure.to_owned(),
        unit: unit.to_owned(),
        ours: median.value,
        peer: None,
        peer_value: None,
        ratio: None,
        interval: Some([median.low, median.high]),
        goal: goal.map(|g| format!("{} {unit}", g.text())),
        met: goal.map(|g| g.met(median.value)),
    }
}

fn p99(bench: &str, measure: &str, samples: &[f64]) -> Measure {
    let value = stats::percentile(samples, 99.0).unwrap_or(0.0);
    Measure { interval: None, ..alone(bench, measure, &[value], "ms", None) }
}
