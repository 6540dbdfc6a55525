//! What a Pod's owner is told when its network cannot be made. Needs what `smoke.rs` needs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use flowloom_lab::{BUSYBOX, Lab, Node, Options, node};
use flowloom_testkit::eventually;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(90);

/// The node's document, until the next.
fn write_document(node: &Node<'_>, document: Option<&Value>) -> Result<()> {
    let script = match document {
        Some(_) => "mkdir -p /etc/flowloom; printf %s \"$1\" >/etc/flowloom/desired.yaml",
        None => "rm -f /etc/flowloom/desired.yaml",
    };
    let text = document.map(Value::to_string).unwrap_or_default();
    node.exec_ok(&["sh", "-c", script, "sh", &text])?;
    node.restart_agent()
}

/// Events about the Pod that flowloom sent: reason, message, count.
fn told(lab: &Lab) -> Result<Vec<(String, String, u64)>> {
    let list = lab.kubectl_json(&["get", "events", "--field-selector", "involvedObject.name=broken"])?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let ours = |e: &&Value| {
        [&e["source"]["component"], &e["reportingComponent"]]
            .iter()
            .any(|c| c.as_str().is_some_and(|c| c.contains("flowloom")))
    };
    let items = list["items"].as_array().cloned().unwrap_or_default();
    Ok(items
        .iter()
        .filter(ours)
        .map(|e| (text(&e["reason"]), text(&e["message"]), e["count"].as_u64().unwrap_or(1)))
        .collect())
}

#[test]
fn a_pod_whose_network_cannot_be_made_says_why_once_and_starts_when_it_can() {
    let bin_dir = Path::new(env!("CARGO_BIN_EXE_flowloom-lab")).parent().unwrap().to_path_buf();
    let name = format!("e{}", std::process::id());
    let lab = Lab::up(Options { nodes: 1, bin_dir, name, ..Options::for_test() }.flowloom()).unwrap();
    let first = lab.node(1).unwrap();
    // The document's subnet of that name comes before the node's: it has one address for Pods.
    let document = json!({
        "version": 1,
        "nodes": [{"name": "n1", "address": node(1)[0]}],
        "subnets": [{"name": "node.n1", "vpc": "default", "cidr": "10.71.0.0/24",
                     "cni_ranges": [{"node": "n1", "cidr": "10.71.0.9/32"}]}],
    });
    write_document(&first, Some(&document)).unwrap();
    lab.wait_ready(PATIENCE).unwrap();
    let run = |name: &str| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 0,
                     "containers": [{"name": "a", "image": BUSYBOX, "command": ["sleep", "1000"]}]},
        });
        lab.kubectl_input(&["apply", "-f", "-"], &pod.to_string()).unwrap();
    };
    run("first");
    lab.kubectl(&["wait", "--for=condition=Ready", "pod", "first", "--timeout=90s"]).unwrap();
    run("broken");
    let (reason, message, _) = eventually(PATIENCE, || {
        let events = told(&lab)?;
        ensure!(!events.is_empty(), "no event yet");
        Ok(events[0].clone())
    });
    assert_eq!(reason, "NetworkNotReady");
    assert!(message.contains("node.n1") && message.contains("address"), "{message}");
    // The kubelet tries again and again; its owner reads it once.
    eventually(PATIENCE, || {
        let list =
            lab.kubectl_json(&["get", "events", "--field-selector", "reason=FailedCreatePodSandBox"])?;
        let tries: u64 =
            list["items"].as_array().into_iter().flatten().filter_map(|e| e["count"].as_u64()).sum();
        ensure!(tries >= 2, "{tries} attempts");
        Ok(())
    });
    assert_eq!(told(&lab).unwrap().len(), 1);

    write_document(&first, None).unwrap();
    lab.kubectl(&["wait", "--for=condition=Ready", "pod", "broken", "--timeout=90s"]).unwrap();
}
