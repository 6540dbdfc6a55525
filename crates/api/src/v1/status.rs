//! Health and status of the agent.

use serde::{Deserialize, Serialize};

use super::Condition;

/// Answer of `GET /v1/health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// First document loaded, datapath in force, nothing of the agent itself failing.
    pub ready: bool,
    /// The node's name.
    pub node: String,
    /// Version of the agent.
    pub version: String,
    /// What is missing while not ready.
    pub waiting_for: Vec<String>,
}

/// Answer of `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The node's name.
    pub node: String,
    /// Version of the agent.
    pub version: String,
    /// Version of the map layout.
    pub abi_version: u32,
    /// Milliseconds since the Unix epoch.
    pub started_ms: u64,
    /// Whether `GET /v1/health` says ready.
    pub ready: bool,
    /// `ebpf` or `stack`.
    pub forwarding: String,
    /// The desired-state document.
    pub document: DocumentStatus,
    /// The last pass.
    pub reconcile: ReconcileStatus,
    /// Endpoints of this node by state.
    pub endpoints: EndpointCounts,
    /// Connection tables.
    pub conntrack: ConntrackStatus,
    /// Event stream.
    pub events: EventStatus,
    /// Objects that are degraded, and why.
    pub degraded: Vec<ObjectConditions>,
}

/// The desired-state document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentStatus {
    /// Its path.
    pub path: String,
    /// Counts loads that changed something; starts with 1. 0 = none loaded yet.
    pub generation: u64,
    /// Generation in force in the datapath (equal when everything is applied).
    pub applied_generation: u64,
    /// Milliseconds since the Unix epoch of the last successful load.
    pub loaded_ms: u64,
    /// Why the file on disk is not the one in force; empty when it is.
    pub error: String,
}

/// The last reconcile pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReconcileStatus {
    /// Passes since start.
    pub passes: u64,
    /// External writes of the last pass (maps, links, routes, files).
    pub last_writes: u64,
    /// External writes since start.
    pub total_writes: u64,
    /// Microseconds of the last pass.
    pub last_duration_us: u64,
    /// Errors of the last pass.
    pub errors: Vec<String>,
}

/// Endpoints of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointCounts {
    /// All.
    pub total: u32,
    /// Policy in force.
    pub ready: u32,
    /// Lacking an address, a VNI or something else of the document.
    pub waiting: u32,
    /// The node could not wire them.
    pub failed: u32,
}

/// Connection tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConntrackStatus {
    /// Established connections counted by the last sweep.
    pub established: u64,
    /// Capacity of the established table.
    pub capacity: u64,
    /// Entries removed by the sweeper since start.
    pub swept: u64,
}

/// Event stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventStatus {
    /// Events read since start.
    pub read: u64,
    /// Events the programs could not hand over or refused by rate.
    pub lost: u64,
    /// Streams open now.
    pub streams: u32,
}

/// Conditions of one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectConditions {
    /// `endpoint`, `vpc`, `subnet`, `security_group`, `cidr_group`, `node`, `document`.
    pub kind: String,
    /// Full name (`vpc/name` for objects of a VPC).
    pub name: String,
    /// Its conditions.
    pub conditions: Vec<Condition>,
}
