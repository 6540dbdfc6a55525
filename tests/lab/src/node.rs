//! A node of a lab.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flowloom_testkit::{Cmd, Output};
use nix::sys::signal::Signal;

use crate::lab::Lab;
use crate::member::Member;
use crate::supervisor::{self, Service};
use crate::{cgroups, images, wait};

const AGENT: &str = "flowloom-agent";
const PATIENCE: Duration = Duration::from_secs(60);

/// One node: its namespaces, services and file system view.
#[derive(Debug)]
pub struct Node<'a> {
    lab: &'a Lab,
    index: u8,
    member: Member,
}

impl<'a> Node<'a> {
    pub(crate) fn new(lab: &'a Lab, index: u8, member: Member) -> Self {
        Self { lab, index, member }
    }

    /// Its name, in the lab and in Kubernetes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.member.name
    }

    /// Its number, from 1.
    #[must_use]
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Its directory: logs, `cni-conf` (its `/etc/cni/net.d`), `cni-bin` (its `/opt/cni/bin`).
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.member.dir
    }

    /// Its network namespace, by name.
    #[must_use]
    pub fn netns(&self) -> &str {
        &self.member.netns
    }

    /// Its cgroup v2 directory on the host; every process of the node is in it or below.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Path> {
        self.member.groups.iter().find(|g| g.hierarchy.option.is_empty()).map(|g| g.path.as_path())
    }

    /// Where programs inside find that directory.
    #[must_use]
    pub fn cgroup_inside(&self) -> Option<&Path> {
        cgroups::v2_inside(&self.member.groups)
    }

    /// Runs a command on the node, in its namespaces and groups; 30 s at most.
    ///
    /// # Errors
    /// When it cannot be started or takes too long; a failing exit status is no error here.
    pub fn exec(&self, command: &[&str]) -> Result<Output> {
        Cmd::new(&self.lab.exec_argv(self.name(), command)?).run()
    }

    /// As [`Self::exec`]; a failing exit status is an error.
    ///
    /// # Errors
    /// When it fails.
    pub fn exec_ok(&self, command: &[&str]) -> Result<Output> {
        self.exec(command)?.success()
    }

    /// Imports an image archive.
    ///
    /// # Errors
    /// The runtime's.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        let path = archive.display().to_string();
        let argv = self.lab.exec_argv(self.name(), &["ctr", "-n", "k8s.io", "images", "import", &path])?;
        Cmd::new(&argv).timeout(Duration::from_secs(180)).run()?.success().map(drop)
    }

    /// Names of images the runtime has.
    ///
    /// # Errors
    /// The runtime's.
    pub fn images(&self) -> Result<Vec<String>> {
        let out = self.exec_ok(&["ctr", "-n", "k8s.io", "images", "list", "-q"])?;
        Ok(out.stdout.lines().map(str::to_owned).collect())
    }

    /// Starts a service of the node again, by SIGTERM first: `kubelet`, `containerd`, `kube-proxy`, `flowloom-agent`.
    ///
    /// # Errors
    /// When it does not end, or does not start.
    pub fn restart(&self, service: &str) -> Result<()> {
        self.stop(service)?;
        self.start(self.definition(service)?)
    }

    /// Ends a service by SIGTERM and waits until it is gone.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(&self, service: &str) -> Result<()> {
        self.end(service, Signal::SIGTERM)
    }

    /// Starts a service that ended.
    ///
    /// # Errors
    /// When it runs, or is none of the node's.
    pub fn start_again(&self, service: &str) -> Result<()> {
        self.start(self.definition(service)?)
    }

    /// Kills the agent as a crash would, and waits until it is gone.
    ///
    /// # Errors
    /// When there is none.
    pub fn kill_agent(&self) -> Result<()> {
        self.end(AGENT, Signal::SIGKILL)
    }

    /// Starts the agent after [`Self::kill_agent`].
    ///
    /// # Errors
    /// When it runs.
    pub fn start_agent(&self) -> Result<()> {
        self.start_again(AGENT)
    }

    /// Ends the agent properly and starts it again.
    ///
    /// # Errors
    /// When it does not end.
    pub fn restart_agent(&self) -> Result<()> {
        self.restart(AGENT)
    }

    /// How a service of the node ended; `None` while it runs.
    ///
    /// # Errors
    /// When it was never started.
    pub fn ended(&self, service: &str) -> Result<Option<String>> {
        let states = supervisor::list(&self.member.socket())?;
        let state = states.get(service).with_context(|| format!("{} has no {service}", self.name()))?;
        Ok(state.ended.clone())
    }

    /// What a service of the node has logged.
    ///
    /// # Errors
    /// When it never ran.
    pub fn log(&self, service: &str) -> Result<String> {
        Ok(std::fs::read_to_string(self.member.dir.join(format!("{service}.log")))?)
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    pub(crate) fn start(&self, service: Service) -> Result<()> {
        supervisor::begin(&self.member.socket(), service)
    }

    fn definition(&self, service: &str) -> Result<Service> {
        let all = self.lab.services();
        match service {
            "containerd" => all.containerd(&self.member),
            "kubelet" => all.kubelet(&self.member, self.index),
            "kube-proxy" => all.kube_proxy(&self.member),
            AGENT => Ok(all.agent(&self.member)),
            other => anyhow::bail!("nodes have no service {other}"),
        }
    }

    fn end(&self, service: &str, signal: Signal) -> Result<()> {
        let socket = self.member.socket();
        supervisor::signal(&socket, service, signal)?;
        wait::until(PATIENCE, "the service's end", || {
            let states = supervisor::list(&socket)?;
            ensure!(states.get(service).is_some_and(|s| s.ended.is_some()), "{service} still runs");
            Ok(())
        })
    }

    pub(crate) fn start_runtime(&self, suites: bool) -> Result<()> {
        self.start(self.definition("containerd")?)?;
        wait::until(PATIENCE, "containerd", || self.exec_ok(&["ctr", "-n", "k8s.io", "version"]).map(drop))?;
        images::archives(suites).iter().try_for_each(|a| self.load_image(a))
    }

    pub(crate) fn start_kubelet(&self) -> Result<()> {
        self.start(self.definition("kubelet")?)
    }

    /// The node's Pod CIDRs once it is registered and has them.
    pub(crate) fn wait_pod_cidrs(&self, timeout: Duration) -> Result<Vec<String>> {
        wait::until(timeout, &format!("Pod CIDRs of {}", self.name()), || {
            let text =
                self.lab.kubectl(&["get", "node", self.name(), "-o", "jsonpath={.spec.podCIDRs[*]}"])?;
            let cidrs: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
            ensure!(!cidrs.is_empty(), "none yet");
            Ok(cidrs)
        })
    }
}
