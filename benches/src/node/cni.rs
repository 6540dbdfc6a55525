//! What a container runtime waits for.

use anyhow::{Context, Result};
use flowloom_testkit::{Netfilter, Topology, temp_dir};
use flowloom_tests_e2e::{Lab, binary};
use serde_json::json;

use super::Effort;
use crate::cni::{Plugin, Times, reference};
use crate::measure::{Goal, against};
use crate::report::Measure;

/// ADD and DEL, against the reference plugins.
pub(super) fn cni(effort: Effort) -> Result<Vec<Measure>> {
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
            measures.push(against("node: CNI", what, "ms", ours, name, theirs, Some(Goal::AtMost(goal))));
        }
    }
    Ok(measures)
}
