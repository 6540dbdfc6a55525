//! Everything that is not policy, conntrack or events. Map names are `flowloom_<name>` (15 characters at most in the kernel; see [`map_name`]).

use crate::Addr;

/// Names of the maps as the programs declare and pins use them.
pub mod map_name {
    /// ifindex -> [`super::DeviceRecord`] (hash).
    pub const DEVICES: &str = "fl_devices";
    /// endpoint id -> [`super::EndpointRecord`] (array).
    pub const ENDPOINTS: &str = "fl_endpoints";
    /// (vpc, ip) -> [`super::AddressRecord`] (hash).
    pub const ADDRESSES: &str = "fl_addresses";
    /// LPM (vpc, prefix) -> [`super::PeerRecord`].
    pub const IPCACHE: &str = "fl_ipcache";
    /// vpc -> [`super::VpcRecord`] (hash).
    pub const VPCS: &str = "fl_vpcs";
    /// slot -> inner LPM (hash of maps).
    pub const POLICY: &str = "fl_policy";
    /// Connections half open, and those that have ended (LRU hash).
    pub const CONNTRACK_NEW: &str = "fl_ct_new";
    /// Established connections (preallocated hash, never evicts).
    pub const CONNTRACK: &str = "fl_conntrack";
    /// Established connections counted (hash).
    pub const QUOTAS: &str = "fl_quotas";
    /// node address -> [`super::NodeRecord`] (hash).
    pub const NODES: &str = "fl_nodes";
    /// Fragments (LRU hash).
    pub const FRAGMENTS: &str = "fl_fragments";
    /// Packets and bytes per endpoint (per-CPU array, index = endpoint id).
    pub const TRAFFIC: &str = "fl_traffic";
    /// Drops per endpoint, direction and reason (per-CPU hash).
    pub const DROPS: &str = "fl_drops";
    /// Hits per rule (per-CPU LRU hash).
    pub const RULE_HITS: &str = "fl_rule_hits";
    /// Ring buffer of [`crate::Event`].
    pub const EVENTS: &str = "fl_events";
    /// Token buckets of events and answers (LRU hash).
    pub const RATES: &str = "fl_rates";
    /// One [`super::NodeConfig`] (array).
    pub const CONFIG: &str = "fl_config";
    /// (vpc, address, port, protocol, scope) -> [`crate::ServiceRecord`] (hash).
    pub const SERVICES: &str = "fl_services";
    /// (list, place) -> [`crate::BackendRecord`] (hash).
    pub const BACKENDS: &str = "fl_backends";
    /// (list, address, port) -> [`crate::MemberRecord`] (hash).
    pub const MEMBERS: &str = "fl_members";
    /// (service, client) -> [`crate::AffinityValue`] (LRU hash).
    pub const AFFINITY: &str = "fl_affinity";
    /// LPM (service, prefix) -> u32, who may use it.
    pub const SRV_RANGES: &str = "fl_srv_ranges";
    /// Translations of sockets (LRU hash).
    pub const SOCKETS: &str = "fl_sockets";
    /// Cookie of a network namespace -> [`crate::NetnsRecord`] (hash).
    pub const NETNS: &str = "fl_netns";
    /// Translations of packets (LRU hash).
    pub const SRV_FLOWS: &str = "fl_srv_flows";
    /// Per-CPU scratch, never pinned.
    pub const SCRATCH: &str = "fl_scratch";
    /// One [`crate::TraceLog`] (array), never pinned.
    pub const TRACE: &str = "fl_trace";

    /// Every map that is pinned and shared between loads, in no particular order.
    pub const PINNED: [&str; 25] = [
        DEVICES,
        ENDPOINTS,
        ADDRESSES,
        IPCACHE,
        VPCS,
        POLICY,
        CONNTRACK_NEW,
        CONNTRACK,
        QUOTAS,
        NODES,
        FRAGMENTS,
        TRAFFIC,
        DROPS,
        RULE_HITS,
        EVENTS,
        RATES,
        CONFIG,
        SERVICES,
        BACKENDS,
        MEMBERS,
        AFFINITY,
        SRV_RANGES,
        SOCKETS,
        NETNS,
        SRV_FLOWS,
    ];
}

/// Size of `endpoints` and `traffic`: local endpoints of one node, ids 1..=4095.
pub const MAX_ENDPOINTS: u32 = 4096;
/// Size of `devices`.
pub const MAX_DEVICES: u32 = 8192;
/// Size of `addresses` (two families per endpoint, some to spare).
pub const MAX_ADDRESSES: u32 = 16_384;
/// Size of `ipcache`.
pub const MAX_IPCACHE: u32 = 262_144;
/// Size of `vpcs`.
pub const MAX_VPCS: u32 = 4096;
/// Most distinct compiled policies on a node.
pub const MAX_SLOTS: u32 = 16_384;
/// Default size of `conntrack` (144 + 44 bytes each, preallocated); the loader may set another.
pub const MAX_CONNTRACK: u32 = 131_072;
/// Default size of `conntrack_new`.
pub const MAX_CONNTRACK_NEW: u32 = 32_768;
/// Size of `quotas`: every endpoint and every VPC.
pub const MAX_QUOTAS: u32 = 8192;
/// Size of `nodes`.
pub const MAX_NODES: u32 = 16_384;
/// Size of `fragments`.
pub const MAX_FRAGMENTS: u32 = 8192;
/// Size of `drops`.
pub const MAX_DROPS: u32 = 16_384;
/// Size of `rule_hits`.
pub const MAX_RULE_HITS: u32 = 16_384;
/// Size of `rates`.
pub const MAX_RATES: u32 = 8192;
/// Default size of `services`; the loader may set another. Memory is taken as entries come.
pub const MAX_SERVICES: u32 = 65_536;
/// Default size of `backends` and `members`.
pub const MAX_BACKENDS: u32 = 131_072;
/// Size of `affinity`.
pub const MAX_AFFINITY: u32 = 65_536;
/// Size of `srv_ranges`.
pub const MAX_SRV_RANGES: u32 = 65_536;
/// Size of `sockets`.
pub const MAX_SOCKETS: u32 = 65_536;
/// Size of `netns`.
pub const MAX_NETNS: u32 = 8192;
/// Default size of `srv_flows`.
pub const MAX_SRV_FLOWS: u32 = 65_536;
/// Bytes of the ring buffer of events.
pub const EVENTS_BYTES: u32 = 1 << 20;

/// Value of `devices`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct DeviceRecord {
    /// Endpoint id.
    pub endpoint: u32,
    /// Zero for now.
    pub flags: u32,
}
crate::assert_layout!(DeviceRecord, 8);

/// How a packet reaches a device (found at attach, kept in the endpoint's record).
pub mod delivery {
    /// veth whose other end is in another namespace: `bpf_redirect_peer`, from TCX ingress only.
    pub const PEER: u8 = 1;
    /// tap, macvtap, veth in the same namespace: `bpf_redirect` to the device's egress.
    pub const REDIRECT: u8 = 2;
    /// Through the host's stack (`forwarding: stack`).
    pub const STACK: u8 = 3;
}

/// Flags of an [`EndpointRecord`].
pub mod endpoint_flags {
    /// The record is in use; a zeroed record is no endpoint.
    pub const VALID: u16 = 1;
    /// `mac` is pinned: frames from another source MAC are spoofed.
    pub const MAC_PINNED: u16 = 2;
    /// The host's own traffic is judged like anyone's (`allow_localhost: policy`).
    pub const JUDGE_HOST: u16 = 4;
}

/// Value of `endpoints`: slots, revision and identity change in one write.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct EndpointRecord {
    /// VPC.
    pub vpc: u32,
    /// Identity of the endpoint's labels and covering CIDRs.
    pub identity: u32,
    /// Host-side device.
    pub ifindex: u32,
    /// Policy revision, never 0 when valid, never reused for this id.
    pub revision: u32,
    /// Slot of the egress policy.
    pub egress_slot: u32,
    /// Slot of the ingress policy.
    pub ingress_slot: u32,
    /// [`endpoint_flags`].
    pub flags: u16,
    /// [`delivery`].
    pub delivery: u8,
    /// IPv4 subnet prefix length of the endpoint's own subnet (0..=32).
    pub plen4: u8,
    /// Workload's MAC.
    pub mac: [u8; 6],
    /// MAC the workload sees as its gateway and every neighbour (the host-side device's).
    pub host_mac: [u8; 6],
    /// IPv6 subnet prefix length (0..=128).
    pub plen6: u8,
    /// Zero.
    pub pad: u8,
    /// Largest IP packet towards and from this endpoint, bytes.
    pub mtu: u16,
    /// Its IPv4 address in mapped form, zero = none.
    pub ip4: Addr,
    /// Its IPv6 address, zero = none.
    pub ip6: Addr,
    /// Gateway address of its IPv4 subnet, zero = none.
    pub gateway4: Addr,
    /// Gateway address of its IPv6 subnet.
    pub gateway6: Addr,
}
crate::assert_layout!(EndpointRecord, 108);

/// Key of `addresses`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct AddressKey {
    /// VPC.
    pub vpc: u32,
    /// Address.
    pub addr: Addr,
}
crate::assert_layout!(AddressKey, 20);

/// Value of `addresses`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AddressRecord {
    /// Endpoint id, or 0 for an address of the node itself in that VPC (its gateway).
    pub endpoint: u32,
    /// [`address_flags`].
    pub flags: u32,
}
crate::assert_layout!(AddressRecord, 8);

/// Flags of an [`AddressRecord`].
pub mod address_flags {
    /// A gateway address of the VPC on this node: programs answer ARP, ND and echo for it.
    pub const GATEWAY: u32 = 1;
    /// Packets to it go to the host's stack (gateway and node addresses of the default VPC).
    pub const HOST: u32 = 2;
}

/// Key of `ipcache` (LPM, data size 20).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PeerKey {
    /// 32 + prefix bits of the 128-bit address (an IPv4 /n is 32 + 96 + n).
    pub prefixlen: u32,
    /// VPC; compared as bytes.
    pub vpc: u32,
    /// Masked address.
    pub addr: Addr,
}
crate::assert_layout!(PeerKey, 24);

impl PeerKey {
    /// Bits in front of the address.
    pub const VPC_BITS: u32 = 32;
    /// Prefix length of a lookup.
    pub const FULL_BITS: u32 = 160;
}

/// Value of `ipcache`: who has this address and how to reach it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PeerRecord {
    /// Identity of the peer.
    pub identity: u32,
    /// [`peer_flags`].
    pub flags: u32,
    /// Tunnel endpoint (the owning node's underlay address); zero = none.
    pub tunnel: Addr,
}
crate::assert_layout!(PeerRecord, 24);

/// Flags of a [`PeerRecord`].
pub mod peer_flags {
    /// An endpoint of the VPC (not a CIDR, not the world).
    pub const ENDPOINT: u32 = 1;
    /// On another node: reached at `tunnel`.
    pub const REMOTE: u32 = 2;
    /// Reached without encapsulation (default VPC, direct routes); the stack or `redirect_neigh` carries it.
    pub const DIRECT: u32 = 4;
    /// Reached through the host's stack (world of the default VPC).
    pub const STACK: u32 = 8;
    /// Silently discarded.
    pub const BLACKHOLE: u32 = 16;
    /// Inside a subnet of the VPC, but nobody has it.
    pub const UNASSIGNED: u32 = 32;
    /// An address of this node (underlay, or a gateway of the VPC). Ask this flag, not the identity: an address that rule CIDRs cover has a user identity.
    pub const HOST: u32 = 64;
    /// An underlay address of another node; same remark.
    pub const REMOTE_NODE: u32 = 128;
}

/// Value of `vpcs`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct VpcRecord {
    /// VNI on the wire, 1..=16777215.
    pub vni: u32,
    /// ipcache generation, never 0.
    pub generation: u32,
    /// [`vpc_flags`].
    pub flags: u32,
    /// Zero.
    pub pad: u32,
}
crate::assert_layout!(VpcRecord, 16);

/// Flags of a [`VpcRecord`].
pub mod vpc_flags {
    /// The VPC whose traffic may use the host's stack.
    pub const DEFAULT: u32 = 1;
    /// Services may be asked for in it: set before the first frontend is there, taken away with the last one unless flows that it led are left (then it
    /// stays, and costs only time). Without it no packet of the VPC looks for any.
    pub const SERVICES: u32 = 2;
}

/// Value of `nodes`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct NodeRecord {
    /// [`node_flags`].
    pub flags: u32,
    /// Zero.
    pub pad: u32,
    /// Its tunnel endpoint.
    pub tunnel: Addr,
}
crate::assert_layout!(NodeRecord, 24);

/// Flags of a [`NodeRecord`].
pub mod node_flags {
    /// This node.
    pub const LOCAL: u32 = 1;
}

/// The one entry of `config`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct NodeConfig {
    /// [`config_flags`].
    pub flags: u32,
    /// ifindex of the VXLAN device, 0 = none.
    pub overlay_ifindex: u32,
    /// ifindex of the main uplink, 0 = none.
    pub uplink_ifindex: u32,
    /// Largest inner IP packet that fits the tunnel, bytes.
    pub overlay_mtu: u16,
    /// Largest IP packet on the uplink, bytes.
    pub uplink_mtu: u16,
    /// UDP port of the tunnel, big endian.
    pub tunnel_port: [u8; 2],
    /// Zero.
    pub pad: [u8; 2],
    /// VPC of this host's stack.
    pub default_vpc: u32,
    /// Events per second and (endpoint, reason); 0 = unlimited.
    pub event_rate: u32,
    /// Answers (RST, ICMP) per second and endpoint; 0 = unlimited.
    pub answer_rate: u32,
    /// This node's IPv4 address for clients outside, mapped; zero = none.
    pub node4: Addr,
    /// Its IPv6 address for them.
    pub node6: Addr,
}
crate::assert_layout!(NodeConfig, 64);

/// Flags of a [`NodeConfig`].
pub mod config_flags {
    /// `forwarding: stack`: programs judge, the host's stack forwards.
    pub const FORWARD_STACK: u32 = 1;
    /// Emit a verdict event for every new connection, not only logged ones.
    pub const VERDICT_EVENTS: u32 = 2;
    /// `tunnel_receive: uplink`: packets of open connections leave the tunnel where they arrive.
    pub const RECEIVE_AT_UPLINK: u32 = 4;
}

/// Value of `traffic` (per CPU): index 0 packets, index 1 bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TrafficCounters {
    /// Passed, from the endpoint.
    pub egress: [u64; 2],
    /// Passed, to the endpoint.
    pub ingress: [u64; 2],
}
crate::assert_layout!(TrafficCounters, 32);

/// Key of `drops`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DropKey {
    /// Endpoint id, 0 = none known.
    pub endpoint: u32,
    /// [`crate::direction`].
    pub direction: u8,
    /// [`crate::DropReason`] number.
    pub reason: u8,
    /// Zero.
    pub pad: [u8; 2],
}
crate::assert_layout!(DropKey, 8);

/// Packets and bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
crate::assert_layout!(Counter, 16);

/// Key of `rates`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RateKey {
    /// Endpoint id.
    pub endpoint: u32,
    /// [`crate::DropReason`] number for events, 255 for answers, 0 for verdicts.
    pub what: u32,
}
crate::assert_layout!(RateKey, 8);

/// Value of `rates`: a token bucket refilled once a second.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RateValue {
    /// Second of the last refill.
    pub second: u32,
    /// Tokens left in it.
    pub tokens: u32,
    /// Refused since the entry exists.
    pub refused: u64,
}
crate::assert_layout!(RateValue, 16);
