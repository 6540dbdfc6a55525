//! Builds the BPF object from source.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::run;

const TARGET: &str = "bpfel-unknown-none";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const HINT: &str = "to build the BPF programs install one of\n  \
    rustup:  rustup toolchain install nightly --component rust-src && cargo install bpf-linker --version 0.13.0\n  \
    Debian:  apt-get install rustc-web rust-web-src llvm-22-dev && LLVM_PREFIX=/usr/lib/llvm-22 cargo install \
    bpf-linker --version 0.13.0 --no-default-features --features llvm-22";

fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| run::root().join("target"), PathBuf::from)
}

/// Where the object is written.
#[must_use]
pub(crate) fn object_path() -> PathBuf {
    target_dir().join("bpf/flowloom.o")
}

/// A compiler that can build `core` for the BPF target.
enum Toolchain {
    /// rustup's nightly with rust-src.
    Nightly,
    /// Debian's rustc with its own library source.
    Debian,
}

fn succeeds(command: &mut Command) -> Option<String> {
    let out = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

fn has_source(sysroot: &str) -> bool {
    Path::new(sysroot).join("lib/rustlib/src/rust/library/core/Cargo.toml").exists()
}

fn find_toolchain() -> anyhow::Result<Toolchain> {
    let nightly = succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]));
    if nightly.is_some_and(|s| has_source(&s)) {
        return Ok(Toolchain::Nightly);
    }
    let debian = succeeds(Command::new(DEBIAN_RUSTC).args(["--print", "sysroot"]));
    if debian.is_some_and(|s| has_source(&s)) {
        return Ok(Toolchain::Debian);
    }
    bail!("no compiler with the source of its library was found; {HINT}")
}

/// Cargo for the programs with whichever toolchain is here; the caller adds the verb. With `lint`, warnings of clippy are errors.
fn cargo(lint: bool) -> anyhow::Result<Command> {
    if succeeds(Command::new("bpf-linker").arg("--version")).is_none() {
        bail!("bpf-linker was not found in PATH; {HINT}");
    }
    let toolchain = find_toolchain()?;
    let mut cargo = match toolchain {
        Toolchain::Nightly => {
            let mut c = Command::new("rustup");
            c.args(["run", "nightly", "cargo"]);
            c
        }
        Toolchain::Debian => {
            let mut c = Command::new("cargo");
            c.env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
            c
        }
    };
    // The caller's flags and wrappers are meant for the host.
    for name in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
    ] {
        cargo.env_remove(name);
    }
    let mut verb = "build";
    if lint {
        verb = "check";
        // What `cargo clippy` does, with the driver of the compiler that builds.
        let driver = match toolchain {
            Toolchain::Nightly => "clippy-driver".to_owned(),
            Toolchain::Debian => DEBIAN_RUSTC.replace("rustc", "clippy-driver"),
        };
        cargo
            .env("RUSTC_WORKSPACE_WRAPPER", driver)
            .env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
    }
    let flags = ["-Cdebuginfo=2", "-Ctarget-cpu=v3", "-Clinker=bpf-linker", "-Clink-arg=--btf"];
    let encoded: OsString = flags.join("\u{1f}").into();
    cargo
        .current_dir(run::root().join("bpf/programs"))
        .env("CARGO_ENCODED_RUSTFLAGS", encoded)
        .env("CARGO_TARGET_DIR", build_dir())
        .args([verb, "--release", "--locked", "--target", TARGET, "-Z", "build-std=core"]);
    Ok(cargo)
}

fn build_dir() -> PathBuf {
    target_dir().join("bpf-build")
}

/// Clippy over the programs as they are built for the kernel.
///
/// # Errors
/// When no toolchain is found or something is found.
pub(crate) fn lint() -> anyhow::Result<()> {
    let status = cargo(true)?.status().context("cannot run cargo for the BPF programs")?;
    if status.success() { Ok(()) } else { bail!("clippy of the BPF programs (see above)") }
}

/// Builds the programs and puts the object at [`object_path`].
///
/// # Errors
/// When no toolchain is found (the message says what to install) or the build fails.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    let build_dir = build_dir();
    let status = cargo(false)?.status().context("cannot run cargo for the BPF programs")?;
    if !status.success() {
        bail!("the BPF programs do not build (see above)");
    }
    let built = build_dir.join(TARGET).join("release/flowloom");
    let object = object_path();
    if let Some(dir) = object.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let bytes = std::fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    // An unchanged object keeps its time: nothing that embeds it is built again.
    if std::fs::read(&object).ok().as_deref() != Some(&bytes[..]) {
        std::fs::write(&object, &bytes).with_context(|| format!("cannot write {}", object.display()))?;
    }
    println!("{} ({} bytes)", object.display(), bytes.len());
    Ok(object)
}

/// Arguments of `cargo xtask bpf`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Load the programs (root) and print what each costs; fails beyond half of the verifier's limit.
    #[arg(long)]
    stats: bool,
    /// Clippy over the programs for their own target.
    #[arg(long)]
    lint: bool,
}

/// `cargo xtask bpf`.
///
/// # Errors
/// As [`build`], or when a program does not keep its budget.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if args.lint {
        return lint();
    }
    build()?;
    if args.stats {
        let package = "flowloom-tests-netns";
        let args = ["run", "--quiet", "--locked", "--package", package, "--bin", "flowloom-bpf-stats"];
        run::succeed(&mut run::command(&run::cargo(), &args))?;
    }
    Ok(())
}
