//! Namespace, service accounts and roles.

use std::fmt::Write as _;

use flowloom_k8s::access::{AGENT, Access, Account, CONTROLLER, NAMESPACE, Scope};

pub(crate) fn namespace() -> String {
    format!(
        "apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    # Agent and controller use the host's network: they run before any other exists.
    pod-security.kubernetes.io/enforce: privileged
"
    )
}

pub(crate) fn accounts_and_roles() -> String {
    [AGENT, CONTROLLER].iter().flat_map(documents).collect::<Vec<_>>().join("---\n")
}

fn documents(account: &Account) -> Vec<String> {
    let mut out = vec![service_account(account.name)];
    for (scope, kind) in [(Scope::Cluster, "ClusterRole"), (Scope::Own, "Role")] {
        let rules: Vec<&Access> = account.rights.iter().filter(|a| a.scope == scope).collect();
        if !rules.is_empty() {
            out.push(role(account.name, scope, kind, &rules));
            out.push(binding(account.name, scope, kind));
        }
    }
    out
}

fn service_account(name: &str) -> String {
    format!(
        "apiVersion: v1
kind: ServiceAccount
metadata:
  name: {name}
  namespace: {NAMESPACE}
# Only Pods that ask for the token get it.
automountServiceAccountToken: false
"
    )
}

fn metadata(name: &str, scope: Scope) -> String {
    match scope {
        Scope::Cluster => format!("metadata:\n  name: {name}\n"),
        Scope::Own => format!("metadata:\n  name: {name}\n  namespace: {NAMESPACE}\n"),
    }
}

fn role(name: &str, scope: Scope, kind: &str, rules: &[&Access]) -> String {
    let mut out =
        format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\n{}rules:\n", metadata(name, scope));
    for rule in rules {
        let list = |items: &[&str]| items.join(", ");
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  # {}", rule.why);
        let _ = writeln!(out, "  - apiGroups: [{:?}]", rule.group);
        let _ = writeln!(out, "    resources: [{}]", list(rule.resources));
        if !rule.names.is_empty() {
            let _ = writeln!(out, "    resourceNames: [{}]", list(rule.names));
        }
        let _ = writeln!(out, "    verbs: [{}]", list(rule.verbs));
    }
    out
}

fn binding(name: &str, scope: Scope, kind: &str) -> String {
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: {kind}Binding
{}roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {kind}
  name: {name}
subjects:
  - kind: ServiceAccount
    name: {name}
    namespace: {NAMESPACE}
",
        metadata(name, scope)
    )
}
