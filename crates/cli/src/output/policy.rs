//! Policies.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use flowloom_api::v1::{
    Explanation, Judgement, Named, PeerInfo, PolicyEntryList, PolicyHold, PolicyWait, RuleList, ServiceSide,
    Verdict,
};

use super::View;
use super::table::{Cell, Table, Tone, bytes, count, labels, list, paint, printable, verdict, verdict_tone};
use super::time::micros;

pub(crate) fn entries(list: &PolicyEntryList, view: View) -> String {
    let mut text = String::new();
    for slot in &list.slots {
        if !text.is_empty() {
            text.push('\n');
        }
        let named = |name: &String| match slot.held.get(name) {
            Some(word) => format!("{name} ({word})"),
            None => name.clone(),
        };
        let used = match slot.endpoints.as_slice() {
            [] => "no endpoint".to_owned(),
            some => some.iter().map(named).collect::<Vec<_>>().join(", "),
        };
        let _ = writeln!(
            text,
            "slot {} ({}) of {}: {}",
            slot.slot,
            slot.direction.name(),
            printable(&used),
            count(slot.entries.len() as u64, "entry")
        );
        let mut t = Table::new(
            view,
            &["PEER", "PROTOCOL", "PORTS", "VERDICT", "RULE", "FLAGS"],
            &["IDENTITY", "PRECEDENCE", "RULE-ID"],
        );
        for e in &slot.entries {
            let mut flags = Vec::new();
            if e.log {
                flags.push("log");
            }
            if e.stateless {
                flags.push("stateless");
            }
            t.row([
                Cell::from(&e.peer),
                Cell::from(&e.protocol),
                Cell::from(&e.ports),
                verdict(e.verdict),
                Cell::from(&e.rule),
                flags.join(",").into(),
                e.peer.number.into(),
                e.precedence.into(),
                e.rule.number.into(),
            ]);
        }
        text.push_str(&t.render());
    }
    text
}

pub(crate) fn rules(rules: &RuleList, view: View) -> String {
    let mut t = Table::new(view, &["RULE", "HITS", "BYTES"], &["RULE-ID"]);
    for r in &rules.rules {
        t.row([Cell::from(&r.rule), r.hits.into(), bytes(r.bytes).into(), r.rule.number.into()]);
    }
    t.render()
}

pub(crate) fn wait(w: &PolicyWait, _: View) -> String {
    let of = if w.revision == 0 { String::new() } else { format!(", revision {}", w.revision) };
    format!("in force: document generation {}{of} (waited {})\n", w.generation, micros(w.waited_us))
}

pub(crate) fn hold(h: &PolicyHold, _: View) -> String {
    let state = match (&h.quarantine, &h.frozen) {
        (Some(q), _) => {
            let directions = match (q.ingress, q.egress) {
                (true, true) => "ingress and egress",
                (true, false) => "ingress",
                _ => "egress",
            };
            format!("is in quarantine: nothing passes in {directions}")
        }
        (None, Some(f)) if f.rolled_back => {
            format!("is rolled back: the rules of revision {} are in force again", f.revision)
        }
        (None, Some(f)) => format!("is frozen: the rules of revision {} stay in force", f.revision),
        (None, None) => "is released: what its sources say is in force".to_owned(),
    };
    let revision = match h.revision {
        0 => "it is not wired now".to_owned(),
        revision => format!("revision {revision}"),
    };
    let withheld = h.frozen.as_ref().map(|f| f.withheld.as_str()).filter(|w| !w.is_empty());
    let withheld = withheld.map(|w| format!("withheld: {}\n", printable(w))).unwrap_or_default();
    format!("{} {state} ({revision})\n{withheld}", printable(&h.endpoint))
}

pub(crate) fn explanation(e: &Explanation, view: View) -> String {
    let mut text = format!(
        "{}  {}\n",
        paint(&e.verdict.name().to_uppercase(), verdict_tone(e.verdict), view),
        printable(&e.summary)
    );
    if let Some(service) = &e.service {
        text.push('\n');
        text.push_str(&backends(service, view));
    }
    for judgement in [&e.egress, &e.ingress].into_iter().flatten() {
        text.push('\n');
        one_side(&mut text, judgement, view);
    }
    text
}

/// A Service that was asked for: its address, and what becomes of each backend.
pub(crate) fn backends(s: &ServiceSide, view: View) -> String {
    let place = |ip: IpAddr, port: u16| SocketAddr::new(ip, port).to_string();
    let mut text = format!(
        "svc/{} is {} ({}): {}\n",
        printable(&s.service),
        place(s.ip, s.port),
        printable(&s.kind),
        match s.answer.as_str() {
            "refused" => paint("refused: no backend", Tone::Bad, view),
            "silence" => paint("dropped: no backend here, other nodes have some", Tone::Bad, view),
            _ => format!("{} in use", count(s.backends.iter().filter(|b| b.used).count() as u64, "backend")),
        }
    );
    if s.backends.is_empty() {
        return text;
    }
    let mut t = Table::new(view, &["  BACKEND", "ENDPOINT", "NODE", "USED", "POLICY", "WHY"], &[]);
    for b in &s.backends {
        let used = if b.used { Cell::new("yes", Tone::Good) } else { Cell::new("no", Tone::Dim) };
        t.row([
            format!("  {}", place(b.ip, b.port)).into(),
            Cell::from(b.endpoint.as_deref().unwrap_or("-")),
            Cell::from(b.node.as_deref().unwrap_or("-")),
            used,
            b.verdict.map_or_else(|| Cell::from("-"), verdict),
            Cell::from(&b.why),
        ]);
    }
    text.push_str(&t.render());
    text
}

fn one_side(text: &mut String, j: &Judgement, view: View) {
    let rule = rule(j.rule.as_ref());
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{} of {}: {} by {rule}{}",
        j.direction.name(),
        printable(&j.endpoint),
        paint(j.verdict.name(), verdict_tone(j.verdict), view),
        if j.local { "" } else { " (enforced on another node)" },
    );
    let _ = writeln!(text, "  why:    {}", printable(&j.why));
    let _ = writeln!(text, "  peer:   {}", printable(&peer(&j.peer)));
    if let Some(k) = &j.kernel {
        let answer = match k.verdict {
            Some(v) => paint(v.name(), verdict_tone(v), view),
            None => paint("no entry: fails closed", Tone::Bad, view),
        };
        let agrees = k.verdict == Some(j.verdict);
        let note = if agrees { String::new() } else { paint("  DIFFERS FROM THE DOCUMENT", Tone::Bad, view) };
        let _ = writeln!(
            text,
            "  kernel: {answer} by {} (slot {}, identity {}){note}",
            printable(&k.rule.to_string()),
            k.slot,
            k.identity
        );
    }
    if j.considered.is_empty() {
        return;
    }
    let mut t = Table::new(view, &["  TIER", "PRIORITY", "ACTION", "RULE", "MATCHED", "WHY"], &[]);
    for c in &j.considered {
        let matched = if c.matched { Cell::new("yes", Tone::Good) } else { Cell::new("no", Tone::Dim) };
        t.row([
            format!("  {}", c.tier).into(),
            c.priority.into(),
            Cell::from(&c.action),
            Cell::from(&c.rule),
            matched,
            Cell::from(&c.why),
        ]);
    }
    text.push_str(&t.render());
}

/// A rule's name, or that the default decided.
pub(crate) fn rule(rule: Option<&Named>) -> String {
    match rule {
        Some(rule) if rule.number != 0 || !rule.name.is_empty() => printable(&rule.to_string()),
        _ => "the default".to_owned(),
    }
}

fn peer(p: &PeerInfo) -> String {
    let mut parts = vec![format!("{} is identity {}", p.address, p.identity)];
    parts.extend(p.endpoint.as_ref().map(|e| format!("endpoint {e}")));
    if !p.labels.is_empty() {
        parts.push(format!("labels {}", labels(&p.labels)));
    }
    if !p.cidrs.is_empty() {
        parts.push(format!("in {}", list(&p.cidrs)));
    }
    parts.join(", ")
}

/// Whether the packet passes.
pub(crate) fn passes(v: Verdict) -> bool {
    v == Verdict::Allow
}
