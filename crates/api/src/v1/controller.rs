//! Health and status of the controller.

use serde::{Deserialize, Serialize};

use super::ObjectConditions;

/// Answer of the controller's `GET /v1/health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerHealth {
    /// First lists complete, and somebody leads.
    pub ready: bool,
    /// Its name among the candidates.
    pub identity: String,
    /// Version of the controller.
    pub version: String,
    /// Whether it publishes.
    pub leads: bool,
    /// What is missing while not ready.
    pub waiting_for: Vec<String>,
}

/// Answer of the controller's `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerStatus {
    /// Its name among the candidates.
    pub identity: String,
    /// Version of the controller.
    pub version: String,
    /// Milliseconds since the Unix epoch.
    pub started_ms: u64,
    /// Whether `GET /v1/health` says ready.
    pub ready: bool,
    /// Leadership.
    pub leader: LeaderStatus,
    /// Watches.
    pub sources: Vec<SourceStatus>,
    /// Workload slices.
    pub slices: SliceCounts,
    /// Objects that are degraded, and why.
    pub degraded: Vec<ObjectConditions>,
}

/// Leadership.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderStatus {
    /// Whether this process publishes.
    pub leads: bool,
    /// Who holds the lease; empty: nobody.
    pub holder: String,
    /// Epoch of this process's leadership; 0 without.
    pub epoch: i64,
    /// Why the lease could not be read or renewed last time; empty when it could.
    pub error: String,
}

/// One source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// Its name.
    pub name: String,
    /// Whether its first list is complete.
    pub listed: bool,
    /// Milliseconds since the Unix epoch at which the server was last heard of; 0: never.
    pub heard_ms: u64,
    /// Interruptions since start.
    pub failures: u64,
    /// Why it is interrupted now; empty when it is not.
    pub error: String,
}

/// Workload slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceCounts {
    /// Pods with an address of the Pod network.
    pub workloads: u64,
    /// Slices at the API server.
    pub slices: u64,
    /// Slices that differ from what they are to say; 0 on a standby.
    pub pending: u64,
}
