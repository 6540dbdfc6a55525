//! The ABI gate: the layout of `bpf/abi` is recorded in `docs/abi.lock`; a change without a new ABI number fails.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use crate::run;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the record instead of comparing.
    #[arg(long)]
    record: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.record { std::fs::write(lock_path(), current()?).context("docs/abi.lock") } else { check() }
}

/// Compares the recorded layout with the sources.
pub(crate) fn check() -> Result<()> {
    let recorded = std::fs::read_to_string(lock_path())
        .context("docs/abi.lock: record it with `cargo xtask abi --record`")?;
    compare(&recorded, &current()?)
}

fn compare(recorded: &str, current: &str) -> Result<()> {
    if recorded == current {
        return Ok(());
    }
    let version = |s: &str| s.lines().next().unwrap_or_default().to_owned();
    if version(recorded) == version(current) {
        bail!(
            "the map ABI changed and its number did not: pinned maps of a running agent would be misread.\n\
             Raise ABI_VERSION in bpf/abi/src/lib.rs, then `cargo xtask abi --record`.\n{}",
            difference(recorded, current)
        );
    }
    bail!("the map ABI has a new number: record its layout with `cargo xtask abi --record`")
}

fn difference(a: &str, b: &str) -> String {
    let mut out = String::new();
    for line in a.lines().filter(|l| !b.lines().any(|m| m == *l)) {
        let _ = writeln!(out, "- {line}");
    }
    for line in b.lines().filter(|l| !a.lines().any(|m| m == *l)) {
        let _ = writeln!(out, "+ {line}");
    }
    out
}

fn lock_path() -> std::path::PathBuf {
    run::root().join("docs/abi.lock")
}

/// Version, then every struct's fields in order, every constant and every map name: comments and spaces do not count.
fn current() -> Result<String> {
    let dir = run::root().join("bpf/abi/src");
    let mut names: Vec<_> = std::fs::read_dir(&dir)?.collect::<std::io::Result<Vec<_>>>()?;
    names.sort_by_key(std::fs::DirEntry::path);
    let mut out = format!("version {}\n", flowloom_bpf_abi::ABI_VERSION);
    for entry in names {
        let text = std::fs::read_to_string(entry.path())?;
        out.push_str(&declarations(&text));
    }
    Ok(out)
}

fn declarations(text: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        if line.starts_with("pub struct") || line.starts_with("pub mod") {
            let _ = writeln!(out, "{}", line.trim_end_matches('{').trim());
            inside = line.starts_with("pub struct") && line.ends_with('{');
        } else if inside && line.starts_with("pub ") {
            let _ = writeln!(out, "  {}", line.trim_end_matches(','));
        } else if (line.starts_with("pub const") && !line.contains("fn ") && !line.contains("ABI_VERSION"))
            || line.starts_with("crate::assert_layout!")
            || (line.contains(" = ") && line.contains(", \"") && line.ends_with("\";"))
        {
            let _ = writeln!(out, "  {line}");
        } else if line == "}" {
            inside = false;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_field_without_a_new_number_is_refused() {
        let old = format!("version 1\n{}", declarations("pub struct A {\n    /// x\n    pub a: u32,\n}"));
        let new = format!("version 1\n{}", declarations("pub struct A {\n    pub a: u64,\n}"));
        let error = compare(&old, &new).unwrap_err().to_string();
        assert!(error.contains("its number did not") && error.contains("+   pub a: u64"), "{error}");
    }

    #[test]
    fn comments_do_not_count_and_a_new_number_asks_for_a_record() {
        let a = declarations("pub struct A {\n    /// one\n    pub a: u32,\n}");
        assert_eq!(a, declarations("pub struct A {\n    /// two\n    pub a: u32,\n}"));
        assert!(compare("version 1\n", "version 2\n").unwrap_err().to_string().contains("--record"));
    }
}
