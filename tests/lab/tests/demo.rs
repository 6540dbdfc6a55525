//! `./demo --k8s` as a user runs it: every request as it should be, measured and explained alike, and nothing left. Needs what `smoke.rs` needs.

use std::path::Path;
use std::time::Duration;

use flowloom_lab::names;
use flowloom_testkit::Cmd;

#[test]
fn every_request_of_the_shop_is_answered_or_refused_as_its_policies_say() {
    let program = env!("CARGO_BIN_EXE_flowloom-k8s-demo");
    let name = format!("d{}", std::process::id());
    let bin_dir = Path::new(program).parent().unwrap().display().to_string();
    let argv = ["env", &format!("FLOWLOOM_BIN_DIR={bin_dir}"), program, "--name", &name];
    let out = Cmd::new(&argv).timeout(Duration::from_secs(300)).run().unwrap().success().unwrap().stdout;
    assert!(out.contains("11 requests, 0 not as they should be"), "{out}");
    let refused: Vec<_> = out.lines().filter(|l| l.contains("allows no such thing")).collect();
    assert_eq!(refused.len(), 3, "{out}");
    assert!(!names().contains(&name), "its state is gone");
}
