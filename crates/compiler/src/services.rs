//! Services of a node: what each address, protocol and port stands for there.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{PackedMap, ServiceName, SharedMap, VpcName};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::VpcId;

pub(crate) mod build;
pub(crate) mod choose;
pub(crate) mod diff;
pub(crate) mod explain;
pub(crate) mod numbers;
pub(crate) mod state;

pub use build::FrontendKind;
pub use choose::BackendUse;
pub use diff::{EndedBackend, ended_backends};
pub use explain::{
    BackendExplanation, FrontendAnswer, FrontendExplanation, ServiceExplanation, explain_service,
};
pub use numbers::HeldServices;
pub use state::ServiceKey;

/// A number of a service's port on this node; in the maps for affinity, source ranges and names. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ServiceId(pub u32);

/// A list of backends; equal lists of a service share a number, a number never changes what it lists. 0 = no backend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ListId(pub u32);

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// A workload or the host of this node.
    Inside,
    /// Somebody beyond an uplink.
    Outside,
}

/// What a client asks for. `protocol` 0 with `port` 0 stands for everything of the address that no other entry names: it is rejected.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrontendKey {
    /// VPC.
    pub vpc: VpcId,
    /// Address.
    pub ip: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Port.
    pub port: u16,
    /// Who asks.
    pub scope: Scope,
}

/// What answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrontendPlan {
    /// The service's port.
    pub service: ServiceId,
    /// Its backends for this scope.
    pub list: ListId,
    /// How many backends the list has; 0 exactly when `list` is 0.
    pub count: u32,
    /// Seconds, 0 = none.
    pub affinity: u32,
    /// `flowloom_bpf_abi::service_flags`.
    pub flags: u32,
}

/// A backend of a list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BackendPlan {
    /// Address.
    pub ip: IpAddr,
    /// Port.
    pub port: u16,
    /// Whether it runs on this node.
    pub local: bool,
}

/// A port's full name; shown as `vpc/service:port/protocol`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ServiceRef {
    /// VPC.
    pub vpc: VpcName,
    /// Service.
    pub service: ServiceName,
    /// IP protocol number.
    pub protocol: u8,
    /// The service's port.
    pub port: u16,
}

impl std::fmt::Display for ServiceRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = match self.protocol {
            6 => "tcp",
            17 => "udp",
            132 => "sctp",
            _ => "?",
        };
        write!(f, "{}/{}:{}/{word}", self.vpc, self.service, self.port)
    }
}

/// What one service puts into the maps of this node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServicePart {
    /// Frontends.
    pub frontends: PackedMap<FrontendKey, FrontendPlan>,
    /// Lists that the frontends name, in the order of their indices. No list is empty; no other service names them.
    pub lists: PackedMap<ListId, Arc<[BackendPlan]>>,
    /// Who may use the ports whose frontends have `service_flags::RANGES`.
    pub ranges: PackedMap<ServiceId, Arc<[IpNet]>>,
    /// Names of numbers.
    pub names: PackedMap<ServiceId, ServiceRef>,
    /// Backends of a port whose connections live on, whether new ones may use them here or not; by address and port.
    pub keeps: PackedMap<ServiceId, Arc<[BackendPlan]>>,
    /// Health-check port, and the local ready backends (distinct addresses): what the node answers there over HTTP.
    pub health_check: Option<(u16, usize)>,
}

/// Everything the service maps of one node must hold. Cheap to clone: what did not change is shared.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServicePlan {
    parts: SharedMap<(VpcName, ServiceName), Arc<ServicePart>>,
}

impl ServicePlan {
    /// Each service's share.
    #[must_use]
    pub fn parts(&self) -> &SharedMap<(VpcName, ServiceName), Arc<ServicePart>> {
        &self.parts
    }

    /// The same without those of some VPCs.
    pub(crate) fn without(&self, vpcs: &BTreeSet<VpcId>) -> Self {
        let among = |part: &ServicePart| part.frontends.keys().any(|key| vpcs.contains(&key.vpc));
        if vpcs.is_empty() || !self.parts.values().any(|part| among(part)) {
            return self.clone();
        }
        let mut plan = self.clone();
        plan.parts.retain(|_, part| !among(part));
        plan
    }

    /// Every frontend, in the order of services. A key occurs once.
    pub fn frontends(&self) -> impl Iterator<Item = (&FrontendKey, &FrontendPlan)> {
        self.parts.values().flat_map(|part| &part.frontends)
    }

    /// Every list in use. A number occurs once.
    pub fn lists(&self) -> impl Iterator<Item = (ListId, &Arc<[BackendPlan]>)> {
        self.parts.values().flat_map(|part| &part.lists).map(|(id, list)| (*id, list))
    }

    /// Every source range in use.
    pub fn ranges(&self) -> impl Iterator<Item = (ServiceId, IpNet)> {
        let ranges = self.parts.values().flat_map(|part| &part.ranges);
        ranges.flat_map(|(id, nets)| nets.iter().map(|net| (*id, *net)))
    }

    /// Names of numbers.
    pub fn names(&self) -> impl Iterator<Item = (ServiceId, &ServiceRef)> {
        self.parts.values().flat_map(|part| &part.names).map(|(id, name)| (*id, name))
    }

    /// Health-check ports: (service, port, local ready backends).
    pub fn health_checks(&self) -> impl Iterator<Item = (&VpcName, &ServiceName, u16, usize)> {
        self.parts.iter().filter_map(|((vpc, name), part)| {
            let (port, ready) = part.health_check?;
            Some((vpc, name, port, ready))
        })
    }
}
