//! The same traffic with many rules, peers and endpoints: against itself with one rule, and against nftables with an equivalent set.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use aya::maps::loaded_maps;
use flowloom_tests_e2e::{Lab, Workload};

use super::traffic::traffic;
use super::{Contender, Effort, crowd, document};
use crate::measure::{Goal, alone};
use crate::peers::{self, Filter};
use crate::report::Measure;
use crate::traffic::Load;

/// Rates of the machine drift by more than what is looked for here: CPU time tells.
const LOADS: [Load; 2] = [Load::RequestResponse, Load::ConnectRequestClose];

/// How long a document with everything may take: what is measured comes after it.
const PATIENCE: Duration = Duration::from_secs(300);

struct Node {
    // Before the lab that they live in.
    client: Workload,
    server: Workload,
    _lab: Lab,
}

impl Node {
    /// A node with two workloads under `rules` rules that knows `endpoints` more endpoints.
    fn new(rules: usize, endpoints: u32) -> Result<Self> {
        let lab = Lab::builder().nodes(1).start()?;
        let mut doc = document(&lab, "n1", rules);
        if endpoints > 0 {
            crowd(&mut doc, 0, endpoints);
        }
        lab.apply_within(&doc, PATIENCE)?;
        Ok(Self { client: lab.workload("red/client")?, server: lab.workload("red/server")?, _lab: lab })
    }

    fn contender<'a>(&'a self, name: &'static str) -> Result<Contender<'a>> {
        Ok(Contender::new(name, &self.client.netns, &self.server.netns, self.server.ip(4)?))
    }
}

/// End to end against itself with one rule.
pub(super) fn scale(effort: Effort) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    let one = Node::new(1, 0)?;
    let base = one.contender("1 rule")?;
    for (what, rules, endpoints) in [
        ("1,000 rules", 1000, 0),
        ("10,000 rules", 10_000, 0),
        ("10,000 peers", 1, 10_000),
        ("50,000 endpoints known", 1, 50_000),
    ] {
        let before = map_ids()?;
        let node = Node::new(rules, endpoints).with_context(|| what.to_owned())?;
        let bytes = memory_of(&before)?;
        let label = format!("node: same node, {what}");
        measures.push(alone(&label, "memory of all kernel maps", &[bytes / 1024.0 / 1024.0], "MiB", None));
        let contenders = [node.contender("flowloom")?, base];
        measures.extend(traffic(&label, &contenders, &LOADS, Some(Goal::AtMost(1.1)), None, effort)?);
    }
    Ok(measures)
}

/// Against a kernel-routed pair whose packets an nftables ruleset judges.
pub(super) fn nftables(effort: Effort) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for (what, rules) in [("100 rules", 100), ("1,000 rules", 1000), ("10,000 rules", 10_000)] {
        let node = Node::new(rules, 0).with_context(|| what.to_owned())?;
        let linear = peers::filtered(Filter::Linear, rules)?;
        let mapped = peers::filtered(Filter::Map, rules)?;
        let contenders = [
            node.contender("flowloom")?,
            Contender::new("nftables, a rule per rule", &linear.client, &linear.server, linear.address),
            Contender::new("nftables, a verdict map", &mapped.client, &mapped.server, mapped.address),
        ];
        let label = format!("node: same node against nftables, {what}");
        measures.extend(traffic(&label, &contenders, &LOADS, Some(Goal::AtMost(1.0)), None, effort)?);
    }
    Ok(measures)
}

fn map_ids() -> Result<BTreeSet<u32>> {
    loaded_maps().map(|info| Ok(info?.id())).collect()
}

/// Bytes that the kernel accounts to every map that was not there before.
fn memory_of(before: &BTreeSet<u32>) -> Result<f64> {
    let mut sum = 0.0;
    for info in loaded_maps() {
        let info = info?;
        if before.contains(&info.id()) {
            continue;
        }
        // Gone since it was listed.
        let Ok(fd) = info.fd() else { continue };
        sum += crate::measure::memlock(&fd)?;
    }
    Ok(sum)
}
