//! Events and drops.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Direction, Named, Verdict};

/// Query of `GET /v1/events`; every field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventFilter {
    /// VPC name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// At either side: a [`crate::Side`]. A Service stands for its addresses and for the backends it has when the question is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// As `endpoint`, at the sender's side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// As `endpoint`, at the receiver's side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// `allow`, `drop` or `reject`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// CamelCase drop reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Keep the stream open; otherwise answer what the ring holds and end.
    #[serde(default)]
    pub follow: bool,
    /// Newest events of the ring to begin with (default: all without `follow`, none with it).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<u32>,
}

/// One line of the event stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum StreamItem {
    /// An event.
    Event(Box<Event>),
    /// Events this stream did not get because it reads too slowly.
    Lost {
        /// How many.
        count: u64,
    },
}

/// What a program told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts events of this agent's life.
    pub seq: u64,
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Verdict or drop.
    pub kind: EventKind,
    /// What happened to the packet.
    pub verdict: Verdict,
    /// CamelCase drop reason.
    pub reason: Option<String>,
    /// VPC.
    pub vpc: Named,
    /// Endpoint whose hook or policy it was.
    pub endpoint: Option<Named>,
    /// Endpoint at the other side when it is local.
    pub peer_endpoint: Option<Named>,
    /// Direction of the deciding policy.
    pub direction: Direction,
    /// `from_endpoint` ...
    pub hook: String,
    /// 4, 6 or 0 (not IP).
    pub family: u8,
    /// `tcp` ...
    pub protocol: String,
    /// Source.
    pub src: IpAddr,
    /// Source port; 0 for ICMP.
    pub src_port: u16,
    /// Name of the endpoint with the source address, this node's or another's.
    pub src_endpoint: Option<Named>,
    /// Identity of the source.
    pub src_identity: u32,
    /// Destination.
    pub dst: IpAddr,
    /// Destination port; 0 for ICMP.
    pub dst_port: u16,
    /// Name of the endpoint with the destination address, this node's or another's.
    pub dst_endpoint: Option<Named>,
    /// Identity of the destination.
    pub dst_identity: u32,
    /// ICMP type and code.
    pub icmp: Option<(u8, u8)>,
    /// TCP flags as letters (`S`, `SA`, ...).
    pub tcp_flags: Option<String>,
    /// Rule that decided (`vpc/group/rule`), `default` with number 0 when the default did.
    pub rule: Option<Named>,
    /// Packet length in bytes.
    pub len: u32,
    /// Events of this endpoint and reason that the rate limit refused so far.
    pub rate_limited: u32,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A policy decided on a new connection, or decided anew.
    Verdict,
    /// A packet was dropped.
    Drop,
}

/// Query of `GET /v1/drops`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DropFilter {
    /// VPC name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// Endpoint name (needs `vpc`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// CamelCase reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Answer of `GET /v1/drops`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropList {
    /// Counters that are not zero.
    pub drops: Vec<DropCount>,
}

/// Packets dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropCount {
    /// VPC of the endpoint; absent when no endpoint is known.
    pub vpc: Option<Named>,
    /// Endpoint; absent when none is known.
    pub endpoint: Option<Named>,
    /// Direction.
    pub direction: Direction,
    /// CamelCase reason and its number.
    pub reason: Named,
    /// One line for people.
    pub text: String,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
