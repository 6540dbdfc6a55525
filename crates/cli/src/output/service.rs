//! Services.

use std::fmt::Write;

use flowloom_api::v1::{FrontendInfo, ServiceExplanation, ServiceInfo, ServiceList, ServicePortInfo};

use super::View;
use super::table::{Cell, Pairs, Table, Tone, list, number, paint, printable};

pub(crate) fn many(services: &ServiceList, view: View) -> String {
    let mut t = Table::new(
        view,
        &["VPC", "NAME", "ADDRESSES", "PORTS", "READY"],
        &["EXTERNAL", "AFFINITY", "POLICIES", "NUMBERS"],
    );
    for s in &services.services {
        let (ready, all) = s.ports.iter().fold((0, 0), |(r, a), p| (r + p.ready, a + p.backends));
        let tone = if ready == 0 { Tone::Bad } else { Tone::Plain };
        t.row([
            Cell::from(&s.vpc),
            Cell::from(&s.name),
            list(&s.cluster_ips).into(),
            list(s.ports.iter().map(port)).into(),
            Cell::new(format!("{ready}/{all}"), tone),
            list(s.load_balancer_ips.iter().chain(&s.external_ips)).into(),
            s.affinity_seconds.map(|s| format!("{s}s")).unwrap_or_default().into(),
            policies(s).into(),
            list(s.ports.iter().map(|p| number(p.number))).into(),
        ]);
    }
    t.render()
}

/// `80/tcp`, `80:30080/tcp` with a node port.
fn port(p: &ServicePortInfo) -> String {
    match p.node_port {
        Some(node) => format!("{}:{node}/{}", p.port, p.protocol),
        None => format!("{}/{}", p.port, p.protocol),
    }
}

fn policies(s: &ServiceInfo) -> String {
    let word = |local: bool| if local { "local" } else { "cluster" };
    format!("internal {}, external {}", word(s.internal_local), word(s.external_local))
}

pub(crate) fn one(s: &ServiceInfo, view: View) -> String {
    let mut p = Pairs::new(view);
    p.add("service", format!("{}/{}", s.vpc, s.name));
    p.add("addresses", list(&s.cluster_ips));
    p.add("external", list(&s.external_ips));
    p.add("balanced", list(&s.load_balancer_ips));
    p.add("sources", if s.source_ranges.is_empty() { "everyone".to_owned() } else { list(&s.source_ranges) });
    p.add("policies", policies(s));
    p.add_some("affinity", s.affinity_seconds.map(|s| format!("{s} s")));
    p.add_some("health port", s.health_check_port);
    let mut text = p.render();
    let mut t = Table::new(view, &["PORT", "NAME", "READY", "HOST-ADDRESSES"], &["NUMBER"]);
    for p in &s.ports {
        t.row([
            port(p).into(),
            p.name.clone().unwrap_or_default().into(),
            format!("{}/{}", p.ready, p.backends).into(),
            list(&p.host_addresses).into(),
            number(p.number).into(),
        ]);
    }
    text.push('\n');
    text.push_str(&t.render());
    text.push_str(&super::status::conditions(&s.conditions, view));
    text
}

pub(crate) fn explanation(e: &ServiceExplanation, view: View) -> String {
    let zone = e.zone.as_ref().map(|z| format!(", zone {z}")).unwrap_or_default();
    let mut text = format!(
        "{}/{} on node {}{}\n",
        printable(&e.service.vpc.to_string()),
        printable(&e.service.name),
        printable(&e.node),
        printable(&zone)
    );
    if !e.here {
        text.push_str("its VPC has no endpoint on this node: nobody here can ask for it\n");
    } else if e.frontends.is_empty() {
        text.push_str("it has no address that clients could ask for\n");
    }
    for f in &e.frontends {
        text.push('\n');
        frontend(&mut text, f, view);
    }
    text.push_str(&super::status::conditions(&e.service.conditions, view));
    text
}

fn frontend(text: &mut String, f: &FrontendInfo, view: View) {
    let used = f.backends.iter().filter(|b| b.used).count();
    let answer = match (&f.taken_by, f.answer.as_str()) {
        (Some(other), _) => paint(&format!("belongs to service {}", printable(other)), Tone::Bad, view),
        (None, "backend") => format!("{used} of {} backends", f.backends.len()),
        (None, "silence") => paint("dropped: no backend here, other nodes have some", Tone::Bad, view),
        (None, _) => paint("refused: no backend", Tone::Bad, view),
    };
    let policy = if f.local_policy { ", traffic policy Local" } else { "" };
    let from = if f.source_ranges.is_empty() {
        String::new()
    } else {
        format!(", only from {}", printable(&list(&f.source_ranges)))
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{} {}/{} from {} ({}{policy}{from}): {answer}",
        f.ip,
        f.port,
        printable(&f.protocol),
        printable(&f.scope),
        printable(&f.kind),
    );
    if f.backends.is_empty() {
        return;
    }
    let mut t = Table::new(view, &["  BACKEND", "NODE", "USED", "WHY"], &["ENDPOINT", "ZONES", "NODES"]);
    for b in &f.backends {
        let used = if b.used { Cell::new("yes", Tone::Good) } else { Cell::new("no", Tone::Dim) };
        t.row([
            format!("  {}", std::net::SocketAddr::new(b.ip, b.port)).into(),
            b.node.clone().unwrap_or_default().into(),
            used,
            Cell::from(&b.why),
            b.endpoint.clone().unwrap_or_default().into(),
            list(&b.zones).into(),
            list(&b.nodes).into(),
        ]);
    }
    text.push_str(&t.render());
}
