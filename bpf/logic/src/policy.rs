//! One direction's decision: two lookups, the higher precedence wins.

use flowloom_bpf_abi::{
    CtDecision, DropReason, PolicyKey, PolicyValue, direction, identity, trace_step, verdict,
};

use crate::Step;
use crate::packet::Packet;
use crate::tables::Tables;

/// Decides `side` of endpoint `id` for a peer: `p.policy_key` holds protocol and port. The decision is left in `p.decision`; a step other than
/// [`Step::GO`] says why there is none.
#[inline(never)]
pub(crate) fn decide<T: Tables>(t: T, p: &mut Packet, id: u32, side: u8, peer: u32) -> Step {
    let Some(ep) = t.endpoint(id) else { return Step::drop(DropReason::UnknownEndpoint) };
    // Read before the policy is: a decision is stored under what was in force when it began.
    let revision = t.once(&ep.revision);
    let field = if side == direction::EGRESS { &ep.egress_slot } else { &ep.ingress_slot };
    let mut slot = t.once(field);
    let mut map = t.slot(slot);
    if map.is_none() {
        // The record may have moved on to a new slot, and the old one be gone, since it was read.
        slot = t.once(field);
        map = t.slot(slot);
    }
    let Some(map) = map else { return Step::drop(DropReason::NotReady) };
    p.policy_key.prefixlen = PolicyKey::FULL_BITS;
    p.policy_key.identity = peer;
    let exact = if peer == identity::ANY { None } else { t.policy(map, &p.policy_key) };
    p.policy_key.identity = identity::ANY;
    let any = t.policy(map, &p.policy_key);
    let Some(chosen) = higher(exact, any) else { return Step::drop(DropReason::NoPolicyEntry) };
    p.decision = CtDecision {
        revision,
        generation: p.generation,
        slot,
        rule: chosen.rule,
        verdict: chosen.verdict,
        flags: chosen.flags,
        pad: [0; 2],
    };
    let step = if side == direction::EGRESS { trace_step::EGRESS } else { trace_step::INGRESS };
    t.step(step, u32::from(chosen.verdict), chosen.rule, peer);
    Step::GO
}

#[inline(always)]
fn higher(
    exact: Option<&'static PolicyValue>,
    any: Option<&'static PolicyValue>,
) -> Option<&'static PolicyValue> {
    match (exact, any) {
        (Some(e), Some(a)) => Some(if a.precedence > e.precedence { a } else { e }),
        (Some(e), None) => Some(e),
        (None, a) => a,
    }
}

/// The decision for this host's own traffic to an endpoint that takes it always.
#[inline(always)]
pub(crate) fn always<T: Tables>(t: T, p: &mut Packet, id: u32) -> Step {
    let Some(ep) = t.endpoint(id) else { return Step::drop(DropReason::UnknownEndpoint) };
    p.decision = CtDecision {
        revision: t.once(&ep.revision),
        generation: p.generation,
        slot: t.once(&ep.ingress_slot),
        rule: 0,
        verdict: verdict::ALLOW,
        flags: 0,
        pad: [0; 2],
    };
    t.step(trace_step::INGRESS, u32::from(verdict::ALLOW), 0, identity::HOST);
    Step::GO
}
