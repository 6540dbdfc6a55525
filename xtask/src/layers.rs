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
    ("flowloom-k8s", &["flowloom-model"]),
    ("flowloom-cni", &["flowloom-api", "flowloom-netlink"]),
    (
        "flowloom-agent",
        &[
            "flowloom-api",
            "flowloom-bpf-abi",
            "flowloom-cni",
            "flowloom-compiler",
            "flowloom-datapath",
            "flowloom-k8s",
            "flowloom-model",
            "flowloom-netlink",
            "flowloom-serve",
        ],
    ),
    ("flowloom", &["flowloom-api", "flowloom-bpf-abi", "flowloom-model"]),
    ("flowloom-controller", &["flowloom-api", "flowloom-k8s", "flowloom-model", "flowloom-serve"]),
    ("flowloom-serve", &["flowloom-api"]),
    ("flowloom-deploy", &["flowloom-k8s"]),
    ("flowloom-testkit", &["flowloom-netlink"]),
    ("flowloom-lab", &["flowloom-testkit"]),
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
    ("flowloom-controller", &["aya", "rtnetlink", "flowloom-bpf-abi"]),
];

pub(crate) fn check() -> Result<()> {
    let text =
        run::output(&mut run::command(&run::cargo(), &["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text)?;
    let mut faults = faults(&metadata)?;
    for (name, never) in NEVER {
        // Per package: `cargo metadata` would unite the features that others ask for.
        let tree = run::command(
            &run::cargo(),
            &["tree", "--locked", "-p", name, "-e", "normal,build", "--prefix", "none", "-f", "{p}"],
        )
        .output()?;
        faults.extend(reached(name, never, &String::from_utf8_lossy(&tree.stdout)));
    }
    if faults.is_empty() { Ok(()) } else { bail!("layers:\n  {}", faults.join("\n  ")) }
}

/// Which of the banned crates a package's tree names; an empty tree proves nothing.
fn reached(name: &str, never: &[&str], tree: &str) -> Vec<String> {
    let crates: BTreeSet<&str> = tree.lines().filter_map(|l| l.split(' ').next()).collect();
    if !crates.contains(name) {
        return vec![format!("{name}: cargo tree shows nothing")];
    }
    never
        .iter()
        .filter(|banned| crates.contains(**banned))
        .map(|banned| format!("{name} reaches {banned}"))
        .collect()
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
                && !["flowloom-benches", "flowloom-lab"].contains(&name.as_str())
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

    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_without_a_place_is_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = dir.path().join("Cargo.toml");
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
        let dir = tempfile::tempdir().unwrap();
        let manifest = dir.path().join("Cargo2.toml");
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

    #[test]
    fn a_banned_crate_anywhere_in_the_tree_is_a_fault() {
        let tree = "flowloom-cni v0.1.0 (/x)\nserde v1\ntokio v1.2.3\n";
        assert_eq!(reached("flowloom-cni", &["tokio", "aya"], tree), ["flowloom-cni reaches tokio"]);
        assert!(reached("flowloom-cni", &["aya"], tree).is_empty());
        assert_eq!(reached("flowloom-cni", &["aya"], "").len(), 1);
    }
}
