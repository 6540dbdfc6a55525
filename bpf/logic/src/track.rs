//! Connections: a packet meets the two decisions of its own.

use flowloom_bpf_abi::{
    Addr, DropReason, ct_flags, ct_routes, ct_state, direction, endpoint_flags, hook, policy_flags,
    trace_step, verdict, vpc_flags,
};

use crate::conntrack::{self, CtCell, first_state};
use crate::frame::Frame;
use crate::guard::owns;
use crate::packet::{Packet, flag, to};
use crate::parse::{ACK, ICMP, ICMPV6, RST, SYN, TCP};
use crate::tables::Tables;
use crate::{Step, answer, bail, go, nat, policy, report, route};

/// Judges the packet by its connection, or as the start of one. On return `p.route` is known when the hook forwards.
#[inline(never)]
pub(crate) fn connection<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if p.has(flag::UNTRACKED) {
        return fresh(f, t, p, None);
    }
    let mut found = lookup(t, p);
    // What a workload sends without a connection may be for a service: then it has one with the backend.
    if p.src_ep != 0
        && p.has(flag::FORWARDS)
        && p.vpc_flags & vpc_flags::SERVICES != 0
        && found.is_none_or(|e| p.has(flag::GONE) || e.is_expired(p.tuple_protocol, p.now))
    {
        go!(nat::meet(f, t, p));
        if p.has(flag::NAT_DST) {
            found = lookup(t, p);
        }
    }
    met(f, t, p, found)
}

/// The open connection of what a tunnel brought, when its entry says all that would be asked otherwise: an answer to this source goes through this
/// tunnel, as the ipcache said in the generation that is in force, and the receiver is the endpoint that the entry names.
#[inline(never)]
pub(crate) fn carried<T: Tables>(t: T, p: &mut Packet) -> Option<&'static CtCell> {
    if p.has(flag::UNTRACKED | flag::ICMP_ERROR | flag::FRAG_FIRST | flag::FRAG_LATER) {
        return None;
    }
    conntrack::key(p);
    let e = t.established(&p.key)?;
    let original = (e.flags() & ct_flags::ORIG_IS_LO != 0) == p.has(flag::SRC_IS_LO);
    let (src_side, dst_side, back) = if original {
        (direction::EGRESS, direction::INGRESS, ct_routes::REPLY)
    } else {
        (direction::INGRESS, direction::EGRESS, ct_routes::ORIGINAL)
    };
    if e.routes() & back == 0
        || e.endpoint(src_side) != 0
        || e.tunnel().is_zero()
        || e.tunnel() != p.tunnel_key.remote
        || e.decision(dst_side).generation() != p.generation
    {
        return None;
    }
    let id = e.endpoint(dst_side);
    let ep = t.endpoint(id)?;
    if ep.flags & endpoint_flags::VALID == 0 || ep.vpc != p.vpc || !owns(ep, &p.dst) {
        return None;
    }
    p.dst_ep = id;
    p.blame = id;
    p.dst_identity = ep.identity;
    p.route = to::LOCAL;
    t.step(trace_step::LOCAL, id, 0, 0);
    Some(e)
}

/// The packet's direction: 0 original, 1 reply.
#[inline(always)]
fn way(p: &Packet, e: &CtCell) -> u8 {
    u8::from((e.flags() & ct_flags::ORIG_IS_LO != 0) != p.has(flag::SRC_IS_LO))
}

/// Whether the packet's direction of the connection that [`carried`] found is received by the tunnel's device.
#[inline(always)]
pub(crate) fn is_by_device(p: &Packet, e: &CtCell) -> bool {
    e.is_by_device(way(p, e))
}

/// From now on it is.
#[inline(always)]
pub(crate) fn by_device<T: Tables>(t: T, p: &Packet, e: &CtCell) {
    if !t.dry() && !is_by_device(p, e) {
        e.set_by_device(way(p, e));
    }
}

/// Judges the packet by the connection that [`carried`] found.
#[inline(never)]
pub(crate) fn follow<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, e: &CtCell) -> Step {
    met(f, t, p, Some(e))
}

/// Judges the packet by its connection, if there is one.
#[inline(always)]
fn met<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, found: Option<&CtCell>) -> Step {
    let half = p.has(flag::HALF_OPEN);
    let gone = p.has(flag::GONE);
    p.flags &= !(flag::HALF_OPEN | flag::GONE);
    let error = p.has(flag::ICMP_ERROR);
    let Some(e) = found else {
        t.step(trace_step::CONNTRACK, 0, 0, 0);
        if error {
            bail!(ConntrackInvalid);
        }
        return fresh(f, t, p, None);
    };
    let original = (e.flags() & ct_flags::ORIG_IS_LO != 0) == p.has(flag::SRC_IS_LO);
    if gone {
        t.step(trace_step::CONNTRACK, 0, 0, 0);
    } else {
        t.step(trace_step::CONNTRACK, if half { 1 } else { 2 }, u32::from(!original), 0);
    }
    if gone || e.is_expired(p.tuple_protocol, p.now) {
        if error {
            bail!(ConntrackInvalid);
        }
        return fresh(f, t, p, Some(e));
    }
    if !error {
        // A port used again after its connection has ended.
        if p.tuple_protocol == TCP && e.state() == ct_state::CLOSED && p.tcp_flags & (SYN | ACK) == SYN {
            return fresh(f, t, p, Some(e));
        }
        // Both sides ask with the same identifier: the second question is no answer to the first.
        let wrong_way = if original { flag::ECHO_REPLY } else { flag::ECHO_REQUEST };
        if p.has(wrong_way) {
            p.flags |= flag::UNTRACKED;
            return fresh(f, t, p, None);
        }
    }
    if half {
        p.flags |= flag::HALF_OPEN;
    }
    if original {
        p.flags |= flag::ORIGINAL;
    }
    known(f, t, p, e)
}

/// The connection of the packet's tuple, with [`flag::HALF_OPEN`] and [`flag::GONE`].
#[inline(never)]
fn lookup<T: Tables>(t: T, p: &mut Packet) -> Option<&'static CtCell> {
    p.flags &= !(flag::HALF_OPEN | flag::GONE);
    conntrack::key(p);
    // What opens a connection finds it half open, if at all; one that moved on is marked there.
    let opens = p.tcp_flags & SYN != 0;
    let mut half = if opens { t.half_open(&p.key) } else { None };
    if half.is_some_and(|e| !e.has_moved()) {
        p.flags |= flag::HALF_OPEN;
        return half;
    }
    let found = t.established(&p.key);
    if found.is_some() {
        return found;
    }
    if !opens {
        half = t.half_open(&p.key);
    }
    if half.is_some_and(CtCell::has_moved) {
        // Between the two lookups, or what it moved to is gone.
        let now = t.established(&p.key);
        if now.is_some() {
            return now;
        }
        p.flags |= flag::GONE;
    }
    p.flags |= flag::HALF_OPEN;
    half
}

/// Whether the client asks for what the connection stands for: one port of it may not speak to a backend both as a service's and as itself,
/// nor for two services, since the backend's answers would be the same.
#[inline(always)]
fn same_service(p: &Packet, e: &CtCell) -> bool {
    if e.rev_nat() == 0 {
        return !p.has(flag::NAT_DST);
    }
    p.has(flag::NAT_DST) && e.nat_addr() == p.nat_addr && e.nat_port() == p.nat_port
}

#[inline(never)]
fn known<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, e: &CtCell) -> Step {
    let original = p.has(flag::ORIGINAL);
    // Read once more and reckoned with: a branch would have the verifier walk all that follows once for each direction.
    let reply = ((t.once(&p.flags) / flag::ORIGINAL) & 1) ^ 1;
    let (src_side, dst_side) = (reply as u8, reply as u8 ^ 1);
    if original {
        if (p.src_ep != 0 || p.hook == hook::FROM_UPLINK) && !same_service(p, e) {
            return Step::reject(DropReason::ServiceTupleInUse);
        }
        // The flow was forgotten (its table is smaller), the connection was not.
        if p.has(flag::NEW_FLOW) {
            nat::learn(t, p);
        }
    } else if e.rev_nat() != 0 {
        p.flags |= flag::NAT_SRC;
        p.nat_addr = e.nat_addr();
        p.nat_port = e.nat_port();
        if e.endpoint(direction::EGRESS) == 0 {
            p.flags |= flag::OUT;
        }
    }
    if p.src_ep != 0 {
        go!(side(f, t, p, e, src_side));
    }
    if p.has(flag::FORWARDS) {
        let cached = ct_routes::ORIGINAL << src_side;
        if e.routes() & cached == 0 || !cached_route(t, p, e, dst_side) {
            route::find(t, p);
            go!(reachable(p));
            if !t.dry() && (p.route == to::LOCAL || p.route == to::TUNNEL) {
                remember(p, e, src_side, cached);
            }
        }
    } else if p.hook == hook::TO_ENDPOINT && e.endpoint(src_side) != 0 {
        // The sender's hook has counted it.
        p.flags |= flag::COUNTED;
    }
    if p.dst_ep != 0 {
        p.blame = p.dst_ep;
        p.blame_direction = direction::INGRESS;
        go!(side(f, t, p, e, dst_side));
    }
    conntrack::touch(t, p, e, f.len())
}

/// Takes the destination from the entry; false when it is not to be had there.
#[inline(always)]
fn cached_route<T: Tables>(t: T, p: &mut Packet, e: &CtCell, dst_side: u8) -> bool {
    let id = e.endpoint(dst_side);
    if id == 0 {
        p.tunnel = e.tunnel();
        p.route = to::TUNNEL;
        return !p.tunnel.is_zero();
    }
    let valid = t
        .endpoint(id)
        .is_some_and(|ep| ep.flags & endpoint_flags::VALID != 0 && ep.vpc == p.vpc && owns(ep, &p.dst));
    if valid {
        p.dst_ep = id;
        p.route = to::LOCAL;
    }
    valid
}

/// Leaves the destination in the entry.
#[inline(always)]
fn remember(p: &Packet, e: &CtCell, src_side: u8, cached: u8) {
    // An ICMP error of a router on the way says nothing about the connection's own path; and what was found under an older generation than
    // another processor has decided under meanwhile is not to be kept.
    if p.has(flag::ICMP_ERROR) || e.decision(src_side).generation() != p.generation {
        return;
    }
    let dst_side = src_side ^ 1;
    if p.route == to::LOCAL {
        // Quotas were taken for the endpoints that the entry names.
        if e.flags() & ct_flags::COUNTED != 0 && e.endpoint(dst_side) != p.dst_ep {
            return;
        }
        e.set_endpoint(dst_side, p.dst_ep);
    } else {
        if e.endpoint(dst_side) != 0 {
            return;
        }
        e.set_tunnel(p.tunnel);
    }
    e.set_routes(e.routes() | cached);
}

/// A destination that no packet can reach.
#[inline(always)]
fn reachable(p: &mut Packet) -> Step {
    if p.route == to::NOWHERE { Step(u32::from(p.route_drop)) } else { stack_mode(p) }
}

/// `forwarding: stack`: the receiver's side is judged where the stack delivers.
#[inline(always)]
fn stack_mode(p: &mut Packet) -> Step {
    if p.has(flag::BY_STACK) && (p.route == to::LOCAL || p.route == to::TUNNEL || p.route == to::DIRECT) {
        p.route = to::STACK;
        p.dst_ep = 0;
    }
    Step::GO
}

/// One endpoint's own side of an entry: its decision when current, else a new one for the original tuple.
#[inline(always)]
fn side<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, e: &CtCell, side: u8) -> Step {
    let id = p.blame;
    let Some(ep) = t.endpoint(id) else { bail!(UnknownEndpoint) };
    let revision = t.once(&ep.revision);
    let (egress, ingress) = (t.once(&ep.egress_slot), t.once(&ep.ingress_slot));
    let slot = egress ^ ((egress ^ ingress) & u32::from(side).wrapping_neg());
    let decision = e.decision(side);
    if e.endpoint(side) == id && decision.is_current(revision, slot, p.generation) {
        p.policy_verdict = decision.verdict();
        if p.policy_verdict == verdict::ALLOW {
            t.step(trace_step::CURRENT, u32::from(side), decision.rule(), 0);
            return Step::GO;
        }
        p.rule = decision.rule();
        identities(p, e);
        return answer::refused(p, reason(side));
    }
    again(f, t, p, e, side)
}

#[inline(always)]
const fn reason(side: u8) -> DropReason {
    if side == direction::EGRESS { DropReason::PolicyEgress } else { DropReason::PolicyIngress }
}

/// Identities of source and destination, for events.
#[inline(always)]
fn identities(p: &mut Packet, e: &CtCell) {
    let (orig, reply) = (e.judged(direction::INGRESS), e.judged(direction::EGRESS));
    (p.src_identity, p.dst_identity) = if p.has(flag::ORIGINAL) { (orig, reply) } else { (reply, orig) };
}

/// Decides the original tuple anew for the endpoint `p.blame`.
#[inline(never)]
fn again<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, e: &CtCell, side: u8) -> Step {
    let id = p.blame;
    let original = p.has(flag::ORIGINAL);
    let peer_is_src = (side == direction::INGRESS) == original;
    let from_host = side == direction::INGRESS && e.flags() & ct_flags::FROM_HOST != 0;
    let peer_addr: Addr = if peer_is_src { p.tuple_src } else { p.dst };
    p.flags &= !flag::UNASSIGNED;
    let peer = if peer_is_src && p.has(flag::FROM_HOST) {
        route::host_identity(t, p)
    } else {
        route::identity_of(t, p, &peer_addr)
    };
    p.peer = peer;
    tuple_port(p, original);
    if from_host && !judges_host(t, id) {
        go!(policy::always(t, p, id));
    } else {
        go!(policy::decide(t, p, id, side, peer));
    }
    report::decided(f, t, p, side);
    let stateless = p.decision.flags & policy_flags::STATELESS != 0;
    if !t.dry() {
        e.set_routes(0);
        e.set_judged(side, peer);
        // Quotas were taken for the endpoints that the entry names.
        if e.flags() & ct_flags::COUNTED == 0 || e.endpoint(side) == 0 {
            e.set_endpoint(side, id);
        }
        if stateless || p.has(flag::UNASSIGNED) {
            p.decision.revision = 0;
        }
        e.decision(side).replace(t, &p.decision);
    }
    if stateless && !original && p.policy_verdict == verdict::ALLOW {
        // No state: the answer is judged on its own, the other way round.
        let own = side ^ 1;
        own_port(p);
        // From memory: the verifier knows by now whether it is zero, and would walk what follows once for each.
        let peer = t.once(&p.peer);
        go!(policy::decide(t, p, id, own, peer));
        report::decided(f, t, p, own);
        if p.policy_verdict != verdict::ALLOW {
            return answer::refused(p, reason(own));
        }
    }
    if p.policy_verdict != verdict::ALLOW {
        identities(p, e);
        return answer::refused(p, reason(side));
    }
    Step::GO
}

#[inline(always)]
fn judges_host<T: Tables>(t: T, id: u32) -> bool {
    t.endpoint(id).is_some_and(|ep| ep.flags & endpoint_flags::JUDGE_HOST != 0)
}

/// Protocol and port of the original tuple, for the policy's key.
#[inline(always)]
fn tuple_port(p: &mut Packet, original: bool) {
    p.policy_key.protocol = p.tuple_protocol;
    p.policy_key.port = match p.tuple_protocol {
        ICMP => [8, 0],
        ICMPV6 => [128, 0],
        _ if original => p.dport,
        _ => p.sport,
    };
}

/// Protocol and port of the packet itself.
#[inline(always)]
fn own_port(p: &mut Packet) {
    p.policy_key.protocol = p.protocol;
    p.policy_key.port = if p.protocol == ICMP || p.protocol == ICMPV6 { p.icmp } else { p.dport };
}

/// The first packet of a connection, or one that is judged alone. `dead` is an entry that has ended: it starts over.
#[inline(never)]
fn fresh<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, dead: Option<&CtCell>) -> Step {
    p.flags |= flag::ORIGINAL;
    p.flags &= !flag::HALF_OPEN;
    // A reply whose request was not seen begins nothing: the request that comes the other way would be taken for its answer.
    if p.has(flag::ECHO_REPLY) {
        p.flags |= flag::UNTRACKED;
    }
    if p.has(flag::FORWARDS) {
        route::find(t, p);
        // A route that leads nowhere is the second reason: policy is asked first.
        go!(stack_mode(p));
    }
    t.clear(&mut p.entry);
    // In memory: the verifier would walk the second decision once for each outcome of the first.
    p.keep = 0;
    if p.src_ep != 0 {
        own_port(p);
        go!(policy::decide(t, p, p.src_ep, direction::EGRESS, p.dst_identity));
        report::decided(f, t, p, direction::EGRESS);
        if p.policy_verdict != verdict::ALLOW {
            return answer::refused(p, DropReason::PolicyEgress);
        }
        if p.policy_flags & policy_flags::STATELESS == 0 {
            p.keep = 1;
            p.entry.decision[0] = p.decision;
        }
    }
    if p.route == to::NOWHERE {
        return Step(u32::from(p.route_drop));
    }
    if p.dst_ep != 0 {
        p.blame = p.dst_ep;
        p.blame_direction = direction::INGRESS;
        let host = p.has(flag::FROM_HOST);
        let src = p.tuple_src;
        p.src_identity = if host { route::host_identity(t, p) } else { route::identity_of(t, p, &src) };
        own_port(p);
        if host && !judges_host(t, p.dst_ep) {
            go!(policy::always(t, p, p.dst_ep));
        } else {
            go!(policy::decide(t, p, p.dst_ep, direction::INGRESS, p.src_identity));
        }
        report::decided(f, t, p, direction::INGRESS);
        if p.policy_verdict != verdict::ALLOW {
            return answer::refused(p, DropReason::PolicyIngress);
        }
        if p.policy_flags & policy_flags::STATELESS == 0 {
            p.keep = 1;
            if p.has(flag::UNASSIGNED) {
                p.decision.revision = 0;
            }
            p.entry.decision[1] = p.decision;
        }
    }
    // Without an entry nobody knew what a backend's answer is the answer to.
    if (t.once(&p.keep) == 0 && !p.has(flag::NAT_DST)) || p.has(flag::UNTRACKED) {
        return Step::GO;
    }
    if p.protocol == TCP && p.tcp_flags & RST != 0 {
        bail!(ConntrackInvalid);
    }
    store(t, p, dead, f.len());
    Step::GO
}

/// Writes the new connection.
#[inline(never)]
fn store<T: Tables>(t: T, p: &mut Packet, dead: Option<&CtCell>, bytes: u32) {
    if t.dry() {
        return;
    }
    let (state, flags) = first_state(p.tuple_protocol, p.tcp_flags);
    p.entry.state = state;
    p.entry.flags = flags;
    if p.has(flag::SRC_IS_LO) {
        p.entry.flags |= ct_flags::ORIG_IS_LO;
    }
    if p.has(flag::FROM_HOST) {
        p.entry.flags |= ct_flags::FROM_HOST;
    }
    p.entry.packets[0] = 1;
    p.entry.bytes[0] = u64::from(bytes);
    p.entry.created = p.now;
    p.entry.last_seen = p.now;
    p.entry.orig_endpoint = p.src_ep;
    p.entry.reply_endpoint = p.dst_ep;
    p.entry.orig_identity = p.src_identity;
    p.entry.reply_identity = p.dst_identity;
    if p.has(flag::NAT_DST) {
        p.entry.rev_nat = p.nat_service;
        p.entry.nat_addr = p.nat_addr;
        p.entry.nat_port = p.nat_port;
        nat::learn(t, p);
    }
    if p.has(flag::FORWARDS) {
        if p.route == to::LOCAL {
            p.entry.routes = ct_routes::ORIGINAL;
        } else if p.route == to::TUNNEL {
            p.entry.routes = ct_routes::ORIGINAL;
            p.entry.tunnel = p.tunnel;
        }
    }
    match dead {
        Some(e) => e.restart(&p.entry),
        None => {
            // Someone faster has stored the same connection: the next packet finds that.
            let _ = t.insert_half_open(&p.key, &p.entry);
        }
    }
}
