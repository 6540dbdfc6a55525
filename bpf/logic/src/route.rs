//! Where a packet goes, and sending it there.

use flowloom_bpf_abi::{
    Addr, AddressKey, DropReason, EndpointRecord, PeerKey, address_flags, delivery, direction,
    endpoint_flags, identity, mark, peer_flags, trace_step, vpc_flags,
};

use crate::frame::{Frame, TunnelKey, Verdict};
use crate::guard::on_link;
use crate::packet::{Packet, flag, to};
use crate::parse::{ETH, IPV4};
use crate::tables::Tables;
use crate::{Step, bail, go};
use crate::{answer, nat};

/// Identity of an address; what nobody names is the world.
///
/// Sets [`flag::UNASSIGNED`] when nobody has it: when somebody gets it, no generation is bumped, so no decision about it may be kept.
#[inline(never)]
pub(crate) fn identity_of<T: Tables>(t: T, p: &mut Packet, addr: &Addr) -> u32 {
    p.peer_key.prefixlen = PeerKey::FULL_BITS;
    p.peer_key.vpc = p.vpc;
    p.peer_key.addr = *addr;
    p.flags &= !flag::UNASSIGNED;
    let Some(peer) = t.peer(&p.peer_key) else { return identity::WORLD };
    if peer.flags & peer_flags::UNASSIGNED != 0 {
        p.flags |= flag::UNASSIGNED;
    }
    peer.identity
}

/// Identity of the packet's source when this host made it.
#[inline(always)]
pub(crate) fn host_identity<T: Tables>(t: T, p: &mut Packet) -> u32 {
    p.address_key = AddressKey { vpc: p.vpc, addr: p.tuple_src };
    if t.address(&p.address_key).is_none() {
        return identity::HOST;
    }
    p.peer_key = PeerKey { prefixlen: PeerKey::FULL_BITS, vpc: p.vpc, addr: p.tuple_src };
    t.peer(&p.peer_key).map_or(identity::HOST, |peer| peer.identity)
}

/// Finds the destination: `p.route`, `p.dst_ep`, `p.tunnel`, `p.dst_identity`.
#[inline(never)]
pub(crate) fn find<T: Tables>(t: T, p: &mut Packet) {
    let default = p.vpc_flags & vpc_flags::DEFAULT != 0;
    p.route = to::NONE;
    p.dst_ep = 0;
    p.dst_identity = identity::HOST;
    p.address_key.vpc = p.vpc;
    p.address_key.addr = p.dst;
    if let Some(own) = t.address(&p.address_key) {
        if own.endpoint != 0 {
            p.dst_ep = own.endpoint;
            p.route = to::LOCAL;
            t.step(trace_step::LOCAL, own.endpoint, 0, 0);
        } else if own.flags & address_flags::HOST != 0 {
            p.route = to::HOST;
            if !default {
                nowhere(p, DropReason::ForeignVpcToHost);
            }
        } else if own.flags & address_flags::GATEWAY != 0 {
            p.route = to::GATEWAY;
        }
    }
    p.peer_key.prefixlen = PeerKey::FULL_BITS;
    p.peer_key.vpc = p.vpc;
    p.peer_key.addr = p.dst;
    let Some(peer) = t.peer(&p.peer_key) else {
        if p.route == to::NONE {
            p.dst_identity = identity::WORLD;
            nowhere(p, DropReason::NoRoute);
        }
        return;
    };
    p.dst_identity = peer.identity;
    t.step(trace_step::PEER, peer.identity, peer.flags, 0);
    if p.route != to::NONE {
        return;
    }
    let flags = peer.flags;
    if flags & peer_flags::BLACKHOLE != 0 {
        nowhere(p, DropReason::Blackhole);
    } else if flags & (peer_flags::REMOTE | peer_flags::DIRECT) == peer_flags::REMOTE | peer_flags::DIRECT
        && default
    {
        p.route = to::DIRECT;
    } else if flags & peer_flags::REMOTE != 0 && !peer.tunnel.is_zero() {
        p.route = to::TUNNEL;
        p.tunnel = peer.tunnel;
    } else if flags & peer_flags::STACK != 0 && default {
        p.route = to::STACK;
    } else {
        nowhere(p, DropReason::NoRoute);
    }
}

#[inline(always)]
fn nowhere(p: &mut Packet, reason: DropReason) {
    p.route = to::NOWHERE;
    p.route_drop = reason as u8;
}

/// Sends a judged packet on.
#[inline(never)]
pub(crate) fn forward<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    // The stack takes no packet from outside that comes from itself.
    if p.has(flag::OUT) && p.route == to::STACK {
        p.route = to::DIRECT;
    }
    if p.route == to::LOCAL || p.route == to::TUNNEL || p.route == to::DIRECT {
        go!(hop(f, t, p));
        go!(sized(f, t, p));
    }
    go!(nat::rewrite(f, p));
    match p.route {
        to::LOCAL => deliver(f, t, p),
        to::TUNNEL => encapsulate(f, t, p),
        to::DIRECT => direct(f, t, p),
        to::GATEWAY => {
            if p.has(flag::ECHO_REQUEST) && !p.has(flag::FRAG_FIRST | flag::FRAG_LATER) {
                t.count_traffic(p.src_ep, direction::EGRESS, f.len());
                return answer::echo(f, t, p);
            }
            // Programs answer for the address; there is no stack behind it.
            bail!(ForeignVpcToHost)
        }
        to::HOST | to::STACK => {
            t.step(trace_step::STACK, 0, 0, 0);
            t.count_traffic(p.src_ep, direction::EGRESS, f.len());
            f.for_this_host();
            p.verdict = Verdict::PASS.0;
            Step::DONE
        }
        _ => bail!(InternalError),
    }
}

/// What a router does to a packet that leaves its subnet.
#[inline(always)]
fn hop<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if p.src_ep != 0 && t.endpoint(p.src_ep).is_some_and(|ep| on_link(ep, &p.dst)) {
        return Step::GO;
    }
    // From the overlay: the node that sent it did this.
    if p.hook == flowloom_bpf_abi::hook::FROM_OVERLAY {
        return Step::GO;
    }
    if p.ttl <= 1 {
        return Step::error(DropReason::TtlExceeded);
    }
    let ttl = p.ttl.wrapping_sub(1);
    if p.ethertype == IPV4 {
        let mut b = [0; 4];
        if !f.load(ETH + 8, &mut b) {
            bail!(Truncated);
        }
        // TTL is the high byte of its word: one less there is 0x0100 more in the sum (RFC 1141).
        let check = u32::from(u16::from_be_bytes([b[2], b[3]])) + 0x0100;
        let check = ((check & 0xffff) + (check >> 16)) as u16;
        let c = check.to_be_bytes();
        if !f.store(ETH + 8, &[ttl, b[1], c[0], c[1]]) {
            bail!(InternalError);
        }
    } else if !f.store_summed(ETH + 7, &[ttl]) {
        bail!(InternalError);
    }
    Step::GO
}

/// Bytes of the largest IP packet that this becomes on the wire.
#[inline(always)]
fn size<F: Frame>(f: F, p: &Packet) -> u32 {
    let segment = f.gso_size();
    if segment == 0 { p.ip_len } else { p.l4.wrapping_sub(ETH) + u32::from(p.l4_len) + segment }
}

#[inline(always)]
fn fits<F: Frame>(f: F, p: &Packet, mtu: u32) -> bool {
    mtu == 0 || p.flags & flag::DONT_FRAGMENT == 0 || size(f, p) <= mtu
}

/// Whether the packet fits where it goes.
#[inline(never)]
fn sized<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let mtu = if p.route == to::LOCAL {
        t.endpoint(p.dst_ep).map_or(0, |ep| u32::from(ep.mtu))
    } else {
        let Some(config) = t.config() else { bail!(NoRoute) };
        u32::from(if p.route == to::TUNNEL { config.overlay_mtu } else { config.uplink_mtu })
    };
    if !fits(f, p, mtu) {
        p.mtu = mtu;
        return Step::error(DropReason::MtuExceeded);
    }
    Step::GO
}

/// Hands the packet to the local endpoint `p.dst_ep`.
#[inline(always)]
pub(crate) fn deliver<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.dst_ep) else { bail!(UnknownDestination) };
    if ep.flags & endpoint_flags::VALID == 0 {
        bail!(UnknownDestination);
    }
    let (d, s) = (ep.mac, ep.host_mac);
    if !f.store(0, &[d[0], d[1], d[2], d[3], d[4], d[5], s[0], s[1], s[2], s[3], s[4], s[5]]) {
        bail!(InternalError);
    }
    t.step(trace_step::DELIVER, ep.ifindex, u32::from(ep.delivery), 0);
    if p.src_ep != 0 {
        t.count_traffic(p.src_ep, direction::EGRESS, f.len());
    }
    t.count_traffic(p.dst_ep, direction::INGRESS, f.len());
    hand_over(f, p, ep)
}

/// Gives the packet to the workload behind an endpoint's device, by the device's delivery method.
#[inline(always)]
pub(crate) fn hand_over<F: Frame>(f: F, p: &mut Packet, ep: &EndpointRecord) -> Step {
    f.for_this_host();
    p.verdict = if ep.delivery == delivery::PEER {
        f.redirect_peer(ep.ifindex).0
    } else {
        f.set_mark(mark::JUDGED);
        f.redirect(ep.ifindex).0
    };
    Step::DONE
}

/// Sends the packet through the tunnel to `p.tunnel`.
#[inline(never)]
fn encapsulate<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(config) = t.config() else { bail!(EncapFailed) };
    if config.overlay_ifindex == 0 {
        bail!(EncapFailed);
    }
    p.tunnel_key = TunnelKey { vni: p.vni, remote: p.tunnel };
    if !f.set_tunnel(&p.tunnel_key) {
        bail!(EncapFailed);
    }
    let a = &p.tunnel.0;
    t.step(trace_step::ENCAP, p.vni, u32::from_be_bytes([a[12], a[13], a[14], a[15]]), 0);
    t.count_traffic(p.src_ep, direction::EGRESS, f.len());
    f.set_mark(mark::JUDGED);
    p.verdict = f.redirect(config.overlay_ifindex).0;
    Step::DONE
}

/// Sends the packet out of the uplink as it is, to the neighbour that the host's routes name.
#[inline(never)]
fn direct<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(config) = t.config() else { bail!(NoRoute) };
    if config.uplink_ifindex == 0 {
        bail!(NoRoute);
    }
    t.step(trace_step::DELIVER, config.uplink_ifindex, 0, 0);
    t.count_traffic(p.src_ep, direction::EGRESS, f.len());
    f.set_mark(mark::JUDGED);
    p.verdict = f.redirect_neigh(config.uplink_ifindex).0;
    Step::DONE
}
