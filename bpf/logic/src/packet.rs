//! What the stages of one packet tell each other: per-CPU scratch in the kernel.

use core::mem::{offset_of, size_of};

use flowloom_bpf_abi::{
    Addr, AddressKey, CtDecision, CtEntry, CtKey, Event, FlowKey, FlowValue, FragKey, PeerKey, PolicyKey,
};

use crate::frame::{TunnelKey, Verdict};
use crate::service::Query;
use crate::tables::Tables;

/// One packet's state. [`Packet::begin`] clears what is before `buf`; of the rest, what a stage has not filled is stale from the packet before.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Packet {
    pub(crate) src: Addr,
    pub(crate) dst: Addr,
    pub(crate) flags: u32,
    pub(crate) vpc: u32,
    /// Endpoint whose source side this hook judges, 0 = none.
    pub(crate) src_ep: u32,
    /// Endpoint whose destination side this hook judges, 0 = none.
    pub(crate) dst_ep: u32,
    pub(crate) src_identity: u32,
    pub(crate) dst_identity: u32,
    /// Endpoint that a drop is counted for.
    pub(crate) blame: u32,
    /// Rule of the last decision.
    pub(crate) rule: u32,
    pub(crate) sport: [u8; 2],
    pub(crate) dport: [u8; 2],
    /// ICMP type and code that policy sees.
    pub(crate) icmp: [u8; 2],
    pub(crate) family: u8,
    pub(crate) protocol: u8,
    pub(crate) tcp_flags: u8,
    /// Bytes of the transport header.
    pub(crate) l4_len: u8,
    /// Protocol of the connection's tuple.
    pub(crate) tuple_protocol: u8,
    pub(crate) route: u8,
    /// Last verdict of a policy.
    pub(crate) policy_verdict: u8,
    /// Flags of the last decision.
    pub(crate) policy_flags: u8,
    pad: [u8; 2],
    // What follows is not cleared.
    /// Bytes of the frame, on their way to the fields.
    pub(crate) buf: Buffer,
    /// Source of the connection's tuple: `src`, or the address that an ICMP error's inner packet went to.
    pub(crate) tuple_src: Addr,
    /// Tunnel endpoint of the destination.
    pub(crate) tunnel: Addr,
    pub(crate) key: CtKey,
    pub(crate) policy_key: PolicyKey,
    pub(crate) address_key: AddressKey,
    pub(crate) peer_key: PeerKey,
    pub(crate) frag_key: FragKey,
    pub(crate) tunnel_key: TunnelKey,
    pub(crate) decision: CtDecision,
    pub(crate) entry: CtEntry,
    pub(crate) event: Event,
    /// The service's address: before the destination was translated, or what the source becomes.
    pub(crate) nat_addr: Addr,
    pub(crate) flow_key: FlowKey,
    pub(crate) flow: FlowValue,
    pub(crate) query: Query,
    pub(crate) nat_service: u32,
    /// Offset of the transport header that an ICMP error quotes.
    pub(crate) quoted_l4: u32,
    pub(crate) verdict: i32,
    pub(crate) vpc_flags: u32,
    pub(crate) vni: u32,
    pub(crate) generation: u32,
    /// Seconds.
    pub(crate) now: u32,
    /// Offset of the transport header.
    pub(crate) l4: u32,
    /// IP packet's length by its own header.
    pub(crate) ip_len: u32,
    /// Datagram identification.
    pub(crate) ident: u32,
    pub(crate) tcp_seq: u32,
    pub(crate) tcp_ack: u32,
    /// Largest IP packet where this one was too large.
    pub(crate) mtu: u32,
    /// `ifindex` of the hook's device.
    pub(crate) ifindex: u32,
    pub(crate) eth_dst: [u8; 6],
    pub(crate) eth_src: [u8; 6],
    pub(crate) ethertype: [u8; 2],
    pub(crate) ttl: u8,
    pub(crate) hook: u8,
    /// Reason of a route that leads nowhere.
    pub(crate) route_drop: u8,
    /// Direction that a drop is counted for.
    pub(crate) blame_direction: u8,
    /// Port of `nat_addr`.
    pub(crate) nat_port: [u8; 2],
    /// Client's own port where [`flag::SNAT`] has changed `sport`.
    pub(crate) client_port: [u8; 2],
    pad2: [u8; 2],
    /// Identity of the other side, while a decision is made anew.
    pub(crate) peer: u32,
    /// What the hook's last stage said.
    pub(crate) step: u32,
    /// Whether a connection's first packet was decided by a rule that keeps state.
    pub(crate) keep: u32,
    pad3: [u8; 4],
}

/// Scratch for headers: filled by the kernel's copy, so it is not cleared first.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct Buffer([u8; 40]);

impl Default for Buffer {
    fn default() -> Self {
        Self([0; 40])
    }
}

impl Buffer {
    /// The first bytes.
    #[inline(always)]
    pub(crate) fn first<const N: usize>(&mut self) -> &mut [u8; N] {
        const { assert!(N <= 40) };
        match self.0.first_chunk_mut() {
            Some(b) => b,
            // Never: the size is checked when this is compiled.
            None => unreachable!(),
        }
    }
}

/// Values that start as zero bytes.
///
/// Clearing is the table's business: this target's compiler makes a loop over bytes of every plain assignment of zeros.
pub trait Zero: Copy + Default {
    /// How many bytes of the value, from its start, are cleared; the rest need not be.
    const CLEARED: usize = size_of::<Self>();
}
impl Zero for CtEntry {}
impl Zero for Packet {
    const CLEARED: usize = offset_of!(Self, buf);
}

/// Flags of a [`Packet`].
pub(crate) mod flag {
    /// First fragment.
    pub(crate) const FRAG_FIRST: u32 = 1;
    /// Later fragment: no transport header.
    pub(crate) const FRAG_LATER: u32 = 2;
    /// An ICMP error that quotes a packet.
    pub(crate) const ICMP_ERROR: u32 = 4;
    /// No connection is kept for it.
    pub(crate) const UNTRACKED: u32 = 8;
    /// Made by this host.
    pub(crate) const FROM_HOST: u32 = 16;
    /// Echo request.
    pub(crate) const ECHO_REQUEST: u32 = 32;
    /// Echo reply.
    pub(crate) const ECHO_REPLY: u32 = 64;
    /// IPv4 "don't fragment", or IPv6.
    pub(crate) const DONT_FRAGMENT: u32 = 128;
    /// The packet's source is the `lo` side of the key.
    pub(crate) const SRC_IS_LO: u32 = 256;
    /// Neighbour or router discovery.
    pub(crate) const DISCOVERY: u32 = 512;
    /// The packet travels with the originator's direction.
    pub(crate) const ORIGINAL: u32 = 1024;
    /// Found half open.
    pub(crate) const HALF_OPEN: u32 = 2048;
    /// Hook that forwards (finds the destination itself).
    pub(crate) const FORWARDS: u32 = 4096;
    /// The other side counts the packet.
    pub(crate) const COUNTED: u32 = 8192;
    /// `forwarding: stack`.
    pub(crate) const BY_STACK: u32 = 16_384;
    /// Nobody has the address that [`crate::route::identity_of`] was asked for last.
    pub(crate) const UNASSIGNED: u32 = 32_768;
    /// The destination was a service's and is a backend's now.
    pub(crate) const NAT_DST: u32 = 65_536;
    /// The source is a backend and becomes the service's where the client is.
    pub(crate) const NAT_SRC: u32 = 131_072;
    /// The flow to the service is not remembered yet.
    pub(crate) const NEW_FLOW: u32 = 262_144;
    /// Goes to a client beyond an uplink.
    pub(crate) const OUT: u32 = 1_048_576;
    /// The source becomes this node's.
    pub(crate) const SNAT: u32 = 2_097_152;
    /// Found half open, but it stands for nothing any more.
    pub(crate) const GONE: u32 = 524_288;
}

/// Where a packet goes.
pub(crate) mod to {
    /// Unknown yet.
    pub(crate) const NONE: u8 = 0;
    /// A local endpoint.
    pub(crate) const LOCAL: u8 = 1;
    /// This host's stack, for itself.
    pub(crate) const HOST: u8 = 2;
    /// A gateway address that programs answer for.
    pub(crate) const GATEWAY: u8 = 3;
    /// Another node by tunnel.
    pub(crate) const TUNNEL: u8 = 4;
    /// Another node by the uplink.
    pub(crate) const DIRECT: u8 = 5;
    /// The stack, to be routed.
    pub(crate) const STACK: u8 = 6;
    /// Nowhere: `route_drop` says why.
    pub(crate) const NOWHERE: u8 = 7;
}

impl Packet {
    /// Forgets the packet before.
    #[inline(always)]
    pub(crate) fn begin<T: Tables>(&mut self, t: T, hook: u8, direction: u8) {
        t.clear(self);
        self.verdict = Verdict::DROP.0;
        self.hook = hook;
        self.blame_direction = direction;
    }

    #[inline(always)]
    pub(crate) const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}
