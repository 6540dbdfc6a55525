//! The record of changes of policies.

use serde::{Deserialize, Serialize};

use super::Direction;

/// Answer of `GET /v1/policy/history`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyHistory {
    /// Most changes that are kept; then the oldest goes.
    pub capacity: u64,
    /// Oldest first.
    pub changes: Vec<PolicyChange>,
}

/// A change of one endpoint's compiled policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyChange {
    /// Grows by one with each change on the node, restarts included; a gap is a change that was lost.
    pub number: u64,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// `vpc/name`.
    pub endpoint: String,
    /// Who.
    pub source: ChangeSource,
    /// Revision that was in force; 0: it had none.
    pub previous_revision: u32,
    /// Revision that was to be in force; it is when there is no error.
    pub attempted_revision: u32,
    /// What became different, by direction.
    pub directions: Vec<DirectionChange>,
    /// Why the previous revision stayed in force; empty when it did not.
    pub error: String,
}

/// One direction of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionChange {
    /// Direction.
    pub direction: Direction,
    /// Number of the policy that was to be in force.
    pub slot: u32,
    /// How the compiled entries differ from those of the policy before; absent for an endpoint's first policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<EntryCounts>,
}

/// Entries that two compiled policies differ in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryCounts {
    /// Only in the later one.
    pub added: u64,
    /// In both, deciding differently.
    pub updated: u64,
    /// Only in the earlier one.
    pub removed: u64,
}

/// Who changed a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ChangeSource {
    /// The desired-state document.
    Document {
        /// Its generation in this life of the agent.
        generation: u64,
        /// [`super::digest`] of its contents.
        digest: String,
    },
    /// Kubernetes.
    Kubernetes,
    /// A CNI request that attached the endpoint.
    Cni {
        /// The container.
        container_id: String,
        /// Its interface.
        ifname: String,
    },
    /// Somebody, by the agent's API.
    Operator {
        /// `quarantine`, `release` and the like.
        action: String,
        /// As given.
        reason: String,
    },
    /// The agent by itself: what could not be done before, or was begun by an agent that died.
    #[default]
    Agent,
}
