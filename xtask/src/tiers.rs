//! Test tiers and the demonstration. Each tier says what it needs and fails loudly without it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::{again, bpf, check, lab, run, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tiers to run, in this order: check, unit, kernel, e2e, demo. All when none is named. By name only: k8s, vm; and
    /// `conformance [GROUP]...`, upstream's suites.
    #[arg(allow_hyphen_values = true)]
    tiers: Vec<String>,
}

#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    /// Leave it running (the two nodes until Enter, a cluster until it is taken down), and say how to look around.
    #[arg(long)]
    keep: bool,
    /// A shop on a Kubernetes cluster of two nodes, instead.
    #[arg(long)]
    k8s: bool,
}

#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Which benchmark: node, k8s, services, pods (the last needs `scripts/setup.sh --k8s`).
    name: String,
    /// Run short and compare with the record; a ratio that moved more than 20 % fails.
    #[arg(long)]
    verify: bool,
    /// Only this part (may be given again); a name that is none lists them.
    #[arg(long = "part")]
    parts: Vec<String>,
}

/// What a tier tells when it passes: the tests that did so only when they ran again.
type Flaked = Vec<String>;
type Tier = (&'static str, fn() -> Result<Flaked>);
const TIERS: &[Tier] = &[
    ("check", || check::run(&check::Args::default()).map(|()| Flaked::new())),
    ("unit", || unit().map(|()| Flaked::new())),
    ("kernel", kernel),
    ("e2e", e2e),
    ("demo", || demo(&DemoArgs { keep: false, k8s: false }).map(|()| Flaked::new())),
];

/// Run when they are named: they need Kubernetes' programs (`cargo xtask lab build`, minutes once), or an emulator.
const BY_NAME: &[Tier] = &[("k8s", lab::tier), ("vm", vm::tier)];

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some((first, groups)) = args.tiers.split_first()
        && first == "conformance"
    {
        root_needed()?;
        return lab::conformance(groups);
    }
    let known: Vec<_> = TIERS.iter().chain(BY_NAME).map(|t| t.0).collect();
    if let Some(unknown) = args.tiers.iter().find(|t| !known.contains(&t.as_str())) {
        bail!("no tier {unknown}; there are: {}", known.join(", "));
    }
    let mut summary = Vec::new();
    let mut failed = Vec::new();
    let by_default = |name: &str| args.tiers.is_empty() && TIERS.iter().any(|t| t.0 == name);
    for (name, tier) in TIERS.iter().chain(BY_NAME) {
        if !by_default(name) && !args.tiers.iter().any(|t| t == name) {
            continue;
        }
        println!("== {name}");
        let start = Instant::now();
        let result = tier();
        let (word, flaked) = match &result {
            Ok(flaked) => ("ok", flaked.as_slice()),
            Err(_) => ("FAILED", &[][..]),
        };
        summary.push(format!("tier {name}: {word} in {:.0} s", start.elapsed().as_secs_f32()));
        summary.extend(flaked.iter().map(|t| format!("tier {name}: FLAKED, passed when run again: {t}")));
        if let Err(e) = result {
            println!("{name}: {e:#}");
            failed.push(*name);
            // What follows would fail for the same reason and hide it.
            break;
        }
    }
    println!("== summary");
    for line in &summary {
        println!("{line}");
    }
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
}

/// Unit and property tests of every crate: no root, no BPF toolchain.
fn unit() -> Result<()> {
    let others = ["flowloom-tests-netns", "flowloom-tests-e2e"].map(|p| ["--exclude", p]);
    // The lab's own units belong here; its clusters are tier k8s.
    cargo_test(&[&["--workspace", "--exclude", "flowloom-lab"], others.as_flattened()].concat())?;
    cargo_test(&["-p", "flowloom-lab", "--lib", "--bins"])
}

/// Programs, maps and namespaces of the real kernel.
fn kernel() -> Result<Flaked> {
    root_needed()?;
    bpf::lint()?;
    bpf::build()?;
    again::test(test_command, &["-p", "flowloom-tests-netns"])
}

/// Whole binaries; nodes are namespaces.
fn e2e() -> Result<Flaked> {
    binaries()?;
    let mut flaked = again::test(test_command, &["-p", "flowloom-tests-e2e"])?;
    // Once more where the host's connection tracking drops what it does not know: nothing but eBPF carries these packets.
    let again = ["truth_table", "both_sides_judge", "overlap", "answers"].map(|t| ["--test", t]);
    let args = [&["-p", "flowloom-tests-e2e"], again.as_flattened()].concat();
    let strict = |args: &[&str]| {
        let mut command = test_command(args);
        command.env("FLOWLOOM_TEST_NETFILTER", "invalid");
        command
    };
    flaked.extend(again::test(strict, &args)?);
    Ok(flaked)
}

pub(crate) fn demo(args: &DemoArgs) -> Result<()> {
    if args.k8s {
        return lab::demo(args.keep);
    }
    binaries()?;
    let mut command = run::command(
        &run::cargo(),
        &["run", "--quiet", "--locked", "--package", "flowloom-tests-e2e", "--bin", "flowloom-demo", "--"],
    );
    if args.keep {
        command.arg("--keep");
    }
    run::succeed(command.env("FLOWLOOM_BIN_DIR", bin_dir()))
}

/// Release builds on both sides of every comparison.
pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    root_needed()?;
    bpf::build()?;
    let mut packages = vec!["flowloom-agent", "flowloom-cni", "flowloom", "flowloom-benches"];
    if args.name == "pods" {
        packages.extend(["flowloom-controller", "flowloom-lab"]);
    }
    let packages = packages.iter().flat_map(|p| ["-p", p]);
    run::succeed(run::command(&run::cargo(), &["build", "--release", "--quiet", "--locked"]).args(packages))?;
    let dir = bin_dir().with_file_name("release");
    let mut command = run::command(&dir.join("flowloom-bench").display().to_string(), &[args.name.as_str()]);
    if args.verify {
        command.arg("--verify");
    }
    for part in &args.parts {
        command.args(["--part", part]);
    }
    run::succeed(command.env("FLOWLOOM_BIN_DIR", dir))
}

/// Builds the programs, then the binaries that embed them.
pub(crate) fn binaries() -> Result<()> {
    root_needed()?;
    bpf::build()?;
    run::succeed(&mut run::command(
        &run::cargo(),
        &[
            "build",
            "--quiet",
            "--locked",
            "-p",
            "flowloom-agent",
            "-p",
            "flowloom-cni",
            "-p",
            "flowloom-controller",
            "-p",
            "flowloom",
            // Debug builds may be told to die at a write; release builds (bench, packages) never have it.
            "--features",
            "flowloom-agent/kill-points",
        ],
    ))
}

pub(crate) fn bin_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| run::root().join("target"), PathBuf::from)
        .join("debug")
}

fn cargo_test(args: &[&str]) -> Result<()> {
    run::succeed(&mut test_command(args))
}

pub(crate) fn test_command(args: &[&str]) -> Command {
    let mut command = run::command(&run::cargo(), &["test", "--locked", "--quiet", "--no-fail-fast"]);
    command.args(args).env("FLOWLOOM_BIN_DIR", bin_dir());
    command
}

fn root_needed() -> Result<()> {
    let id = run::output(&mut run::command("id", &["-u"]))?;
    if id.trim() == "0" {
        Ok(())
    } else {
        bail!("this tier makes namespaces and loads programs: run it as root")
    }
}
