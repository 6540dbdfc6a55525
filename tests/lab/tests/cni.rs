//! The plugin under the library that runtimes use, by its own tool, beside a real API server. Needs what `smoke.rs` needs; no runtime, no kubelet.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use flowloom_lab::{Families, Lab, Node, Options, node, programs};
use flowloom_testkit::{Output, eventually};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(90);

/// Where the agent's configuration is in the version that has STATUS and GC; the agent writes an older one unless told otherwise.
const NEWEST: &str = "/run/cni-newest";
const COPY: &str = r#"mkdir -p /run/cni-newest
for file in /etc/cni/net.d/*.conflist; do sed 's/"cniVersion": *"1.0.0"/"cniVersion": "1.1.0"/' "$file" >"/run/cni-newest/${file##*/}"; done
grep -q 1.1.0 /run/cni-newest/*"#;

/// One call of the tool for the Pod's namespace, which has its name.
fn tool(node: &Node<'_>, verb: &str, pod: &str) -> Result<Output> {
    let tool = programs().join("cnitool").display().to_string();
    let args = format!("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}");
    let netns = format!("/run/netns/{pod}");
    let config = format!("NETCONFPATH={NEWEST}");
    node.exec(&["env", "CNI_PATH=/opt/cni/bin", &config, &args, &tool, verb, "flowloom", &netns])
}

fn add(node: &Node<'_>, pod: &str) -> String {
    node.exec_ok(&["ip", "netns", "add", pod]).unwrap();
    let result: Value =
        serde_json::from_str(&tool(node, "add", pod).unwrap().success().unwrap().stdout).unwrap();
    let address = result["ips"][0]["address"].as_str().unwrap_or_else(|| panic!("{result}"));
    address.split('/').next().unwrap().to_owned()
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
    let lab = Lab::up(Options {
        name: format!("c{}", std::process::id()),
        bin_dir,
        nodes: 1,
        families: Families::Ipv4,
        objects_only: true,
        ..Options::for_test().flowloom()
    })
    .unwrap();
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
    first.exec_ok(&["sh", "-c", COPY]).unwrap();

    tool(&first, "status", "none").unwrap().success().unwrap();
    let web = add(&first, "web");
    let client = add(&first, "client");
    assert!(web.starts_with("10.71.1.") && client.starts_with("10.71.1.") && web != client, "{web} {client}");
    tool(&first, "check", "web").unwrap().success().unwrap();
    let ping = ["ip", "netns", "exec", "client", "ping", "-c1", "-W2", &web];
    eventually(PATIENCE, || first.exec_ok(&ping));
    assert_eq!(links(&first).unwrap().len(), 2);

    // It names nobody as valid: the library deletes what it remembers.
    tool(&first, "gc", "none").unwrap().success().unwrap();
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
