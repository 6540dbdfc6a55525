//! A tenant that opens connections without end meets its own quota, is told so, and nobody else notices.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_api::v1::DropFilter;
use flowloom_testkit::{Mode, Outcome, PATIENCE, Probe, TcpClient, TcpServer, eventually, probe_all};
use flowloom_tests_e2e::{Document, Lab, Workload};
use serde_json::json;

/// Connections of one VPC on this node.
const QUOTA: usize = 1100;
/// Of the other tenant, fewer than its quota.
const IDLE: usize = 1000;
const BEYOND: usize = 50;
const PORT: u16 = 7000;

fn document(lab: &Lab) -> Document {
    let endpoint = |vpc: &str, name: &str, host: u8| json!({"vpc": vpc, "name": name, "subnet": "app", "node": "n1", "ips": [format!("10.1.0.{host}")]});
    let subnet = |vpc: &str| json!({"vpc": vpc, "name": "app", "cidr": "10.1.0.0/24"});
    lab.empty_document().with_two_tenants(subnet, endpoint)
}

fn connect(from: &Workload, to: SocketAddr) -> Result<TcpClient> {
    TcpClient::connect(&from.netns, to, PATIENCE).context("a connection within the quota")
}

fn dropped(lab: &Lab, vpc: &str) -> Result<u64> {
    let filter =
        DropFilter { vpc: Some(vpc.into()), reason: Some("ConntrackFull".into()), ..DropFilter::default() };
    Ok(lab.agents[0].client().drops(&filter)?.drops.iter().map(|d| d.packets).sum())
}

#[test]
fn a_vpc_at_its_quota_is_refused_more_and_the_other_vpcs_idle_flows_all_pass() -> Result<()> {
    let lab = Lab::builder()
        .nodes(1)
        .config(&format!("conntrack: {{vpc_quota: {QUOTA}, sweep_seconds: 1}}"))
        .start()?;
    lab.apply(&document(&lab))?;
    let (red_a, red_b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    let (blue_a, blue_b) = (lab.workload("blue/a")?, lab.workload("blue/b")?);
    let to = SocketAddr::new(red_b.ip(4)?, PORT);
    let red_server = TcpServer::start(&red_b.netns, to, Mode::Echo)?;
    let blue_server = TcpServer::start(&blue_b.netns, to, Mode::Echo)?;

    let mut idle = Vec::new();
    for _ in 0..IDLE {
        idle.push(connect(&blue_a, to)?);
    }
    let mut greedy = VecDeque::new();
    for _ in 0..QUOTA {
        greedy.push_back(connect(&red_a, to)?);
    }
    assert_eq!(
        (dropped(&lab, "red")?, dropped(&lab, "blue")?),
        (0, 0),
        "within the quota nothing is dropped"
    );

    // Beyond it: nobody gets in, and the reason is counted where an operator looks.
    let probes: Vec<_> =
        (0..BEYOND).map(|_| Probe::tcp(&red_a.netns, to).timeout(Duration::from_millis(300))).collect();
    let outcomes = probe_all(&probes)?;
    assert!(outcomes.iter().all(|o| *o == Outcome::TimedOut), "{outcomes:?}");
    let counted = dropped(&lab, "red")?;
    assert!(counted >= BEYOND as u64, "{counted} drops for {BEYOND} refused connections");
    assert_eq!(dropped(&lab, "blue")?, 0, "the other tenant's drops");
    let shown = lab.flowloom(0, &["drops", "--vpc", "red"])?.success()?.stdout;
    assert!(shown.contains("ConntrackFull"), "{shown}");
    let shown = lab.flowloom(0, &["drops", "--vpc", "blue"])?.success()?.stdout;
    assert!(!shown.contains("ConntrackFull"), "{shown}");
    let events =
        lab.flowloom(0, &["observe", "--vpc", "red", "--reason", "ConntrackFull"])?.success()?.stdout;
    assert!(events.contains("ConntrackFull"), "{events}");

    // The other tenant's idle flows, every one; the greedy one's own too.
    for (i, flow) in idle.iter_mut().enumerate() {
        flow.round_trip(b"still here", PATIENCE).with_context(|| format!("idle flow {i} of blue"))?;
    }
    for (i, flow) in greedy.iter_mut().enumerate() {
        flow.round_trip(b"mine too", PATIENCE).with_context(|| format!("flow {i} of red"))?;
    }
    // And the other tenant opens more.
    let mut more = connect(&blue_a, to)?;
    more.round_trip(b"one more", PATIENCE)?;
    assert_eq!(blue_server.accepted(), IDLE as u64 + 1);
    assert!(red_server.accepted() >= QUOTA as u64);

    // Closed connections give their place back once they are swept.
    let closing = greedy.len() / 2;
    greedy.drain(..closing);
    let room =
        eventually(PATIENCE, || match TcpClient::connect(&red_a.netns, to, Duration::from_millis(300)) {
            Ok(client) => Ok(client),
            Err(e) => Err(format!("no room after closing {closing}: {e}")),
        });
    drop(room);
    let mut flow = greedy.pop_front().context("half of them are open")?;
    flow.round_trip(b"kept", PATIENCE)?;
    // As many as were closed fit again.
    eventually(PATIENCE, || {
        let probes: Vec<_> =
            (0..closing / 2).map(|_| Probe::tcp(&red_a.netns, to).timeout(Duration::from_secs(1))).collect();
        let outcomes = probe_all(&probes).map_err(|e| e.to_string())?;
        let refused = outcomes.iter().filter(|o| **o != Outcome::Connected).count();
        if refused == 0 { Ok(()) } else { Err(format!("{refused} of {} refused", closing / 2)) }
    });
    Ok(())
}
