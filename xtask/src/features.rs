//! The README's feature table and the field reports are lists of claims; each names the tests that hold it, and this checks that they exist and run.

use anyhow::{Result, bail};

use crate::run;

pub(crate) fn check() -> Result<()> {
    let read = |path: &str| std::fs::read_to_string(run::root().join(path));
    let mut faults = of_features(&rows(&read("README.md")?, Some("## Features")));
    faults.extend(of_reports(&rows(&read("docs/field-reports.md")?, None)));
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

type Row = (String, Vec<String>, String);

fn of_features(rows: &[Row]) -> Vec<String> {
    let mut faults = of_proofs(rows);
    if rows.is_empty() {
        faults.push("README.md has no rows under \"## Features\"".to_owned());
    }
    faults.extend(rows.iter().filter(|r| r.1.is_empty()).map(|r| format!("{:?} names no test", r.0)));
    faults
}

/// A report that concerns work to come says so instead of naming a test.
fn of_reports(rows: &[Row]) -> Vec<String> {
    let mut faults = of_proofs(rows);
    if rows.is_empty() {
        faults.push("docs/field-reports.md has no rows".to_owned());
    }
    let silent = rows.iter().filter(|(_, proofs, last)| proofs.is_empty() && !last.starts_with("later: "));
    faults.extend(silent.map(|r| format!("report {:?} names neither a test nor what it waits for", r.0)));
    faults
}

fn of_proofs(rows: &[Row]) -> Vec<String> {
    let each = |(name, proofs, _): &Row| -> Vec<String> {
        proofs.iter().filter_map(|p| exists(p).err().map(|why| format!("{name:?}: `{p}`: {why}"))).collect()
    };
    rows.iter().flat_map(each).collect()
}

/// Rows of the table under a heading, or of every table: the first cell, every backticked `file::test` of the last one, and that cell.
fn rows(text: &str, heading: Option<&str>) -> Vec<Row> {
    let all: Vec<&str> = text.lines().collect();
    let from = heading.map_or(0, |h| all.iter().position(|l| *l == h).map_or(all.len(), |at| at + 1));
    let section = all[from..].iter().take_while(|l| heading.is_none() || !l.starts_with("## "));
    let mut found = Vec::new();
    let mut line_of_table = 0;
    for line in section {
        if !line.starts_with('|') {
            line_of_table = 0;
            continue;
        }
        line_of_table += 1;
        // Names of the columns and the rule below them.
        if line_of_table <= 2 {
            continue;
        }
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        if let (Some(first), Some(last)) = (cells.first(), cells.last()) {
            let proofs = last.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            found.push(((*first).to_owned(), proofs, (*last).to_owned()));
        }
    }
    found
}

fn exists(proof: &str) -> Result<(), String> {
    let (file, test) = proof.split_once("::").ok_or("write it as file.rs::test_name")?;
    let text = std::fs::read_to_string(run::root().join(file)).map_err(|e| e.to_string())?;
    is_test(&text, test)
}

/// The function is there, is a test, and is not ignored.
fn is_test(text: &str, test: &str) -> Result<(), String> {
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let at = lines.iter().position(|l| l.contains(&format!("fn {test}("))).ok_or("no such function")?;
    let above: Vec<_> =
        lines.iter().take(at).rev().take_while(|l| l.starts_with("#[") || l.starts_with("//")).collect();
    if above.iter().any(|l| l.starts_with("#[ignore")) {
        return Err("it is ignored".to_owned());
    }
    // Inside `proptest!` the attribute stands above as well.
    if above.iter().any(|l| l.contains("test")) { Ok(()) } else { Err("it is no test".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_proofs_found() {
        let readme = "# x\n## Features\n\n| feature | proven by |\n|---|---|\n| a | `t/x.rs::one`, `t/y.rs::two` |\n| b | |\n## Next\n| c | `z` |\n";
        let rows = rows(readme, Some("## Features"));
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].1, ["t/x.rs::one", "t/y.rs::two"]);
        assert!(rows[1].1.is_empty());
    }

    #[test]
    fn a_report_names_tests_that_exist_or_what_it_waits_for() {
        let text = "## A\n\n| no. | what | tests |\n|---|---|---|\n| 1 | x | `xtask/src/features.rs::rows_are_read_and_proofs_found` |\n| 2 | y | later: it |\n\n## B\n\n| no. | what | tests |\n|---|---|---|\n| 3 | z | |\n| 4 | z | `xtask/src/features.rs::no_such` |\n";
        let read = rows(text, None);
        assert_eq!(read.iter().map(|r| r.0.as_str()).collect::<Vec<_>>(), ["1", "2", "3", "4"]);
        let faults = of_reports(&read);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(of_reports(&[]).len() == 1, "no rows at all is a fault");
    }

    #[test]
    fn every_field_report_names_tests_that_exist() {
        let text = std::fs::read_to_string(run::root().join("docs/field-reports.md")).unwrap();
        let read = rows(&text, None);
        assert!(read.len() >= 48, "{} rows", read.len());
        assert_eq!(of_reports(&read), Vec::<String>::new());
    }

    #[test]
    fn an_ignored_or_missing_test_proves_nothing() {
        assert!(is_test("#[test]\nfn a() {", "a").is_ok());
        assert!(is_test("#[test]\n#[ignore = \"slow\"]\nfn a() {", "a").is_err());
        assert!(is_test("fn a() {", "a").is_err());
        assert!(is_test("#[test]\nfn a() {", "b").is_err());
    }
}
