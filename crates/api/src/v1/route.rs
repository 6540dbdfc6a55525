//! Paths of the API.

/// `GET`: [`super::Health`].
pub const HEALTH: &str = "/v1/health";
/// `GET`: [`super::Status`].
pub const STATUS: &str = "/v1/status";
/// `GET`: [`super::EndpointList`]; `/{vpc}/{name}` below it: [`super::EndpointInfo`].
pub const ENDPOINTS: &str = "/v1/endpoints";
/// `GET`: [`super::IpamReport`].
pub const IPAM: &str = "/v1/ipam";
/// `GET`: [`super::KubernetesStatus`].
pub const KUBERNETES: &str = "/v1/kubernetes";
/// `GET ?vpc`: [`super::ServiceList`]; `/{vpc}/{name}` below it: [`super::ServiceInfo`], `/explain` below that: [`super::ServiceExplanation`].
pub const SERVICES: &str = "/v1/services";
/// `GET`: [`super::IdentityList`].
pub const IDENTITIES: &str = "/v1/identities";
/// `GET ?vpc&endpoint`: [`super::PolicyEntryList`].
pub const POLICY_ENTRIES: &str = "/v1/policy/entries";
/// `GET ?vpc`: [`super::RuleList`].
pub const POLICY_RULES: &str = "/v1/policy/rules";
/// `POST` [`super::ExplainRequest`]: [`super::Explanation`].
pub const POLICY_EXPLAIN: &str = "/v1/policy/explain";
/// `GET ?vpc&endpoint&revision&generation&timeout_ms`: [`super::PolicyWait`].
pub const POLICY_WAIT: &str = "/v1/policy/wait";
/// `POST` [`super::QuarantineRequest`]: [`super::PolicyHold`].
pub const POLICY_QUARANTINE: &str = "/v1/policy/quarantine";
/// `POST` [`super::HoldRequest`]: [`super::PolicyHold`].
pub const POLICY_FREEZE: &str = "/v1/policy/freeze";
/// `POST` [`super::RollbackRequest`]: [`super::PolicyHold`].
pub const POLICY_ROLLBACK: &str = "/v1/policy/rollback";
/// `POST` [`super::HoldRequest`]: [`super::PolicyHold`].
pub const POLICY_RELEASE: &str = "/v1/policy/release";
/// `GET ?vpc&endpoint&last`: [`super::PolicyHistory`].
pub const POLICY_HISTORY: &str = "/v1/policy/history";
/// `GET` and `DELETE` with [`super::ConntrackFilter`] as query: [`super::ConntrackList`], [`super::ConntrackFlushed`].
pub const CONNTRACK: &str = "/v1/conntrack";
/// `GET ?vpc&endpoint&reason`: [`super::DropList`].
pub const DROPS: &str = "/v1/drops";
/// `GET` with [`super::EventFilter`] as query: NDJSON of [`super::StreamItem`].
pub const EVENTS: &str = "/v1/events";
/// `POST` [`super::TraceRequest`]: [`super::TraceReport`].
pub const TRACE: &str = "/v1/trace";
/// `POST` [`super::CniAddRequest`]: [`super::CniAddResult`].
pub const CNI_ADD: &str = "/v1/cni/add";
/// `POST` [`super::CniCheckRequest`]: [`super::CniChecked`].
pub const CNI_CHECK: &str = "/v1/cni/check";
/// `POST` [`super::CniDelRequest`]: [`super::CniDeleted`].
pub const CNI_DEL: &str = "/v1/cni/del";
/// `POST` [`super::CniGcRequest`]: [`super::CniCollected`].
pub const CNI_GC: &str = "/v1/cni/gc";
/// `GET`: [`super::CniReport`].
pub const CNI: &str = "/v1/cni";
/// `GET`, `POST` [`super::CniStatusRequest`]: [`super::CniStatus`].
pub const CNI_STATUS: &str = "/v1/cni/status";
/// `GET`: [`super::CniTimings`].
pub const CNI_TIMING: &str = "/v1/cni/timing";
