//! Changes of policies.

use flowloom_api::v1::{ChangeSource, DirectionChange, PolicyHistory};

use super::View;
use super::table::{Cell, Table, Tone, number};
use super::time::date_time;

pub(crate) fn changes(history: &PolicyHistory, view: View) -> String {
    let mut t = Table::new(
        view,
        &["TIME", "ENDPOINT", "WHO", "REVISION", "ENTRIES", "RESULT"],
        &["NUMBER", "SLOTS", "DETAIL"],
    );
    for c in &history.changes {
        let (who, detail) = source(&c.source);
        let revision = match c.previous_revision {
            0 => c.attempted_revision.to_string(),
            previous => format!("{previous} -> {}", c.attempted_revision),
        };
        let result = match c.error.as_str() {
            "" => Cell::new("in force", Tone::Good),
            error => Cell::new(format!("refused: {error}"), Tone::Bad),
        };
        let each = |text: fn(&DirectionChange) -> String| -> String {
            let list: Vec<_> = c.directions.iter().map(text).filter(|t| !t.is_empty()).collect();
            list.join(", ")
        };
        t.row([
            date_time(c.time_ms).into(),
            Cell::from(&c.endpoint),
            who.into(),
            revision.into(),
            each(entries).into(),
            result,
            number(u32::try_from(c.number).unwrap_or(u32::MAX)).into(),
            each(|d| format!("{} {}", d.direction.name(), d.slot)).into(),
            detail.into(),
        ]);
    }
    t.render()
}

fn entries(d: &DirectionChange) -> String {
    let Some(n) = d.entries else { return String::new() };
    format!("{} +{} ~{} -{}", d.direction.name(), n.added, n.updated, n.removed)
}

/// Who, and more about it.
fn source(source: &ChangeSource) -> (String, String) {
    match source {
        ChangeSource::Document { generation, digest } => {
            (format!("document {generation}"), format!("digest {digest}"))
        }
        ChangeSource::Kubernetes => ("kubernetes".to_owned(), String::new()),
        ChangeSource::Cni { container_id, ifname } => {
            ("cni".to_owned(), format!("container {container_id}, interface {ifname}"))
        }
        ChangeSource::Operator { action, reason } => (format!("operator: {action}"), reason.clone()),
        ChangeSource::Agent => ("agent".to_owned(), String::new()),
    }
}
