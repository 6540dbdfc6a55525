//! Faults of documents, and what an apply did.

use std::fmt::Write;

use flowloom_model::Fault;
use serde::Serialize;

use super::View;
use super::table::{Tone, paint, printable};

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
        }
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = [
            (self.nodes, "node", "nodes"),
            (self.vpcs, "VPC", "VPCs"),
            (self.subnets, "subnet", "subnets"),
            (self.endpoints, "endpoint", "endpoints"),
            (self.security_groups, "security group", "security groups"),
            (self.cidr_groups, "CIDR group", "CIDR groups"),
        ]
        .into_iter()
        .filter(|(n, ..)| *n > 0)
        .map(|(n, one, many)| format!("{n} {}", if n == 1 { one } else { many }))
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
                paint(&faults_count(r.faults.len()), Tone::Bad, view)
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

/// `1 fault`, `3 faults`.
pub(crate) fn faults_count(n: usize) -> String {
    format!("{n} {}", if n == 1 { "fault" } else { "faults" })
}
