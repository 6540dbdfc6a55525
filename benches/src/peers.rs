//! What flowloom is measured against, built in the same run: the kernel routing between veth pairs, the kernel's bridge, the kernel's VXLAN with a bridge.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use flowloom_netlink::LinkName;
use flowloom_testkit::{Netfilter, Ns, Topology, connect, temp_dir};

/// Two workloads that can talk, and what keeps them alive.
#[derive(Debug)]
pub struct Pair {
    /// Asks.
    pub client: Ns,
    /// Answers.
    pub server: Ns,
    /// Where it answers.
    pub address: IpAddr,
    /// The nodes, which go when this does.
    pub hold: Topology,
}

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 3);

/// veth pairs, the kernel routes between them; no policy.
///
/// # Errors
/// When the kernel refuses.
pub fn routed() -> Result<Pair> {
    let topology = Topology::builder().nodes(1).netfilter(Netfilter::Open).build()?;
    let gateway = [IpAddr::from(Ipv4Addr::new(10, 9, 0, 1))];
    let [node] = topology.nodes.as_slice() else { anyhow::bail!("one node") };
    let client =
        node.plain_workload("client", &LinkName::new("w1")?, &[format!("{CLIENT}/32").parse()?], &gateway)?;
    let server =
        node.plain_workload("server", &LinkName::new("w2")?, &[format!("{SERVER}/32").parse()?], &gateway)?;
    Ok(Pair { client, server, address: SERVER.into(), hold: topology })
}

/// How a ruleset is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// One rule after the other.
    Linear,
    /// One map of (source, port) to verdicts.
    Map,
}

/// As [`routed`], and nftables judges what is forwarded: `rules` rules as `bench node` has them, the last of which allows. What belongs to a
/// connection that was allowed passes by the first rule, as everybody writes it.
///
/// # Errors
/// When the kernel refuses.
pub fn filtered(filter: Filter, rules: usize) -> Result<Pair> {
    let pair = routed()?;
    let [node] = pair.hold.nodes.as_slice() else { anyhow::bail!("one node") };
    let each = (1..rules).map(|i| {
        let verdict = if i % 2 == 0 { "accept" } else { "drop" };
        (format!("172.{}.{}.0/24", 16 + (i / 256) % 16, i % 256), 1 + i % 60_000, verdict)
    });
    let mut text = "table ip bench {\n".to_owned();
    if filter == Filter::Map && rules > 1 {
        let elements: Vec<_> = each.clone().map(|(net, port, v)| format!("{net} . {port} : {v}")).collect();
        text.push_str(&format!(
            "map rules {{ type ipv4_addr . inet_service : verdict; flags interval; elements = {{ {} }}; }}\n",
            elements.join(", ")
        ));
    }
    text.push_str("chain forward { type filter hook forward priority 0; policy drop;\nct state established,related accept\n");
    match filter {
        Filter::Linear => {
            for (net, port, verdict) in each {
                text.push_str(&format!("ip saddr {net} tcp dport {port} {verdict}\n"));
            }
        }
        Filter::Map if rules > 1 => text.push_str("ip saddr . tcp dport vmap @rules\n"),
        Filter::Map => {}
    }
    text.push_str("ip saddr 10.9.0.0/16 meta l4proto tcp accept\n}\n}\n");
    let file = temp_dir("nft")?;
    let path = file.path().join("rules");
    std::fs::write(&path, text)?;
    node.ns.exec_ok(&["nft", "-f", &path.display().to_string()])?;
    Ok(pair)
}

/// veth pairs on a bridge, as the reference plugin makes them; no policy.
///
/// # Errors
/// When the kernel refuses.
pub fn bridged() -> Result<Pair> {
    let topology = Topology::builder().nodes(1).netfilter(Netfilter::Open).build()?;
    let [node] = topology.nodes.as_slice() else { anyhow::bail!("one node") };
    node.ns.exec_ok(&["ip", "link", "add", "br1", "type", "bridge"])?;
    node.ns.exec_ok(&["ip", "link", "set", "br1", "up"])?;
    let client = on_bridge(&node.ns, "client", "w1", CLIENT)?;
    let server = on_bridge(&node.ns, "server", "w2", SERVER)?;
    Ok(Pair { client, server, address: SERVER.into(), hold: topology })
}

/// Two nodes, a bridge and a VXLAN device each; no policy.
///
/// # Errors
/// When the kernel refuses.
pub fn vxlan() -> Result<Pair> {
    let topology = Topology::builder().nodes(2).netfilter(Netfilter::Open).build()?;
    let [one, two] = topology.nodes.as_slice() else { anyhow::bail!("two nodes") };
    for (node, other) in [(one, two), (two, one)] {
        let (local, remote) = (node.ip4.to_string(), other.ip4.to_string());
        let uplink = node.uplink.to_string();
        node.ns.exec_ok(&["ip", "link", "add", "br1", "type", "bridge"])?;
        node.ns.exec_ok(&[
            "ip", "link", "add", "vx1", "type", "vxlan", "id", "42", "dstport", "4789", "local", &local,
            "remote", &remote, "dev", &uplink,
        ])?;
        node.ns.exec_ok(&["ip", "link", "set", "vx1", "master", "br1", "up"])?;
        node.ns.exec_ok(&["ip", "link", "set", "br1", "up"])?;
    }
    let client = on_bridge(&one.ns, "client", "w1", CLIENT)?;
    let server = on_bridge(&two.ns, "server", "w2", SERVER)?;
    // Room for the tunnel's 50 bytes, as flowloom gives its workloads.
    for ns in [&client, &server] {
        ns.exec_ok(&["ip", "link", "set", "eth0", "mtu", "1450"])?;
    }
    Ok(Pair { client, server, address: SERVER.into(), hold: topology })
}

fn on_bridge(node: &Ns, label: &str, near: &str, ip: Ipv4Addr) -> Result<Ns> {
    let ns = Ns::new(label)?;
    connect(node, &LinkName::new(near)?, &ns, &LinkName::new("eth0")?, 1500)?;
    node.exec_ok(&["ip", "link", "set", near, "master", "br1", "up"])?;
    ns.exec_ok(&["ip", "address", "add", &format!("{ip}/24"), "dev", "eth0"])?;
    Ok(ns)
}
