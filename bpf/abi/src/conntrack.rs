//! Connection tracking: one entry per connection, found from both directions by an ordered tuple.

use crate::Addr;

/// Key of `conntrack` and `conntrack_new`.
///
/// The tuple is ordered: `(lo, lo_port) <= (hi, hi_port)` bytewise, so a packet and its reply build the same key and one lookup serves both directions.
/// ICMP echo uses the identifier as both ports. Protocols without ports use 0.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct CtKey {
    /// VPC.
    pub vpc: u32,
    /// Lower address.
    pub lo: Addr,
    /// Higher address.
    pub hi: Addr,
    /// Port of `lo`, big endian.
    pub lo_port: [u8; 2],
    /// Port of `hi`, big endian.
    pub hi_port: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}
crate::assert_layout!(CtKey, 44);

/// One direction's decision; zero revision = never decided.
///
/// Current when revision **and** slot equal the endpoint's and the generation equals the VPC's. The slot is compared too because an array
/// write is not atomic: a program that catches it half way may pair the new revision with the old slot, and that pair must never become current.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct CtDecision {
    /// Policy revision of the endpoint it was decided under. Never 0 for a decision.
    pub revision: u32,
    /// ipcache generation of the VPC it was decided under.
    pub generation: u32,
    /// Policy slot it was read from.
    pub slot: u32,
    /// Rule that decided, 0 = default.
    pub rule: u32,
    /// [`crate::verdict`], 0 = never decided.
    pub verdict: u8,
    /// [`crate::policy_flags`].
    pub flags: u8,
    /// Zero.
    pub pad: [u8; 2],
}
crate::assert_layout!(CtDecision, 20);

/// Value of `conntrack` and `conntrack_new`. Changed through the pointer only.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct CtEntry {
    /// Bytes and packets, original direction then reply.
    pub packets: [u64; 2],
    /// Bytes, original direction then reply.
    pub bytes: [u64; 2],
    /// Tunnel endpoint of a remote side, cached while the generation is current; zero = none.
    pub tunnel: Addr,
    /// Decisions: `[direction::EGRESS]` by the originator's endpoint, `[direction::INGRESS]` by the responder's.
    pub decision: [CtDecision; 2],
    /// Last packet, seconds of `CLOCK_MONOTONIC` (boot time excluded sleep).
    pub last_seen: u32,
    /// First packet, same clock.
    pub created: u32,
    /// Originator's endpoint id on this node, 0 = not local.
    pub orig_endpoint: u32,
    /// Responder's endpoint id on this node, 0 = not local.
    pub reply_endpoint: u32,
    /// Peer identity that egress judged (the responder's).
    pub reply_identity: u32,
    /// Peer identity that ingress judged (the originator's).
    pub orig_identity: u32,
    /// [`ct_flags`].
    pub flags: u16,
    /// [`ct_state`].
    pub state: u8,
    /// [`ct_routes`].
    pub routes: u8,
    /// [`crate::ServiceRecord::service`] that the originator asked for, 0 = it named the responder itself.
    pub rev_nat: u32,
    /// Address the originator meant before translation.
    pub nat_addr: Addr,
    /// Port it meant, big endian.
    pub nat_port: [u8; 2],
    /// 1 for a direction, original then reply, whose packets the tunnel's device takes out of the tunnel, never an uplink. Bytes of their own:
    /// a flag's would be written by both directions at once.
    pub by_device: [u8; 2],
    /// Zero.
    pub pad2: [u8; 4],
}
crate::assert_layout!(CtEntry, 144);

/// Flags of a [`CtEntry`].
pub mod ct_flags {
    /// The originator is the `lo` side of the key.
    pub const ORIG_IS_LO: u16 = 1;
    /// A reply was seen.
    pub const SEEN_REPLY: u16 = 2;
    /// FIN seen from the originator.
    pub const FIN_ORIG: u16 = 4;
    /// FIN seen from the responder.
    pub const FIN_REPLY: u16 = 8;
    /// RST seen.
    pub const RST: u16 = 16;
    /// Picked up mid-stream (no SYN seen).
    pub const MIDSTREAM: u16 = 32;
    /// Counted against the quotas.
    pub const COUNTED: u16 = 64;
    /// The originator is this host's stack.
    pub const FROM_HOST: u16 = 128;
    /// Rejected once already: the answer went out.
    pub const REJECTED: u16 = 256;
    /// In `conntrack_new`: the connection is in `conntrack` now, and this entry takes it back when it ends. By itself it stands for nothing.
    pub const MOVED: u16 = 512;
}

/// Which destinations a [`CtEntry`] knows: while the sender's decision is current, packets of that direction go to the other side's endpoint on
/// this node, or, when that is 0, through `tunnel`. A new decision forgets both.
pub mod ct_routes {
    /// Of the original direction.
    pub const ORIGINAL: u8 = 1;
    /// Of the reply direction.
    pub const REPLY: u8 = 2;
}

/// States of a [`CtEntry`]; each has a timeout in [`ct_timeout`].
pub mod ct_state {
    /// First packet seen (UDP, ICMP, other).
    pub const NEW: u8 = 1;
    /// SYN seen.
    pub const SYN_SENT: u8 = 2;
    /// SYN and SYN-ACK seen.
    pub const SYN_RECV: u8 = 3;
    /// Both directions seen.
    pub const ESTABLISHED: u8 = 4;
    /// One FIN seen.
    pub const CLOSING: u8 = 5;
    /// Both FINs, or RST.
    pub const CLOSED: u8 = 6;
}

/// Timeouts in seconds. Sources: RFC 5382 (TCP: at least 2 h 4 min established, 4 min transitory), RFC 4787 (UDP: at least 2 min), RFC 5508 (ICMP: at least 60 s).
pub mod ct_timeout {
    /// TCP, half open.
    pub const TCP_SYN: u32 = 60;
    /// TCP, established.
    pub const TCP_ESTABLISHED: u32 = 8000;
    /// TCP, one side closed.
    pub const TCP_CLOSING: u32 = 240;
    /// TCP, both closed or reset.
    pub const TCP_CLOSED: u32 = 10;
    /// UDP, one direction.
    pub const UDP_NEW: u32 = 30;
    /// UDP, both directions, after [`STREAM_AGE`].
    pub const UDP_STREAM: u32 = 180;
    /// Age at which whatever is not TCP and has been answered becomes an established connection with its next packet.
    pub const STREAM_AGE: u32 = 2;
    /// ICMP echo.
    pub const ICMP: u32 = 60;
    /// Anything else.
    pub const OTHER: u32 = 120;
}

/// Key of `fragments`: what all fragments of a datagram share (RFC 791, RFC 8200).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FragKey {
    /// VPC.
    pub vpc: u32,
    /// Source.
    pub src: Addr,
    /// Destination.
    pub dst: Addr,
    /// Identification, zero-extended for IPv4.
    pub id: u32,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}
crate::assert_layout!(FragKey, 44);

/// Value of `fragments`: the ports the first fragment showed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FragValue {
    /// Source port, big endian.
    pub sport: [u8; 2],
    /// Destination port, big endian.
    pub dport: [u8; 2],
    /// Seconds, as in [`CtEntry::last_seen`].
    pub last_seen: u32,
}
crate::assert_layout!(FragValue, 8);

/// Key of `quotas`: established connections counted per endpoint (`endpoint != 0`) or per VPC (`endpoint == 0`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct QuotaKey {
    /// VPC.
    pub vpc: u32,
    /// Endpoint id or 0.
    pub endpoint: u32,
}
crate::assert_layout!(QuotaKey, 8);

/// Value of `quotas`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct QuotaValue {
    /// Entries in `conntrack` now; incremented by programs, decremented by whoever removes an entry: a program when it ends, else the sweeper.
    pub used: u32,
    /// Most allowed; 0 = no limit.
    pub limit: u32,
}
crate::assert_layout!(QuotaValue, 8);
