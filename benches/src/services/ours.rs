//! A node whose Services flowloom serves.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use flowloom_testkit::{TempDir, temp_dir};
use flowloom_tests_e2e::{Agent, Document, Lab};
use serde_json::json;

use super::cgroup::Group;
use super::connect::{destination, until_all_answer};
use super::objects::{self, BACKENDS, CLIENT, PODS, TARGET};
use super::side::{PATIENCE, Side};
use crate::k8s::server::Server;
use crate::measure::resident;

/// Longer than changes are gathered.
const QUIET: Duration = Duration::from_millis(100);

/// See the module's comment.
pub(super) struct Ours {
    // Before the lab whose namespaces it uses.
    pub(super) side: Side,
    lab: Lab,
    _directory: TempDir,
}

impl Ours {
    /// A node that knows so many Services, all of them in force.
    pub(super) fn start(services: usize, group: &Group) -> Result<Self> {
        let served = group.served()?;
        let directory = temp_dir("kubeconfig")?;
        let kubeconfig = directory.path().join("config.json");
        let lab = Lab::builder()
            .nodes(1)
            .config(&format!("cgroup_root: {}", served.display()))
            .config(&format!(
                "kubernetes: {{enabled: true, kubeconfig: {}, qps: 1000, burst: 1000, health_address: '', proxy_mode_address: ''}}",
                kubeconfig.display()
            ))
            .unready()
            .start()?;
        let server = Server::start(lab.node(0).ns.run_in(|| TcpListener::bind("127.0.0.1:0"))??)?;
        objects::fill(&server, lab.node(0).ip4, services);
        std::fs::write(&kubeconfig, server.kubeconfig().to_string())?;
        lab.agents.first().context("no agent")?.wait_ready()?;
        lab.apply(&document(&lab))?;
        let [one, two] = [lab.workload("default/b0")?, lab.workload("default/b1")?];
        let client = lab.workload("default/client")?;
        let side = Side::new(server, services, QUIET, &client.netns, Some(served), [&one.netns, &two.netns])?;
        let ours = Self { side, lab, _directory: directory };
        ours.settled()?;
        let vip = ours.side.vip();
        let leads = ours.side.inside(|| destination(vip))?;
        let expected = BACKENDS.into_iter().any(|b| leads == (b, TARGET).into());
        ensure!(expected, "the socket that asked {vip} leads to {leads}: sockets are not served");
        Ok(ours)
    }

    /// Nothing is programmed, then the agent starts; milliseconds until the last answer.
    pub(super) fn restart_cold(&mut self) -> Result<f64> {
        let agent = self.lab.agents.first_mut().context("no agent")?;
        agent.kill()?;
        flowloom_datapath::uninstall(&agent.pin_root)?;
        let begin = Instant::now();
        agent.start()?;
        self.settled()?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }

    fn settled(&self) -> Result<()> {
        let all = self.side.vips();
        self.side.inside(|| until_all_answer(&all, PATIENCE)).with_context(|| {
            let process = self.lab.agents.first().and_then(|a| a.process.as_ref());
            process.and_then(|p| p.stderr().ok()).unwrap_or_default()
        })
    }

    /// Resident memory of the agent, MiB.
    pub(super) fn memory(&self) -> Result<f64> {
        let agent: &Agent = self.lab.agents.first().context("no agent")?;
        resident(agent.process.as_ref().context("no process")?.pid(), "VmRSS:")
    }
}

/// The workloads; Services come from the API server.
fn document(lab: &Lab) -> Document {
    let endpoint =
        |name: String, ip| json!({"vpc": "default", "name": name, "subnet": "pods", "node": "n1", "ip": ip});
    let [one, two] = BACKENDS;
    lab.empty_document().with("subnets", json!([{"vpc": "default", "name": "pods", "cidr": PODS}])).with(
        "endpoints",
        json!([endpoint("client".into(), CLIENT), endpoint("b0".into(), one), endpoint("b1".into(), two)]),
    )
}
