//! Traces.

use std::fmt::Write;

use flowloom_api::v1::TraceReport;

use super::View;
use super::table::{paint, printable, verdict_tone};

pub(crate) fn report(r: &TraceReport, view: View) -> String {
    let mut text = format!("{}\n", printable(&r.packet));
    let width = r.steps.iter().map(|s| s.step.len()).max().unwrap_or(0);
    for (i, s) in r.steps.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{:>3}  {:width$}  {}", i + 1, printable(&s.step), printable(&s.text));
        if let Some(v) = s.verdict {
            let _ = write!(text, "  {}", paint(v.name(), verdict_tone(v), view));
        }
        if let Some(rule) = &s.rule {
            let _ = write!(text, " by {}", super::policy::rule(Some(rule)));
        }
        if view.wide {
            let [a, b, c] = s.numbers;
            let _ = write!(text, "  [{a} {b} {c}]");
        }
        text.push('\n');
    }
    let reason = r.reason.as_ref().map(|r| format!(" ({})", printable(r))).unwrap_or_default();
    let _ = writeln!(
        text,
        "{}{reason}: {}",
        paint(&r.outcome.to_uppercase(), verdict_tone(r.verdict), view),
        printable(&r.summary)
    );
    if view.wide {
        let _ = writeln!(text, "{} ns", r.duration_ns);
    }
    text
}
