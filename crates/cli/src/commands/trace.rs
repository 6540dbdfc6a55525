//! `flowloom trace`.

use clap::Args;
use flowloom_api::Side;
use flowloom_api::v1::{Direction, TraceRequest};
use flowloom_model::VpcName;

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::{policy::passes, trace::report};
use crate::values::{PacketArgs, family};

/// Name each step of an imagined packet through the node's own programs and maps.
///
/// The programs run as they are, over the live maps, and change nothing. Exit code 4: the packet does not pass.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom trace red/web-1 red/db tcp/5432
  flowloom trace shop/front-0 svc/shop/db tcp/5432
  flowloom trace red/web-1 red/10.0.0.9 udp/53 --src-port 5353
  flowloom trace red/10.0.0.9 red/web-1 tcp/80 --ingress
  flowloom trace web-1 db tcp/80 --vpc red --flags A -o wide")]
pub(crate) struct TraceArgs {
    /// Who sends: vpc/endpoint or namespace/pod (of this node, unless --ingress), or vpc/address.
    from: Side,
    /// Who receives: vpc/endpoint, namespace/pod, svc/namespace/name or vpc/address.
    to: Side,
    #[command(flatten)]
    packet: PacketArgs,
    /// The VPC, when neither side names one.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Source port.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    src_port: Option<u16>,
    /// TCP flags as letters: S, SA, A, F, R, P.
    #[arg(long, value_name = "FLAGS")]
    flags: Option<String>,
    /// Bytes of payload.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(..=8192))]
    payload: Option<u16>,
    /// Address family, for endpoints that have both.
    #[arg(long, value_name = "4|6", value_parser = family)]
    family: Option<u8>,
    /// What reaches the receiver through this host's stack, instead of what the sender sends.
    #[arg(long)]
    ingress: bool,
}

pub(crate) fn run(context: &mut Context<'_>, args: &TraceArgs) -> Result<Exit, Failure> {
    let what = args.packet.traffic_to(&args.to)?;
    if what.icmp_type.is_some() {
        return Err(Failure::usage("a trace sends an echo request: write icmp without a type"));
    }
    if args.flags.is_some() && what.protocol != "tcp" {
        return Err(Failure::usage("--flags needs tcp"));
    }
    let request = TraceRequest {
        vpc: args.vpc.as_ref().map(ToString::to_string).unwrap_or_default(),
        from: args.from.to_string(),
        to: args.to.to_string(),
        protocol: what.protocol,
        src_port: args.src_port,
        port: what.port,
        tcp_flags: args.flags.as_ref().map(|f| f.to_ascii_uppercase()),
        family: args.family,
        payload: args.payload,
        direction: args.ingress.then_some(Direction::Ingress),
    };
    let trace = context.client().trace(&request)?;
    context.show(&trace, report)?;
    Ok(if passes(trace.verdict) { Exit::Ok } else { Exit::Denied })
}
