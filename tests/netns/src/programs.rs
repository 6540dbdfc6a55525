//! The BPF object, loaded with private maps.

use anyhow::{Context as _, Result};
use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};

/// Names of the programs.
pub const PROGRAMS: [&str; 6] =
    ["from_endpoint", "to_endpoint", "from_overlay", "to_overlay", "from_uplink", "to_uplink"];

/// Loads the object and every program. Nothing is pinned: maps go when the value does.
///
/// # Errors
/// When the crate was built with a stub, or the kernel refuses a program (the message holds the verifier's log).
pub fn load(dry_run: bool) -> Result<Ebpf> {
    let object = flowloom_bpf_object::object()?;
    let mut loader = EbpfLoader::new();
    let flag = u32::from(dry_run);
    loader.override_global("DRY_RUN", &flag, true);
    // Small tables: tests load many times.
    loader
        .map_max_entries("fl_conntrack", 4096)
        .map_max_entries("fl_ct_new", 4096)
        .map_max_entries("fl_ipcache", 65_536);
    let mut ebpf = loader.load(object).context("cannot load the BPF object")?;
    for name in PROGRAMS {
        let program: &mut SchedClassifier =
            ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
        program.load().map_err(|e| anyhow::anyhow!("{name}: {}", full(&e)))?;
    }
    Ok(ebpf)
}

/// An error with its causes: the verifier's log is one of them.
fn full(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(e) = next {
        text.push_str(": ");
        text.push_str(&e.to_string());
        next = e.source();
    }
    text
}
