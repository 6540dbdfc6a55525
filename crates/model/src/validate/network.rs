//! Nodes, VPCs and subnets.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::Checker;
use crate::ranges::{Family, bits, covers, net_bits};
use crate::subnet::reserved;
use crate::{ObjectRef, Reason, Subnet, SubnetName, Vni, VpcName};

/// Ranges that no workload can have an address in, with the name of what they are.
const SPECIAL: [(&str, IpNet); 9] = [
    ("this network (RFC 1122)", v4(0, 0, 0, 0, 8)),
    ("loopback", v4(127, 0, 0, 0, 8)),
    ("link-local", v4(169, 254, 0, 0, 16)),
    ("multicast", v4(224, 0, 0, 0, 4)),
    ("reserved (RFC 1112)", v4(240, 0, 0, 0, 4)),
    ("loopback and unspecified", v6(0, 0, 127)),
    ("IPv4-mapped", v6(0, 0xffff, 96)),
    ("link-local", v6(0xfe80, 0, 10)),
    ("multicast", v6(0xff00, 0, 8)),
];

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix))
}

/// From the first and the sixth group.
const fn v6(first: u16, sixth: u16, prefix: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, sixth, 0, 0), prefix))
}

impl Checker<'_> {
    pub(super) fn nodes(&mut self) {
        let mut owners: BTreeMap<IpAddr, ObjectRef> = BTreeMap::new();
        let default_subnets = self.default_vpc_subnets();
        for node in self.world.nodes.values() {
            let object = ObjectRef::Node(node.name.clone());
            if node.addresses.is_empty() {
                self.fault(
                    Reason::MissingField,
                    &object,
                    "addresses",
                    "",
                    "a node needs an underlay address",
                );
            }
            self.one_per_family(&object, "addresses", &node.addresses);
            for &ip in &node.addresses {
                if ip.is_unspecified() || ip.is_multicast() {
                    self.fault(Reason::InvalidValue, &object, "addresses", ip, "is not a unicast address");
                }
                if let Some(other) = owners.get(&ip) {
                    let message = format!("{object} and {other} have the same underlay address");
                    let other = other.clone();
                    self.fault(Reason::NodeAddressConflict, &object, "addresses", ip, message).other =
                        Some(other);
                } else {
                    owners.insert(ip, object.clone());
                }
                if let Some((net, subnet)) = covering(&default_subnets, ip) {
                    let message = format!(
                        "{subnet} ({net}) covers the underlay address of {object}: the host could not tell the two networks apart"
                    );
                    let subnet = subnet.clone();
                    self.fault(Reason::NodeAddressConflict, &subnet, "cidrs", ip, message).other =
                        Some(object.clone());
                }
            }
        }
    }

    /// CIDRs of the default VPC, sorted by family and start.
    fn default_vpc_subnets(&self) -> Vec<(IpNet, ObjectRef)> {
        let subnets = self.world.subnets.values().filter(|s| s.vpc.is_default());
        let mut nets: Vec<_> = subnets.flat_map(|s| s.cidrs.iter().map(|n| (*n, reference(s)))).collect();
        nets.sort_unstable();
        nets
    }

    pub(super) fn vpcs(&mut self) {
        let mut owners: BTreeMap<Vni, &VpcName> = BTreeMap::new();
        // The default VPC first: its number is fixed, so a conflict is the other's.
        let (default, named): (Vec<_>, Vec<_>) = self.world.vpcs.values().partition(|v| v.name.is_default());
        for vpc in default.into_iter().chain(named) {
            let Some(vni) = vpc.vni else { continue };
            let Some(other) = owners.insert(vni, &vpc.name) else { continue };
            owners.insert(vni, other);
            let (object, other) = (ObjectRef::Vpc(vpc.name.clone()), ObjectRef::Vpc(other.clone()));
            let hint = if vni == crate::DEFAULT_VNI {
                " (the default VPC has 1 unless the document gives it another)"
            } else {
                ""
            };
            let message = format!("{object} and {other} have the same VNI{hint}");
            self.fault(Reason::DuplicateVni, &object, "vni", vni, message).other = Some(other);
        }
    }

    pub(super) fn subnets(&mut self) {
        for subnet in self.world.subnets.values() {
            self.subnet(subnet);
        }
        self.subnet_overlaps();
    }

    fn subnet(&mut self, s: &Subnet) {
        let object = reference(s);
        self.vpc_reference(&object, &s.vpc);
        if let Some(node) = &s.node {
            self.reference(&object, "node", ObjectRef::Node(node.clone()));
        }
        if s.cidrs.is_empty() {
            self.fault(Reason::MissingField, &object, "cidrs", "", "a subnet needs a CIDR");
        }
        let networks: Vec<IpAddr> = s.cidrs.iter().map(IpNet::network).collect();
        self.one_per_family(&object, "cidrs", &networks);
        for net in &s.cidrs {
            if net.trunc() != *net {
                let f =
                    self.fault(Reason::InvalidValue, &object, "cidrs", net, "has bits set behind its prefix");
                f.suggestion = Some(net.trunc().to_string());
            }
            if let Some((what, special)) = SPECIAL.iter().find(|(_, sp)| covers(sp, net) || covers(net, sp)) {
                let message =
                    format!("overlaps {special}, which is {what}: workloads cannot have addresses there");
                self.fault(Reason::SubnetUnusable, &object, "cidrs", net, message);
            }
            if net.prefix_len() == net.max_prefix_len() {
                let message = "has one address: no room for its gateway and an endpoint";
                self.fault(Reason::SubnetUnusable, &object, "cidrs", net, message);
            } else if s.gateway(Family::of_net(net)).is_none() {
                let message =
                    "has no gateway: none is given and no address is left for it outside exclude_cidrs";
                self.fault(Reason::InvalidGateway, &object, "gateways", net, message);
            }
        }
        self.gateways(s, &object);
        for &(a, b) in &s.exclude {
            let inside = s.cidrs.iter().any(|n| n.contains(&a) && n.contains(&b));
            if a.is_ipv4() != b.is_ipv4() || a > b || !inside {
                let message = format!("is not inside {object}, {}", list(&s.cidrs));
                self.fault(Reason::OutsideRange, &object, "exclude_cidrs", format!("{a}..{b}"), message);
            }
        }
        if let Some(mtu) = s.mtu
            && s.cidr(Family::V6).is_some()
            && mtu < 1280
        {
            self.fault(
                Reason::OutOfRange,
                &object,
                "mtu",
                mtu,
                "IPv6 needs at least 1280 (RFC 8200 section 5)",
            );
        }
        self.cni_ranges(s, &object);
    }

    fn gateways(&mut self, s: &Subnet, object: &ObjectRef) {
        self.one_per_family(object, "gateways", &s.gateways);
        for &gateway in &s.gateways {
            let family = Family::of(gateway);
            let Some(net) = s.cidr(family).filter(|n| n.contains(&gateway)) else {
                let message = format!("is not inside {object}, {}", list(&s.cidrs));
                self.fault(Reason::InvalidGateway, object, "gateways", gateway, message);
                continue;
            };
            let held = reserved(net).iter().any(|&(a, b)| (a..=b).contains(&bits(gateway)));
            if held {
                let message = format!("is the network, broadcast or anycast address of {net}");
                self.fault(Reason::InvalidGateway, object, "gateways", gateway, message);
            } else if s.closed(family).contains(bits(gateway)) {
                self.fault(
                    Reason::InvalidGateway,
                    object,
                    "gateways",
                    gateway,
                    "is excluded by exclude_cidrs",
                );
            }
        }
    }

    /// Ranges inside the subnet, and no address that two nodes could both hand out.
    fn cni_ranges(&mut self, s: &Subnet, object: &ObjectRef) {
        let mut spans = Vec::new();
        if let Some(node) = &s.node {
            spans.extend(s.cidrs.iter().map(|n| (*n, node)));
        }
        for (i, range) in s.cni_ranges.iter().enumerate() {
            self.reference(object, &format!("cni_ranges[{i}].node"), ObjectRef::Node(range.node.clone()));
            if s.cidrs.iter().any(|n| covers(n, &range.cidr)) {
                spans.push((range.cidr, &range.node));
            } else {
                let message = format!("is not inside {object}, {}", list(&s.cidrs));
                self.fault(
                    Reason::OutsideRange,
                    object,
                    &format!("cni_ranges[{i}].cidr"),
                    range.cidr,
                    message,
                );
            }
        }
        for ((outer, a), (inner, b)) in nested(spans) {
            if a != b {
                let message =
                    format!("node {a} ({outer}) and node {b} ({inner}) could both hand out an address");
                self.fault(Reason::CniRangeConflict, object, "cni_ranges", inner, message);
            }
        }
    }

    fn subnet_overlaps(&mut self) {
        let mut by_vpc: BTreeMap<&VpcName, Vec<(IpNet, &SubnetName)>> = BTreeMap::new();
        for s in self.world.subnets.values() {
            by_vpc.entry(&s.vpc).or_default().extend(s.cidrs.iter().map(|n| (*n, &s.name)));
        }
        for (vpc, nets) in by_vpc {
            for ((outer, a), (inner, b)) in nested(nets) {
                if a == b {
                    continue;
                }
                // The name that sorts later is at fault: a choice, but the same one on every node.
                let ((first, first_net), (second, second_net)) =
                    if a < b { ((a, outer), (b, inner)) } else { ((b, inner), (a, outer)) };
                let object = ObjectRef::Subnet(vpc.clone(), second.clone());
                let other = ObjectRef::Subnet(vpc.clone(), first.clone());
                let message = format!("{object} ({second_net}) and {other} ({first_net}) overlap");
                self.fault(Reason::SubnetOverlap, &object, "cidrs", second_net, message).other = Some(other);
            }
        }
    }

    /// At most one of each family.
    pub(super) fn one_per_family(&mut self, object: &ObjectRef, field: &str, ips: &[IpAddr]) {
        for family in [Family::V4, Family::V6] {
            let mut of = ips.iter().filter(|ip| Family::of(**ip) == family);
            if let (Some(first), Some(second)) = (of.next(), of.next()) {
                let message = format!("two of family {family}, {first} and {second}: one per family");
                self.fault(Reason::FamilyMismatch, object, field, second, message);
            }
        }
    }
}

fn reference(s: &Subnet) -> ObjectRef {
    ObjectRef::Subnet(s.vpc.clone(), s.name.clone())
}

fn list(nets: &[IpNet]) -> String {
    let all: Vec<String> = nets.iter().map(ToString::to_string).collect();
    all.join(", ")
}

/// Every CIDR with the narrowest other one that covers it (CIDRs overlap only by nesting).
fn nested<T: Copy + Ord>(mut nets: Vec<(IpNet, T)>) -> Vec<((IpNet, T), (IpNet, T))> {
    // By family, start, and the wider first.
    nets.sort_unstable_by_key(|&(n, t)| (Family::of_net(&n), bits(n.network()), n.prefix_len(), t));
    let mut open: Vec<(IpNet, T)> = Vec::new();
    let mut pairs = Vec::new();
    for item in nets {
        while open.last().is_some_and(|(n, _)| !covers(n, &item.0)) {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            pairs.push((outer, item));
        }
        open.push(item);
    }
    pairs
}

/// The CIDR of a sorted list that covers an address. Lists without overlaps only: elsewhere the overlap is a fault itself.
pub(super) fn covering(nets: &[(IpNet, ObjectRef)], ip: IpAddr) -> Option<&(IpNet, ObjectRef)> {
    let key = (Family::of(ip), bits(ip));
    let i = nets.partition_point(|(n, _)| (Family::of_net(n), net_bits(n).0) <= key);
    nets[..i].last().filter(|(n, _)| n.contains(&ip))
}
