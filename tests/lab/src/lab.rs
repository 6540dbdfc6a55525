//! A running lab: bringing it up, reaching into it, taking it down.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use flowloom_testkit::{Cmd, Output};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::member::{self, Member};
use crate::node::Node;
use crate::options::{Cni, Families, Options, Proxy};
use crate::pki::{Authority, Credential, write_kubeconfig};
use crate::supervisor::{self, State};
use crate::wait::Hopeless;
use crate::{
    addresses, audit, cgroups, flowloom, images, network, paths, programs, reference, services, wait,
};

const FILE: &str = "lab.json";
const CONTROL_PLANE: &str = "cp";
/// Long enough for two cores that also compile.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster. One from [`Lab::up`] is taken down when this is dropped, unless [`Lab::keep`] was said.
#[derive(Debug)]
pub struct Lab {
    pub(crate) options: Options,
    pub(crate) state: PathBuf,
    guarded: bool,
}

impl Lab {
    /// Brings a cluster up and waits until it works: the API server answers, nodes are registered and, with a CNI,
    /// ready. Images are made first; programs must have been built (`cargo xtask lab build`).
    ///
    /// # Errors
    /// When a part fails; what was made is undone then.
    pub fn up(options: Options) -> Result<Self> {
        options.check()?;
        ensure!(nix::unistd::geteuid().is_root(), "a lab makes namespaces: run it as root");
        programs::check(options.suites)?;
        images::build(options.suites)?;
        sweep();
        let state = paths::state(&options.name);
        ensure!(!state.exists(), "a lab named {} is up: take it down first", options.name);
        fs::create_dir_all(&state).with_context(|| format!("making {}", state.display()))?;
        let state = state.canonicalize()?;
        fs::write(state.join(FILE), serde_json::to_vec_pretty(&options)?)?;
        let lab = Self { options, state, guarded: true };
        lab.start().map_err(|e| e.context(lab.last_words()))?;
        Ok(lab)
    }

    /// The one that is up under this name. Dropping it takes nothing down.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(name: &str) -> Result<Self> {
        let state = paths::state(name);
        let text = fs::read(state.join(FILE)).with_context(|| format!("no lab named {name} is up"))?;
        Ok(Self { options: serde_json::from_slice(&text)?, state: state.canonicalize()?, guarded: false })
    }

    /// Leaves it running when this is dropped, and after this process.
    ///
    /// # Errors
    /// When its state cannot be written.
    pub fn keep(&mut self) -> Result<()> {
        self.options.owner = None;
        fs::write(self.state.join(FILE), serde_json::to_vec_pretty(&self.options)?)?;
        self.guarded = false;
        Ok(())
    }

    /// Ends everything and removes all it made. Harmless when there is nothing.
    ///
    /// # Errors
    /// What could not be removed; everything else is.
    pub fn down(name: &str) -> Result<()> {
        Options::new(name).check()?;
        let state = paths::state(name);
        let mut faults = Vec::new();
        let members = fs::read_dir(&state).into_iter().flatten().flatten();
        for member in members.filter_map(|e| Member::load(&e.path()).ok()) {
            // The first process takes all others of its PID namespace with it.
            if let Some(pid) = member.init_pid() {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        for pid in network::processes(name) {
            let _ = i32::try_from(pid).map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        }
        faults.extend(cgroups::remove(name).err());
        faults.extend(network::remove(name).err());
        if state.exists() {
            faults.extend(
                fs::remove_dir_all(&state).with_context(|| format!("removing {}", state.display())).err(),
            );
        }
        // Empty when this was the last.
        let _ = fs::remove_dir(paths::states());
        match faults.is_empty() {
            true => Ok(()),
            false => bail!("{}", faults.iter().map(|f| format!("{f:#}")).collect::<Vec<_>>().join("; ")),
        }
    }

    /// What was asked for.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Where logs, certificates and nodes' directories are.
    #[must_use]
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// The administrator's kubeconfig. It works inside the lab's namespaces only.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.state.join("pki/admin.kubeconfig")
    }

    /// Where the API server listens, from inside.
    #[must_use]
    pub fn api_server(&self) -> String {
        crate::pki::api_server()
    }

    /// The network namespace of the control plane: from there API server, nodes and Pods are reached.
    #[must_use]
    pub fn netns(&self) -> String {
        paths::netns(&self.options.name, CONTROL_PLANE)
    }

    /// The network namespace of the outside host.
    #[must_use]
    pub fn outside_netns(&self) -> String {
        paths::netns(&self.options.name, network::OUTSIDE)
    }

    /// `kubectl` as administrator; what it printed.
    ///
    /// # Errors
    /// When it fails, with its words.
    pub fn kubectl<S: AsRef<str>>(&self, args: &[S]) -> Result<String> {
        Ok(self.kubectl_command(args, None).run()?.success()?.stdout)
    }

    /// The same with standard input, for `apply -f -`.
    ///
    /// # Errors
    /// When it fails, with its words.
    pub fn kubectl_input<S: AsRef<str>>(&self, args: &[S], input: &str) -> Result<String> {
        Ok(self.kubectl_command(args, Some(input)).run()?.success()?.stdout)
    }

    /// The same, decoded: `-o json` is added.
    ///
    /// # Errors
    /// When it fails, with its words.
    pub fn kubectl_json<S: AsRef<str>>(&self, args: &[S]) -> Result<Value> {
        let mut all: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        all.extend(["-o", "json"]);
        Ok(serde_json::from_str(&self.kubectl(&all)?)?)
    }

    fn kubectl_command<S: AsRef<str>>(&self, args: &[S], input: Option<&str>) -> Cmd {
        let mut argv = self.kubectl_argv();
        argv.extend(args.iter().map(|a| a.as_ref().to_owned()));
        let command = Cmd::new(&argv).timeout(PATIENCE);
        match input {
            Some(text) => command.input(text),
            None => command,
        }
    }

    /// The argument vector that `kubectl`'s own arguments follow.
    #[must_use]
    pub fn kubectl_argv(&self) -> Vec<String> {
        let kubectl = paths::programs().join("kubectl").display().to_string();
        let config = self.kubeconfig().display().to_string();
        ["ip", "netns", "exec", &self.netns(), &kubectl, "--kubeconfig", &config].map(str::to_owned).to_vec()
    }

    /// The argument vector that runs a command in a member (`cp`, `n1`...) or, in its network alone, in `ext`.
    ///
    /// # Errors
    /// When there is no such member.
    pub fn exec_argv(&self, member: &str, command: &[&str]) -> Result<Vec<String>> {
        if member == network::OUTSIDE {
            let mut argv = ["ip", "netns", "exec", &self.outside_netns()].map(str::to_owned).to_vec();
            argv.extend(command.iter().map(|&c| c.to_owned()));
            return Ok(argv);
        }
        Ok(member::enter(&self.program(), &self.member(member)?, command))
    }

    /// Runs a command on the outside host.
    ///
    /// # Errors
    /// When it cannot be started or takes too long.
    pub fn outside(&self, command: &[&str]) -> Result<Output> {
        Cmd::new(&self.exec_argv(network::OUTSIDE, command)?).run()
    }

    /// Node `index`, from 1.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn node(&self, index: u8) -> Result<Node<'_>> {
        Ok(Node::new(self, index, self.member(&format!("n{index}"))?))
    }

    /// All nodes.
    ///
    /// # Errors
    /// When one's directory is gone.
    pub fn nodes(&self) -> Result<Vec<Node<'_>>> {
        (1..=self.options.nodes).map(|i| self.node(i)).collect()
    }

    /// Imports an image archive on every node.
    ///
    /// # Errors
    /// The runtime's.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        self.nodes()?.iter().try_for_each(|n| n.load_image(archive))
    }

    /// Waits until every node is ready.
    ///
    /// # Errors
    /// When one is not in time; its conditions are told.
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        wait::until(timeout, "all nodes ready", || {
            let nodes = self.kubectl_json(&["get", "nodes"])?;
            for node in nodes["items"].as_array().into_iter().flatten() {
                let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
                let ready = conditions.iter().find(|c| c["type"] == "Ready");
                let is = ready.is_some_and(|c| c["status"] == "True");
                ensure!(is, "{}: {}", node["metadata"]["name"], ready.unwrap_or(&Value::Null)["message"]);
            }
            Ok(())
        })
    }

    /// A kubeconfig that proves itself with a token of a service account, so that its rights are really those of RBAC.
    /// Valid for a day.
    ///
    /// # Errors
    /// When there is no such account.
    pub fn service_account_kubeconfig(&self, namespace: &str, account: &str, to: &Path) -> Result<()> {
        let token = self.kubectl(&["-n", namespace, "create", "token", account, "--duration=24h"])?;
        write_kubeconfig(to, &self.state.join("pki"), &Credential::Token(token.trim()))
    }

    /// Applies manifests of a directory, workloads aside: the lab runs the same programs as processes.
    ///
    /// # Errors
    /// The API server's words.
    pub fn apply_manifests(&self, dir: &Path) -> Result<()> {
        flowloom::apply_manifests(self, dir)
    }

    /// Starts flowloom's controller. [`Self::up`] does, unless it is for objects only.
    ///
    /// # Errors
    /// When its account or its program is missing.
    pub fn start_controller(&self) -> Result<()> {
        flowloom::start_controller(self)
    }

    /// Starts an agent on every node and waits until each has installed the network's configuration. [`Self::up`] does, unless it is for objects only.
    ///
    /// # Errors
    /// When one ends, or does not become ready.
    pub fn start_agents(&self) -> Result<()> {
        flowloom::start_agents(self)
    }

    /// What flowloom's service accounts have asked an API server whose lab is for objects only. A watch is one request.
    ///
    /// # Errors
    /// When there is no record, or somebody was refused something: rights are missing then, not requests.
    pub fn requests(&self) -> Result<audit::Requests> {
        let record = services::audit_log(&self.control_plane()?);
        audit::count(&fs::read_to_string(&record).with_context(|| format!("reading {}", record.display()))?)
    }

    /// Starts the cluster's DNS and waits until it answers for itself.
    ///
    /// # Errors
    /// When it is not ready in time.
    pub fn start_dns(&self) -> Result<()> {
        let ip_families = match self.options.families {
            Families::Dual => "PreferDualStack",
            Families::Ipv4 => "SingleStack",
        };
        let text = include_str!("../manifests/dns.yaml")
            .replace("$CLUSTER_IP", addresses::DNS_SERVICE)
            .replace("$FAMILY_POLICY", ip_families);
        self.kubectl_input(&["apply", "-f", "-"], &text)?;
        self.kubectl(&["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=90s"])
            .map(drop)
    }

    /// Every service of every member: whether it runs, and its resident memory in KiB.
    ///
    /// # Errors
    /// When a member does not answer.
    pub fn status(&self) -> Result<Vec<(String, String, State, u64)>> {
        let mut rows = Vec::new();
        for name in self.member_names() {
            let member = self.member(&name)?;
            let states: BTreeMap<String, State> = supervisor::list(&member.socket())?;
            for (service, state) in states {
                let status = format!("/proc/{}/status", state.pid);
                let text = Cmd::new(&self.exec_argv(&name, &["cat", &status])?).run()?.stdout;
                let resident = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
                let kib = resident.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
                rows.push((name.clone(), service, state, kib));
            }
        }
        Ok(rows)
    }

    fn member_names(&self) -> Vec<String> {
        let nodes = (1..=self.options.nodes).map(|i| format!("n{i}"));
        std::iter::once(CONTROL_PLANE.to_owned()).chain(nodes).collect()
    }

    pub(crate) fn member(&self, name: &str) -> Result<Member> {
        Member::load(&self.state.join(name))
            .with_context(|| format!("lab {} has no {name}", self.options.name))
    }

    pub(crate) fn control_plane(&self) -> Result<Member> {
        self.member(CONTROL_PLANE)
    }

    pub(crate) fn program(&self) -> PathBuf {
        self.options.bin_dir.join("flowloom-lab")
    }

    pub(crate) fn services(&self) -> services::Context<'_> {
        services::Context { state: &self.state, options: &self.options }
    }

    fn start(&self) -> Result<()> {
        let cp = addresses::control_plane();
        let mut members = vec![(CONTROL_PLANE.to_owned(), cp)];
        members.extend((1..=self.options.nodes).map(|i| (format!("n{i}"), addresses::node(i))));
        network::create(&self.options.name, &members)?;
        self.create_pki()?;
        for (name, _) in &members {
            let member = Member {
                name: name.clone(),
                dir: self.state.join(name),
                netns: paths::netns(&self.options.name, name),
                groups: cgroups::create(&self.options.name, name)?,
                resolvers: vec![cp[0].to_string()],
            };
            member::launch(&self.program(), &member)?;
        }
        if self.options.objects_only {
            self.start_control_plane()?;
            return self.manifests().map_or(Ok(()), |dir| self.apply_manifests(&dir));
        }
        // Runtimes unpack images while the API server starts.
        thread::scope(|scope| -> Result<()> {
            let runtimes: Vec<_> = self
                .nodes()?
                .into_iter()
                .map(|node| scope.spawn(move || node.start_runtime(self.options.suites)))
                .collect();
            self.start_control_plane()?;
            for runtime in runtimes {
                runtime.join().map_err(|_| anyhow::anyhow!("a node's thread panicked"))??;
            }
            Ok(())
        })?;
        for node in self.nodes()? {
            node.start_kubelet()?;
            if self.options.proxy == Proxy::KubeProxy {
                node.start(self.services().kube_proxy(node.member())?)?;
            }
        }
        let cidrs = self.nodes()?.iter().map(|n| n.wait_pod_cidrs(PATIENCE)).collect::<Result<Vec<_>>>()?;
        self.route_from_control_plane(&cidrs)?;
        if let Some(dir) = self.manifests() {
            self.apply_manifests(&dir)?;
        }
        match self.options.cni {
            Cni::Reference => reference::install(self, &cidrs)?,
            Cni::Flowloom => flowloom::install(self)?,
            Cni::None => return Ok(()),
        }
        self.wait_ready(PATIENCE)?;
        if self.options.suites {
            self.start_dns()?;
        }
        Ok(())
    }

    /// flowloom's own are the repository's unless another directory is named.
    fn manifests(&self) -> Option<PathBuf> {
        let own = || (self.options.cni == Cni::Flowloom).then(|| paths::source().join("../../deploy"));
        self.options.manifests.clone().or_else(own)
    }

    fn create_pki(&self) -> Result<()> {
        let pki = self.state.join("pki");
        let authority = Authority::create(&pki)?;
        authority.issue_api_server()?;
        let mut users = vec![
            ("admin".to_owned(), "admin".to_owned(), Some("system:masters")),
            ("kube-proxy".to_owned(), "system:kube-proxy".to_owned(), None),
        ];
        for i in 1..=self.options.nodes {
            users.push((format!("n{i}"), format!("system:node:n{i}"), Some("system:nodes")));
        }
        for (file, user, group) in &users {
            authority.issue(file, user, *group, &[])?;
            write_kubeconfig(&pki.join(format!("{file}.kubeconfig")), &pki, &Credential::Certificate(file))?;
        }
        Ok(())
    }

    fn start_control_plane(&self) -> Result<()> {
        let (cp, services) = (self.control_plane()?, self.services());
        let start = |service| supervisor::begin(&cp.socket(), service);
        start(services.name_server(&cp))?;
        start(services.etcd(&cp))?;
        start(services.api_server(&cp)?)?;
        wait::until(PATIENCE, "the API server", || {
            self.alive(&cp, &["etcd", "kube-apiserver"])?;
            self.kubectl(&["get", "--raw", "/readyz"])
        })?;
        if self.options.objects_only {
            return Ok(());
        }
        start(services.controller_manager(&cp))?;
        start(services.scheduler(&cp))
    }

    fn alive(&self, member: &Member, names: &[&str]) -> Result<()> {
        let states = supervisor::list(&member.socket())?;
        for name in names {
            if let Some(how) = states.get(*name).and_then(|s| s.ended.as_ref()) {
                return Err(Hopeless(format!("{name} ended: {how}")).into());
            }
        }
        Ok(())
    }

    /// The API server reaches Pods through their nodes: its proxy to Pods, and webhooks.
    fn route_from_control_plane(&self, cidrs: &[Vec<String>]) -> Result<()> {
        let routes: Vec<_> = (1..).zip(cidrs).flat_map(|(i, cidrs)| routes_to(i, cidrs)).collect();
        network::add_routes(&self.options.name, CONTROL_PLANE, &routes)
    }

    /// The ends of the logs of what died, for the error of a failed start.
    fn last_words(&self) -> String {
        let mut text = format!("lab {} did not come up", self.options.name);
        if self.options.cni == Cni::Flowloom {
            text += &flowloom::last_words(self);
        }
        for name in self.member_names() {
            let states = self.member(&name).and_then(|m| supervisor::list(&m.socket())).unwrap_or_default();
            for (service, how) in states.into_iter().filter_map(|(n, s)| Some((n, s.ended?))) {
                let log = fs::read_to_string(self.state.join(&name).join(format!("{service}.log")))
                    .unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(5).collect();
                text += &format!("\n{name}: {service} ended: {how}");
                tail.iter().rev().for_each(|l| text += &format!("\n    {l}"));
            }
        }
        text
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.guarded
            && let Err(e) = Self::down(&self.options.name)
        {
            eprintln!("lab {}: {e:#}", self.options.name);
        }
    }
}

/// Routes to a node's Pods.
pub(crate) fn routes_to(node: u8, cidrs: &[String]) -> Vec<(String, IpAddr)> {
    let [v4, v6] = addresses::node(node);
    cidrs.iter().map(|c| (c.clone(), if c.contains(':') { v6 } else { v4 })).collect()
}

/// The names of labs that are up.
#[must_use]
pub fn names() -> Vec<String> {
    let entries = fs::read_dir(paths::states()).into_iter().flatten().flatten();
    entries
        .filter(|e| e.path().join(FILE).exists())
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Takes down labs of test processes that were killed before they could.
fn sweep() {
    for name in names() {
        let owner = Lab::open(&name).ok().and_then(|lab| lab.options.owner);
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
            && let Err(e) = Lab::down(&name)
        {
            eprintln!("lab {name}, left by a killed test: {e:#}");
        }
    }
}
