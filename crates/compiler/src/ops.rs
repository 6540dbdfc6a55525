//! The operations that lead from one plan to the next.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::{
    BackendPlan, EndpointPlan, FrontendKey, FrontendPlan, ListId, NodeAddress, Peer, PolicyEntries,
    PolicySlot, ServiceId, VpcId, VpcPlan,
};
use flowloom_bpf_abi::PolicyKey;

/// One operation on the maps. Applied in the order [`crate::diff`] gives, every state in between is safe.
/// Each is idempotent: applying it twice equals applying it once, removing what is missing succeeds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// `vpcs` and `vnis` entry (a generation that exists is kept, never reset), and one gateway `addresses` entry per gateway.
    PutVpc {
        /// Number.
        id: VpcId,
        /// Content.
        vpc: VpcPlan,
        /// Gateway addresses that it had and has no longer; their `addresses` entries go when they still are gateway entries.
        stale_gateways: Vec<IpAddr>,
    },
    /// The VPC's entries in `vpcs`, `vnis`, and its gateways in `addresses`.
    RemoveVpc {
        /// Number.
        id: VpcId,
        /// Content it had.
        vpc: VpcPlan,
    },
    /// `nodes` entry; a local address is also a host address of the default VPC.
    PutNode {
        /// Underlay address.
        address: IpAddr,
        /// Whose.
        node: NodeAddress,
    },
    /// The entries of an underlay address.
    RemoveNode {
        /// Underlay address.
        address: IpAddr,
        /// Whose it was.
        node: NodeAddress,
    },
    /// Entries written in place into the inner map of a slot in force.
    AddEntries {
        /// The slot.
        slot: PolicySlot,
        /// Entries of identities that no address has yet.
        entries: PolicyEntries,
    },
    /// Entries removed in place.
    RemoveEntries {
        /// The slot.
        slot: PolicySlot,
        /// Keys, of identities that no address has any more.
        keys: Vec<PolicyKey>,
    },
    /// ipcache upserts.
    PutPeers(Vec<((VpcId, IpNet), Peer)>),
    /// ipcache removals.
    RemovePeers(Vec<(VpcId, IpNet)>),
    /// New inner maps, filled, then written to the outer map in one batch.
    PutSlots(Vec<(PolicySlot, PolicyEntries)>),
    /// Inner maps that no endpoint names any more.
    FreeSlots(Vec<PolicySlot>),
    /// The endpoint's record in one write, and its `addresses` entries (one per address).
    PutEndpoint(EndpointPlan),
    /// `addresses` entries of this endpoint for addresses it no longer has; each goes only when it still names this endpoint's id.
    RemoveAddresses {
        /// The endpoint as it is now.
        endpoint: EndpointPlan,
        /// Addresses in its VPC.
        ips: Vec<IpAddr>,
    },
    /// The endpoint's record, and its `addresses` entries that still name its id.
    RemoveEndpoint(EndpointPlan),
    /// `VpcRecord.generation` + 1: addresses that may have flows changed identity or route.
    BumpGeneration(VpcId),
    /// New lists of backends: all their `members` and `backends` entries. No frontend names them yet, and nobody held their numbers before.
    PutLists(Vec<(ListId, Arc<[BackendPlan]>)>),
    /// `service_ranges` entries of services, added in place.
    PutRanges(Vec<(ServiceId, IpNet)>),
    /// `services` entries, one write each; their lists and ranges are there.
    PutFrontends(Vec<(FrontendKey, FrontendPlan)>),
    /// `services` entries.
    RemoveFrontends(Vec<FrontendKey>),
    /// `service_ranges` entries that no frontend with `service_flags::RANGES` needs any more.
    RemoveRanges(Vec<(ServiceId, IpNet)>),
    /// Lists that no frontend names any more, with what they held: their `backends`, then their `members` entries.
    RemoveLists(Vec<(ListId, Arc<[BackendPlan]>)>),
}
