//! `policy explain`: the compiler's answer, beside what the live maps say.

use std::net::IpAddr;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler as compiler;
use flowloom_compiler::{DecidedBy, ExplainError, Party, PartyView, PolicySlot, PortQuery, Query};
use flowloom_model::{EndpointKey, Family, VpcName};

use crate::core::Core;
use crate::names;

fn invalid(message: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message.to_string())
}

const fn verdict(v: compiler::Verdict) -> v1::Verdict {
    match v {
        compiler::Verdict::Allow => v1::Verdict::Allow,
        compiler::Verdict::Drop => v1::Verdict::Drop,
        compiler::Verdict::Reject => v1::Verdict::Reject,
    }
}

impl Core {
    /// An address, or an endpoint's name.
    pub(crate) fn party(&self, vpc: &VpcName, text: &str, family: Option<Family>) -> Result<Party, ApiError> {
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Party::Address(ip));
        }
        let bare = text.strip_prefix(vpc.as_str()).and_then(|t| t.strip_prefix('/')).unwrap_or(text);
        let name = bare
            .parse()
            .map_err(|_| invalid(format!("{text:?} is neither an address nor an endpoint's name")))?;
        let key = EndpointKey { vpc: vpc.clone(), name };
        let Some(endpoint) = self.world.endpoints.get(&key) else {
            return Err(ApiError::new(ErrorCode::NotFound, format!("endpoint {key} does not exist")));
        };
        // The family asked for decides which of its addresses is meant.
        match family {
            Some(f) => endpoint
                .ips
                .iter()
                .find(|ip| Family::of(**ip) == f)
                .map(|ip| Party::Address(*ip))
                .ok_or_else(|| invalid(format!("endpoint {key} has no {f} address"))),
            None => Ok(Party::Endpoint(key.name)),
        }
    }

    /// The family that both sides have: the one asked for, an address's own, or the first in common.
    fn family_of(
        &self,
        vpc: &VpcName,
        texts: [&str; 2],
        asked: Option<u8>,
    ) -> Result<Option<Family>, ApiError> {
        match asked {
            Some(4) => return Ok(Some(Family::V4)),
            Some(6) => return Ok(Some(Family::V6)),
            Some(n) => return Err(invalid(format!("family {n} is neither 4 nor 6"))),
            None => {}
        }
        for family in [Family::V4, Family::V6] {
            let has = |text: &str| match self.party(vpc, text, Some(family)) {
                Ok(Party::Address(ip)) => Family::of(ip) == family,
                _ => false,
            };
            if texts.into_iter().all(has) {
                return Ok(Some(family));
            }
        }
        Ok(None)
    }

    /// # Errors
    /// A question that names what does not exist or cannot meet.
    pub(crate) fn explain(&mut self, request: &v1::ExplainRequest) -> Result<v1::Explanation, ApiError> {
        let vpc: VpcName = request.vpc.parse().map_err(invalid)?;
        let family = self.family_of(&vpc, [&request.from, &request.to], request.family)?;
        let v4 = family != Some(Family::V6);
        let protocol = names::protocol_number(&request.protocol, v4)
            .ok_or_else(|| invalid(format!("protocol {:?} is unknown", request.protocol)))?;
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
        let query = Query {
            source: self.party(&vpc, &request.from, family)?,
            destination: self.party(&vpc, &request.to, family)?,
            vpc,
            protocol,
            port,
        };
        let answer = compiler::explain(&self.world, &self.wanted, &query).map_err(|e| {
            let code = match &e {
                ExplainError::UnknownVpc(_) | ExplainError::UnknownEndpoint(_) => ErrorCode::NotFound,
                ExplainError::VpcWaits(_) | ExplainError::NoAddress(_) => ErrorCode::Conflict,
                _ => ErrorCode::InvalidRequest,
            };
            ApiError::new(code, e.to_string())
        })?;
        let egress = answer.egress.as_ref().map(|j| self.judgement(j, &answer.destination, &answer));
        let ingress = answer.ingress.as_ref().map(|j| self.judgement(j, &answer.source, &answer));
        Ok(v1::Explanation { verdict: verdict(answer.verdict), summary: answer.summary, egress, ingress })
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
