//! Kubernetes as the agent sees it.

use flowloom_api::v1::KubernetesStatus;

use super::View;
use super::table::{Cell, Pairs, Table, Tone};
use super::time::{now_ms, span};

pub(crate) fn status(s: &KubernetesStatus, view: View) -> String {
    let mut p = Pairs::new(view);
    p.add("server", &s.server);
    let synced = if s.synced { Cell::new("complete", Tone::Good) } else { Cell::new("waiting", Tone::Warn) };
    p.add("first lists", synced);
    p.add("pods here", s.local_pods.to_string());
    let mut text = p.render();
    text.push('\n');
    let mut t = Table::new(
        view,
        &["KIND", "OBJECTS", "REFUSED", "HEARD", "CHANGED", "STATE"],
        &["LISTS", "INTERRUPTED"],
    );
    let ago = |at: Option<u64>| {
        at.map_or_else(|| "never".to_owned(), |ms| span(now_ms().saturating_sub(ms) / 1000))
    };
    for k in &s.kinds {
        let state = match (k.error.as_str(), k.listed) {
            ("", true) => Cell::new("watching", Tone::Good),
            ("", false) => Cell::new("listing", Tone::Warn),
            (_, false) if k.optional => Cell::new("not shown", Tone::Plain),
            (error, _) => Cell::new(error, Tone::Bad),
        };
        let refused = Cell::new(k.refused.to_string(), if k.refused > 0 { Tone::Bad } else { Tone::Plain });
        t.row([
            Cell::from(&k.kind),
            k.objects.to_string().into(),
            refused,
            ago(k.heard_ms).into(),
            ago(k.changed_ms).into(),
            state,
            k.lists.to_string().into(),
            k.failures.to_string().into(),
        ]);
    }
    text.push_str(&t.render());
    if !s.faults.is_empty() {
        text.push('\n');
        let mut t = Table::new(view, &["OBJECT", "NAME", "REASON", "MESSAGE"], &[]);
        for f in &s.faults {
            t.row([
                Cell::from(&f.kind),
                Cell::from(&f.name),
                Cell::new(&f.reason, Tone::Bad),
                Cell::from(&f.message),
            ]);
        }
        text.push_str(&t.render());
    }
    text
}
