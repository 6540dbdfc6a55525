//! One node whose runtime attaches pods: the document for it, and what is looked at afterwards.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use flowloom_api::v1::EndpointInfo;
use flowloom_testkit::Ns;
use serde_json::{Value, json};

use crate::{Document, Lab, Runtime};

/// An open port of the group `web`.
pub const WEB: u16 = 80;

/// Subnets `pods` (both families) of two VPCs, `tiny` with one address, `fixed` with two endpoints of the document, and the group `web`.
#[must_use]
pub fn document(lab: &Lab) -> Document {
    let subnet = |vpc: &str| json!({"vpc": vpc, "name": "pods", "cidrs": ["10.7.0.0/24", "fd10:7::/64"], "node": "n1"});
    let group = |vpc: &str| {
        json!({"vpc": vpc, "name": "web", "default_deny_egress": false, "rules": [
            {"id": "echo", "priority": 1, "direction": "ingress", "protocol": "icmp", "action": "allow"},
            {"id": "tcp", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": WEB, "to": WEB}], "action": "allow"},
            {"id": "udp", "priority": 1, "direction": "ingress", "protocol": "udp", "ports": [{"from": WEB, "to": WEB}], "action": "allow"}]})
    };
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([
            subnet("default"), subnet("red"),
            {"vpc": "default", "name": "fixed", "cidrs": ["10.8.0.0/24", "fd10:8::/64"]},
            {"vpc": "default", "name": "tiny", "cidr": "10.9.0.0/30", "node": "n1"},
        ]))
        .with("security_groups", json!([group("default"), group("red")]))
        .with("endpoints", json!([
            {"vpc": "default", "name": "client", "subnet": "fixed", "node": "n1", "ips": ["10.8.0.10", "fd10:8::10"]},
            {"vpc": "default", "name": "db", "subnet": "fixed", "node": "n1", "ips": ["10.8.0.20", "fd10:8::20"], "cni": true, "security_groups": ["web"]},
        ]))
}

/// A node with that document in force.
///
/// # Errors
/// When it cannot be made.
pub fn start() -> Result<Lab> {
    let lab = Lab::builder().nodes(1).start()?;
    lab.apply(&document(&lab))?;
    Ok(lab)
}

/// A runtime whose network is the subnet `pods`.
///
/// # Errors
/// As [`Runtime::new`].
pub fn runtime(lab: &Lab, version: &str) -> Result<Runtime> {
    Ok(Runtime::new(lab, 0, version)?.with("subnet", json!("pods")))
}

/// Addresses of a result.
///
/// # Errors
/// When it has none.
pub fn addresses(result: &Value) -> Result<Vec<IpAddr>> {
    let list = result["ips"].as_array().context("no ips")?;
    list.iter()
        .map(|ip| {
            let text = ip["address"].as_str().context("no address")?;
            Ok(text.split_once('/').context("no length")?.0.parse()?)
        })
        .collect()
}

/// Endpoints that a CNI request attached.
///
/// # Errors
/// When the agent does not answer.
pub fn attached(lab: &Lab) -> Result<Vec<EndpointInfo>> {
    let list = lab.agents[0].client().endpoints()?.endpoints;
    Ok(list.into_iter().filter(|e| e.attachment.is_some()).collect())
}

/// Their containers.
///
/// # Errors
/// When the agent does not answer.
pub fn containers(lab: &Lab) -> Result<BTreeSet<String>> {
    Ok(attached(lab)?.into_iter().filter_map(|e| Some(e.attachment?.container_id)).collect())
}

/// Addresses that somebody holds, of a subnet of the default VPC.
///
/// # Errors
/// When the agent does not answer.
pub fn held(lab: &Lab, subnet: &str) -> Result<BTreeSet<IpAddr>> {
    let pools = lab.agents[0].client().ipam()?.pools;
    let of = pools.iter().filter(|p| p.subnet == subnet && p.vpc == "default");
    Ok(of.flat_map(|p| &p.used).filter(|u| u.cooling_ms.is_none()).map(|u| u.address).collect())
}

/// The interface of a container, as its namespace shows it.
///
/// # Errors
/// When there is none.
pub fn inside(ns: &Ns) -> Result<String> {
    Ok(ns.exec_ok(&["ip", "-brief", "address", "show", "dev", "eth0"])?.stdout)
}

/// flowloom's links of the node.
///
/// # Errors
/// When they cannot be listed.
pub fn links(lab: &Lab) -> Result<BTreeSet<String>> {
    let shown = lab.node(0).ns.exec_ok(&["ip", "-o", "link", "show", "type", "veth"])?.stdout;
    let name = |line: &str| {
        Some(line.split_whitespace().nth(1)?.split('@').next()?.trim_end_matches(':').to_owned())
    };
    Ok(shown.lines().filter_map(name).filter(|n| n.starts_with("fl")).collect())
}
