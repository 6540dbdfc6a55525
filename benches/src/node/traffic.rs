//! TCP between workloads, against the kernel's own forwarding.

use anyhow::{Context, Result};
use flowloom_tests_e2e::Lab;

use super::{Contender, Effort, document};
use crate::measure::{Goal, against};
use crate::peers;
use crate::report::Measure;
use crate::traffic::{Load, Turns, run, take_turns};

/// CPU per operation and rate of the loads, ours (the first) against each peer, interleaved. Goals of CPU and rate are those of a ratio.
pub(super) fn traffic(
    label: &str,
    contenders: &[Contender<'_>],
    loads: &[Load],
    cpu: Option<Goal>,
    rate: Option<Goal>,
    effort: Effort,
) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for load in loads {
        let what = match load {
            Load::Stream => "TCP stream",
            Load::RequestResponse => "TCP request/response",
            Load::ConnectRequestClose => "TCP connect-request-close",
        };
        let Turns { rates, costs } = take_turns(contenders.len(), effort.rounds, |i| {
            let c = &contenders[i];
            run(*load, c.server, c.client, c.address, effort.run)
                .with_context(|| format!("{what} over {}", c.name))
        })?;
        for (i, peer) in contenders.iter().enumerate().skip(1) {
            let measure = |what: &str, unit, samples: &[Vec<f64>], goal| {
                against(label, what, unit, &samples[0], peer.name, &samples[i], goal)
            };
            measures.push(measure(&format!("{what}, CPU per operation"), "ns", &costs, cpu));
            measures.push(measure(&format!("{what}, rate"), "1/s", &rates, rate));
        }
    }
    Ok(measures)
}

/// All loads with the goals of the kernel's own forwarding without policy.
fn forwarding(label: &str, contenders: &[Contender<'_>], effort: Effort) -> Result<Vec<Measure>> {
    let rate = Some(Goal::AtLeast(1.0));
    let mut measures = Vec::new();
    for (load, cpu) in [(Load::Stream, 1.0), (Load::RequestResponse, 1.0), (Load::ConnectRequestClose, 1.05)]
    {
        measures.extend(traffic(label, contenders, &[load], Some(Goal::AtMost(cpu)), rate, effort)?);
    }
    Ok(measures)
}

/// Two workloads of one node.
pub(super) fn same_node(effort: Effort) -> Result<Vec<Measure>> {
    let lab = Lab::builder().nodes(1).start()?;
    lab.apply(&document(&lab, "n1", 100))?;
    let (client, server) = (lab.workload("red/client")?, lab.workload("red/server")?);
    let (routed, bridged) = (peers::routed()?, peers::bridged()?);
    let contenders = [
        Contender::new("flowloom", &client.netns, &server.netns, server.ip(4)?),
        Contender::new("kernel-routed veth, no policy", &routed.client, &routed.server, routed.address),
        Contender::new("bridge, no policy", &bridged.client, &bridged.server, bridged.address),
    ];
    forwarding("node: same node, 100 rules", &contenders, effort)
}

/// A workload on each of two nodes; then with packets of open connections taken out of the tunnel where they arrive.
pub(super) fn across_nodes(effort: Effort) -> Result<Vec<Measure>> {
    let vxlan = peers::vxlan()?;
    let peer =
        Contender::new("kernel VXLAN and bridge, no policy", &vxlan.client, &vxlan.server, vxlan.address);
    let mut measures = Vec::new();
    for (label, receive) in [
        ("node: across nodes, 100 rules", "device"),
        ("node: across nodes, 100 rules, tunnel_receive: uplink", "uplink"),
    ] {
        let lab = Lab::builder().nodes(2).config(&format!("tunnel_receive: {receive}")).start()?;
        lab.apply(&document(&lab, "n2", 100))?;
        let (client, server) = (lab.workload("red/client")?, lab.workload("red/server")?);
        let ours = Contender::new("flowloom", &client.netns, &server.netns, server.ip(4)?);
        measures.extend(forwarding(label, &[ours, peer], effort)?);
    }
    Ok(measures)
}
