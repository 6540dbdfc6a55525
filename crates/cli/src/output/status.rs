//! The agent's state and conditions.

use std::fmt::Write;

use flowloom_api::v1::{Condition, Status};

use super::View;
use super::table::{Cell, Pairs, Table, Tone, printable};
use super::time::{date_time, micros, now_ms, span};

pub(crate) fn status(s: &Status, view: View) -> String {
    let mut p = Pairs::new(view);
    let ready = if s.ready { Cell::new("ready", Tone::Good) } else { Cell::new("not ready", Tone::Warn) };
    p.add("node", &s.node);
    p.add("agent", ready);
    p.add("version", format!("{}, map layout {}, forwarding {}", s.version, s.abi_version, s.forwarding));
    p.add(
        "up",
        format!("{} (since {})", span(now_ms().saturating_sub(s.started_ms) / 1000), date_time(s.started_ms)),
    );
    let d = &s.document;
    p.add("document", &d.path);
    let behind = d.applied_generation < d.generation;
    let applied =
        format!("generation {} of {}, loaded {}", d.applied_generation, d.generation, date_time(d.loaded_ms));
    p.add("in force", Cell::new(applied, if behind { Tone::Warn } else { Tone::Plain }));
    if !d.error.is_empty() {
        p.add("refused", Cell::new(&d.error, Tone::Bad));
    }
    let e = &s.endpoints;
    p.add(
        "endpoints",
        Cell::new(
            format!("{} ({} ready, {} waiting, {} failed)", e.total, e.ready, e.waiting, e.failed),
            if e.failed > 0 { Tone::Bad } else { Tone::Plain },
        ),
    );
    let c = &s.conntrack;
    p.add("connections", format!("{} of {}, {} swept", c.established, c.capacity, c.swept));
    p.add("events", format!("{} read, {} lost, {} streams", s.events.read, s.events.lost, s.events.streams));
    let r = &s.reconcile;
    p.add(
        "reconcile",
        format!(
            "{} passes, last {} with {} writes, {} writes in all",
            r.passes,
            micros(r.last_duration_us),
            r.last_writes,
            r.total_writes
        ),
    );
    let mut text = p.render();
    for e in &r.errors {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "error: {}", printable(e));
    }
    if !s.degraded.is_empty() {
        text.push('\n');
        let mut t = Table::new(view, &["DEGRADED", "NAME", "REASON", "MESSAGE"], &["SINCE"]);
        for o in &s.degraded {
            for c in &o.conditions {
                t.row([
                    Cell::from(&o.kind),
                    Cell::from(&o.name),
                    Cell::new(&c.reason, Tone::Bad),
                    Cell::from(&c.message),
                    date_time(c.last_transition_ms).into(),
                ]);
            }
        }
        text.push_str(&t.render());
    }
    text
}

/// A table of conditions after a blank line; nothing when there are none.
pub(crate) fn conditions(conditions: &[Condition], view: View) -> String {
    if conditions.is_empty() {
        return String::new();
    }
    let mut t = Table::new(view, &["CONDITION", "STATUS", "REASON", "MESSAGE"], &["SINCE"]);
    for c in conditions {
        t.row([
            Cell::from(&c.kind),
            match (c.status, c.kind.as_str()) {
                (true, "Quarantined" | "Frozen") => Cell::new("true", Tone::Warn),
                (true, _) => Cell::new("true", Tone::Good),
                (false, _) => Cell::new("false", Tone::Bad),
            },
            Cell::from(&c.reason),
            Cell::from(&c.message),
            date_time(c.last_transition_ms).into(),
        ]);
    }
    format!("\n{}", t.render())
}
