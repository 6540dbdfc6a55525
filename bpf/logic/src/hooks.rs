//! One function per hook.

use flowloom_bpf_abi::{
    AddressKey, DropReason, PeerKey, address_flags, config_flags, direction, endpoint_flags, hook, identity,
    mark, peer_flags, trace_step, vpc_flags,
};

use crate::frame::{Frame, TunnelKey, Verdict};
use crate::guard::{self, Kind};
use crate::packet::{Packet, flag, to};
use crate::parse::{self, ARP, IPV4, IPV6};
use crate::tables::Tables;
use crate::{Step, answer, bail, go, nat, neighbour, receive, report, route, track};

/// TCX ingress of an endpoint's host-side device: everything that a workload sends.
#[inline(always)]
pub fn from_endpoint<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    p.begin(t, hook::FROM_ENDPOINT, direction::EGRESS);
    let step = sent(f, t, p);
    report::finish(f, t, p, step)
}

#[inline(always)]
fn sent<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    go!(entrance(f, t, p));
    if p.ethertype == ARP {
        return neighbour::arp(f, t, p);
    }
    let kind = guard::source(t, p);
    if let Some(step) = kind.refused() {
        return step;
    }
    if kind != Kind::PLAIN {
        return special(f, t, p, kind);
    }
    t.step(trace_step::SOURCE, p.src_ep, 0, 0);
    if p.flags & (flag::FRAG_FIRST | flag::FRAG_LATER) != 0 {
        go!(guard::fragment(t, p));
    }
    go!(guard::tunnel_port(t, p));
    if p.has(flag::ICMP_ERROR) {
        go!(parse::quoted(f, p));
    }
    p.flags |= flag::FORWARDS;
    go!(track::connection(f, t, p));
    route::forward(f, t, p)
}

/// Who sends, and all headers. Apart from the hook itself, whose stack everything after it stands on.
#[inline(never)]
fn entrance<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    go!(sender(f, t, p));
    // An answer made at `to_endpoint`, on its way to the stack. The kernel clears marks at the border of a namespace.
    if f.mark() & mark::MASK == mark::ANSWER {
        f.set_mark(0);
        p.verdict = Verdict::PASS.0;
        return Step::DONE;
    }
    parse::headers(f, p)
}

/// The endpoint of the hook's device, and its VPC.
#[inline(always)]
fn sender<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    p.ifindex = f.ifindex();
    let Some(id) = t.device(p.ifindex) else { bail!(UnknownDevice) };
    t.step(trace_step::DEVICE, p.ifindex, id, 0);
    p.src_ep = id;
    p.blame = id;
    let Some(ep) = t.endpoint(id) else { bail!(UnknownEndpoint) };
    if ep.flags & endpoint_flags::VALID == 0 || ep.ifindex != p.ifindex {
        bail!(UnknownEndpoint);
    }
    p.src_identity = ep.identity;
    let vpc = ep.vpc;
    go!(network(t, p, vpc, DropReason::NotReady));
    if p.vpc_flags & vpc_flags::DEFAULT != 0
        && t.config().is_some_and(|c| c.flags & config_flags::FORWARD_STACK != 0)
    {
        p.flags |= flag::BY_STACK;
    }
    Step::GO
}

/// The VPC's record, or the reason that it is missing. Its generation is read before anything that it covers.
#[inline(always)]
pub(crate) fn network<T: Tables>(t: T, p: &mut Packet, vpc: u32, missing: DropReason) -> Step {
    let Some(record) = t.vpc(vpc) else { return Step::drop(missing) };
    p.vpc = vpc;
    p.generation = t.once(&record.generation);
    p.vpc_flags = record.flags;
    p.vni = record.vni;
    // The element of a hash may be given to another key at any time: it must be this VPC's still.
    if p.vni != vpc || p.generation == 0 {
        bail!(NotReady);
    }
    Step::GO
}

/// What endpoints may always send: neighbour discovery, and questions to the network's DHCP server.
#[inline(never)]
fn special<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet, kind: Kind) -> Step {
    if kind == Kind::DISCOVERY {
        return neighbour::discovery(f, t, p);
    }
    if p.vpc_flags & vpc_flags::DEFAULT == 0 {
        bail!(ForeignVpcToHost);
    }
    t.count_traffic(p.src_ep, direction::EGRESS, f.len());
    p.verdict = Verdict::PASS.0;
    Step::DONE
}

/// TCX egress of an endpoint's host-side device: everything that reaches a workload through the stack.
#[inline(always)]
pub fn to_endpoint<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    p.begin(t, hook::TO_ENDPOINT, direction::INGRESS);
    let step = received(f, t, p);
    report::finish(f, t, p, step)
}

#[inline(always)]
fn received<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    // Sent here by a program that has judged it.
    if f.mark() & mark::MASK == mark::JUDGED {
        f.set_mark(0);
        p.verdict = Verdict::PASS.0;
        return Step::DONE;
    }
    go!(receiver(f, t, p));
    go!(parse::link(f, p));
    if p.ethertype == ARP {
        p.verdict = Verdict::PASS.0;
        return Step::DONE;
    }
    go!(parse::ip(f, p));
    go!(admitted(f, t, p));
    if p.verdict == Verdict::PASS.0 {
        return Step::DONE;
    }
    if f.arrived_on() == 0 {
        p.flags |= flag::FROM_HOST;
    }
    go!(track::connection(f, t, p));
    go!(nat::rewrite(f, p));
    t.count_traffic(p.dst_ep, direction::INGRESS, f.len());
    p.verdict = Verdict::PASS.0;
    Step::DONE
}

/// The endpoint that the stack's packet goes to.
#[inline(never)]
fn receiver<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    p.ifindex = f.ifindex();
    let Some(id) = t.device(p.ifindex) else { bail!(UnknownDevice) };
    t.step(trace_step::DEVICE, p.ifindex, id, 0);
    p.dst_ep = id;
    p.blame = id;
    let Some(ep) = t.endpoint(id) else { bail!(UnknownEndpoint) };
    if ep.flags & endpoint_flags::VALID == 0 || ep.ifindex != p.ifindex {
        bail!(UnknownEndpoint);
    }
    p.dst_identity = ep.identity;
    let vpc = ep.vpc;
    go!(network(t, p, vpc, DropReason::NotReady));
    // The stack belongs to the default VPC.
    if p.vpc_flags & vpc_flags::DEFAULT == 0 {
        bail!(ForeignVpcToHost);
    }
    Step::GO
}

/// What comes from the stack and is judged by no connection passes here; fragments and quoted packets are prepared.
#[inline(never)]
fn admitted<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(ep) = t.endpoint(p.dst_ep) else { bail!(UnknownEndpoint) };
    if p.has(flag::DISCOVERY) {
        // The host's own questions and answers about its neighbour.
        if f.arrived_on() != 0 {
            bail!(SpoofedNeighbour);
        }
        p.verdict = Verdict::PASS.0;
        return Step::GO;
    }
    if f.arrived_on() == 0 && guard::answers_dhcp(p, ep) {
        p.verdict = Verdict::PASS.0;
        return Step::GO;
    }
    if !guard::owns(ep, &p.dst) {
        bail!(UnknownDestination);
    }
    prepare(f, t, p)
}

#[inline(always)]
fn prepare<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    if p.flags & (flag::FRAG_FIRST | flag::FRAG_LATER) != 0 {
        go!(guard::fragment(t, p));
    }
    if p.has(flag::ICMP_ERROR) {
        go!(parse::quoted(f, p));
    }
    Step::GO
}

/// TCX ingress of the VXLAN device: what other nodes send.
#[inline(always)]
pub fn from_overlay<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    p.begin(t, hook::FROM_OVERLAY, direction::INGRESS);
    let step = tunnelled(f, t, p);
    report::finish(f, t, p, step)
}

#[inline(always)]
fn tunnelled<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    go!(outside(f, t, p));
    go!(unwrapped(f, p));
    if let Some(open) = track::carried(t, p) {
        // What follows at the uplink must not overtake it.
        if f.gso_size() > 0 {
            track::by_device(t, p, open);
        }
        go!(track::follow(f, t, p, open));
        return route::forward(f, t, p);
    }
    go!(trusted(t, p));
    if p.route == to::HOST {
        if p.vpc_flags & vpc_flags::SERVICES != 0 {
            go!(nat::arrive(f, t, p));
        }
        if p.route == to::HOST {
            f.for_this_host();
            t.step(trace_step::STACK, 0, 0, 0);
            p.verdict = Verdict::PASS.0;
            return Step::DONE;
        }
    } else {
        go!(prepare(f, t, p));
    }
    if p.route == to::LOCAL {
        go!(track::connection(f, t, p));
    }
    route::forward(f, t, p)
}

/// All headers of what the tunnel carried: IP and nothing else.
#[inline(never)]
fn unwrapped<F: Frame>(f: F, p: &mut Packet) -> Step {
    go!(parse::headers(f, p));
    if p.ethertype == ARP {
        bail!(UnsupportedEtherType);
    }
    Step::GO
}

/// The tunnel's key, and the VPC that it names.
#[inline(never)]
fn outside<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    p.ifindex = f.ifindex();
    let mut key = TunnelKey::default();
    if !f.tunnel(&mut key) {
        bail!(WrongTunnelSource);
    }
    answer::remember_tunnel(p, key);
    // A VPC's number is its VNI.
    network(t, p, key.vni, DropReason::UnknownVni)
}

/// Whether the tunnel may carry this source, and who the destination is.
#[inline(never)]
fn trusted<T: Tables>(t: T, p: &mut Packet) -> Step {
    p.address_key = AddressKey { vpc: p.vpc, addr: p.src };
    if t.address(&p.address_key).is_some_and(|a| a.endpoint != 0) {
        bail!(LocalSourceFromOutside);
    }
    let default = p.vpc_flags & vpc_flags::DEFAULT != 0;
    p.peer_key = PeerKey { prefixlen: PeerKey::FULL_BITS, vpc: p.vpc, addr: p.src };
    let named =
        t.peer(&p.peer_key).is_some_and(|peer| peer.tunnel == p.tunnel_key.remote && !peer.tunnel.is_zero());
    // A node may speak for itself, too.
    let node = default && p.src == p.tunnel_key.remote && t.is_node(&p.src);
    if !named && !node {
        bail!(WrongTunnelSource);
    }
    inward(t, p)
}

/// Destination of a packet from outside: a local endpoint or this host.
#[inline(never)]
pub(crate) fn inward<T: Tables>(t: T, p: &mut Packet) -> Step {
    p.address_key = AddressKey { vpc: p.vpc, addr: p.dst };
    let Some(own) = t.address(&p.address_key) else { bail!(UnknownDestination) };
    if own.endpoint != 0 {
        p.dst_ep = own.endpoint;
        p.blame = own.endpoint;
        p.route = to::LOCAL;
        t.step(trace_step::LOCAL, own.endpoint, 0, 0);
        let Some(ep) = t.endpoint(own.endpoint) else { bail!(UnknownEndpoint) };
        if ep.flags & endpoint_flags::VALID == 0 || ep.vpc != p.vpc {
            bail!(UnknownEndpoint);
        }
        p.dst_identity = ep.identity;
        return Step::GO;
    }
    // A gateway's address, or this node's: the stack behind it is the default VPC's.
    if own.flags & address_flags::HOST == 0 || p.vpc_flags & vpc_flags::DEFAULT == 0 {
        bail!(ForeignVpcToHost);
    }
    p.route = to::HOST;
    Step::GO
}

/// TCX egress of the VXLAN device: what programs have wrapped already, and this host's own packets to endpoints elsewhere.
#[inline(always)]
pub fn to_overlay<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    if f.mark() & mark::MASK == mark::JUDGED {
        f.set_mark(mark::TUNNELLED);
        return Verdict::PASS;
    }
    p.begin(t, hook::TO_OVERLAY, direction::EGRESS);
    let step = wrapped(f, t, p);
    report::finish_silently(f, t, p, step)
}

#[inline(always)]
fn wrapped<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    go!(parse::link(f, p));
    go!(parse::ip(f, p));
    wrap(f, t, p)
}

#[inline(never)]
fn wrap<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    let Some(config) = t.config() else { bail!(EncapFailed) };
    let vpc = config.default_vpc;
    go!(network(t, p, vpc, DropReason::NotReady));
    p.src_identity = identity::HOST;
    if p.vpc_flags & vpc_flags::SERVICES != 0 {
        go!(nat::answer_outside(f, t, p));
    }
    p.peer_key = PeerKey { prefixlen: PeerKey::FULL_BITS, vpc, addr: p.dst };
    let Some(peer) = t.peer(&p.peer_key) else { bail!(NoRoute) };
    if peer.flags & peer_flags::REMOTE == 0 || peer.tunnel.is_zero() {
        bail!(NoRoute);
    }
    p.dst_identity = peer.identity;
    p.tunnel_key = TunnelKey { vni: p.vni, remote: peer.tunnel };
    if !f.set_tunnel(&p.tunnel_key) {
        bail!(EncapFailed);
    }
    p.verdict = Verdict::PASS.0;
    Step::DONE
}

/// TCX ingress of an uplink: what comes for local endpoints of the default VPC without a tunnel.
#[inline(always)]
pub fn from_uplink<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    p.begin(t, hook::FROM_UPLINK, direction::INGRESS);
    let step = arrived(f, t, p);
    report::finish(f, t, p, step)
}

#[inline(always)]
fn arrived<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.verdict = Verdict::PASS.0;
    // What other nodes send through the tunnel is judged where it leaves it.
    let Some(config) = t.config() else { return Step::DONE };
    if parse::is_tunnel(f, p, config) {
        // But for packets of open connections, where that is asked for.
        if config.flags & config_flags::RECEIVE_AT_UPLINK == 0 || p.ethertype != IPV4 {
            return Step::DONE;
        }
        let Some(open) = receive::opened(f, t, p, config.overlay_ifindex) else { return Step::DONE };
        go!(unwrapped(f, p));
        go!(track::follow(f, t, p, open));
        return route::forward(f, t, p);
    }
    // What is not for a local endpoint is the host's own affair, however odd it looks.
    if parse::link(f, p) != Step::GO || (p.ethertype != IPV4 && p.ethertype != IPV6) {
        return Step::DONE;
    }
    let parsed = parse::ip(f, p);
    go!(concerned(f, t, p));
    if p.route != to::LOCAL {
        if parsed != Step::GO || p.vpc == 0 || p.vpc_flags & vpc_flags::SERVICES == 0 {
            return Step::DONE;
        }
        go!(nat::arrive(f, t, p));
        if p.route == to::NONE {
            return Step::DONE;
        }
    } else {
        go!(parsed);
        go!(prepare(f, t, p));
    }
    if p.route == to::LOCAL {
        go!(track::connection(f, t, p));
    }
    route::forward(f, t, p)
}

/// Whether the packet is for an endpoint and comes from a peer whose packets take this way in both directions.
#[inline(never)]
fn concerned<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    let Some(config) = t.config() else { return Step::GO };
    if p.family == 0 || config.default_vpc == 0 || t.vpc(config.default_vpc).is_none() {
        return Step::GO;
    }
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    p.ifindex = f.ifindex();
    go!(network(t, p, config.default_vpc, DropReason::NotReady));
    p.address_key = AddressKey { vpc: p.vpc, addr: p.src };
    if t.address(&p.address_key).is_some_and(|a| a.endpoint != 0) {
        bail!(LocalSourceFromOutside);
    }
    p.address_key = AddressKey { vpc: p.vpc, addr: p.dst };
    if t.address(&p.address_key).is_none_or(|a| a.endpoint == 0)
        || config.flags & config_flags::FORWARD_STACK != 0
    {
        return Step::GO;
    }
    p.peer_key = PeerKey { prefixlen: PeerKey::FULL_BITS, vpc: p.vpc, addr: p.src };
    if t.peer(&p.peer_key).is_none_or(|peer| peer.flags & peer_flags::DIRECT == 0) {
        return Step::GO;
    }
    inward(t, p)
}

/// TCX egress of an uplink.
#[inline(always)]
pub fn to_uplink<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Verdict {
    // Sent here by a program that has judged it, or leaves the tunnel's device.
    let mark = f.mark() & mark::MASK;
    if mark == mark::JUDGED || mark == mark::TUNNELLED {
        f.set_mark(0);
        return Verdict::PASS;
    }
    // Only a service's backend answers in another's name.
    let vpc = t.config().map_or(0, |c| c.default_vpc);
    if vpc == 0 || t.vpc(vpc).is_none_or(|record| record.flags & vpc_flags::SERVICES == 0) {
        return Verdict::PASS;
    }
    p.begin(t, hook::TO_UPLINK, direction::EGRESS);
    p.vpc = vpc;
    let step = leaves(f, t, p);
    report::finish_silently(f, t, p, step)
}

/// What this host answers as a service's backend comes from the service.
#[inline(always)]
fn leaves<F: Frame, T: Tables>(f: F, t: T, p: &mut Packet) -> Step {
    p.verdict = Verdict::PASS.0;
    if parse::link(f, p) != Step::GO
        || (p.ethertype != IPV4 && p.ethertype != IPV6)
        || parse::ip(f, p) != Step::GO
    {
        return Step::DONE;
    }
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    go!(nat::answer_outside(f, t, p));
    Step::DONE
}
