//! Packets that programs make: echo replies, resets, ICMP errors. Each is made of the packet that it answers.

use flowloom_bpf_abi::{Addr, DropReason, RateKey, hook, mark, trace_step};

use crate::frame::{Frame, TunnelKey};
use crate::packet::{Packet, flag};
use crate::parse::{ACK, ETH, FIN, ICMP, ICMPV6, IPV4, RST, SYN, TCP, UDP};
use crate::sum::{MAX_SUMMED, add, fold};
use crate::tables::Tables;
use crate::{Step, bail, route};

/// Bucket of answers in `rates`.
const RATE_ANSWERS: u32 = 255;
/// Bytes of the transport header that an ICMP error quotes: a TCP header, so that its checksum field is among them.
const QUOTED: u32 = 20;

/// Addresses the frame back to who sent it, from `mac`.
#[inline(always)]
pub(crate) fn macs<F: Frame>(f: F, p: &Packet, mac: &[u8; 6]) -> bool {
    let (d, s) = (p.eth_src, mac);
    f.store(0, &[d[0], d[1], d[2], d[3], d[4], d[5], s[0], s[1], s[2], s[3], s[4], s[5]])
}

/// Sends what the packet has become to the hook's own endpoint.
#[inline(never)]
pub(crate) fn back<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.src_ep) else { bail!(UnknownEndpoint) };
    route::hand_over(f, p, ep)
}

/// Sends an answer towards the packet's source, by the way of the hook it was made at.
#[inline(never)]
fn send<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    match p.hook {
        hook::FROM_ENDPOINT => {
            let Some(ep) = t.endpoint(p.src_ep) else { bail!(UnknownEndpoint) };
            let mac = ep.host_mac;
            if !macs(f, p, &mac) {
                bail!(InternalError);
            }
            back(f, t, p)
        }
        hook::TO_ENDPOINT => {
            // The stack gets it as if the endpoint had sent it.
            let mac = p.eth_dst;
            if !macs(f, p, &mac) {
                bail!(InternalError);
            }
            f.set_mark(mark::ANSWER);
            p.verdict = f.redirect_ingress(p.ifindex).0;
            Step::DONE
        }
        hook::FROM_OVERLAY => {
            let mac = p.eth_dst;
            if !macs(f, p, &mac) || !f.set_tunnel(&p.tunnel_key) {
                bail!(EncapFailed);
            }
            f.set_mark(mark::JUDGED);
            p.verdict = f.redirect(p.ifindex).0;
            Step::DONE
        }
        _ => {
            let mac = p.eth_dst;
            if !macs(f, p, &mac) {
                bail!(InternalError);
            }
            p.verdict = f.redirect(p.ifindex).0;
            Step::DONE
        }
    }
}

/// Whether an answer may be made of this packet now.
#[inline(never)]
fn may<T: Tables>(t: T, p: &mut Packet) -> bool {
    // Never to an error, a later fragment, several receivers (RFC 1122 section 3.2.2), nor to a reset. A first fragment has its transport header.
    if p.has(flag::ICMP_ERROR | flag::FRAG_LATER) || (p.protocol == TCP && p.tcp_flags & RST != 0) {
        return false;
    }
    let group = p.eth_dst[0] & 1 != 0;
    if group || p.src.is_zero() || (p.ethertype == IPV4 && (p.src.0[12] == 0 || p.src.0[12] >= 224)) {
        return false;
    }
    if t.dry() {
        return true;
    }
    let limit = t.config().map_or(0, |c| c.answer_rate);
    t.take_token(&RateKey { endpoint: p.blame, what: RATE_ANSWERS }, limit, p.now, &mut 0)
}

/// Answers a refused packet: TCP by a reset, anything else by "port unreachable" for a service, "administratively prohibited" otherwise. The drop is counted by the caller; a step other
/// than [`Step::DONE`] means that nothing is sent.
#[inline(never)]
pub(crate) fn refuse<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, reason: u8) -> Step {
    if !may(t, p) {
        return Step::GO;
    }
    if p.protocol == TCP {
        // An IPv6 fragment's own header would make a fragment of the reset.
        if p.ethertype != IPV4 && p.has(flag::FRAG_FIRST) {
            return Step::GO;
        }
        t.step(trace_step::ANSWER, 3, 0, 0);
        reset(f, t, p)
    } else if reason >= DropReason::ServiceNoBackend as u8 {
        // Nobody listens (RFC 1122 section 3.2.2.1, RFC 4443 section 3.1).
        error(f, t, p, if p.ethertype == IPV4 { 3 << 8 | 3 } else { 1 << 8 | 4 }, 0)
    } else if p.ethertype == IPV4 {
        // Destination unreachable, communication administratively prohibited (RFC 1812 section 5.2.7.1).
        error(f, t, p, 3 << 8 | 13, 0)
    } else {
        // RFC 4443 section 3.1.
        error(f, t, p, 1 << 8 | 1, 0)
    }
}

/// Tells the sender that the packet has travelled too far, or is larger than `p.mtu`.
#[inline(never)]
pub(crate) fn undeliverable<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, reason: u8) -> Step {
    if !may(t, p) {
        return Step::GO;
    }
    let v4 = p.ethertype == IPV4;
    let (kind, mtu) = if reason == DropReason::TtlExceeded as u8 {
        (if v4 { 11 << 8 } else { 3 << 8 }, 0)
    } else {
        (if v4 { 3 << 8 | 4 } else { 2 << 8 }, p.mtu)
    };
    error(f, t, p, kind, mtu)
}

/// Writes the checksum of the IPv4 header of `len` bytes.
#[inline(always)]
fn ipv4_checksum<F: Frame>(f: F, len: u32) -> bool {
    if !f.store_summed(ETH + 10, &[0, 0]) {
        return false;
    }
    let check = (!fold(f.sum(ETH, len))).to_be_bytes();
    f.store_summed(ETH + 10, &check)
}

/// Turns addresses round.
#[inline(always)]
fn swap_addresses<F: Frame>(f: F, p: &Packet) -> bool {
    if p.ethertype == IPV4 {
        let (s, d) = (p.src.v4_octets(), p.dst.v4_octets());
        f.store_summed(ETH + 12, &[d[0], d[1], d[2], d[3], s[0], s[1], s[2], s[3]])
    } else {
        f.store_summed(ETH + 8, &p.dst.0) && f.store_summed(ETH + 24, &p.src.0)
    }
}

/// Sum of the pseudo header.
#[inline(always)]
fn pseudo(a: &Addr, b: &Addr, v4: bool, protocol: u8, len: u32) -> u32 {
    let sum = u32::from(protocol) + (len & 0xffff) + (len >> 16);
    if v4 { add(add(sum, &a.v4_octets()), &b.v4_octets()) } else { add(add(sum, &a.0), &b.0) }
}

/// A TCP reset (RFC 9293 section 3.10.7.1).
#[inline(never)]
fn reset<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let l4 = p.l4;
    let pending = f.checksum_pending(l4 + 16);
    let payload = (ETH + p.ip_len).wrapping_sub(l4).wrapping_sub(u32::from(p.l4_len));
    let (seq, ack, flags) = if p.tcp_flags & ACK != 0 {
        (p.tcp_ack, 0, RST)
    } else {
        let syn = u32::from(p.tcp_flags & SYN != 0);
        let fin = u32::from(p.tcp_flags & FIN != 0);
        (0, p.tcp_seq.wrapping_add(payload).wrapping_add(syn).wrapping_add(fin), RST | ACK)
    };
    let (s, a) = (seq.to_be_bytes(), ack.to_be_bytes());
    let v4 = p.ethertype == IPV4;
    let mut tcp = [
        p.dport[0], p.dport[1], p.sport[0], p.sport[1], s[0], s[1], s[2], s[3], a[0], a[1], a[2], a[3], 0x50,
        flags, 0, 0, 0, 0, 0, 0,
    ];
    let sum = pseudo(&p.src, &p.dst, v4, TCP, 20);
    // A device that fills the checksum in wants the pseudo header's sum there.
    let check = if pending { fold(sum) } else { !fold(add(sum, &tcp)) }.to_be_bytes();
    tcp[16] = check[0];
    tcp[17] = check[1];
    if !f.resize(l4 + 20) || !f.store_summed(l4, &tcp) || !swap_addresses(f, p) {
        bail!(InternalError);
    }
    let header = l4.wrapping_sub(ETH);
    let ok = if v4 {
        let len = ((header + 20) as u16).to_be_bytes();
        f.store_summed(ETH + 2, &[len[0], len[1], 0, 0, 0x40, 0, 64]) && ipv4_checksum(f, header)
    } else {
        let len = ((header.wrapping_sub(40) + 20) as u16).to_be_bytes();
        f.store_summed(ETH + 4, &len) && f.store_summed(ETH + 7, &[64])
    };
    if !ok {
        bail!(InternalError);
    }
    send(f, t, p)
}

/// The gateway's (or, when it has none in this family, the destination's) address.
#[inline(always)]
fn speaker<T: Tables>(t: T, p: &Packet) -> Addr {
    let v4 = p.ethertype == IPV4;
    let gateway = t.endpoint(p.src_ep).map_or(Addr::ZERO, |ep| if v4 { ep.gateway4 } else { ep.gateway6 });
    if p.src_ep == 0 || gateway.is_zero() { p.dst } else { gateway }
}

/// An ICMP error that quotes the packet's start; `kind` is type << 8 | code.
#[inline(never)]
fn error<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, kind: u32, mtu: u32) -> Step {
    t.step(trace_step::ANSWER, 4, kind, mtu);
    let v4 = p.ethertype == IPV4;
    let head = p.l4.wrapping_sub(ETH);
    let mut quote = head + QUOTED;
    if quote > p.ip_len {
        quote = p.ip_len;
    }
    quote &= !3;
    if quote > MAX_SUMMED {
        quote = MAX_SUMMED;
    }
    // Where a device still fills a checksum in, what is summed there will be the complement of what the field holds now.
    let field = if p.protocol == TCP { 16 } else { 6 };
    let checked = p.protocol == TCP || p.protocol == UDP;
    let mut held = [0; 2];
    let pending =
        checked && quote >= head + 8 && f.load(p.l4 + field, &mut held) && f.checksum_pending(p.l4 + field);
    let room = if v4 { 28 } else { 48 };
    if !f.resize(ETH + quote) || !f.insert_l3(room) {
        bail!(InternalError);
    }
    let mut icmp = [(kind >> 8) as u8, kind as u8, 0, 0, 0, 0, 0, 0];
    let m = mtu.to_be_bytes();
    if v4 {
        icmp[6] = m[2];
        icmp[7] = m[3];
    } else {
        [icmp[4], icmp[5], icmp[6], icmp[7]] = m;
    }
    let mut sum = if pending {
        f.sum(ETH + room, head) + u32::from(!u16::from_be_bytes(held))
    } else {
        f.sum(ETH + room, quote)
    };
    sum = add(sum, &icmp);
    let from = speaker(t, p);
    let body = 8 + quote;
    if !v4 {
        sum = fold(sum).into();
        sum += pseudo(&from, &p.src, false, ICMPV6, body);
    }
    let check = (!fold(sum)).to_be_bytes();
    icmp[2] = check[0];
    icmp[3] = check[1];
    let ok = if v4 {
        let len = ((20 + body) as u16).to_be_bytes();
        let (s, d) = (from.v4_octets(), p.src.v4_octets());
        // Precedence "internetwork control" as RFC 1812 section 4.3.2.5 wants it.
        let mut ip = [
            0x45, 0xc0, len[0], len[1], 0, 0, 0, 0, 64, ICMP, 0, 0, s[0], s[1], s[2], s[3], d[0], d[1], d[2],
            d[3],
        ];
        let check = (!fold(add(0, &ip))).to_be_bytes();
        ip[10] = check[0];
        ip[11] = check[1];
        f.store_summed(ETH, &ip) && f.store_summed(ETH + 20, &icmp)
    } else {
        let len = (body as u16).to_be_bytes();
        f.store_summed(ETH, &[0x60, 0, 0, 0, len[0], len[1], ICMPV6, 64])
            && f.store_summed(ETH + 8, &from.0)
            && f.store_summed(ETH + 24, &p.src.0)
            && f.store_summed(ETH + 40, &icmp)
    };
    if !ok {
        bail!(InternalError);
    }
    send(f, t, p)
}

/// Answers an echo request to a gateway address.
#[inline(never)]
pub(crate) fn echo<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if !may(t, p) {
        bail!(RateLimited);
    }
    t.step(trace_step::ANSWER, 2, 0, 0);
    let mut b = [0; 4];
    if !f.load(p.l4, &mut b) {
        bail!(Truncated);
    }
    let reply = if p.protocol == ICMP { 0 } else { 129 };
    // RFC 1624, equation 3.
    let old = u32::from(!u16::from_be_bytes([b[2], b[3]]));
    let sum =
        old + u32::from(!u16::from_be_bytes([b[0], b[1]])) + u32::from(u16::from_be_bytes([reply, b[1]]));
    let check = (!fold(sum)).to_be_bytes();
    if !f.store_summed(p.l4, &[reply, b[1], check[0], check[1]]) || !swap_addresses(f, p) {
        bail!(InternalError);
    }
    let ok = if p.ethertype == IPV4 {
        f.store_summed(ETH + 8, &[64]) && ipv4_checksum(f, p.l4.wrapping_sub(ETH))
    } else {
        f.store_summed(ETH + 7, &[64])
    };
    if !ok {
        bail!(InternalError);
    }
    send(f, t, p)
}

/// A refused packet: answered when the policy says reject.
#[inline(always)]
pub(crate) const fn refused(p: &Packet, reason: DropReason) -> Step {
    if p.policy_verdict == flowloom_bpf_abi::verdict::REJECT {
        Step::reject(reason)
    } else {
        Step::drop(reason)
    }
}

/// The tunnel that leads back to where the packet came from.
#[inline(always)]
pub(crate) fn remember_tunnel(p: &mut Packet, key: TunnelKey) {
    p.tunnel_key = key;
}
