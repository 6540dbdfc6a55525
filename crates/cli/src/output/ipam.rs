//! Address pools and addresses in use.

use flowloom_api::v1::IpamReport;

use super::View;
use super::table::{Cell, Table, Tone};
use super::time::span;

pub(crate) fn pools(report: &IpamReport, view: View) -> String {
    let mut t = Table::new(
        view,
        &["VPC", "SUBNET", "RANGE", "GATEWAY", "ALLOCATES", "CAPACITY", "AVAILABLE"],
        &["USED", "COOLING"],
    );
    for p in &report.pools {
        let cooling = p.used.iter().filter(|a| a.cooling_ms.is_some()).count();
        let tone = if p.allocates && p.available == 0 { Tone::Bad } else { Tone::Plain };
        t.row([
            Cell::from(&p.vpc),
            Cell::from(&p.subnet),
            Cell::from(&p.cidr),
            p.gateway.map(|g| g.to_string()).unwrap_or_default().into(),
            (if p.allocates { "yes" } else { "no" }).into(),
            amount(p.capacity).into(),
            Cell::new(amount(p.available), tone),
            (p.used.len() - cooling).into(),
            cooling.into(),
        ]);
    }
    t.render()
}

pub(crate) fn addresses(report: &IpamReport, view: View) -> String {
    let mut t = Table::new(view, &["VPC", "SUBNET", "ADDRESS", "OWNER"], &["ATTACHMENT"]);
    for p in &report.pools {
        for a in &p.used {
            let owner = match a.cooling_ms {
                Some(ms) => Cell::new(format!("released, free in {}", span(ms.div_ceil(1000))), Tone::Dim),
                None => Cell::from(&a.endpoint),
            };
            t.row([
                Cell::from(&p.vpc),
                Cell::from(&p.subnet),
                a.address.into(),
                owner,
                Cell::from(&a.attachment),
            ]);
        }
    }
    t.render()
}

/// The counter saturates; nobody counts a /64.
fn amount(n: u64) -> String {
    if n == u64::MAX { "2^64+".to_owned() } else { n.to_string() }
}
