//! What a node must hold: the output of [`crate::compile`], the input of [`crate::diff`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{PolicyKey, PolicyValue};
use flowloom_model::{EndpointKey, GroupName, Labels, Mac, NodeName, RuleName, SharedMap, VpcName};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::CompiledPolicy;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { self.0.fmt(f) }
        }
    };
}

number!(
    /// A VPC's number in every map: its VNI.
    VpcId
);
number!(
    /// A peer's number on this node (`flowloom_bpf_abi::identity` for the reserved ones).
    Identity
);
number!(
    /// A local endpoint's number, 1..=4095.
    EndpointId
);
number!(
    /// A compiled policy's number on this node; 0 = none.
    PolicySlot
);
number!(
    /// A rule's number on this node; 0 = the default.
    RuleId
);

/// A rule's full name; shown as `vpc/group/rule`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RuleRef {
    /// VPC.
    pub vpc: VpcName,
    /// Group.
    pub group: GroupName,
    /// Rule.
    pub rule: RuleName,
}

impl std::fmt::Display for RuleRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.vpc, self.group, self.rule)
    }
}

/// The facts an identity stands for. Equal facts share a number.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct IdentityFacts {
    /// VPC: identities of two VPCs are never equal.
    pub vpc: VpcName,
    /// Endpoint facts, or none for addresses that only CIDRs describe.
    pub endpoint: Option<EndpointFacts>,
    /// Reserved kind it is also (host, remote-node), 0 = none.
    pub reserved: u32,
    /// Whether the address lies in a subnet of the VPC (entities `cluster` and `world`).
    pub inside: bool,
    /// The prefixes in use by rules (CIDRs, exceptions, those that entities stand for) that cover the address.
    pub cidrs: BTreeSet<IpNet>,
}

/// What rules of the VPC ask of an endpoint peer: labels whose key some selector names, groups that some rule names,
/// ports that some egress rule names. What no rule asks splits no identity.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct EndpointFacts {
    /// Labels.
    pub labels: Labels,
    /// Attached groups.
    pub groups: BTreeSet<GroupName>,
    /// Named ports: (name, protocol number, port).
    pub named_ports: BTreeSet<(String, u8, u16)>,
}

/// A compiled policy of one direction: the contents of an inner map.
pub type PolicyEntries = BTreeMap<PolicyKey, PolicyValue>;

/// A peer in the ipcache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its identity.
    pub identity: Identity,
    /// `flowloom_bpf_abi::peer_flags`.
    pub flags: u32,
    /// Owning node's underlay address.
    pub tunnel: Option<IpAddr>,
}

/// A VPC on this node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VpcPlan {
    /// Its name.
    pub name: VpcName,
    /// Whether its traffic may use the host's stack.
    pub default: bool,
    /// Its gateway addresses (every node answers for them).
    pub gateways: BTreeSet<IpAddr>,
    /// Its subnets.
    pub subnets: BTreeSet<IpNet>,
}

/// A local endpoint's record, apart from what only the kernel knows (ifindex, MACs of devices, delivery).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EndpointPlan {
    /// Its name.
    pub key: EndpointKey,
    /// Number.
    pub id: EndpointId,
    /// VPC.
    pub vpc: VpcId,
    /// Addresses.
    pub ips: Vec<IpAddr>,
    /// Its subnet's CIDR that holds the address, per address.
    pub subnets: Vec<IpNet>,
    /// Gateways, one per family.
    pub gateways: Vec<IpAddr>,
    /// Workload MAC.
    pub mac: Mac,
    /// Whether `mac` was given by the user.
    pub mac_pinned: bool,
    /// Identity of its first address, for display. Each address has its own in the ipcache (rule CIDRs may cover one
    /// family and not the other), and only that one may be judged.
    pub identity: Identity,
    /// Slot of its egress policy.
    pub egress_slot: PolicySlot,
    /// Slot of its ingress policy.
    pub ingress_slot: PolicySlot,
    /// Policy revision, never 0: grows when a slot changes, unique on the node, never handed out twice.
    pub revision: u32,
    /// `allow_localhost: policy`.
    pub judge_host: bool,
    /// MTU asked for by its subnet.
    pub mtu: Option<u16>,
}

/// An underlay address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeAddress {
    /// Whose it is.
    pub node: NodeName,
    /// Whether that is this node. In the default VPC such an address is the host's.
    pub local: bool,
    /// The node's tunnel endpoint as this node sees it.
    pub tunnel: IpAddr,
}

/// Everything the maps of one node must hold. Cheap to clone: what did not change is shared.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodePlan {
    /// VPCs that have a local endpoint, and the default VPC.
    pub vpcs: BTreeMap<VpcId, VpcPlan>,
    /// Peers by (VPC, prefix).
    pub ipcache: SharedMap<(VpcId, IpNet), Peer>,
    /// Local endpoints.
    pub endpoints: SharedMap<EndpointKey, EndpointPlan>,
    /// Policies by slot. The contents of an inner map are [`NodePlan::entries`]: rules here, peers in `identities`.
    pub policies: BTreeMap<PolicySlot, Arc<CompiledPolicy>>,
    /// Underlay addresses.
    pub nodes: SharedMap<IpAddr, NodeAddress>,
    /// Names of rule numbers.
    pub rules: Arc<BTreeMap<RuleId, RuleRef>>,
    /// Facts of the identities in use, from 256. Reserved numbers (`flowloom_bpf_abi::identity`) are not listed: they mean the same in every VPC.
    pub identities: SharedMap<Identity, Arc<IdentityFacts>>,
    /// Services.
    pub services: crate::ServicePlan,
}

impl NodePlan {
    /// What the inner map of a slot must hold: the any-identity entries and those of every identity in use in its VPC.
    /// Empty for a slot that the plan does not have.
    #[must_use]
    pub fn entries(&self, slot: PolicySlot) -> PolicyEntries {
        self.policies.get(&slot).map(|policy| policy.entries(&self.identities)).unwrap_or_default()
    }

    /// The peer that the longest covering prefix names, as the kernel's lookup does.
    #[must_use]
    pub fn peer(&self, vpc: VpcId, ip: IpAddr) -> Option<(IpNet, Peer)> {
        let bits = if ip.is_ipv4() { 32 } else { 128 };
        (0..=bits).rev().find_map(|len| {
            let net = IpNet::new(ip, len).ok()?.trunc();
            self.ipcache.get(&(vpc, net)).map(|peer| (net, *peer))
        })
    }
}
