//! Services: (VPC, address, protocol, port) -> an immutable list of backends.

use crate::Addr;

/// Where a packet or socket stands that asks for a service.
pub mod service_scope {
    /// A workload, or this host.
    pub const INSIDE: u8 = 0;
    /// Beyond an uplink.
    pub const OUTSIDE: u8 = 1;
}

/// Key of `services`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ServiceKey {
    /// VPC.
    pub vpc: u32,
    /// Address.
    pub addr: Addr,
    /// Port, big endian.
    pub port: [u8; 2],
    /// IP protocol number; 0 with port 0: the address belongs to services only (anything else sent to it is rejected, never routed).
    pub protocol: u8,
    /// [`service_scope`].
    pub scope: u8,
}
crate::assert_layout!(ServiceKey, 24);

/// Value of `services`. One write moves new connections from one list to another.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ServiceRecord {
    /// Number of the service's port on this node, for affinity and names; never 0.
    pub service: u32,
    /// Number of its list of backends; never handed out twice while an entry names it. 0 = no backend.
    pub list: u32,
    /// Backends in the list, index 0..count.
    pub count: u32,
    /// Seconds of affinity, 0 = none.
    pub affinity: u32,
    /// [`service_flags`].
    pub flags: u32,
    /// Zero.
    pub pad: u32,
}
crate::assert_layout!(ServiceRecord, 24);

/// Flags of a [`ServiceRecord`].
pub mod service_flags {
    /// Senders must be in `srv_ranges`.
    pub const RANGES: u32 = 1;
    /// Backends are local: the sender's address stays as it is.
    pub const KEEP_SOURCE: u32 = 2;
    /// No backend: silence instead of an answer (external traffic policy Local on a node without one).
    pub const SILENT: u32 = 4;
    /// A port of this node's own addresses.
    pub const NODE_PORT: u32 = 8;
}

/// Key of `backends`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BackendKey {
    /// List.
    pub list: u32,
    /// Place in it.
    pub index: u32,
}
crate::assert_layout!(BackendKey, 8);

/// Value of `backends`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BackendRecord {
    /// Address.
    pub addr: Addr,
    /// Port, big endian.
    pub port: [u8; 2],
    /// [`backend_flags`].
    pub flags: u16,
    /// Zero.
    pub pad: u32,
}
crate::assert_layout!(BackendRecord, 24);

/// Flags of a [`BackendRecord`].
pub mod backend_flags {
    /// Runs on this node.
    pub const LOCAL: u16 = 1;
}

/// Key of `affinity`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct AffinityKey {
    /// [`ServiceRecord::service`].
    pub service: u32,
    /// Zero.
    pub pad: u32,
    /// Client's address; of a socket of this host or a workload whose address is not known: its network namespace's cookie, zero-extended.
    pub client: Addr,
}
crate::assert_layout!(AffinityKey, 24);

/// Value of `affinity`. Good while the backend is a member of the list in force (`members`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct AffinityValue {
    /// Address.
    pub addr: Addr,
    /// Port, big endian.
    pub port: [u8; 2],
    /// Zero.
    pub pad: [u8; 2],
    /// Second of the last new connection.
    pub last_used: u32,
}
crate::assert_layout!(AffinityValue, 24);

/// Key of `members`: is this backend in this list?
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberKey {
    /// List.
    pub list: u32,
    /// Address.
    pub addr: Addr,
    /// Port, big endian.
    pub port: [u8; 2],
    /// Zero.
    pub pad: [u8; 2],
}
crate::assert_layout!(MemberKey, 24);

/// Value of `members`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberRecord {
    /// [`backend_flags`].
    pub flags: u32,
}
crate::assert_layout!(MemberRecord, 4);

/// Key of `srv_ranges` (LPM, data size 20): who may use a service with [`service_flags::RANGES`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct RangeKey {
    /// 32 + prefix bits of the 128-bit address.
    pub prefixlen: u32,
    /// [`ServiceRecord::service`]; compared as bytes.
    pub service: u32,
    /// Masked address.
    pub addr: Addr,
}
crate::assert_layout!(RangeKey, 24);

impl RangeKey {
    /// Bits in front of the address.
    pub const SERVICE_BITS: u32 = 32;
    /// Prefix length of a lookup.
    pub const FULL_BITS: u32 = 160;
}

/// Key of `netns` is the cookie of a network namespace (u64); the value says whose sockets it holds. A namespace without one is left alone.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct NetnsRecord {
    /// Endpoint of the namespace: its record says VPC and addresses. 0 = this host, in the default VPC.
    pub endpoint: u32,
    /// Zero for now.
    pub flags: u32,
}
crate::assert_layout!(NetnsRecord, 8);

/// Key of `sockets`: what a socket was told about an address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SocketKey {
    /// Cookie of the socket.
    pub cookie: u64,
    /// Address: the backend's ([`socket_kind::REVERSE`]) or the service's ([`socket_kind::FORWARD`]).
    pub addr: Addr,
    /// Port of it, big endian.
    pub port: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
    /// [`socket_kind`].
    pub kind: u8,
    /// Zero.
    pub pad: u32,
}
crate::assert_layout!(SocketKey, 32);

/// Kinds of a [`SocketKey`].
pub mod socket_kind {
    /// Backend -> the service address that the program asked for.
    pub const REVERSE: u8 = 1;
    /// Service address -> backend: datagrams of an unconnected socket stay with one.
    pub const FORWARD: u8 = 2;
}

/// Value of `sockets`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SocketValue {
    /// The other address.
    pub addr: Addr,
    /// The other port, big endian.
    pub port: [u8; 2],
    /// Zero.
    pub pad: [u8; 2],
    /// [`ServiceRecord::service`].
    pub service: u32,
    /// Second of the last use.
    pub last_used: u32,
    /// Zero.
    pub pad2: u32,
}
crate::assert_layout!(SocketValue, 32);

/// Key of `srv_flows`: a flow to a service address as its client sees it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FlowKey {
    /// VPC.
    pub vpc: u32,
    /// Client's address.
    pub src: Addr,
    /// Service's address; of a [`flow_kind::HAIRPIN`] the gateway's.
    pub dst: Addr,
    /// Client's port, big endian; of a hairpin the backend's.
    pub sport: [u8; 2],
    /// Service's port, big endian; of a hairpin the client's.
    pub dport: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
    /// [`flow_kind`].
    pub kind: u8,
    /// Zero.
    pub pad: [u8; 2],
}
crate::assert_layout!(FlowKey, 44);

/// Kinds of a [`FlowKey`].
pub mod flow_kind {
    /// To a service.
    pub const FORWARD: u8 = 0;
    /// The answer of a client that is its own backend, sent to the gateway's address.
    pub const HAIRPIN: u8 = 1;
    /// To a service, from beyond an uplink.
    pub const OUTSIDE: u8 = 2;
    /// From a backend that is no local endpoint: `src` is the backend, `dst` the client, or this node in its place.
    pub const REPLY: u8 = 3;
}

/// Value of `srv_flows`. Changed through the pointer once it is there.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FlowValue {
    /// Backend's address; of a hairpin the service's; of a reply the client's.
    pub addr: Addr,
    /// Its port, big endian.
    pub port: [u8; 2],
    /// [`backend_flags`].
    pub flags: u16,
    /// [`ServiceRecord::service`].
    pub service: u32,
    /// Second of the last packet.
    pub last_seen: u32,
    /// Of a reply, the service's address; otherwise zero.
    pub service_addr: Addr,
    /// Of a reply, the service's port, big endian.
    pub service_port: [u8; 2],
    /// Of a flow from outside to another node, the port that this node speaks from in the client's place, big endian; 0 = the source stays.
    pub node_port: [u8; 2],
}
crate::assert_layout!(FlowValue, 48);

/// Ports that this node speaks from in the place of clients outside, inclusive: beyond what the kernel gives to sockets by itself
/// (`net.ipv4.ip_local_port_range`, 32768..=60999 unless changed).
pub const SNAT_PORTS: (u16, u16) = (61_000, 65_535);
