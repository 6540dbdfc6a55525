//! What programs tell user space through the ring buffer, and the steps that a trace names.

use crate::Addr;

/// One record of `events`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Event {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// VPC.
    pub vpc: u32,
    /// Endpoint whose hook or policy it was, 0 = none known.
    pub endpoint: u32,
    /// Endpoint at the other side when it is local, else 0.
    pub peer_endpoint: u32,
    /// Identity of the source.
    pub src_identity: u32,
    /// Identity of the destination.
    pub dst_identity: u32,
    /// Rule that decided, 0 = default or none.
    pub rule: u32,
    /// Packet length in bytes.
    pub len: u32,
    /// Events refused by the rate limit for this (endpoint, reason) so far.
    pub lost: u32,
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// Source port, big endian (ICMP: type, code).
    pub sport: [u8; 2],
    /// Destination port, big endian (ICMP echo: identifier).
    pub dport: [u8; 2],
    /// [`event_kind`].
    pub kind: u8,
    /// [`crate::DropReason`] number for drops, else 0.
    pub reason: u8,
    /// [`crate::verdict`].
    pub verdict: u8,
    /// [`crate::direction`] of the deciding policy.
    pub direction: u8,
    /// IP protocol number.
    pub protocol: u8,
    /// 4 or 6, 0 = not IP.
    pub family: u8,
    /// TCP flags byte.
    pub tcp_flags: u8,
    /// [`hook`].
    pub hook: u8,
    /// Zero.
    pub pad: [u8; 4],
}
crate::assert_layout!(Event, 88);

/// Kinds of [`Event`].
pub mod event_kind {
    /// A policy decided on a new connection (or decided anew).
    pub const VERDICT: u8 = 1;
    /// A packet was dropped.
    pub const DROP: u8 = 2;
}

/// Where a program runs.
pub mod hook {
    /// TCX ingress of an endpoint's host-side device.
    pub const FROM_ENDPOINT: u8 = 1;
    /// TCX egress of an endpoint's host-side device.
    pub const TO_ENDPOINT: u8 = 2;
    /// TCX ingress of the VXLAN device.
    pub const FROM_OVERLAY: u8 = 3;
    /// TCX egress of the VXLAN device.
    pub const TO_OVERLAY: u8 = 4;
    /// TCX ingress of an uplink.
    pub const FROM_UPLINK: u8 = 5;
    /// TCX egress of an uplink.
    pub const TO_UPLINK: u8 = 6;
    /// `connect` of an IPv4 socket (cgroup v2).
    pub const CONNECT4: u8 = 7;
    /// `connect` of an IPv6 socket.
    pub const CONNECT6: u8 = 8;
    /// `sendmsg` with an address, IPv4.
    pub const SENDMSG4: u8 = 9;
    /// `sendmsg` with an address, IPv6.
    pub const SENDMSG6: u8 = 10;
    /// `recvmsg` that asks for the sender, IPv4.
    pub const RECVMSG4: u8 = 11;
    /// `recvmsg` that asks for the sender, IPv6.
    pub const RECVMSG6: u8 = 12;
    /// `getpeername`, IPv4.
    pub const GETPEERNAME4: u8 = 13;
    /// `getpeername`, IPv6.
    pub const GETPEERNAME6: u8 = 14;
}

/// Marks on `skb->mark`; the kernel scrubs them when a packet changes its namespace.
pub mod mark {
    /// Bits that are flowloom's.
    pub const MASK: u32 = 0xffff_0000;
    /// An answer made by a program at `to_endpoint`, on its way back through `from_endpoint`.
    pub const ANSWER: u32 = 0xf10e_0000;
    /// Judged in both directions already (`forwarding: stack` local delivery).
    pub const JUDGED: u32 = 0xf10d_0000;
    /// Leaves through the tunnel: nothing of it concerns an uplink's programs.
    pub const TUNNELLED: u32 = 0xf10f_0000;
}

/// A step of a trace: `kind` names it, `a` and `b` are its numbers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TraceStep {
    /// [`trace_step`].
    pub kind: u32,
    /// First number.
    pub a: u32,
    /// Second number.
    pub b: u32,
    /// Third number.
    pub c: u32,
}
crate::assert_layout!(TraceStep, 16);

/// Most steps of one trace.
pub const MAX_TRACE_STEPS: usize = 32;

/// Value of the trace map (array of one, only in the dry-run load).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TraceLog {
    /// Steps written (may exceed [`MAX_TRACE_STEPS`]; later ones are lost).
    pub count: u32,
    /// Zero.
    pub pad: u32,
    /// Steps in order.
    pub steps: [TraceStep; MAX_TRACE_STEPS],
}
crate::assert_layout!(TraceLog, 8 + 16 * MAX_TRACE_STEPS);

/// Kinds of [`TraceStep`] and what their numbers mean.
pub mod trace_step {
    /// Device lookup: a = ifindex, b = endpoint id (0 = miss).
    pub const DEVICE: u32 = 1;
    /// Source check: a = endpoint that owns the source.
    pub const SOURCE: u32 = 2;
    /// Conntrack lookup: a = 0 miss, 1 half open, 2 established; b = 1 for a reply.
    pub const CONNTRACK: u32 = 3;
    /// Peer lookup: a = identity, b = peer flags.
    pub const PEER: u32 = 4;
    /// Egress decision: a = verdict, b = rule, c = identity judged.
    pub const EGRESS: u32 = 5;
    /// Ingress decision: a = verdict, b = rule, c = identity judged.
    pub const INGRESS: u32 = 6;
    /// Destination: a = local endpoint id.
    pub const LOCAL: u32 = 7;
    /// Encapsulation: a = VNI, b = last four bytes of the tunnel endpoint, read as a big-endian number.
    pub const ENCAP: u32 = 8;
    /// Handed to the host's stack.
    pub const STACK: u32 = 9;
    /// Dropped: a = reason.
    pub const DROP: u32 = 10;
    /// Answered: a = 1 ARP or ND, 2 echo, 3 RST, 4 ICMP error; for an error b = type << 8 | code, c = MTU told.
    pub const ANSWER: u32 = 11;
    /// Delivered: a = ifindex, b = delivery method.
    pub const DELIVER: u32 = 12;
    /// Conntrack decision was current: a = direction, b = rule.
    pub const CURRENT: u32 = 13;
    /// A service's backend: a = service, b = list, c = last four bytes of the backend's address, read as a big-endian number.
    pub const SERVICE: u32 = 14;
}
