//! What flowloom's programs may do at the API server: one table. The RBAC manifests of `deploy/` are written from it, the fake API server of
//! the tests refuses what it does not name, and the tests fail on a row that nobody used.

/// Namespace of flowloom's own objects (service accounts, leases, configuration).
pub const NAMESPACE: &str = "flowloom";

/// Where a right holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// In the whole cluster (ClusterRole).
    Cluster,
    /// In flowloom's own namespace (Role).
    Own,
}

/// One rule of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Where.
    pub scope: Scope,
    /// API group; empty for core.
    pub group: &'static str,
    /// Resources, with their subresource (`nodes/status`).
    pub resources: &'static [&'static str],
    /// Objects by name; empty for all.
    pub names: &'static [&'static str],
    /// Verbs of RBAC.
    pub verbs: &'static [&'static str],
    /// What for, in a line.
    pub why: &'static str,
}

impl Access {
    /// Whether this rule allows a request. `namespace` and `name` are empty where the request has none (lists, creates, cluster scope).
    #[must_use]
    pub fn allows(&self, verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> bool {
        (self.scope == Scope::Cluster || namespace == NAMESPACE)
            && self.group == group
            && self.resources.contains(&resource)
            && self.verbs.contains(&verb)
            && (self.names.is_empty() || self.names.contains(&name))
    }
}

const READ: &[&str] = &["list", "watch"];

const fn cluster(
    group: &'static str,
    resources: &'static [&'static str],
    verbs: &'static [&'static str],
    why: &'static str,
) -> Access {
    Access { scope: Scope::Cluster, group, resources, names: &[], verbs, why }
}

/// A program's account and its rights.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    /// Name of the service account in [`NAMESPACE`], and of its roles.
    pub name: &'static str,
    /// Its rights.
    pub rights: &'static [Access],
}

impl Account {
    /// Whether any rule allows a request (see [`Access::allows`]).
    #[must_use]
    pub fn allows(&self, verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> bool {
        self.rights.iter().any(|a| a.allows(verb, group, resource, namespace, name))
    }
}

/// The node agent, on every node.
pub const AGENT: Account = Account {
    name: "flowloom-agent",
    rights: &[
        cluster(
            "",
            &["nodes", "namespaces", "pods", "services"],
            READ,
            "Nodes and their pod CIDRs, labels that policies select by, this node's Pods, Services.",
        ),
        cluster("discovery.k8s.io", &["endpointslices"], READ, "Backends of Services."),
        cluster("networking.k8s.io", &["networkpolicies"], READ, "Policies."),
        cluster(
            "networking.k8s.io",
            &["servicecidrs"],
            READ,
            "Ranges of Services, which pod CIDRs must keep clear of (Kubernetes 1.33).",
        ),
        cluster("flowloom.io", &["workloadslices"], READ, "Pods of other nodes."),
        cluster(
            "",
            &["nodes", "nodes/status"],
            &["patch"],
            "The start-up taint and the NetworkUnavailable condition of its own node.",
        ),
        cluster(
            "",
            &["events"],
            &["create", "patch"],
            "Why the network of a Pod cannot be made, told on the Pod.",
        ),
    ],
};

/// Name of the lease that makes a controller the leader.
pub const LEASE: &str = "flowloom-controller";

/// The cluster's controller, leader and standby.
pub const CONTROLLER: Account = Account {
    name: "flowloom-controller",
    rights: &[
        cluster("", &["pods"], &["list", "watch"], "What workload slices are made from."),
        cluster(
            "flowloom.io",
            &["workloadslices"],
            &["list", "watch", "create", "update", "delete"],
            "Publishes them.",
        ),
        Access {
            scope: Scope::Own,
            group: "coordination.k8s.io",
            resources: &["leases"],
            names: &[],
            verbs: &["create"],
            why: "Leadership. RBAC cannot name an object that does not exist yet.",
        },
        Access {
            scope: Scope::Own,
            group: "coordination.k8s.io",
            resources: &["leases"],
            names: &[LEASE],
            verbs: &["get", "update"],
            why: "Leadership: this lease and no other.",
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_no_wider_than_their_rows() {
        assert!(AGENT.allows("watch", "", "pods", "", ""));
        assert!(!AGENT.allows("delete", "", "nodes", "", "n1"));
        assert!(!AGENT.allows("update", "flowloom.io", "workloadslices", "", "x"));
        assert!(CONTROLLER.allows("update", "coordination.k8s.io", "leases", NAMESPACE, LEASE));
        assert!(!CONTROLLER.allows("update", "coordination.k8s.io", "leases", "kube-system", LEASE));
        assert!(!CONTROLLER.allows("update", "coordination.k8s.io", "leases", NAMESPACE, "kube-scheduler"));
    }

    #[test]
    fn nothing_is_granted_by_wildcard() {
        for access in AGENT.rights.iter().chain(CONTROLLER.rights) {
            let all = access.resources.iter().chain(access.verbs).chain([&access.group]);
            assert!(all.into_iter().all(|w| !w.contains('*')), "{access:?}");
            assert!(access.why.ends_with('.'), "{access:?}");
        }
    }
}
