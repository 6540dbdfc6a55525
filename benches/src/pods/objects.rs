//! `bench pods --part objects`: a real API server with the objects of a large cluster, flowloom's controller, and the agent of one of its nodes.
//! Nobody else is there: other nodes and their Pods are objects.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flowloom_lab::{Families, Lab, Node, Options, node, programs, wait};
use serde_json::{Value, json};

use super::api::Api;
use crate::measure::{Goal, alone};
use crate::report::Measure;

const NODES: usize = 1_000;
const PODS: usize = 20_000;
const SERVICES: usize = 1_000;
/// Pods of a namespace.
const TEAM: usize = 100;
/// Requests at once while objects are made.
const WRITERS: usize = 8;
/// After a start: what it needed more is given back by then.
const SETTLE: Duration = Duration::from_secs(10);
/// Watches are told that they live once a minute.
const IDLE: Duration = Duration::from_secs(60);
/// Making 20,000 Pods known takes the API server minutes on two cores.
const LONG: Duration = Duration::from_secs(600);
const AGENT: &str = "flowloom-agent";
const CONTROLLER: &str = "flowloom-controller";

fn team(at: usize) -> String {
    format!("team-{}", at / TEAM)
}

fn pod_name(at: usize) -> String {
    format!("app-{}-5d8c7f6b9-{at:05}", at % 10)
}

/// The first node is this one, and has as many Pods as any other.
fn home(pod: usize) -> usize {
    pod % NODES
}

fn host(node: usize, host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 128 + (node / 256) as u8, (node % 256) as u8, host as u8)
}

fn node_object(at: usize, address: &str) -> Value {
    let cidr = format!("{}/24", host(at, 0));
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{}", at + 1)},
           "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
           "status": {"addresses": [{"type": "InternalIP", "address": address}],
                      "conditions": [{"type": "NetworkUnavailable", "status": "False", "reason": "FlowloomIsUp"}]}})
}

fn pod_object(at: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
           "metadata": {"name": pod_name(at), "labels": {"app": format!("app-{}", at % 10), "pod-template-hash": "5d8c7f6b9"}},
           "spec": {"nodeName": format!("n{}", home(at) + 1),
                    "containers": [{"name": "main", "image": "shop/app:1",
                                    "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]}]}})
}

fn status(ip: &str) -> Value {
    json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]})
}

fn service_object(at: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("s{at}")},
           "spec": {"selector": {"app": format!("app-{}", at % 10)}, "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}]}})
}

fn slice_object(at: usize) -> Value {
    let name = format!("s{at}");
    let endpoint = |n: usize| {
        let pod = (2 * at + n) % PODS;
        json!({"addresses": [host(home(pod), 2 + pod / NODES)], "nodeName": format!("n{}", home(pod) + 1), "conditions": {"ready": true}})
    };
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
           "metadata": {"name": format!("{name}-abcde"), "labels": {"kubernetes.io/service-name": name}},
           "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": 8080}], "endpoints": [endpoint(0), endpoint(1)]})
}

fn pods_of(team: &str) -> String {
    format!("/api/v1/namespaces/{team}/pods")
}

/// `make` for every number below `n`, some at once, in their order.
fn each(n: usize, make: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        if at >= n {
                            return Ok(());
                        }
                        // The others end, too.
                        make(at).inspect_err(|_| next.store(n, Ordering::Relaxed))?;
                    }
                })
            })
            .collect();
        writers.into_iter().try_for_each(|w| w.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?)
    })
}

fn fill(api: &Api) -> Result<()> {
    each(NODES, |at| {
        let elsewhere = Ipv4Addr::new(198, 18, (at / 250) as u8, 1 + (at % 250) as u8);
        let address = if at == 0 { node(1)[0].to_string() } else { elsewhere.to_string() };
        api.create("/api/v1/nodes", &node_object(at, &address))
    })?;
    each(PODS.max(SERVICES).div_ceil(TEAM), |at| {
        let name = team(at * TEAM);
        api.create(
            "/api/v1/namespaces",
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
        )?;
        // Nobody else makes it here, and no Pod is admitted without.
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        api.create(&format!("/api/v1/namespaces/{name}/serviceaccounts"), &account)
    })?;
    each(SERVICES, |at| {
        let team = team(at);
        api.create(&format!("/api/v1/namespaces/{team}/services"), &service_object(at))?;
        api.create(&format!("/apis/discovery.k8s.io/v1/namespaces/{team}/endpointslices"), &slice_object(at))
    })?;
    each(PODS, |at| {
        let pods = pods_of(&team(at));
        api.create(&pods, &pod_object(at))?;
        // This node's get their addresses from its agent.
        if home(at) == 0 {
            return Ok(());
        }
        let ip = host(home(at), 2 + at / NODES).to_string();
        api.say(&format!("{pods}/{}", pod_name(at)), &status(&ip))
    })
}

/// As a runtime does, through its own library: the Pods of this node.
fn attach(api: &Api, this: &Node<'_>) -> Result<()> {
    let cnitool = programs().join("cnitool").display().to_string();
    for at in (0..PODS).filter(|at| home(*at) == 0) {
        let (namespace, name) = (team(at), pod_name(at));
        this.exec_ok(&["ip", "netns", "add", &name])?;
        let args = format!("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}");
        let netns = format!("/run/netns/{name}");
        let paths = ["CNI_PATH=/opt/cni/bin", "NETCONFPATH=/etc/cni/net.d"];
        let call = [&["env"], paths.as_slice(), &[&args, &cnitool, "add", "flowloom", &netns]].concat();
        let result: Value = serde_json::from_str(&this.exec_ok(&call)?.stdout)?;
        let ip = result["ips"][0]["address"].as_str().and_then(|a| a.split('/').next());
        let ip = ip.with_context(|| format!("no address for {name}: {result}"))?;
        api.say(&format!("{}/{name}", pods_of(&namespace)), &status(ip))?;
    }
    Ok(())
}

/// A service of a member as its own namespaces see it.
struct Program<'a> {
    lab: &'a Lab,
    member: &'static str,
    pid: i32,
}

impl<'a> Program<'a> {
    fn find(lab: &'a Lab, member: &'static str, name: &str) -> Result<Self> {
        let all = lab.status()?;
        let found = all.into_iter().find(|(m, service, ..)| m == member && service == name);
        let (.., state, _) = found.with_context(|| format!("{member} has no {name}"))?;
        ensure!(state.ended.is_none(), "{name} ended: {:?}", state.ended);
        Ok(Self { lab, member, pid: state.pid })
    }

    fn read(&self, script: &str) -> Result<String> {
        let argv = self.lab.exec_argv(self.member, &["sh", "-c", script])?;
        Ok(flowloom_testkit::Cmd::new(&argv).run()?.success()?.stdout)
    }

    /// A line of its status, MiB.
    fn memory(&self, line: &str) -> Result<f64> {
        let text = self.read(&format!("cat /proc/{}/status", self.pid))?;
        let kib = text.lines().find_map(|l| l.strip_prefix(line)).context("no such line")?;
        Ok(kib.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
    }

    /// CPU time of its threads so far, milliseconds.
    fn cpu_ms(&self) -> Result<f64> {
        let text = self.read(&format!("cat /proc/{}/task/*/schedstat", self.pid))?;
        let spent = text.lines().filter_map(|l| l.split(' ').next()?.parse::<f64>().ok());
        Ok(spent.sum::<f64>() / 1e6)
    }
}

/// Until the agent knows every Pod of the cluster.
fn until_all_known(lab: &Lab, this: &Node<'_>) -> Result<()> {
    let flowloom = lab.options().bin_dir.join("flowloom").display().to_string();
    wait::until(LONG, "every Pod known to the agent", || {
        let answer: Value =
            serde_json::from_str(&this.exec_ok(&[&flowloom, "k8s", "status", "-o", "json"])?.stdout)?;
        let kinds = answer["kinds"].as_array().context("no kinds")?;
        let known = kinds.iter().find(|k| k["kind"] == "Pod").and_then(|k| k["objects"].as_u64());
        ensure!(known == Some(PODS as u64), "{known:?} of {PODS}");
        Ok(())
    })
}

#[expect(clippy::disallowed_methods, reason = "the measured thing is what is left when nothing happens")]
fn nothing_for(time: Duration) {
    std::thread::sleep(time);
}

/// So far, of an account; what they are goes to the one who watches.
fn requests(lab: &Lab, account: &str) -> Result<f64> {
    let kinds = lab.requests()?.remove(account).with_context(|| format!("{account} asked nothing"))?;
    let words: Vec<String> = kinds.iter().map(|(what, n)| format!("{what} {n}")).collect();
    eprintln!("  requests of {account}: {}", words.join(", "));
    Ok(kinds.values().sum::<usize>() as f64)
}

/// See the module's comment.
pub(super) fn objects() -> Result<Vec<Measure>> {
    let options = Options {
        name: format!("b{}", std::process::id() % 1_000_000),
        nodes: 1,
        families: Families::Ipv4,
        objects_only: true,
        ..Options::for_test().flowloom()
    };
    let lab = Lab::up(options)?;
    // Pods come one by one while it publishes: what that costs in requests is counted.
    lab.start_controller()?;
    let api = Api::open(&lab)?;
    let begin = Instant::now();
    fill(&api)?;
    eprintln!("  objects made in {:.0} s", begin.elapsed().as_secs_f32());
    lab.start_agents()?;
    let this = lab.node(1)?;
    attach(&api, &this)?;
    until_all_known(&lab, &this)?;
    let (agent, controller) = (requests(&lab, AGENT)?, requests(&lab, CONTROLLER)?);
    let begin = Instant::now();
    this.restart_agent()?;
    until_all_known(&lab, &this)?;
    let restart = begin.elapsed().as_secs_f64() * 1e3;
    nothing_for(SETTLE);
    let program = Program::find(&lab, "n1", AGENT)?;
    let start = program.cpu_ms()?;
    nothing_for(IDLE);
    let idle = program.cpu_ms()? - start;
    let bench = format!("pods: {NODES} nodes, {PODS} Pods and {SERVICES} Services in a real API server");
    let measure =
        |what: &str, value: f64, unit: &str, goal: Option<Goal>| alone(&bench, what, &[value], unit, goal);
    Ok(vec![
        // 120 MB.
        measure(
            "agent memory, resident when settled",
            program.memory("VmRSS:")?,
            "MiB",
            Some(Goal::AtMost(114.0)),
        ),
        measure("agent memory, highest", program.memory("VmHWM:")?, "MiB", None),
        measure("agent, restart until every Pod is known", restart, "ms", None),
        measure("agent, CPU of that start", start, "ms", None),
        measure("agent, CPU in 60 idle seconds", idle, "ms", None),
        measure(
            "controller memory, resident when settled",
            Program::find(&lab, "cp", CONTROLLER)?.memory("VmRSS:")?,
            "MiB",
            None,
        ),
        measure("API requests of one agent, with its node's Pods attached", agent, "requests", None),
        measure("API requests of the controller, while every Pod came", controller, "requests", None),
        measure(
            "API requests of that agent and the controller, per Pod",
            (controller + agent) / PODS as f64,
            "requests",
            Some(Goal::AtMost(1.0)),
        ),
        measure(
            "API requests of the controller and such an agent on every node, per Pod",
            (controller + NODES as f64 * agent) / PODS as f64,
            "requests",
            None,
        ),
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_pod_has_a_name_and_an_address_of_its_own_and_this_node_its_share() {
        let names: BTreeSet<_> = (0..PODS).map(|at| (team(at), pod_name(at))).collect();
        let addresses: BTreeSet<_> = (0..PODS).map(|at| host(home(at), 2 + at / NODES)).collect();
        assert_eq!((names.len(), addresses.len()), (PODS, PODS));
        assert_eq!((0..PODS).filter(|at| home(*at) == 0).count(), PODS / NODES);
        // A /24 each.
        const { assert!(2 + (PODS - 1) / NODES < 255 && NODES <= 128 * 256) };
    }

    #[test]
    fn writers_make_each_one_once_and_end_with_the_first_error() {
        let made = std::sync::Mutex::new(Vec::new());
        each(100, |at| {
            made.lock().unwrap().push(at);
            Ok(())
        })
        .unwrap();
        let mut made = made.into_inner().unwrap();
        made.sort_unstable();
        assert_eq!(made, (0..100).collect::<Vec<_>>());
        let e = each(1_000_000, |at| if at < 10 { Ok(()) } else { anyhow::bail!("no room") }).unwrap_err();
        assert_eq!(e.to_string(), "no room");
    }
}
