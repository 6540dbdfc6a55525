//! What the definitions in `deploy/` refuse, by the real API server: their rules are programs that only it runs. Needs what `smoke.rs` needs.

use std::path::Path;
use std::time::Duration;

use flowloom_lab::{Lab, Options};
use flowloom_testkit::eventually;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(90);

fn slice(name: &str) -> Value {
    json!({"apiVersion": "flowloom.io/v1alpha1", "kind": "WorkloadSlice", "metadata": {"name": name}, "spec": {
        "epoch": 5, "sequence": 1, "nodes": ["n1"], "profiles": [{"labels": {"app": "web"}}],
        "workloads": [{"namespace": "shop", "pod": "web-0", "uid": "u", "node": 0, "profile": 0, "ips": ["10.71.1.5", "fd71:1::5"]}]}})
}

#[test]
fn the_api_server_runs_the_rules_of_the_slices_definition() {
    let bin_dir = Path::new(env!("CARGO_BIN_EXE_flowloom-lab")).parent().unwrap().to_path_buf();
    let lab = Lab::up(Options::objects_for_test('d', bin_dir)).unwrap();
    // The server learns the kind in its own time.
    eventually(PATIENCE, || lab.kubectl_input(&["create", "-f", "-"], &slice("good").to_string()));

    let workload = |field: &str, value: Value| {
        let mut bad = slice("bad");
        bad["spec"]["workloads"][0][field] = value;
        bad
    };
    let mut many = slice("bad");
    many["spec"]["workloads"] = vec![slice("bad")["spec"]["workloads"][0].clone(); 251].into();
    for (object, word) in [
        (workload("node", json!(1)), "node is an index into nodes"),
        (workload("profile", json!(1)), "profile is an index into profiles"),
        (workload("ips", json!(["10.71.1.5", "10.71.1"])), "ips holds addresses"),
        (workload("ips", json!([])), "spec.workloads[0].ips"),
        (workload("node", json!(-1)), "spec.workloads[0].node"),
        (many, "must have at most 250 items"),
    ] {
        let refused = lab.kubectl_input(&["create", "-f", "-"], &object.to_string()).unwrap_err();
        assert!(format!("{refused:#}").contains(word), "{word} is not in {refused:#}");
    }
    // A controller that leads no more: its epoch is behind. One that leads, or leads again, may write.
    let with_epoch = |epoch: u64| {
        let patch = json!({"spec": {"epoch": epoch, "sequence": 2}}).to_string();
        lab.kubectl(&["patch", "workloadslices.flowloom.io", "good", "--type", "merge", "-p", &patch])
    };
    let refused = with_epoch(4).unwrap_err();
    assert!(format!("{refused:#}").contains("a controller that leads no more may not write"), "{refused:#}");
    for epoch in [5, 6] {
        with_epoch(epoch).unwrap();
    }
    let kept = lab.kubectl_json(&["get", "workloadslices.flowloom.io"]).unwrap();
    let names: Vec<_> = kept["items"].as_array().unwrap().iter().map(|s| &s["metadata"]["name"]).collect();
    assert_eq!(names, ["good"]);
}
