//! Drops, verdicts and their events.

use flowloom_bpf_abi::{
    DropKey, DropReason, Event, RateKey, config_flags, event_kind, policy_flags, trace_step,
};

use crate::frame::{Frame, Verdict};
use crate::packet::{Packet, flag};
use crate::tables::Tables;
use crate::{Step, answer, nat};

/// Counts a drop and tells user space.
#[inline(never)]
fn dropped<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, reason: u8) {
    let key = DropKey { endpoint: p.blame, direction: p.blame_direction, reason, pad: [0; 2] };
    t.count_drop(&key, f.len());
    t.step(trace_step::DROP, u32::from(reason), 0, 0);
    if reason != DropReason::GroupMembership as u8 {
        emit(f, t, p, event_kind::DROP, reason);
    }
}

/// Counts a policy's decision, and records it when it or the configuration asks for that.
#[inline(never)]
pub(crate) fn decided<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, side: u8) {
    t.count_rule(p.decision.rule, f.len());
    p.rule = p.decision.rule;
    p.policy_verdict = p.decision.verdict;
    p.policy_flags = p.decision.flags;
    let always = t.config().is_some_and(|c| c.flags & config_flags::VERDICT_EVENTS != 0);
    if always || p.decision.flags & policy_flags::LOG != 0 {
        let kept = p.blame_direction;
        p.blame_direction = side;
        emit(f, t, p, event_kind::VERDICT, 0);
        p.blame_direction = kept;
    }
}

#[inline(never)]
fn emit<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, kind: u8, reason: u8) {
    if t.dry() {
        return;
    }
    let limit = t.config().map_or(0, |c| c.event_rate);
    let mut lost = 0;
    if !t.take_token(&RateKey { endpoint: p.blame, what: u32::from(reason) }, limit, p.now, &mut lost) {
        return;
    }
    p.event = Event {
        time_ns: t.now_ns(),
        vpc: p.vpc,
        endpoint: p.blame,
        peer_endpoint: p.src_ep,
        src_identity: p.src_identity,
        dst_identity: p.dst_identity,
        rule: p.rule,
        len: f.len(),
        lost,
        src: p.src,
        dst: p.dst,
        sport: p.sport,
        dport: p.dport,
        kind,
        reason,
        verdict: p.policy_verdict,
        direction: p.blame_direction,
        protocol: p.protocol,
        family: p.family,
        tcp_flags: p.tcp_flags,
        hook: p.hook,
        pad: [0; 4],
    };
    // What depends comes last: the verifier walks all that follows once for each way.
    t.barrier();
    if p.has(flag::ICMP_ERROR | flag::UNTRACKED | flag::ECHO_REQUEST | flag::ECHO_REPLY) {
        p.event.sport = p.icmp;
    }
    t.barrier();
    if p.blame == p.src_ep {
        p.event.peer_endpoint = p.dst_ep;
    }
    t.emit(&p.event);
}

/// The last word of a hook: drops are counted, and answered where they say so.
#[inline(always)]
pub(crate) fn finish<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, step: Step) -> Verdict {
    if step == Step::DONE {
        return Verdict(p.verdict);
    }
    // From memory: the verifier would walk all that follows once for each reason.
    p.step = step.0;
    let step = Step(t.once(&p.step));
    let reason = counted(f, t, p, step);
    let sent = if step.is_reject() {
        answer::refuse(f, t, p, reason)
    } else if step.is_error() {
        answer::undeliverable(f, t, p, reason)
    } else {
        return Verdict::DROP;
    };
    if sent == Step::DONE { Verdict(p.verdict) } else { Verdict::DROP }
}

/// The same for a hook that answers nobody.
#[inline(always)]
pub(crate) fn finish_silently<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, step: Step) -> Verdict {
    if step == Step::DONE {
        return Verdict(p.verdict);
    }
    counted(f, t, p, step);
    Verdict::DROP
}

/// Counts the drop, and gives its reason.
#[inline(always)]
fn counted<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, step: Step) -> u8 {
    let reason = if step == Step::GO { DropReason::InternalError as u8 } else { step.reason() };
    dropped(f, t, p, reason);
    nat::restore(p);
    reason
}
