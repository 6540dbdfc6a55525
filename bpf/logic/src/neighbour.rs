//! ARP and neighbour discovery: endpoints ask the program, not each other.

use flowloom_bpf_abi::{Addr, EndpointRecord, endpoint_flags, trace_step, vpc_flags};

use crate::answer;
use crate::frame::{Frame, Verdict};
use crate::guard::{is_link_local6, on_link, owns};
use crate::packet::Packet;
use crate::parse::{ARP, ETH, ICMPV6};
use crate::sum::{add, fold};
use crate::tables::Tables;
use crate::{Step, bail};

/// Whether the endpoint may ask for this address: its gateway and every other address of its subnet.
#[inline(always)]
fn answered(ep: &EndpointRecord, target: &Addr) -> bool {
    !owns(ep, target)
        && !target.is_zero()
        && (*target == ep.gateway4 || *target == ep.gateway6 || on_link(ep, target))
}

/// What speaks for an address of the endpoint is for this host's stack; of another VPC it ends here.
#[inline(always)]
fn to_stack(p: &mut Packet) -> Step {
    p.verdict = if p.vpc_flags & vpc_flags::DEFAULT != 0 { Verdict::PASS.0 } else { Verdict::DROP.0 };
    Step::DONE
}

/// An ARP packet from an endpoint.
#[inline(never)]
pub(crate) fn arp<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.src_ep) else { bail!(UnknownEndpoint) };
    let mut b = [0u8; 28];
    if !f.load(ETH, &mut b) {
        bail!(Truncated);
    }
    // Ethernet and IPv4 (RFC 826).
    if b[0] != 0 || b[1] != 1 || b[2] != 8 || b[3] != 0 || b[4] != 6 || b[5] != 4 || b[6] != 0 {
        bail!(InvalidHeader);
    }
    let sender_mac = [b[8], b[9], b[10], b[11], b[12], b[13]];
    let sender = Addr::v4([b[14], b[15], b[16], b[17]]);
    let target = Addr::v4([b[24], b[25], b[26], b[27]]);
    p.src = sender;
    p.dst = target;
    p.family = flowloom_bpf_abi::FAMILY_V4;
    let probe = sender == Addr::v4([0; 4]);
    let pinned = ep.flags & endpoint_flags::MAC_PINNED != 0;
    if sender_mac != p.eth_src || (pinned && sender_mac != ep.mac) || !(probe || sender == ep.ip4) {
        bail!(SpoofedNeighbour);
    }
    // What claims its own address needs no answer: none means that it is free.
    if b[7] != 1 || probe || !answered(ep, &target) {
        return to_stack(p);
    }
    t.step(trace_step::ANSWER, 1, 0, 0);
    let (m, h, s, g) = (p.eth_src, ep.host_mac, sender.v4_octets(), target.v4_octets());
    let reply: [u8; 42] = [
        m[0], m[1], m[2], m[3], m[4], m[5], h[0], h[1], h[2], h[3], h[4], h[5], ARP[0],
        ARP[1], // Ethernet
        0, 1, 8, 0, 6, 4, 0, 2, // reply
        h[0], h[1], h[2], h[3], h[4], h[5], g[0], g[1], g[2], g[3], // from the target
        m[0], m[1], m[2], m[3], m[4], m[5], s[0], s[1], s[2], s[3], // to the asker
    ];
    if !f.store(0, &reply) {
        bail!(InternalError);
    }
    answer::back(f, t, p)
}

/// Neighbour and router discovery from an endpoint (RFC 4861).
#[inline(never)]
pub(crate) fn discovery<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.src_ep) else { bail!(UnknownEndpoint) };
    if p.icmp[0] == 134 || p.icmp[0] == 137 {
        bail!(RouterAdvertisement);
    }
    // Nothing that a router forwarded (RFC 4861 section 6.1 and 7.1).
    if p.ttl != 255 || p.icmp[1] != 0 {
        bail!(InvalidHeader);
    }
    let unspecified = p.src.is_zero();
    if !(owns(ep, &p.src) || unspecified || is_link_local6(&p.src)) {
        bail!(SpoofedNeighbour);
    }
    if p.icmp[0] == 133 {
        return to_stack(p);
    }
    let mut target = [0; 16];
    if p.ip_len + ETH < p.l4 + 24 || !f.load(p.l4 + 8, &mut target) {
        bail!(Truncated);
    }
    let target = Addr(target);
    if p.icmp[0] == 136 {
        if !(owns(ep, &target) || is_link_local6(&target)) {
            bail!(SpoofedNeighbour);
        }
        return to_stack(p);
    }
    if unspecified || !answered(ep, &target) {
        return to_stack(p);
    }
    t.step(trace_step::ANSWER, 1, 0, 0);
    p.dst = target;
    advertise(f, t, p)
}

/// Turns a solicitation for `p.dst` by `p.src` into the advertisement that answers it.
#[inline(never)]
fn advertise<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.src_ep) else { bail!(UnknownEndpoint) };
    let h = ep.host_mac;
    // Router, solicited, override; option 2: target's link-layer address.
    let mut head = [136, 0, 0, 0, 0xe0, 0, 0, 0];
    let option = [2, 1, h[0], h[1], h[2], h[3], h[4], h[5]];
    let mut sum = add(0, &head);
    sum = add(sum, &option);
    // The target is summed twice: as source and in the body.
    sum = add(sum, &p.dst.0);
    sum = add(sum, &p.dst.0);
    sum = add(sum, &p.src.0);
    sum += 32 + u32::from(ICMPV6);
    let check = (!fold(sum)).to_be_bytes();
    head[2] = check[0];
    head[3] = check[1];
    let ip = [0x60, 0, 0, 0, 0, 32, ICMPV6, 255];
    let ok = f.resize(ETH + 40 + 32)
        && f.store_summed(ETH, &ip)
        && f.store_summed(ETH + 8, &p.dst.0)
        && f.store_summed(ETH + 24, &p.src.0)
        && f.store_summed(ETH + 40, &head)
        && f.store_summed(ETH + 48, &p.dst.0)
        && f.store_summed(ETH + 64, &option);
    if !ok || !answer::macs(f, p, &h) {
        bail!(InternalError);
    }
    answer::back(f, t, p)
}
