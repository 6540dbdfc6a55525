//! Dependencies point one way (ARCHITECTURE.md); this proves it from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::run;

/// What each crate may use of this workspace, dev-dependencies aside.
const ALLOWED: &[(&str, &[&str])] = &[
    ("flowloom-bpf-abi", &[]),
    ("flowloom-bpf-logic", &["flowloom-bpf-abi"]),
    ("flowloom-bpf-object", &[]),
    ("flowloom-model", &[]),
    ("flowloom-compiler", &["flowloom-model", "flowloom-bpf-abi"]),
    ("flowloom-netlink", &[]),
    (
        "flowloom-datapath",
        &[
            "flowloom-bpf-abi",
            "flowloom-bpf-logic",
            "flowloom-bpf-object",
            "flowloom-compiler",
            "flowloom-model",
        ],
    ),
    ("flowloom-api", &[]),
    ("flowloom-cni", &["flowloom-api", "flowloom-netlink"]),
    (
        "flowloom-agent",
        &[
            "flowloom-api",
            "flowloom-bpf-abi",
            "flowloom-compiler",
            "flowloom-datapath",
            "flowloom-model",
            "flowloom-netlink",
        ],
    ),
    ("flowloom", &["flowloom-api", "flowloom-bpf-abi", "flowloom-model"]),
    ("flowloom-testkit", &["flowloom-netlink"]),
    ("flowloom-tests-netns", &["*"]),
    ("flowloom-tests-e2e", &["*"]),
    ("flowloom-benches", &["*"]),
    ("xtask", &["flowloom-bpf-abi"]),
];

/// Crates from outside that a crate must never reach, even through others.
const NEVER: &[(&str, &[&str])] = &[
    ("flowloom-cni", &["tokio", "aya", "kube", "axum"]),
    ("flowloom-model", &["tokio", "aya", "nix", "libc"]),
    ("flowloom-compiler", &["tokio", "aya", "nix"]),
    ("flowloom-bpf-logic", &["aya", "libc"]),
];

pub(crate) fn check() -> Result<()> {
    let text =
        run::output(&mut run::command(&run::cargo(), &["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text)?;
    let faults = faults(&metadata)?;
    if faults.is_empty() { Ok(()) } else { bail!("layers:\n  {}", faults.join("\n  ")) }
}

fn faults(metadata: &Value) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let list = |v: &Value, key: &str| v[key].as_array().cloned().unwrap_or_default();
    let text = |v: &Value, key: &str| v[key].as_str().unwrap_or_default().to_owned();
    let members: BTreeSet<String> =
        list(metadata, "workspace_members").iter().filter_map(|m| m.as_str().map(str::to_owned)).collect();
    let packages = list(metadata, "packages");
    let names: BTreeMap<String, String> = packages.iter().map(|p| (text(p, "id"), text(p, "name"))).collect();
    let ours: BTreeSet<&String> = members.iter().filter_map(|m| names.get(m)).collect();

    for package in packages.iter().filter(|p| members.contains(&text(p, "id"))) {
        let name = text(package, "name");
        let Some((_, allowed)) = ALLOWED.iter().find(|(n, _)| *n == name) else {
            faults.push(format!(
                "{name} has no row in xtask/src/layers.rs: give it a place in the architecture"
            ));
            continue;
        };
        for dependency in list(package, "dependencies").iter().filter(|d| d["kind"].as_str() != Some("dev")) {
            let target = text(dependency, "name");
            if ours.contains(&target) && !allowed.contains(&"*") && !allowed.contains(&target.as_str()) {
                faults.push(format!("{name} must not depend on {target}"));
            }
            if target == "flowloom-testkit"
                && !name.starts_with("flowloom-tests-")
                && name != "flowloom-benches"
            {
                faults.push(format!("{name} ships the test kit: make it a dev-dependency"));
            }
        }
        let manifest = text(package, "manifest_path");
        let toml = std::fs::read_to_string(&manifest).with_context(|| manifest.clone())?;
        if !toml.contains("[lints]\nworkspace = true") {
            faults.push(format!(
                "{name} does not opt in to the workspace's lints: add `[lints]` with `workspace = true`"
            ));
        }
    }

    // Edges of the resolved graph without dev-dependencies.
    let mut edges: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for node in list(&metadata["resolve"], "nodes") {
        let targets = list(&node, "deps")
            .iter()
            .filter(|d| list(d, "dep_kinds").iter().any(|k| k["kind"].is_null()))
            .map(|d| text(d, "pkg"))
            .collect();
        edges.insert(text(&node, "id"), targets);
    }
    for (name, never) in NEVER {
        let Some(start) = members.iter().find(|m| names.get(*m).is_some_and(|n| n == name)) else { continue };
        let mut seen = BTreeSet::from([start.clone()]);
        let mut todo = vec![start.clone()];
        while let Some(id) = todo.pop() {
            for next in edges.get(&id).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    todo.push(next.clone());
                }
            }
        }
        for banned in *never {
            if seen.iter().any(|id| names.get(id).is_some_and(|n| n == banned)) {
                faults.push(format!("{name} reaches {banned}"));
            }
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_without_a_place_is_a_fault() {
        let dir = tempfile();
        let manifest = dir.join("Cargo.toml");
        std::fs::write(&manifest, "[package]\n").unwrap();
        let metadata = serde_json::json!({
            "workspace_members": ["x"],
            "packages": [{"id": "x", "name": "flowloom-stray", "dependencies": [], "manifest_path": manifest}],
            "resolve": {"nodes": []},
        });
        let faults = faults(&metadata).unwrap();
        assert!(faults.iter().any(|f| f.contains("flowloom-stray has no row")), "{faults:?}");
    }

    #[test]
    fn an_upward_dependency_and_a_missing_lint_table_are_faults() {
        let dir = tempfile();
        let manifest = dir.join("Cargo2.toml");
        std::fs::write(&manifest, "[package]\n").unwrap();
        let metadata = serde_json::json!({
            "workspace_members": ["m", "a"],
            "packages": [
                {"id": "m", "name": "flowloom-model", "manifest_path": manifest,
                 "dependencies": [{"name": "flowloom-agent", "kind": null}]},
                {"id": "a", "name": "flowloom-agent", "dependencies": [], "manifest_path": manifest},
            ],
            "resolve": {"nodes": []},
        });
        let faults = faults(&metadata).unwrap();
        assert!(faults.iter().any(|f| f == "flowloom-model must not depend on flowloom-agent"), "{faults:?}");
        assert!(faults.iter().any(|f| f.contains("does not opt in")), "{faults:?}");
    }

    fn tempfile() -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("flowloom-layers-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }
}
