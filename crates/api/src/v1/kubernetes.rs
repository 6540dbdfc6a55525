//! Kubernetes as the agent sees it.

use serde::{Deserialize, Serialize};

/// `GET /v1/kubernetes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesStatus {
    /// Whether the agent asks an API server at all.
    pub enabled: bool,
    /// Its address.
    pub server: String,
    /// Whether the first list of every kind is in.
    pub synced: bool,
    /// What is watched.
    pub kinds: Vec<KubernetesKind>,
    /// Objects that are not, or not as they are now, in force, and why.
    pub faults: Vec<KubernetesFault>,
    /// Pods of this node with a network of their own.
    pub local_pods: u64,
    /// Updates in force so far; one is what came at about the same time.
    #[serde(default)]
    pub updates: u64,
    /// From hearing the last of them until the datapath enforced it, microseconds.
    #[serde(default)]
    pub applied_us: u64,
}

/// One watched kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesKind {
    /// As in manifests.
    pub kind: String,
    /// Whether its first list is in.
    pub listed: bool,
    /// Objects known.
    pub objects: u64,
    /// Objects refused.
    pub refused: u64,
    /// When the server was last heard of it (an event or a bookmark, one a minute).
    pub heard_ms: Option<u64>,
    /// When one of the objects last changed.
    pub changed_ms: Option<u64>,
    /// Lists received; more than one says that the watch was lost for long.
    pub lists: u64,
    /// Times the watch was interrupted.
    pub failures: u64,
    /// Why it is interrupted now; empty = it is not.
    pub error: String,
    /// Servers need not have it: nothing waits for its list.
    #[serde(default)]
    pub optional: bool,
}

/// What is wrong with an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesFault {
    /// As in manifests.
    pub kind: String,
    /// `namespace/name`.
    pub name: String,
    /// CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
}
