//! Events: one line each, so that they can be followed.

use flowloom_api::v1::{Event, EventKind, Named, StreamItem};

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
        (None, EventKind::Verdict) => "decided".to_owned(),
        (None, EventKind::Drop) => "dropped".to_owned(),
    };
    let mut text = format!(
        "{} {verdict} {:10} {} {} {what}",
        clock(e.time_ns),
        printable(&vpc(&e.vpc)),
        packet(e),
        e.direction.name(),
    );
    if let Some(rule) = &e.rule {
        text.push_str(&format!(" by {}", super::policy::rule(Some(rule))));
    }
    // Said only where neither side says it: a spoofed source, a packet that is not IP.
    if let Some(at) = &e.endpoint
        && e.src_endpoint.as_ref() != Some(at)
        && e.dst_endpoint.as_ref() != Some(at)
    {
        text.push_str(&printable(&format!(" at {at}")));
    }
    if view.wide {
        text.push_str(&printable(&format!(
            ", {} {} bytes, identities {}->{}, seq {}",
            e.hook, e.len, e.src_identity, e.dst_identity, e.seq
        )));
        if e.rate_limited > 0 {
            text.push_str(&format!(" ({} not reported)", e.rate_limited));
        }
    }
    text
}

/// `-` where a device belongs to nobody.
fn vpc(vpc: &Named) -> String {
    if vpc.name.is_empty() && vpc.number == 0 { "-".to_owned() } else { vpc.to_string() }
}

fn packet(e: &Event) -> String {
    if e.family == 0 {
        return "(not IP)".to_owned();
    }
    let protocol = match (e.icmp, &e.tcp_flags) {
        (Some((kind, code)), _) => format!("{}/{kind}/{code}", e.protocol),
        (None, Some(flags)) => format!("{}[{flags}]", e.protocol),
        (None, None) => e.protocol.clone(),
    };
    printable(&format!(
        "{} -> {} {protocol}",
        side(e.src, e.src_port, e.src_endpoint.as_ref()),
        side(e.dst, e.dst_port, e.dst_endpoint.as_ref()),
    ))
}
