//! `flowloom-lab`: the command behind `cargo xtask lab`, and the first process of every member of a lab.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use flowloom_lab::conformance::Conformance;
use flowloom_lab::{Cni, Families, Lab, Options, Proxy, Routes, init, member, name_server};

/// A real Kubernetes cluster on this machine (see docs/lab.md).
#[derive(Parser)]
#[command(name = "cargo xtask lab")]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build Kubernetes' programs with Go, and the images; skips what is up to date.
    Build {
        /// Also upstream's suites and what they run.
        #[arg(long)]
        suites: bool,
    },
    /// Bring a cluster up and leave it running.
    Up(Up),
    /// Take it down.
    Down {
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// kubectl as administrator.
    Kubectl {
        #[arg(long, default_value = "lab")]
        name: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run a command on a node (n1, n2...), the control plane (cp) or the outside host (ext).
    Exec {
        #[arg(long, default_value = "lab")]
        name: String,
        node: String,
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// What runs, and how much memory it has.
    Status {
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// Run groups of upstream's suites on a cluster of their own; everything when none is named.
    Conformance(Suites),
    /// The names of the groups.
    Groups,
    /// Write the names of upstream's tests anew, after its version changed (`build --suites` first).
    Names,
    #[command(hide = true)]
    MemberStart { dir: PathBuf },
    #[command(hide = true)]
    MemberInit { dir: PathBuf },
    #[command(hide = true)]
    MemberEnter {
        dir: PathBuf,
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    #[command(hide = true)]
    NameServer,
}

#[derive(clap::Args)]
struct Up {
    /// Up to 8 lower-case letters and digits; labs of different names run side by side.
    #[arg(long, default_value = "lab")]
    name: String,
    #[arg(long, default_value_t = 2)]
    nodes: u8,
    /// Who wires Pods.
    #[arg(long, value_enum, default_value = "flowloom")]
    cni: Cni,
    /// Who serves Services; by default kube-proxy, but not beside flowloom.
    #[arg(long, value_enum)]
    proxy: Option<Proxy>,
    /// Address families of Pods and Services.
    #[arg(long, value_enum, default_value = "dual")]
    ip: Families,
    /// How flowloom reaches other nodes' Pods.
    #[arg(long, value_enum, default_value = "vxlan")]
    routes: Routes,
    /// Directory of manifests to apply, workloads aside; the repository's `deploy/` with flowloom.
    #[arg(long)]
    manifests: Option<PathBuf>,
    /// Load the suites' images and start the cluster's DNS.
    #[arg(long)]
    suites: bool,
}

#[derive(clap::Args)]
struct Suites {
    groups: Vec<String>,
    /// Tests at the same time.
    #[arg(long, default_value_t = 3)]
    procs: u8,
    /// Use the cluster that is up under this name (`up --suites`), and leave it.
    #[arg(long)]
    on: Option<String>,
    /// A test of health-check ports wants three.
    #[arg(long, default_value_t = 3)]
    nodes: u8,
    #[arg(long, value_enum, default_value = "flowloom")]
    cni: Cni,
    #[arg(long, value_enum, default_value = "dual")]
    ip: Families,
    #[arg(long, value_enum, default_value = "vxlan")]
    routes: Routes,
    /// Kill the first node's agent every so many seconds and start it again.
    #[arg(long)]
    kill_agent_every: Option<u64>,
    /// Flags for the suite itself.
    #[arg(last = true)]
    more: Vec<String>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("flowloom-lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Build { suites } => {
            flowloom_lab::build_programs(suites)?;
            flowloom_lab::build_images(suites)?;
        }
        Verb::Up(up) => bring_up(up)?,
        Verb::Down { name } => {
            let start = Instant::now();
            Lab::down(&name)?;
            println!("lab {name}: down in {:.1} s", start.elapsed().as_secs_f32());
        }
        Verb::Kubectl { name, args } => {
            let argv = Lab::open(&name)?.kubectl_argv();
            return forward(&argv, &args);
        }
        Verb::Exec { name, node, command } => {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            return forward(&Lab::open(&name)?.exec_argv(&node, &words)?, &[]);
        }
        Verb::Status { name } => status(&name)?,
        Verb::Conformance(suites) => conformance(suites)?,
        Verb::Groups => flowloom_lab::suites::names().iter().for_each(|name| println!("{name}")),
        Verb::Names => println!("tests/lab/sig-network.txt: {} tests", flowloom_lab::upstream::write()?),
        Verb::MemberStart { dir } => member::start_command(&dir)?,
        Verb::MemberInit { dir } => init::command(&dir)?,
        Verb::MemberEnter { dir, command } => match member::enter_command(&dir, &command)? {},
        Verb::NameServer => name_server::serve()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn bring_up(up: Up) -> Result<()> {
    let start = Instant::now();
    let proxy = up.proxy.unwrap_or(if up.cni == Cni::Flowloom { Proxy::None } else { Proxy::KubeProxy });
    let options = Options {
        nodes: up.nodes,
        cni: up.cni,
        proxy,
        families: up.ip,
        routes: up.routes,
        manifests: up.manifests,
        suites: up.suites,
        // Until it is up: what an interrupted `up` leaves, the next one removes.
        owner: Some(std::process::id()),
        ..Options::new(&up.name)
    };
    let mut lab = Lab::up(options)?;
    lab.keep()?;
    println!(
        "lab {}: up in {:.1} s, state in {}",
        up.name,
        start.elapsed().as_secs_f32(),
        lab.state().display()
    );
    println!(
        "cargo xtask lab kubectl get pods -A; cargo xtask lab exec n1 -- ip route; cargo xtask lab down"
    );
    Ok(())
}

fn conformance(asked: Suites) -> Result<()> {
    let known = flowloom_lab::suites::names();
    if let Some(unknown) = asked.groups.iter().find(|g| !known.contains(&g.as_str())) {
        anyhow::bail!("no group {unknown}; there are: {}", known.join(", "));
    }
    let cluster = asked.on.map_or_else(
        || {
            let proxy = if asked.cni == Cni::Flowloom { Proxy::None } else { Proxy::KubeProxy };
            Ok(Options {
                nodes: asked.nodes,
                cni: asked.cni,
                proxy,
                families: asked.ip,
                routes: asked.routes,
                suites: true,
                owner: Some(std::process::id()),
                ..Options::new("suites")
            })
        },
        Err,
    );
    flowloom_lab::conformance::run(&Conformance {
        groups: asked.groups,
        cluster,
        procs: asked.procs,
        kill_agent_every: asked.kill_agent_every.map(std::time::Duration::from_secs),
        more: asked.more,
    })
}

fn status(name: &str) -> Result<()> {
    let lab = Lab::open(name)?;
    let mut sum = 0;
    for (member, service, state, kib) in lab.status()? {
        sum += kib;
        let how = state.ended.unwrap_or_else(|| "runs".to_owned());
        println!("{member:<4} {service:<26} {how:<18} {:>5} MiB", kib >> 10);
    }
    println!("{:<50} {:>5} MiB", "resident, shared pages counted by each", sum >> 10);
    Ok(())
}

/// The terminal is the command's; its exit status is ours.
fn forward(argv: &[String], more: &[String]) -> Result<ExitCode> {
    let (program, args) = argv.split_first().context("an empty command line")?;
    let status = Command::new(program).args(args).args(more).stdin(Stdio::inherit()).status()?;
    Ok(u8::try_from(status.code().unwrap_or(1)).map_or(ExitCode::FAILURE, ExitCode::from))
}
