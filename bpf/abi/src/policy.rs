//! Policy entries: slot -> inner LPM of (identity, protocol, port prefix).

/// Identity numbers with a fixed meaning; user identities start at [`identity::FIRST_USER`].
pub mod identity {
    /// Any peer (in policy keys), none (in the ipcache).
    pub const ANY: u32 = 0;
    /// This node and the VPC's gateway addresses on it.
    pub const HOST: u32 = 1;
    /// Outside of the VPC.
    pub const WORLD: u32 = 2;
    /// Outside, IPv4.
    pub const WORLD_V4: u32 = 3;
    /// Outside, IPv6.
    pub const WORLD_V6: u32 = 4;
    /// Another node.
    pub const REMOTE_NODE: u32 = 5;
    /// Inside the VPC, known to no source.
    pub const UNMANAGED: u32 = 6;
    /// The network's own health probes.
    pub const HEALTH: u32 = 7;
    /// Ingress proxies.
    pub const INGRESS: u32 = 8;
    /// First number for identities made of labels and CIDRs.
    pub const FIRST_USER: u32 = 256;
}

/// Key of an inner policy map (`BPF_MAP_TYPE_LPM_TRIE`, data size 8).
///
/// Prefix bits: 32 = identity, any protocol; 40 = that protocol, any port; 40 + n = port prefix of n bits.
/// ICMP uses `port` as type << 8 | code: 48 = that type, 56 = type and code.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PolicyKey {
    /// Prefix length in bits, 32..=56 for entries, 56 for lookups.
    pub prefixlen: u32,
    /// Peer identity; compared as bytes, so any fixed byte order does (host order here).
    pub identity: u32,
    /// IP protocol number. ICMPv6 is looked up as 58, ICMP as 1.
    pub protocol: u8,
    /// Destination port (the responder's), big endian because prefixes are matched.
    pub port: [u8; 2],
    /// Zero.
    pub pad: u8,
}
crate::assert_layout!(PolicyKey, 12);

impl PolicyKey {
    /// Bits of the identity.
    pub const IDENTITY_BITS: u32 = 32;
    /// Bits of identity and protocol.
    pub const PROTOCOL_BITS: u32 = 40;
    /// All bits.
    pub const FULL_BITS: u32 = 56;
}

/// Value of an inner policy map.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PolicyValue {
    /// Total order of rules: the higher one decides (see `flowloom-compiler`).
    pub precedence: u32,
    /// Number of the rule, node-local; 0 = the direction's default.
    pub rule: u32,
    /// One of [`crate::verdict`].
    pub verdict: u8,
    /// [`policy_flags`].
    pub flags: u8,
    /// Zero.
    pub pad: [u8; 2],
}
crate::assert_layout!(PolicyValue, 12);

/// Flags of a [`PolicyValue`] and of a conntrack decision.
pub mod policy_flags {
    /// Record every new connection that this entry decides.
    pub const LOG: u8 = 1;
    /// Stateless: no conntrack decision is kept; replies are judged on their own.
    pub const STATELESS: u8 = 2;
}

/// Slot number that no map holds: a lookup misses and the packet is dropped (`NotReady`).
pub const SLOT_NONE: u32 = 0;
/// Inner maps are created with at least this many entries, and with twice what they need.
pub const POLICY_MIN_ENTRIES: u32 = 64;
