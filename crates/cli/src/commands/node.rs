//! What concerns the node as a whole: `status`, `ipam`, `identity`, `version`.

use std::time::Duration;

use clap::{Args, Subcommand};
use flowloom_model::VpcName;
use serde::Serialize;

use super::wait;
use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::values::duration;

/// Show the agent's state and every degraded object.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom status
  flowloom status --wait 30s
  flowloom status -o json | jq .degraded")]
pub(crate) struct StatusArgs {
    /// Wait until the agent is ready; exit code 5 when it is not in time.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
}

/// Show address pools, or the addresses in use.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom ipam
  flowloom ipam --vpc red --addresses -o wide")]
pub(crate) struct IpamArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Addresses and their owners instead of pools.
    #[arg(long)]
    addresses: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum IdentityCommand {
    List(IdentityListArgs),
}

/// List the identities in use on this node, and what they stand for.
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  flowloom identity list
  flowloom identity list --vpc red -o wide"
)]
pub(crate) struct IdentityListArgs {
    /// Only this VPC (and the reserved ones of every VPC).
    #[arg(long)]
    vpc: Option<VpcName>,
}

pub(crate) fn status(context: &mut Context<'_>, args: &StatusArgs) -> Result<Exit, Failure> {
    if let Some(limit) = args.wait {
        wait::ready(&context.client(), limit)?;
    }
    let status = context.client().status()?;
    context.show(&status, output::status::status)?;
    Ok(Exit::Ok)
}

pub(crate) fn ipam(context: &mut Context<'_>, args: &IpamArgs) -> Result<Exit, Failure> {
    let mut report = context.client().ipam()?;
    if let Some(vpc) = &args.vpc {
        report.pools.retain(|p| p.vpc == vpc.as_str());
    }
    context.show(&report, if args.addresses { output::ipam::addresses } else { output::ipam::pools })?;
    Ok(Exit::Ok)
}

pub(crate) fn identity(context: &mut Context<'_>, command: &IdentityCommand) -> Result<Exit, Failure> {
    let IdentityCommand::List(args) = command;
    let mut list = context.client().identities()?;
    if let Some(vpc) = &args.vpc {
        list.identities.retain(|i| i.vpc.is_empty() || i.vpc == vpc.as_str());
    }
    context.show(&list, output::identity::many)?;
    Ok(Exit::Ok)
}

#[derive(Debug, Serialize)]
struct Versions {
    client: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
}

pub(crate) fn version(context: &mut Context<'_>, client_only: bool) -> Result<Exit, Failure> {
    let client = env!("CARGO_PKG_VERSION").to_owned();
    let asked = if client_only { None } else { Some(context.client().health()) };
    let (health, failure) = match asked {
        None => (None, None),
        Some(Ok(health)) => (Some(health), None),
        Some(Err(e)) => (None, Some(Failure::from(e))),
    };
    let versions =
        Versions { client, agent: health.as_ref().map(|h| h.version.clone()), node: health.map(|h| h.node) };
    context.show(&versions, |v, view| {
        let mut p = output::table::Pairs::new(view);
        p.add("flowloom", &v.client);
        p.add_some("flowloom-agent", v.agent.as_ref());
        p.add_some("node", v.node.as_ref());
        p.render()
    })?;
    // The half that is known has been shown.
    failure.map_or(Ok(Exit::Ok), Err)
}
