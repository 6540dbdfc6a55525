//! Traces: the programs in dry run over the live maps.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Direction, Named, ServiceSide, Verdict};

/// Body of `POST /v1/trace`: a packet to imagine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceRequest {
    /// VPC of a side that says none and has no other side that does; empty: the default VPC.
    #[serde(default)]
    pub vpc: String,
    /// Sender, a [`crate::Side`]: an endpoint or Pod of this node or, with `direction: ingress`, also an address. A Service stands for its
    /// first backend in use.
    pub from: String,
    /// Receiver, a [`crate::Side`]: an endpoint, a Pod, a Service or an address.
    pub to: String,
    /// `tcp`, `udp`, `icmp` or `sctp`.
    pub protocol: String,
    /// Source port (default 40000).
    #[serde(default)]
    pub src_port: Option<u16>,
    /// Destination port; needed for tcp, udp, sctp, unless a Service has one port of the protocol only.
    #[serde(default)]
    pub port: Option<u16>,
    /// TCP flags as letters (default `S`).
    #[serde(default)]
    pub tcp_flags: Option<String>,
    /// 4 or 6, for endpoints with both; 4 first when absent.
    #[serde(default)]
    pub family: Option<u8>,
    /// Bytes of payload (default 0, at most 8192).
    #[serde(default)]
    pub payload: Option<u16>,
    /// Hook to enter: egress = what the workload sends (default), ingress = what reaches it through the stack.
    #[serde(default)]
    pub direction: Option<Direction>,
}

/// Answer of `POST /v1/trace`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceReport {
    /// `delivered`, `encapsulated`, `stack`, `answered` or `dropped`.
    pub outcome: String,
    /// Verdict as an observer would show it.
    pub verdict: Verdict,
    /// CamelCase drop reason.
    pub reason: Option<String>,
    /// One sentence.
    pub summary: String,
    /// The packet.
    pub packet: String,
    /// Source address chosen.
    pub src: IpAddr,
    /// Destination address chosen.
    pub dst: IpAddr,
    /// Steps in order.
    pub steps: Vec<TraceStep>,
    /// Nanoseconds of one run.
    pub duration_ns: u32,
    /// The Service that was sent to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceSide>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStep {
    /// `device`, `source`, `conntrack`, `peer`, `egress`, `ingress`, `local`, `encap`, `stack`, `drop`, `answer`, `deliver`, `current`.
    pub step: String,
    /// One line with names.
    pub text: String,
    /// Verdict of a decision step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Rule of a decision step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<Named>,
    /// Raw numbers as the program wrote them.
    pub numbers: [u32; 3],
}
