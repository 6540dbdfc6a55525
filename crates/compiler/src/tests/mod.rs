//! Tests of the crate as a whole.

mod decisions;
mod explanations;
mod network_policies;
mod numbering;
mod pins;
mod reported;
mod sample;
mod services;
mod transitions;
mod truth_table;

/// Seed of a run: `FLOWLOOM_SEED` repeats one.
fn seed() -> u64 {
    std::env::var("FLOWLOOM_SEED").ok().map_or(0x00f1_0e10, |s| s.parse().expect("FLOWLOOM_SEED is a number"))
}

/// How many random worlds a run looks at: `FLOWLOOM_WORLDS` in percent of the usual number.
fn worlds(usual: u64) -> u64 {
    let percent = std::env::var("FLOWLOOM_WORLDS")
        .ok()
        .map_or(100, |s| s.parse().expect("FLOWLOOM_WORLDS is a number"));
    (usual * percent / 100).max(1)
}
