//! Services for packets that no socket hook has translated: the destination before policy, the source of answers on their way back.
//!
//! A flow keeps the backend that its first packet was given (`srv_flows`). Connection tracking sees (client, backend); the entry remembers
//! what the client asked for. The frame itself is rewritten last, so whatever is refused before is answered as it came.

use flowloom_bpf_abi::{
    Addr, DropReason, FlowKey, FlowValue, FragKey, ServiceKey, ct_timeout, flow_kind, hook, service_scope,
    trace_step,
};

use crate::frame::{Frame, Verdict};
use crate::packet::{Packet, flag, to};
use crate::parse::{ACK, ETH, ICMP, ICMPV6, IPV4, SCTP, SYN, TCP, UDP};
use crate::service;
use crate::sum::{add, fold};
use crate::tables::Tables;
use crate::{Step, bail, go, guard, hooks, parse, route};

/// Whether the packet is for a service: then its destination is the backend's, and [`flag::NAT_DST`] is set. What belongs to an endpoint's
/// conversation with itself is sent here.
#[inline(never)]
pub(crate) fn meet<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    ask(p, flow_kind::FORWARD, service_scope::INSIDE);
    // What begins a connection has no flow that counts where there is no service: mostly there is none.
    let begins = p.tuple_protocol == TCP
        && p.tcp_flags & (SYN | ACK) == SYN
        && !p.has(flag::ICMP_ERROR | flag::FRAG_LATER);
    if begins && !t.service(&p.query.key, &mut p.query.record) {
        let step = service::no_port(t, &mut p.query);
        return if step == Step::GO { answer_to_self(f, t, p) } else { step };
    }
    if t.flow(&p.flow_key, &mut p.flow) && holds(t, p) {
        if p.flow.last_seen != p.now {
            t.touch_flow(&p.flow_key, p.now);
        }
    } else {
        if p.has(flag::ICMP_ERROR) {
            return answer_to_self(f, t, p);
        }
        let step = service::select(t, &mut p.query);
        if step == Step::GO {
            return answer_to_self(f, t, p);
        }
        if step != Step::DONE {
            return step;
        }
        // A connection that is under way has its flow: this is the rest of one that was forgotten, or noise.
        if p.tuple_protocol == TCP && (p.tcp_flags & (SYN | ACK) != SYN || p.has(flag::FRAG_LATER)) {
            return Step::reject(DropReason::ServiceConnectionUnknown);
        }
        chosen(p);
    }
    let a = &p.flow.addr.0;
    t.step(
        trace_step::SERVICE,
        p.flow.service,
        p.query.record.list,
        u32::from_be_bytes([a[12], a[13], a[14], a[15]]),
    );
    go!(towards(p));
    // Only an endpoint itself speaks about its conversation with itself.
    if p.dst == p.tuple_src && p.src == p.tuple_src {
        return to_self(f, t, p);
    }
    Step::GO
}

/// The flow of the packet's tuple.
#[inline(never)]
fn key(p: &mut Packet, kind: u8) {
    p.flow_key = FlowKey {
        vpc: p.vpc,
        src: p.tuple_src,
        dst: p.dst,
        sport: p.sport,
        dport: p.dport,
        protocol: p.tuple_protocol,
        kind,
        pad: [0; 2],
    };
}

/// What the flow and the question are.
#[inline(never)]
fn ask(p: &mut Packet, kind: u8, scope: u8) {
    key(p, kind);
    p.query.key = ServiceKey { vpc: p.vpc, addr: p.dst, port: p.dport, protocol: p.tuple_protocol, scope };
    p.query.client = p.tuple_src;
    p.query.client_known = 1;
    p.query.now = p.now;
}

/// A new flow to the backend of `p.query`.
#[inline(never)]
fn chosen(p: &mut Packet) {
    p.flow = FlowValue {
        addr: p.query.backend,
        port: p.query.port,
        flags: p.query.flags,
        service: p.query.record.service,
        last_seen: p.now,
        service_addr: Addr::ZERO,
        service_port: [0; 2],
        node_port: [0; 2],
    };
    p.flags |= flag::NEW_FLOW;
}

/// The destination becomes the flow's backend.
#[inline(never)]
fn towards(p: &mut Packet) -> Step {
    // SCTP's checksum covers the whole packet: more than can be summed up here.
    if p.tuple_protocol == SCTP && p.flow.port != p.dport {
        bail!(ServiceUnsupported);
    }
    p.nat_addr = p.dst;
    p.nat_port = p.dport;
    p.nat_service = p.flow.service;
    p.dst = p.flow.addr;
    p.dport = p.flow.port;
    p.flags |= flag::NAT_DST;
    Step::GO
}

/// Whether the flow found in `p.flow` goes on with its backend.
#[inline(always)]
fn holds<T: Tables>(t: T, p: &mut Packet) -> bool {
    if p.has(flag::ICMP_ERROR) {
        return true;
    }
    if p.tuple_protocol == TCP {
        // A connection stays where it is; a new one goes where it may.
        if p.tcp_flags & (SYN | ACK) != SYN {
            return true;
        }
    } else {
        if p.now.wrapping_sub(p.flow.last_seen) > ct_timeout::UDP_STREAM {
            return false;
        }
        // Asked once a second.
        if p.flow.last_seen == p.now {
            return true;
        }
    }
    let (addr, port) = (p.flow.addr, p.flow.port);
    service::still(t, &mut p.query, &addr, port)
}

/// Remembers a flow that was let through.
#[inline(always)]
pub(crate) fn learn<T: Tables>(t: T, p: &mut Packet) {
    if p.has(flag::NEW_FLOW) {
        t.learn_flow(&p.flow_key, &p.flow);
    }
}

/// The gateway's address in the packet's family.
#[inline(always)]
fn gateway<T: Tables>(t: T, p: &Packet) -> Addr {
    let Some(ep) = t.endpoint(p.src_ep) else { return Addr::ZERO };
    if p.ethertype == IPV4 { ep.gateway4 } else { ep.gateway6 }
}

/// A client that is its own backend: the source becomes its gateway's address, so that the answer comes back here.
#[inline(never)]
fn to_self<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let gateway = gateway(t, p);
    if gateway.is_zero() || !has_ports(p.tuple_protocol) {
        bail!(ServiceUnsupported);
    }
    go!(address(f, p, DST, &p.nat_addr, &p.dst));
    go!(address(f, p, SRC, &p.src, &gateway));
    if p.has(flag::ICMP_ERROR) {
        go!(inner(f, p));
        go!(inner_address(f, p, DST, &p.tuple_src, &gateway));
    } else {
        go!(port(f, p, DST, p.nat_port, p.dport));
        learn_self(t, p, gateway);
    }
    p.dst_ep = p.src_ep;
    route::deliver(f, t, p)
}

/// Remembers a flow of an endpoint to itself, and how its answers come.
#[inline(always)]
fn learn_self<T: Tables>(t: T, p: &mut Packet, gateway: Addr) {
    learn(t, p);
    p.flow = FlowValue {
        addr: p.nat_addr,
        port: p.nat_port,
        flags: 0,
        service: p.nat_service,
        last_seen: p.now,
        service_addr: Addr::ZERO,
        service_port: [0; 2],
        node_port: [0; 2],
    };
    p.flow_key.dst = gateway;
    p.flow_key.sport = p.dport;
    p.flow_key.dport = p.sport;
    p.flow_key.kind = flow_kind::HAIRPIN;
    t.learn_flow(&p.flow_key, &p.flow);
}

/// Whether the protocol's header begins with two ports.
#[inline(always)]
const fn has_ports(protocol: u8) -> bool {
    protocol == TCP || protocol == UDP || protocol == SCTP
}

/// An endpoint's answer to itself.
#[inline(never)]
fn answer_to_self<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if p.dst != gateway(t, p) || p.src != p.tuple_src || !has_ports(p.tuple_protocol) {
        return Step::GO;
    }
    p.flow_key.kind = flow_kind::HAIRPIN;
    if !t.flow(&p.flow_key, &mut p.flow) || p.now.wrapping_sub(p.flow.last_seen) > ct_timeout::TCP_ESTABLISHED
    {
        return Step::GO;
    }
    go!(address(f, p, DST, &p.dst, &p.src));
    go!(address(f, p, SRC, &p.src, &p.flow.addr));
    if p.has(flag::ICMP_ERROR) {
        go!(inner_address(f, p, SRC, &p.dst, &p.src));
        go!(inner_address(f, p, DST, &p.src, &p.flow.addr));
        go!(inner_port(f, p, DST, p.sport, p.flow.port));
    } else {
        go!(port(f, p, SRC, p.sport, p.flow.port));
    }
    p.dst_ep = p.src_ep;
    route::deliver(f, t, p)
}

/// What an uplink or the overlay brings that is for no endpoint. [`Step::GO`]: `p.route` says where it goes; when it is what it was, the packet is
/// the host's own affair.
#[inline(never)]
pub(crate) fn arrive<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if !tracked(f, t, p) {
        return Step::GO;
    }
    ask(p, flow_kind::OUTSIDE, service_scope::OUTSIDE);
    if t.flow(&p.flow_key, &mut p.flow) && holds(t, p) {
        if p.flow.last_seen != p.now {
            // Written anew with what leads back: both stay as long as either.
            p.flags |= flag::NEW_FLOW;
            p.flow.last_seen = p.now;
        }
    } else {
        go!(answer_of_backend(f, t, p));
        if p.has(flag::OUT) {
            return Step::GO;
        }
        // What belongs to no flow of a service may belong to a socket of this host.
        if p.has(flag::ICMP_ERROR | flag::FRAG_LATER)
            || (p.tuple_protocol == TCP && p.tcp_flags & (SYN | ACK) != SYN)
        {
            return Step::GO;
        }
        p.flow_key.kind = flow_kind::OUTSIDE;
        let step = service::select(t, &mut p.query);
        if step != Step::DONE {
            return step;
        }
        chosen(p);
    }
    if p.has(flag::FRAG_FIRST) {
        go!(guard::fragment(t, p));
    }
    go!(towards(p));
    p.address_key.vpc = p.vpc;
    p.address_key.addr = p.dst;
    let own = t.address(&p.address_key);
    if own.is_some_and(|a| a.endpoint != 0) {
        return hooks::inward(t, p);
    }
    if own.is_some() {
        return to_host(f, t, p);
    }
    to_node(f, t, p)
}

/// Whether the packet may belong to a flow of a service; its ports, or those of what it quotes, are known then.
#[inline(always)]
fn tracked<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> bool {
    match p.protocol {
        TCP | SCTP => {}
        // Tunnels are this node's own.
        UDP => {
            if !p.has(flag::FRAG_LATER) && t.config().is_none_or(|c| c.tunnel_port == p.dport) {
                return false;
            }
        }
        // The rest of one in fragments could not be found.
        ICMP | ICMPV6 => {
            return p.has(flag::ICMP_ERROR) && !p.has(flag::FRAG_FIRST) && parse::quoted(f, p) == Step::GO;
        }
        _ => return false,
    }
    if p.has(flag::FRAG_LATER) {
        p.frag_key =
            FragKey { vpc: p.vpc, src: p.src, dst: p.dst, id: p.ident, protocol: p.protocol, pad: [0; 3] };
        let Some(ports) = t.fragment(&p.frag_key) else { return false };
        p.sport = ports.sport;
        p.dport = ports.dport;
    }
    true
}

/// How the answers of a backend that is no local endpoint come: from it, to the packet's source as it will be.
#[inline(never)]
fn learn_reply<T: Tables>(t: T, p: &mut Packet) {
    p.flow_key = FlowKey {
        vpc: p.vpc,
        src: p.dst,
        dst: p.tuple_src,
        sport: p.dport,
        dport: p.sport,
        protocol: p.protocol,
        kind: flow_kind::REPLY,
        pad: [0; 2],
    };
    p.flow.addr = p.src;
    p.flow.port = if p.has(flag::SNAT) { p.client_port } else { p.sport };
    p.flow.service_addr = p.nat_addr;
    p.flow.service_port = p.nat_port;
    t.learn_flow(&p.flow_key, &p.flow);
}

/// This host is the backend: the client stays as it is, and the answer is met where it leaves.
#[inline(never)]
fn to_host<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if p.has(flag::NEW_FLOW) && !p.has(flag::ICMP_ERROR) {
        t.learn_flow(&p.flow_key, &p.flow);
        learn_reply(t, p);
    }
    go!(to_backend(f, p));
    // A frame from a tunnel bears nobody's address: the stack would take it for another's.
    f.for_this_host();
    p.verdict = Verdict::PASS.0;
    Step::DONE
}

/// The backend is on another node, or nobody's: this node speaks in the client's place, so that the answer comes back here.
#[inline(never)]
fn to_node<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(config) = t.config() else { bail!(NoRoute) };
    let node = if p.ethertype == IPV4 { config.node4 } else { config.node6 };
    if node.is_zero() {
        bail!(ServiceUnsupported);
    }
    let error = p.has(flag::ICMP_ERROR);
    p.client_port = p.sport;
    p.tuple_src = node;
    p.flags |= flag::SNAT;
    if p.flow.node_port == [0; 2] && (error || !node_port(f, t, p)) {
        bail!(ServiceTupleInUse);
    }
    p.sport = p.flow.node_port;
    if p.has(flag::NEW_FLOW) && !error {
        t.learn_flow(&p.flow_key, &p.flow);
        learn_reply(t, p);
    }
    route::find(t, p);
    if p.route == to::NOWHERE || p.route == to::GATEWAY {
        bail!(NoRoute);
    }
    if p.route != to::TUNNEL {
        p.route = to::DIRECT;
    }
    Step::GO
}

/// How many ports are tried.
const PORT_TRIES: u32 = 8;

/// Chooses a port of this node that neither another flow to this backend nor a socket of this host has.
#[inline(never)]
fn node_port<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> bool {
    let (first, last) = flowloom_bpf_abi::SNAT_PORTS;
    let span = u32::from(last) - u32::from(first) + 1;
    let mut key = FlowKey {
        vpc: p.vpc,
        src: p.dst,
        dst: p.tuple_src,
        sport: p.dport,
        dport: [0; 2],
        protocol: p.protocol,
        kind: flow_kind::REPLY,
        pad: [0; 2],
    };
    let mut i = 0;
    while i < PORT_TRIES {
        i += 1;
        let offset = ((u64::from(t.random()) * u64::from(span)) >> 32) as u16;
        key.dport = first.wrapping_add(offset).to_be_bytes();
        if !t.is_flow(&key) && !f.has_socket(&key) {
            p.flow.node_port = key.dport;
            return true;
        }
    }
    false
}

/// The answer of a backend to a client outside: it comes from the service, [`flag::OUT`] and `p.route` say so.
#[inline(never)]
pub(crate) fn answer_outside<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if tracked(f, t, p) { answer_of_backend(f, t, p) } else { Step::GO }
}

/// The same for a packet whose ports are known. An ICMP error about what went to the backend, whoever sent it, comes from the service, too: the
/// client knows nobody else.
#[inline(never)]
fn answer_of_backend<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    key(p, flow_kind::REPLY);
    if !t.flow(&p.flow_key, &mut p.flow) {
        return Step::GO;
    }
    let error = p.has(flag::ICMP_ERROR);
    if p.flow.last_seen != p.now && !error {
        t.touch_flow(&p.flow_key, p.now);
    }
    if p.has(flag::FRAG_FIRST) {
        go!(guard::fragment(t, p));
    }
    go!(address(f, p, SRC, &p.src, &p.flow.service_addr));
    if p.dst != p.flow.addr {
        go!(address(f, p, DST, &p.dst, &p.flow.addr));
    }
    if error {
        go!(inner_address(f, p, SRC, &p.dst, &p.flow.addr));
        go!(inner_port(f, p, SRC, p.dport, p.flow.port));
        go!(inner_address(f, p, DST, &p.tuple_src, &p.flow.service_addr));
        go!(inner_port(f, p, DST, p.sport, p.flow.service_port));
    } else {
        go!(port(f, p, SRC, p.sport, p.flow.service_port));
        go!(port(f, p, DST, p.dport, p.flow.port));
    }
    p.flags |= flag::OUT;
    if p.hook == hook::TO_UPLINK || p.hook == hook::TO_OVERLAY {
        return Step::GO;
    }
    p.dst = p.flow.addr;
    route::find(t, p);
    if p.route != to::TUNNEL {
        p.route = to::DIRECT;
    }
    Step::GO
}

/// The packet's destination as its sender knows it, for what is answered.
#[inline(always)]
pub(crate) fn restore(p: &mut Packet) {
    if p.has(flag::NAT_DST) {
        p.dst = p.nat_addr;
        p.dport = p.nat_port;
    }
    if p.has(flag::SNAT) {
        p.sport = p.client_port;
    }
}

/// Whether the source is translated at this hook: where the client is next.
#[inline(always)]
fn at_client(p: &Packet) -> bool {
    p.has(flag::NAT_SRC)
        && (p.route == to::LOCAL
            || p.hook == hook::TO_ENDPOINT
            || (p.has(flag::OUT) && (p.route == to::DIRECT || p.route == to::TUNNEL)))
}

/// Writes what was translated into the frame.
#[inline(always)]
pub(crate) fn rewrite<F: Frame>(f: F, p: &Packet) -> Step {
    if p.has(flag::NAT_DST) {
        to_backend(f, p)
    } else if at_client(p) {
        to_client(f, p)
    } else {
        Step::GO
    }
}

#[inline(never)]
fn to_backend<F: Frame>(f: F, p: &Packet) -> Step {
    go!(address(f, p, DST, &p.nat_addr, &p.dst));
    let error = p.has(flag::ICMP_ERROR);
    if p.has(flag::SNAT) {
        go!(address(f, p, SRC, &p.src, &p.tuple_src));
        if error {
            // The flow's key names the client.
            go!(inner_address(f, p, DST, &p.flow_key.src, &p.tuple_src));
            go!(inner_port(f, p, DST, p.client_port, p.sport));
        } else {
            go!(port(f, p, SRC, p.client_port, p.sport));
        }
    }
    if error {
        return inner(f, p);
    }
    port(f, p, DST, p.nat_port, p.dport)
}

#[inline(never)]
fn to_client<F: Frame>(f: F, p: &Packet) -> Step {
    // A router on the way speaks for itself.
    if p.src == p.tuple_src {
        go!(address(f, p, SRC, &p.src, &p.nat_addr));
    } else if !p.has(flag::ICMP_ERROR) {
        bail!(InternalError);
    }
    if p.has(flag::ICMP_ERROR) {
        return inner(f, p);
    }
    port(f, p, SRC, p.sport, p.nat_port)
}

/// Which of a packet's two addresses and ports.
const SRC: u32 = 0;
const DST: u32 = 1;

/// What a change adds to a checksum.
#[inline(always)]
fn delta<const N: usize>(old: &[u8; N], new: &[u8; N]) -> u16 {
    // N / 2 words; the complement of a word is 0xffff less it.
    let old = (N as u32 / 2) * 0xffff - add(0, old);
    fold(add(old, new))
}

/// [`delta`] of addresses: in the words that their alignment allows, and the bytes of the sum turned round at the end (RFC 1071 section 2).
#[inline(always)]
pub(crate) fn address_delta(old: &Addr, new: &Addr) -> u16 {
    let mut sum = 0;
    let mut i = 0;
    while i < 4 {
        sum += u64::from(!old.word(i)) + u64::from(new.word(i));
        i += 1;
    }
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    u16::from_be(fold(sum as u32))
}

/// Exchanges an address in the IP header, and what checksums say about it.
#[inline(never)]
fn address<F: Frame>(f: F, p: &Packet, which: u32, old: &Addr, new: &Addr) -> Step {
    let change = address_delta(old, new);
    let v4 = p.ethertype == IPV4;
    let ok = if v4 { ipv4(f, ETH, which, new, change) } else { f.store(ETH + 8 + 16 * which, &new.0) };
    if !ok {
        bail!(InternalError);
    }
    if p.has(flag::FRAG_LATER) {
        return Step::GO;
    }
    let at = match p.protocol {
        TCP => p.l4 + 16,
        UDP => p.l4 + 6,
        ICMPV6 => p.l4 + 2,
        _ => return Step::GO,
    };
    if !f.fix_pseudo(at, change, v4, p.protocol == UDP) {
        bail!(InternalError);
    }
    Step::GO
}

/// Exchanges an address of the IPv4 header at `at`.
#[inline(always)]
fn ipv4<F: Frame>(f: F, at: u32, which: u32, new: &Addr, change: u16) -> bool {
    let mut held = [0; 2];
    if !f.load(at + 10, &mut held) {
        return false;
    }
    // RFC 1624, equation 3.
    let check = !fold(u32::from(!u16::from_be_bytes(held)) + u32::from(change));
    f.store(at + 10, &check.to_be_bytes()) && f.store(at + 12 + 4 * which, &new.v4_octets())
}

/// Exchanges a port.
#[inline(never)]
fn port<F: Frame>(f: F, p: &Packet, which: u32, old: [u8; 2], new: [u8; 2]) -> Step {
    if p.has(flag::FRAG_LATER) || old == new {
        return Step::GO;
    }
    let at = match p.protocol {
        TCP => p.l4 + 16,
        UDP => p.l4 + 6,
        _ => bail!(ServiceUnsupported),
    };
    if !f.store(p.l4 + 2 * which, &new) || !f.fix_payload(at, delta(&old, &new), p.protocol == UDP) {
        bail!(InternalError);
    }
    Step::GO
}

/// Exchanges address and port of the packet that an ICMP error quotes, at the end that was translated for its sender.
#[inline(never)]
fn inner<F: Frame>(f: F, p: &Packet) -> Step {
    if p.has(flag::NAT_DST) {
        go!(inner_address(f, p, SRC, &p.nat_addr, &p.dst));
        inner_port(f, p, SRC, p.nat_port, p.dport)
    } else {
        go!(inner_address(f, p, DST, &p.tuple_src, &p.nat_addr));
        inner_port(f, p, DST, p.sport, p.nat_port)
    }
}

/// Exchanges an address of the packet that an ICMP error quotes. The quoted checksum of TCP or UDP stays: mostly it is not there whole.
#[inline(never)]
fn inner_address<F: Frame>(f: F, p: &Packet, which: u32, old: &Addr, new: &Addr) -> Step {
    let at = p.l4 + 8;
    let change = address_delta(old, new);
    // The quoted IPv4 header sums to the same with its own checksum; the others change what the message sums to.
    let ok = if p.protocol == ICMP {
        ipv4(f, at, which, new, change)
    } else {
        f.store(at + 8 + 16 * which, &new.0) && f.fix_payload(p.l4 + 2, change, false)
    };
    if !ok {
        bail!(InternalError);
    }
    Step::GO
}

/// Exchanges a port of the packet that an ICMP error quotes.
#[inline(never)]
fn inner_port<F: Frame>(f: F, p: &Packet, which: u32, old: [u8; 2], new: [u8; 2]) -> Step {
    if old == new || !has_ports(p.tuple_protocol) {
        return Step::GO;
    }
    if !f.store(p.quoted_l4 + 2 * which, &new) || !f.fix_payload(p.l4 + 2, delta(&old, &new), false) {
        bail!(InternalError);
    }
    Step::GO
}
