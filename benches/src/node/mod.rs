//! `bench node`: what a node costs, against the kernel's own forwarding and the reference plugins.

mod changes;
mod cni;
mod programs;
mod scale;
mod traffic;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;
use flowloom_tests_e2e::{Document, Lab};
use serde_json::{Value, json};

use crate::parts::chosen;
use crate::report::Measure;

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
        Self { rounds: 11, run: Duration::from_millis(600), changes: 60 }
    }

    /// For `--verify`.
    #[must_use]
    pub const fn short() -> Self {
        Self { rounds: 7, run: Duration::from_millis(400), changes: 20 }
    }
}

/// One part of the benchmark.
type Part = fn(Effort) -> Result<Vec<Measure>>;

const PARTS: [(&str, Part); 8] = [
    ("same-node", traffic::same_node),
    ("across-nodes", traffic::across_nodes),
    ("programs", programs::programs),
    ("scale", scale::scale),
    ("nftables", scale::nftables),
    ("cni", cni::cni),
    ("changes", changes::changes),
    ("footprint", changes::footprint),
];

/// Everything, or the parts that are named.
///
/// # Errors
/// When there is no such part, something cannot be set up or traffic does not flow.
pub fn bench(effort: Effort, only: &[String]) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for (name, part) in chosen(&PARTS, only)? {
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

#[derive(Clone, Copy)]
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

/// `local` endpoints of this node, which share the group, and as many on nodes that exist in the document only as make `all`.
fn crowd(document: &mut Document, local: u32, all: u32) {
    // No node has more than 4,095 endpoints.
    let nodes = all.div_ceil(4000).max(5);
    let far: Value = (0..nodes)
        .map(|i| json!({"name": format!("far{i}"), "addresses": [format!("198.51.100.{}", 100 + i)]}))
        .collect();
    let endpoints: Value = (0..all)
        .map(|i| {
            let (node, groups) =
                if i < local { ("n1".to_owned(), json!(["bench"])) } else { (format!("far{}", i % nodes), json!([])) };
            json!({"vpc": "red", "name": format!("e{i}"), "subnet": "app", "node": node, "security_groups": groups,
                   "ip": format!("10.1.{}.{}", 16 + i / 250, 1 + i % 250), "labels": {"role": format!("r{}", i % 50)}})
        })
        .collect();
    document.add("nodes", far);
    document.add("endpoints", endpoints);
}
