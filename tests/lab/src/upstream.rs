//! The names of upstream's tests of `[sig-network]`, kept in `sig-network.txt`, so that what runs and what does not can be
//! held against all there is where the suite itself is not built.

use std::fs;

use anyhow::{Context, Result, ensure};
use flowloom_testkit::Cmd;

use crate::paths;

const FILE: &str = "sig-network.txt";
const HEAD: &str = "# Upstream's tests of [sig-network], by name. Written by `cargo xtask lab names`.\n";

/// The names in the file.
#[must_use]
pub fn listed() -> Vec<&'static str> {
    include_str!("../sig-network.txt").lines().filter(|l| !l.starts_with('#')).collect()
}

/// The names that the suite knows that is built, sorted.
///
/// # Errors
/// When it is not built, or names none.
pub fn built() -> Result<Vec<String>> {
    let program = paths::programs().join("e2e.test").display().to_string();
    let output = Cmd::new(&[&program, "--list-tests"]).run()?;
    ensure!(output.status.success(), "{program} --list-tests: {}", output.stderr);
    let names = |text: &str| -> Vec<String> {
        // "    k8s.io/...go:58: [sig-network] API Server should ..."
        text.lines()
            .filter_map(|l| Some(format!("[sig-network]{}", l.split_once(": [sig-network]")?.1)))
            .collect()
    };
    let mut names = [names(&output.stdout), names(&output.stderr)].concat();
    ensure!(!names.is_empty(), "{program} --list-tests names no test of [sig-network]");
    names.sort_unstable();
    Ok(names)
}

/// Writes the file anew; the number of names.
///
/// # Errors
/// As [`built`], or when it cannot be written.
pub fn write() -> Result<usize> {
    let (names, file) = (built()?, paths::source().join(FILE));
    fs::write(&file, format!("{HEAD}{}\n", names.join("\n"))).with_context(|| file.display().to_string())?;
    Ok(names.len())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use regex::Regex;

    use super::*;
    use crate::report::Record;
    use crate::suites::{GROUPS, VIEWS, repository_exclusions};

    fn regex(pattern: &str) -> Regex {
        Regex::new(pattern).unwrap()
    }

    #[test]
    fn every_test_of_upstream_is_in_a_group_or_left_out_with_a_reason() {
        let names = listed();
        assert!(
            names.len() > 200 && names.iter().all(|n| n.starts_with("[sig-network] ")),
            "{}",
            names.len()
        );
        let excluded: Vec<Regex> =
            repository_exclusions().unwrap().iter().map(|e| regex(&e.pattern)).collect();
        let groups: Vec<_> = GROUPS.iter().map(|g| (g.name, regex(g.focus), g.skip.map(regex))).collect();
        let mut tests = BTreeMap::<&str, u32>::new();
        for name in &names {
            if excluded.iter().any(|e| e.is_match(name)) {
                continue;
            }
            let of: Vec<&str> = groups
                .iter()
                .filter(|(_, focus, skip)| {
                    focus.is_match(name) && !skip.as_ref().is_some_and(|s| s.is_match(name))
                })
                .map(|(group, ..)| *group)
                .collect();
            assert!(
                of.iter().any(|g| !VIEWS.contains(g)),
                "neither in a group nor in exclusions.txt: {name}"
            );
            of.into_iter().for_each(|g| *tests.entry(g).or_default() += 1);
        }
        for (group, ..) in &groups {
            assert!(tests.contains_key(group), "group {group} has no test");
        }
        for exclusion in &excluded {
            assert!(names.iter().any(|n| exclusion.is_match(n)), "leaves nothing out: {exclusion}");
        }
    }

    /// One that runs nowhere says nothing.
    #[test]
    fn every_group_was_run() {
        let records: BTreeMap<String, Record> =
            serde_json::from_str(include_str!("../../../docs/conformance.json")).unwrap();
        // All there is runs in parts.
        for group in crate::suites::names().into_iter().filter(|g| *g != "all") {
            let record =
                records.get(group).unwrap_or_else(|| panic!("{group} is not in docs/conformance.json"));
            assert!(record.passed > 0, "{group}: {record:?}");
        }
    }
}
