//! A quick part of upstream's suites on flowloom without kube-proxy. `cargo xtask test conformance` runs all of them.
//! Needs what `smoke` needs, and `cargo xtask lab build --suites`.

use std::path::Path;

use flowloom_lab::suites::{RunOptions, run};
use flowloom_lab::{Lab, Options};

/// How many tests the group has: one that upstream renames must not go missing silently.
const TESTS: usize = 16;

#[test]
fn upstreams_quick_tests_pass() {
    let program = Path::new(env!("CARGO_BIN_EXE_flowloom-lab"));
    let bin_dir = program.parent().map(Path::to_path_buf).unwrap_or_default();
    let options = Options { bin_dir, suites: true, ..Options::for_test().flowloom() };
    let lab = Lab::up(options).unwrap();
    let reports = flowloom_testkit::temp_dir("suites").unwrap();
    let options = RunOptions { procs: 4, reports: reports.path().to_path_buf(), more: Vec::new() };
    let run = run(&lab, "quick", &options).unwrap();
    let not_passed: Vec<_> =
        run.outcomes.iter().filter(|o| o.failure.is_some() || o.skipped.is_some()).collect();
    let log = std::fs::read_to_string(&run.log).unwrap();
    assert!(not_passed.is_empty(), "{log}\n{not_passed:#?}");
    assert_eq!(run.outcomes.len(), TESTS, "{:#?}", run.outcomes);
}

#[test]
fn the_list_of_upstreams_tests_is_the_suites_own() {
    let (listed, built) = (flowloom_lab::upstream::listed(), flowloom_lab::upstream::built().unwrap());
    assert_eq!(listed, built, "after a new version: cargo xtask lab names");
}
