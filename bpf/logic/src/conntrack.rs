//! Connections: live entries, states, timeouts.

use core::cell::Cell;
use core::mem::size_of;

use flowloom_bpf_abi::{Addr, CtDecision, CtEntry, QuotaKey, ct_flags, ct_state, ct_timeout, direction};

use crate::packet::{Packet, flag};
use crate::parse::{ACK, FIN, ICMP, ICMPV6, RST, SYN, TCP, UDP};
use crate::tables::{Inserted, Tables};
use crate::{Step, bail};

/// A [`CtDecision`] in a map, changed in place.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct DecisionCell {
    revision: Cell<u32>,
    generation: Cell<u32>,
    slot: Cell<u32>,
    rule: Cell<u32>,
    verdict: Cell<u8>,
    flags: Cell<u8>,
    pad: [u8; 2],
}

/// A [`CtEntry`] in a map, changed in place by programs on several processors.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct CtCell {
    packets: [Cell<u64>; 2],
    bytes: [Cell<u64>; 2],
    tunnel: Cell<Addr>,
    decision: [DecisionCell; 2],
    last_seen: Cell<u32>,
    created: Cell<u32>,
    /// By side: the originator's, the responder's.
    endpoint: [Cell<u32>; 2],
    /// By the side that judged: the responder's identity, the originator's.
    judged: [Cell<u32>; 2],
    flags: Cell<u16>,
    state: Cell<u8>,
    routes: Cell<u8>,
    rev_nat: Cell<u32>,
    nat_addr: Cell<Addr>,
    nat_port: Cell<[u8; 2]>,
    by_device: [Cell<u8>; 2],
    pad2: [u8; 4],
}

const _: () = assert!(size_of::<DecisionCell>() == size_of::<CtDecision>());
const _: () = assert!(size_of::<CtCell>() == size_of::<CtEntry>());
const _: () = assert!(direction::EGRESS == 0 && direction::INGRESS == 1);

impl DecisionCell {
    /// The decision as a value.
    #[must_use]
    #[inline(always)]
    pub fn value(&self) -> CtDecision {
        CtDecision {
            revision: self.revision.get(),
            generation: self.generation.get(),
            slot: self.slot.get(),
            rule: self.rule.get(),
            verdict: self.verdict.get(),
            flags: self.flags.get(),
            pad: [0; 2],
        }
    }

    /// Whether it was made under this policy and this generation.
    #[inline(always)]
    pub(crate) fn is_current(&self, revision: u32, slot: u32, generation: u32) -> bool {
        self.revision.get() == revision && self.slot.get() == slot && self.generation.get() == generation
    }

    #[inline(always)]
    pub(crate) fn verdict(&self) -> u8 {
        self.verdict.get()
    }

    #[inline(always)]
    pub(crate) fn generation(&self) -> u32 {
        self.generation.get()
    }

    #[inline(always)]
    pub(crate) fn rule(&self) -> u32 {
        self.rule.get()
    }

    /// Replaces it: never current in between.
    #[inline(always)]
    pub(crate) fn replace<T: Tables>(&self, t: T, d: &CtDecision) {
        self.revision.set(0);
        t.barrier();
        self.generation.set(d.generation);
        self.slot.set(d.slot);
        // Two processors may replace at once: the older of two decisions shows by these before its verdict is there.
        t.barrier();
        self.rule.set(d.rule);
        self.verdict.set(d.verdict);
        self.flags.set(d.flags);
        t.barrier();
        self.revision.set(d.revision);
    }
}

impl CtCell {
    /// A live entry with this value.
    #[must_use]
    pub fn new(e: &CtEntry) -> Self {
        let cell = Self::default();
        cell.set_all(e);
        cell
    }

    #[inline(always)]
    fn set_all(&self, e: &CtEntry) {
        self.packets[0].set(e.packets[0]);
        self.packets[1].set(e.packets[1]);
        self.bytes[0].set(e.bytes[0]);
        self.bytes[1].set(e.bytes[1]);
        self.tunnel.set(e.tunnel);
        for (cell, d) in self.decision.iter().zip(e.decision) {
            cell.revision.set(d.revision);
            cell.generation.set(d.generation);
            cell.slot.set(d.slot);
            cell.rule.set(d.rule);
            cell.verdict.set(d.verdict);
            cell.flags.set(d.flags);
        }
        self.last_seen.set(e.last_seen);
        self.created.set(e.created);
        self.endpoint[0].set(e.orig_endpoint);
        self.endpoint[1].set(e.reply_endpoint);
        self.judged[0].set(e.reply_identity);
        self.judged[1].set(e.orig_identity);
        self.flags.set(e.flags);
        self.state.set(e.state);
        self.routes.set(e.routes);
        self.rev_nat.set(e.rev_nat);
        self.nat_addr.set(e.nat_addr);
        self.nat_port.set(e.nat_port);
        self.by_device[0].set(e.by_device[0]);
        self.by_device[1].set(e.by_device[1]);
    }

    /// Copies the entry out.
    #[inline(always)]
    pub fn read(&self, e: &mut CtEntry) {
        e.packets = [self.packets[0].get(), self.packets[1].get()];
        e.bytes = [self.bytes[0].get(), self.bytes[1].get()];
        e.tunnel = self.tunnel.get();
        e.decision = [self.decision[0].value(), self.decision[1].value()];
        e.last_seen = self.last_seen.get();
        e.created = self.created.get();
        e.orig_endpoint = self.endpoint[0].get();
        e.reply_endpoint = self.endpoint[1].get();
        e.reply_identity = self.judged[0].get();
        e.orig_identity = self.judged[1].get();
        e.flags = self.flags.get();
        e.state = self.state.get();
        e.routes = self.routes.get();
        e.rev_nat = self.rev_nat.get();
        e.nat_addr = self.nat_addr.get();
        e.nat_port = self.nat_port.get();
        e.by_device = [self.by_device[0].get(), self.by_device[1].get()];
    }

    /// The entry as a value.
    #[must_use]
    pub fn value(&self) -> CtEntry {
        let mut e = CtEntry::default();
        self.read(&mut e);
        e
    }

    // A side is the place in an array: a branch on it would have the verifier walk all that follows once for each.

    /// Decision of the originator's (egress) or the responder's (ingress) endpoint.
    #[inline(always)]
    pub(crate) fn decision(&self, side: u8) -> &DecisionCell {
        &self.decision[usize::from(side & 1)]
    }

    /// Endpoint id of the originator (egress) or the responder (ingress).
    #[inline(always)]
    pub(crate) fn endpoint(&self, side: u8) -> u32 {
        self.endpoint[usize::from(side & 1)].get()
    }

    #[inline(always)]
    pub(crate) fn set_endpoint(&self, side: u8, id: u32) {
        self.endpoint[usize::from(side & 1)].set(id);
    }

    /// Identity that a side judged.
    #[inline(always)]
    pub(crate) fn set_judged(&self, side: u8, identity: u32) {
        self.judged[usize::from(side & 1)].set(identity);
    }

    /// Identity that a side judged.
    #[inline(always)]
    pub(crate) fn judged(&self, side: u8) -> u32 {
        self.judged[usize::from(side & 1)].get()
    }

    #[inline(always)]
    pub(crate) fn tunnel(&self) -> Addr {
        self.tunnel.get()
    }

    #[inline(always)]
    pub(crate) fn set_tunnel(&self, tunnel: Addr) {
        self.tunnel.set(tunnel);
    }

    #[inline(always)]
    pub(crate) fn flags(&self) -> u16 {
        self.flags.get()
    }

    /// Whether the connection is in the established table and this entry waits for its end.
    #[must_use]
    #[inline(always)]
    pub fn has_moved(&self) -> bool {
        self.flags.get() & ct_flags::MOVED != 0
    }

    /// Whether a direction (0 original, 1 reply) is received by the tunnel's device only.
    #[inline(always)]
    pub(crate) fn is_by_device(&self, direction: u8) -> bool {
        self.by_device[usize::from(direction & 1)].get() != 0
    }

    /// From now on it is.
    #[inline(always)]
    pub(crate) fn set_by_device(&self, direction: u8) {
        self.by_device[usize::from(direction & 1)].set(1);
    }

    #[inline(always)]
    pub(crate) fn rev_nat(&self) -> u32 {
        self.rev_nat.get()
    }

    #[inline(always)]
    pub(crate) fn nat_addr(&self) -> Addr {
        self.nat_addr.get()
    }

    #[inline(always)]
    pub(crate) fn nat_port(&self) -> [u8; 2] {
        self.nat_port.get()
    }

    #[inline(always)]
    pub(crate) fn routes(&self) -> u8 {
        self.routes.get()
    }

    #[inline(always)]
    pub(crate) fn set_routes(&self, routes: u8) {
        self.routes.set(routes);
    }

    #[inline(always)]
    pub(crate) fn state(&self) -> u8 {
        self.state.get()
    }

    /// Counts a packet of a direction and notes the time.
    #[inline(always)]
    fn count(&self, original: bool, bytes: u32, now: u32) {
        let (packets, octets) =
            if original { (&self.packets[0], &self.bytes[0]) } else { (&self.packets[1], &self.bytes[1]) };
        packets.set(packets.get().wrapping_add(1));
        octets.set(octets.get().wrapping_add(u64::from(bytes)));
        // Most packets of a second find it written: the line stays shared.
        if self.last_seen.get() != now {
            self.last_seen.set(now);
        }
    }

    /// Takes the connection back that has ended. Its decisions are those of its beginning: where they are not current, they are made anew.
    #[inline(always)]
    fn take_back(&self, e: &Self) {
        self.packets[0].set(e.packets[0].get());
        self.packets[1].set(e.packets[1].get());
        self.bytes[0].set(e.bytes[0].get());
        self.bytes[1].set(e.bytes[1].get());
        self.last_seen.set(e.last_seen.get());
        self.state.set(e.state.get());
        self.flags.set(e.flags.get() & !ct_flags::COUNTED);
    }

    /// Starts the entry over as a new connection.
    #[inline(never)]
    pub(crate) fn restart(&self, e: &CtEntry) {
        let keep = self.flags.get() & ct_flags::COUNTED;
        self.decision[0].revision.set(0);
        self.decision[1].revision.set(0);
        self.set_all(e);
        self.flags.set(e.flags | keep);
    }
}

/// Seconds without a packet after which an entry is dead.
#[must_use]
#[inline(always)]
pub const fn timeout(protocol: u8, state: u8) -> u32 {
    match (protocol, state) {
        (TCP, ct_state::ESTABLISHED) => ct_timeout::TCP_ESTABLISHED,
        (TCP, ct_state::CLOSING) => ct_timeout::TCP_CLOSING,
        (TCP, ct_state::CLOSED) => ct_timeout::TCP_CLOSED,
        (TCP, _) => ct_timeout::TCP_SYN,
        (UDP, ct_state::ESTABLISHED) => ct_timeout::UDP_STREAM,
        (UDP, _) => ct_timeout::UDP_NEW,
        (ICMP | ICMPV6, _) => ct_timeout::ICMP,
        _ => ct_timeout::OTHER,
    }
}

/// Whether an entry is dead at `now` (seconds).
#[must_use]
#[inline(always)]
pub const fn expired(protocol: u8, state: u8, last_seen: u32, now: u32) -> bool {
    let idle = now.wrapping_sub(last_seen);
    // Another processor may have written a later second than the one read here.
    idle > timeout(protocol, state) && idle < u32::MAX / 2
}

impl CtCell {
    #[inline(always)]
    pub(crate) fn is_expired(&self, protocol: u8, now: u32) -> bool {
        expired(protocol, self.state.get(), self.last_seen.get(), now)
    }
}

/// State and flags after a packet, packed: flags << 8 | state. `age` is in seconds.
#[inline(never)]
pub(crate) fn advance(protocol: u8, packed: u32, tcp: u8, original: bool, age: u32) -> u32 {
    let mut state = packed as u8;
    let mut flags = (packed >> 8) as u16;
    if protocol != TCP && flags & ct_flags::SEEN_REPLY != 0 && age >= ct_timeout::STREAM_AGE {
        state = ct_state::ESTABLISHED;
    }
    if !original {
        flags |= ct_flags::SEEN_REPLY;
    }
    if protocol != TCP {
        return u32::from(flags) << 8 | u32::from(state);
    }
    if tcp & RST != 0 {
        flags |= ct_flags::RST;
        state = ct_state::CLOSED;
    } else if tcp & SYN != 0 {
        if !original && state == ct_state::SYN_SENT {
            state = ct_state::SYN_RECV;
        }
    } else {
        if tcp & FIN != 0 {
            flags |= if original { ct_flags::FIN_ORIG } else { ct_flags::FIN_REPLY };
        }
        let both = ct_flags::FIN_ORIG | ct_flags::FIN_REPLY;
        if flags & both == both {
            state = ct_state::CLOSED;
        } else if flags & both != 0 {
            state = ct_state::CLOSING;
        } else if state == ct_state::CLOSED && tcp & ACK != 0 {
            // The reset was not believed by who got it: the connection lives, but on a short lease.
            state = ct_state::CLOSING;
            flags &= !ct_flags::RST;
        } else if flags & ct_flags::SEEN_REPLY != 0
            && tcp & ACK != 0
            && (original || flags & ct_flags::MIDSTREAM != 0)
        {
            state = ct_state::ESTABLISHED;
        }
    }
    u32::from(flags) << 8 | u32::from(state)
}

/// State and flags of the first packet.
#[inline(always)]
pub(crate) fn first_state(protocol: u8, tcp: u8) -> (u8, u16) {
    if protocol != TCP {
        (ct_state::NEW, 0)
    } else if tcp & SYN != 0 && tcp & ACK == 0 {
        (ct_state::SYN_SENT, 0)
    } else {
        (ct_state::SYN_RECV, ct_flags::MIDSTREAM)
    }
}

/// The key of the packet's tuple: the lower (address, port) first.
#[inline(always)]
pub(crate) fn key(p: &mut Packet) {
    let src = u128::from_be_bytes(p.tuple_src.0);
    let dst = u128::from_be_bytes(p.dst.0);
    let ports = u16::from_be_bytes(p.sport) <= u16::from_be_bytes(p.dport);
    let src_is_lo = if src == dst { ports } else { src < dst };
    p.key.vpc = p.vpc;
    p.key.protocol = p.tuple_protocol;
    if src_is_lo {
        p.flags |= flag::SRC_IS_LO;
        p.key.lo = p.tuple_src;
        p.key.lo_port = p.sport;
        p.key.hi = p.dst;
        p.key.hi_port = p.dport;
    } else {
        p.flags &= !flag::SRC_IS_LO;
        p.key.lo = p.dst;
        p.key.lo_port = p.dport;
        p.key.hi = p.tuple_src;
        p.key.hi_port = p.sport;
    }
}

/// Counts the packet on its entry and moves its state on. A first reply makes a TCP connection an established one;
/// everything else has to speak on after that: a question and its answer are no connection, and a name server would
/// fill the table and its quota with them.
#[inline(always)]
pub(crate) fn touch<T: Tables>(t: T, p: &mut Packet, e: &CtCell, bytes: u32) -> Step {
    if t.dry() || p.has(flag::ICMP_ERROR | flag::COUNTED) {
        return Step::GO;
    }
    let original = p.has(flag::ORIGINAL);
    e.count(original, bytes, p.now);
    let mut ended = false;
    if p.tuple_protocol == TCP || p.has(flag::HALF_OPEN) || !original {
        // Most packets of an open connection change nothing.
        let settled = e.state.get() == ct_state::ESTABLISHED
            && e.flags.get() & ct_flags::SEEN_REPLY != 0
            && p.tcp_flags & (FIN | SYN | RST) == 0;
        if !settled && !p.has(flag::FRAG_LATER) {
            let before = e.state.get();
            let packed = u32::from(e.flags.get()) << 8 | u32::from(before);
            let age = p.now.wrapping_sub(e.created.get());
            let after = advance(p.tuple_protocol, packed, p.tcp_flags, original, age);
            e.state.set(after as u8);
            e.flags.set((after >> 8) as u16);
            ended = after as u8 == ct_state::CLOSED && before != ct_state::CLOSED;
        }
    }
    if p.has(flag::HALF_OPEN) {
        // A refused connection never becomes one.
        let state = e.state.get();
        let lives = if p.tuple_protocol == TCP {
            !original && state != ct_state::CLOSED
        } else {
            state == ct_state::ESTABLISHED
        };
        if lives {
            return promote(t, p, e);
        }
    } else if ended {
        demote(t, p, e);
    }
    Step::GO
}

/// Moves an entry that has ended back to where new ones make it go: it takes neither room nor quota from those that live.
#[inline(never)]
fn demote<T: Tables>(t: T, p: &mut Packet, e: &CtCell) {
    let counted = e.flags() & ct_flags::COUNTED != 0;
    let (orig, reply) = (e.endpoint(direction::EGRESS), e.endpoint(direction::INGRESS));
    // There before it is removed here: no packet finds it in neither. Mostly it is where it began.
    if let Some(begun) = t.half_open(&p.key) {
        begun.take_back(e);
    } else {
        e.read(&mut p.entry);
        p.entry.flags &= !ct_flags::COUNTED;
        if t.insert_half_open(&p.key, &p.entry) != Inserted::Yes {
            return;
        }
    }
    if t.remove_established(&p.key) && counted {
        give_quotas(t, p.vpc, orig, reply);
    }
}

/// Moves an entry from the half-open to the established connections.
#[inline(never)]
fn promote<T: Tables>(t: T, p: &mut Packet, e: &CtCell) -> Step {
    e.read(&mut p.entry);
    let (orig, reply) = (p.entry.orig_endpoint, p.entry.reply_endpoint);
    // The node's own are held to no quota: a probe that failed would end a busy workload.
    let counted = p.entry.flags & ct_flags::FROM_HOST == 0;
    if counted {
        p.entry.flags |= ct_flags::COUNTED;
        if !take_quotas(t, p.vpc, orig, reply) {
            bail!(ConntrackFull);
        }
    }
    let inserted = t.insert_established(&p.key, &p.entry);
    if inserted == Inserted::Yes {
        if p.tuple_protocol == TCP {
            // Its end will be seen, and nothing is added or removed there then.
            e.flags.set(e.flags.get() | ct_flags::MOVED);
        } else {
            t.remove_half_open(&p.key);
        }
        return Step::GO;
    }
    if counted {
        give_quotas(t, p.vpc, orig, reply);
    }
    if inserted == Inserted::Full {
        bail!(ConntrackFull);
    }
    Step::GO
}

/// One connection more of the VPC and of the endpoints that are here, or of none.
#[inline(always)]
fn take_quotas<T: Tables>(t: T, vpc: u32, orig: u32, reply: u32) -> bool {
    if !t.take_quota(&QuotaKey { vpc, endpoint: 0 }) {
        return false;
    }
    if orig != 0 && !t.take_quota(&QuotaKey { vpc, endpoint: orig }) {
        give_quotas(t, vpc, 0, 0);
        return false;
    }
    if reply != 0 && !t.take_quota(&QuotaKey { vpc, endpoint: reply }) {
        give_quotas(t, vpc, orig, 0);
        return false;
    }
    true
}

/// Undoes [`take_quotas`]; 0 = no endpoint.
#[inline(always)]
fn give_quotas<T: Tables>(t: T, vpc: u32, orig: u32, reply: u32) {
    t.give_quota(&QuotaKey { vpc, endpoint: 0 });
    if orig != 0 {
        t.give_quota(&QuotaKey { vpc, endpoint: orig });
    }
    if reply != 0 {
        t.give_quota(&QuotaKey { vpc, endpoint: reply });
    }
}
