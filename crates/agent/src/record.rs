//! What is kept of a local endpoint between lives of the agent: how it is wired, and for a CNI attachment all of it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use flowloom_api::v1::{CniAttachment, CniNetwork, CniPod, CniRuntime, Moment};
use flowloom_model::{
    AllowLocalhost, Attachment, Endpoint, EndpointKey, EndpointName, GroupName, Labels, Mac, NodeName,
    SubnetName,
};
use serde::{Deserialize, Serialize};

use crate::wiring::Wire;

/// A local endpoint that has, or is about to get, a device. Written before the device is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its name.
    pub key: EndpointKey,
    /// Its device.
    pub wire: Wire,
    /// Set for what a CNI request attached.
    pub cni: Option<CniRecord>,
}

/// A CNI attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CniRecord {
    /// Container and interface: the owner of its addresses.
    pub attachment: CniAttachment,
    /// Path of the namespace.
    pub netns: String,
    /// What the network configuration asked for; another ADD must ask for the same.
    pub network: CniNetwork,
    /// `CNI_ARGS`.
    pub args: BTreeMap<String, String>,
    /// `runtimeConfig`; the host ports are the service engine's to serve.
    #[serde(default)]
    pub runtime: CniRuntime,
    /// When its ADD was taken; unknown in records of older versions. What was asked before is about another attachment of the name.
    #[serde(default)]
    pub added: Option<Moment>,
    /// The endpoint, unless it is one of the document that was bound.
    pub endpoint: Option<OwnEndpoint>,
}

/// An endpoint that exists because of a CNI request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnEndpoint {
    /// Subnet.
    pub subnet: SubnetName,
    /// Addresses, allocated by this agent.
    pub ips: Vec<IpAddr>,
    /// The MAC that the runtime asked for.
    #[serde(default)]
    pub mac: Option<Mac>,
    /// Groups.
    pub security_groups: Vec<GroupName>,
    /// Labels.
    pub labels: Labels,
}

impl Record {
    /// Name of its file. Names have no `_`, so no two endpoints share one.
    #[must_use]
    pub(crate) fn file(&self) -> String {
        file_name(&self.key)
    }

    /// As an endpoint of the world, for CNI endpoints of this agent's making.
    #[must_use]
    pub(crate) fn endpoint(&self, node: &NodeName) -> Option<Endpoint> {
        let own = self.cni.as_ref()?.endpoint.as_ref()?;
        Some(Endpoint {
            vpc: self.key.vpc.clone(),
            name: self.key.name.clone(),
            subnet: own.subnet.clone(),
            ips: own.ips.clone(),
            mac: own.mac,
            node: node.clone(),
            security_groups: own.security_groups.iter().cloned().collect(),
            labels: own.labels.clone(),
            named_ports: Vec::new(),
            attachment: Attachment::Cni,
            allow_localhost: AllowLocalhost::default(),
        })
    }
}

impl CniRecord {
    /// The pod, when a Kubernetes runtime asked: what a source of Pods joins on.
    #[must_use]
    pub(crate) fn pod(&self) -> Option<CniPod> {
        let arg = |key: &str| self.args.get(key).filter(|v| !v.is_empty()).cloned();
        let (namespace, name) = (arg("K8S_POD_NAMESPACE")?, arg("K8S_POD_NAME")?);
        Some(CniPod { namespace, name, uid: arg("K8S_POD_UID") })
    }
}

/// See [`Record::file`].
#[must_use]
pub(crate) fn file_name(key: &EndpointKey) -> String {
    format!("{}_{}", key.vpc, key.name)
}

fn hash(of: &impl Hash) -> u64 {
    // SipHash with fixed keys: the same in every life of the agent and in every version of it that keeps this line.
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Name of the host-side device of an endpoint: 13 bytes, the kernel takes 15.
#[must_use]
pub(crate) fn device_name(key: &EndpointKey) -> String {
    format!("fl{:011x}", hash(&(key.vpc.as_str(), key.name.as_str())) >> 20)
}

/// A name for an endpoint that a CNI request makes: the pod's, or the container's; with the interface when it is not `eth0`.
/// `taken` says whether another attachment has it; then a part of the container's id follows.
#[must_use]
pub(crate) fn endpoint_name(
    attachment: &CniAttachment,
    args: &BTreeMap<String, String>,
    taken: impl Fn(&EndpointName) -> bool,
) -> Option<EndpointName> {
    let text = |key: &str| args.get(key).filter(|v| !v.is_empty());
    let mut base = match (text("K8S_POD_NAMESPACE"), text("K8S_POD_NAME")) {
        (Some(namespace), Some(pod)) => flowloom_model::joined(&[namespace, pod]),
        _ => attachment.container_id.chars().take(40).collect(),
    };
    if attachment.ifname != "eth0" {
        base = format!("{base}.{}", attachment.ifname);
    }
    let clean: String = base
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '-' })
        .collect();
    let clean = clean.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    if clean.len() <= 63
        && let Ok(name) = EndpointName::new(clean)
        && !taken(&name)
    {
        return Some(name);
    }
    let tail = format!("-{:08x}", hash(&(&attachment.container_id, &attachment.ifname)) >> 32);
    let head: String = clean.chars().take(63 - tail.len()).collect();
    let head = head.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    EndpointName::new(format!("{}{tail}", if head.is_empty() { "x" } else { head }))
        .ok()
        .filter(|n| !taken(n))
}

/// Labels of an attachment: those of the network configuration, and the pod's name and namespace.
#[must_use]
pub(crate) fn labels(network: &CniNetwork, args: &BTreeMap<String, String>) -> Labels {
    let mut labels: Labels = network.labels.clone();
    for (arg, label) in [
        ("K8S_POD_NAMESPACE", "k8s.pod.namespace"),
        ("K8S_POD_NAME", "k8s.pod.name"),
        ("K8S_POD_UID", "k8s.pod.uid"),
    ] {
        if let Some(value) = args.get(arg).filter(|v| !v.is_empty()) {
            labels.insert(label.to_owned(), value.clone());
        }
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(id: &str, ifname: &str) -> CniAttachment {
        CniAttachment { container_id: id.into(), ifname: ifname.into() }
    }

    #[test]
    fn a_pod_gives_its_name_and_a_second_life_of_it_gets_another() {
        let args: BTreeMap<String, String> =
            [("K8S_POD_NAMESPACE".into(), "shop".into()), ("K8S_POD_NAME".into(), "web-0".into())].into();
        let first = endpoint_name(&attachment("aaa", "eth0"), &args, |_| false).unwrap();
        assert_eq!(first.as_str(), "shop.web-0");
        let second = endpoint_name(&attachment("bbb", "eth0"), &args, |n| *n == first).unwrap();
        assert!(second.as_str().starts_with("shop.web-0-") && second != first, "{second}");
        let other = endpoint_name(&attachment("aaa", "net1"), &args, |_| false).unwrap();
        assert_eq!(other.as_str(), "shop.web-0.net1");
    }

    #[test]
    fn any_container_id_gives_a_legal_name() {
        for id in ["A_b", "___", "", &"x".repeat(300), "-a-", "é"] {
            assert!(endpoint_name(&attachment(id, "eth0"), &BTreeMap::new(), |_| false).is_some(), "{id:?}");
            assert!(
                endpoint_name(&attachment(id, "weird_name"), &BTreeMap::new(), |_| false).is_some(),
                "{id:?}"
            );
        }
    }

    #[test]
    fn the_same_name_in_two_vpcs_has_two_devices_and_files() {
        let (red, blue): (EndpointKey, EndpointKey) =
            ("red/web".parse().unwrap(), "blue/web".parse().unwrap());
        assert_ne!(device_name(&red), device_name(&blue));
        assert_ne!(file_name(&red), file_name(&blue));
        assert!(device_name(&red).len() <= 15);
    }
}
