//! Pods of two nodes and a Service: with the peer's plugins and kube-proxy, which judges the lab itself, and with
//! flowloom alone. Needs root, Debian's container runtime (`scripts/setup.sh --k8s`) and `cargo xtask lab build`.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use flowloom_lab::{BUSYBOX, Cni, Families, Lab, Node, Options, Routes, WORLD, names};
use flowloom_testkit::{Cmd, eventually};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_flowloom-lab"))
}

fn options() -> Options {
    let bin_dir = program().parent().map(Path::to_path_buf).unwrap_or_default();
    Options { bin_dir, ..Options::for_test() }
}

/// A web server on every node behind a Service.
const WEB: &str = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: web
        image: BUSYBOX
        command: [sh, -c, 'mkdir -p /tmp/www; hostname >/tmp/www/name; exec httpd -f -p 8080 -h /tmp/www']
        resources: {limits: {memory: 32Mi, cpu: 500m}}
        readinessProbe: {httpGet: {port: 8080, path: /name}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
"#;

struct Pod {
    name: String,
    node: String,
    ips: Vec<String>,
}

impl Pod {
    /// Its node's number.
    fn index(&self) -> u8 {
        self.node.trim_start_matches('n').parse().unwrap()
    }
}

fn pods(lab: &Lab) -> Result<Vec<Pod>> {
    let list = lab.kubectl_json(&["get", "pods", "-l", "app=web"])?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let pods: Vec<_> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|p| Pod {
            name: text(&p["metadata"]["name"]),
            node: text(&p["spec"]["nodeName"]),
            ips: p["status"]["podIPs"].as_array().into_iter().flatten().map(|ip| text(&ip["ip"])).collect(),
        })
        .collect();
    let families = families(lab.options());
    ensure!(pods.len() == 2 && pods.iter().all(|p| p.ips.len() == families), "{list}");
    Ok(pods)
}

/// How many addresses a Pod has.
fn families(options: &Options) -> usize {
    if options.families == Families::Dual { 2 } else { 1 }
}

fn url(ip: &str, port: &str) -> String {
    if ip.contains(':') { format!("http://[{ip}]:{port}/name") } else { format!("http://{ip}:{port}/name") }
}

/// Names of the Pods that answered one request after the other.
fn answers(lab: &Lab, from: &str, url: &str, times: usize) -> Result<Vec<String>> {
    let script = format!("for i in $(seq {times}); do timeout 3 wget -qO- '{url}' || exit 1; done");
    let out = lab.kubectl(&["exec", from, "--", "sh", "-c", &script])?;
    Ok(out.lines().map(str::to_owned).collect())
}

/// What a Pod may leave on a node: namespaces, links, tasks, addresses of the reference allocator.
fn traces(node: &Node<'_>) -> Result<BTreeSet<String>> {
    let script = "ls /run/netns; ls /run/cni-ipam/reference 2>/dev/null | grep -E '^[0-9a-f]+[.:]'; \
        ip -br link | cut -d' ' -f1 | cut -d@ -f1 | grep -v '^cni0$'; ctr -n k8s.io tasks list -q";
    Ok(node.exec(&["sh", "-c", script])?.stdout.lines().map(str::to_owned).collect())
}

#[test]
fn the_peer_serves_pods_of_two_nodes_and_leaves_nothing() {
    serves_pods_of_two_nodes_and_leaves_nothing(options());
}

#[test]
fn flowloom_serves_pods_of_two_nodes_without_kube_proxy_and_leaves_nothing() {
    let options = options().flowloom();
    let name = format!("w{}", std::process::id());
    serves_pods_of_two_nodes_and_leaves_nothing(Options { name, ..options });
}

#[test]
fn flowloom_serves_pods_of_two_nodes_by_direct_routes_with_ipv4_alone() {
    let name = format!("d{}", std::process::id());
    let options = Options { name, families: Families::Ipv4, routes: Routes::Direct, ..options().flowloom() };
    serves_pods_of_two_nodes_and_leaves_nothing(options);
}

fn serves_pods_of_two_nodes_and_leaves_nothing(options: Options) {
    let lab = Lab::up(options).unwrap();
    let name = lab.options().name.clone();
    assert!(names().contains(&name));

    let families = families(lab.options());

    // All families on every node, from the ranges they should be from.
    let nodes = lab.kubectl_json(&["get", "nodes"]).unwrap();
    for node in nodes["items"].as_array().unwrap() {
        let cidrs: Vec<_> =
            node["spec"]["podCIDRs"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
        assert_eq!(cidrs.len(), families, "{cidrs:?}");
        assert!(cidrs.iter().zip(["10.71.", "fd71:1:"]).all(|(c, start)| c.starts_with(start)), "{cidrs:?}");
    }

    let before: Vec<_> = lab.nodes().unwrap().iter().map(|n| traces(n).unwrap()).collect();

    let pods = reach_each_other_and_a_service(&lab);
    for ip in WORLD.iter().take(families) {
        eventually(PATIENCE, || lab.kubectl(&["exec", &pods[0].name, "--", "ping", "-c1", "-W1", ip]));
    }

    // Every process of a container is below its node's cgroup v2 group: socket programs attached there see it.
    for node in lab.nodes().unwrap() {
        let pids = node.exec_ok(&["pgrep", "-x", "httpd"]).unwrap();
        for pid in pids.stdout.lines() {
            let groups = node.exec_ok(&["cat", &format!("/proc/{pid}/cgroup")]).unwrap().stdout;
            let v2 = groups.lines().find(|l| l.starts_with("0::")).unwrap();
            assert!(v2.starts_with("0::/kubepods/"), "{v2}");
        }
    }

    // A service that is killed is started again by hand, and the node comes back.
    let node = lab.node(1).unwrap();
    node.restart("kubelet").unwrap();
    lab.wait_ready(PATIENCE).unwrap();

    lab.kubectl(&["delete", "daemonset/web", "service/web", "--timeout=60s"]).unwrap();
    for (node, before) in lab.nodes().unwrap().iter().zip(&before) {
        eventually(PATIENCE, || {
            let left: Vec<_> = traces(node)?.difference(before).cloned().collect();
            ensure!(left.is_empty(), "{}: {left:?}", node.name());
            Ok(())
        });
    }

    drop(lab);
    assert!(!names().contains(&name), "its state is gone");
    let namespaces = Cmd::new(&["ip", "netns", "list"]).run().unwrap().stdout;
    assert!(!namespaces.contains(&format!("fl-lab-{name}-")), "{namespaces}");
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(&name), "{mounts}");
    for entry in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        assert!(!entry.path().join(format!("flowloom-{name}")).exists(), "{:?}", entry.path());
    }
}

/// Pods of two nodes, from each to the other, to the Service, and from outside to the node port.
fn reach_each_other_and_a_service(lab: &Lab) -> Vec<Pod> {
    let (families, direct) = (families(lab.options()), lab.options().routes == Routes::Direct);
    lab.kubectl_input(&["apply", "-f", "-"], &WEB.replace("BUSYBOX", BUSYBOX)).unwrap();
    lab.kubectl(&["rollout", "status", "daemonset/web", "--timeout=90s"]).unwrap();
    let pods = pods(lab).unwrap();
    assert_ne!(pods[0].node, pods[1].node);
    for (from, to) in [(&pods[0], &pods[1]), (&pods[1], &pods[0])] {
        for ip in &to.ips {
            let got = eventually(PATIENCE, || answers(lab, &from.name, &url(ip, "8080"), 1));
            assert_eq!(got, [to.name.as_str()]);
            let route = lab.node(from.index()).unwrap().exec_ok(&["ip", "route", "get", ip]).unwrap().stdout;
            let tunnel = route.contains("flowloom_vxlan");
            assert_eq!(tunnel, lab.options().cni == Cni::Flowloom && !direct, "{route}");
        }
    }

    let service = lab.kubectl_json(&["get", "service", "web"]).unwrap();
    let cluster_ips: Vec<_> =
        service["spec"]["clusterIPs"].as_array().unwrap().iter().map(|ip| ip.as_str().unwrap()).collect();
    assert_eq!(cluster_ips.len(), families);
    for ip in cluster_ips {
        eventually(PATIENCE, || {
            let mut who = answers(lab, &pods[0].name, &url(ip, "80"), 20)?;
            who.sort();
            who.dedup();
            ensure!(who.len() == 2, "both backends should answer on {ip}: {who:?}");
            Ok(())
        });
    }
    let port = service["spec"]["ports"][0]["nodePort"].to_string();
    for ip in [1, 2].iter().flat_map(|n| flowloom_lab::node(*n).into_iter().take(families)) {
        eventually(PATIENCE, || {
            lab.outside(&[
                "busybox",
                "timeout",
                "3",
                "busybox",
                "wget",
                "-qO-",
                &url(&ip.to_string(), &port),
            ])?
            .success()
        });
    }
    pods
}

#[test]
fn a_lab_without_plugins_serves_once_somebody_brings_them() {
    let name = format!("n{}", std::process::id());
    let lab = Lab::up(Options { name, cni: Cni::None, families: Families::Ipv4, ..options() }).unwrap();
    let ranges: Vec<String> = eventually(PATIENCE, || {
        let nodes = lab.kubectl_json(&["get", "nodes"])?;
        let nodes = nodes["items"].as_array().cloned().unwrap_or_default();
        for node in &nodes {
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().find(|c| c["type"] == "Ready").cloned().unwrap_or_default();
            let says = ready["message"].as_str().unwrap_or_default();
            ensure!(ready["status"] == "False" && says.contains("cni plugin not initialized"), "{ready}");
        }
        let range = |n: &Value| n["spec"]["podCIDR"].as_str().unwrap_or_default().to_owned();
        ensure!(nodes.len() == 2, "{nodes:?}");
        Ok(nodes.iter().map(range).collect())
    });
    for (node, other) in lab.nodes().unwrap().iter().zip([2, 1]) {
        for plugin in ["bridge", "host-local", "loopback"] {
            let to = node.dir().join("cni-bin").join(plugin);
            std::fs::copy(Path::new("/usr/lib/cni").join(plugin), to).unwrap();
        }
        let via = flowloom_lab::node(other)[0].to_string();
        let range = &ranges[usize::from(other) - 1];
        node.exec_ok(&["ip", "route", "add", range, "via", &via]).unwrap();
        let own = &ranges[usize::from(node.index()) - 1];
        let list = json!({"cniVersion": "1.0.0", "name": "own", "plugins": [
            {"type": "bridge", "bridge": "own0", "isGateway": true, "hairpinMode": true,
             "ipam": {"type": "host-local", "subnet": own, "routes": [{"dst": "0.0.0.0/0"}]}}]});
        std::fs::write(node.dir().join("cni-conf/10-own.conflist"), list.to_string()).unwrap();
    }
    lab.wait_ready(PATIENCE).unwrap();
    reach_each_other_and_a_service(&lab);
}

#[test]
fn a_lab_that_cannot_come_up_leaves_nothing() {
    let options =
        Options { name: format!("f{}", std::process::id()), bin_dir: "/nonexistent".into(), ..options() };
    let name = options.name.clone();
    let e = Lab::up(options).unwrap_err();
    assert!(format!("{e:#}").contains("/nonexistent/flowloom-lab"), "{e:#}");
    assert!(!names().contains(&name));
    let namespaces = Cmd::new(&["ip", "netns", "list"]).run().unwrap().stdout;
    assert!(!namespaces.contains(&format!("fl-lab-{name}-")), "{namespaces}");
}
