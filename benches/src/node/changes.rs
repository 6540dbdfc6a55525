//! How long changes take to be in force, and what an agent costs that does nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_testkit::{PATIENCE, eventually};
use flowloom_tests_e2e::Lab;
use serde_json::json;

use super::{Effort, crowd, document};
use crate::measure::{Goal, alone, p99, resident};
use crate::report::Measure;

/// From the notice that the document on disk changed, reading it included, until the datapath enforces it; the allocator's own run is no part.
pub(super) fn changes(effort: Effort) -> Result<Vec<Measure>> {
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
        label.push(client.status()?.document.applied_us as f64 / 1e3);
        if let Some(last) = doc.rules("red", "bench")?.last_mut() {
            last["ports"] = json!([{"from": 80, "to": 81 + i}]);
        }
        lab.apply(&doc)?;
        rule.push(client.status()?.document.applied_us as f64 / 1e3);
    }
    Ok(vec![
        alone(
            "node: changes",
            "one label change until enforced, 10,000 endpoints of which 100 local, median",
            &label,
            "ms",
            Some(Goal::AtMost(5.0)),
        ),
        p99("node: changes", "one label change until enforced, p99", &label),
        alone(
            "node: changes",
            "one rule change until enforced, 100 endpoints share it, median",
            &rule,
            "ms",
            Some(Goal::AtMost(40.0)),
        ),
        p99("node: changes", "one rule change until enforced, p99", &rule),
    ])
}

/// Memory and idle work with 250 local endpoints and 10,000 peers.
pub(super) fn footprint(_effort: Effort) -> Result<Vec<Measure>> {
    let mut lab = Lab::builder().nodes(1).start()?;
    let mut doc = document(&lab, "n1", 100);
    crowd(&mut doc, 250, 10_250);
    lab.apply(&doc)?;
    let agent = lab.agents.first_mut().context("no agent")?;
    let start = Instant::now();
    agent.restart()?;
    let adopt = start.elapsed().as_secs_f64() * 1e3;
    let pid = agent.process.as_ref().context("no process")?.pid();
    let client = agent.client();
    eventually(PATIENCE, || match client.status() {
        Ok(status) if status.reconcile.quiet_work == 0 => Ok(()),
        other => Err(format!("it tidies up behind its start: {other:?}")),
    });
    let before = cpu_ms(pid)?;
    let quiet = Duration::from_secs(10);
    // Idle CPU is measured by waiting; nothing happens on purpose.
    #[expect(clippy::disallowed_methods, reason = "the measured thing is what happens while nothing does")]
    std::thread::sleep(quiet);
    let idle = cpu_ms(pid)? - before;
    let memory = resident(pid, "VmRSS:")?;
    Ok(vec![
        alone(
            "node: footprint",
            "agent memory, 250 local endpoints and 10,000 peers, settled",
            &[memory],
            "MiB",
            Some(Goal::AtMost(40.0)),
        ),
        alone("node: footprint", "agent memory, highest", &[resident(pid, "VmHWM:")?], "MiB", None),
        alone(
            "node: footprint",
            "restart until ready with everything adopted",
            &[adopt],
            "ms",
            Some(Goal::AtMost(1000.0)),
        ),
        alone("node: footprint", "CPU in 10 idle seconds", &[idle], "ms", Some(Goal::AtMost(10.0))),
    ])
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
