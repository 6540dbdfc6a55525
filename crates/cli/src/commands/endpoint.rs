//! `flowloom endpoint`.

use clap::{Args, Subcommand};
use flowloom_model::VpcName;

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::endpoint::{many, one};
use crate::peers::EndpointArg;

#[derive(Debug, Subcommand)]
pub(crate) enum EndpointCommand {
    List(ListArgs),
    Get(GetArgs),
}

/// List the endpoints of this node.
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  flowloom endpoint list
  flowloom endpoint list --vpc red -o wide"
)]
pub(crate) struct ListArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// Show one endpoint with its conditions.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom endpoint get red/web-1
  flowloom endpoint get shop/front-0
  flowloom endpoint get web-1 --vpc red -o yaml")]
pub(crate) struct GetArgs {
    /// vpc/name or namespace/pod; a name alone is one of --vpc, or of the default VPC.
    endpoint: EndpointArg,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
}

pub(crate) fn run(context: &mut Context<'_>, command: &EndpointCommand) -> Result<Exit, Failure> {
    match command {
        EndpointCommand::List(args) => {
            let mut list = context.client().endpoints()?;
            if let Some(vpc) = &args.vpc {
                list.endpoints.retain(|e| e.vpc.name == vpc.as_str());
            }
            context.show(&list, many)?;
        }
        EndpointCommand::Get(args) => {
            let (vpc, name) = args.endpoint.resolve(args.vpc.as_ref())?;
            let endpoint = context.client().endpoint(&vpc, &name)?;
            context.show(&endpoint, one)?;
        }
    }
    Ok(Exit::Ok)
}
