//! Documented command lines are real ones.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;

use clap::{CommandFactory, Parser};
use flowloom_cli::{Cli, Exit};

/// The part of a shell line that the command itself sees.
fn words(line: &str) -> Vec<&str> {
    let end = [" | ", " > "].iter().filter_map(|s| line.find(s)).min().unwrap_or(line.len());
    line[..end].split_whitespace().collect()
}

fn parses(line: &str) {
    if let Err(e) = Cli::try_parse_from(words(line)) {
        panic!("{line:?}: {e}");
    }
}

/// Leaf commands as `policy explain`.
fn leaves(command: &clap::Command, prefix: &str, out: &mut Vec<(String, clap::Command)>) {
    let mut any = false;
    for sub in command.get_subcommands().filter(|s| s.get_name() != "help") {
        any = true;
        leaves(sub, format!("{prefix} {}", sub.get_name()).trim(), out);
    }
    if !any {
        out.push((prefix.to_owned(), command.clone()));
    }
}

fn all_leaves() -> Vec<(String, clap::Command)> {
    let mut out = Vec::new();
    leaves(&Cli::command(), "", &mut out);
    assert!(out.len() >= 17, "{}", out.len());
    out
}

#[test]
fn the_command_tree_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_has_help_and_examples_that_parse_and_are_its_own() {
    for (name, command) in all_leaves() {
        assert!(command.get_about().is_some(), "{name} has no help");
        let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples: Vec<_> = text.lines().map(str::trim).filter(|l| l.starts_with("flowloom ")).collect();
        assert!(!examples.is_empty(), "{name} has no example");
        for line in examples {
            parses(line);
            let end = line.strip_prefix(&format!("flowloom {name}"));
            assert!(
                end.is_some_and(|e| e.is_empty() || e.starts_with(' ')),
                "{line:?} is no example of {name}"
            );
        }
        for arg in command.get_arguments() {
            assert!(arg.get_help().is_some(), "{name}: {} has no help", arg.get_id());
        }
    }
}

#[test]
fn every_command_line_of_the_page_parses_and_every_command_is_on_it() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md")).unwrap();
    let lines: Vec<_> = page.lines().filter_map(|l| l.strip_prefix("$ ")).collect();
    lines.iter().for_each(|l| parses(l));
    let shown: BTreeSet<String> = all_leaves()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| lines.iter().any(|l| l.starts_with(&format!("flowloom {name}"))))
        .collect();
    let known: BTreeSet<String> = all_leaves().into_iter().map(|(name, _)| name).collect();
    assert_eq!(shown, known);
}

#[test]
fn the_page_lists_the_exit_codes_that_exist() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md")).unwrap();
    let listed: Vec<u8> =
        page.lines().filter_map(|l| l.strip_prefix("| ")?.split(' ').next()?.parse().ok()).collect();
    let all = [Exit::Ok, Exit::Error, Exit::Usage, Exit::Unavailable, Exit::Denied, Exit::TimedOut];
    assert_eq!(listed, all.map(|e| e as u8));
    let help = Cli::command().render_long_help().to_string();
    for code in listed {
        assert!(help.lines().any(|l| l.starts_with(&format!("  {code}  "))), "--help lacks exit code {code}");
    }
}
