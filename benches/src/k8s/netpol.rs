//! A NetworkPolicy comes and goes on a node full of Pods. What says so are datagrams between two of them.

use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use flowloom_netlink::Netns;
use flowloom_testkit::{Ns, temp_dir};
use flowloom_tests_e2e::{Lab, Runtime, pods::addresses};
use serde_json::{Value, json};

use super::server::Server;
use super::{NAMESPACES, NODES, PODS, POLICIES, node};
use crate::measure::{Goal, against, alone, p99_within};
use crate::node::Effort;
use crate::outside::{self, Outside};
use crate::report::Measure;
use crate::stats;

/// What a kubelet takes by default.
const MANY: usize = 110;
const PORT: u16 = 7071;
/// Between two datagrams: how exact a time is.
const PACE: Duration = Duration::from_micros(250);
/// Nothing that was sent for so long has arrived: a busy machine delays datagrams, not all of them for this long.
const SILENCE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);
const NAMESPACE: &str = "shop";

/// 0.2 of what the fastest live peer takes on the same machine, with fewer Pods (221 and 230 ms; from the API server's answer until a connection
/// behaves otherwise).
const CREATED: Goal = Goal::AtMost(44.0);
const DELETED: Goal = Goal::AtMost(46.0);
/// Against a peer that runs beside.
const BESIDE: Goal = Goal::AtMost(0.2);
/// Rounds of that peer: one may take half a minute.
const BESIDE_ROUNDS: usize = 15;

fn pod(name: &str) -> Value {
    json!({"metadata": {"namespace": NAMESPACE, "name": name, "uid": format!("u-{name}"), "creationTimestamp": "2026-01-01T00:00:00Z",
                        "labels": {"app": "shop"}},
           "spec": {"nodeName": "n1", "serviceAccountName": "default", "containers": [{"name": "main"}]},
           "status": {"phase": "Pending"}})
}

/// Nobody may come in who is there, to any Pod.
fn policy() -> Value {
    json!({"metadata": {"namespace": NAMESPACE, "name": "closed", "creationTimestamp": "2026-01-01T00:00:00Z"},
           "spec": {"podSelector": {}, "policyTypes": ["Ingress"],
                    "ingress": [{"from": [{"podSelector": {"matchLabels": {"no": "one"}}}]}]}})
}

/// A Pod that a runtime has attached.
struct Attached {
    ip: IpAddr,
    ns: Ns,
    /// Bound inside, and read from here.
    socket: UdpSocket,
}

fn attach(runtime: &mut Runtime, name: &str) -> Result<Attached> {
    let ns = Ns::new("pod")?;
    for (key, value) in [
        ("K8S_POD_NAMESPACE", NAMESPACE.to_owned()),
        ("K8S_POD_NAME", name.to_owned()),
        ("K8S_POD_UID", format!("u-{name}")),
        ("IgnoreUnknown", "1".to_owned()),
    ] {
        runtime.args.insert(key.to_owned(), value);
    }
    let result = runtime.add(ns.name(), &ns)?;
    let ip = addresses(&result)?.first().copied().with_context(|| format!("{name} has no address"))?;
    let socket = ns.run_in(|| UdpSocket::bind((ip, PORT)))??;
    socket.set_nonblocking(true)?;
    Ok(Attached { ip, ns, socket })
}

/// Datagrams to one Pod, each a flow of its own, numbered; when each was sent.
struct Datagrams<'a> {
    to: SocketAddr,
    at: &'a UdpSocket,
    sent: Vec<Instant>,
}

impl<'a> Datagrams<'a> {
    fn new(to: &'a Attached) -> Self {
        Self { to: SocketAddr::new(to.ip, PORT), at: &to.socket, sent: Vec::new() }
    }

    /// Sends the next one, pauses, and returns the highest number that has arrived in the meantime. Called in the sender's namespace.
    fn step(&mut self) -> Result<Option<usize>> {
        let number = self.sent.len();
        self.sent.push(Instant::now());
        // Another port each time: what a flow was allowed once says nothing about the next.
        UdpSocket::bind("0.0.0.0:0")?.send_to(&number.to_be_bytes(), self.to)?;
        std::thread::park_timeout(PACE);
        let mut highest = None;
        let mut bytes = [0; size_of::<usize>()];
        while let Ok(read) = self.at.recv(&mut bytes) {
            ensure!(read == bytes.len(), "a datagram of {read} bytes is not one of these");
            highest = highest.max(Some(usize::from_be_bytes(bytes)));
        }
        Ok(highest)
    }

    /// When the first one was noticed that arrived.
    fn until_one_arrives(&mut self) -> Result<Instant> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if self.step()?.is_some() {
                return Ok(Instant::now());
            }
        }
        bail!("nothing reached {} within {PATIENCE:?}", self.to)
    }

    /// When the first one was sent after which none arrived.
    fn until_none_arrives(&mut self) -> Result<Instant> {
        let begin = Instant::now();
        let mut next = 0;
        while begin.elapsed() < PATIENCE {
            next = self.step()?.map_or(next, |arrived| next.max(arrived + 1));
            if let Some(first) = self.sent.get(next).filter(|s| s.elapsed() > SILENCE) {
                return Ok(*first);
            }
        }
        bail!("{} is still reached after {PATIENCE:?}", self.to)
    }
}

/// Milliseconds from `change`, which tells the agent, until `seen` says so; in the sender's namespace.
fn time(
    from: &Netns,
    change: impl FnOnce() + Send,
    seen: impl FnOnce() -> Result<Instant> + Send,
) -> Result<f64> {
    from.run_in(|| {
        let begin = Instant::now();
        change();
        Ok(seen()?.saturating_duration_since(begin).as_secs_f64() * 1e3)
    })?
}

/// See the module's comment.
pub(super) fn netpol(effort: Effort) -> Result<Vec<Measure>> {
    let dir = temp_dir("bench")?;
    let kubeconfig = dir.path().join("kubeconfig.json");
    let lab = Lab::builder().nodes(1).config(&super::line(&kubeconfig, false)).unready().start()?;
    let address = lab.node(0).ips().first().context("the node has no address")?.to_string();
    let listener = lab.node(0).ns.run_in(|| TcpListener::bind("127.0.0.1:0"))??;
    let server = Server::start(listener)?;
    server.put(NODES, node(0, &address));
    let labels = json!({"kubernetes.io/metadata.name": NAMESPACE});
    server.put(NAMESPACES, json!({"metadata": {"name": NAMESPACE, "labels": labels}}));
    let names: Vec<String> = (0..MANY).map(|n| format!("pod-{n}")).collect();
    names.iter().for_each(|name| server.put(PODS, pod(name)));
    std::fs::write(&kubeconfig, server.kubeconfig().to_string())?;
    lab.agents.first().context("no agent")?.wait_ready()?;
    let mut runtime = Runtime::new(&lab, 0, "1.1.0")?;
    let pods = names.iter().map(|name| attach(&mut runtime, name)).collect::<Result<Vec<_>>>()?;
    let [client, others @ ..] = pods.as_slice() else { bail!("no Pods") };
    let (mut created, mut deleted) = (Vec::new(), Vec::new());
    let (beside, mut their_created, mut their_deleted) = (Outside::named(), Vec::new(), Vec::new());
    // The first round warms caches and neighbour entries.
    for round in 0..=effort.changes {
        // Whichever the agent's order is: some are its first and some its last.
        let to = others.get(round * 37 % others.len()).context("no Pod")?;
        client.ns.run_in(|| Datagrams::new(to).until_one_arrives().map(drop))??;
        let mut datagrams = Datagrams::new(to);
        let closes = time(&client.ns, || server.put(POLICIES, policy()), || datagrams.until_none_arrives())?;
        let mut datagrams = Datagrams::new(to);
        let opens = time(&client.ns, || server.remove(POLICIES, policy()), || datagrams.until_one_arrives())?;
        if round > 0 {
            created.push(closes);
            deleted.push(opens);
            if let Some(peer) = beside.as_ref().filter(|_| round <= BESIDE_ROUNDS) {
                let [closes, opens] = peer.times("netpol")?;
                their_created.push(closes);
                their_deleted.push(opens);
            }
        }
    }
    let bench = format!("k8s: {MANY} Pods on the node");
    let mut out = Vec::new();
    for (what, samples, theirs, goal) in [
        (
            "a NetworkPolicy for all of them created, answer to the first packet it stops",
            created,
            their_created,
            CREATED,
        ),
        (
            "a NetworkPolicy for all of them deleted, answer to the first packet that passes",
            deleted,
            their_deleted,
            DELETED,
        ),
    ] {
        out.push(alone(&bench, &format!("{what}, median"), &samples, "ms", Some(goal)));
        out.push(p99_within(&bench, &format!("{what}, p99"), &samples, Some(goal)));
        if beside.is_some() {
            let bench = format!("{bench}, beside a peer");
            let row = |words: &str, ours: &[f64], theirs: &[f64]| {
                against(&bench, &format!("{what}, {words}"), "ms", ours, outside::NAME, theirs, Some(BESIDE))
            };
            out.push(row("median", &samples, &theirs));
            let worst = |samples: &[f64]| stats::percentile(samples, 99.0).unwrap_or(0.0);
            out.push(row("p99", &[worst(&samples)], &[worst(&theirs)]));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    #[test]
    fn what_arrives_ends_one_wait_and_what_does_not_the_other() {
        let (at, elsewhere) = (here(), here());
        let datagrams = |to: &UdpSocket| (to.local_addr().unwrap(), Vec::new());
        let (to, sent) = datagrams(&at);
        let begin = Instant::now();
        let arrived = Datagrams { to, at: &at, sent }.until_one_arrives().unwrap();
        assert!(arrived >= begin);
        // They go where nobody reads them.
        let (to, sent) = datagrams(&elsewhere);
        let mut lost = Datagrams { to, at: &at, sent };
        let begin = Instant::now();
        let silent = lost.until_none_arrives().unwrap();
        assert!(silent >= begin && silent.elapsed() > SILENCE);
        assert_eq!(silent, lost.sent[0], "none arrived: the first is it");
    }
}
