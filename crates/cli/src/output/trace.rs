//! Traces.

use std::fmt::Write;

use flowloom_api::v1::TraceReport;

use super::View;
use super::policy::backends;
use super::table::{Tone, paint, printable, verdict_tone};

pub(crate) fn report(r: &TraceReport, view: View) -> String {
    let mut text = format!("{}\n", printable(&r.packet));
    if let Some(service) = &r.service {
        text.push_str(&backends(service, view));
    }
    let width = r.steps.iter().map(|s| s.step.len()).max().unwrap_or(0);
    for (i, s) in r.steps.iter().enumerate() {
        let tone = s.verdict.map_or(Tone::Plain, verdict_tone);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{:>3}  {:width$}  {}",
            i + 1,
            printable(&s.step),
            paint(&printable(&s.text), tone, view)
        );
        if view.wide {
            let [a, b, c] = s.numbers;
            let _ = write!(text, "  [{a} {b} {c}]");
        }
        text.push('\n');
    }
    let reason = r.reason.as_ref().map(|r| format!(" ({})", printable(r))).unwrap_or_default();
    // The last step often says it all.
    let said = r.steps.last().is_some_and(|s| s.text == r.summary);
    let summary = if said { String::new() } else { format!(": {}", printable(&r.summary)) };
    let _ = writeln!(
        text,
        "{}{reason}{summary}",
        paint(&r.outcome.to_uppercase(), verdict_tone(r.verdict), view)
    );
    if view.wide {
        let _ = writeln!(text, "{} ns", r.duration_ns);
    }
    text
}
