//! `flowloom-controller`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use flowloom_controller::config::Config;
use flowloom_controller::run;

/// Cluster controller of flowloom: publishes what every node needs of the others. One leads, others stand by.
#[derive(Parser, Debug)]
#[command(version, about)]
struct Arguments {
    /// Configuration file (see docs/controller-config.md).
    #[arg(long, default_value = "/etc/flowloom/controller.yaml")]
    config: PathBuf,
    /// Read and check the configuration, then end.
    #[arg(long)]
    check_config: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match start(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("flowloom-controller: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: &Arguments) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config)?;
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
    run::run(&config)
}
