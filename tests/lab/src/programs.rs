//! Kubernetes' programs, built with Go from the module proxy; `build/*/go.mod` and `go.sum` pin every module.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use flowloom_testkit::Cmd;

use crate::{oci, paths};

/// A program and where it comes from.
struct Program {
    /// Folder below `build/`.
    module: &'static str,
    name: &'static str,
    package: &'static str,
    /// A test package rather than a command.
    test: bool,
    /// Only the suites need it.
    suites: bool,
}

const fn program(module: &'static str, name: &'static str, package: &'static str) -> Program {
    Program { module, name, package, test: false, suites: false }
}

const PROGRAMS: &[Program] = &[
    program("kubernetes", "kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    program("kubernetes", "kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    program("kubernetes", "kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    program("kubernetes", "kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    program("kubernetes", "kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
    program("kubernetes", "kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    program("kubernetes", "cnitool", "github.com/containernetworking/cni/cnitool"),
    program("cni", "cni-gc", "flowloom.invalid/lab/cni"),
    for_suites(program("kubernetes", "ginkgo", "github.com/onsi/ginkgo/v2/ginkgo")),
    Program { test: true, ..for_suites(program("kubernetes", "e2e.test", "k8s.io/kubernetes/test/e2e")) },
    for_suites(program("kubernetes", "agnhost", "k8s.io/kubernetes/test/images/agnhost")),
    for_suites(program(
        "kubernetes",
        "regression-issue-74839",
        "k8s.io/kubernetes/test/images/regression-issue-74839",
    )),
    for_suites(program("coredns", "coredns", "flowloom.invalid/lab/coredns")),
    for_suites(program("cyclonus", "cyclonus", "flowloom.invalid/lab/cyclonus/batched")),
    for_suites(program("cyclonus", "cyclonus-worker", "flowloom.invalid/lab/cyclonus/worker")),
];

const fn for_suites(program: Program) -> Program {
    Program { suites: true, ..program }
}

/// Builds what is missing or was built from other pins: the cluster's programs, and the suites' when asked for.
///
/// # Errors
/// Go's, or that there is no Go.
pub fn build(suites: bool) -> Result<()> {
    fs::create_dir_all(paths::programs())?;
    let wanted: Vec<_> = PROGRAMS.iter().filter(|p| suites || !p.suites).collect();
    for program in wanted {
        let stamp = stamp(program)?;
        let to = paths::programs().join(program.name);
        let stamp_file = paths::programs().join(format!(".{}.stamp", program.name));
        if to.exists() && fs::read_to_string(&stamp_file).is_ok_and(|s| s == stamp) {
            continue;
        }
        let start = Instant::now();
        println!("building {}", program.name);
        compile(program, &to)?;
        fs::write(stamp_file, stamp)?;
        println!(
            "built {}: {} MiB in {} s",
            program.name,
            fs::metadata(&to)?.len() >> 20,
            start.elapsed().as_secs()
        );
    }
    Ok(())
}

/// Says what is missing, without Go.
///
/// # Errors
/// Names the command that builds it.
pub fn check(suites: bool) -> Result<()> {
    let missing: Vec<_> = PROGRAMS
        .iter()
        .filter(|p| (suites || !p.suites) && !paths::programs().join(p.name).exists())
        .map(|p| p.name)
        .collect();
    let more = if suites { " --suites" } else { "" };
    ensure!(
        missing.is_empty(),
        "{} not in {}: run `cargo xtask lab build{more}`",
        missing.join(", "),
        paths::programs().display()
    );
    Ok(())
}

/// Kubernetes' source in Go's module cache: certificates of a test server are read from there.
pub(crate) fn kubernetes_source() -> Result<PathBuf> {
    // Programs that were built long ago may outlive that cache: what is not in it is fetched.
    let argv = ["go", "mod", "download", "-json", "k8s.io/kubernetes"];
    let go = Cmd::new(&argv).dir(module_dir("kubernetes")).env("GOFLAGS", "").timeout(DOWNLOAD);
    let out = go.run().context(NO_GO)?.success()?;
    let module: serde_json::Value =
        serde_json::from_str(&out.stdout).context("what Go says of k8s.io/kubernetes")?;
    let dir =
        module["Dir"].as_str().with_context(|| format!("k8s.io/kubernetes is not to be had: {module}"))?;
    Ok(PathBuf::from(dir))
}

/// For the source of Kubernetes, 50 MiB packed.
const DOWNLOAD: Duration = Duration::from_secs(900);

const NO_GO: &str = "Go 1.26 or later is needed to build Kubernetes' programs";

fn module_dir(module: &str) -> PathBuf {
    paths::source().join("build").join(module)
}

/// One set of flags for everything: another would compile all of Kubernetes once more.
fn compile(program: &Program, to: &Path) -> Result<()> {
    let mut go = Command::new("nice");
    go.arg("go");
    if program.test {
        go.args(["test", "-c"])
    } else {
        go.arg("build")
    };
    let new = to.with_extension("new");
    go.args(["-mod=readonly", "-trimpath", "-buildvcs=false", "-p=2", "-ldflags"])
        .arg(linker_flags(program)?)
        .arg("-o")
        .arg(&new)
        .arg(program.package)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "")
        .current_dir(module_dir(program.module));
    let status = go.status().context(NO_GO)?;
    if !status.success() {
        bail!("building {}: {status}", program.package);
    }
    // Renamed: a running cluster keeps what it has.
    Ok(fs::rename(new, to)?)
}

/// Programs tell their version: the suite believes itself to be 0.0 otherwise.
fn linker_flags(program: &Program) -> Result<String> {
    let mut flags = "-s -w".to_owned();
    if program.module == "kubernetes" {
        let pins = fs::read_to_string(module_dir("kubernetes").join("go.mod"))?;
        let version = pins
            .lines()
            .find_map(|l| l.strip_prefix("require k8s.io/kubernetes "))
            .context("build/kubernetes/go.mod names no version of k8s.io/kubernetes")?;
        let mut parts = version.trim_start_matches('v').split('.');
        let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        for (key, value) in [("gitVersion", version), ("gitMajor", major), ("gitMinor", minor)] {
            flags += &format!(" -X k8s.io/component-base/version.{key}={value}");
        }
    }
    Ok(flags)
}

fn stamp(program: &Program) -> Result<String> {
    let dir = module_dir(program.module);
    let mut text = fs::read(dir.join("go.mod"))?;
    text.extend(fs::read(dir.join("go.sum"))?);
    text.extend(linker_flags(program)?.bytes());
    text.extend(program.package.bytes());
    if let Some(own) = program.package.strip_prefix("flowloom.invalid/lab/") {
        text.extend(fs::read(paths::source().join("build").join(own).join("main.go"))?);
    }
    Ok(oci::digest(&text))
}
