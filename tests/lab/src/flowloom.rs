//! flowloom on the lab's nodes: the same programs and flags as in its manifests, as processes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::addresses::POD_CIDRS;
use crate::files::{install as install_file, write_private};
use crate::lab::Lab;
use crate::supervisor;

const NAMESPACE: &str = "flowloom";
const AGENT: &str = "flowloom-agent";
const CONTROLLER: &str = "flowloom-controller";
/// Kinds that would start containers of flowloom's images.
const WORKLOADS: [&str; 2] = ["DaemonSet", "Deployment"];

pub(crate) fn install(lab: &Lab) -> Result<()> {
    for program in [AGENT, "flowloom-cni"] {
        let path = lab.options.bin_dir.join(program);
        ensure!(path.exists(), "{} is not built: use `cargo xtask lab up`", path.display());
    }
    if lab.options.bin_dir.join(CONTROLLER).exists() {
        start_controller(lab)?;
    }
    for node in lab.nodes()? {
        // The runtime asks for `loopback` by name; ours serves it.
        let plugin = lab.options.bin_dir.join("flowloom-cni");
        install_file(&plugin, &node.dir().join("cni-bin/loopback"))?;
        let kubeconfig = node.dir().join("agent.kubeconfig");
        lab.service_account_kubeconfig(NAMESPACE, AGENT, &kubeconfig)?;
        let cgroup_root = node.cgroup_inside().context("no cgroup v2 hierarchy")?;
        let config = json!({
            "node": node.name(),
            "cgroup_root": cgroup_root,
            "routes": "direct",
            "masquerade": {"enabled": true, "except": POD_CIDRS},
            "kubernetes": {"enabled": true, "kubeconfig": kubeconfig},
        });
        write_private(&node.dir().join("agent.yaml"), &serde_json::to_string_pretty(&config)?)?;
        node.start_agent()?;
    }
    for node in lab.nodes()? {
        let plugin = lab.options.bin_dir.join("flowloom-cni").display().to_string();
        let words = node.exec(&[&plugin, "install", "--wait", "25"])?.success();
        words.with_context(|| tail(&node.log(AGENT).unwrap_or_default()))?;
    }
    Ok(())
}

fn start_controller(lab: &Lab) -> Result<()> {
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

fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
