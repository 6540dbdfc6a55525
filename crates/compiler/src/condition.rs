//! What is wrong with one object, said to its owner. A bad object degrades alone.

use flowloom_model::{
    CidrGroupName, EndpointKey, GroupName, NodeName, RuleName, ServiceName, SubnetName, VpcName,
};
use serde::{Deserialize, Serialize};

/// The object a condition speaks of.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ObjectRef {
    /// A node.
    Node {
        /// Its name.
        node: NodeName,
    },
    /// A VPC.
    Vpc {
        /// Its name.
        vpc: VpcName,
    },
    /// A subnet.
    Subnet {
        /// Its VPC.
        vpc: VpcName,
        /// Its name.
        subnet: SubnetName,
    },
    /// An endpoint.
    Endpoint {
        /// Its VPC and name.
        endpoint: EndpointKey,
    },
    /// A rule.
    Rule {
        /// Its VPC.
        vpc: VpcName,
        /// Its group.
        group: GroupName,
        /// Its name.
        rule: RuleName,
    },
    /// A CIDR group.
    CidrGroup {
        /// Its VPC.
        vpc: VpcName,
        /// Its name.
        group: CidrGroupName,
    },
    /// A service.
    Service {
        /// Its VPC.
        vpc: VpcName,
        /// Its name.
        service: ServiceName,
    },
}

impl std::fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Node { node } => write!(f, "node {node}"),
            Self::Vpc { vpc } => write!(f, "vpc {vpc}"),
            Self::Subnet { vpc, subnet } => write!(f, "subnet {vpc}/{subnet}"),
            Self::Endpoint { endpoint } => write!(f, "endpoint {endpoint}"),
            Self::Rule { vpc, group, rule } => write!(f, "rule {vpc}/{group}/{rule}"),
            Self::CidrGroup { vpc, group } => write!(f, "cidr group {vpc}/{group}"),
            Self::Service { vpc, service } => write!(f, "service {vpc}/{service}"),
        }
    }
}

/// Why an object is not (fully) in force.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ConditionReason {
    /// A VPC without a VNI, an endpoint without an address: the allocator has not run yet. Waits.
    NotAllocated,
    /// It names an object that does not exist.
    DanglingReference,
    /// Something else has this VNI or address.
    Conflict,
    /// The object depends on one that waits.
    DependencyWaits,
    /// A field contradicts another one.
    Invalid,
    /// A number space of the node is full.
    OutOfNumbers,
}

/// One condition.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Condition {
    /// The object.
    pub object: ObjectRef,
    /// The stable reason.
    pub reason: ConditionReason,
    /// For people: what is wrong and what to do.
    pub message: String,
}
