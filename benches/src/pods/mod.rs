//! `bench pods`: from a Pod's creation to its first packet under a NetworkPolicy, and the runtime's share for the network, in two real
//! clusters side by side: flowloom alone, and the reference plugins with kube-proxy in nftables mode; and what a large cluster's objects cost.

mod api;
mod objects;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use flowloom_lab::{BUSYBOX, Lab, Options, node, wait};
use flowloom_netlink::Netns;
use serde_json::{Value, json};

use self::api::{Api, PATIENCE, exchange};
use crate::measure::{Goal, against};
use crate::node::Effort;
use crate::parts::chosen;
use crate::report::Measure;

const BENCH: &str = "pods: a real cluster of one node";
const PEER: &str = "bridge, host-local, kube-proxy (nftables)";
/// Where Pods report on their node.
const PORT: u16 = 7070;
/// containerd's metrics, on the node's loopback.
const METRICS: &str = "127.0.0.1:1338";
/// Pods at once, below a node's 110.
const MANY: usize = 50;
const NAMESPACE: &str = "bench";
const PODS: &str = "/api/v1/namespaces/bench/pods";

/// A cluster under measurement.
struct Cluster {
    // Fields are dropped in this order: the proxy before its cluster.
    api: Api,
    arrivals: Receiver<(String, Instant)>,
    netns: Netns,
    _lab: Lab,
    made: usize,
}

/// One look at what the runtime spent on networks of Pods: calls and seconds.
#[derive(Clone, Copy)]
struct Spent {
    calls: f64,
    seconds: f64,
}

/// What one round showed, in milliseconds.
#[derive(Default)]
struct Samples {
    whole: Vec<f64>,
    network: Vec<f64>,
}

/// One part of the benchmark.
type Part = fn(Effort) -> Result<Vec<Measure>>;

const PARTS: [(&str, Part); 2] = [("start", start), ("objects", |_| objects::objects())];

/// Everything, or the parts that are named.
///
/// # Errors
/// When there is no such part, programs of the lab are missing (`scripts/setup.sh --k8s`), or a Pod never speaks.
pub fn bench(effort: Effort, only: &[String]) -> Result<Vec<Measure>> {
    let mut measures = Vec::new();
    for (name, part) in chosen(&PARTS, only)? {
        let begin = Instant::now();
        measures.extend(part(effort).with_context(|| name.to_owned())?);
        eprintln!("{name}: {:.0} s", begin.elapsed().as_secs_f32());
    }
    Ok(measures)
}

/// Pods start in two clusters in turn.
fn start(effort: Effort) -> Result<Vec<Measure>> {
    let own = |suffix: &str, options: Options| Options {
        name: format!("{suffix}{}", std::process::id() % 1_000_000),
        nodes: 1,
        ..options
    };
    let mut clusters = [
        Cluster::up(own("o", Options::for_test().flowloom())).context("flowloom's cluster")?,
        Cluster::up(own("p", Options::for_test())).context("the peer's cluster")?,
    ];
    // What is read, mapped or made once only.
    for cluster in &mut clusters {
        cluster.start(2, &mut Samples::default())?;
    }
    let mut measures = Vec::new();
    for (pods, rounds) in [(1, effort.rounds), (MANY, effort.rounds.div_ceil(4))] {
        let mut samples = [Samples::default(), Samples::default()];
        for round in 0..rounds {
            for side in 0..2 {
                // Each is first in turn.
                let side = (side + round) % 2;
                clusters[side].start(pods, &mut samples[side])?;
            }
        }
        let [ours, theirs] = &samples;
        let how = if pods == 1 { "alone".to_owned() } else { format!("{pods} at once, the last") };
        let each = if pods == 1 { "alone".to_owned() } else { format!("{pods} at once, each") };
        let row = |what: String, ours: &[f64], theirs: &[f64], goal| {
            against(BENCH, &what, "ms", ours, PEER, theirs, Some(Goal::AtMost(goal)))
        };
        measures.extend([
            row(format!("creation to first packet under policy, {how}"), &ours.whole, &theirs.whole, 1.0),
            row(format!("the runtime's calls for the network, {each}"), &ours.network, &theirs.network, 0.5),
        ]);
    }
    Ok(measures)
}

impl Cluster {
    fn up(options: Options) -> Result<Self> {
        let lab = Lab::up(options)?;
        let netns = Netns::open(flowloom_netlink::DEFAULT_DIR.to_owned() + "/" + lab.node(1)?.netns())?;
        let sink = SocketAddr::new(node(1)[0], PORT);
        let arrivals = listen(&netns, sink)?;
        let policy = json!({
            "apiVersion": "v1", "kind": "List", "items": [
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
                {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
                 "metadata": {"namespace": NAMESPACE, "name": "report"},
                 "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
                          "egress": [{"to": [{"ipBlock": {"cidr": format!("{}/32", sink.ip())}}],
                                      "ports": [{"protocol": "TCP", "port": PORT}]}]}},
            ],
        });
        lab.kubectl_input(&["apply", "-f", "-"], &policy.to_string())?;
        wait::until(PATIENCE, "the namespace's account", || {
            lab.kubectl(&["-n", NAMESPACE, "get", "serviceaccount", "default"])
        })?;
        let api = Api::open(&lab)?;
        Ok(Self { api, arrivals, netns, _lab: lab, made: 0 })
    }

    /// Starts so many Pods at once, waits until the last has spoken, and removes them.
    fn start(&mut self, pods: usize, samples: &mut Samples) -> Result<()> {
        let names: Vec<String> = (0..pods).map(|n| format!("pod-{}", self.made + n)).collect();
        self.made += pods;
        let before = self.spent()?;
        let mut waiting: HashMap<&str, Instant> = HashMap::new();
        for name in &names {
            waiting.insert(name, Instant::now());
            self.api.create(PODS, &pod(name))?;
        }
        let begun = waiting.values().min().copied().context("no Pods")?;
        let mut last = begun;
        while !waiting.is_empty() {
            let (name, at) = self.arrivals.recv_timeout(PATIENCE).with_context(|| {
                format!(
                    "{} of {pods} Pods never spoke, {:?} among them",
                    waiting.len(),
                    waiting.keys().next()
                )
            })?;
            if waiting.remove(name.as_str()).is_some() {
                last = last.max(at);
            }
        }
        let after = self.spent()?;
        let calls = after.calls - before.calls;
        ensure!(calls >= pods as f64, "the runtime counted {calls} calls for {pods} Pods");
        samples.whole.push((last - begun).as_secs_f64() * 1e3);
        samples.network.push((after.seconds - before.seconds) * 1e3 / calls);
        for name in &names {
            let now = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0});
            self.api.ask("DELETE", &format!("{PODS}/{name}"), &now.to_string())?;
        }
        wait::until(PATIENCE, "the Pods' end", || {
            let (_, answer) = self.api.ask("GET", PODS, "")?;
            let list: Value = serde_json::from_str(&answer)?;
            let left = list["items"].as_array().map_or(usize::MAX, Vec::len);
            let sandboxes = self.sandboxes()?;
            ensure!(left == 0 && sandboxes == 0, "{left} Pods, {sandboxes} sandboxes");
            Ok(())
        })
    }

    /// Pods whose tasks run still: what is removed costs the next round nothing.
    fn sandboxes(&self) -> Result<usize> {
        let out = self._lab.node(1)?.exec_ok(&["ctr", "-n", "k8s.io", "tasks", "list", "-q"])?;
        Ok(out.stdout.lines().count())
    }

    fn spent(&self) -> Result<Spent> {
        let asked = self.netns.run_in(|| -> Result<(u16, String)> {
            let mut stream = TcpStream::connect(METRICS)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            exchange(&mut stream, "GET", "/v1/metrics", "")
        })?;
        let (status, text) = asked.context("the runtime's metrics")?;
        ensure!(status == 200, "the runtime's metrics: {status}");
        Ok(spent(&text))
    }
}

/// What the runtime says of its calls to set networks up; nothing before the first.
fn spent(metrics: &str) -> Spent {
    let value = |suffix: &str| {
        let mut rows = metrics.lines().filter(|l| {
            l.contains("network_plugin_operations_duration_seconds")
                && l.contains("operation_type=\"set_up_pod\"")
        });
        let row = rows.find(|l| l.split('{').next().is_some_and(|name| name.ends_with(suffix)));
        row.and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    };
    Spent { calls: value("_count"), seconds: value("_sum") }
}

/// It speaks as soon as it can, and stays.
fn pod(name: &str) -> Value {
    let sink = SocketAddr::new(node(1)[0], PORT);
    let (ip, port) = (sink.ip(), sink.port());
    let script = format!("until echo 'GET /{name}' | nc -w 1 {ip} {port}; do :; done; exec sleep 3600");
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "bench"}},
        "spec": {
            "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [{"name": "main", "image": BUSYBOX, "command": ["sh", "-c", script]}],
        },
    })
}

/// Pods that speak, in the order of their words. Ends with the receiver, or its namespace's last packet.
fn listen(netns: &Netns, at: SocketAddr) -> Result<Receiver<(String, Instant)>> {
    let listener = netns.run_in(|| TcpListener::bind(at))??;
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("sink".into()).spawn(move || {
        for stream in listener.incoming() {
            let now = Instant::now();
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 512];
            let read = stream.read(&mut request).unwrap_or(0);
            let text = String::from_utf8_lossy(&request[..read]).into_owned();
            let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n");
            let name = text.split(' ').nth(1).unwrap_or_default().trim().trim_start_matches('/').to_owned();
            if sender.send((name, now)).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtimes_share_is_read_from_its_metrics() {
        let name = "containerd_cri_network_plugin_operations_duration_seconds_seconds";
        let text = format!(
            "# TYPE {name} histogram\n\
             {name}_bucket{{operation_type=\"set_up_pod\",le=\"0.005\"}} 1\n\
             {name}_sum{{operation_type=\"set_up_pod\"}} 1.5\n\
             {name}_count{{operation_type=\"set_up_pod\"}} 12\n\
             {name}_sum{{operation_type=\"tear_down_pod\"}} 9\n"
        );
        let Spent { calls, seconds } = spent(&text);
        assert_eq!((calls, seconds), (12.0, 1.5));
        assert_eq!(spent("").calls, 0.0);
    }
}
