//! The manifests are what the API's types take, grant what the table grants, and configure what the programs accept.

use std::collections::{BTreeMap, BTreeSet};

use flowloom_k8s::access::{AGENT, CONTROLLER};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::*;

fn documents() -> Vec<(String, Value)> {
    let all = manifests().unwrap();
    all.iter()
        .flat_map(|(_, text)| text.split("\n---\n"))
        .map(|text| {
            let value: Value = serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            (value["kind"].as_str().unwrap().to_owned(), value)
        })
        .collect()
}

fn of<T: DeserializeOwned>(kind: &str) -> Vec<T> {
    let found = documents().into_iter().filter(|(k, _)| k == kind);
    found.map(|(_, v)| serde_json::from_value(v).unwrap()).collect()
}

/// What is there and the type does not know would be dropped, or refused, by the API server.
fn lost(prefix: &str, sent: &Value, kept: &Value, out: &mut Vec<String>) {
    match sent {
        Value::Object(fields) => {
            for (key, value) in fields {
                match kept.get(key) {
                    Some(k) => lost(&format!("{prefix}.{key}"), value, k, out),
                    // An empty object or list may be left out.
                    None if *value == serde_json::json!({}) || *value == serde_json::json!([]) => {}
                    None => out.push(format!("{prefix}.{key}")),
                }
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                lost(&format!("{prefix}[{i}]"), item, kept.get(i).unwrap_or(&Value::Null), out);
            }
        }
        _ => {}
    }
}

fn whole<T: DeserializeOwned + Serialize>(value: &Value) -> Vec<String> {
    let typed: T = match serde_json::from_value(value.clone()) {
        Ok(typed) => typed,
        Err(e) => return vec![e.to_string()],
    };
    let mut out = Vec::new();
    lost("", value, &serde_json::to_value(typed).unwrap(), &mut out);
    out
}

#[test]
fn every_document_is_what_its_type_takes_and_nothing_is_lost() {
    let mut kinds = BTreeSet::new();
    for (kind, value) in documents() {
        let faults = match kind.as_str() {
            "Namespace" => whole::<Namespace>(&value),
            "ServiceAccount" => whole::<ServiceAccount>(&value),
            "ClusterRole" => whole::<ClusterRole>(&value),
            "ClusterRoleBinding" => whole::<ClusterRoleBinding>(&value),
            "Role" => whole::<Role>(&value),
            "RoleBinding" => whole::<RoleBinding>(&value),
            "ConfigMap" => whole::<ConfigMap>(&value),
            "DaemonSet" => whole::<DaemonSet>(&value),
            "Deployment" => whole::<Deployment>(&value),
            "PodDisruptionBudget" => whole::<PodDisruptionBudget>(&value),
            "CustomResourceDefinition" => whole::<CustomResourceDefinition>(&value),
            "ValidatingAdmissionPolicy" => whole::<ValidatingAdmissionPolicy>(&value),
            "ValidatingAdmissionPolicyBinding" => whole::<ValidatingAdmissionPolicyBinding>(&value),
            other => vec![format!("nobody checks {other}")],
        };
        assert!(faults.is_empty(), "{kind} {}: {faults:?}", value["metadata"]["name"]);
        kinds.insert(kind);
    }
    assert_eq!(kinds.len(), 13);
}

#[test]
fn roles_grant_what_the_table_says_and_no_more() {
    type Grant = (String, Vec<String>, Vec<String>, Vec<String>);
    let mut granted: BTreeMap<String, BTreeSet<Grant>> = BTreeMap::new();
    let clusters = of::<ClusterRole>("ClusterRole").into_iter().map(|r| (r.metadata.name, r.rules));
    let own = of::<Role>("Role").into_iter().map(|r| (r.metadata.name, Some(r.rules)));
    let own = own.map(|(n, r)| (n, r.flatten()));
    for (name, rules) in clusters.chain(own) {
        for rule in rules.unwrap_or_default() {
            assert!(rule.non_resource_urls.is_none());
            granted.entry(name.clone().unwrap()).or_default().insert((
                rule.api_groups.unwrap().join(","),
                rule.resources.unwrap(),
                rule.resource_names.unwrap_or_default(),
                rule.verbs,
            ));
        }
    }
    let strings = |words: &[&str]| -> Vec<String> { words.iter().map(|w| (*w).to_owned()).collect() };
    let wanted: BTreeMap<String, BTreeSet<Grant>> = [AGENT, CONTROLLER]
        .iter()
        .map(|a| {
            let rules = a.rights.iter();
            let rules =
                rules.map(|r| (r.group.to_owned(), strings(r.resources), strings(r.names), strings(r.verbs)));
            (a.name.to_owned(), rules.collect())
        })
        .collect();
    assert_eq!(granted, wanted);
}

#[test]
fn the_programs_accept_their_configuration() {
    let maps = of::<ConfigMap>("ConfigMap");
    let text = |name: &str, file: &str| {
        let map = maps.iter().find(|m| m.metadata.name.as_deref() == Some(name)).unwrap();
        map.data.as_ref().unwrap()[file].clone()
    };
    flowloom_controller::config::Config::parse(&text(CONTROLLER.name, "controller.yaml")).unwrap();
    let agent = text(AGENT.name, "agent.yaml");
    // `--node` does what the first line does here.
    let agent = flowloom_agent::config::Config::parse(&format!("node: n1\n{agent}")).unwrap();
    assert!(agent.kubernetes.enabled);
    let taint = agent.kubernetes.startup_taint;
    assert!(
        workloads::controller().contains(&format!("key: {taint}")),
        "the controller runs before the agent is ready"
    );
    let paths: BTreeSet<String> = of::<DaemonSet>("DaemonSet")
        .iter()
        .flat_map(|d| {
            d.spec.as_ref().unwrap().template.spec.as_ref().unwrap().containers[0].volume_mounts.clone()
        })
        .flatten()
        .map(|m| m.mount_path)
        .collect();
    for path in [agent.cni.conf_dir, agent.cni.bin_dir, agent.state_dir, agent.netns_dir] {
        assert!(paths.contains(path.to_str().unwrap()), "{} is not mounted", path.display());
    }
    assert!(agent.pin_root.starts_with("/sys/fs/bpf") && agent.socket.starts_with("/run/flowloom"));
}

/// A probe that asks another port, or gives up before the answer may come, takes a healthy program out of service.
#[test]
fn probes_ask_where_the_programs_answer_and_wait_longer_than_they_do() {
    let maps = of::<ConfigMap>("ConfigMap");
    let map = maps.iter().find(|m| m.metadata.name.as_deref() == Some(CONTROLLER.name)).unwrap();
    let config = &map.data.as_ref().unwrap()["controller.yaml"];
    let config = flowloom_controller::config::Config::parse(config).unwrap();
    let listens: std::net::SocketAddr = config.metrics.listen.parse().unwrap();
    assert!(listens.ip().is_unspecified(), "the kubelet asks the node's address");
    let deployments: Vec<Deployment> = of("Deployment");
    let container = &deployments[0].spec.as_ref().unwrap().template.spec.as_ref().unwrap().containers[0];
    let ports: BTreeMap<_, _> =
        container.ports.iter().flatten().map(|p| (p.name.clone(), p.container_port)).collect();
    for (probe, path) in [(&container.liveness_probe, "/healthz"), (&container.readiness_probe, "/readyz")] {
        let asked = probe.as_ref().unwrap().http_get.as_ref().unwrap();
        let IntOrString::String(port) = &asked.port else { panic!("{:?}", asked.port) };
        let served = (Some(path), i32::from(listens.port()));
        assert_eq!((asked.path.as_deref(), ports[&Some(port.clone())]), served);
    }
    let sets: Vec<DaemonSet> = of("DaemonSet");
    let container = &sets[0].spec.as_ref().unwrap().template.spec.as_ref().unwrap().containers[0];
    assert!(container.liveness_probe.is_none());
    let probe = container.readiness_probe.as_ref().unwrap();
    let command = probe.exec.as_ref().unwrap().command.clone().unwrap();
    let [program, status, wait, seconds] = command.as_slice() else { panic!("{command:?}") };
    assert_eq!([program, status, wait].map(String::as_str), ["/usr/bin/flowloom", "status", "--wait"]);
    let seconds: i32 = seconds.strip_suffix('s').unwrap().parse().unwrap();
    assert!(seconds < probe.timeout_seconds.unwrap(), "killed before it can say why");
}

#[test]
fn the_slices_definition_has_its_rules() {
    let text = serde_json::to_string(&of::<CustomResourceDefinition>("CustomResourceDefinition")).unwrap();
    for rule in [
        "self.epoch >= oldSelf.epoch",
        "w.node < size(self.nodes)",
        "w.profile < size(self.profiles)",
        "isIP(i)",
    ] {
        assert!(text.contains(rule), "{rule}");
    }
    assert!(text.contains("\"maxItems\":250") && text.contains("\"scope\":\"Cluster\""));
}

#[test]
fn what_an_agent_may_write_on_nodes_is_bound_to_its_own() {
    let policies: Vec<ValidatingAdmissionPolicy> = of("ValidatingAdmissionPolicy");
    let bindings: Vec<ValidatingAdmissionPolicyBinding> = of("ValidatingAdmissionPolicyBinding");
    let ([policy], [binding]) = (policies.as_slice(), bindings.as_slice()) else {
        panic!("{} policies, {} bindings", policies.len(), bindings.len())
    };
    assert_eq!(binding.spec.as_ref().unwrap().policy_name, policy.metadata.name);
    // Every right to write to nodes is under the policy.
    let rules =
        policy.spec.as_ref().unwrap().match_constraints.as_ref().unwrap().resource_rules.clone().unwrap();
    let bound: BTreeSet<String> = rules.into_iter().flat_map(|r| r.resources.unwrap_or_default()).collect();
    let writes =
        |a: &&flowloom_k8s::access::Access| a.verbs.iter().any(|v| !["get", "list", "watch"].contains(v));
    let granted: BTreeSet<String> = AGENT
        .rights
        .iter()
        .filter(writes)
        .flat_map(|a| a.resources)
        .filter(|r| r.starts_with("nodes"))
        .map(|r| (*r).to_owned())
        .collect();
    assert_eq!(bound, granted);
}
