//! `cargo xtask`: everything that builds, checks, tests and measures flowloom, on one screen (`cargo xtask --help`).

mod abi;
mod again;
mod bpf;
mod check;
mod deploy;
mod features;
mod lab;
mod layers;
mod run;
mod tiers;
mod vm;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, check, test and measure flowloom")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the kernel programs (rustup nightly + rust-src, or Debian's rustc-web + rust-web-src).
    Bpf(bpf::Args),
    /// Formatting, lints, layers, licences, links, ABI: all that needs neither root nor the BPF toolchain.
    Check(check::Args),
    /// Run test tiers: check, unit, kernel, e2e, demo (all when none is named); k8s and conformance by name.
    Test(tiers::Args),
    /// Build everything and run the demonstration.
    Demo(tiers::DemoArgs),
    /// Write the Kubernetes manifests of deploy/ from the code.
    Deploy(deploy::Args),
    /// Measure against peers in the same run; writes docs/benchmarks.json and .md.
    Bench(tiers::BenchArgs),
    /// A real Kubernetes cluster on this machine: build, up, down, kubectl, exec, status (docs/lab.md).
    Lab(lab::Args),
    /// Record the layout of the map ABI after a deliberate change (`docs/abi.lock`).
    Abi(abi::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bpf(args) => bpf::run(args),
        Command::Check(args) => check::run(&args),
        Command::Test(args) => tiers::run(&args),
        Command::Demo(args) => tiers::demo(&args),
        Command::Deploy(args) => deploy::run(&args),
        Command::Bench(args) => tiers::bench(&args),
        Command::Lab(args) => lab::run(&args),
        Command::Abi(args) => abi::run(&args),
    }
}
