//! The demonstration on Kubernetes: a shop on two nodes, a Service of each type, three NetworkPolicies, and a table of measured requests
//! beside what `flowloom policy explain` says of each.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use flowloom_lab::{BUSYBOX, Lab, Options, outside};
use flowloom_testkit::{Cmd, Output};
use serde_json::{Value, json};

/// Shows what flowloom does for Kubernetes on this machine: a real API server, two nodes with real kubelets, no kube-proxy.
#[derive(Parser)]
struct Args {
    /// Leave the cluster running, and say how to look around.
    #[arg(long)]
    keep: bool,
    /// The cluster's name.
    #[arg(long, default_value = "demo")]
    name: String,
}

/// An address that a cloud would hand out: the outside host sends it to the first node.
const PUBLIC: &str = "198.51.100.80";
/// For Pods to start, and for policies to be in force on both nodes.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a client waits for an answer, seconds.
const ANSWER: &str = "2";
const OUTSIDE: &str = "outside";

/// Namespace, name, node and the port that is called `http`.
const PODS: &[(&str, &str, &str, u16)] = &[
    ("shop", "front-1", "n1", 8080),
    ("shop", "front-2", "n2", 8080),
    ("shop", "back-1", "n1", 8080),
    ("shop", "back-2", "n2", 8080),
    ("shop", "db-0", "n2", 5432),
    ("street", "visitor", "n1", 8080),
];

/// Where a request goes.
enum To {
    /// The Service's own address, on port 80.
    Cluster(&'static str),
    /// The Pod behind a headless Service: its name's address.
    Headless(&'static str, &'static str),
    /// A port of the first node.
    NodePort(&'static str, u16),
    /// The address of the load balancer's status.
    Balanced(&'static str),
}

struct Row {
    from: &'static str,
    to: To,
    reached: bool,
    shows: &'static str,
}

const fn row(from: &'static str, to: To, reached: bool, shows: &'static str) -> Row {
    Row { from, to, reached, shows }
}

const ROWS: &[Row] = &[
    row(OUTSIDE, To::NodePort("front", 30080), true, "from outside to a port of a node"),
    row(OUTSIDE, To::Balanced("public"), true, "load balancer, policy Local: the Pod of that node"),
    row("street/visitor", To::Cluster("front"), true, "another namespace, to the open front"),
    row("street/visitor", To::Balanced("public"), true, "from inside to the load balancer's address"),
    row("street/visitor", To::Cluster("back"), false, "another namespace, past the front"),
    row("shop/front-1", To::Cluster("back"), true, "allowed by label"),
    row("shop/front-2", To::Cluster("back"), true, "the same from the other node"),
    row("shop/front-1", To::Headless("db", "db-0"), false, "the front skips the back"),
    row("shop/back-1", To::Headless("db", "db-0"), true, "across nodes, allowed by label"),
    row("shop/back-2", To::Headless("db", "db-0"), true, "same node"),
    row("shop/db-0", To::Cluster("back"), false, "the database asks nobody"),
];

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    let start = Instant::now();
    println!("a cluster of two nodes, dual stack, flowloom and no kube-proxy ...");
    let owner = Some(std::process::id());
    let mut lab = Lab::up(Options { owner, ..Options::new(&args.name) }.flowloom())?;
    println!("up after {:.0} s; a shop on it ...", start.elapsed().as_secs_f32());
    let shop = Shop::open(&lab)?;
    println!("running after {:.0} s\n", start.elapsed().as_secs_f32());

    let mut table = vec![["FROM", "TO", "BY", "ANSWER", "EXPLAINED", "SHOWS"].map(str::to_owned)];
    let mut wrong = Vec::new();
    for row in ROWS {
        let seen = shop.settled(row)?;
        if seen.answer.is_some() != row.reached || !seen.agrees() {
            wrong.push(format!("{} to {}: {}", row.from, seen.name, seen.explained));
        }
        let answer = seen.answer.unwrap_or_else(|| "none".to_owned());
        table.push([row.from.into(), seen.name, seen.by, answer, seen.explained, row.shows.into()]);
    }
    print!("{}", aligned(&table));
    println!();
    for node in [1, 2] {
        let told = shop.health(node).unwrap_or_else(|e| format!("{e:#}"));
        println!("health-check port of svc/shop/public on n{node}: {told}");
        if !told.contains("\"localEndpoints\":1,") {
            wrong.push(format!("the health-check port of n{node}"));
        }
    }
    println!(
        "\n{} requests, {} not as they should be; {:.0} s",
        ROWS.len(),
        wrong.len(),
        start.elapsed().as_secs_f32()
    );
    wrong.iter().for_each(|w| println!("WRONG: {w}"));
    if args.keep {
        lab.keep()?;
        let (name, cli) = (&args.name, cli(&lab));
        println!(
            "\nThe cluster stays. To look around:\n  cargo xtask lab kubectl --name {name} get pods -A -o wide\n  \
             cargo xtask lab exec --name {name} n1 -- {cli} policy explain shop/front-1 svc/shop/back\n  \
             cargo xtask lab exec --name {name} n1 -- {cli} observe --follow --to svc/shop/back\n  \
             cargo xtask lab down --name {name}"
        );
    }
    Ok(wrong.is_empty())
}

fn cli(lab: &Lab) -> String {
    program(lab).display().to_string()
}

fn program(lab: &Lab) -> PathBuf {
    lab.options().bin_dir.join("flowloom")
}

struct Shop<'a> {
    lab: &'a Lab,
}

/// A request, measured and explained.
struct Seen {
    /// The Service's name.
    name: String,
    /// What kind of address was asked, and which.
    by: String,
    /// The Pod that answered.
    answer: Option<String>,
    allowed: bool,
    explained: String,
}

impl Seen {
    fn agrees(&self) -> bool {
        self.answer.is_some() == self.allowed
    }
}

impl<'a> Shop<'a> {
    /// Makes everything and waits until it runs.
    fn open(lab: &'a Lab) -> Result<Self> {
        ensure!(program(lab).exists(), "{} is not built: use `./demo --k8s`", cli(lab));
        lab.kubectl_input(&["apply", "-f", "-"], include_str!("../../manifests/shop.yaml"))?;
        let pods: Vec<Value> = PODS.iter().map(|&(ns, name, node, port)| pod(ns, name, node, port)).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        lab.kubectl_input(&["apply", "-f", "-"], &list.to_string())?;
        // What a cloud would do: an address in the status, and a route to it.
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": PUBLIC}]}}}).to_string();
        lab.kubectl(&["-n", "shop", "patch", "service", "public", "--subresource=status", "-p", &status])?;
        let to_first = flowloom_lab::node(1)[0].to_string();
        lab.outside(&["ip", "route", "add", &format!("{PUBLIC}/32"), "via", &to_first])?.success()?;
        for namespace in ["shop", "street"] {
            let wait = ["-n", namespace, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"];
            lab.kubectl(&wait)?;
        }
        Ok(Self { lab })
    }

    /// Measures and explains until both say what they should, or time is up: policies take effect on each node by itself.
    fn settled(&self, row: &Row) -> Result<Seen> {
        let start = Instant::now();
        loop {
            let seen = self.see(row)?;
            let good = seen.agrees() && seen.answer.is_some() == row.reached;
            if good || start.elapsed() > PATIENCE {
                return Ok(seen);
            }
        }
    }

    fn see(&self, row: &Row) -> Result<Seen> {
        let (name, ip, port, asked, by) = match row.to {
            To::Cluster(name) => {
                let ip = self.field(name, "{.spec.clusterIP}")?;
                (name, ip.clone(), 80, format!("svc/shop/{name}"), format!("ClusterIP {ip}"))
            }
            To::Headless(name, pod) => {
                let pointer = "{.items[*].endpoints[*].addresses[0]}";
                let of = format!("kubernetes.io/service-name={name}");
                let path = format!("jsonpath={pointer}");
                let ips =
                    self.lab.kubectl(&["-n", "shop", "get", "endpointslices", "-l", &of, "-o", &path])?;
                let v4 = ips.split_whitespace().find(|ip| ip.contains('.'));
                let ip = v4.context("the headless Service has no endpoint")?.to_owned();
                (name, ip.clone(), 5432, format!("shop/{pod}"), format!("headless {ip}"))
            }
            To::NodePort(name, port) => {
                let ip = flowloom_lab::node(1)[0].to_string();
                (name, ip, port, format!("svc/shop/{name}"), format!("NodePort n1:{port}"))
            }
            To::Balanced(name) => {
                (name, PUBLIC.to_owned(), 80, format!("svc/shop/{name}"), format!("LoadBalancer {PUBLIC}"))
            }
        };
        let answer = self.ask(row.from, &format!("http://{ip}:{port}/name"))?;
        let asked_port = if matches!(row.to, To::Headless(..)) { "tcp/5432" } else { "tcp/80" };
        let (allowed, explained) = self.explain(row.from, &asked, asked_port)?;
        Ok(Seen { name: format!("svc/shop/{name}"), by, answer, allowed, explained })
    }

    fn field(&self, service: &str, path: &str) -> Result<String> {
        let path = format!("jsonpath={path}");
        Ok(self.lab.kubectl(&["-n", "shop", "get", "service", service, "-o", &path])?.trim().to_owned())
    }

    /// The name of the Pod that answered; none: nobody did in time.
    fn ask(&self, from: &str, url: &str) -> Result<Option<String>> {
        let fetch = ["timeout", ANSWER, "busybox", "wget", "-qO-", url];
        let out = match from.split_once('/') {
            None => self.lab.outside(&[&["busybox"], fetch.as_slice()].concat())?,
            Some((namespace, pod)) => {
                let mut argv = self.lab.kubectl_argv();
                argv.extend(["-n", namespace, "exec", pod, "--"].map(str::to_owned));
                argv.extend(fetch.map(str::to_owned));
                Cmd::new(&argv).run()?
            }
        };
        Ok(Some(out).filter(|o: &Output| o.status.success()).map(|o| o.stdout.trim().to_owned()))
    }

    /// What the sender's node says of it: whether it passes, and who decides.
    fn explain(&self, from: &str, to: &str, what: &str) -> Result<(bool, String)> {
        let sender = if from == OUTSIDE { outside()[0].to_string() } else { from.to_owned() };
        let answer = self.asked(node_of(from), &["policy", "explain", &sender, to, what, "--family", "4"])?;
        let verdict = answer["verdict"].as_str().unwrap_or_default();
        // Who says no; where nobody does, who says yes.
        let sides: Vec<&Value> =
            ["egress", "ingress"].iter().map(|s| &answer[*s]).filter(|j| j.is_object()).collect();
        let refusing = sides.iter().find(|j| j["verdict"] != "allow");
        let Some(j) = refusing.or(sides.last()) else { return Ok((verdict == "allow", verdict.to_owned())) };
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let endpoint = text(&j["endpoint"]);
        let by = match policy_of(&text(&j["rule"]["name"])) {
            Some(policy) => format!("{policy} says so"),
            None if j["verdict"] == "allow" => "no policy selects it".to_owned(),
            None => format!("{} allows no such thing", self.policies(&endpoint)?),
        };
        let told = format!(", {} of {}: {by}", text(&j["direction"]), endpoint.replace("default/", ""));
        Ok((verdict == "allow", format!("{verdict}{told}")))
    }

    /// What a balancer outside would be told: 200 and how many Pods this node has.
    fn health(&self, node: u8) -> Result<String> {
        let ip = flowloom_lab::node(node)[0].to_string();
        let url = format!("http://{ip}:30256/");
        let out = self.lab.outside(&["busybox", "timeout", ANSWER, "busybox", "wget", "-qO-", &url])?;
        Ok(out.success()?.stdout.trim().to_owned())
    }

    /// The NetworkPolicies that select a Pod, as its node has them.
    fn policies(&self, endpoint: &str) -> Result<String> {
        let name = endpoint.trim_start_matches("default/").replacen('.', "/", 1);
        let answer = self.asked(node_of(&name), &["endpoint", "get", &name])?;
        let groups = answer["security_groups"].as_array().cloned().unwrap_or_default();
        let policies = groups.iter().filter_map(Value::as_str).filter_map(policy_of);
        Ok(policies.collect::<Vec<_>>().join(" and "))
    }

    /// An answer of `flowloom` on a node. It tells by its exit code, too, whether a packet passes.
    fn asked(&self, node: u8, args: &[&str]) -> Result<Value> {
        let program = cli(self.lab);
        let out = self.lab.node(node)?.exec(&[&[program.as_str(), "-o", "json"], args].concat())?;
        serde_json::from_str(&out.stdout)
            .with_context(|| format!("flowloom {}: {}", args.join(" "), out.stderr.trim()))
    }
}

/// Where a Pod of the shop runs; the first node for whoever is outside.
fn node_of(pod: &str) -> u8 {
    let named = PODS.iter().find(|(namespace, name, ..)| format!("{namespace}/{name}") == pod);
    if named.is_some_and(|(_, _, node, _)| *node == "n2") { 2 } else { 1 }
}

/// `shop/back` of `netpol.shop.back` and of a rule of it.
fn policy_of(rule: &str) -> Option<String> {
    let (_, rest) = rule.split_once("netpol.")?;
    let policy = rest.split('/').next()?;
    Some(policy.replacen('.', "/", 1))
}

fn pod(namespace: &str, name: &str, node: &str, port: u16) -> Value {
    let app = name.split('-').next().unwrap_or(name);
    let serve = format!("mkdir -p /tmp/www; hostname >/tmp/www/name; exec httpd -f -p {port} -h /tmp/www");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "web", "image": BUSYBOX, "command": ["sh", "-c", serve],
                "ports": [{"name": "http", "containerPort": port}],
                "readinessProbe": {"httpGet": {"port": "http", "path": "/name"}, "periodSeconds": 1},
                "resources": {"limits": {"memory": "32Mi", "cpu": "500m"}},
            }],
        },
    })
}

fn aligned(rows: &[[String; 6]]) -> String {
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..6).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, w)| format!("{cell:w$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_tells_its_policy() {
        assert_eq!(policy_of("default/netpol.shop.back/ingress-0").as_deref(), Some("shop/back"));
        assert_eq!(policy_of("netpol.shop.back").as_deref(), Some("shop/back"));
        assert_eq!(policy_of("red/web/http"), None);
    }

    #[test]
    fn columns_are_aligned() {
        let row = |a: &str, b: &str| [a, b, "", "", "", ""].map(str::to_owned);
        assert_eq!(aligned(&[row("a", "x"), row("long", "y")]), "a     x\nlong  y\n");
    }
}
