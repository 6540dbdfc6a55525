//! A node whose Services kube-proxy serves: veth pairs that the kernel routes, its nftables between them.

use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use flowloom_netlink::LinkName;
use flowloom_testkit::{Cmd, Netfilter, Ns, Process, TempDir, Topology, temp_dir};
use serde_json::json;

use super::connect::until_all_answer;
use super::objects::{self, BACKENDS, CLIENT, GATEWAY, PODS};
use super::side::{PATIENCE, Side};
use crate::k8s::server::Server;
use crate::measure::resident;

/// It lets a second pass between two runs.
const QUIET: Duration = Duration::from_millis(1200);

/// See the module's comment.
pub(super) struct Proxy {
    // Before the namespaces that it uses.
    pub(super) side: Side,
    process: Option<Process>,
    argv: Vec<String>,
    _workloads: [Ns; 3],
    topology: Topology,
    _directory: TempDir,
}

fn program() -> PathBuf {
    flowloom_lab::programs().join("kube-proxy")
}

/// Why it cannot run here.
pub(super) fn missing() -> Option<String> {
    if !program().is_file() {
        return Some("kube-proxy is not built (cargo xtask lab build)".to_owned());
    }
    let nft = Cmd::new(&["nft", "--version"]).run().and_then(flowloom_testkit::Output::success);
    nft.is_err().then(|| "nft is not installed (scripts/setup.sh)".to_owned())
}

impl Proxy {
    /// A node that knows so many Services, all of them in force.
    pub(super) fn start(services: usize) -> Result<Self> {
        let topology = Topology::builder().nodes(1).netfilter(Netfilter::Open).build()?;
        let node = topology.nodes.first().context("no node")?;
        let gateway = [IpAddr::from(GATEWAY)];
        let [one, two] = BACKENDS;
        let mut workloads = Vec::new();
        for (label, ip) in [("client", CLIENT), ("b0", one), ("b1", two)] {
            let near = LinkName::new(format!("w{}", workloads.len()))?;
            workloads.push(node.plain_workload(label, &near, &[format!("{ip}/32").parse()?], &gateway)?);
        }
        let workloads: [Ns; 3] = workloads.try_into().ok().context("three workloads")?;
        let server = Server::start(node.ns.run_in(|| TcpListener::bind("127.0.0.1:0"))??)?;
        objects::fill(&server, node.ip4, services);
        let directory = temp_dir("kube-proxy")?;
        let path = |name: &str| directory.path().join(name).display().to_string();
        let (kubeconfig, config) = (path("kubeconfig.json"), path("config.json"));
        std::fs::write(&kubeconfig, server.kubeconfig().to_string())?;
        let mut settings = flowloom_lab::kube_proxy_config("n1", &kubeconfig, PODS);
        // What the server in memory speaks.
        settings["clientConnection"]["acceptContentTypes"] = json!("application/json");
        std::fs::write(&config, settings.to_string())?;
        let argv = vec![program().display().to_string(), "--config".to_owned(), config];
        let [client, one, two] = &workloads;
        let side = Side::new(server, services, QUIET, client, None, [one, two])?;
        let mut proxy =
            Self { side, process: None, argv, _workloads: workloads, topology, _directory: directory };
        proxy.run()?;
        Ok(proxy)
    }

    /// Nothing is programmed, then it starts; milliseconds until the last answer.
    pub(super) fn restart_cold(&mut self) -> Result<f64> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        let node = self.topology.nodes.first().context("no node")?;
        node.ns.exec_ok(&["nft", "flush", "ruleset"])?;
        self.run()
    }

    fn run(&mut self) -> Result<f64> {
        let node = self.topology.nodes.first().context("no node")?;
        let begin = Instant::now();
        self.process = Some(Cmd::new(&self.argv).in_netns(&node.ns)?.spawn()?);
        let all = self.side.vips();
        self.side
            .inside(|| until_all_answer(&all, PATIENCE))
            .with_context(|| self.process.as_ref().and_then(|p| p.stderr().ok()).unwrap_or_default())?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }

    /// Its resident memory, MiB.
    pub(super) fn memory(&self) -> Result<f64> {
        resident(self.process.as_ref().context("no process")?.pid(), "VmRSS:")
    }
}
