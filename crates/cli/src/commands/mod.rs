//! The commands: one module per group, each with its arguments and what it does.

mod apply;
mod cni;
mod conntrack;
mod endpoint;
mod kubernetes;
mod node;
mod observe;
mod policy;
mod service;
mod trace;
mod validate;
mod wait;

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use flowloom_api::DEFAULT_SOCKET;

use crate::context::{Context, Streams};
use crate::exit::{Exit, Failure};
use crate::output::{Colour, Format};

const EXIT_CODES: &str = "\
Exit codes:
  0  done; for `policy explain` and `trace`: the packet passes
  1  something is wrong: a document, an object, a refusal
  2  the command line is wrong
  3  the agent cannot be reached
  4  `policy explain` and `trace`: the packet does not pass
  5  what was waited for did not happen in time";

/// Virtual networks, enforced policy, and sight: the desired state is a document; the node's agent makes it so.
#[derive(Debug, Parser)]
#[command(name = "flowloom", version, max_term_width = 100, after_help = EXIT_CODES, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// The agent's Unix socket.
    #[arg(long, global = true, env = "FLOWLOOM_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// How answers are shown.
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    output: Format,
    /// When to use colours.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    color: Colour,
}

#[derive(Debug, Subcommand)]
enum Command {
    Validate(validate::ValidateArgs),
    Apply(apply::ApplyArgs),
    Status(node::StatusArgs),
    /// Endpoints of this node.
    #[command(subcommand, visible_alias = "ep")]
    Endpoint(endpoint::EndpointCommand),
    Ipam(node::IpamArgs),
    /// Identities: the numbers that peers have on this node.
    #[command(subcommand)]
    Identity(node::IdentityCommand),
    /// Policies: what the kernel holds, who may talk to whom and why.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Services: their addresses, their backends on this node, and why.
    #[command(subcommand, visible_alias = "svc")]
    Service(service::ServiceCommand),
    /// Kubernetes: what the agent knows from the API server.
    #[command(subcommand, name = "k8s")]
    Kubernetes(kubernetes::KubernetesCommand),
    Observe(observe::ObserveArgs),
    Trace(trace::TraceArgs),
    /// Tracked connections.
    #[command(subcommand)]
    Ct(conntrack::ConntrackCommand),
    Drops(observe::DropsArgs),
    /// Container runtimes on this node.
    #[command(subcommand)]
    Cni(cni::CniCommand),
    Completion(CompletionArgs),
    Version(VersionArgs),
}

/// Print a completion script.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom completion bash > /etc/bash_completion.d/flowloom
  flowloom completion zsh > \"${fpath[1]}/_flowloom\"
  flowloom completion fish > ~/.config/fish/completions/flowloom.fish")]
struct CompletionArgs {
    /// The shell.
    shell: Shell,
}

/// Print the versions of this command and of the agent.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom version
  flowloom version --client -o json")]
struct VersionArgs {
    /// Do not ask the agent.
    #[arg(long)]
    client: bool,
}

impl Cli {
    /// When to use colours.
    #[must_use]
    pub fn colour(&self) -> Colour {
        self.global.color
    }
}

/// Runs a command; what went wrong is on `err`.
pub fn run(cli: Cli, streams: &mut Streams) -> Exit {
    let mut context = Context { streams, format: cli.global.output, socket: cli.global.socket };
    match dispatch(&mut context, cli.command) {
        Ok(exit) => exit,
        Err(Failure { exit, message }) => {
            if !message.is_empty() {
                context.note(&format!("error: {message}"));
            }
            exit
        }
    }
}

fn dispatch(context: &mut Context<'_>, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Validate(args) => validate::run(context, &args),
        Command::Apply(args) => apply::run(context, &args),
        Command::Status(args) => node::status(context, &args),
        Command::Endpoint(command) => endpoint::run(context, &command),
        Command::Ipam(args) => node::ipam(context, &args),
        Command::Identity(command) => node::identity(context, &command),
        Command::Policy(command) => policy::run(context, &command),
        Command::Service(command) => service::run(context, &command),
        Command::Kubernetes(command) => kubernetes::run(context, &command),
        Command::Observe(args) => observe::run(context, &args),
        Command::Trace(args) => trace::run(context, &args),
        Command::Ct(command) => conntrack::run(context, &command),
        Command::Drops(args) => observe::drops(context, &args),
        Command::Cni(command) => cni::run(context, &command),
        Command::Completion(args) => completion(context, args.shell),
        Command::Version(args) => node::version(context, args.client),
    }
}

fn completion(context: &mut Context<'_>, shell: Shell) -> Result<Exit, Failure> {
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "flowloom", &mut script);
    context.streams.out.write_all(&script)?;
    Ok(Exit::Ok)
}
