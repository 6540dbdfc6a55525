//! Drop counters.

use flowloom_api::v1::DropList;

use super::View;
use super::table::{Cell, Table, Tone, bytes};

pub(crate) fn many(list: &DropList, view: View) -> String {
    let mut t =
        Table::new(view, &["VPC", "ENDPOINT", "DIRECTION", "REASON", "PACKETS", "BYTES"], &["MEANING"]);
    for d in &list.drops {
        t.row([
            d.vpc.as_ref().map(ToString::to_string).unwrap_or_default().into(),
            d.endpoint.as_ref().map(ToString::to_string).unwrap_or_default().into(),
            d.direction.name().into(),
            Cell::new(&d.reason, Tone::Bad),
            d.packets.into(),
            bytes(d.bytes).into(),
            Cell::from(&d.text),
        ]);
    }
    t.render()
}
