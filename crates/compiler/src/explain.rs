//! Why a packet is decided as it is: the path the kernel takes, with the names people wrote.

mod reason;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{peer_flags, policy_flags, verdict};
use flowloom_model::{Action, Direction, Endpoint, EndpointKey, EndpointName, VpcName, World};
use serde::{Deserialize, Serialize};

use crate::diff::facts_of;
use crate::{
    EndpointPlan, Identity, IdentityFacts, NodePlan, Numbers, PolicySlot, PolicySpec, RuleId, RuleRef,
    SpecRule, VpcId, compile, lookup,
};

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
    /// The endpoint is in quarantine. Set by who knows: a plan does not say why an endpoint has the policy it has.
    Quarantine,
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

/// Answers a question from the world's rules and the plan's entries, as the kernels of the nodes decide.
///
/// An endpoint of another node is judged by the plan that its own node computes from the same world.
///
/// # Errors
/// When the question names what does not exist or cannot meet.
pub fn explain(world: &World, plan: &NodePlan, query: &Query) -> Result<Explanation, ExplainError> {
    let vpc = world.vpcs.get(&query.vpc).ok_or_else(|| ExplainError::UnknownVpc(query.vpc.clone()))?;
    let vni = vpc.vni.ok_or_else(|| ExplainError::VpcWaits(query.vpc.clone()))?;
    let id = VpcId(vni.number());
    let (source, destination) = addresses(world, query)?;
    let owner = |ip: IpAddr| {
        world.endpoints.values().map(Arc::as_ref).find(|e| e.vpc == query.vpc && e.ips.contains(&ip))
    };
    let (from, to) = (owner(source), owner(destination));
    if from.is_none() && to.is_none() {
        return Err(ExplainError::NoEndpoint(source, destination));
    }
    let judge = |endpoint: Option<&Endpoint>, direction, peer| {
        let endpoint = endpoint?;
        let packet = Packet { vpc: id, peer, protocol: query.protocol, bits: query.port.bits() };
        if let Some(record) = plan.endpoints.get(&endpoint.key()) {
            return judgement(plan, record, direction, packet, true);
        }
        let elsewhere = compile(world, &endpoint.node, &mut Numbers::default()).plan;
        judgement(&elsewhere, elsewhere.endpoints.get(&endpoint.key())?, direction, packet, false)
    };
    let egress = judge(from, Direction::Egress, destination);
    let ingress = judge(to, Direction::Ingress, source);
    let judgements = || egress.iter().chain(&ingress);
    let verdict = judgements().map(|j| j.verdict).find(|v| *v != Verdict::Allow).unwrap_or(Verdict::Allow);
    let summary = summary(judgements());
    let view = |address: IpAddr, endpoint: Option<&Endpoint>| {
        let identity = plan.peer(id, address).map(|(_, peer)| peer.identity);
        let facts = identity.and_then(|identity| facts_of(plan, &query.vpc, identity));
        let facts = facts.map(|facts| (*facts).clone());
        PartyView { address, endpoint: endpoint.map(Endpoint::key), identity, facts }
    };
    Ok(Explanation {
        vpc: query.vpc.clone(),
        source: view(source, from),
        destination: view(destination, to),
        protocol: query.protocol,
        port: query.port,
        verdict,
        summary,
        egress,
        ingress,
    })
}

impl Explanation {
    /// Writes the summary anew, after a decision was found to have another reason.
    pub fn summarise(&mut self) {
        self.summary = summary(self.egress.iter().chain(&self.ingress));
    }
}

fn summary<'a>(judgements: impl Iterator<Item = &'a Judgement>) -> String {
    judgements.map(line).collect::<Vec<_>>().join("; ")
}

/// Addresses of both sides in one family.
fn addresses(world: &World, query: &Query) -> Result<(IpAddr, IpAddr), ExplainError> {
    let side = |party: &Party| match party {
        Party::Address(ip) => Ok(vec![*ip]),
        Party::Endpoint(name) => {
            let key = EndpointKey { vpc: query.vpc.clone(), name: name.clone() };
            match world.endpoints.get(&key) {
                None => Err(ExplainError::UnknownEndpoint(key)),
                Some(endpoint) if endpoint.ips.is_empty() => Err(ExplainError::NoAddress(key)),
                Some(endpoint) => Ok(endpoint.ips.clone()),
            }
        }
    };
    let (sources, destinations) = (side(&query.source)?, side(&query.destination)?);
    sources
        .iter()
        .find_map(|s| destinations.iter().find(|d| d.is_ipv4() == s.is_ipv4()).map(|d| (*s, *d)))
        .ok_or_else(|| ExplainError::Family {
            source_side: query.source.to_string(),
            destination_side: query.destination.to_string(),
        })
}

impl std::fmt::Display for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Endpoint(name) => write!(f, "endpoint {name}"),
            Self::Address(ip) => ip.fmt(f),
        }
    }
}

/// What one endpoint judges.
#[derive(Clone, Copy)]
struct Packet {
    vpc: VpcId,
    peer: IpAddr,
    protocol: u8,
    bits: u16,
}

fn judgement(
    plan: &NodePlan,
    record: &EndpointPlan,
    direction: Direction,
    packet: Packet,
    local: bool,
) -> Option<Judgement> {
    let slot = match direction {
        Direction::Egress => record.egress_slot,
        Direction::Ingress => record.ingress_slot,
    };
    let policy = plan.policies.get(&slot)?;
    let (_, peer) = plan.peer(packet.vpc, packet.peer)?;
    let facts = facts_of(plan, &record.key.vpc, peer.identity)?;
    let mut entries = policy.any_entries().clone();
    entries.extend(policy.identity_entries(peer.identity, &facts));
    let value = lookup(&entries, peer.identity, packet.protocol, packet.bits);
    let rule_of = |id: u32| policy.spec().rules.iter().position(|r| r.id.0 == id);
    let privileged =
        direction == Direction::Ingress && peer.flags & peer_flags::HOST != 0 && !record.judge_host;
    let (decided_by, deciding) = match value {
        _ if record.ips.contains(&packet.peer) => (DecidedBy::Itself, None),
        _ if privileged => (DecidedBy::AllowLocalhost, None),
        None => (DecidedBy::NoEntry, None),
        Some(value) => match rule_of(value.rule).and_then(|at| Some((at, policy.spec().rules.get(at)?))) {
            Some((at, rule)) => {
                let id = local.then_some(rule.id);
                let name = (*rule.name).clone();
                (DecidedBy::Rule { rule: name, id, tier: rule.tier, priority: rule.priority }, Some(at))
            }
            None => (DecidedBy::Default, None),
        },
    };
    let value = value.filter(|_| matches!(decided_by, DecidedBy::Rule { .. } | DecidedBy::Default));
    let verdict = match (&decided_by, value.map(|v| v.verdict)) {
        (DecidedBy::Itself | DecidedBy::AllowLocalhost, _) | (_, Some(verdict::ALLOW)) => Verdict::Allow,
        (_, Some(verdict::REJECT)) => Verdict::Reject,
        _ => Verdict::Drop,
    };
    let flag = |flag| value.is_some_and(|v| v.flags & flag != 0);
    Some(Judgement {
        endpoint: record.key.clone(),
        direction,
        local,
        slot: local.then_some(slot),
        revision: local.then_some(record.revision),
        verdict,
        decided_by,
        log: flag(policy_flags::LOG),
        stateful: !flag(policy_flags::STATELESS),
        candidates: candidates(policy.spec(), &facts, packet, deciding),
    })
}

/// Every rule in the order in which they are asked.
fn candidates(
    spec: &PolicySpec,
    facts: &IdentityFacts,
    packet: Packet,
    deciding: Option<usize>,
) -> Vec<Candidate> {
    let mut left: BTreeMap<u8, &SpecRule> = BTreeMap::new();
    let mut list = Vec::new();
    for (at, rule) in spec.rules.iter().enumerate() {
        let peer = reason::peer(&rule.remote, facts, packet.peer);
        let service = reason::service(rule, facts, packet.protocol, packet.bits);
        let matches = peer.is_ok() && service.is_ok();
        let decides = deciding == Some(at);
        let why = match (peer, service) {
            (Err(why), Err(also)) => format!("{why}; {also}"),
            (Err(why), Ok(_)) | (Ok(_), Err(why)) => why,
            (Ok(peer), Ok(service)) => match left.get(&rule.tier) {
                Some(pass) => format!("{peer}; {service}; but {} left the tier", pass.name),
                None if rule.action == Action::Pass => {
                    format!("{peer}; {service}; leaves tier {}", rule.tier)
                }
                None if decides => format!("{peer}; {service}; decides"),
                None => format!("{peer}; {service}; another rule decides"),
            },
        };
        if matches && rule.action == Action::Pass {
            left.entry(rule.tier).or_insert(rule);
        }
        list.push(Candidate {
            rule: (*rule.name).clone(),
            tier: rule.tier,
            priority: rule.priority,
            action: rule.action,
            matches,
            decides,
            why,
        });
    }
    list
}

fn line(judgement: &Judgement) -> String {
    let direction = match judgement.direction {
        Direction::Egress => "egress of",
        Direction::Ingress => "ingress of",
    };
    let verdict = match judgement.verdict {
        Verdict::Allow => "allows",
        Verdict::Drop => "drops",
        Verdict::Reject => "rejects",
    };
    let by = match &judgement.decided_by {
        DecidedBy::Rule { rule, tier, priority, .. } => {
            format!("rule {rule} (tier {tier}, priority {priority})")
        }
        DecidedBy::Default => "no rule matches".to_owned(),
        DecidedBy::AllowLocalhost => "its own host (allow_localhost)".to_owned(),
        DecidedBy::Itself => "it talks to itself".to_owned(),
        DecidedBy::NoEntry => "no entry answers".to_owned(),
        DecidedBy::Quarantine => "it is in quarantine".to_owned(),
    };
    format!("{direction} {} {verdict}: {by}", judgement.endpoint)
}
