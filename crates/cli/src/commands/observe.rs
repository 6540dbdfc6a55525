//! `flowloom observe` and `flowloom drops`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use flowloom_api::Side;
use flowloom_api::v1::{DropFilter, EventFilter, Verdict};
use flowloom_model::VpcName;

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::{Format, View, drops, event};
use crate::peers::EndpointArg;
use crate::values::{duration, reason};

/// Show verdicts on new connections and dropped packets, by name.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom observe --last 20
  flowloom observe --follow --vpc red --verdict drop
  flowloom observe -f --endpoint red/web-1 --reason PolicyIngress -o json
  flowloom observe -f --from shop/front-0 --to svc/shop/db
  flowloom observe --follow --for 10s")]
pub(crate) struct ObserveArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// At either side: vpc/name, namespace/pod, svc/namespace/name, an address, or an endpoint's name of any VPC.
    #[arg(long, value_name = "SIDE")]
    endpoint: Option<Side>,
    /// The same at the sender's side.
    #[arg(long, value_name = "SIDE")]
    from: Option<Side>,
    /// The same at the receiver's side. A Service is its addresses, and the backends it has now.
    #[arg(long, value_name = "SIDE")]
    to: Option<Side>,
    /// Only this verdict.
    #[arg(long, value_enum)]
    verdict: Option<VerdictArg>,
    /// Only this drop reason.
    #[arg(long, value_parser = reason)]
    reason: Option<String>,
    /// Go on as events come.
    #[arg(short, long)]
    follow: bool,
    /// Only the newest N of what the agent remembers.
    #[arg(long, value_name = "N")]
    last: Option<u32>,
    /// End when nothing came for this long.
    #[arg(long = "for", value_name = "TIME", value_parser = duration, requires = "follow")]
    idle: Option<Duration>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum VerdictArg {
    Allow,
    Drop,
    Reject,
}

/// Show how many packets were dropped, where and why.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom drops
  flowloom drops --endpoint red/web-1 -o wide
  flowloom drops --reason SpoofedSource -o json")]
pub(crate) struct DropsArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Only this endpoint: vpc/name or namespace/pod.
    #[arg(long)]
    endpoint: Option<EndpointArg>,
    /// Only this reason.
    #[arg(long, value_parser = reason)]
    reason: Option<String>,
}

pub(crate) fn run(context: &mut Context<'_>, args: &ObserveArgs) -> Result<Exit, Failure> {
    let side = |side: &Option<Side>| side.as_ref().map(ToString::to_string);
    let filter = EventFilter {
        vpc: args.vpc.as_ref().map(ToString::to_string),
        endpoint: side(&args.endpoint),
        from: side(&args.from),
        to: side(&args.to),
        verdict: args.verdict.map(|v| match v {
            VerdictArg::Allow => Verdict::Allow,
            VerdictArg::Drop => Verdict::Drop,
            VerdictArg::Reject => Verdict::Reject,
        }),
        reason: args.reason.clone(),
        follow: args.follow,
        last: args.last,
    };
    let mut stream = context.client().events(&filter)?;
    if args.idle.is_some() {
        stream.set_idle_timeout(args.idle)?;
    }
    let view = View { wide: context.format == Format::Wide, colour: context.streams.colour };
    for item in stream {
        let item = match item {
            Err(flowloom_api::ClientError::Timeout { .. }) if args.idle.is_some() => return Ok(Exit::Ok),
            other => other?,
        };
        let text = match context.format {
            Format::Table | Format::Wide => event::line(&item, view),
            Format::Json => serde_json::to_string(&item).map_err(|e| Failure::error(e.to_string()))?,
            Format::Yaml => {
                let text = serde_saphyr::to_string(&item).map_err(|e| Failure::error(e.to_string()))?;
                format!("---\n{}", text.trim_end())
            }
        };
        writeln!(context.streams.out, "{text}")?;
        context.streams.out.flush()?;
    }
    if args.follow {
        // Only the agent's end closes a stream that follows.
        return Err(Failure { exit: Exit::Unavailable, message: "the agent ended the stream".to_owned() });
    }
    Ok(Exit::Ok)
}

pub(crate) fn drops(context: &mut Context<'_>, args: &DropsArgs) -> Result<Exit, Failure> {
    let mut filter = DropFilter {
        vpc: args.vpc.as_ref().map(ToString::to_string),
        endpoint: None,
        reason: args.reason.clone(),
    };
    if let Some(endpoint) = &args.endpoint {
        let (vpc, name) = endpoint.resolve(args.vpc.as_ref())?;
        (filter.vpc, filter.endpoint) = (Some(vpc), Some(name));
    }
    let list = context.client().drops(&filter)?;
    context.show(&list, drops::many)?;
    Ok(Exit::Ok)
}
