//! Headers, from Ethernet to the transport header, and the packet that an ICMP error quotes.

use flowloom_bpf_abi::{Addr, FAMILY_V4, FAMILY_V6, NodeConfig};

use crate::frame::Frame;
use crate::packet::{Packet, flag};
use crate::{Step, bail, go};

/// Bytes of an Ethernet header.
pub(crate) const ETH: u32 = 14;
pub(crate) const ARP: [u8; 2] = [0x08, 0x06];
pub(crate) const IPV4: [u8; 2] = [0x08, 0x00];
pub(crate) const IPV6: [u8; 2] = [0x86, 0xdd];

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const SCTP: u8 = 132;

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// IPv6 extension headers followed in one packet (RFC 8200 lists six kinds).
const MAX_EXTENSIONS: u32 = 6;

/// All headers in one piece: a call costs as much as what it does here. Of ARP, the link's only.
#[inline(always)]
pub(crate) fn headers<F: Frame>(f: F, p: &mut Packet) -> Step {
    go!(link_here(f, p));
    if p.ethertype == IPV4 {
        go!(ipv4_here(f, p));
    } else if p.ethertype == IPV6 {
        go!(ipv6(f, p));
    } else if p.ethertype == ARP {
        return Step::GO;
    } else {
        bail!(UnsupportedEtherType);
    }
    transport_here(f, p)
}

/// The Ethernet header.
#[inline(never)]
pub(crate) fn link<F: Frame>(f: F, p: &mut Packet) -> Step {
    link_here(f, p)
}

#[inline(always)]
fn link_here<F: Frame>(f: F, p: &mut Packet) -> Step {
    let b = p.buf.first::<14>();
    if !f.load(0, b) {
        bail!(Truncated);
    }
    p.eth_dst = [b[0], b[1], b[2], b[3], b[4], b[5]];
    p.eth_src = [b[6], b[7], b[8], b[9], b[10], b[11]];
    p.ethertype = [b[12], b[13]];
    if f.tagged() {
        bail!(UnsupportedEtherType);
    }
    Step::GO
}

/// Whether the packet is the outside of a tunnel's packet for this node, by one look at it. A false "no" only costs time.
#[inline(never)]
pub(crate) fn is_tunnel<F: Frame>(f: F, p: &mut Packet, c: &NodeConfig) -> bool {
    // From the ethertype to what a plain IPv4 packet carries behind the VXLAN header.
    let b = p.buf.first::<38>();
    if !f.load(12, b) || f.tagged() {
        return false;
    }
    p.ethertype = [b[0], b[1]];
    if p.ethertype == IPV4 {
        return b[2] == 0x45
            && b[8] & 0x3f == 0
            && b[9] == 0
            && b[11] == UDP
            && [b[24], b[25]] == c.tunnel_port
            && Addr::v4([b[18], b[19], b[20], b[21]]) == c.node4;
    }
    if p.ethertype != IPV6 {
        return false;
    }
    // From the next header to the ports.
    let b = p.buf.first::<38>();
    f.load(ETH + 6, b)
        && b[0] == UDP
        && [b[36], b[37]] == c.tunnel_port
        && Addr([
            b[18], b[19], b[20], b[21], b[22], b[23], b[24], b[25], b[26], b[27], b[28], b[29], b[30], b[31],
            b[32], b[33],
        ]) == c.node6
}

/// IP and transport header.
#[inline(always)]
pub(crate) fn ip<F: Frame>(f: F, p: &mut Packet) -> Step {
    if p.ethertype == IPV4 {
        go!(ipv4(f, p));
    } else if p.ethertype == IPV6 {
        go!(ipv6(f, p));
    } else {
        bail!(UnsupportedEtherType);
    }
    transport(f, p)
}

#[inline(never)]
fn ipv4<F: Frame>(f: F, p: &mut Packet) -> Step {
    ipv4_here(f, p)
}

#[inline(always)]
fn ipv4_here<F: Frame>(f: F, p: &mut Packet) -> Step {
    let b = p.buf.first::<20>();
    if !f.load(ETH, b) {
        bail!(Truncated);
    }
    let header = u32::from(b[0] & 15) * 4;
    if b[0] >> 4 != 4 || header < 20 {
        bail!(InvalidHeader);
    }
    let room = f.len().wrapping_sub(ETH);
    let mut total = u32::from(u16::from_be_bytes([b[2], b[3]]));
    // Segments larger than the field can say carry 0.
    if total == 0 && f.gso_size() > 0 {
        total = room;
    }
    if total < header {
        bail!(InvalidHeader);
    }
    if total > room {
        bail!(Truncated);
    }
    p.family = FAMILY_V4;
    p.ip_len = total;
    p.l4 = ETH + header;
    p.ident = u32::from(u16::from_be_bytes([b[4], b[5]]));
    p.ttl = b[8];
    p.protocol = b[9];
    p.tuple_protocol = b[9];
    p.src = Addr::v4([b[12], b[13], b[14], b[15]]);
    p.dst = Addr::v4([b[16], b[17], b[18], b[19]]);
    p.tuple_src = p.src;
    let fragment = u16::from_be_bytes([b[6], b[7]]);
    if fragment & 0x4000 != 0 {
        p.flags |= flag::DONT_FRAGMENT;
    }
    let offset = fragment & 0x1fff;
    if offset != 0 {
        p.flags |= flag::FRAG_LATER;
        // A second fragment that rewrites the flags of the first one's TCP header (RFC 3128).
        if offset == 1 && p.protocol == TCP {
            bail!(InvalidHeader);
        }
    } else if fragment & 0x2000 != 0 {
        p.flags |= flag::FRAG_FIRST;
    }
    Step::GO
}

#[inline(never)]
fn ipv6<F: Frame>(f: F, p: &mut Packet) -> Step {
    let b = p.buf.first::<40>();
    if !f.load(ETH, b) {
        bail!(Truncated);
    }
    if b[0] >> 4 != 6 {
        bail!(InvalidHeader);
    }
    let room = f.len().wrapping_sub(ETH);
    let mut total = u32::from(u16::from_be_bytes([b[4], b[5]])) + 40;
    // Only segments larger than the field can say carry 0 here: a jumbo claim from the wire is a fault.
    if total == 40 && b[6] == 0 {
        if f.gso_size() == 0 {
            bail!(InvalidHeader);
        }
        total = room;
    }
    if total > room {
        bail!(Truncated);
    }
    p.family = FAMILY_V6;
    p.ip_len = total;
    p.ttl = b[7];
    p.src = Addr::v6([
        b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15], b[16], b[17], b[18], b[19], b[20], b[21],
        b[22], b[23],
    ]);
    p.dst = Addr::v6([
        b[24], b[25], b[26], b[27], b[28], b[29], b[30], b[31], b[32], b[33], b[34], b[35], b[36], b[37],
        b[38], b[39],
    ]);
    // In the maps these would be IPv4 addresses.
    if p.src.is_v4() || p.dst.is_v4() {
        bail!(InvalidAddress);
    }
    p.tuple_src = p.src;
    p.flags |= flag::DONT_FRAGMENT;
    p.l4 = ETH + 40;
    p.protocol = b[6];
    go!(extensions(f, p, ETH + total));
    p.tuple_protocol = p.protocol;
    Step::GO
}

/// Follows extension headers from `p.l4` and `p.protocol` to the transport header.
#[inline(never)]
fn extensions<F: Frame>(f: F, p: &mut Packet, end: u32) -> Step {
    let mut at = p.l4;
    let mut next = p.protocol;
    let mut i = 0;
    while i <= MAX_EXTENSIONS {
        i += 1;
        let fragment = next == 44;
        if !fragment && next != 0 && next != 43 && next != 60 && next != 51 {
            p.l4 = at;
            p.protocol = next;
            return Step::GO;
        }
        // Once past the start there is no hop-by-hop header (RFC 8200 section 4.1).
        if next == 0 && i > 1 {
            bail!(InvalidHeader);
        }
        let mut b = [0; 8];
        if at + 8 > end || !f.load(at, &mut b) {
            bail!(Truncated);
        }
        // Routing type 0 lets a packet visit others on its way (RFC 5095).
        if next == 43 && b[2] == 0 {
            bail!(InvalidHeader);
        }
        let authentication = next == 51;
        next = b[0];
        if fragment {
            let field = u16::from_be_bytes([b[2], b[3]]);
            p.ident = u32::from_be_bytes([b[4], b[5], b[6], b[7]]);
            at += 8;
            if field & 0xfff8 != 0 {
                p.flags |= flag::FRAG_LATER;
                p.l4 = at;
                p.protocol = next;
                return Step::GO;
            }
            if field & 1 != 0 {
                p.flags |= flag::FRAG_FIRST;
            }
        } else if authentication {
            at += (u32::from(b[1]) + 2) * 4;
        } else {
            at += (u32::from(b[1]) + 1) * 8;
        }
        if at > end {
            bail!(Truncated);
        }
    }
    bail!(InvalidHeader)
}

/// Ports, flags, types. A later fragment has none.
#[inline(never)]
pub(crate) fn transport<F: Frame>(f: F, p: &mut Packet) -> Step {
    transport_here(f, p)
}

#[inline(always)]
fn transport_here<F: Frame>(f: F, p: &mut Packet) -> Step {
    if p.has(flag::FRAG_LATER) {
        return Step::GO;
    }
    let at = p.l4;
    let room = (ETH + p.ip_len).wrapping_sub(at);
    match p.protocol {
        TCP => {
            let b = p.buf.first::<20>();
            if room < 20 || !f.load(at, b) {
                bail!(Truncated);
            }
            let header = u32::from(b[12] >> 4) * 4;
            if header < 20 {
                bail!(InvalidHeader);
            }
            if header > room {
                bail!(Truncated);
            }
            p.sport = [b[0], b[1]];
            p.dport = [b[2], b[3]];
            p.tcp_seq = u32::from_be_bytes([b[4], b[5], b[6], b[7]]);
            p.tcp_ack = u32::from_be_bytes([b[8], b[9], b[10], b[11]]);
            p.l4_len = header as u8;
            p.tcp_flags = b[13];
            if p.sport == [0, 0] || p.dport == [0, 0] {
                bail!(InvalidHeader);
            }
            // No connection begins, goes on or ends with these (RFC 9293).
            let flags = b[13];
            if flags & (SYN | ACK | RST) == 0 || (flags & SYN != 0 && flags & (FIN | RST) != 0) {
                bail!(InvalidHeader);
            }
        }
        UDP => {
            let b = p.buf.first::<8>();
            if room < 8 || !f.load(at, b) {
                bail!(Truncated);
            }
            p.sport = [b[0], b[1]];
            p.dport = [b[2], b[3]];
            p.l4_len = 8;
            let len = u32::from(u16::from_be_bytes([b[4], b[5]]));
            // A first fragment is shorter than its datagram.
            if p.dport == [0, 0] || (len < 8 && len != 0) || (len > room && p.flags & flag::FRAG_FIRST == 0) {
                bail!(InvalidHeader);
            }
        }
        SCTP => {
            let b = p.buf.first::<12>();
            if room < 12 || !f.load(at, b) {
                bail!(Truncated);
            }
            p.sport = [b[0], b[1]];
            p.dport = [b[2], b[3]];
            p.l4_len = 12;
            if p.sport == [0, 0] || p.dport == [0, 0] {
                bail!(InvalidHeader);
            }
        }
        ICMP | ICMPV6 => {
            // Each family has its own; the other's number is a fault.
            if (p.protocol == ICMP) != (p.ethertype == IPV4) {
                bail!(InvalidHeader);
            }
            let mut b = [0; 8];
            if room < 8 || !f.load(at, &mut b) {
                bail!(Truncated);
            }
            p.l4_len = 8;
            icmp(p, &b);
        }
        _ => {}
    }
    Step::GO
}

#[inline(always)]
fn icmp(p: &mut Packet, b: &[u8; 8]) {
    p.icmp = [b[0], b[1]];
    let (request, reply) = if p.protocol == ICMP { (8, 0) } else { (128, 129) };
    let error =
        if p.protocol == ICMP { b[0] == 3 || b[0] == 11 || b[0] == 12 } else { b[0] >= 1 && b[0] <= 4 };
    if error {
        p.flags |= flag::ICMP_ERROR;
    } else if (b[0] == request || b[0] == reply) && b[1] == 0 {
        // With another code it is no echo (RFC 792, RFC 4443 section 4): nothing answers it, and its code must not be forgotten.
        p.flags |= if b[0] == request { flag::ECHO_REQUEST } else { flag::ECHO_REPLY };
        p.sport = [b[4], b[5]];
        p.dport = p.sport;
    } else {
        p.flags |= flag::UNTRACKED;
        if p.protocol == ICMPV6 && b[0] >= 133 && b[0] <= 137 {
            p.flags |= flag::DISCOVERY;
        }
    }
}

/// The packet that an ICMP error quotes: turns the tuple into that of a reply to it. What matches no connection is not passed.
#[inline(never)]
pub(crate) fn quoted<F: Frame>(f: F, p: &mut Packet) -> Step {
    let at = p.l4 + 8;
    let end = ETH + p.ip_len;
    let (inner_src, inner_dst, protocol, l4);
    if p.protocol == ICMP {
        let b = p.buf.first::<20>();
        if at + 20 > end || !f.load(at, b) {
            bail!(Truncated);
        }
        let header = u32::from(b[0] & 15) * 4;
        if b[0] >> 4 != 4 || header < 20 {
            bail!(InvalidHeader);
        }
        if u16::from_be_bytes([b[6], b[7]]) & 0x1fff != 0 {
            bail!(ConntrackInvalid);
        }
        inner_src = Addr::v4([b[12], b[13], b[14], b[15]]);
        inner_dst = Addr::v4([b[16], b[17], b[18], b[19]]);
        protocol = b[9];
        l4 = at + header;
    } else {
        let b = p.buf.first::<40>();
        if at + 40 > end || !f.load(at, b) {
            bail!(Truncated);
        }
        if b[0] >> 4 != 6 {
            bail!(InvalidHeader);
        }
        inner_src = Addr::v6([
            b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15], b[16], b[17], b[18], b[19], b[20], b[21],
            b[22], b[23],
        ]);
        inner_dst = Addr::v6([
            b[24], b[25], b[26], b[27], b[28], b[29], b[30], b[31], b[32], b[33], b[34], b[35], b[36], b[37],
            b[38], b[39],
        ]);
        // The walk needs the packet's own place and protocol; put back below.
        let (own_l4, own_protocol, own_flags) = (p.l4, p.protocol, p.flags);
        let next = b[6];
        p.l4 = at + 40;
        p.protocol = next;
        let step = extensions(f, p, end);
        let later = p.has(flag::FRAG_LATER) && own_flags & flag::FRAG_LATER == 0;
        l4 = p.l4;
        protocol = p.protocol;
        p.l4 = own_l4;
        p.protocol = own_protocol;
        p.flags = own_flags;
        go!(step);
        if later {
            bail!(ConntrackInvalid);
        }
    }
    p.quoted_l4 = l4;
    // The error goes to who sent the packet that it speaks of.
    if inner_src != p.dst {
        bail!(ConntrackInvalid);
    }
    p.tuple_src = inner_dst;
    p.tuple_protocol = protocol;
    p.sport = [0, 0];
    p.dport = [0, 0];
    match protocol {
        TCP | UDP | SCTP => {
            let mut b = [0; 4];
            if l4 + 4 > end || !f.load(l4, &mut b) {
                bail!(Truncated);
            }
            p.dport = [b[0], b[1]];
            p.sport = [b[2], b[3]];
        }
        ICMP | ICMPV6 => {
            let mut b = [0; 8];
            if protocol != p.protocol {
                bail!(InvalidHeader);
            }
            if l4 + 8 > end || !f.load(l4, &mut b) {
                bail!(Truncated);
            }
            let echo = if protocol == ICMP { b[0] == 8 || b[0] == 0 } else { b[0] == 128 || b[0] == 129 };
            if !echo {
                bail!(ConntrackInvalid);
            }
            p.sport = [b[4], b[5]];
            p.dport = p.sport;
        }
        _ => {}
    }
    Step::GO
}
