//! `flowloom service`.

use std::str::FromStr;

use clap::{Args, Subcommand};
use flowloom_model::{DEFAULT_VPC, VpcName};

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::service;

#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    List(ListArgs),
    Get(GetArgs),
    Explain(ExplainArgs),
}

/// List services.
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  flowloom service list
  flowloom service list --vpc red -o wide"
)]
pub(crate) struct ListArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// Show one service with its conditions.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom service get shop/front
  flowloom service get red/web -o yaml")]
pub(crate) struct GetArgs {
    /// namespace/name of a Kubernetes Service, or vpc/name.
    service: ServiceArg,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// Say which backends a service has on this node, and for each why it is used or not.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom service explain svc/shop/front
  flowloom service explain red/web -o json")]
pub(crate) struct ExplainArgs {
    /// namespace/name of a Kubernetes Service, or vpc/name.
    service: ServiceArg,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// A service as people write it: `vpc/name`, `namespace/name`, `svc/namespace/name`, or a name alone.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ServiceArg {
    before: Option<String>,
    name: String,
}

impl FromStr for ServiceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("svc/").unwrap_or(text);
        let (before, name) = match rest.split_once('/') {
            Some((before, name)) => (Some(before.to_owned()), name),
            None => (None, rest),
        };
        if name.is_empty() || name.contains('/') || before.as_ref().is_some_and(String::is_empty) {
            return Err(format!("{text:?} is not a service: write namespace/name or vpc/name"));
        }
        Ok(Self { before, name: name.to_owned() })
    }
}

impl ServiceArg {
    fn resolve<'a>(&'a self, vpc: Option<&'a VpcName>) -> Result<(&'a str, &'a str), Failure> {
        match (self.before.as_deref(), vpc) {
            (Some(before), Some(vpc)) if before != vpc.as_str() => {
                Err(Failure::usage(format!("the service is one of {before}, --vpc says {vpc}")))
            }
            (Some(before), _) => Ok((before, &self.name)),
            (None, vpc) => Ok((vpc.map_or(DEFAULT_VPC, VpcName::as_str), &self.name)),
        }
    }
}

pub(crate) fn run(context: &mut Context<'_>, command: &ServiceCommand) -> Result<Exit, Failure> {
    match command {
        ServiceCommand::List(args) => {
            let list = context.client().services(args.vpc.as_ref().map(VpcName::as_str))?;
            context.show(&list, service::many)?;
        }
        ServiceCommand::Get(args) => {
            let (vpc, name) = args.service.resolve(args.vpc.as_ref())?;
            let found = context.client().service(vpc, name)?;
            context.show(&found, service::one)?;
        }
        ServiceCommand::Explain(args) => {
            let (vpc, name) = args.service.resolve(args.vpc.as_ref())?;
            let explained = context.client().service_explain(vpc, name)?;
            context.show(&explained, service::explanation)?;
        }
    }
    Ok(Exit::Ok)
}
