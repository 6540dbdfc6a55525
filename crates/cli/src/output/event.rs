//! Events: one line each, so that they can be followed.

use flowloom_api::v1::{Event, EventKind, StreamItem};

use super::View;
use super::conntrack::side;
use super::table::{Tone, paint, printable, verdict_tone};
use super::time::clock;

pub(crate) fn line(item: &StreamItem, view: View) -> String {
    match item {
        StreamItem::Event(e) => event(e, view),
        StreamItem::Lost { count } => {
            paint(&format!("-- {count} events lost: this reader is too slow"), Tone::Warn, view)
        }
    }
}

fn event(e: &Event, view: View) -> String {
    let verdict = paint(&format!("{:6}", e.verdict.name()), verdict_tone(e.verdict), view);
    let what = match (&e.reason, e.kind) {
        (Some(reason), _) => printable(reason),
        (None, EventKind::Verdict) => "new connection".to_owned(),
        (None, EventKind::Drop) => "drop".to_owned(),
    };
    let mut text = format!(
        "{} {verdict} {:10} {} -> {} {} {} {what}",
        clock(e.time_ns),
        printable(&e.vpc.to_string()),
        printable(&side(e.src, e.src_port, e.src_endpoint.as_ref())),
        printable(&side(e.dst, e.dst_port, e.dst_endpoint.as_ref())),
        packet(e),
        e.direction.name(),
    );
    if let Some(rule) = &e.rule {
        text.push_str(&format!(" by {}", super::policy::rule(Some(rule))));
    }
    if view.wide {
        let endpoint = e.endpoint.as_ref().map(ToString::to_string).unwrap_or_else(|| "-".to_owned());
        text.push_str(&printable(&format!(
            " at {endpoint} {} {} bytes identities {}->{} seq {}",
            e.hook, e.len, e.src_identity, e.dst_identity, e.seq
        )));
        if e.rate_limited > 0 {
            text.push_str(&format!(" ({} not reported)", e.rate_limited));
        }
    }
    text
}

fn packet(e: &Event) -> String {
    let protocol = printable(&e.protocol);
    match (e.icmp, &e.tcp_flags) {
        (Some((kind, code)), _) => format!("{protocol}/{kind}/{code}"),
        (None, Some(flags)) => format!("{protocol}[{}]", printable(flags)),
        (None, None) => protocol,
    }
}
