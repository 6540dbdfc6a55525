//! The resource as the API server has it.
#![allow(unreachable_pub, reason = "the schema's derive copies each struct into a place of its own")]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{NamedPort, NodeName, PortName, Protocol};
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::{Profile, Workload};
use crate::{Kind, ObjectName};

/// Pods of the cluster as other nodes need them. Written by flowloom-controller only; a change by anybody else is undone.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::duplicated_attributes, reason = "two columns of the same type are no duplicate")]
#[kube(
    group = "flowloom.io",
    version = "v1alpha1",
    kind = "WorkloadSlice",
    plural = "workloadslices",
    shortname = "wls",
    category = "flowloom",
    doc = "Pods of the cluster as other nodes need them. Written by flowloom-controller only; a change by anybody else is undone.",
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".spec.epoch"),
    printcolumn(name = "Sequence", type_ = "integer", json_path = ".spec.sequence"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = kube::core::Rule::new("self.epoch >= oldSelf.epoch")
    .message("a controller that leads no more may not write"))]
#[x_kube(validation = kube::core::Rule::new("self.workloads.all(w, w.node < size(self.nodes))")
    .message("node is an index into nodes"))]
#[x_kube(validation = kube::core::Rule::new("self.workloads.all(w, w.profile < size(self.profiles))")
    .message("profile is an index into profiles"))]
pub struct WorkloadSliceSpec {
    /// Counts the changes of leadership; never falls.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Grows with every slice a leader writes. Of two slices that name a Pod, the one with the higher (epoch, sequence) is right.
    #[schemars(range(min = 0))]
    pub sequence: i64,
    /// Names of nodes, each once.
    #[schemars(length(max = 250), inner(length(max = 253)))]
    pub nodes: Vec<String>,
    /// What Pods of one template have in common, each once.
    #[schemars(length(max = 250))]
    pub profiles: Vec<SliceProfile>,
    /// The Pods, by namespace and name.
    #[schemars(length(max = 250))]
    pub workloads: Vec<SliceWorkload>,
}

/// A Pod.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = kube::core::Rule::new("self.ips.all(i, isIP(i))").message("ips holds addresses"))]
pub struct SliceWorkload {
    /// Namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
    /// Uid.
    #[schemars(length(min = 1, max = 128))]
    pub uid: String,
    /// Addresses, at most one per family.
    #[schemars(length(min = 1, max = 2), inner(length(max = 45)))]
    pub ips: Vec<String>,
    /// RFC 3339, UTC. Of two Pods that claim an address the younger has it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 40))]
    pub created: String,
    /// Index into `nodes`.
    #[schemars(range(min = 0, max = 249))]
    pub node: i32,
    /// Index into `profiles`.
    #[schemars(range(min = 0, max = 249))]
    pub profile: i32,
}

/// What Pods of one template have in common.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceProfile {
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Service account.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub service_account: String,
    /// Named ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 250))]
    pub ports: Vec<SlicePort>,
}

/// A port by name.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicePort {
    /// Name.
    #[schemars(length(min = 1, max = 15))]
    pub name: String,
    /// Protocol.
    pub protocol: SliceProtocol,
    /// Port.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
}

/// Protocol of a named port.
#[derive(schemars::JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum SliceProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl SliceProtocol {
    fn of(protocol: Protocol) -> Option<Self> {
        match protocol {
            Protocol::Tcp => Some(Self::Tcp),
            Protocol::Udp => Some(Self::Udp),
            Protocol::Sctp => Some(Self::Sctp),
            Protocol::Any | Protocol::Icmp => None,
        }
    }

    const fn protocol(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::Tcp,
            Self::Udp => Protocol::Udp,
            Self::Sctp => Protocol::Sctp,
        }
    }
}

/// Why an entry of a slice is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadFault {
    /// An index leads nowhere, or to what is no name of a node.
    #[error("{namespace}/{pod}: {what} {index} is not in the slice")]
    Index {
        /// Namespace.
        namespace: String,
        /// Pod.
        pod: String,
        /// `node` or `profile`.
        what: &'static str,
        /// The index.
        index: i32,
    },
    /// No address, or one that is none.
    #[error("{namespace}/{pod}: {value:?} is no address")]
    Address {
        /// Namespace.
        namespace: String,
        /// Pod.
        pod: String,
        /// What stands there.
        value: String,
    },
    /// No name.
    #[error("an entry without namespace, name or uid")]
    Nameless,
}

impl WorkloadSliceSpec {
    /// Writes workloads (sorted by name) with each node and profile once. The order of all parts follows from the workloads alone.
    #[must_use]
    pub fn of<'a>(epoch: i64, sequence: i64, workloads: impl Iterator<Item = &'a Workload>) -> Self {
        let mut spec = Self { epoch, sequence, ..Self::default() };
        let mut nodes: BTreeMap<&NodeName, i32> = BTreeMap::new();
        let mut profiles: BTreeMap<&Profile, i32> = BTreeMap::new();
        for w in workloads {
            let node = *nodes.entry(&w.node).or_insert_with(|| {
                spec.nodes.push(w.node.to_string());
                spec.nodes.len() as i32 - 1
            });
            let profile = *profiles.entry(&w.profile).or_insert_with(|| {
                spec.profiles.push(SliceProfile::of(&w.profile));
                spec.profiles.len() as i32 - 1
            });
            spec.workloads.push(SliceWorkload::of(w, node, profile));
        }
        spec
    }

    /// Whether two say the same of the same Pods, whoever wrote them and when.
    #[must_use]
    pub fn same_content(&self, other: &Self) -> bool {
        self.nodes == other.nodes && self.profiles == other.profiles && self.workloads == other.workloads
    }

    /// The Pods of the slice. A bad entry is a fault of its own; its neighbours are there.
    pub fn workloads(&self) -> impl Iterator<Item = Result<Workload, WorkloadFault>> {
        let nodes: Vec<Option<NodeName>> = self.nodes.iter().map(|n| n.parse().ok()).collect();
        let profiles: Vec<Arc<Profile>> = self.profiles.iter().map(|p| Arc::new(p.profile())).collect();
        self.workloads.iter().map(move |w| w.workload(&nodes, &profiles))
    }
}

impl SliceProfile {
    pub(super) fn of(profile: &Profile) -> Self {
        let port = |p: &NamedPort| {
            let protocol = SliceProtocol::of(p.protocol)?;
            Some(SlicePort { name: p.name.to_string(), protocol, port: i32::from(p.port) })
        };
        Self {
            labels: (*profile.labels).clone(),
            service_account: profile.service_account.clone(),
            ports: profile.ports.iter().filter_map(port).collect(),
        }
    }

    fn profile(&self) -> Profile {
        // The schema keeps ports in range; one that is not names nothing.
        let port = |p: &SlicePort| {
            let port = u16::try_from(p.port).ok().filter(|n| *n != 0)?;
            Some(NamedPort { name: PortName::new(&p.name).ok()?, protocol: p.protocol.protocol(), port })
        };
        Profile {
            labels: Arc::new(self.labels.clone()),
            service_account: self.service_account.clone(),
            ports: self.ports.iter().filter_map(port).collect(),
        }
    }
}

impl SliceWorkload {
    pub(super) fn of(w: &Workload, node: i32, profile: i32) -> Self {
        Self {
            namespace: w.pod.namespace.clone(),
            pod: w.pod.name.clone(),
            uid: w.uid.to_string(),
            ips: w.ips.iter().map(IpAddr::to_string).collect(),
            created: w.created.to_string(),
            node,
            profile,
        }
    }

    fn workload(
        &self,
        nodes: &[Option<NodeName>],
        profiles: &[Arc<Profile>],
    ) -> Result<Workload, WorkloadFault> {
        if self.namespace.is_empty() || self.pod.is_empty() || self.uid.is_empty() {
            return Err(WorkloadFault::Nameless);
        }
        let (namespace, pod) = (|| self.namespace.clone(), || self.pod.clone());
        let lost = |what, index| WorkloadFault::Index { namespace: namespace(), pod: pod(), what, index };
        let bad =
            |value: &str| WorkloadFault::Address { namespace: namespace(), pod: pod(), value: value.into() };
        let at = |index: i32| usize::try_from(index).unwrap_or(usize::MAX);
        if self.ips.is_empty() {
            return Err(bad(""));
        }
        Ok(Workload {
            pod: ObjectName::new(self.namespace.as_str(), self.pod.as_str()),
            uid: self.uid.as_str().into(),
            ips: self.ips.iter().map(|i| i.parse().map_err(|_| bad(i))).collect::<Result<_, _>>()?,
            node: nodes.get(at(self.node)).cloned().flatten().ok_or_else(|| lost("node", self.node))?,
            created: self.created.as_str().into(),
            profile: profiles.get(at(self.profile)).cloned().ok_or_else(|| lost("profile", self.profile))?,
        })
    }
}

/// A slice as it stands at the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedSlice {
    /// Which life of the name.
    pub uid: String,
    /// Version, for conditional writes.
    pub version: String,
    /// What it says.
    pub spec: WorkloadSliceSpec,
}

impl PublishedSlice {
    /// Of an answer to a write.
    #[must_use]
    pub fn of(slice: WorkloadSlice) -> Self {
        Self {
            uid: slice.metadata.uid.unwrap_or_default(),
            version: slice.metadata.resource_version.unwrap_or_default(),
            spec: slice.spec,
        }
    }
}

impl Kind for PublishedSlice {
    const NAME: &'static str = "WorkloadSlice";
    const PATH: &'static str = "/apis/flowloom.io/v1alpha1/workloadslices";

    fn decode(json: &str) -> Result<Self, String> {
        serde_json::from_str(json).map(Self::of).map_err(|e| e.to_string())
    }
}
