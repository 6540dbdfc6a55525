//! Nodes and their pod CIDRs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_model::{Node, NodeName, Subnet, SubnetName, joined};
use ipnet::IpNet;

use super::{Delta, Translator};
use crate::object;
use crate::{Kind, ObjectName};

/// Name of the subnet that holds a node's pod CIDRs.
pub(super) fn subnet_name(node: &str) -> Option<SubnetName> {
    joined(&["node", node]).parse().ok()
}

fn one_per_family<T: Copy>(list: &[T], is_v4: impl Fn(&T) -> bool) -> Vec<T> {
    let mut out: Vec<T> = Vec::new();
    for item in list {
        if !out.iter().any(|o| is_v4(o) == is_v4(item)) {
            out.push(*item);
        }
    }
    out
}

fn zone(node: &object::Node) -> Option<String> {
    Some(node.zone.clone()).filter(|z| !z.is_empty())
}

/// What pod CIDRs must keep clear of.
struct Taken<'a> {
    addresses: BTreeMap<IpAddr, &'a ObjectName>,
    services: BTreeSet<IpAddr>,
    ranges: BTreeMap<IpNet, BTreeSet<&'a ObjectName>>,
    /// Where Services get addresses; since when.
    service_ranges: Vec<(IpNet, &'a ObjectName, &'a str)>,
}

/// What is wrong with a node.
struct Wrong {
    reason: &'static str,
    message: String,
    /// Its pod CIDRs are not used, unless they were in use before.
    refused: bool,
}

fn wrong(reason: &'static str, message: String) -> Option<Wrong> {
    Some(Wrong { reason, message, refused: true })
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

impl Translator {
    /// Addresses of this node, for host ports.
    #[must_use]
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        let name = ObjectName::new("", self.options.node.as_str());
        self.nodes.object(&name).map(|n| n.internal.clone()).unwrap_or_default()
    }

    /// All of them, whichever changed: one may stand in another's way.
    pub(super) fn translate_nodes(&mut self, dirty: &BTreeSet<ObjectName>, delta: &mut Delta) {
        let mut names: BTreeSet<ObjectName> = self.nodes.iter().map(|(name, _)| name.clone()).collect();
        names.extend(dirty.iter().cloned());
        self.accepted.retain(|name, _| names.contains(name));
        let mut taken = Taken {
            addresses: BTreeMap::new(),
            services: BTreeSet::new(),
            ranges: BTreeMap::new(),
            service_ranges: Vec::new(),
        };
        for (name, node) in self.nodes.iter() {
            taken.addresses.extend(node.internal.iter().map(|ip| (*ip, name)));
            for net in &node.pod_cidrs {
                taken.ranges.entry(*net).or_default().insert(name);
            }
        }
        taken.services.extend(self.services.iter().flat_map(|(_, s)| &s.cluster_ips));
        for (name, range) in self.service_cidrs.iter() {
            let nets = range.cidrs.iter().map(|net| (*net, name, range.created.as_str()));
            taken.service_ranges.extend(nets);
        }
        let mut judged = Vec::new();
        for name in names {
            let (Ok(key), Some(subnet)) = (NodeName::new(&name.name), subnet_name(&name.name)) else {
                continue;
            };
            let node = self.nodes.object(&name);
            let fault = node.and_then(|node| self.fault_of(&name, node, &taken));
            // What was right when it came stays: a conflict that comes later takes no running Pod off the network.
            let known = node.is_some_and(|n| self.accepted.get(&name) == Some(&n.pod_cidrs));
            let fits = known || fault.as_ref().is_none_or(|f| !f.refused);
            let usable = node.filter(|n| !n.pod_cidrs.is_empty() && fits);
            delta.nodes.insert(
                key.clone(),
                node.map(|n| Node {
                    name: key.clone(),
                    addresses: one_per_family(&n.internal, IpAddr::is_ipv4),
                    zone: zone(n),
                }),
            );
            let made = usable.map(|n| self.subnet(&subnet, &key, n));
            delta.subnets.insert((self.vpc.clone(), subnet), made);
            judged.push((usable.map(|n| n.pod_cidrs.clone()), name, fault));
        }
        for (accepted, name, fault) in judged {
            match accepted {
                Some(cidrs) => drop(self.accepted.insert(name.clone(), cidrs)),
                None => drop(self.accepted.remove(&name)),
            }
            self.fault(object::Node::NAME, &name, fault.map(|f| (f.reason, f.message)));
        }
    }

    fn subnet(&self, name: &SubnetName, key: &NodeName, node: &object::Node) -> Subnet {
        let cidrs = one_per_family(&node.pod_cidrs, |n| n.addr().is_ipv4());
        let local = *key == self.options.node;
        // Another node's gateway is that node's own business: here it is an address like any other.
        let gateways =
            if local { cidrs.iter().filter_map(Subnet::default_gateway).collect() } else { Vec::new() };
        Subnet {
            vpc: self.vpc.clone(),
            name: name.clone(),
            cidrs,
            gateways,
            exclude: Vec::new(),
            node: Some(key.clone()),
            cni_ranges: Vec::new(),
            mtu: None,
        }
    }

    fn fault_of(&self, name: &ObjectName, node: &object::Node, taken: &Taken<'_>) -> Option<Wrong> {
        if node.internal.is_empty() {
            return wrong("NoAddress", "it has no InternalIP yet: its kubelet reports one".into());
        }
        if node.pod_cidrs.is_empty() {
            let message =
                "it has no pod CIDR yet: the controller manager allocates them (--allocate-node-cidrs)";
            return wrong("NoPodCidr", message.into());
        }
        let conflict = |message: String| wrong("PodCidrConflict", message);
        for net in &node.pod_cidrs {
            let inside = net.network()..=net.broadcast();
            if let Some((ip, other)) = taken.addresses.range(inside.clone()).next() {
                return conflict(format!("its pod CIDR {net} covers {ip}, an address of node {other}"));
            }
            if let Some(ip) = taken.services.range(inside).next() {
                return conflict(format!("its pod CIDR {net} covers {ip}, the address of a Service"));
            }
            let wider = std::iter::successors(Some(*net), IpNet::supernet);
            let mut rivals = wider
                .filter_map(|n| taken.ranges.get_key_value(&n))
                .chain(taken.ranges.iter().filter(|(n, _)| net.contains(*n) && *n != net))
                .flat_map(|(n, names)| names.iter().map(move |other| (n, *other)));
            // Who uses it keeps it, then the elder.
            let rank = |n: &ObjectName| {
                let object = self.nodes.object(n);
                let used = object.is_some_and(|o| self.accepted.get(n) == Some(&o.pod_cidrs));
                (!used, object.map(|o| o.created.clone()), n.clone())
            };
            let own = rank(name);
            if let Some((range, other)) = rivals.find(|(_, other)| *other != name && rank(other) < own) {
                return conflict(format!("its pod CIDR {net} overlaps {range} of node {other}"));
            }
        }
        service_conflict(node, taken)
    }
}

/// A range of Services that a node is in the way of. Whoever was there first keeps its addresses: a range that somebody adds later, or that
/// an upgrade of the cluster makes known, takes no node off the network, but it is told.
fn service_conflict(node: &object::Node, taken: &Taken<'_>) -> Option<Wrong> {
    let mut told = None;
    for (range, name, since) in &taken.service_ranges {
        let cidr = node.pod_cidrs.iter().find(|net| overlap(net, range));
        let (reason, what) = match (cidr, node.internal.iter().find(|ip| range.contains(*ip))) {
            (Some(net), _) => ("PodCidrConflict", format!("its pod CIDR {net} overlaps")),
            (None, Some(ip)) => ("NodeAddressConflict", format!("its address {ip} is in")),
            (None, None) => continue,
        };
        let message = format!("{what} {range}, which ServiceCIDR {name} gives to Services");
        let (refused, more) = if node.created.as_str() < *since {
            (false, "; the node is older and keeps it: give Services another range")
        } else {
            (true, "")
        };
        let found = Wrong { reason, message: message + more, refused };
        if refused {
            return Some(found);
        }
        told.get_or_insert(found);
    }
    told
}
