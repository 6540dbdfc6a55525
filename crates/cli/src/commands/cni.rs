//! `cni`: what container runtimes asked of this node.

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output;

#[derive(Debug, Subcommand)]
pub(crate) enum CniCommand {
    Status(CniStatusArgs),
}

/// Show requests of container runtimes: counts, errors and durations by verb; DELs that wait; the network configuration.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom cni status
  flowloom cni status -o wide
  flowloom cni status -o json | jq .queue")]
pub(crate) struct CniStatusArgs {}

pub(crate) fn run(context: &mut Context<'_>, command: &CniCommand) -> Result<Exit, Failure> {
    let CniCommand::Status(CniStatusArgs {}) = command;
    let report = context.client().cni_report()?;
    context.show(&report, output::cni::report)?;
    Ok(Exit::Ok)
}
