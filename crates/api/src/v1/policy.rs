//! Policies: entries in the kernel, rules with hits, explanations and waiting.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Direction, Named, Verdict};

/// Answer of `GET /v1/policy/entries`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyEntryList {
    /// One per slot in force for the endpoint (or for all).
    pub slots: Vec<PolicySlotEntries>,
}

/// A compiled policy as the kernel holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySlotEntries {
    /// Slot number.
    pub slot: u32,
    /// Direction it judges.
    pub direction: Direction,
    /// Endpoints (`vpc/name`) that use it.
    pub endpoints: Vec<String>,
    /// Those of them that an operator holds at it: `quarantine`, `freeze` or `rollback`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub held: BTreeMap<String, String>,
    /// Entries by identity, protocol and port.
    pub entries: Vec<PolicyEntry>,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyEntry {
    /// Peer: the identity's number, and its labels or CIDRs in one line (`any` for 0).
    pub peer: Named,
    /// `any`, `tcp`, `udp`, `icmp`, `icmpv6`, `sctp` or a number.
    pub protocol: String,
    /// `any`, `80`, `8080-8087`; for ICMP `type` or `type/code`.
    pub ports: String,
    /// Verdict.
    pub verdict: Verdict,
    /// Rule that decided (`vpc/group/rule`); `default` with number 0.
    pub rule: Named,
    /// The higher one decides.
    pub precedence: u32,
    /// New connections are recorded.
    pub log: bool,
    /// Replies are judged on their own.
    pub stateless: bool,
}

/// Answer of `GET /v1/policy/rules`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleList {
    /// Rules in use on this node.
    pub rules: Vec<RuleHits>,
}

/// How often a rule decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleHits {
    /// `vpc/group/rule`.
    pub rule: Named,
    /// New connections it decided.
    pub hits: u64,
    /// Bytes of the packets it decided on.
    pub bytes: u64,
}

/// Body of `POST /v1/policy/explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainRequest {
    /// VPC of a side that says none and has no other side that does; empty: the default VPC.
    #[serde(default)]
    pub vpc: String,
    /// A [`crate::Side`]: an endpoint, a Pod or an address; a Service stands for its first backend in use.
    pub from: String,
    /// A [`crate::Side`]: an endpoint, a Pod, a Service or an address.
    pub to: String,
    /// `tcp`, `udp`, `icmp` (the family's), `sctp` or a number.
    pub protocol: String,
    /// Destination port; a Service's only one of the protocol when absent.
    #[serde(default)]
    pub port: Option<u16>,
    /// ICMP type; 8 or 128 (echo request) when absent.
    #[serde(default)]
    pub icmp_type: Option<u8>,
    /// ICMP code; 0 when absent.
    #[serde(default)]
    pub icmp_code: Option<u8>,
    /// 4 or 6, for endpoints with both; 4 first when absent.
    #[serde(default)]
    pub family: Option<u8>,
}

/// Answer of `POST /v1/policy/explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Both directions together; to a Service: of every backend in use that was judged.
    pub verdict: Verdict,
    /// One sentence.
    pub summary: String,
    /// The sender's side, when the sender is an endpoint the document names.
    pub egress: Option<Judgement>,
    /// The receiver's side, when the receiver is an endpoint the document names.
    pub ingress: Option<Judgement>,
    /// The Service asked for; `egress` and `ingress` are those of its first backend that refuses, or of the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceSide>,
}

/// A Service as the receiver of a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceSide {
    /// `namespace/name` of a Kubernetes Service, else `vpc/name`.
    pub service: String,
    /// `cluster-ip`, `load-balancer`, `external-ip`, `node-port` or `host-port`.
    pub kind: String,
    /// Address that clients ask for.
    pub ip: IpAddr,
    /// Port that clients ask for.
    pub port: u16,
    /// `backend`, `refused` (no backend) or `silence` (no local backend, other nodes have some).
    pub answer: String,
    /// Its backends of the address's family.
    pub backends: Vec<SideBackend>,
}

/// A backend of a Service, and what the policies say of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SideBackend {
    /// Address.
    pub ip: IpAddr,
    /// Port.
    pub port: u16,
    /// Where it runs.
    pub node: Option<String>,
    /// The endpoint's name, when the address is one's that this node knows.
    pub endpoint: Option<String>,
    /// New connections may go there.
    pub used: bool,
    /// Why, or why not.
    pub why: String,
    /// What the policies say; absent where they were not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

/// One direction's decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judgement {
    /// `vpc/name` of the endpoint whose policy it is.
    pub endpoint: String,
    /// Whether that endpoint is on this node (its policy is enforced here).
    pub local: bool,
    /// Direction.
    pub direction: Direction,
    /// Verdict.
    pub verdict: Verdict,
    /// Deciding rule (`vpc/group/rule`); absent when the default decided.
    pub rule: Option<Named>,
    /// Why: the rule in words, or why the default applied.
    pub why: String,
    /// Who the peer is taken for.
    pub peer: PeerInfo,
    /// What the live maps of this node say, for a local endpoint.
    pub kernel: Option<KernelAnswer>,
    /// Rules of the direction in the order they were tried, up to the deciding one.
    pub considered: Vec<ConsideredRule>,
}

/// Who a peer is taken for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// The address judged.
    pub address: String,
    /// Identity number on this node.
    pub identity: u32,
    /// `vpc/name` when it is an endpoint.
    pub endpoint: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// CIDRs of rules that cover it.
    pub cidrs: Vec<String>,
}

/// What the live maps say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelAnswer {
    /// Verdict; absent when no entry answers (failed closed).
    pub verdict: Option<Verdict>,
    /// Rule.
    pub rule: Named,
    /// Slot asked.
    pub slot: u32,
    /// Identity found in the ipcache.
    pub identity: u32,
}

/// A rule that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsideredRule {
    /// `vpc/group/rule`.
    pub rule: String,
    /// Tier: the lower one first.
    pub tier: u8,
    /// Priority: the lower number first.
    pub priority: u16,
    /// `allow`, `drop`, `reject`, `log`, `pass`.
    pub action: String,
    /// Whether it matched.
    pub matched: bool,
    /// Why not (or why).
    pub why: String,
}

/// Answer of `GET /v1/policy/wait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyWait {
    /// Document generation in force.
    pub generation: u64,
    /// Revision in force of the endpoint asked for, else 0.
    pub revision: u32,
    /// Microseconds waited.
    pub waited_us: u64,
}
