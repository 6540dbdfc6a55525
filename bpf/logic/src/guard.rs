//! What may be on the wire at all: sources, destinations, tunnel ports, fragments.

use flowloom_bpf_abi::{Addr, EndpointRecord, FragKey, FragValue, endpoint_flags};

use crate::packet::{Packet, flag};
use crate::parse::{ICMPV6, IPV4, UDP};
use crate::tables::Tables;
use crate::{Step, bail};

/// Seconds that the ports of a datagram are remembered (RFC 791 suggests 15, RFC 8200 up to 60 for reassembly).
const FRAGMENT_SECONDS: u32 = 30;

pub(crate) const DHCP_CLIENT: [u8; 2] = [0, 68];
pub(crate) const DHCP_SERVER: [u8; 2] = [0, 67];
const DHCP6_CLIENT: [u8; 2] = [0x02, 0x22];
const DHCP6_SERVER: [u8; 2] = [0x02, 0x23];
/// All relay agents and servers (RFC 8415 section 7.1).
const DHCP6_ALL: Addr = Addr([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2]);
const IGMP: u8 = 2;
const BROADCAST: Addr = Addr::v4([255, 255, 255, 255]);
const ANY4: Addr = Addr::v4([0, 0, 0, 0]);

/// Whether the first `bits` of two addresses are equal.
#[inline(always)]
pub(crate) fn same_prefix(a: &Addr, b: &Addr, bits: u32) -> bool {
    // Copies first: they are read in words.
    let (a, b) = (*a, *b);
    let differing = u128::from_be_bytes(a.0) ^ u128::from_be_bytes(b.0);
    let high = (differing >> 64) as u64;
    let low = differing as u64;
    if bits >= 128 {
        high | low == 0
    } else if bits > 64 {
        high == 0 && low >> (128 - bits) == 0
    } else if bits == 64 {
        high == 0
    } else if bits == 0 {
        true
    } else {
        high >> (64 - bits) == 0
    }
}

/// Whether an address lies in the endpoint's own subnet.
#[inline(always)]
pub(crate) fn on_link(ep: &EndpointRecord, addr: &Addr) -> bool {
    if addr.is_v4() {
        !ep.ip4.is_zero() && same_prefix(addr, &ep.ip4, 96 + u32::from(ep.plen4))
    } else {
        !ep.ip6.is_zero() && same_prefix(addr, &ep.ip6, u32::from(ep.plen6))
    }
}

#[inline(always)]
pub(crate) fn owns(ep: &EndpointRecord, addr: &Addr) -> bool {
    (*addr == ep.ip4 || *addr == ep.ip6) && !addr.is_zero()
}

#[inline(always)]
pub(crate) const fn is_link_local6(a: &Addr) -> bool {
    a.0[0] == 0xfe && a.0[1] & 0xc0 == 0x80
}

/// DHCP between an endpoint and the network's own server: to the server.
#[inline(always)]
fn asks_dhcp(p: &Packet, ep: &EndpointRecord) -> bool {
    if p.protocol != UDP || p.flags & (flag::FRAG_FIRST | flag::FRAG_LATER) != 0 {
        return false;
    }
    if p.ethertype == IPV4 {
        p.sport == DHCP_CLIENT
            && p.dport == DHCP_SERVER
            && (p.dst == BROADCAST || (p.dst == ep.gateway4 && !p.dst.is_zero()))
    } else {
        p.sport == DHCP6_CLIENT
            && p.dport == DHCP6_SERVER
            && (p.dst == DHCP6_ALL || (p.dst == ep.gateway6 && !p.dst.is_zero()))
    }
}

/// DHCP from the network's own server to an endpoint.
#[inline(always)]
pub(crate) fn answers_dhcp(p: &Packet, ep: &EndpointRecord) -> bool {
    if p.protocol != UDP || p.flags & (flag::FRAG_FIRST | flag::FRAG_LATER) != 0 {
        return false;
    }
    if p.ethertype == IPV4 {
        p.sport == DHCP_SERVER && p.dport == DHCP_CLIENT && p.src == ep.gateway4 && !p.src.is_zero()
    } else {
        p.sport == DHCP6_SERVER
            && p.dport == DHCP6_CLIENT
            && (p.src == ep.gateway6 || is_link_local6(&p.src))
            && !p.src.is_zero()
    }
}

/// IGMP (RFC 9776) or MLD (RFC 9777): what every host says on its own when it gets an address.
#[inline(always)]
fn reports_membership(p: &Packet) -> bool {
    if p.ethertype == IPV4 {
        return p.protocol == IGMP && p.dst.0[12] & 0xf0 == 0xe0;
    }
    p.protocol == ICMPV6
        && p.has(flag::UNTRACKED)
        && p.dst.0[0] == 0xff
        && matches!(p.icmp[0], 130..=132 | 143)
}

/// What [`source`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Kind(u32);

impl Kind {
    /// Any packet: goes on.
    pub(crate) const PLAIN: Self = Self(0);
    /// A question to the network's DHCP server.
    pub(crate) const DHCP: Self = Self(256);
    /// Neighbour or router discovery.
    pub(crate) const DISCOVERY: Self = Self(257);

    /// The reason to drop, when it is one.
    #[inline(always)]
    pub(crate) const fn refused(self) -> Option<Step> {
        if self.0 > 0 && self.0 < 256 { Some(Step(self.0)) } else { None }
    }

    #[inline(always)]
    const fn refuse(reason: flowloom_bpf_abi::DropReason) -> Self {
        Self(reason as u32)
    }
}

/// Source and destination of what an endpoint sends.
#[inline(never)]
pub(crate) fn source<T: Tables>(t: T, p: &Packet) -> Kind {
    use flowloom_bpf_abi::DropReason as R;
    let Some(ep) = t.endpoint(p.src_ep) else { return Kind::refuse(R::UnknownEndpoint) };
    if ep.flags & endpoint_flags::MAC_PINNED != 0 && p.eth_src != ep.mac {
        return Kind::refuse(R::SpoofedSource);
    }
    let discovery = p.has(flag::DISCOVERY);
    if asks_dhcp(p, ep) && (owns(ep, &p.src) || p.src == ANY4 || is_link_local6(&p.src)) {
        return Kind::DHCP;
    }
    if discovery {
        return Kind::DISCOVERY;
    }
    if reports_membership(p) && (owns(ep, &p.src) || p.src.is_zero() || is_link_local6(&p.src)) {
        return Kind::refuse(R::GroupMembership);
    }
    if !owns(ep, &p.src) {
        return Kind::refuse(if p.ethertype != IPV4 && is_link_local6(&p.src) {
            R::LinkLocal
        } else {
            R::SpoofedSource
        });
    }
    if p.dst == p.src || owns(ep, &p.dst) {
        return Kind::refuse(R::ToSelf);
    }
    Kind(destination(p, ep).0)
}

/// Destinations that are never forwarded.
#[inline(always)]
fn destination(p: &Packet, ep: &EndpointRecord) -> Step {
    let d = &p.dst.0;
    if p.ethertype == IPV4 {
        if p.dst == BROADCAST {
            bail!(Broadcast);
        }
        match d[12] {
            224..=239 => bail!(Multicast),
            0 | 127 | 240..=255 => bail!(InvalidAddress),
            169 if d[13] == 254 && p.dst != ep.gateway4 => bail!(LinkLocal),
            _ => {}
        }
        if ep.plen4 < 31 && on_link(ep, &p.dst) {
            let host = u32::MAX.checked_shr(u32::from(ep.plen4)).unwrap_or(0);
            if u32::from_be_bytes([d[12], d[13], d[14], d[15]]) & host == host {
                bail!(Broadcast);
            }
        }
        return Step::GO;
    }
    if d[0] == 0xff {
        bail!(Multicast);
    }
    if is_link_local6(&p.dst) {
        bail!(LinkLocal);
    }
    if u128::from_be_bytes(p.dst.0) <= 1 {
        bail!(InvalidAddress);
    }
    Step::GO
}

/// UDP to a node's tunnel port would speak in the node's name once it is masqueraded.
#[inline(always)]
pub(crate) fn tunnel_port<T: Tables>(t: T, p: &Packet) -> Step {
    if p.protocol != UDP {
        return Step::GO;
    }
    if t.config().is_some_and(|c| c.tunnel_port == p.dport && p.dport != [0, 0]) && t.is_node(&p.dst) {
        bail!(TunnelFromWorkload);
    }
    Step::GO
}

/// The first fragment's ports are remembered for the others.
#[inline(never)]
pub(crate) fn fragment<T: Tables>(t: T, p: &mut Packet) -> Step {
    p.frag_key =
        FragKey { vpc: p.vpc, src: p.src, dst: p.dst, id: p.ident, protocol: p.protocol, pad: [0; 3] };
    if p.has(flag::FRAG_LATER) {
        let Some(ports) = t.fragment(&p.frag_key) else { bail!(FragmentUnknown) };
        if p.now.wrapping_sub(ports.last_seen) > FRAGMENT_SECONDS {
            bail!(FragmentUnknown);
        }
        p.sport = ports.sport;
        p.dport = ports.dport;
        // An echo's other fragments are judged as the request: replies are found by their connection.
        if p.protocol == ICMPV6 {
            p.icmp = [128, 0];
        } else if p.ethertype == IPV4 {
            p.icmp = [8, 0];
        }
    } else if !p.has(flag::UNTRACKED | flag::ICMP_ERROR) {
        t.learn_fragment(&p.frag_key, &FragValue { sport: p.sport, dport: p.dport, last_seen: p.now });
    }
    Step::GO
}
