//! A container runtime, as far as a CNI plugin sees one.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_netlink::Netns;
use flowloom_testkit::{Cmd, Ns, Output};
use serde_json::{Value, json};

use crate::{Lab, binary};

/// Calls the plugin on a node.
#[derive(Debug)]
pub struct Runtime {
    /// The network configuration; every key may be changed.
    pub config: Value,
    /// `CNI_ARGS`.
    pub args: BTreeMap<String, String>,
    node: Netns,
}

impl Runtime {
    /// Of a node, with a configuration of this version that names nothing but the agent's socket.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn new(lab: &Lab, node: usize, version: &str) -> Result<Self> {
        let agent = lab.agents.get(node).context("no such agent")?;
        let (socket, queue) = (&agent.socket, agent.state_dir.join("cni-queue"));
        let config = json!({"cniVersion": version, "name": "flowloom", "type": "flowloom-cni", "socket": socket, "queue": queue});
        Ok(Self { config, args: BTreeMap::new(), node: lab.node(node).ns.try_clone()? })
    }

    /// With a key of the configuration.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// With an argument.
    #[must_use]
    pub fn arg(mut self, key: &str, value: &str) -> Self {
        self.args.insert(key.to_owned(), value.to_owned());
        self
    }

    /// One call for `eth0` of a container; `netns` as the runtime has it, empty when it has none.
    ///
    /// # Errors
    /// When the plugin cannot be started or hangs; what it answers is in the output.
    pub fn call(&self, verb: &str, container: &str, netns: &str) -> Result<Output> {
        let args: Vec<String> = self.args.iter().map(|(k, v)| format!("{k}={v}")).collect();
        Cmd::new(&[binary("flowloom-cni")?])
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", args.join(";"))
            .input(self.config.to_string())
            .in_netns(&self.node)?
            .timeout(Duration::from_secs(90))
            .run()
    }

    /// ADD that must succeed, and its result.
    ///
    /// # Errors
    /// With both outputs when it is refused.
    pub fn add(&self, container: &str, ns: &Ns) -> Result<Value> {
        let output = self.call("ADD", container, &netns_path(ns))?.success()?;
        serde_json::from_str(&output.stdout).with_context(|| format!("not JSON: {}", output.stdout))
    }

    /// A call that must be refused; the plugin's error code and its message.
    ///
    /// # Errors
    /// When it succeeds or says nothing that can be read.
    pub fn refused(&self, verb: &str, container: &str, netns: &str) -> Result<(u64, String)> {
        let output = self.call(verb, container, netns)?;
        anyhow::ensure!(!output.status.success(), "{verb} of {container} succeeded: {}", output.stdout);
        let error: Value = serde_json::from_str(&output.stdout)
            .with_context(|| format!("not JSON: {} {}", output.stdout, output.stderr))?;
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        Ok((error["code"].as_u64().context("no code")?, format!("{} {}", text("msg"), text("details"))))
    }
}

/// The path a runtime hands over.
#[must_use]
pub fn netns_path(ns: &Ns) -> String {
    ns.path().display().to_string()
}
