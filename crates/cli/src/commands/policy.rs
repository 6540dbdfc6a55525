//! `flowloom policy`.

use std::time::Duration;

use clap::{Args, Subcommand};
use flowloom_api::Side;
use flowloom_api::v1::{ExplainRequest, HoldRequest, QuarantineRequest, RollbackRequest};
use flowloom_model::VpcName;

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::{history, policy};
use crate::peers::EndpointArg;
use crate::values::{PacketArgs, duration, family};

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    Entries(EntriesArgs),
    Rules(RulesArgs),
    Explain(ExplainArgs),
    Wait(WaitArgs),
    History(HistoryArgs),
    Quarantine(QuarantineArgs),
    Freeze(FreezeArgs),
    Rollback(RollbackArgs),
    Release(ReleaseArgs),
}

/// Show compiled policies as the kernel holds them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy entries
  flowloom policy entries red/web-1 -o wide")]
pub(crate) struct EntriesArgs {
    /// Only the policies of this endpoint: vpc/name or namespace/pod.
    endpoint: Option<EndpointArg>,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// Show how often each rule decided.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy rules
  flowloom policy rules --vpc red -o json")]
pub(crate) struct RulesArgs {
    /// Only this VPC.
    #[arg(long)]
    vpc: Option<VpcName>,
}

/// Say whether one peer may talk to another, which rule decides, and what the kernel says.
///
/// Exit code 4: it may not. In a security group the lower priority number wins; tier 0 comes before tier 1. To a Service: every
/// backend in use is judged; with one of them refused the answer is no.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy explain red/web-1 red/db tcp/5432
  flowloom policy explain shop/front-0 svc/shop/db tcp/5432
  flowloom policy explain shop/front-0 pod/shop/db-0 tcp/5432
  flowloom policy explain red/10.0.0.5 red/db icmp
  flowloom policy explain web-1 fd00::7 udp/53 --vpc red -o json")]
pub(crate) struct ExplainArgs {
    /// Who sends: vpc/endpoint, namespace/pod, svc/namespace/name or vpc/address.
    from: Side,
    /// Who receives: vpc/endpoint, namespace/pod, svc/namespace/name or vpc/address.
    to: Side,
    #[command(flatten)]
    packet: PacketArgs,
    /// The VPC, when neither side names one.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Address family, for endpoints that have both.
    #[arg(long, value_name = "4|6", value_parser = family)]
    family: Option<u8>,
}

/// Wait until the policy of an endpoint, or the whole document, is in force.
///
/// Exit code 5: not in time.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy wait
  flowloom policy wait --generation 12
  flowloom policy wait red/web-1 --revision 7 --timeout 5s")]
pub(crate) struct WaitArgs {
    /// vpc/name or namespace/pod; everything the agent knows of when absent.
    endpoint: Option<EndpointArg>,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// The endpoint's policy revision to wait for.
    #[arg(long, requires = "endpoint")]
    revision: Option<u32>,
    /// The document's generation to wait for.
    #[arg(long)]
    generation: Option<u64>,
    /// How long.
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = duration)]
    timeout: Duration,
}

/// Show who changed the policy of which endpoint, what became of it, and when.
///
/// The agent keeps the last 2000 changes of its node, also over restarts.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy history
  flowloom policy history red/web-1 --last 5 -o wide
  flowloom policy history -o json")]
pub(crate) struct HistoryArgs {
    /// Only changes of this endpoint: vpc/name or namespace/pod.
    endpoint: Option<EndpointArg>,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Only the last changes.
    #[arg(long, value_name = "N")]
    last: Option<u32>,
}

/// Let nothing pass to or from an endpoint, open connections included, until it is released.
///
/// Without a direction: both. Returns once it is in force. It survives restarts of the agent and changes of rules. In a closed
/// direction no connection can be opened; answers on connections that the other direction allows still come. The node itself reaches
/// the endpoint still where its `allow_localhost` is `always`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy quarantine red/web-1 --reason ticket-4711
  flowloom policy quarantine red/web-1 --ingress
  flowloom policy quarantine shop/front-0 --egress -o json")]
pub(crate) struct QuarantineArgs {
    #[command(flatten)]
    hold: HoldArgs,
    /// Nothing may come in.
    #[arg(long)]
    ingress: bool,
    /// Nothing may go out.
    #[arg(long)]
    egress: bool,
}

/// Keep the rules that an endpoint has now, whatever the document or Kubernetes say, until it is released.
///
/// Peers still come and go: the rules stay, who they speak of does not. It survives restarts of the agent.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy freeze red/web-1
  flowloom policy freeze red/web-1 --reason migration")]
pub(crate) struct FreezeArgs {
    #[command(flatten)]
    hold: HoldArgs,
}

/// Put the rules of an earlier revision of an endpoint in force, and keep them until it is released.
///
/// The agent keeps the rules of the last 8 revisions of each endpoint; `policy history` lists revisions with who made them. A frozen
/// endpoint may be rolled back, and a rolled back one again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy rollback red/web-1 --to 41
  flowloom policy rollback red/web-1 --to 41 --reason outage")]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    hold: HoldArgs,
    /// The revision.
    #[arg(long, value_name = "REVISION")]
    to: u32,
}

/// End an endpoint's quarantine, or where there is none its freeze or rollback.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom policy release red/web-1
  flowloom policy release red/web-1 --reason false-alarm")]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    hold: HoldArgs,
}

#[derive(Debug, Args)]
struct HoldArgs {
    /// vpc/name or namespace/pod.
    endpoint: EndpointArg,
    /// The VPC, when the name has none.
    #[arg(long)]
    vpc: Option<VpcName>,
    /// Why, for whoever meets it; at most 1,024 bytes.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

impl HoldArgs {
    fn request(&self) -> Result<HoldRequest, Failure> {
        let (vpc, endpoint) = self.endpoint.resolve(self.vpc.as_ref())?;
        Ok(HoldRequest { vpc, endpoint, reason: self.reason.clone() })
    }
}

pub(crate) fn run(context: &mut Context<'_>, command: &PolicyCommand) -> Result<Exit, Failure> {
    match command {
        PolicyCommand::Entries(args) => {
            let endpoint = resolve(args.endpoint.as_ref(), args.vpc.as_ref())?;
            let list = context.client().policy_entries(borrow(endpoint.as_ref()))?;
            context.show(&list, policy::entries)?;
        }
        PolicyCommand::Rules(args) => {
            let list = context.client().policy_rules(args.vpc.as_ref().map(VpcName::as_str))?;
            context.show(&list, policy::rules)?;
        }
        PolicyCommand::Explain(args) => return explain(context, args),
        PolicyCommand::Wait(args) => {
            let endpoint = resolve(args.endpoint.as_ref(), args.vpc.as_ref())?;
            let reached = context.client().policy_wait(
                borrow(endpoint.as_ref()),
                args.revision,
                args.generation,
                args.timeout,
            )?;
            context.show(&reached, policy::wait)?;
        }
        PolicyCommand::History(args) => {
            let endpoint = resolve(args.endpoint.as_ref(), args.vpc.as_ref())?;
            let history = context.client().policy_history(borrow(endpoint.as_ref()), args.last)?;
            context.show(&history, history::changes)?;
        }
        PolicyCommand::Quarantine(args) => {
            let HoldRequest { vpc, endpoint, reason } = args.hold.request()?;
            let both = args.ingress == args.egress;
            let (ingress, egress) = (args.ingress || both, args.egress || both);
            let request = QuarantineRequest { vpc, endpoint, ingress, egress, reason };
            let hold = context.client().quarantine(&request)?;
            context.show(&hold, policy::hold)?;
        }
        PolicyCommand::Freeze(args) => {
            let hold = context.client().freeze(&args.hold.request()?)?;
            context.show(&hold, policy::hold)?;
        }
        PolicyCommand::Rollback(args) => {
            let HoldRequest { vpc, endpoint, reason } = args.hold.request()?;
            let request = RollbackRequest { vpc, endpoint, revision: args.to, reason };
            let hold = context.client().rollback(&request)?;
            context.show(&hold, policy::hold)?;
        }
        PolicyCommand::Release(args) => {
            let hold = context.client().release(&args.hold.request()?)?;
            context.show(&hold, policy::hold)?;
        }
    }
    Ok(Exit::Ok)
}

fn explain(context: &mut Context<'_>, args: &ExplainArgs) -> Result<Exit, Failure> {
    let what = args.packet.traffic_to(&args.to)?;
    let request = ExplainRequest {
        vpc: args.vpc.as_ref().map(ToString::to_string).unwrap_or_default(),
        from: args.from.to_string(),
        to: args.to.to_string(),
        protocol: what.protocol,
        port: what.port,
        icmp_type: what.icmp_type,
        icmp_code: what.icmp_code,
        family: args.family,
    };
    let explanation = context.client().explain(&request)?;
    context.show(&explanation, policy::explanation)?;
    Ok(if policy::passes(explanation.verdict) { Exit::Ok } else { Exit::Denied })
}

fn resolve(
    endpoint: Option<&EndpointArg>,
    vpc: Option<&VpcName>,
) -> Result<Option<(String, String)>, Failure> {
    match (endpoint, vpc) {
        (Some(e), vpc) => e.resolve(vpc).map(Some),
        (None, Some(_)) => Err(Failure::usage("--vpc needs an endpoint's name here")),
        (None, None) => Ok(None),
    }
}

fn borrow(pair: Option<&(String, String)>) -> Option<(&str, &str)> {
    pair.map(|(vpc, name)| (vpc.as_str(), name.as_str()))
}
