//! `bench k8s`: what a large cluster costs one node's agent. The API server is one in memory, its objects are made up; agent, kernel and
//! maps are real.

mod netpol;
pub(crate) mod server;

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use flowloom_k8s::slices::{PublishedSlice, Workload, WorkloadSliceSpec};
use flowloom_k8s::{Kind, ObjectName, Pod};
use flowloom_testkit::temp_dir;
use flowloom_tests_e2e::Lab;
use serde_json::{Value, json};

use self::server::Server;
use crate::measure::{Goal, alone, p99, resident};
use crate::node::Effort;
use crate::parts::chosen;
use crate::report::Measure;

const NODES: &str = "/api/v1/nodes";
const NAMESPACES: &str = "/api/v1/namespaces";
const PODS: &str = "/api/v1/pods";
const SERVICES: &str = "/api/v1/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const WORKLOADS: &str = PublishedSlice::PATH;
const POLICIES: &str = "/apis/networking.k8s.io/v1/networkpolicies";

/// Pods of a workload slice, as the controller fills them.
const OF_A_SLICE: usize = 250;

/// Between changes.
const APART: Duration = Duration::from_millis(20);

/// How large a cluster is.
#[derive(Clone, Copy)]
struct Size {
    nodes: usize,
    pods: usize,
    services: usize,
    /// Other nodes' Pods come by workload slices, as the manifests have it.
    by_slices: bool,
}

impl Size {
    fn words(self) -> String {
        let how = if self.by_slices { " by slices" } else { "" };
        format!("{} nodes, {} Pods{how}, {} Services", self.nodes, self.pods, self.services)
    }
}

const SMALL: Size = Size { nodes: 10, pods: 200, services: 0, by_slices: false };
const LARGE: Size = Size { nodes: 1_000, pods: 20_000, services: 1_000, by_slices: false };

/// One part of the benchmark.
type Part = fn(Effort) -> Result<Vec<Measure>>;

const PARTS: [(&str, Part); 5] = [
    ("services-1000", |effort| cluster(effort, Size { services: 1_000, ..SMALL })),
    ("services-10000", |effort| cluster(effort, Size { services: 10_000, ..SMALL })),
    ("nodes-1000", |effort| cluster(effort, LARGE)),
    ("slices-1000", |effort| cluster(effort, Size { by_slices: true, ..LARGE })),
    ("netpol", netpol::netpol),
];

/// Everything, or the parts that are named.
///
/// # Errors
/// When there is no such part, or the agent does not follow.
pub fn bench(effort: Effort, only: &[String]) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for (name, part) in chosen(&PARTS, only)? {
        let new = part(effort).with_context(|| name.to_owned())?;
        for m in &new {
            eprintln!("  {}: {}: {:.3} {}", m.bench, m.measure, m.ours, m.unit);
        }
        measures.extend(new);
    }
    Ok(measures)
}

fn node(at: usize, address: &str) -> Value {
    json!({"metadata": {"name": format!("n{}", at + 1), "creationTimestamp": "2026-01-01T00:00:00Z"},
           "spec": {"podCIDR": format!("10.{}.{}.0/24", 128 + at / 256, at % 256)},
           "status": {"addresses": [{"type": "InternalIP", "address": address}],
                      "conditions": [{"type": "NetworkUnavailable", "status": "False", "reason": "FlowloomIsUp"}]}})
}

/// Pods are spread over the nodes but the first, a hundred to a namespace, ten kinds of them.
fn pod(at: usize, nodes: usize, version: usize) -> Value {
    let (home, slot) = (1 + at % (nodes - 1), at / (nodes - 1));
    let (app, name) = (format!("app-{}", at % 10), format!("app-{}-5d8c7f6b9-{at:05}", at % 10));
    json!({"metadata": {"namespace": format!("team-{}", at / 100), "name": name, "uid": format!("0f0e0d0c-0000-4000-8000-{at:012}"),
                        "creationTimestamp": "2026-01-01T00:00:00Z",
                        "labels": {"app": app, "pod-template-hash": "5d8c7f6b9", "version": format!("v{version}")}},
           "spec": {"nodeName": format!("n{}", home + 1), "serviceAccountName": "default",
                    "containers": [{"name": "main", "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]}]},
           "status": {"phase": "Running", "podIPs": [{"ip": format!("10.{}.{}.{}", 128 + home / 256, home % 256, 2 + slot)}]}})
}

/// A slice of Pods that are all of version 1, but those below `changed`.
fn workload_slice(at: usize, size: Size, changed: usize) -> Result<Value> {
    let workload = |at: usize| {
        let object = pod(at, size.nodes, if at < changed { 2 } else { 1 });
        let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
        let name = ObjectName::new(text("namespace"), text("name"));
        let pod = Pod::decode(&object.to_string()).map_err(anyhow::Error::msg)?;
        Workload::of(&name, &pod).with_context(|| format!("{name} has no address"))
    };
    let first = at * OF_A_SLICE;
    let all = (first..size.pods.min(first + OF_A_SLICE)).map(workload).collect::<Result<Vec<_>>>()?;
    let spec = WorkloadSliceSpec::of(1, 1 + changed as i64, all.iter());
    Ok(json!({"metadata": {"name": format!("w-{at:06}")}, "spec": serde_json::to_value(spec)?}))
}

fn service(at: usize) -> Value {
    json!({"metadata": {"namespace": format!("team-{}", at / 100), "name": format!("s{at}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
           "spec": {"type": "ClusterIP", "clusterIPs": [format!("10.96.{}.{}", at / 250, 1 + at % 250)],
                    "ports": [{"name": "http", "protocol": "TCP", "port": 80}]}})
}

fn slice(at: usize, ready: bool) -> Value {
    let endpoint = |n: usize| {
        json!({"addresses": [format!("10.{}.{}.{}", 128, 1 + (2 * at + n) / 250 % 200, 1 + (2 * at + n) % 250)],
               "nodeName": "n2", "conditions": {"ready": ready || n == 0}})
    };
    json!({"metadata": {"namespace": format!("team-{}", at / 100), "name": format!("s{at}-abcde"), "labels": {"kubernetes.io/service-name": format!("s{at}")}},
           "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
           "endpoints": [endpoint(0), endpoint(1)]})
}

fn policy(at: usize, port: u16) -> Value {
    json!({"metadata": {"namespace": format!("team-{at}"), "name": "front"},
           "spec": {"podSelector": {"matchLabels": {"app": "app-1"}}, "policyTypes": ["Ingress"],
                    "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "app-2"}}}], "ports": [{"protocol": "TCP", "port": port}]}]}})
}

/// Waits for the agent; longer than any correct run takes.
fn until<T>(mut f: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = f()? {
            return Ok(value);
        }
        if start.elapsed() > Duration::from_secs(120) {
            bail!("the agent did not follow within 120 s");
        }
        // What is measured is measured by the agent: asking often would only disturb it.
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// What the agent's configuration says. The file comes when the server knows the node's address: until then there is no answer.
fn line(kubeconfig: &Path, by_slices: bool) -> String {
    format!(
        "kubernetes: {{enabled: true, kubeconfig: {}, peers: {}, qps: 1000, burst: 1000, health_address: '', proxy_mode_address: ''}}",
        kubeconfig.display(),
        if by_slices { "slices" } else { "pods" }
    )
}

fn cluster(effort: Effort, size: Size) -> Result<Vec<Measure>> {
    // Goes with its guard, also when the run is interrupted.
    let dir = temp_dir("bench")?;
    let kubeconfig = dir.path().join("kubeconfig.json");
    measured(effort, size, &kubeconfig, &line(&kubeconfig, size.by_slices))
}

fn measured(effort: Effort, size: Size, kubeconfig: &Path, line: &str) -> Result<Vec<Measure>> {
    let bench = format!("k8s: {}", size.words());
    let mut lab = Lab::builder().nodes(1).config(line).unready().start()?;
    let address = lab.node(0).ips().first().context("the node has no address")?.to_string();
    let listener = lab.node(0).ns.run_in(|| TcpListener::bind("127.0.0.1:0"))??;
    let server = Server::start(listener)?;
    for at in 0..size.nodes {
        let address = if at == 0 { address.clone() } else { format!("198.18.{}.{}", at / 250, 1 + at % 250) };
        server.put(NODES, node(at, &address));
    }
    for at in 0..=size.pods.max(size.services) / 100 {
        server.put(NAMESPACES, json!({"metadata": {"name": format!("team-{at}"), "labels": {"kubernetes.io/metadata.name": format!("team-{at}")}}}));
    }
    if size.by_slices {
        // No Pod is on the first node.
        for at in 0..size.pods.div_ceil(OF_A_SLICE) {
            server.put(WORKLOADS, workload_slice(at, size, 0)?);
        }
    } else {
        (0..size.pods).for_each(|at| server.put(PODS, pod(at, size.nodes, 1)));
    }
    for at in 0..size.services {
        server.put(SERVICES, service(at));
        server.put(SLICES, slice(at, true));
    }
    (0..20).for_each(|at| server.put(POLICIES, policy(at, 8080)));
    let agent = lab.agents.first_mut().context("no agent")?;
    std::fs::write(kubeconfig, server.kubeconfig().to_string())?;
    agent.wait_ready()?;
    // Once more from a cold start, maps as they were.
    let start = Instant::now();
    agent.restart()?;
    let restart = start.elapsed().as_secs_f64() * 1e3;
    let client = agent.client();
    let updates = || -> Result<(u64, f64)> {
        let status = client.kubernetes()?;
        Ok((status.updates, status.applied_us as f64 / 1e3))
    };
    let change = |server: &dyn Fn()| -> Result<f64> {
        // One change on top, none of a burst: those wait for each other (`k8s::source`).
        std::thread::park_timeout(APART);
        let (before, _) = updates()?;
        server();
        until(|| Ok(Some(updates()?).filter(|(now, _)| *now > before).map(|(_, ms)| ms)))
    };
    let pid = agent.process.as_ref().context("no process")?.pid();
    let settled = resident(pid, "VmRSS:")?;
    let (mut comes, mut goes, mut slices, mut labels, mut policies) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..effort.changes {
        let new = size.services + round;
        comes.push(change(&|| server.put(SERVICES, service(new)))?);
        goes.push(change(&|| server.remove(SERVICES, service(new)))?);
        slices.push(change(&|| server.put(SLICES, slice(round, false)))?);
        labels.push(if size.by_slices {
            let slice = workload_slice(0, size, round + 1)?;
            change(&|| server.put(WORKLOADS, slice.clone()))?
        } else {
            change(&|| server.put(PODS, pod(round, size.nodes, 2)))?
        });
        policies.push(change(&|| server.put(POLICIES, policy(round % 20, 9000 + round as u16)))?);
    }
    let mut out = vec![
        alone(&bench, "restart until ready, everything listed and adopted", &[restart], "ms", None),
        alone(&bench, "agent memory, resident when settled", &[settled], "MiB", memory_goal(size)),
        alone(&bench, "agent memory, highest", &[resident(pid, "VmHWM:")?], "MiB", None),
    ];
    for (what, samples, goal) in [
        ("one Service added, answer to map", &comes, Some(Goal::AtMost(5.0))),
        ("one Service removed, answer to map", &goes, Some(Goal::AtMost(5.0))),
        ("one EndpointSlice changed, answer to map", &slices, Some(Goal::AtMost(5.0))),
        ("one Pod's label changed, answer to map", &labels, Some(Goal::AtMost(5.0))),
        ("one NetworkPolicy changed, answer to map", &policies, None),
    ] {
        out.push(alone(&bench, &format!("{what}, median"), samples, "ms", goal));
        out.push(p99(&bench, &format!("{what}, p99"), samples));
    }
    Ok(out)
}

/// 0.3 of the smaller peer with 10,000 Services; 120 MB at 1,000 nodes.
fn memory_goal(size: Size) -> Option<Goal> {
    match size {
        Size { nodes: 1_000, .. } => Some(Goal::AtMost(114.0)),
        Size { services: 10_000, .. } => Some(Goal::AtMost(55.0)),
        Size { .. } => None,
    }
}
