//! The fields of the API's objects that matter here, as JSON has them. Everything else is not even read.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// Absent and `null` are the same in the API.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// What every object has.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Meta {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) uid: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) annotations: Annotations,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) creation_timestamp: String,
    pub(crate) deletion_timestamp: Option<String>,
}

/// The annotations that are read.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Annotations {
    #[serde(rename = "kubernetes.io/config.mirror")]
    pub(crate) mirror: Option<String>,
}

/// As much of an object as is needed to name it.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Named {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: NamedMeta,
}

/// Name, place and version.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NamedMeta {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) namespace: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) resource_version: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Node {
    pub(crate) metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) spec: NodeSpec,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) status: NodeStatus,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct NodeSpec {
    #[serde(rename = "podCIDR", default, deserialize_with = "or_default")]
    pub(crate) pod_cidr: String,
    #[serde(rename = "podCIDRs", default, deserialize_with = "or_default")]
    pub(crate) pod_cidrs: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) taints: Vec<Taint>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Taint {
    pub(crate) key: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) value: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) effect: String,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct NodeStatus {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) addresses: Vec<NodeAddress>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) conditions: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NodeAddress {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) address: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) reason: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Namespace {
    pub(crate) metadata: Meta,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ServiceCidr {
    pub(crate) metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) spec: ServiceCidrSpec,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ServiceCidrSpec {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) cidrs: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Pod {
    pub(crate) metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) spec: PodSpec,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodSpec {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) node_name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) host_network: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) service_account_name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) containers: Vec<Container>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) init_containers: Vec<Container>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Container {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ports: Vec<ContainerPort>,
    /// `Always`: an init container that keeps running beside the others.
    pub(crate) restart_policy: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContainerPort {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) name: String,
    pub(crate) container_port: u16,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) protocol: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) host_port: u16,
    #[serde(rename = "hostIP", default, deserialize_with = "or_default")]
    pub(crate) host_ip: String,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct PodStatus {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) phase: String,
    #[serde(rename = "podIP", default, deserialize_with = "or_default")]
    pub(crate) pod_ip: String,
    #[serde(rename = "podIPs", default, deserialize_with = "or_default")]
    pub(crate) pod_ips: Vec<PodIp>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PodIp {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ip: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Service {
    pub(crate) metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) spec: ServiceSpec,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) status: ServiceStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    pub(crate) kind: String,
    #[serde(rename = "clusterIP", default, deserialize_with = "or_default")]
    pub(crate) cluster_ip: String,
    #[serde(rename = "clusterIPs", default, deserialize_with = "or_default")]
    pub(crate) cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs", default, deserialize_with = "or_default")]
    pub(crate) external_ips: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ports: Vec<ServicePort>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) session_affinity: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) session_affinity_config: AffinityConfig,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) internal_traffic_policy: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) external_traffic_policy: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) health_check_node_port: u16,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) load_balancer_source_ranges: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AffinityConfig {
    #[serde(rename = "clientIP", default, deserialize_with = "or_default")]
    pub(crate) client_ip: ClientIp,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClientIp {
    pub(crate) timeout_seconds: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServicePort {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) protocol: String,
    pub(crate) port: u16,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) node_port: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceStatus {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) load_balancer: LoadBalancer,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct LoadBalancer {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ingress: Vec<Ingress>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ingress {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ip: String,
    /// `VIP` (packets arrive with this destination) or `Proxy`.
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ip_mode: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Slice {
    pub(crate) metadata: Meta,
    pub(crate) address_type: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) endpoints: Vec<SliceEndpoint>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ports: Vec<SlicePort>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SliceEndpoint {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) addresses: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) conditions: SliceConditions,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) node_name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) hints: Hints,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SliceConditions {
    pub(crate) ready: Option<bool>,
    pub(crate) serving: Option<bool>,
    pub(crate) terminating: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Hints {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) for_zones: Vec<Hint>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) for_nodes: Vec<Hint>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Hint {
    pub(crate) name: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SlicePort {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) protocol: String,
    pub(crate) port: Option<u16>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Policy {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) spec: PolicySpec,
}

/// What of a policy says whom it isolates; the rest may be anything.
#[derive(Debug, Deserialize)]
pub(crate) struct PolicyFrame {
    pub(crate) spec: PolicyFrameSpec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyFrameSpec {
    pub(crate) pod_selector: Selector,
    #[serde(default)]
    pub(crate) policy_types: serde_json::Value,
    #[serde(default)]
    pub(crate) egress: serde_json::Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicySpec {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) pod_selector: Selector,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) policy_types: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ingress: Vec<IngressRule>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) egress: Vec<EgressRule>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Selector {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) match_labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) match_expressions: Vec<Requirement>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Requirement {
    pub(crate) key: String,
    pub(crate) operator: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) values: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct IngressRule {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) from: Vec<Peer>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ports: Vec<PolicyPort>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct EgressRule {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) to: Vec<Peer>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) ports: Vec<PolicyPort>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Peer {
    pub(crate) pod_selector: Option<Selector>,
    pub(crate) namespace_selector: Option<Selector>,
    pub(crate) ip_block: Option<IpBlock>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct IpBlock {
    pub(crate) cidr: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) except: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyPort {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) protocol: String,
    pub(crate) port: Option<IntOrString>,
    pub(crate) end_port: Option<u16>,
}

/// A number or a name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum IntOrString {
    Number(u16),
    Name(String),
}
