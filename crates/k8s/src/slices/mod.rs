//! Workload slices: Pods as other nodes need them, many to an object, so that no node watches every Pod of a large cluster.
//!
//! The controller's leader packs ([`Packer`]) and publishes them; agents read them through a [`PeerView`].
//!
//! | | |
//! |---|---|
//! | size | at most [`Limits::workloads`] Pods and [`Limits::bytes`] of JSON |
//! | deduplication | Pods of one template share a [`Profile`] (labels, service account, named ports) |
//! | placement | a Pod stays where it is; its change rewrites one slice |
//! | truth | of two slices that name a Pod, the one with the higher (epoch, sequence) is right |

mod join;
mod pack;
mod peers;
mod wire;

use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{Labels, NamedPort, NodeName};

use crate::{ObjectName, Pod};

pub use join::{Join, Step, Told};
pub use pack::{Limits, Move, Packer};
pub use peers::{PeerChange, PeerView};
pub use wire::{
    PublishedSlice, SlicePort, SliceProfile, SliceProtocol, SliceWorkload, WorkloadFault, WorkloadSlice,
    WorkloadSliceSpec,
};

/// A Pod with an address of the Pod network, as other nodes need it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Workload {
    /// Name.
    pub pod: ObjectName,
    /// Uid: tells a Pod from the one of the same name before it.
    pub uid: Arc<str>,
    /// Addresses, at most one per family.
    pub ips: Vec<IpAddr>,
    /// The node it runs on.
    pub node: NodeName,
    /// RFC 3339, UTC; of two Pods that claim an address the younger has it.
    pub created: Arc<str>,
    /// What it shares with others.
    pub profile: Arc<Profile>,
}

/// What the Pods of one template have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Profile {
    /// The Pod's labels, and nothing else. Shared: a node's Pods of one template are many.
    pub labels: Arc<Labels>,
    /// Its service account.
    pub service_account: String,
    /// Its named ports, sorted.
    pub ports: Vec<NamedPort>,
}

impl Workload {
    /// What other nodes need of a Pod; `None`: nothing, it has no address of the Pod network (any more).
    #[must_use]
    pub fn of(name: &ObjectName, pod: &Pod) -> Option<Self> {
        let node = pod.node.clone()?;
        if pod.host_network || pod.finished || pod.ips.is_empty() || pod.uid.is_empty() {
            return None;
        }
        let mut ports = pod.named_ports.clone();
        ports.sort();
        Some(Self {
            pod: name.clone(),
            uid: pod.uid.as_str().into(),
            ips: pod.ips.clone(),
            node,
            created: pod.created.as_str().into(),
            profile: Arc::new(Profile {
                labels: pod.labels.clone(),
                service_account: pod.service_account.clone(),
                ports,
            }),
        })
    }
}

#[cfg(test)]
mod tests;
