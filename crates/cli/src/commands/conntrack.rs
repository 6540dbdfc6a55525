//! `flowloom ct`.

use std::net::IpAddr;

use clap::{Args, Subcommand};
use flowloom_api::v1::{ConntrackFilter, ConntrackFlushed};
use flowloom_model::VpcName;

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::{conntrack::many, table::count};
use crate::peers::EndpointArg;
use crate::values::protocol;

#[derive(Debug, Subcommand)]
pub(crate) enum ConntrackCommand {
    List(ListArgs),
    Flush(FlushArgs),
}

/// List tracked connections with the decisions they carry.
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  flowloom ct list --vpc red
  flowloom ct list --endpoint red/web-1 --protocol tcp --port 443 -o wide"
)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    filter: Filter,
    /// Most connections shown.
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    limit: u32,
}

/// Forget tracked connections: their next packet is decided anew.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom ct flush --endpoint red/web-1
  flowloom ct flush --vpc red --protocol udp --port 53
  flowloom ct flush --all")]
pub(crate) struct FlushArgs {
    #[command(flatten)]
    filter: Filter,
    /// All of them; needed when nothing else is said.
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Args)]
struct Filter {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// An endpoint of this node at either side: vpc/name or namespace/pod.
    #[arg(long)]
    endpoint: Option<EndpointArg>,
    /// An address at either side.
    #[arg(long)]
    address: Option<IpAddr>,
    /// A port at either side.
    #[arg(long)]
    port: Option<u16>,
    /// tcp, udp, icmp, icmpv6, sctp or a number.
    #[arg(long, value_parser = protocol)]
    protocol: Option<String>,
}

impl Filter {
    fn resolve(&self) -> Result<ConntrackFilter, Failure> {
        let mut filter = ConntrackFilter {
            vpc: self.vpc.as_ref().map(ToString::to_string),
            endpoint: None,
            address: self.address,
            port: self.port,
            protocol: self.protocol.clone(),
            limit: None,
        };
        if let Some(endpoint) = &self.endpoint {
            let (vpc, name) = endpoint.resolve(self.vpc.as_ref())?;
            (filter.vpc, filter.endpoint) = (Some(vpc), Some(name));
        }
        Ok(filter)
    }
}

pub(crate) fn run(context: &mut Context<'_>, command: &ConntrackCommand) -> Result<Exit, Failure> {
    match command {
        ConntrackCommand::List(args) => {
            let filter = ConntrackFilter { limit: Some(args.limit), ..args.filter.resolve()? };
            let list = context.client().conntrack(&filter)?;
            context.show(&list, many)?;
            if list.truncated {
                context.note(&format!("more than {} connections match: use filters or --limit", args.limit));
            }
        }
        ConntrackCommand::Flush(args) => {
            let filter = args.filter.resolve()?;
            if (filter == ConntrackFilter::default()) != args.all {
                return Err(Failure::usage("say which connections (--vpc, --endpoint, ...), or --all alone"));
            }
            let flushed = context.client().conntrack_flush(&filter)?;
            context.show(&flushed, |f: &ConntrackFlushed, _| {
                format!("{} forgotten\n", count(f.removed, "connection"))
            })?;
        }
    }
    Ok(Exit::Ok)
}
