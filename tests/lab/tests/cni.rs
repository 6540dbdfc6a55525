//! The plugin under the library that runtimes use, by its own tool, beside a real API server. Needs what `smoke.rs` needs; no runtime, no kubelet.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use flowloom_lab::{Lab, Node, Options, node, own_bin_dir, programs};
use flowloom_testkit::{Output, eventually};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(90);

/// One call of the tool for the Pod's namespace, which has its name.
fn tool(node: &Node<'_>, verb: &str, pod: &str) -> Result<Output> {
    let tool = programs().join("cnitool").display().to_string();
    let args = format!("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}");
    let netns = format!("/run/netns/{pod}");
    let paths = ["CNI_PATH=/opt/cni/bin", "NETCONFPATH=/etc/cni/net.d"];
    node.exec(&["env", paths[0], paths[1], &args, &tool, verb, "flowloom", &netns])
}

/// A runtime's GC with the attachments of these Pods as valid, and no memory of any.
fn collect(node: &Node<'_>, valid: &[&str]) -> Result<Output> {
    let program = programs().join("cni-gc").display().to_string();
    let namespaces: Vec<_> = valid.iter().map(|pod| format!("/run/netns/{pod}")).collect();
    let memory = node.dir().join("no-memory").display().to_string();
    let paths = ["CNI_PATH=/opt/cni/bin", "NETCONFPATH=/etc/cni/net.d"];
    let mut argv = vec!["env", paths[0], paths[1], &program, "flowloom", &memory];
    argv.extend(namespaces.iter().map(String::as_str));
    node.exec(&argv)
}

fn add(node: &Node<'_>, pod: &str) -> String {
    node.exec_ok(&["ip", "netns", "add", pod]).unwrap();
    let result: Value =
        serde_json::from_str(&tool(node, "add", pod).unwrap().success().unwrap().stdout).unwrap();
    let address = result["ips"][0]["address"].as_str().unwrap_or_else(|| panic!("{result}"));
    address.split('/').next().unwrap().to_owned()
}

/// What the plugin says when GC reaches it without a list of what is valid; the tool has none to give.
const COLLECTS: &str = "no cni.dev/valid-attachments were given";

/// How often the agent was asked for STATUS since it started.
fn asked_status(node: &Node<'_>) -> u64 {
    let program = own_bin_dir().join("flowloom").display().to_string();
    let shown = node.exec_ok(&[&program, "cni", "status", "-o", "json"]).unwrap().stdout;
    let report: Value = serde_json::from_str(&shown).unwrap();
    let of_verb = report["verbs"].as_array().unwrap().iter().find(|v| v["verb"] == "STATUS");
    of_verb.unwrap_or_else(|| panic!("no STATUS in {report}"))["count"].as_u64().unwrap()
}

/// The agent's configuration with another version of the specification, and what it then wrote for the runtime.
fn speak(node: &Node<'_>, version: &str) {
    let file = node.dir().join("agent.yaml");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    config["cni"]["version"] = json!(version);
    std::fs::write(&file, config.to_string()).unwrap();
    node.restart_agent().unwrap();
    eventually(PATIENCE, || {
        let list = node.exec_ok(&["cat", "/etc/cni/net.d/10-flowloom.conflist"])?.stdout;
        let list: Value = serde_json::from_str(&list)?;
        ensure!(list["cniVersion"] == version, "{list}");
        Ok(())
    });
}

/// flowloom's ends of the node's Pods.
fn links(node: &Node<'_>) -> Result<BTreeSet<String>> {
    let shown = node.exec_ok(&["ip", "-o", "link", "show", "type", "veth"])?.stdout;
    let names = shown.lines().filter_map(|l| l.split_whitespace().nth(1)?.split('@').next());
    Ok(names.filter(|n| n.starts_with("fl")).map(str::to_owned).collect())
}

#[test]
fn the_library_of_runtimes_adds_checks_asks_and_collects() {
    let bin_dir = Path::new(env!("CARGO_BIN_EXE_flowloom-lab")).parent().unwrap().to_path_buf();
    let lab = Lab::up(Options::objects_for_test('c', bin_dir)).unwrap();
    let pod = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
               "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "none"}]}})
    };
    let objects = [
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"},
               "spec": {"podCIDR": "10.71.1.0/24", "podCIDRs": ["10.71.1.0/24"]},
               "status": {"addresses": [{"type": "InternalIP", "address": node(1)[0]}]}}),
        // Nobody else makes it here, and no Pod is admitted without.
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}}),
        pod("web"),
        pod("client"),
    ];
    for object in objects {
        // The server makes the namespace in its own time.
        eventually(PATIENCE, || lab.kubectl_input(&["create", "-f", "-"], &object.to_string()));
    }
    lab.start_agents().unwrap();
    let first = lab.node(1).unwrap();
    // STATUS and GC came with 1.1.0: with the version that is written unless told otherwise, the library has nothing to ask.
    for verb in ["status", "gc"] {
        let output = tool(&first, verb, "none").unwrap().success().unwrap();
        assert!(!output.stderr.contains(COLLECTS), "{}", output.stderr);
    }
    assert_eq!(asked_status(&first), 0);
    speak(&first, "1.1.0");
    assert_eq!(asked_status(&first), 0);
    tool(&first, "status", "none").unwrap().success().unwrap();
    assert_eq!(asked_status(&first), 1);

    let web = add(&first, "web");
    let client = add(&first, "client");
    assert!(web.starts_with("10.71.1.") && client.starts_with("10.71.1.") && web != client, "{web} {client}");
    tool(&first, "check", "web").unwrap().success().unwrap();
    let ping = ["ip", "netns", "exec", "client", "ping", "-c1", "-W2", &web];
    eventually(PATIENCE, || first.exec_ok(&ping));
    assert_eq!(links(&first).unwrap().len(), 2);

    // A runtime names what it has. With a memory of its own the library deletes nothing: what goes, the agent took for stale by the list.
    let named = collect(&first, &["web", "client"]).unwrap();
    assert!(named.success().is_ok() && links(&first).unwrap().len() == 2, "both are valid");
    collect(&first, &["web"]).unwrap().success().unwrap();
    eventually(PATIENCE, || {
        let left = links(&first)?;
        ensure!(left.len() == 1, "{left:?}");
        Ok(())
    });
    tool(&first, "check", "web").unwrap().success().unwrap();
    assert!(!tool(&first, "check", "client").unwrap().status.success(), "client's attachment is gone");
    // The runtime still remembers it: a DEL of what was collected is no error, and a new life gets an address.
    tool(&first, "del", "client").unwrap().success().unwrap();
    first.exec_ok(&["ip", "netns", "del", "client"]).unwrap();
    add(&first, "client");
    eventually(PATIENCE, || first.exec_ok(&ping));
    assert_eq!(links(&first).unwrap().len(), 2);

    // The tool names nobody as valid: the library deletes what it remembers.
    let collected = tool(&first, "gc", "none").unwrap().success().unwrap();
    assert!(collected.stderr.contains(COLLECTS), "{}", collected.stderr);
    eventually(PATIENCE, || {
        let left = links(&first)?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    });
    assert!(!tool(&first, "check", "web").unwrap().status.success(), "nothing is attached any more");
    tool(&first, "del", "web").unwrap().success().unwrap();
    first.exec_ok(&["ip", "netns", "del", "web"]).unwrap();
    add(&first, "web");

    // Nobody answers: said at once, and over with the agent's return.
    first.kill_agent().unwrap();
    let down = tool(&first, "status", "none").unwrap();
    assert!(!down.status.success() && down.stderr.contains("agent"), "{} {}", down.stdout, down.stderr);
    first.start_agent().unwrap();
    eventually(PATIENCE, || tool(&first, "status", "none")?.success());
    assert_eq!(links(&first).unwrap().len(), 1, "what was attached stays");
    assert!(
        lab.requests().unwrap()["flowloom-agent"].contains_key("watch pods"),
        "the record names its requests"
    );
}
