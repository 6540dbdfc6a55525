//! Load balancers.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::{Checker, limits};
use crate::{ObjectRef, Protocol, Reason, Service, VpcName};

type Frontend<'w> = (&'w VpcName, IpAddr, Protocol, u16);

impl Checker<'_> {
    pub(super) fn services(&mut self) {
        let world = self.world;
        let mut owners: BTreeMap<Frontend<'_>, ObjectRef> = BTreeMap::new();
        let mut subnets: BTreeMap<&VpcName, Vec<(ipnet::IpNet, ObjectRef)>> = BTreeMap::new();
        for s in world.subnets.values() {
            let object = || ObjectRef::Subnet(s.vpc.clone(), s.name.clone());
            subnets.entry(&s.vpc).or_default().extend(s.cidrs.iter().map(|net| (*net, object())));
        }
        subnets.values_mut().for_each(|nets| nets.sort_unstable());
        for service in world.services.values() {
            let object = ObjectRef::LoadBalancer(service.vpc.clone(), service.name.clone());
            self.vpc_reference(&object, &service.vpc);
            let nets = subnets.get(&service.vpc).map_or(&[][..], Vec::as_slice);
            self.vips(service, &object, nets);
            self.at_most(&object, "ports", service.ports.len(), limits::PORTS_PER_LOAD_BALANCER);
            if service.ports.is_empty() {
                self.fault(Reason::MissingField, &object, "ports", "", "a load balancer needs a port");
            }
            for (at, port) in service.ports.iter().enumerate() {
                self.at_most(
                    &object,
                    &format!("ports[{at}].backends"),
                    port.backends.len(),
                    limits::BACKENDS_PER_PORT,
                );
                for &vip in &service.cluster_ips {
                    let frontend = (&service.vpc, vip, port.protocol, port.port);
                    let Some(other) = owners.get(&frontend).cloned() else {
                        owners.insert(frontend, object.clone());
                        continue;
                    };
                    let value = format!("{} {}/{}", vip, port.port, port.protocol.word());
                    let message = if other == object {
                        format!("two ports of {object} have the same protocol and number")
                    } else {
                        format!("{object} and {other} have the same address, protocol and port")
                    };
                    let f = self.fault(
                        Reason::DuplicateFrontend,
                        &object,
                        &format!("ports[{at}]"),
                        value,
                        message,
                    );
                    f.other = (other != object).then_some(other);
                    break;
                }
                for &(ip, _) in port.backends.keys() {
                    self.backend(service, &object, at, ip, nets);
                }
            }
        }
    }

    fn vips(&mut self, service: &Service, object: &ObjectRef, nets: &[(ipnet::IpNet, ObjectRef)]) {
        let vips: Vec<IpAddr> = service.cluster_ips.iter().copied().collect();
        self.one_per_family(object, "vips", &vips);
        for vip in vips {
            if vip.is_unspecified() || vip.is_multicast() || vip.is_loopback() {
                self.fault(Reason::InvalidValue, object, "vips", vip, "is not a unicast address");
            }
            if let Some((net, subnet)) = super::network::covering(nets, vip) {
                let message =
                    format!("lies in {subnet} ({net}): take an address outside of the VPC's subnets");
                let subnet = subnet.clone();
                self.fault(Reason::InvalidVip, object, "vips", vip, message).other = Some(subnet);
            }
            let node = self.world.nodes.values().find(|n| n.addresses.contains(&vip));
            if let (true, Some(node)) = (service.vpc.is_default(), node) {
                let node = ObjectRef::Node(node.name.clone());
                let message = format!("is the underlay address of {node}");
                self.fault(Reason::InvalidVip, object, "vips", vip, message).other = Some(node);
            }
        }
    }

    fn backend(
        &mut self,
        service: &Service,
        object: &ObjectRef,
        port: usize,
        ip: IpAddr,
        nets: &[(ipnet::IpNet, ObjectRef)],
    ) {
        let field = format!("ports[{port}].backends");
        if !service.cluster_ips.iter().any(|vip| vip.is_ipv4() == ip.is_ipv4()) {
            let message = format!("no address of {object} is of its family: nobody would reach it");
            self.fault(Reason::FamilyMismatch, object, &field, ip, message);
        }
        if super::network::covering(nets, ip).is_none() {
            let message = format!("is in no subnet of vpc {}", service.vpc);
            self.fault(Reason::AddressOutsideSubnet, object, &field, ip, message);
        }
    }
}
