//! Services with the backends of their EndpointSlices, and ports of this node that stand for a Pod's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{Backend, BackendState, NodeName, Service, ServiceName, ServicePort, VpcName, joined};

use super::{Delta, LocalPod, Translator};
use crate::{EndpointSlice, LoadBalancer, LoadBalancerPort, ObjectName};

impl Translator {
    pub(super) fn touch_slice(&mut self, slice: &ObjectName, before: Option<&EndpointSlice>) {
        let service = |s: &EndpointSlice| {
            (!s.service.is_empty()).then(|| ObjectName::new(&slice.namespace, &s.service))
        };
        let now = self.slices.object(slice).and_then(|s| service(s));
        if let Some(service) = before.and_then(service) {
            if let Some(slices) = self.slices_of.get_mut(&service) {
                slices.remove(slice.name.as_str());
                if slices.is_empty() {
                    self.slices_of.remove(&service);
                }
            }
            self.dirty.services.insert(service);
        }
        if let Some(service) = now {
            self.slices_of.entry(service.clone()).or_default().insert(slice.name.as_str().into(), ());
            self.dirty.services.insert(service);
        }
    }

    pub(super) fn translate_service(&mut self, name: &ObjectName, delta: &mut Delta) {
        let Ok(key) = ServiceName::new(joined(&[&name.namespace, &name.name])) else { return };
        let made =
            self.services.object(name).filter(|s| s.ignored.is_empty()).map(|s| self.service(name, &key, s));
        delta.services.insert((self.vpc.clone(), key), made.map(Arc::new));
    }

    fn service(&self, name: &ObjectName, key: &ServiceName, from: &LoadBalancer) -> Service {
        Service {
            vpc: self.vpc.clone(),
            name: key.clone(),
            ports: from.ports.iter().map(|p| self.port(name, p)).collect(),
            cluster_ips: from.cluster_ips.iter().copied().collect(),
            external_ips: from.external_ips.iter().copied().collect(),
            load_balancer_ips: from.load_balancer_ips.iter().copied().collect(),
            affinity: from.affinity,
            internal_local: from.internal_local,
            external_local: from.external_local,
            source_ranges: from.source_ranges.clone(),
            health_check_port: from.health_check_port,
        }
    }

    fn port(&self, service: &ObjectName, port: &LoadBalancerPort) -> ServicePort {
        let mut backends: BTreeMap<(IpAddr, u16), Backend> = BTreeMap::new();
        let slices = self.slices_of.get(service).into_iter().flat_map(|names| names.keys());
        let slices =
            slices.filter_map(|name| self.slices.object(&ObjectName::new(&service.namespace, &**name)));
        for slice in slices {
            for own in slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol) {
                for endpoint in &slice.endpoints {
                    let backend = Backend {
                        node: endpoint.node.clone(),
                        state: endpoint.state,
                        zones: endpoint.zones.clone(),
                        nodes: endpoint.nodes.clone(),
                    };
                    // While a Pod moves between slices it is in both: the better word counts.
                    let place =
                        backends.entry((endpoint.address, own.port)).or_insert_with(|| backend.clone());
                    if backend.state < place.state {
                        *place = backend;
                    }
                }
            }
        }
        ServicePort {
            name: port.port_name(),
            protocol: port.protocol,
            port: port.port,
            node_port: port.node_port,
            host_addresses: BTreeSet::new(),
            backends: backends.into_iter().collect(),
        }
    }
}

/// The service that stands for a local Pod's host ports, once its addresses are known.
#[must_use]
pub fn host_ports(
    vpc: &VpcName,
    node: &NodeName,
    node_addresses: &[IpAddr],
    pod: &LocalPod,
    ips: &[IpAddr],
) -> Option<Service> {
    let name = ServiceName::new(joined(&["hostport", pod.key.name.as_str()])).ok()?;
    let mut ports = Vec::new();
    for port in &pod.host_ports {
        for ip in ips {
            let of_family = |a: &&IpAddr| a.is_ipv4() == ip.is_ipv4();
            let host_addresses: BTreeSet<IpAddr> = match &port.address {
                Some(address) => Some(address).into_iter().filter(of_family).copied().collect(),
                None => node_addresses.iter().filter(of_family).copied().collect(),
            };
            if host_addresses.is_empty() {
                continue;
            }
            let backend = Backend {
                node: Some(node.clone()),
                state: BackendState::Ready,
                zones: BTreeSet::new(),
                nodes: BTreeSet::new(),
            };
            ports.push(ServicePort {
                name: None,
                protocol: port.protocol,
                port: port.host_port,
                node_port: None,
                host_addresses,
                backends: [((*ip, port.port), backend)].into(),
            });
        }
    }
    (!ports.is_empty()).then(|| Service {
        vpc: vpc.clone(),
        name,
        ports,
        cluster_ips: BTreeSet::new(),
        external_ips: BTreeSet::new(),
        load_balancer_ips: BTreeSet::new(),
        affinity: None,
        internal_local: false,
        external_local: false,
        source_ranges: Vec::new(),
        health_check_port: None,
    })
}
