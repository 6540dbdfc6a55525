//! Readers of load balancers.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::objects::vpc_of;
use super::reader::{Path, Reader};
use super::schema;
use super::tree::Tree;
use crate::{Backend, BackendState, PackedMap, Protocol, Reason, Service, ServicePort};

/// Seconds of affinity when the document names none.
const AFFINITY: u32 = 10_800;

const PROTOCOLS: [(&str, Protocol); 3] =
    [("tcp", Protocol::Tcp), ("udp", Protocol::Udp), ("sctp", Protocol::Sctp)];

pub(super) fn load_balancer(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Service> {
    let f = r.fields(path, tree, &schema::LOAD_BALANCER)?;
    let name = r.at(path, &f, "name", Reader::name);
    let vpc = vpc_of(r, path, &f);
    let vips = r.one_or_many(path, &f, ["vip", "vips"], Reader::ip);
    if !f.has("vip") && !f.has("vips") {
        r.missing(path, &f, "vip").message = "vip or vips is required: what clients ask for".into();
    }
    let ports = r.at(path, &f, "ports", |r, p, t| Some(r.each(p, Some(t), port))).unwrap_or_default();
    let affine = r.at(path, &f, "session_affinity", Reader::boolean).unwrap_or(false);
    let timeout = r.at(path, &f, "affinity_timeout", |r, p, t| r.number(p, t, 1..=u32::from(u16::MAX)));
    if let (false, Some(t)) = (affine, f.find("affinity_timeout")) {
        let message = "affinity_timeout needs session_affinity: true";
        r.fault(Reason::ConflictingFields, &path.field("affinity_timeout"), t, message);
    }
    Some(Service {
        vpc: vpc?,
        name: name?,
        ports,
        cluster_ips: vips.into_iter().collect(),
        external_ips: BTreeSet::new(),
        load_balancer_ips: BTreeSet::new(),
        affinity: affine.then(|| timeout.unwrap_or(AFFINITY)),
        internal_local: false,
        external_local: false,
        source_ranges: Vec::new(),
        health_check_port: None,
    })
}

fn port(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<ServicePort> {
    let f = r.fields(path, tree, &schema::LOAD_BALANCER_PORT)?;
    let name = r.at(path, &f, "name", Reader::name);
    let port = r.at(path, &f, "port", |r, p, t| r.number(p, t, 1..=u16::MAX));
    let protocol = r.at(path, &f, "protocol", |r, p, t| r.choice(p, t, &PROTOCOLS)).unwrap_or(Protocol::Tcp);
    let mut backends: PackedMap<(IpAddr, u16), Backend> = PackedMap::new();
    r.at(path, &f, "backends", |r, p, t| {
        r.each(p, Some(t), |r, p, t| {
            let (at, backend) = backend(r, p, t)?;
            if backends.insert(at, backend).is_some() {
                r.fault(Reason::DuplicateField, p, t, "is in the list twice; keep one");
            }
            Some(())
        });
        Some(())
    });
    Some(ServicePort {
        name,
        protocol,
        port: port?,
        node_port: None,
        host_addresses: BTreeSet::new(),
        backends,
    })
}

fn backend(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<((IpAddr, u16), Backend)> {
    let f = r.fields(path, tree, &schema::LOAD_BALANCER_BACKEND)?;
    let ip = r.at(path, &f, "ip", Reader::ip);
    let port = r.at(path, &f, "port", |r, p, t| r.number(p, t, 1..=u16::MAX));
    let healthy = r.at(path, &f, "healthy", Reader::boolean).unwrap_or(true);
    let state = if healthy { BackendState::Ready } else { BackendState::NotReady };
    let backend = Backend { node: None, state, zones: BTreeSet::new(), nodes: BTreeSet::new() };
    Some(((ip?, port?), backend))
}
