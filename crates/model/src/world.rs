//! The typed world: what every source translates into. A value of these types has been parsed; cross-object rules are checked by `validate`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    CidrGroupName, EndpointKey, EndpointName, GroupName, Mac, NodeName, PortName, RuleName, Service,
    ServiceName, SharedMap, SubnetName, Vni, VpcName,
};

/// Labels of an endpoint.
pub type Labels = BTreeMap<String, String>;

/// Everything the sources say. Cheap to clone: what did not change is shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct World {
    /// Nodes.
    pub nodes: SharedMap<NodeName, Node>,
    /// VPCs. The default VPC exists even when no source names it.
    pub vpcs: SharedMap<VpcName, Vpc>,
    /// Subnets.
    pub subnets: SharedMap<(VpcName, SubnetName), Subnet>,
    /// Endpoints; worlds that say the same of one share it.
    pub endpoints: SharedMap<EndpointKey, Arc<Endpoint>>,
    /// Security groups.
    pub security_groups: SharedMap<(VpcName, GroupName), SecurityGroup>,
    /// CIDR groups.
    pub cidr_groups: SharedMap<(VpcName, CidrGroupName), CidrGroup>,
    /// Load balancers.
    pub services: SharedMap<(VpcName, ServiceName), Arc<Service>>,
}

/// A host that runs an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Underlay addresses, at most one per family; the first is the tunnel endpoint.
    pub addresses: Vec<IpAddr>,
    /// Failure domain, for topology hints of services.
    pub zone: Option<String>,
}

/// A virtual network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    /// Its name.
    pub name: VpcName,
    /// Assigned by the document or by the allocator; without it the VPC waits.
    pub vni: Option<Vni>,
    /// What a direction does that no group isolates.
    pub default_policy: DefaultPolicy,
}

/// What happens to traffic that nothing selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DefaultPolicy {
    /// Open, as in Kubernetes.
    #[default]
    Allow,
    /// Closed.
    Deny,
}

/// A range of addresses inside a VPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name.
    pub name: SubnetName,
    /// One per family.
    pub cidrs: Vec<IpNet>,
    /// One per family, inside the CIDR; the first usable address when the source names none.
    pub gateways: Vec<IpAddr>,
    /// Never used, not even when asked for by name. Inclusive ranges.
    pub exclude: Vec<(IpAddr, IpAddr)>,
    /// The node whose agent may allocate CNI attachments from the whole subnet.
    pub node: Option<NodeName>,
    /// Parts of the subnet that single nodes may allocate from.
    pub cni_ranges: Vec<CniRange>,
    /// Largest IP packet; default: what the path allows.
    pub mtu: Option<u16>,
}

/// A part of a subnet bound to a node for CNI allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniRange {
    /// The node.
    pub node: NodeName,
    /// Inside one of the subnet's CIDRs.
    pub cidr: IpNet,
}

/// A workload's attachment to a VPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name.
    pub name: EndpointName,
    /// Its subnet.
    pub subnet: SubnetName,
    /// One per family; empty while unallocated (the endpoint waits).
    pub ips: Vec<IpAddr>,
    /// Pinned when given; derived from the first address when not.
    pub mac: Option<Mac>,
    /// Where it runs.
    pub node: NodeName,
    /// Attached groups.
    pub security_groups: BTreeSet<GroupName>,
    /// Labels.
    pub labels: Labels,
    /// Ports by name.
    pub named_ports: Vec<NamedPort>,
    /// How it is wired on its node.
    pub attachment: Attachment,
    /// How its own node's traffic is treated.
    pub allow_localhost: AllowLocalhost,
}

impl Endpoint {
    /// `vpc/name`.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        EndpointKey { vpc: self.vpc.clone(), name: self.name.clone() }
    }
}

/// How the local host's own traffic is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AllowLocalhost {
    /// Passed whatever the rules say (probes).
    #[default]
    Always,
    /// Judged.
    Policy,
}

/// How a workload is wired.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Attachment {
    /// The agent makes a namespace (named after the endpoint) and a veth in it.
    #[default]
    Managed,
    /// The agent makes a veth into an existing namespace.
    Netns {
        /// Path of the namespace file.
        path: PathBuf,
        /// Name of the interface inside.
        interface: String,
    },
    /// A device on the host that something else made (tap, veth).
    Device {
        /// Its name.
        name: String,
    },
    /// Wired by a CNI request.
    Cni,
}

/// A named port of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedPort {
    /// Its name.
    pub name: PortName,
    /// tcp, udp or sctp.
    pub protocol: Protocol,
    /// 1..=65535.
    pub port: u16,
}

/// Protocol of a rule or a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Every protocol.
    Any,
    /// 6.
    Tcp,
    /// 17.
    Udp,
    /// 1 for IPv4 peers, 58 for IPv6 peers.
    Icmp,
    /// 132.
    Sctp,
}

impl Protocol {
    /// Whether rules and endpoints may name its ports.
    #[must_use]
    pub fn has_ports(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp | Self::Sctp)
    }
    /// The word in documents.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
            Self::Sctp => "sctp",
        }
    }
}

/// Rules for endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityGroup {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name.
    pub name: GroupName,
    /// 0 platform, 1 tenant.
    pub tier: u8,
    /// `Some(false)` switches isolation off for the direction; every attached group must.
    pub default_deny_ingress: Option<bool>,
    /// As above.
    pub default_deny_egress: Option<bool>,
    /// In document order; order carries no meaning.
    pub rules: Vec<Rule>,
}

/// Direction of a rule, relative to the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// What it sends.
    Egress,
    /// What it receives.
    Ingress,
}

/// What a rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Pass.
    Allow,
    /// Drop silently.
    Drop,
    /// Drop and answer.
    Reject,
    /// Pass and record.
    Log,
    /// Leave the tier without deciding.
    Pass,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Unique in its group.
    pub id: RuleName,
    /// 1..=16384, the lower number wins.
    pub priority: u16,
    /// Direction.
    pub direction: Direction,
    /// Protocol.
    pub protocol: Protocol,
    /// Peers.
    pub remote: Remote,
    /// Inclusive ranges of the responder's port; empty = any. tcp, udp, sctp only.
    pub ports: Vec<(u16, u16)>,
    /// Ports by name: the endpoint's own for ingress, each peer's for egress.
    pub named_ports: Vec<PortName>,
    /// ICMP type and code.
    pub icmp: Option<(u8, Option<u8>)>,
    /// Action.
    pub action: Action,
    /// Stateful unless said otherwise.
    pub stateful: bool,
    /// Record new connections.
    pub log: bool,
}

/// Whom a rule speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// Anyone.
    Any,
    /// Addresses.
    Cidr(CidrEntry),
    /// A named set of addresses.
    CidrGroup(CidrGroupName),
    /// Endpoints that carry a group.
    Group(GroupName),
    /// Endpoints by label; an empty selector selects nothing.
    Selector(Selector),
    /// Well-known sets.
    Entities(BTreeSet<Entity>),
}

/// A CIDR with holes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CidrEntry {
    /// Masked.
    pub cidr: IpNet,
    /// Inside `cidr`.
    pub except: Vec<IpNet>,
}

/// A named set of CIDRs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CidrGroup {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name.
    pub name: CidrGroupName,
    /// Entries.
    pub entries: Vec<CidrEntry>,
}

/// Labels and expressions, all of which must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Selector {
    /// Equal labels.
    pub labels: Labels,
    /// Expressions.
    pub expressions: Vec<Expression>,
}

/// One expression of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    /// Label key.
    pub key: String,
    /// Operator.
    pub operator: Operator,
    /// Values for `In` and `NotIn`.
    pub values: BTreeSet<String>,
}

/// Operators of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// The label has one of the values.
    In,
    /// The label is absent or has none of the values.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

impl Selector {
    /// Nothing to match on: selects nothing (security groups).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.expressions.is_empty()
    }

    /// Whether the labels match. An empty selector matches nothing.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        !self.is_empty()
            && self.labels.iter().all(|(k, v)| labels.get(k) == Some(v))
            && self.expressions.iter().all(|e| e.matches(labels))
    }
}

impl Expression {
    /// Whether the labels satisfy it.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            Operator::In => value.is_some_and(|v| self.values.contains(v)),
            Operator::NotIn => value.is_none_or(|v| !self.values.contains(v)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

/// Well-known sets of peers (semantics.md section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entity {
    /// Everything.
    All,
    /// Outside the VPC's subnets.
    World,
    /// The same, IPv4.
    WorldIpv4,
    /// The same, IPv6.
    WorldIpv6,
    /// The VPC's subnets.
    Cluster,
    /// Private ranges.
    Private,
    /// The node the endpoint runs on and the VPC's gateway addresses there.
    Host,
    /// Other nodes and their gateway addresses.
    RemoteNode,
    /// Nothing.
    None,
}
