//! flowloom on the lab's nodes: the same programs and flags as in its manifests, as processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::files::write_private;
use crate::lab::Lab;
use crate::supervisor;
use crate::wait::{self, Hopeless};

const NAMESPACE: &str = "flowloom";
const AGENT: &str = "flowloom-agent";
const CONTROLLER: &str = "flowloom-controller";
const PATIENCE: Duration = Duration::from_secs(90);
/// Kinds that would start containers of flowloom's images.
const WORKLOADS: [&str; 2] = ["DaemonSet", "Deployment"];

pub(crate) fn install(lab: &Lab) -> Result<()> {
    // Agents do without one unless they take Pods from its slices.
    if lab.options.bin_dir.join(CONTROLLER).exists() {
        start_controller(lab)?;
    }
    start_agents(lab)
}

fn built(lab: &Lab, program: &str) -> Result<()> {
    let path = lab.options.bin_dir.join(program);
    ensure!(path.exists(), "{} is not built: use `cargo xtask lab up`", path.display());
    Ok(())
}

pub(crate) fn start_agents(lab: &Lab) -> Result<()> {
    [AGENT, "flowloom-cni"].iter().try_for_each(|program| built(lab, program))?;
    for node in lab.nodes()? {
        let kubeconfig = node.dir().join("agent.kubeconfig");
        lab.service_account_kubeconfig(NAMESPACE, AGENT, &kubeconfig)?;
        // What the manifests' ConfigMap says, and where this node differs from a real one.
        let mut config = json!({
            "cgroup_root": node.cgroup_inside().context("no cgroup v2 hierarchy")?,
            "routes": lab.options.routes,
            "masquerade": {"enabled": true},
            "kubernetes": {"enabled": true, "kubeconfig": kubeconfig},
            // The agent installs the plugin and, once it can serve, the configuration.
            "cni": {"conf_dir": "/etc/cni/net.d", "bin_dir": "/opt/cni/bin", "port_mappings": true},
        });
        if lab.options.objects_only {
            // The manifests say so, too; other labs have all Pods watched by every agent, which is the other way.
            config["kubernetes"]["peers"] = json!("slices");
        }
        write_private(&node.dir().join("agent.yaml"), &serde_json::to_string_pretty(&config)?)?;
        node.start_agent()?;
    }
    for node in lab.nodes()? {
        wait::until(PATIENCE, "the agent's network configuration", || {
            if let Some(how) = node.ended(AGENT)? {
                return Err(Hopeless(format!("{}: {AGENT} ended: {how}", node.name())).into());
            }
            let configured = fs::read_dir(node.dir().join("cni-conf"))?.flatten().next().is_some();
            ensure!(configured, "none yet on {}: the agent is not ready", node.name());
            Ok(())
        })?;
    }
    Ok(())
}

/// The ends of the agents' logs, for the error of a start that failed.
pub(crate) fn last_words(lab: &Lab) -> String {
    let mut text = String::new();
    for node in lab.nodes().unwrap_or_default() {
        let log = node.log(AGENT).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(6)..].join("\n    ");
        text += &format!("\n{}: {AGENT} says:\n    {tail}", node.name());
    }
    text
}

pub(crate) fn start_controller(lab: &Lab) -> Result<()> {
    built(lab, CONTROLLER)?;
    let cp = lab.control_plane()?;
    let kubeconfig = cp.dir.join("controller.kubeconfig");
    lab.service_account_kubeconfig(NAMESPACE, CONTROLLER, &kubeconfig)?;
    let config = json!({"kubernetes": {"kubeconfig": kubeconfig}});
    write_private(&cp.dir.join("controller.yaml"), &serde_json::to_string_pretty(&config)?)?;
    supervisor::begin(&cp.socket(), lab.services().controller(&cp))
}

/// Files in the order of their names; what `kubectl` reads is filtered, never edited.
pub(crate) fn apply_manifests(lab: &Lab, dir: &Path) -> Result<()> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .with_context(|| format!("reading {}", dir.display()))?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "yaml" || e == "json"))
        .collect();
    files.sort();
    ensure!(!files.is_empty(), "{} has no manifests", dir.display());
    for file in files {
        let text = fs::read_to_string(&file)?;
        // One after the other: a namespace exists before what is in it is asked about.
        let read = ["create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-"];
        let objects = lab.kubectl_input(&read, &text).with_context(|| file.display().to_string())?;
        let mut objects = serde_json::Deserializer::from_str(&objects).into_iter::<Value>();
        let kept = objects.try_fold(Vec::new(), |mut kept, object| -> Result<_> {
            let object = object?;
            let listed = object["items"].as_array().cloned().unwrap_or_else(|| vec![object.clone()]);
            kept.extend(listed.into_iter().filter(|o| !WORKLOADS.iter().any(|w| o["kind"] == *w)));
            Ok(kept)
        })?;
        if !kept.is_empty() {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": kept});
            lab.kubectl_input(&["apply", "--server-side", "-f", "-"], &list.to_string())
                .with_context(|| file.display().to_string())?;
        }
    }
    Ok(())
}
