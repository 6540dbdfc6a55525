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
    /// [`digest`] of the document and lock of the generation in force in the datapath (`applied_generation`); empty
    /// before the first. What waits for an applied document compares it: a counter cannot tell whose change it counts.
    #[serde(default)]
    pub applied_digest: String,
    /// Microseconds from the notice of its last change, reading it included, until that was in force.
    #[serde(default)]
    pub applied_us: u64,
    /// Why the file on disk is not the one in force; empty when it is.
    pub error: String,
}

/// Names the contents of a document and its lock: 64 bits over both with their lengths, eight bytes a step, 16 hexadecimal digits. Tells
/// two contents apart, proves nothing.
#[must_use]
pub fn digest(document: &[u8], lock: Option<&[u8]>) -> String {
    // Each step can be undone, so that one difference alone never vanishes; the shift brings high bits down.
    let step = |hash: u64, word: u64| {
        let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 32)
    };
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for part in [Some(document), lock] {
        hash = step(hash, part.map_or(u64::MAX, |p| p.len() as u64));
        let (words, rest) = part.unwrap_or_default().as_chunks::<8>();
        hash = words.iter().fold(hash, |h, word| step(h, u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        hash = step(hash, u64::from_le_bytes(last));
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_tells_contents_and_their_border_apart() {
        let all = [
            digest(b"ab", Some(b"c")),
            digest(b"a", Some(b"bc")),
            digest(b"abc", None),
            digest(b"abc", Some(b"")),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(digest(b"ab", Some(b"c")), all[0]);
    }
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
    /// Things that wait for a quiet moment: freeing what the last change left, keeping its document. Nothing in force depends on them.
    #[serde(default)]
    pub quiet_work: u64,
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
