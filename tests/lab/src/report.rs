//! `docs/conformance.json`, which keeps the last run of each group, and `docs/conformance.md`, which shows it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::suites::{Exclusion, Run};

/// The last run of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Day of the run.
    pub date: String,
    /// What was tested.
    pub commit: String,
    /// Nodes, families, and what was done to the cluster meanwhile.
    pub cluster: String,
    /// Number of tests that passed.
    pub passed: usize,
    /// Tests that failed, with the first line of why.
    pub failed: Vec<(String, String)>,
    /// Tests that skipped themselves, and why.
    pub skipped: Vec<(String, String)>,
    /// Wall-clock time.
    pub seconds: u64,
}

impl Record {
    /// Counts a run.
    #[must_use]
    pub fn of(run: &Run, cluster: String, commit: String, date: String) -> Self {
        let with = |pick: fn(&crate::junit::Outcome) -> Option<&String>| {
            let mut list: Vec<_> =
                run.outcomes.iter().filter_map(|o| Some((o.name.clone(), pick(o)?.clone()))).collect();
            list.sort();
            list
        };
        let (failed, skipped) = (with(|o| o.failure.as_ref()), with(|o| o.skipped.as_ref()));
        let passed = run.outcomes.iter().filter(|o| o.failure.is_none() && o.skipped.is_none()).count();
        Self { date, commit, cluster, passed, failed, skipped, seconds: run.seconds }
    }
}

/// Puts a run among the others and writes both files.
///
/// # Errors
/// When a file cannot be read or written.
pub(crate) fn update(docs: &Path, group: &str, record: Record, exclusions: &[Exclusion]) -> Result<()> {
    let file = docs.join("conformance.json");
    let mut records: BTreeMap<String, Record> = match fs::read(&file) {
        Ok(text) => serde_json::from_slice(&text).with_context(|| file.display().to_string())?,
        Err(_) => BTreeMap::new(),
    };
    records.insert(group.to_owned(), record);
    fs::write(&file, serde_json::to_string_pretty(&records)? + "\n")?;
    Ok(fs::write(docs.join("conformance.md"), markdown(&records, exclusions))?)
}

fn markdown(records: &BTreeMap<String, Record>, exclusions: &[Exclusion]) -> String {
    let mut text = String::from(
        "# Upstream's suites\n\n\
         Written by `cargo xtask test conformance [GROUP]...`: the last run of each group, against the lab (docs/lab.md) \
         with flowloom and no kube-proxy. The tests are Kubernetes' own, unmodified. The cases, expectations and \
         judgement of `cyclonus` are its project's; the client that connects is the lab's (docs/lab.md).\n\n\
         | group | passed | failed | skipped | minutes | cluster | commit | day |\n|---|---|---|---|---|---|---|---|\n",
    );
    for (group, r) in records {
        let _ = writeln!(
            text,
            "| {group} | {} | {} | {} | {:.1} | {} | {} | {} |",
            r.passed,
            r.failed.len(),
            r.skipped.len(),
            r.seconds as f64 / 60.0,
            r.cluster,
            r.commit,
            r.date
        );
    }
    for (title, pick) in [("Failed", 0), ("Skipped by the tests themselves", 1)] {
        let of = |r: &Record| if pick == 0 { r.failed.clone() } else { r.skipped.clone() };
        let rows: Vec<_> =
            records.iter().flat_map(|(g, r)| of(r).into_iter().map(move |(n, why)| (g, n, why))).collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n## {title}\n\n| group | test | why |\n|---|---|---|");
        for (group, name, why) in rows {
            let _ = writeln!(text, "| {group} | {} | {} |", cell(&name), cell(&why));
        }
    }
    let _ = writeln!(text, "\n## Not run\n\nBy `tests/lab/exclusions.txt`:\n\n| tests | why |\n|---|---|");
    for e in exclusions {
        let _ = writeln!(text, "| `{}` | {} |", cell(&e.pattern), cell(&e.reason));
    }
    text
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::junit::Outcome;

    #[test]
    fn a_run_replaces_its_group_and_leaves_the_others() {
        let dir = flowloom_testkit::temp_dir("report").unwrap();
        let outcome = |name: &str, failure: Option<&str>, skipped: Option<&str>| Outcome {
            name: name.into(),
            failure: failure.map(str::to_owned),
            skipped: skipped.map(str::to_owned),
        };
        let run = |outcomes| Run { outcomes, seconds: 90, log: "log".into() };
        let record = |run: &Run| Record::of(run, "2 nodes".into(), "abc".into(), "2026-01-01".into());
        let excluded = [Exclusion { pattern: "a|b".into(), reason: "no cloud".into() }];
        let first = run(vec![outcome("x", None, None), outcome("y", Some("late"), None)]);
        update(dir.path(), "dns", record(&first), &excluded).unwrap();
        update(dir.path(), "netpol", record(&run(vec![outcome("z", None, Some("zones"))])), &excluded)
            .unwrap();
        update(dir.path(), "dns", record(&run(vec![outcome("x", None, None)])), &excluded).unwrap();
        let text = fs::read_to_string(dir.path().join("conformance.md")).unwrap();
        assert!(text.contains("| dns | 1 | 0 | 0 | 1.5 | 2 nodes | abc | 2026-01-01 |"), "{text}");
        assert!(text.contains("| netpol | z | zones |") && text.contains("| `a\\|b` | no cloud |"), "{text}");
        assert!(!text.contains("late"), "{text}");
    }
}
