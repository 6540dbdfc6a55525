//! Requests of container runtimes.

use std::fmt::Write;

use flowloom_api::v1::{CniReport, CniVerb};

use super::View;
use super::table::{Cell, Pairs, Table, Tone, printable};
use super::time::micros;

pub(crate) fn report(r: &CniReport, view: View) -> String {
    let mut p = Pairs::new(view);
    let add = if r.ready { Cell::new("served", Tone::Good) } else { Cell::new(&r.message, Tone::Bad) };
    p.add("ADD", add);
    p.add("attachments", format!("{}, {} being made", r.attachments, r.adding));
    let q = &r.queue;
    let queue =
        format!("{} waiting, {} done since start, of those {} outdated", q.waiting, q.replayed, q.outdated);
    p.add("queued DELs", Cell::new(queue, if q.waiting > 0 { Tone::Warn } else { Tone::Plain }));
    if q.unreadable > 0 {
        p.add("unreadable", Cell::new(format!("{} in {}", q.unreadable, q.path), Tone::Bad));
    }
    if let Some(c) = &r.conflist {
        let tone = if c.installed { Tone::Plain } else { Tone::Warn };
        p.add(
            "configuration",
            Cell::new(format!("{}{}", c.path, if c.installed { "" } else { " (absent)" }), tone),
        );
    }
    let mut text = p.render();
    if let Some(c) = r.conflist.as_ref().filter(|c| !c.error.is_empty()) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "error: {}", printable(&c.error));
    }
    text.push('\n');
    let mut t =
        Table::new(view, &["VERB", "REQUESTS", "FAILED", "MEDIAN", "P99", "LONGEST"], &["MEAN", "ERRORS"]);
    for v in &r.verbs {
        let failed: u64 = v.errors.values().sum();
        let errors: Vec<String> = v.errors.iter().map(|(code, n)| format!("{code} {n}")).collect();
        let mean = v.sum_us.checked_div(v.count).map(micros).unwrap_or_default();
        t.row([
            Cell::from(&v.verb),
            v.count.into(),
            Cell::new(failed.to_string(), if failed > 0 { Tone::Warn } else { Tone::Plain }),
            bound(v, 0.5).into(),
            bound(v, 0.99).into(),
            (if v.count == 0 { String::new() } else { micros(v.max_us) }).into(),
            mean.into(),
            errors.join(", ").into(),
        ]);
    }
    text.push_str(&t.render());
    text
}

/// Durations are counted in buckets: what is known is a bound.
fn bound(v: &CniVerb, share: f64) -> String {
    v.quantile_us(share).map(|us| format!("<= {}", micros(us))).unwrap_or_default()
}
