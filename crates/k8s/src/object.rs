//! Objects of the API, parsed once: after that a value cannot be wrong.

mod policy;
mod service;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{Labels, NamedPort, NodeName, Operator, PortName, Protocol};
use ipnet::IpNet;
use serde::de::DeserializeOwned;

pub use self::policy::{NetworkPolicy, PolicyPeer, PolicyPort, PolicyRule, PortMatch};
pub use self::service::{
    EndpointSlice, LoadBalancer, LoadBalancerPort, ServiceCidr, SliceEndpoint, SlicePort,
};
use crate::wire;

/// Namespace and name; the namespace is empty for what has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl ObjectName {
    /// Puts the two together.
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// A kind of object that is watched.
pub trait Kind: Sized + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// As in manifests.
    const NAME: &'static str;
    /// Collection of all namespaces.
    const PATH: &'static str;
    /// Servers may not have the kind, or not show it; then there is nothing of it to wait for.
    const OPTIONAL: bool = false;
    /// Reads the object's JSON.
    ///
    /// # Errors
    /// The field and what is wrong with it.
    fn decode(json: &str) -> Result<Self, String>;

    /// What stands for an object that [`Self::decode`] refused for `reason` and that never was good: the safe part of it, where there is
    /// one. Its [`Self::fault`] is the reason.
    fn salvage(_json: &str, _reason: &str) -> Option<Self> {
        None
    }

    /// Why this is less than the object says.
    fn fault(&self) -> Option<&str> {
        None
    }
}

/// [`Kind::decode`], or what can be salvaged.
pub(crate) fn decode_or_salvage<T: Kind>(json: &str) -> Result<T, String> {
    T::decode(json).or_else(|reason| T::salvage(json, &reason).ok_or(reason))
}

/// Decodes a wire shape; what is wrong is said with the field's path.
fn read<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    serde_json::from_str(json).or_else(|_| {
        // Once more, with the path: twice as slow, and for broken objects only.
        serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(json))
            .map_err(|e| e.to_string())
    })
}

fn address(field: &str, text: &str) -> Result<IpAddr, String> {
    let ip: IpAddr = text.parse().map_err(|_| format!("{field}: {text:?} is not an address"))?;
    Ok(ip.to_canonical())
}

fn cidr(field: &str, text: &str) -> Result<IpNet, String> {
    let net: IpNet = text.parse().map_err(|_| format!("{field}: {text:?} is not a CIDR"))?;
    // The API takes mapped IPv4 and set host bits; the rest of the world means the same by the plain form.
    if let IpNet::V6(n) = net
        && let Some(v4) = n.addr().to_ipv4_mapped()
        && let Some(length) = n.prefix_len().checked_sub(96)
    {
        return IpNet::new(v4.into(), length).map(|n| n.trunc()).map_err(|e| format!("{field}: {e}"));
    }
    Ok(net.trunc())
}

/// Absent means TCP.
fn protocol(field: &str, text: &str) -> Result<Protocol, String> {
    match text {
        "" | "TCP" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        "SCTP" => Ok(Protocol::Sctp),
        other => Err(format!("{field}: {other:?} is not TCP, UDP or SCTP")),
    }
}

fn node_name(field: &str, text: &str) -> Result<Option<NodeName>, String> {
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(|e| format!("{field}: {e}")) }
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Internal addresses, in the API's order.
    pub internal: Vec<IpAddr>,
    /// Ranges that its Pods get addresses from.
    pub pod_cidrs: Vec<IpNet>,
    /// Zone, from its well-known label.
    pub zone: String,
    /// Taints by key: value and effect.
    pub taints: Vec<(String, String, String)>,
    /// Status and reason of the condition `NetworkUnavailable`.
    pub network_unavailable: Option<(String, String)>,
    /// RFC 3339, UTC: sorts as text.
    pub created: String,
}

impl Kind for Node {
    const NAME: &'static str = "Node";
    const PATH: &'static str = "/api/v1/nodes";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Node = read(json)?;
        NodeName::new(&w.metadata.name).map_err(|e| format!("metadata.name: {e}"))?;
        let internal = w.status.addresses.iter().filter(|a| a.kind == "InternalIP");
        let internal = internal.map(|a| address("status.addresses", &a.address)).collect::<Result<_, _>>()?;
        let mut texts = w.spec.pod_cidrs;
        if texts.is_empty() && !w.spec.pod_cidr.is_empty() {
            texts.push(w.spec.pod_cidr);
        }
        let pod_cidrs = texts.iter().map(|t| cidr("spec.podCIDRs", t)).collect::<Result<_, _>>()?;
        let unavailable = w.status.conditions.into_iter().find(|c| c.kind == "NetworkUnavailable");
        Ok(Self {
            internal,
            pod_cidrs,
            zone: w.metadata.labels.get("topology.kubernetes.io/zone").cloned().unwrap_or_default(),
            taints: w.spec.taints.into_iter().map(|t| (t.key, t.value, t.effect)).collect(),
            network_unavailable: unavailable.map(|c| (c.status, c.reason)),
            created: w.metadata.creation_timestamp,
        })
    }
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Labels.
    pub labels: Labels,
}

impl Kind for Namespace {
    const NAME: &'static str = "Namespace";
    const PATH: &'static str = "/api/v1/namespaces";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Namespace = read(json)?;
        Ok(Self { labels: w.metadata.labels })
    }
}

/// A port of this node that stands for one of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// Protocol.
    pub protocol: Protocol,
    /// Address of the node; every one when none is said.
    pub address: Option<IpAddr>,
    /// Port of the node.
    pub host_port: u16,
    /// Port of the Pod.
    pub port: u16,
}

/// A Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Which life of the name.
    pub uid: String,
    /// For the API's picture of a Pod that a kubelet read from a file: the UID under which the kubelet runs it.
    pub mirror_of: String,
    /// Where it runs, once that is decided.
    pub node: Option<NodeName>,
    /// Labels; Pods of one template share them.
    pub labels: Arc<Labels>,
    /// Service account.
    pub service_account: String,
    /// It uses its node's network.
    pub host_network: bool,
    /// Ports with a name.
    pub named_ports: Vec<NamedPort>,
    /// Ports of the node.
    pub host_ports: Vec<HostPort>,
    /// Addresses, as its kubelet reported them.
    pub ips: Vec<IpAddr>,
    /// It ran to its end: its addresses are somebody else's.
    pub finished: bool,
    /// It is being deleted.
    pub leaving: bool,
    /// RFC 3339, UTC: sorts as text.
    pub created: String,
}

impl Kind for Pod {
    const NAME: &'static str = "Pod";
    const PATH: &'static str = "/api/v1/pods";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Pod = read(json)?;
        let sidecars =
            w.spec.init_containers.iter().filter(|c| c.restart_policy.as_deref() == Some("Always"));
        let (mut named_ports, mut host_ports) = (Vec::new(), Vec::new());
        for port in w.spec.containers.iter().chain(sidecars).flat_map(|c| &c.ports) {
            let protocol = protocol("spec.containers.ports.protocol", &port.protocol)?;
            if !port.name.is_empty() {
                let name =
                    PortName::new(&port.name).map_err(|e| format!("spec.containers.ports.name: {e}"))?;
                let named = NamedPort { name, protocol, port: port.container_port };
                // The first of a name counts.
                if !named_ports.iter().any(|p: &NamedPort| p.name == named.name && p.protocol == protocol) {
                    named_ports.push(named);
                }
            }
            if port.host_port != 0 && !w.spec.host_network {
                let ip = Some(&port.host_ip).filter(|t| !t.is_empty());
                let ip = ip.map(|t| address("spec.containers.ports.hostIP", t)).transpose()?;
                host_ports.push(HostPort {
                    protocol,
                    address: ip.filter(|a| !a.is_unspecified()),
                    host_port: port.host_port,
                    port: port.container_port,
                });
            }
        }
        named_ports.shrink_to_fit();
        let mut texts: Vec<String> =
            w.status.pod_ips.into_iter().map(|p| p.ip).filter(|t| !t.is_empty()).collect();
        if texts.is_empty() && !w.status.pod_ip.is_empty() {
            texts.push(w.status.pod_ip);
        }
        Ok(Self {
            uid: w.metadata.uid,
            mirror_of: w.metadata.annotations.mirror.unwrap_or_default(),
            node: node_name("spec.nodeName", &w.spec.node_name)?,
            labels: Arc::new(w.metadata.labels),
            service_account: w.spec.service_account_name,
            host_network: w.spec.host_network,
            named_ports,
            host_ports,
            ips: texts.iter().map(|t| address("status.podIPs", t)).collect::<Result<_, _>>()?,
            finished: matches!(w.status.phase.as_str(), "Succeeded" | "Failed"),
            leaving: w.metadata.deletion_timestamp.is_some(),
            created: w.metadata.creation_timestamp,
        })
    }
}

/// A label selector as the API has it: one that asks nothing selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// Equal labels.
    pub labels: BTreeMap<String, String>,
    /// Expressions.
    pub expressions: Vec<flowloom_model::Expression>,
}

impl LabelSelector {
    /// Whether it asks nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.expressions.is_empty()
    }

    /// Whether it selects these labels.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        self.labels.iter().all(|(k, v)| labels.get(k) == Some(v))
            && self.expressions.iter().all(|e| e.matches(labels))
    }

    fn parse(field: &str, w: wire::Selector) -> Result<Self, String> {
        let mut expressions = Vec::with_capacity(w.match_expressions.len());
        for requirement in w.match_expressions {
            let operator = match requirement.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => return Err(format!("{field}.matchExpressions: {other:?} is not an operator")),
            };
            if matches!(operator, Operator::In | Operator::NotIn) == requirement.values.is_empty() {
                return Err(format!(
                    "{field}.matchExpressions: In and NotIn need values, Exists and DoesNotExist have none"
                ));
            }
            expressions.push(flowloom_model::Expression {
                key: requirement.key,
                operator,
                values: requirement.values.into_iter().collect(),
            });
        }
        Ok(Self { labels: w.match_labels, expressions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_read_with_what_matters_and_absent_and_null_are_the_same() {
        let pod = Pod::decode(
            r#"{"metadata":{"name":"web-0","namespace":"shop","uid":"u","labels":null,"annotations":{"x":"y"}},
            "spec":{"nodeName":"n1","containers":[{"ports":[{"containerPort":80,"name":"http"},
              {"containerPort":53,"protocol":"UDP","hostPort":5353,"hostIP":"0.0.0.0"}]},{"ports":null}],
              "initContainers":[{"ports":[{"containerPort":1,"name":"no"}]},
              {"restartPolicy":"Always","ports":[{"containerPort":9,"name":"side"}]}]},
            "status":{"phase":"Running","podIPs":[{"ip":"10.0.0.9"},{"ip":"FD00::9"}]}}"#,
        )
        .unwrap();
        assert_eq!(pod.node.as_ref().unwrap().as_str(), "n1");
        let names: Vec<_> = pod.named_ports.iter().map(|p| (p.name.as_str(), p.port)).collect();
        assert_eq!(names, [("http", 80), ("side", 9)]);
        let host = &pod.host_ports[0];
        assert_eq!((host.address, host.host_port, host.port), (None, 5353, 53));
        assert_eq!(pod.ips[1].to_string(), "fd00::9");
        assert!(!pod.finished && pod.labels.is_empty());
    }

    #[test]
    fn what_is_wrong_is_said_with_the_fields_path() {
        let e = Pod::decode(
            r#"{"metadata":{"name":"x"},"spec":{"containers":[{"ports":[{"containerPort":"eighty"}]}]}}"#,
        )
        .unwrap_err();
        assert!(e.contains("spec.containers[0].ports[0].containerPort"), "{e}");
        let e =
            Pod::decode(r#"{"metadata":{"name":"x"},"status":{"podIPs":[{"ip":"010.0.0.1"}]}}"#).unwrap_err();
        assert!(e.contains("podIPs") && e.contains("010.0.0.1"), "{e}");
    }

    #[test]
    fn a_mapped_or_unmasked_cidr_is_read_as_what_it_means() {
        assert_eq!(cidr("f", "10.1.2.3/8").unwrap().to_string(), "10.0.0.0/8");
        assert_eq!(cidr("f", "::ffff:10.1.0.0/112").unwrap().to_string(), "10.1.0.0/16");
    }
}
