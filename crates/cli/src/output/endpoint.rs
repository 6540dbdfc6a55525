//! Endpoints.

use flowloom_api::v1::{EndpointInfo, EndpointList, EndpointSource};

use super::View;
use super::table::{Cell, Pairs, Table, bytes, labels, list, number, state};

pub(crate) fn many(endpoints: &EndpointList, view: View) -> String {
    let mut t = Table::new(
        view,
        &["VPC", "NAME", "STATE", "ADDRESSES", "GROUPS", "SOURCE", "REV"],
        &["ID", "IDENTITY", "MAC", "DEVICE", "DELIVERY", "EGRESS", "INGRESS", "CONDITIONS", "LABELS"],
    );
    for e in &endpoints.endpoints {
        t.row([
            Cell::from(&e.vpc),
            Cell::from(&e.endpoint),
            state(e.state),
            list(&e.ips).into(),
            list(&e.security_groups).into(),
            source(e.source).into(),
            number(e.revision).into(),
            number(e.endpoint.number).into(),
            number(e.identity).into(),
            Cell::from(&e.mac),
            e.device.as_ref().map(ToString::to_string).unwrap_or_default().into(),
            Cell::from(&e.delivery),
            number(e.egress_slot).into(),
            number(e.ingress_slot).into(),
            list(e.conditions.iter().map(|c| if c.status { &c.kind } else { &c.reason }).collect::<Vec<_>>())
                .into(),
            labels(&e.labels).into(),
        ]);
    }
    t.render()
}

pub(crate) fn one(e: &EndpointInfo, view: View) -> String {
    let mut p = Pairs::new(view);
    p.add("endpoint", format!("{}/{}", e.vpc, e.endpoint));
    p.add("state", state(e.state));
    p.add("source", source(e.source));
    p.add("subnet", &e.subnet);
    p.add("addresses", list(&e.ips));
    p.add("gateways", list(&e.gateways));
    p.add("mac", &e.mac);
    p.add("groups", list(&e.security_groups));
    p.add("labels", labels(&e.labels));
    p.add("identity", number(e.identity));
    p.add(
        "policy",
        format!("revision {}, egress slot {}, ingress slot {}", e.revision, e.egress_slot, e.ingress_slot),
    );
    p.add_some(
        "device",
        e.device.as_ref().map(|d| format!("{d} (ifindex {}), delivery {}", d.number, e.delivery)),
    );
    p.add_some("netns", e.netns.as_ref());
    p.add_some("interface", e.interface.as_ref());
    p.add_some(
        "attachment",
        e.attachment.as_ref().map(|a| format!("{}/{} in network {}", a.container_id, a.ifname, a.network)),
    );
    let t = &e.traffic;
    p.add("sent", format!("{} packets, {}", t.egress_packets, bytes(t.egress_bytes)));
    p.add("received", format!("{} packets, {}", t.ingress_packets, bytes(t.ingress_bytes)));
    p.add("numbers", format!("vpc {}, endpoint {}", e.vpc.number, e.endpoint.number));
    let mut text = p.render();
    text.push_str(&super::status::conditions(&e.conditions, view));
    text
}

fn source(s: EndpointSource) -> &'static str {
    match s {
        EndpointSource::Document => "document",
        EndpointSource::Cni => "cni",
    }
}
