//! What a node must hold: the output of [`crate::compile`], the input of [`crate::diff`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{PolicyKey, PolicyValue};
use flowloom_model::{EndpointKey, GroupName, Labels, Mac, NodeName, RuleName, VpcName};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

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
    /// The rule CIDRs (and entity prefixes, subnets) in use that cover the address.
    pub cidrs: BTreeSet<IpNet>,
}

/// What rules may ask of an endpoint peer.
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
    /// Its gateway addresses (every node answers for them) with subnet prefix.
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
    /// Prefix lengths of its subnet, per address.
    pub subnets: Vec<IpNet>,
    /// Gateways, one per family.
    pub gateways: Vec<IpAddr>,
    /// Workload MAC.
    pub mac: Mac,
    /// Whether `mac` was given by the user.
    pub mac_pinned: bool,
    /// Identity.
    pub identity: Identity,
    /// Slot of its egress policy.
    pub egress_slot: PolicySlot,
    /// Slot of its ingress policy.
    pub ingress_slot: PolicySlot,
    /// `allow_localhost: policy`.
    pub judge_host: bool,
    /// MTU asked for by its subnet.
    pub mtu: Option<u16>,
}

/// Everything the maps of one node must hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodePlan {
    /// VPCs that have a local endpoint or the default VPC.
    pub vpcs: BTreeMap<VpcId, VpcPlan>,
    /// Peers by (VPC, prefix).
    pub ipcache: BTreeMap<(VpcId, IpNet), Peer>,
    /// Local endpoints.
    pub endpoints: BTreeMap<EndpointKey, EndpointPlan>,
    /// Policies by slot.
    pub policies: BTreeMap<PolicySlot, Arc<PolicyEntries>>,
    /// Underlay addresses: (address) -> (node, local).
    pub nodes: BTreeMap<IpAddr, (NodeName, bool)>,
    /// Names of rule numbers.
    pub rules: BTreeMap<RuleId, RuleRef>,
    /// Facts of identity numbers.
    pub identities: BTreeMap<Identity, IdentityFacts>,
}
