//! Embeds `target/bpf/flowloom.o` (or `$FLOWLOOM_BPF_OBJECT`) when it exists, nothing otherwise.

use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FLOWLOOM_BPF_OBJECT");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    println!("cargo::rustc-check-cfg=cfg(flowloom_bpf_stub)");
    let manifest = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let workspace = manifest.ancestors().nth(2).unwrap_or(Path::new("."));
    let object = std::env::var_os("FLOWLOOM_BPF_OBJECT").map_or_else(
        || {
            let target =
                std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
            target.join("bpf/flowloom.o")
        },
        PathBuf::from,
    );
    // Cargo looks for this path again each time, so an object that appears later is noticed.
    println!("cargo::rerun-if-changed={}", object.display());
    match std::fs::read(&object) {
        Ok(bytes) => std::fs::write(out.join("flowloom.o"), bytes),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            println!("cargo::rustc-cfg=flowloom_bpf_stub");
            std::fs::write(out.join("flowloom.o"), [])
        }
        Err(e) => Err(io::Error::new(e.kind(), format!("cannot read {}: {e}", object.display()))),
    }
}
