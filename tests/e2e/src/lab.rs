//! Nodes with agents.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use flowloom_api::Client;
use flowloom_api::v1::{ExplainRequest, Explanation, digest};
use flowloom_testkit::{
    Bpffs, Cmd, Netfilter, Node, Output, Process, TempDir, Topology, eventually, temp_dir,
};

use crate::{Document, Workload, binary};

/// How long anything may take before a test gives up on it; never a limit that a correct run comes near.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a [`Lab`] is made.
#[derive(Clone, Debug)]
pub struct LabBuilder {
    nodes: u8,
    netfilter: Netfilter,
    external: bool,
    mtu: u32,
    config: Vec<String>,
    unready: bool,
}

impl LabBuilder {
    /// How many nodes.
    #[must_use]
    pub fn nodes(mut self, n: u8) -> Self {
        self.nodes = n;
        self
    }

    /// Packet filter in every node.
    #[must_use]
    pub fn netfilter(mut self, netfilter: Netfilter) -> Self {
        self.netfilter = netfilter;
        self
    }

    /// With a host outside.
    #[must_use]
    pub fn external(mut self) -> Self {
        self.external = true;
        self
    }

    /// MTU of the underlay, bytes.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// A line of every agent's configuration (YAML, top level).
    #[must_use]
    pub fn config(mut self, line: &str) -> Self {
        self.config.push(line.to_owned());
        self
    }

    /// Does not wait until the agents are ready: they lack something that the caller has to bring.
    #[must_use]
    pub fn unready(mut self) -> Self {
        self.unready = true;
        self
    }

    /// Makes the nodes and starts the agents.
    ///
    /// # Errors
    /// When something cannot be made or an agent does not become ready.
    pub fn start(self) -> Result<Lab> {
        let mut builder = Topology::builder().nodes(self.nodes).mtu(self.mtu).netfilter(self.netfilter);
        if self.external {
            builder = builder.external();
        }
        let topology = builder.build()?;
        let dir = temp_dir("lab")?;
        let bpffs = Bpffs::mount()?;
        std::fs::create_dir(dir.path().join("desired"))?;
        let mut lab = Lab {
            agents: Vec::new(),
            document: dir.path().join("desired/desired.json"),
            config: self.config.clone(),
            topology,
            bpffs,
            dir,
        };
        std::fs::write(&lab.document, lab.empty_document().text())?;
        for node in 0..lab.topology.nodes.len() {
            let agent = lab.new_agent(node)?;
            lab.agents.push(agent);
        }
        for agent in lab.agents.iter().filter(|_| !self.unready) {
            agent.wait_ready()?;
        }
        Ok(lab)
    }
}

/// Nodes with agents; everything goes when it is dropped.
#[derive(Debug)]
pub struct Lab {
    /// Agents, first node first. Dropped before the namespaces they run in.
    pub agents: Vec<Agent>,
    /// The installed document.
    pub document: PathBuf,
    config: Vec<String>,
    /// The nodes.
    pub topology: Topology,
    bpffs: Bpffs,
    dir: TempDir,
}

/// One node's agent.
#[derive(Debug)]
pub struct Agent {
    /// `n1`, `n2` ...
    pub name: String,
    /// Its configuration file.
    pub config: PathBuf,
    /// Its socket.
    pub socket: PathBuf,
    /// Its pins.
    pub pin_root: PathBuf,
    /// Its state.
    pub state_dir: PathBuf,
    /// `None` while it is dead.
    pub process: Option<Process>,
    netns: flowloom_netlink::Netns,
    variables: Vec<(String, String)>,
    wrapper: Vec<String>,
}

impl Lab {
    /// Two nodes whose stacks forward nothing. With `FLOWLOOM_TEST_NETFILTER=invalid` they also drop what their connection tracking calls invalid: the
    /// suite runs once more that way, since no packet may depend on what the host's tracking thinks of it.
    ///
    /// # Panics
    /// On another value of the variable.
    #[must_use]
    pub fn builder() -> LabBuilder {
        let netfilter = match std::env::var("FLOWLOOM_TEST_NETFILTER").as_deref() {
            Err(_) => Netfilter::ForwardDrop,
            Ok("invalid") => Netfilter::InvalidDrop,
            Ok(other) => panic!("FLOWLOOM_TEST_NETFILTER={other}: it may be \"invalid\""),
        };
        LabBuilder { nodes: 2, netfilter, external: false, mtu: 1500, config: Vec::new(), unready: false }
    }

    /// The document that names the nodes and nothing else.
    #[must_use]
    pub fn empty_document(&self) -> Document {
        let addresses: Vec<_> =
            self.topology.nodes.iter().map(|n| n.ips().iter().map(ToString::to_string).collect()).collect();
        Document::of_nodes(&addresses)
    }

    /// A node, from 0.
    #[must_use]
    pub fn node(&self, index: usize) -> &Node {
        &self.topology.nodes[index]
    }

    /// A directory of the lab's own.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn new_agent(&self, index: usize) -> Result<Agent> {
        let name = format!("n{}", index + 1);
        let dir = self.dir.path().join(&name);
        std::fs::create_dir_all(dir.join("netns"))?;
        let path = |p: &str| dir.join(p);
        let pin_root = self.bpffs.path().join(&name);
        let mut text = format!(
            "node: {name}\ndocument: {}\nstate_dir: {}\nsocket: {}\npin_root: {}\nnetns_dir: {}\nuplinks: [{}]\n",
            self.document.display(),
            path("state").display(),
            path("agent.sock").display(),
            pin_root.display(),
            path("netns").display(),
            self.node(index).uplink,
        );
        for line in &self.config {
            text.push_str(line);
            text.push('\n');
        }
        let config = path("agent.yaml");
        std::fs::write(&config, text)?;
        let mut agent = Agent {
            name,
            config,
            socket: path("agent.sock"),
            pin_root,
            state_dir: path("state"),
            process: None,
            netns: self.node(index).ns.try_clone()?,
            variables: Vec::new(),
            wrapper: Vec::new(),
        };
        agent.start()?;
        Ok(agent)
    }

    /// Applies a document as a user does (`flowloom apply`), on every node, and returns once every living agent enforces it.
    ///
    /// # Errors
    /// With the command's output when it is refused.
    pub fn apply(&self, document: &Document) -> Result<()> {
        self.install(document)?;
        self.wait_enforced()
    }

    /// As [`Self::apply`], for a document that takes its time.
    ///
    /// # Errors
    /// With the command's output when it is refused.
    pub fn apply_within(&self, document: &Document, patience: Duration) -> Result<()> {
        self.install(document)?;
        self.enforced_within(patience)
    }

    /// Writes a document that needs no allocation in the place of the installed one, as a tool that renders documents does, and waits.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn replace(&self, document: &Document) -> Result<()> {
        let staged = self.document.with_extension("staged");
        std::fs::write(&staged, document.text())?;
        std::fs::rename(&staged, &self.document)?;
        self.wait_enforced()
    }

    /// Until every living agent enforces what is installed.
    ///
    /// # Errors
    /// When the document cannot be read.
    pub fn wait_enforced(&self) -> Result<()> {
        self.enforced_within(PATIENCE)
    }

    fn enforced_within(&self, patience: Duration) -> Result<()> {
        let lock = lock_path(&self.document);
        let wanted = digest(&std::fs::read(&self.document)?, std::fs::read(lock).ok().as_deref());
        for agent in self.agents.iter().filter(|a| a.process.is_some()) {
            let client = agent.client();
            eventually(patience, || {
                let status = client.status().map_err(|e| e.to_string())?;
                if status.document.applied_digest == wanted {
                    Ok(())
                } else {
                    Err(format!("{}: {:?}", agent.name, status.document))
                }
            });
        }
        Ok(())
    }

    /// As [`Self::apply`], without waiting.
    ///
    /// # Errors
    /// With the command's output when it is refused.
    pub fn install(&self, document: &Document) -> Result<()> {
        let staged = self.dir.path().join("desired.json");
        std::fs::write(&staged, document.text())?;
        // The allocator's memory lies beside the installed document.
        let to = self.document.display().to_string();
        self.flowloom(0, &["apply", &staged.display().to_string(), "--to", &to])?.success()?;
        Ok(())
    }

    /// Runs `flowloom` against a node's agent.
    ///
    /// # Errors
    /// When it cannot be started or takes too long.
    pub fn flowloom(&self, node: usize, args: &[&str]) -> Result<Output> {
        let socket = self.agents.get(node).map_or_else(String::new, |a| a.socket.display().to_string());
        let flowloom = binary("flowloom")?;
        let argv: Vec<&str> =
            [flowloom.as_str(), "--socket", &socket].into_iter().chain(args.iter().copied()).collect();
        Cmd::new(&argv).timeout(PATIENCE).run()
    }

    /// A wired workload, on whatever node it is.
    ///
    /// # Errors
    /// When no agent has it ready.
    pub fn workload(&self, name: &str) -> Result<Workload> {
        let (_, info) = self.find(name)?;
        Workload::open(info)
    }

    fn find(&self, name: &str) -> Result<(usize, flowloom_api::v1::EndpointInfo)> {
        let (vpc, endpoint) = name.split_once('/').context("write it as vpc/endpoint")?;
        for (node, agent) in self.agents.iter().enumerate().filter(|(_, a)| a.process.is_some()) {
            if let Ok(info) = agent.client().endpoint(vpc, endpoint) {
                return Ok((node, info));
            }
        }
        bail!("no agent has {name}");
    }

    /// What `flowloom policy explain` says for a connection between two endpoints (`vpc/name`) or from one to an address, on both sides' nodes: the
    /// first node that denies decides, as on the wire.
    ///
    /// # Errors
    /// When an agent refuses to answer.
    pub fn explain(
        &self,
        from: &str,
        to: &str,
        protocol: &str,
        port: Option<u16>,
        family: u8,
    ) -> Result<Explanation> {
        let (vpc, source) = from.split_once('/').context("write it as vpc/endpoint")?;
        let target = to.split_once('/').map_or(to, |(_, name)| name);
        let request = ExplainRequest {
            vpc: vpc.to_owned(),
            from: source.to_owned(),
            to: target.to_owned(),
            protocol: protocol.to_owned(),
            port,
            icmp_type: None,
            icmp_code: None,
            family: Some(family),
        };
        let (node, _) = self.find(from)?;
        Ok(self.agents[node].client().explain(&request)?)
    }
}

/// Where the lock of a document lies.
#[must_use]
pub(crate) fn lock_path(document: &Path) -> PathBuf {
    let mut name = document.as_os_str().to_owned();
    name.push(".lock.yaml");
    name.into()
}

impl Agent {
    /// A client of its API.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    /// Sets a variable for the next start.
    pub fn set_variable(&mut self, key: &str, value: &str) {
        self.variables.retain(|(k, _)| k != key);
        self.variables.push((key.to_owned(), value.to_owned()));
    }

    /// Forgets the variables.
    pub fn clear_variables(&mut self) {
        self.variables.clear();
    }

    /// A program and its arguments in front of the agent's command line for the next starts (`strace -D ...`); it must end up as the same process.
    pub fn wrap(&mut self, wrapper: &[&str]) {
        self.wrapper = wrapper.iter().map(|w| (*w).to_owned()).collect();
    }

    /// Starts it; does not wait.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(&mut self) -> Result<()> {
        let mut argv = self.wrapper.clone();
        argv.extend([binary("flowloom-agent")?, "--config".into(), self.config.display().to_string()]);
        let mut command = Cmd::new(&argv).in_netns(&self.netns)?;
        for (key, value) in &self.variables {
            command = command.env(key, value);
        }
        self.process = Some(command.spawn()?);
        Ok(())
    }

    /// Waits until it says ready.
    ///
    /// # Errors
    /// With its output when it ended.
    pub fn wait_ready(&self) -> Result<()> {
        let client = self.client();
        eventually(PATIENCE, || match client.health() {
            Ok(health) if health.ready => Ok(()),
            Ok(health) => Err(format!("{} waits for {:?}", self.name, health.waiting_for)),
            Err(e) => Err(format!(
                "{e}: {}",
                self.process.as_ref().and_then(|p| p.stderr().ok()).unwrap_or_default()
            )),
        });
        Ok(())
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        Ok(())
    }

    /// Kills and starts it again, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        self.start()?;
        self.wait_ready()
    }

    /// `flowloom-agent uninstall`, the agent being stopped first.
    ///
    /// # Errors
    /// With its output when it fails.
    pub fn uninstall(&mut self) -> Result<Output> {
        if let Some(mut process) = self.process.take() {
            process.stop()?;
        }
        let argv = [
            binary("flowloom-agent")?,
            "uninstall".into(),
            "--config".into(),
            self.config.display().to_string(),
        ];
        Cmd::new(&argv).in_netns(&self.netns)?.timeout(PATIENCE).run()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        match self.uninstall().and_then(Output::success) {
            Ok(_) => {}
            Err(e) => eprintln!("{} was not uninstalled: {e:#}", self.name),
        }
    }
}
