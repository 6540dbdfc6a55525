//! Faults of documents, and what an apply did.

use std::fmt::Write;

use flowloom_model::{Fault, ObjectRef};
use serde::Serialize;

use super::View;
use super::table::{Tone, count, paint, printable};

/// What `validate` found in one file.
#[derive(Debug, Serialize)]
pub(crate) struct FileReport {
    pub(crate) file: String,
    pub(crate) ok: bool,
    pub(crate) faults: Vec<Fault>,
    /// Objects by kind; absent when the file has faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) objects: Option<Counts>,
}

/// How many objects of each kind a document has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) nodes: usize,
    pub(crate) vpcs: usize,
    pub(crate) subnets: usize,
    pub(crate) endpoints: usize,
    pub(crate) security_groups: usize,
    pub(crate) cidr_groups: usize,
    pub(crate) load_balancers: usize,
}

impl Counts {
    pub(crate) fn of(w: &flowloom_model::World) -> Self {
        Self {
            nodes: w.nodes.len(),
            vpcs: w.vpcs.len(),
            subnets: w.subnets.len(),
            endpoints: w.endpoints.len(),
            security_groups: w.security_groups.len(),
            cidr_groups: w.cidr_groups.len(),
            load_balancers: w.services.len(),
        }
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = [
            (self.nodes, "node"),
            (self.vpcs, "VPC"),
            (self.subnets, "subnet"),
            (self.endpoints, "endpoint"),
            (self.security_groups, "security group"),
            (self.cidr_groups, "CIDR group"),
            (self.load_balancers, "load balancer"),
        ]
        .into_iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, kind)| count(n as u64, kind))
        .collect();
        f.write_str(&parts.join(", "))
    }
}

pub(crate) fn files(reports: &[FileReport], view: View) -> String {
    let mut text = String::new();
    for r in reports {
        // Writing to a String cannot fail.
        let _ = match r.objects {
            Some(counts) => {
                writeln!(text, "{}: {} ({counts})", printable(&r.file), paint("ok", Tone::Good, view))
            }
            None => writeln!(
                text,
                "{}: {}",
                printable(&r.file),
                paint(&count(r.faults.len() as u64, "fault"), Tone::Bad, view)
            ),
        };
        text.push_str(&faults(&r.faults));
    }
    text
}

/// One line per fault.
pub(crate) fn faults(faults: &[Fault]) -> String {
    faults.iter().map(|f| format!("  {}\n", printable(&f.to_string()))).collect()
}

/// What an apply did, or would do.
#[derive(Debug, Serialize)]
pub(crate) struct ApplyReport {
    pub(crate) file: String,
    pub(crate) dry_run: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) objects: Option<Counts>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) changes: Vec<Change>,
    pub(crate) written: Vec<Written>,
    pub(crate) agents: Vec<Enforced>,
}

impl ApplyReport {
    pub(crate) fn new(file: String, dry_run: bool) -> Self {
        Self {
            file,
            dry_run,
            objects: None,
            faults: Vec::new(),
            changes: Vec::new(),
            written: Vec::new(),
            agents: Vec::new(),
        }
    }
}

/// A value given to an object, or given back by it.
#[derive(Debug, Serialize)]
pub(crate) struct Change {
    action: Action,
    object: ObjectRef,
    value: String,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    Assigned,
    Released,
}

impl Change {
    pub(crate) fn assigned(object: ObjectRef, value: String) -> Self {
        Self { action: Action::Assigned, object, value }
    }

    pub(crate) fn released(object: ObjectRef, value: String) -> Self {
        Self { action: Action::Released, object, value }
    }
}

/// A file that is in place now.
#[derive(Debug, Serialize)]
pub(crate) struct Written {
    pub(crate) path: String,
    /// False when it had these contents already.
    pub(crate) changed: bool,
}

/// An agent that has the document in force.
#[derive(Debug, Serialize)]
pub(crate) struct Enforced {
    pub(crate) node: String,
    pub(crate) generation: u64,
    pub(crate) waited_ms: u64,
    pub(crate) failed_endpoints: u32,
}

pub(crate) fn applied(r: &ApplyReport, view: View) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = match (&r.objects, r.faults.len()) {
        (Some(counts), 0) => {
            writeln!(text, "{}: {} ({counts})", printable(&r.file), paint("ok", Tone::Good, view))
        }
        (_, n) => {
            writeln!(text, "{}: {}", printable(&r.file), paint(&count(n as u64, "fault"), Tone::Bad, view))
        }
    };
    text.push_str(&faults(&r.faults));
    for c in &r.changes {
        let action = match (c.action, r.dry_run) {
            (Action::Assigned, false) => "assigned",
            (Action::Assigned, true) => "would assign",
            (Action::Released, false) => "released",
            (Action::Released, true) => "would release",
        };
        let _ = writeln!(text, "{action:9} {}: {}", c.object, c.value);
    }
    for w in &r.written {
        let _ = writeln!(text, "{:9} {}", if w.changed { "wrote" } else { "unchanged" }, printable(&w.path));
    }
    for a in &r.agents {
        let failed = match a.failed_endpoints {
            0 => String::new(),
            n => paint(&format!(", {} failed: see flowloom status", count(n, "endpoint")), Tone::Bad, view),
        };
        let node = printable(&a.node);
        let _ = writeln!(
            text,
            "in force  on node {node}, generation {} ({} ms){failed}",
            a.generation, a.waited_ms
        );
    }
    text
}
