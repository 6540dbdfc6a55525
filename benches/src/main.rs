//! `cargo xtask bench NAME [--verify]`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use flowloom_benches::k8s;
use flowloom_benches::node::{self, Effort};
use flowloom_benches::report::Report;
use flowloom_benches::{pods, services};

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    Node,
    K8s,
    Services,
    Pods,
}

/// Measures flowloom against peers in the same run.
#[derive(Parser)]
struct Args {
    /// Which benchmark.
    name: Name,
    /// Run short and compare with the record instead of writing it; a ratio that moved more than 20 % fails.
    #[arg(long)]
    verify: bool,
    /// Only this part (may be given again): a name that is none lists them.
    #[arg(long = "part")]
    parts: Vec<String>,
    /// Where `benchmarks.json` and `benchmarks.md` are.
    #[arg(long, default_value = "docs")]
    docs: PathBuf,
}

fn run(args: &Args) -> Result<bool> {
    let effort = if args.verify { Effort::short() } else { Effort::full() };
    let measures = match args.name {
        Name::Node => node::bench(effort, &args.parts)?,
        Name::K8s => k8s::bench(effort, &args.parts)?,
        Name::Services => services::bench(effort, &args.parts)?,
        Name::Pods => pods::bench(effort, &args.parts)?,
    };
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let new = Report { kernel, cpus: std::thread::available_parallelism()?.get(), measures };
    let mut recorded = Report::read(&args.docs.join("benchmarks.json"))?;
    println!("{}", new.page());
    if args.verify {
        let strays = new.strays(&recorded, 0.2);
        for stray in &strays {
            println!("{stray}");
        }
        return Ok(strays.is_empty());
    }
    recorded.merge(new);
    recorded.write(&args.docs)?;
    Ok(true)
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}
