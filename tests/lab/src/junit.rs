//! Results of upstream's suites, which all write JUnit XML.

use anyhow::{Context, Result};

/// One test that was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its full name.
    pub name: String,
    /// Why it failed, in the first line of it.
    pub failure: Option<String>,
    /// Why it did not run here.
    pub skipped: Option<String>,
}

/// Reads one file. What a filter left out is not there; set-up and reports of a suite only when they failed.
///
/// # Errors
/// When it is no XML.
pub(crate) fn read(xml: &str) -> Result<Vec<Outcome>> {
    let document = roxmltree::Document::parse(xml).context("JUnit file")?;
    let mut outcomes = Vec::new();
    for case in document.descendants().filter(|n| n.has_tag_name("testcase")) {
        let child = |tag: &str| case.children().find(|n| n.has_tag_name(tag));
        let first_line = |node: roxmltree::Node<'_, '_>| {
            let text =
                node.attribute("message").filter(|m| !m.is_empty()).or(node.text()).unwrap_or_default();
            text.trim().lines().next().unwrap_or_default().to_owned()
        };
        let failure = child("failure").or(child("error")).map(first_line);
        let skipped = child("skipped").map(first_line);
        // Ginkgo lists tests that a filter left out as skipped, too, but says no reason.
        let reason =
            skipped.as_ref().map(|s| s.trim_start_matches("skipped").trim_start_matches(" - ").to_owned());
        if failure.is_none() && reason.as_deref() == Some("") {
            continue;
        }
        let name = case.attribute("name").unwrap_or_default();
        let of_suite = name.starts_with('[') && !name.starts_with("[It]") && name.contains("Suite]");
        if of_suite && failure.is_none() {
            continue;
        }
        let name = name.trim_start_matches("[It]").trim().to_owned();
        outcomes.push(Outcome { name, failure, skipped: reason });
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selected_tests_are_told_from_filtered_ones() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
          <testsuites tests="6"><testsuite name="e2e">
            <testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>
            <testcase name="[It] [sig-network] Services good" status="passed" time="2"><system-err>x</system-err></testcase>
            <testcase name="[It] [sig-network] Services bad" status="failed" time="2">
              <failure message="timed out&#xA;more" type="failed">details</failure></testcase>
            <testcase name="[It] [sig-network] Services zones" status="skipped" time="0">
              <skipped message="skipped - Requires 3 zones"></skipped></testcase>
            <testcase name="[It] [sig-storage] other" status="skipped" time="0"><skipped message="skipped"></skipped></testcase>
            <testcase name="[ReportAfterSuite] x" status="passed" time="0"></testcase>
          </testsuite></testsuites>"#;
        let got = read(xml).unwrap();
        let line = |o: &Outcome| format!("{}|{:?}|{:?}", o.name, o.failure, o.skipped);
        assert_eq!(
            got.iter().map(line).collect::<Vec<_>>(),
            [
                "[sig-network] Services good|None|None",
                "[sig-network] Services bad|Some(\"timed out\")|None",
                "[sig-network] Services zones|None|Some(\"Requires 3 zones\")",
            ]
        );
        assert!(read("<testsuite").is_err());
    }

    #[test]
    fn a_failed_set_up_is_a_failure() {
        let xml = r#"<testsuite><testcase name="[SynchronizedBeforeSuite]"><failure message="no nodes"/></testcase></testsuite>"#;
        assert_eq!(read(xml).unwrap()[0].failure.as_deref(), Some("no nodes"));
    }
}
