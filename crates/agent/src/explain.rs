//! `policy explain`: the compiler's answer, beside what the live maps say.

use std::net::IpAddr;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler as compiler;
use flowloom_compiler::{DecidedBy, ExplainError, Party, PartyView, PolicySlot, PortQuery, Query};
use flowloom_model::{Family, VpcName};

use crate::core::Core;
use crate::names;
use crate::sides::{JUDGED, invalid};

const fn verdict(v: compiler::Verdict) -> v1::Verdict {
    match v {
        compiler::Verdict::Allow => v1::Verdict::Allow,
        compiler::Verdict::Drop => v1::Verdict::Drop,
        compiler::Verdict::Reject => v1::Verdict::Reject,
    }
}

impl Core {
    /// # Errors
    /// A question that names what does not exist or cannot meet.
    pub(crate) fn explain(&mut self, request: &v1::ExplainRequest) -> Result<v1::Explanation, ApiError> {
        let sides = self.sides(&request.vpc, &request.from, &request.to)?;
        let (family, source, destination) = self.family_of(&sides, request.family)?;
        let protocol = names::protocol_number(&request.protocol, family == Family::V4)
            .ok_or_else(|| invalid(format!("protocol {:?} is unknown", request.protocol)))?;
        if let Some(service) = self.service_side(&sides.to, source, &sides.vpc, protocol, request.port)? {
            return self.explain_service_side(&sides.vpc, source, protocol, service);
        }
        let port = match protocol {
            1 | 58 => PortQuery::Icmp {
                kind: request.icmp_type.unwrap_or(if protocol == 1 { 8 } else { 128 }),
                code: request.icmp_code.unwrap_or(0),
            },
            6 | 17 | 132 => PortQuery::Port(
                request.port.ok_or_else(|| invalid(format!("{} needs a port", request.protocol)))?,
            ),
            _ => PortQuery::None,
        };
        self.explain_pair(&sides.vpc, source, destination, protocol, port)
    }

    /// To each backend in use. What refuses one of them is shown: a connection may go there.
    fn explain_service_side(
        &self,
        vpc: &VpcName,
        source: IpAddr,
        protocol: u8,
        mut service: v1::ServiceSide,
    ) -> Result<v1::Explanation, ApiError> {
        let mut shown: Option<v1::Explanation> = None;
        for backend in service.backends.iter_mut().filter(|b| b.used).take(JUDGED) {
            let to = PortQuery::Port(backend.port);
            let explanation = self.explain_pair(vpc, source, backend.ip, protocol, to)?;
            backend.verdict = Some(explanation.verdict);
            let passes = |e: &v1::Explanation| e.verdict == v1::Verdict::Allow;
            if shown.as_ref().is_none_or(|s| passes(s) && !passes(&explanation)) {
                shown = Some(explanation);
            }
        }
        let name = format!("svc/{}", service.service);
        let mut explanation = shown.unwrap_or_else(|| v1::Explanation {
            verdict: if service.answer == "silence" { v1::Verdict::Drop } else { v1::Verdict::Reject },
            summary: match service.answer.as_str() {
                "silence" => format!("{name} has no backend on this node; other nodes have"),
                _ => format!("{name} has no backend"),
            },
            egress: None,
            ingress: None,
            service: None,
        });
        let judged: Vec<v1::Verdict> = service.backends.iter().filter_map(|b| b.verdict).collect();
        if !judged.is_empty() {
            let allowed = judged.iter().filter(|v| **v == v1::Verdict::Allow).count();
            explanation.summary =
                format!("{name} by {allowed} of {} backends; {}", judged.len(), explanation.summary);
        }
        explanation.service = Some(service);
        Ok(explanation)
    }

    fn explain_pair(
        &self,
        vpc: &VpcName,
        source: IpAddr,
        destination: IpAddr,
        protocol: u8,
        port: PortQuery,
    ) -> Result<v1::Explanation, ApiError> {
        let query = Query {
            source: Party::Address(source),
            destination: Party::Address(destination),
            vpc: vpc.clone(),
            protocol,
            port,
        };
        let mut answer = compiler::explain(&self.world, &self.wanted, &query).map_err(|e| {
            let code = match &e {
                ExplainError::UnknownVpc(_) | ExplainError::UnknownEndpoint(_) => ErrorCode::NotFound,
                ExplainError::VpcWaits(_) | ExplainError::NoAddress(_) => ErrorCode::Conflict,
                _ => ErrorCode::InvalidRequest,
            };
            ApiError::new(code, e.to_string())
        })?;
        // The plan does not say why an endpoint has the policy it has.
        for judgement in answer.egress.iter_mut().chain(&mut answer.ingress) {
            let default = judgement.decided_by == DecidedBy::Default;
            if judgement.local && default && self.holds.quarantined(&judgement.endpoint, judgement.direction)
            {
                judgement.decided_by = DecidedBy::Quarantine;
            }
        }
        answer.summarise();
        let egress = answer.egress.as_ref().map(|j| self.judgement(j, &answer.destination, &answer));
        let ingress = answer.ingress.as_ref().map(|j| self.judgement(j, &answer.source, &answer));
        let verdict = verdict(answer.verdict);
        Ok(v1::Explanation { verdict, summary: answer.summary, egress, ingress, service: None })
    }

    fn judgement(
        &self,
        j: &compiler::Judgement,
        peer: &PartyView,
        answer: &compiler::Explanation,
    ) -> v1::Judgement {
        let (rule, why) = match &j.decided_by {
            DecidedBy::Rule { rule, id, tier, priority } => {
                let named = v1::Named::new(rule.to_string(), id.map_or(0, |i| i.0));
                (Some(named), format!("rule {rule} (tier {tier}, priority {priority})"))
            }
            DecidedBy::Default => (None, "no rule matched: the default".to_owned()),
            DecidedBy::AllowLocalhost => {
                (None, "the host reaches its own endpoints (allow_localhost)".to_owned())
            }
            DecidedBy::Itself => (None, "an endpoint talks to itself".to_owned()),
            DecidedBy::NoEntry => (None, "no entry answered: failed closed".to_owned()),
            DecidedBy::Quarantine => (None, "the endpoint is in quarantine: nothing passes".to_owned()),
        };
        let why = match self.holds.word(&j.endpoint, j.direction).filter(|_| j.local) {
            Some("freeze") => format!("{why}; the policy is frozen"),
            Some("rollback") => format!("{why}; the policy is rolled back"),
            _ => why,
        };
        let facts = peer.facts.as_ref();
        v1::Judgement {
            endpoint: j.endpoint.to_string(),
            local: j.local,
            direction: match j.direction {
                flowloom_model::Direction::Egress => v1::Direction::Egress,
                flowloom_model::Direction::Ingress => v1::Direction::Ingress,
            },
            verdict: verdict(j.verdict),
            rule,
            why,
            peer: v1::PeerInfo {
                address: peer.address.to_string(),
                identity: peer.identity.map_or(0, |i| i.0),
                endpoint: peer.endpoint.as_ref().map(ToString::to_string),
                labels: peer
                    .endpoint
                    .as_ref()
                    .and_then(|k| self.world.endpoints.get(k))
                    .map(|e| e.labels.clone())
                    .unwrap_or_default(),
                cidrs: facts.map(|f| f.cidrs.iter().map(ToString::to_string).collect()).unwrap_or_default(),
            },
            kernel: j.slot.and_then(|slot| self.kernel_answer(slot, peer, answer)),
            considered: j
                .candidates
                .iter()
                .map(|c| v1::ConsideredRule {
                    rule: c.rule.to_string(),
                    tier: c.tier,
                    priority: c.priority,
                    action: format!("{:?}", c.action).to_lowercase(),
                    matched: c.matches,
                    why: c.why.clone(),
                })
                .collect(),
        }
    }

    /// The live maps' answer to the same question: what the kernel would find now.
    fn kernel_answer(
        &self,
        slot: PolicySlot,
        peer: &PartyView,
        answer: &compiler::Explanation,
    ) -> Option<v1::KernelAnswer> {
        let entries = self.view.as_ref()?.policy(slot).ok()??;
        let identity = peer.identity?;
        let value = compiler::lookup(&entries, identity, answer.protocol, answer.port.bits());
        Some(v1::KernelAnswer {
            verdict: value.and_then(|v| names::verdict(v.verdict)),
            rule: self.rule_named(value.map_or(0, |v| v.rule)),
            slot: slot.0,
            identity: identity.0,
        })
    }
}
