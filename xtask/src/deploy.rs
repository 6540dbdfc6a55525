//! The manifests of `deploy/`, written by the package of that directory, which links what they must agree with.

use anyhow::Result;

use crate::run;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare only.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    write(args.check)
}

pub(crate) fn check() -> Result<()> {
    write(true)
}

fn write(check: bool) -> Result<()> {
    let mut command = run::command(
        &run::cargo(),
        &["run", "--quiet", "--locked", "--package", "flowloom-deploy", "--", "deploy"],
    );
    if check {
        command.arg("--check");
    }
    run::succeed(command.current_dir(run::root()))
}
