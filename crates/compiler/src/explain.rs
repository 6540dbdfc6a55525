//! Why a packet is decided as it is: the path the kernel takes, with the names people wrote.

use std::net::IpAddr;

use flowloom_model::{Action, Direction, EndpointKey, EndpointName, VpcName, World};
use serde::{Deserialize, Serialize};

use crate::{Identity, IdentityFacts, NodePlan, PolicySlot, RuleId, RuleRef};

/// One side of a question.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Party {
    /// An endpoint of the VPC; its address of the family that fits the other side.
    Endpoint(EndpointName),
    /// An address, whoever has it.
    Address(IpAddr),
}

/// The 16 bits that policies match behind the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortQuery {
    /// The responder's port.
    Port(u16),
    /// ICMP type and code.
    Icmp {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
    },
    /// The protocol has neither.
    None,
}

impl PortQuery {
    /// As in a policy key.
    #[must_use]
    pub fn bits(self) -> u16 {
        match self {
            Self::Port(port) => port,
            Self::Icmp { kind, code } => u16::from_be_bytes([kind, code]),
            Self::None => 0,
        }
    }
}

/// A question: may this connection be opened?
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Query {
    /// VPC of both sides.
    pub vpc: VpcName,
    /// Who opens it.
    pub source: Party,
    /// Who answers.
    pub destination: Party,
    /// IP protocol number.
    pub protocol: u8,
    /// Port or ICMP type.
    pub port: PortQuery,
}

/// Why a question has no answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ExplainError {
    /// No such VPC.
    #[error("vpc {0} does not exist")]
    UnknownVpc(VpcName),
    /// The VPC has no VNI yet.
    #[error("vpc {0} has no VNI yet: run the allocator")]
    VpcWaits(VpcName),
    /// No such endpoint.
    #[error("endpoint {0} does not exist")]
    UnknownEndpoint(EndpointKey),
    /// It has no address yet.
    #[error("endpoint {0} has no address yet: run the allocator")]
    NoAddress(EndpointKey),
    /// An IPv4 and an IPv6 side.
    #[error("{source_side} and {destination_side} have no address family in common")]
    Family {
        /// Source as asked.
        source_side: String,
        /// Destination as asked.
        destination_side: String,
    },
    /// Neither side is an endpoint.
    #[error("neither {0} nor {1} is an endpoint of the vpc: no policy decides")]
    NoEndpoint(IpAddr, IpAddr),
}

/// A verdict by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Passes.
    Allow,
    /// Dropped silently.
    Drop,
    /// Dropped and answered.
    Reject,
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Explanation {
    /// VPC.
    pub vpc: VpcName,
    /// Source.
    pub source: PartyView,
    /// Destination.
    pub destination: PartyView,
    /// IP protocol number.
    pub protocol: u8,
    /// Port or ICMP type.
    pub port: PortQuery,
    /// What the source's endpoint decides; none when the source is no endpoint.
    pub egress: Option<Judgement>,
    /// What the destination's endpoint decides; none when the destination is no endpoint.
    pub ingress: Option<Judgement>,
    /// Both together: the first that does not allow.
    pub verdict: Verdict,
    /// The same in one line.
    pub summary: String,
}

/// A side of the connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PartyView {
    /// Address that was judged.
    pub address: IpAddr,
    /// The endpoint that has it.
    pub endpoint: Option<EndpointKey>,
    /// Its number on this node; none when this node has no ipcache entry for it.
    pub identity: Option<Identity>,
    /// What the number stands for.
    pub facts: Option<IdentityFacts>,
}

/// One endpoint's decision.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Judgement {
    /// Endpoint that judges.
    pub endpoint: EndpointKey,
    /// Direction.
    pub direction: Direction,
    /// Whether this node enforces it: then the answer comes from the entries of the slot. Another node's endpoint is compiled
    /// for the answer.
    pub local: bool,
    /// Slot, when local.
    pub slot: Option<PolicySlot>,
    /// Policy revision, when local.
    pub revision: Option<u32>,
    /// The decision.
    pub verdict: Verdict,
    /// What decided.
    pub decided_by: DecidedBy,
    /// Whether new connections are recorded.
    pub log: bool,
    /// Whether replies pass by themselves.
    pub stateful: bool,
    /// Every rule of the direction in order, with why it did or did not match.
    pub candidates: Vec<Candidate>,
}

/// What decided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum DecidedBy {
    /// A rule.
    Rule {
        /// Its name.
        rule: RuleRef,
        /// Its number on this node, when local.
        id: Option<RuleId>,
        /// Tier.
        tier: u8,
        /// Priority.
        priority: u16,
    },
    /// No rule matched.
    Default,
    /// The host reaches its own endpoints (`allow_localhost: always`).
    AllowLocalhost,
    /// An endpoint talks to itself.
    Itself,
    /// No entry answered: fails closed.
    NoEntry,
}

/// A rule that could have decided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Its name.
    pub rule: RuleRef,
    /// Tier.
    pub tier: u8,
    /// Priority (low wins).
    pub priority: u16,
    /// Action.
    pub action: Action,
    /// Whether it matches the connection.
    pub matches: bool,
    /// Whether it decided.
    pub decides: bool,
    /// Why it did or did not.
    pub why: String,
}

/// Answers a question from the world's rules and the plan's entries, as the kernel of this node decides.
///
/// # Errors
/// When the question names what does not exist or cannot meet.
pub fn explain(world: &World, plan: &NodePlan, query: &Query) -> Result<Explanation, ExplainError> {
    let _ = (world, plan);
    Err(ExplainError::UnknownVpc(query.vpc.clone()))
}
