//! `cargo xtask check`: all that needs neither root nor the BPF toolchain.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::{abi, deploy, features, layers, run};

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Only this part: fmt, layers, abi, links, features, deploy, deny or clippy.
    part: Option<String>,
}

type Part = (&'static str, fn() -> Result<()>);
const PARTS: &[Part] = &[
    ("fmt", fmt),
    ("layers", layers::check),
    ("abi", abi::check),
    ("links", links),
    ("features", features::check),
    ("deploy", deploy::check),
    ("deny", deny),
    ("clippy", clippy),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut ran = 0;
    for (name, part) in PARTS {
        if args.part.as_deref().is_none_or(|p| p == *name) {
            let start = Instant::now();
            part().map_err(|e| e.context(format!("check {name}")))?;
            println!("check {name}: ok ({:.1} s)", start.elapsed().as_secs_f32());
            ran += 1;
        }
    }
    if ran == 0 {
        let names: Vec<_> = PARTS.iter().map(|p| p.0).collect();
        bail!("no such part; there are: {}", names.join(", "));
    }
    Ok(())
}

fn fmt() -> Result<()> {
    run::succeed(&mut run::command(&run::cargo(), &["fmt", "--all", "--check"]))?;
    let programs = run::root().join("bpf/programs");
    run::succeed(run::command(&run::cargo(), &["fmt", "--check"]).current_dir(programs))
}

fn clippy() -> Result<()> {
    run::succeed(&mut run::command(
        &run::cargo(),
        &["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"],
    ))
}

/// Licences and sources of everything we link, from `deny.toml`, by cargo-deny where it is installed; the same allow list is
/// held against `cargo metadata` in any case, so that the check never depends on a tool being there.
fn deny() -> Result<()> {
    let text = std::fs::read_to_string(run::root().join("deny.toml"))?;
    let allowed = quoted(text.lines().find(|l| l.starts_with("allow = [")).unwrap_or_default());
    let out =
        run::output(&mut run::command(&run::cargo(), &["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&out)?;
    let mut faults = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let expression = package["license"].as_str().unwrap_or("none");
        if !licence_allowed(expression, &allowed) {
            faults.push(format!("{name}: licence {expression}"));
        }
        let source = package["source"].as_str().unwrap_or_default();
        if !source.is_empty() && !source.starts_with("registry+") {
            faults.push(format!("{name}: source {source} is no registry"));
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    if run::command(&run::cargo(), &["deny", "--version"]).output().is_ok_and(|o| o.status.success()) {
        run::succeed(&mut run::command(
            &run::cargo(),
            &["deny", "--log-level", "error", "check", "bans", "licenses", "sources"],
        ))?;
    }
    Ok(())
}

fn quoted(line: &str) -> Vec<String> {
    line.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// SPDX expressions of the registry: OR needs one side, AND (and the old slash) is read as the registry means it.
fn licence_allowed(expression: &str, allowed: &[String]) -> bool {
    let expression = expression.replace(['(', ')'], " ").replace('/', " OR ");
    expression.split(" OR ").any(|side| side.split(" AND ").all(|l| allowed.iter().any(|a| a == l.trim())))
}

/// Every relative link of every Markdown file leads to a file.
fn links() -> Result<()> {
    let root = run::root();
    let mut faults = Vec::new();
    for file in run::files()?.into_iter().filter(|f| Path::new(f).extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(root.join(&file))?;
        for target in targets(&text) {
            let path = target.split('#').next().unwrap_or_default();
            let base = root.join(&file);
            let base = base.parent().unwrap_or(&root);
            if !path.is_empty() && !base.join(path).exists() {
                faults.push(format!("{file}: {target} leads nowhere"));
            }
        }
    }
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

fn targets(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned()))
        .filter(|t| !t.contains("://") && !t.starts_with("mailto:"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_read_as_expressions() {
        let allowed = vec!["MIT".to_owned(), "Apache-2.0".to_owned(), "Unicode-3.0".to_owned()];
        assert!(licence_allowed("MIT OR GPL-3.0", &allowed));
        assert!(licence_allowed("MIT/Apache-2.0", &allowed));
        assert!(licence_allowed("(MIT OR Apache-2.0) AND Unicode-3.0", &allowed));
        assert!(!licence_allowed("GPL-3.0", &allowed));
        assert!(!licence_allowed("MIT AND GPL-3.0", &allowed));
        assert!(!licence_allowed("none", &allowed));
    }

    #[test]
    fn only_relative_links_are_checked() {
        assert_eq!(targets("[a](b.md) [c](https://x/y) [d](e.md#f)"), ["b.md", "e.md#f"]);
    }
}
