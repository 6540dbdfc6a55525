//! `cargo xtask lab ...`, the tier that needs it, and upstream's suites against it. The cluster itself is crate
//! `tests/lab`; this builds what goes into it.

use anyhow::Result;

use crate::{again, run, tiers};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// build, up, down, kubectl, exec, status: `cargo xtask lab help` says more.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, default_value = "help")]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let first = args.args.first().map(String::as_str);
    if first == Some("up") && wants_flowloom(&args.args) {
        tiers::binaries()?;
    }
    lab(&args.args)
}

/// Clusters, brought up, used and taken down: with the peer's plugins, with flowloom, and a quick part of upstream's
/// suites.
pub(crate) fn tier() -> Result<Vec<String>> {
    tiers::binaries()?;
    lab(&["build", "--suites"].map(str::to_owned))?;
    again::test(tiers::test_command, &["-p", "flowloom-lab"])
}

/// Groups of upstream's suites; all of them when none is named.
pub(crate) fn conformance(args: &[String]) -> Result<()> {
    tiers::binaries()?;
    lab(&["build", "--suites"].map(str::to_owned))?;
    lab(&[&["conformance".to_owned()], args].concat())
}

/// A shop on a cluster, with a table of who reached whom.
pub(crate) fn demo(keep: bool) -> Result<()> {
    tiers::binaries()?;
    lab(&["build".to_owned()])?;
    let dir = tiers::bin_dir();
    let mut command = run::command(&dir.join("flowloom-k8s-demo").display().to_string(), &[]);
    run::succeed(command.args(keep.then_some("--keep")).env("FLOWLOOM_BIN_DIR", dir))
}

fn lab(args: &[String]) -> Result<()> {
    let build = ["build", "--quiet", "--locked", "-p", "flowloom-lab"];
    run::succeed(&mut run::command(&run::cargo(), &build))?;
    let dir = tiers::bin_dir();
    let mut command = run::command(&dir.join("flowloom-lab").display().to_string(), &[]);
    run::succeed(command.args(args).env("FLOWLOOM_BIN_DIR", dir))
}

/// `--cni` is flowloom unless it says otherwise.
fn wants_flowloom(args: &[String]) -> bool {
    let named =
        args.iter().zip(args.iter().skip(1)).find(|(flag, _)| *flag == "--cni").map(|(_, v)| v.as_str());
    let joined = args.iter().find_map(|a| a.strip_prefix("--cni="));
    named.or(joined).unwrap_or("flowloom") == "flowloom"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lab_with_flowloom_builds_it() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(wants_flowloom(&words("up --nodes 3")));
        assert!(wants_flowloom(&words("up --cni flowloom")));
        assert!(!wants_flowloom(&words("up --cni reference --nodes 3")));
        assert!(!wants_flowloom(&words("up --cni=none")));
    }
}
