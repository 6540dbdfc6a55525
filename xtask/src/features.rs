//! The README's feature table is a list of claims; each names the tests that hold it, and this checks that they exist and run.

use anyhow::{Result, bail};

use crate::run;

pub(crate) fn check() -> Result<()> {
    let readme = std::fs::read_to_string(run::root().join("README.md"))?;
    let rows = rows(&readme);
    let mut faults = Vec::new();
    if rows.is_empty() {
        faults.push("README.md has no rows under \"## Features\"".to_owned());
    }
    for (feature, proofs) in rows {
        if proofs.is_empty() {
            faults.push(format!("{feature:?} names no test"));
        }
        for proof in proofs {
            if let Err(why) = exists(&proof) {
                faults.push(format!("{feature:?}: `{proof}`: {why}"));
            }
        }
    }
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

/// Rows of the table under `## Features`: the first cell, and every backticked `file::test` of the last one.
fn rows(readme: &str) -> Vec<(String, Vec<String>)> {
    readme
        .lines()
        .skip_while(|l| *l != "## Features")
        .skip(1)
        .take_while(|l| !l.starts_with("## "))
        .filter(|l| l.starts_with('|'))
        .skip(2)
        .filter_map(|l| {
            let cells: Vec<_> = l.trim_matches('|').split('|').map(str::trim).collect();
            let proofs = cells.last()?.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            Some(((*cells.first()?).to_owned(), proofs))
        })
        .collect()
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
        let rows = rows(readme);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].1, ["t/x.rs::one", "t/y.rs::two"]);
        assert!(rows[1].1.is_empty());
    }

    #[test]
    fn an_ignored_or_missing_test_proves_nothing() {
        assert!(is_test("#[test]\nfn a() {", "a").is_ok());
        assert!(is_test("#[test]\n#[ignore = \"slow\"]\nfn a() {", "a").is_err());
        assert!(is_test("fn a() {", "a").is_err());
        assert!(is_test("#[test]\nfn a() {", "b").is_err());
    }
}
