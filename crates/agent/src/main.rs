//! `flowloom-agent`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flowloom_agent::agent;
use flowloom_agent::config::Config;

/// Node agent of flowloom: wires workloads, enforces their policies, answers the API.
#[derive(Parser, Debug)]
#[command(version, about)]
struct Arguments {
    /// Configuration file (see docs/agent-config.md).
    #[arg(long, global = true, default_value = "/etc/flowloom/agent.yaml")]
    config: PathBuf,
    /// This node's name; wins over the configuration's `node`.
    #[arg(long, global = true)]
    node: Option<flowloom_model::NodeName>,
    /// Read and check the configuration, then end.
    #[arg(long)]
    check_config: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Remove every device, namespace, route, table, map and file of this agent's making.
    Uninstall,
}

fn main() -> ExitCode {
    flowloom_datapath::sys::one_heap();
    // Before there are threads. One that cannot answer as soon answers all the same.
    let _ = flowloom_netlink::small_slices();
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("flowloom-agent: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let config = Config::load_for(&arguments.config, arguments.node.clone())?;
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log)
        .map_err(|e| anyhow::anyhow!("{}: log: {e}", arguments.config.display()))?;
    if arguments.check_config {
        println!("{}: good", arguments.config.display());
        return Ok(());
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_writer(std::io::stderr)
        .init();
    match arguments.command {
        Some(Command::Uninstall) => agent::remove(&config),
        None => agent::run(config),
    }
}
