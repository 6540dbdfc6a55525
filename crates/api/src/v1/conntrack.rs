//! Tracked connections.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Named, Verdict};

/// Query of `GET` and `DELETE /v1/conntrack`; every field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConntrackFilter {
    /// VPC name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// Name of a local endpoint at either side (needs `vpc`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Address at either side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Port at either side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// `tcp`, `udp`, `icmp`, `icmpv6`, `sctp` or a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Most entries answered (default 10000).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// Answer of `GET /v1/conntrack`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConntrackList {
    /// Connections.
    pub connections: Vec<Connection>,
    /// More matched than `limit`.
    pub truncated: bool,
}

/// A tracked connection, originator first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// VPC.
    pub vpc: Named,
    /// `tcp` ...
    pub protocol: String,
    /// Originator.
    pub src: IpAddr,
    /// Its port (ICMP echo: identifier).
    pub src_port: u16,
    /// Responder.
    pub dst: IpAddr,
    /// Its port.
    pub dst_port: u16,
    /// Originator's endpoint when local.
    pub src_endpoint: Option<Named>,
    /// Responder's endpoint when local.
    pub dst_endpoint: Option<Named>,
    /// `new`, `syn-sent`, `syn-recv`, `established`, `closing`, `closed`.
    pub state: String,
    /// In the table that never evicts.
    pub established: bool,
    /// Flags by name.
    pub flags: Vec<String>,
    /// Seconds since the first packet.
    pub age_s: u64,
    /// Seconds since the last packet.
    pub idle_s: u64,
    /// Seconds until it is swept when nothing comes.
    pub expires_s: u64,
    /// Packets: original direction, reply.
    pub packets: [u64; 2],
    /// Bytes: original direction, reply.
    pub bytes: [u64; 2],
    /// The originator's egress policy.
    pub egress: Option<CtJudgement>,
    /// The responder's ingress policy.
    pub ingress: Option<CtJudgement>,
}

/// A decision kept with a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CtJudgement {
    /// Verdict.
    pub verdict: Verdict,
    /// Rule.
    pub rule: Named,
    /// Policy revision it was decided under.
    pub revision: u32,
    /// ipcache generation it was decided under.
    pub generation: u32,
}

/// Answer of `DELETE /v1/conntrack`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConntrackFlushed {
    /// Entries removed.
    pub removed: u64,
}
