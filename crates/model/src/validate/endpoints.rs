//! Endpoints: references, addresses, MACs, wiring.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use super::{Checker, limits};
use crate::ranges::{Family, Ranges, bits};
use crate::{
    Attachment, Endpoint, EndpointKey, Mac, NodeName, ObjectRef, Reason, SecurityGroup, Subnet, SubnetName,
    VpcName, World,
};

/// What two endpoints cannot both have.
#[derive(Default)]
struct Claims<'w> {
    addresses: BTreeMap<(&'w VpcName, IpAddr), &'w Endpoint>,
    macs: BTreeMap<(&'w VpcName, Mac), &'w Endpoint>,
    devices: BTreeMap<(&'w NodeName, &'w str), &'w Endpoint>,
    interfaces: BTreeMap<(&'w NodeName, &'w Path, &'w str), &'w Endpoint>,
    per_node: BTreeMap<&'w NodeName, usize>,
}

impl Claims<'_> {
    /// Whether another endpoint wants none of it. Counts it on its node.
    fn leave_room_for(&mut self, e: &Endpoint) -> bool {
        if let Some(count) = self.per_node.get_mut(&e.node) {
            *count += 1;
            if *count > limits::ENDPOINTS_PER_NODE {
                return false;
            }
        }
        let wired = match &e.attachment {
            Attachment::Device { name } => self.devices.contains_key(&(&e.node, name.as_str())),
            Attachment::Netns { path, interface } => {
                self.interfaces.contains_key(&(&e.node, path.as_path(), interface.as_str()))
            }
            Attachment::Managed | Attachment::Cni => false,
        };
        let mac = e.effective_mac().is_some_and(|mac| self.macs.contains_key(&(&e.vpc, mac)));
        !wired && !mac && !e.ips.iter().any(|ip| self.addresses.contains_key(&(&e.vpc, *ip)))
    }
}

/// Per subnet and family, what is excluded or reserved; computed once.
type Closed<'w> = BTreeMap<(&'w VpcName, &'w SubnetName, Family), Ranges>;

fn reference(e: &Endpoint) -> ObjectRef {
    ObjectRef::Endpoint(e.key())
}

/// What two endpoints must not share: addresses, MAC, wiring, and room on a node.
fn claims_of(e: &Endpoint) -> (&[IpAddr], Option<Mac>, &NodeName, &Attachment) {
    (&e.ips, e.effective_mac(), &e.node, &e.attachment)
}

/// Whether endpoints that are new in a world without faults bring none into it. `before` is what stood in their place. May say no where the answer is
/// yes, never the other way round.
pub(crate) fn endpoints_fit(world: &World, before: &[(EndpointKey, Option<Arc<Endpoint>>)]) -> bool {
    let pairs: Vec<_> =
        before.iter().map(|(key, old)| (old.as_deref(), world.endpoints.get(key).map(Arc::as_ref))).collect();
    let ports = |e: &Endpoint| (e.labels.clone(), e.security_groups.clone(), e.named_ports.clone());
    let defines = |(old, new): &(Option<&Endpoint>, Option<&Endpoint>)| old.map(ports) != new.map(ports);
    let vpcs: BTreeSet<&VpcName> =
        before.iter().zip(&pairs).filter(|(_, pair)| defines(pair)).map(|((key, _), _)| &key.vpc).collect();
    // Whether someone defines what they name depends on everybody.
    let named =
        |g: &SecurityGroup| vpcs.contains(&g.vpc) && g.rules.iter().any(|r| !r.named_ports.is_empty());
    if world.endpoints.len() > limits::ENDPOINTS || world.security_groups.values().any(named) {
        return false;
    }
    let mut checker = Checker { world, faults: Vec::new() };
    let (mut claims, mut closed) = (Claims::default(), Closed::new());
    let mut wanting = BTreeSet::new();
    for ((key, _), (old, new)) in before.iter().zip(&pairs) {
        let Some(new) = new else { continue };
        let object = reference(new);
        checker.endpoint(new, &object, &mut closed);
        if old.map(claims_of) != Some(claims_of(new)) {
            checker.claims(new, &object, &mut claims);
            wanting.insert(key);
        }
    }
    if !checker.faults.is_empty() {
        return false;
    }
    let mut others = world.endpoints.iter().filter(|(key, _)| !wanting.contains(key));
    wanting.is_empty() || others.all(|(_, e)| claims.leave_room_for(e))
}

impl<'w> Checker<'w> {
    pub(super) fn endpoints(&mut self) {
        let world = self.world;
        let mut claims = Claims::default();
        let mut closed = Closed::new();
        for endpoint in world.endpoints.values() {
            let object = reference(endpoint);
            self.endpoint(endpoint, &object, &mut closed);
            self.claims(endpoint, &object, &mut claims);
        }
    }

    /// What can be said of an endpoint without looking at the others.
    fn endpoint(&mut self, endpoint: &Endpoint, object: &ObjectRef, closed: &mut Closed<'w>) {
        let world = self.world;
        self.vpc_reference(object, &endpoint.vpc);
        self.reference(object, "node", ObjectRef::Node(endpoint.node.clone()));
        for group in &endpoint.security_groups {
            let target = ObjectRef::SecurityGroup(endpoint.vpc.clone(), group.clone());
            self.reference(object, "security_groups", target);
        }
        let target = ObjectRef::Subnet(endpoint.vpc.clone(), endpoint.subnet.clone());
        self.reference(object, "subnet", target);
        self.one_per_family(object, "ips", &endpoint.ips);
        if let Some(subnet) = world.subnets.get(&(endpoint.vpc.clone(), endpoint.subnet.clone())) {
            for &ip in &endpoint.ips {
                self.address(object, subnet, ip, closed);
            }
        }
        self.named_ports(endpoint, object);
        self.at_most(object, "security_groups", endpoint.security_groups.len(), limits::GROUPS_PER_ENDPOINT);
        self.at_most(object, "labels", endpoint.labels.len(), limits::LABELS_PER_ENDPOINT);
        self.at_most(object, "named_ports", endpoint.named_ports.len(), limits::NAMED_PORTS_PER_ENDPOINT);
    }

    fn address(&mut self, object: &ObjectRef, subnet: &'w Subnet, ip: IpAddr, closed: &mut Closed<'w>) {
        let family = Family::of(ip);
        let home = ObjectRef::Subnet(subnet.vpc.clone(), subnet.name.clone());
        let Some(net) = subnet.cidr(family) else {
            let message = format!("{object} has an {family} address and {home} has no {family} CIDR");
            self.fault(Reason::FamilyMismatch, object, "ips", ip, message).other = Some(home);
            return;
        };
        if !net.contains(&ip) {
            let message = format!("{object} is outside {home} ({net})");
            self.fault(Reason::AddressOutsideSubnet, object, "ips", ip, message).other = Some(home);
            return;
        }
        if subnet.gateways.contains(&ip) {
            let message = format!("{object} has the gateway's address of {home}");
            self.fault(Reason::AddressIsGateway, object, "ips", ip, message).other = Some(home);
            return;
        }
        let closed =
            closed.entry((&subnet.vpc, &subnet.name, family)).or_insert_with(|| subnet.closed(family));
        if closed.contains(bits(ip)) {
            let message = format!("{object} has an address that {home} excludes or reserves");
            self.fault(Reason::AddressExcluded, object, "ips", ip, message).other = Some(home);
        }
    }

    fn named_ports(&mut self, endpoint: &Endpoint, object: &ObjectRef) {
        let mut seen = BTreeSet::new();
        for (i, port) in endpoint.named_ports.iter().enumerate() {
            let field = format!("named_ports[{i}]");
            if !port.protocol.has_ports() || port.port == 0 {
                let value = format!("{:?}/{}", port.protocol, port.port);
                self.fault(
                    Reason::OutOfRange,
                    object,
                    &field,
                    value,
                    "a named port is 1..=65535 of tcp, udp or sctp",
                );
            }
            if !seen.insert((&port.name, port.protocol)) {
                let message = "is defined twice for one protocol; keep one";
                self.fault(Reason::DuplicateName, object, &field, &port.name, message);
            }
        }
    }

    fn claims<'e>(&mut self, e: &'e Endpoint, object: &ObjectRef, claims: &mut Claims<'e>) {
        for &ip in &e.ips {
            if let Some(other) = first_claim(&mut claims.addresses, (&e.vpc, ip), e) {
                let message = format!("{object} and {} have the same address", reference(other));
                self.fault(Reason::DuplicateAddress, object, "ips", ip, message).other =
                    Some(reference(other));
            }
        }
        if let Some(mac) = e.effective_mac() {
            if mac == Mac::GATEWAY {
                self.fault(
                    Reason::MacIsGateway,
                    object,
                    "mac",
                    mac,
                    "is the MAC of every gateway; choose another",
                );
            }
            // Two derived from one address are that address's fault, and named there.
            let derived =
                |o: &&Endpoint| o.mac.is_none() && e.mac.is_none() && o.ips.first() == e.ips.first();
            if let Some(other) = first_claim(&mut claims.macs, (&e.vpc, mac), e).filter(|o| !derived(o)) {
                let other = reference(other);
                let message = format!(
                    "{object} and {other} have the same MAC (one without mac gets it from its first address)"
                );
                self.fault(Reason::DuplicateMac, object, "mac", mac, message).other = Some(other);
            }
        }
        let wired = match &e.attachment {
            Attachment::Device { name } => first_claim(&mut claims.devices, (&e.node, name.as_str()), e)
                .map(|o| (o, "device", name.clone())),
            Attachment::Netns { path, interface } => {
                let key = (&e.node, path.as_path(), interface.as_str());
                let value = format!("{} {interface}", path.display());
                first_claim(&mut claims.interfaces, key, e).map(|o| (o, "netns", value))
            }
            Attachment::Managed | Attachment::Cni => None,
        };
        if let Some((other, field, value)) = wired {
            let other = reference(other);
            let message = format!("{object} and {other} are wired to the same interface on node {}", e.node);
            self.fault(Reason::AttachmentConflict, object, field, value, message).other = Some(other);
        }
        let count = claims.per_node.entry(&e.node).or_default();
        *count += 1;
        if *count > limits::ENDPOINTS_PER_NODE {
            let message = format!("node {} has more than {} endpoints", e.node, limits::ENDPOINTS_PER_NODE);
            self.fault(Reason::LimitExceeded, object, "node", &e.node, message);
        }
    }
}

/// Who claimed it before, if someone else did; the first claim stays.
fn first_claim<'w, K: Ord>(
    claims: &mut BTreeMap<K, &'w Endpoint>,
    key: K,
    e: &'w Endpoint,
) -> Option<&'w Endpoint> {
    let owner = *claims.entry(key).or_insert(e);
    (!std::ptr::eq(owner, e)).then_some(owner)
}
