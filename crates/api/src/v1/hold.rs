//! Policies that somebody holds an endpoint at: quarantine, freeze and rollback.

use serde::{Deserialize, Serialize};

/// Body of `POST /v1/policy/quarantine`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuarantineRequest {
    /// VPC or namespace.
    pub vpc: String,
    /// Its name there.
    pub endpoint: String,
    /// Nothing may come in.
    pub ingress: bool,
    /// Nothing may go out. One of the two at least.
    pub egress: bool,
    /// Why, for whoever meets it; may be empty, has 1,024 bytes at most.
    #[serde(default)]
    pub reason: String,
}

/// Body of `POST /v1/policy/freeze` and `POST /v1/policy/release`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldRequest {
    /// VPC or namespace.
    pub vpc: String,
    /// Its name there.
    pub endpoint: String,
    /// Why, for whoever meets it; may be empty, has 1,024 bytes at most.
    #[serde(default)]
    pub reason: String,
}

/// Body of `POST /v1/policy/rollback`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    /// VPC or namespace.
    pub vpc: String,
    /// Its name there.
    pub endpoint: String,
    /// Revision whose rules are to be in force.
    pub revision: u32,
    /// Why, for whoever meets it; may be empty, has 1,024 bytes at most.
    #[serde(default)]
    pub reason: String,
}

/// Answer of these: how the endpoint is held now, which is in force where it is wired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyHold {
    /// `vpc/name`.
    pub endpoint: String,
    /// Revision before; 0: none.
    pub previous_revision: u32,
    /// Revision in force; 0: the endpoint is not wired, and will be held once it is.
    pub revision: u32,
    /// Set while it is in quarantine, which comes before everything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// Set while its policy is frozen or rolled back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<Frozen>,
}

/// Nothing passes in the directions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Nothing comes in.
    pub ingress: bool,
    /// Nothing goes out.
    pub egress: bool,
    /// As given.
    pub reason: String,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// The rules of a revision stay in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// The revision: the one in force then, or the one gone back to.
    pub revision: u32,
    /// As given.
    pub reason: String,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// What the sources say otherwise by now, in words; empty: nothing.
    pub withheld: String,
    /// The revision is an earlier one, gone back to.
    #[serde(default)]
    pub rolled_back: bool,
}
