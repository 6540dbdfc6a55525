//! Tracked connections.

use std::net::IpAddr;

use flowloom_api::v1::{Connection, ConntrackList, CtJudgement, Named};

use super::View;
use super::table::{Cell, Table, Tone, bytes, verdict_tone};
use super::time::span;

pub(crate) fn many(list: &ConntrackList, view: View) -> String {
    let mut t = Table::new(
        view,
        &["VPC", "PROTOCOL", "SOURCE", "DESTINATION", "STATE", "EGRESS", "INGRESS", "IDLE", "EXPIRES"],
        &["AGE", "PACKETS", "BYTES", "EGRESS-RULE", "INGRESS-RULE", "FLAGS"],
    );
    for c in &list.connections {
        t.row([
            Cell::from(&c.vpc),
            Cell::from(&c.protocol),
            side(c.src, c.src_port, c.src_endpoint.as_ref()).into(),
            side(c.dst, c.dst_port, c.dst_endpoint.as_ref()).into(),
            Cell::from(&c.state),
            judged(c.egress.as_ref()),
            judged(c.ingress.as_ref()),
            span(c.idle_s).into(),
            span(c.expires_s).into(),
            span(c.age_s).into(),
            both(c, |c| c.packets, u64::to_string).into(),
            both(c, |c| c.bytes, |n| bytes(*n)).into(),
            ruled(c.egress.as_ref()).into(),
            ruled(c.ingress.as_ref()).into(),
            c.flags.join(",").into(),
        ]);
    }
    t.render()
}

/// `web-1 10.0.0.5:80`, `[fd00::5]:80`.
pub(crate) fn side(address: IpAddr, port: u16, name: Option<&Named>) -> String {
    let address = match (address, port) {
        (address, 0) => address.to_string(),
        (IpAddr::V4(a), port) => format!("{a}:{port}"),
        (IpAddr::V6(a), port) => format!("[{a}]:{port}"),
    };
    match name {
        Some(name) => format!("{name} {address}"),
        None => address,
    }
}

fn judged(j: Option<&CtJudgement>) -> Cell {
    match j {
        Some(j) => Cell::new(j.verdict.name(), verdict_tone(j.verdict)),
        None => Cell::new("", Tone::Dim),
    }
}

fn ruled(j: Option<&CtJudgement>) -> String {
    j.map(|j| super::policy::rule(Some(&j.rule))).unwrap_or_default()
}

fn both(c: &Connection, of: impl Fn(&Connection) -> [u64; 2], show: impl Fn(&u64) -> String) -> String {
    let [there, back] = of(c);
    format!("{}/{}", show(&there), show(&back))
}
