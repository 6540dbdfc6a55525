//! `flowloom k8s`.

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::kubernetes;

#[derive(Debug, Subcommand)]
pub(crate) enum KubernetesCommand {
    Status(StatusArgs),
}

/// Show what the agent watches of the API server, and every object that is not in force.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom k8s status
  flowloom k8s status -o json | jq .faults")]
pub(crate) struct StatusArgs {}

pub(crate) fn run(context: &mut Context<'_>, command: &KubernetesCommand) -> Result<Exit, Failure> {
    let KubernetesCommand::Status(StatusArgs {}) = command;
    let status = context.client().kubernetes()?;
    if !status.enabled {
        return Err(Failure::error(
            "this agent asks no API server: set kubernetes.enabled in its configuration",
        ));
    }
    context.show(&status, kubernetes::status)?;
    Ok(Exit::Ok)
}
