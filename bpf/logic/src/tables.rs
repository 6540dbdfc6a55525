//! The maps as a hook sees them.

use flowloom_bpf_abi::{
    Addr, AddressKey, AddressRecord, AffinityKey, AffinityValue, BackendKey, BackendRecord, CtEntry, CtKey,
    DropKey, EndpointRecord, Event, FlowKey, FlowValue, FragKey, FragValue, MemberKey, NetnsRecord,
    NodeConfig, PeerKey, PeerRecord, PolicyKey, PolicyValue, QuotaKey, RangeKey, RateKey, ServiceKey,
    ServiceRecord, SocketKey, SocketValue, VpcRecord,
};

use crate::conntrack::CtCell;
use crate::packet::Zero;

/// Outcome of an insert that must not replace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inserted {
    /// It is there now.
    Yes,
    /// Someone else was faster.
    Exists,
    /// No room.
    Full,
}

/// Access to the maps. A dry run answers every lookup and makes no write but trace steps.
pub trait Tables: Copy {
    /// An inner policy map.
    type Slot: Copy;

    /// Clears a value as its type says.
    fn clear<Z: Zero>(self, value: &mut Z);
    /// Whether this is a trace.
    fn dry(self) -> bool;
    /// Endpoint id of a device.
    fn device(self, ifindex: u32) -> Option<u32>;
    /// Record of an endpoint.
    fn endpoint(self, id: u32) -> Option<&'static EndpointRecord>;
    /// Who has an address on this node.
    fn address(self, key: &AddressKey) -> Option<AddressRecord>;
    /// Who has an address anywhere.
    fn peer(self, key: &PeerKey) -> Option<&'static PeerRecord>;
    /// Record of a VPC.
    fn vpc(self, id: u32) -> Option<&'static VpcRecord>;
    /// Compiled policy of a slot.
    fn slot(self, slot: u32) -> Option<Self::Slot>;
    /// Longest match in it.
    fn policy(self, slot: Self::Slot, key: &PolicyKey) -> Option<&'static PolicyValue>;
    /// Connection whose reply was seen.
    fn established(self, key: &CtKey) -> Option<&'static CtCell>;
    /// Connection whose reply was not, or that has ended.
    fn half_open(self, key: &CtKey) -> Option<&'static CtCell>;
    /// Adds an established connection.
    fn insert_established(self, key: &CtKey, entry: &CtEntry) -> Inserted;
    /// Adds a half-open or ended connection.
    fn insert_half_open(self, key: &CtKey, entry: &CtEntry) -> Inserted;
    /// Removes an established connection; whether it was this call that did.
    fn remove_established(self, key: &CtKey) -> bool;
    /// Removes a half-open connection.
    fn remove_half_open(self, key: &CtKey);
    /// Counts one more connection unless the limit is reached; no record = no limit.
    fn take_quota(self, key: &QuotaKey) -> bool;
    /// Undoes [`Self::take_quota`].
    fn give_quota(self, key: &QuotaKey);
    /// Whether an address is a node's.
    fn is_node(self, addr: &Addr) -> bool;
    /// Ports of a datagram.
    fn fragment(self, key: &FragKey) -> Option<FragValue>;
    /// Remembers the ports of a datagram.
    fn learn_fragment(self, key: &FragKey, value: &FragValue);
    /// A service's record, whole: not one that is being exchanged.
    fn service(self, key: &ServiceKey, into: &mut ServiceRecord) -> bool;
    /// A backend, whole.
    fn backend(self, key: &BackendKey, into: &mut BackendRecord) -> bool;
    /// Whether a backend is in a list: its flags.
    fn member(self, key: &MemberKey) -> Option<u32>;
    /// Whether an address may use a service.
    fn in_range(self, key: &RangeKey) -> bool;
    /// What a client was given last.
    fn affinity(self, key: &AffinityKey, into: &mut AffinityValue) -> bool;
    /// Remembers what a client was given.
    fn learn_affinity(self, key: &AffinityKey, value: &AffinityValue);
    /// Sets `last_used`.
    fn touch_affinity(self, key: &AffinityKey, second: u32);
    /// Whose sockets a network namespace holds.
    fn netns(self, cookie: u64) -> Option<NetnsRecord>;
    /// What a socket was told.
    fn socket(self, key: &SocketKey, into: &mut SocketValue) -> bool;
    /// Remembers what a socket was told.
    fn learn_socket(self, key: &SocketKey, value: &SocketValue);
    /// Sets `last_used`.
    fn touch_socket(self, key: &SocketKey, second: u32);
    /// Translation of a flow.
    fn flow(self, key: &FlowKey, into: &mut FlowValue) -> bool;
    /// Whether a flow has a translation.
    fn is_flow(self, key: &FlowKey) -> bool;
    /// Remembers the translation of a flow.
    fn learn_flow(self, key: &FlowKey, value: &FlowValue);
    /// Sets `last_seen`.
    fn touch_flow(self, key: &FlowKey, second: u32);
    /// Any number.
    fn random(self) -> u32;
    /// The node's configuration.
    fn config(self) -> Option<&'static NodeConfig>;
    /// Counts a packet that an endpoint sent or received ([`flowloom_bpf_abi::direction`]).
    fn count_traffic(self, endpoint: u32, direction: u8, bytes: u32);
    /// Counts a drop.
    fn count_drop(self, key: &DropKey, bytes: u32);
    /// Counts a decision.
    fn count_rule(self, rule: u32, bytes: u32);
    /// Takes a token of a bucket that holds `limit` per second (0 = without limit); whether there was one. `lost`: how often there was none so far.
    fn take_token(self, key: &RateKey, limit: u32, second: u32, lost: &mut u32) -> bool;
    /// Hands a record to user space.
    fn emit(self, event: &Event);
    /// Notes a step of a trace.
    fn step(self, kind: u32, a: u32, b: u32, c: u32);
    /// `CLOCK_MONOTONIC`, nanoseconds.
    fn now_ns(self) -> u64;
    /// Reads a field that user space may be writing, once.
    fn once(self, field: &u32) -> u32;
    /// Writes before it stay before those after it.
    fn barrier(self);
}
