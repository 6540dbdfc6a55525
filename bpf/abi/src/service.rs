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
    /// Senders must be in `service_ranges`.
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

/// Key of `service_ranges` (LPM, data size 20): who may use a service with [`service_flags::RANGES`].
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
