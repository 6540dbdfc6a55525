//! Services of a node: what each address, protocol and port stands for there.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_model::{ServiceName, VpcName};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::VpcId;

/// A number of a service's port on this node; in the maps for affinity, source ranges and names. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ServiceId(pub u32);

/// A list of backends; equal lists share a number, a number never changes what it lists. 0 = no backend.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrontendPlan {
    /// The service's port.
    pub service: ServiceId,
    /// Its backends for this scope.
    pub list: ListId,
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

/// Everything the service maps of one node must hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServicePlan {
    /// Frontends.
    pub frontends: BTreeMap<FrontendKey, FrontendPlan>,
    /// Lists in use, in the order of their indices. No list is empty.
    pub lists: BTreeMap<ListId, Vec<BackendPlan>>,
    /// Who may use the services that say so.
    pub ranges: BTreeMap<ServiceId, Vec<IpNet>>,
    /// Names of numbers.
    pub names: BTreeMap<ServiceId, ServiceRef>,
    /// Health-check port -> (service, local ready backends): what the node answers there over HTTP.
    pub health_checks: BTreeMap<u16, (ServiceName, usize)>,
}
