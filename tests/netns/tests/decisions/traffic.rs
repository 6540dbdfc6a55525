//! Flows and their packets, mostly sensible, drawn from a world.

use std::net::{IpAddr, SocketAddr};

use flowloom_compiler::worldgen::{self, Rng};
use flowloom_model::{EndpointKey, Mac, VpcName, World};
use flowloom_netlink::Mac as Wire;
use flowloom_testkit::{Packet, icmp};

use crate::model::{End, Ground, Place, Probe, Shape, Via, tcp};

/// Two ends that talk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Flow {
    pub(crate) vpc: VpcName,
    protocol: u8,
    origin: End,
    responder: End,
    /// For ICMP: what the originator sends.
    first: Option<(u8, u8)>,
    sent: u32,
    /// Its last packet did not pass.
    pub(crate) refused: bool,
}

/// Destinations and sources that policy is asked about at all (others are refused by the guards, which have tests of their own).
fn ordinary(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, ..] = ip.octets();
            (1..224).contains(&a) && a != 127 && (a, b) != (169, 254)
        }
        IpAddr::V6(ip) => ip.segments()[..4] != [0; 4] && ip.octets()[0] < 0xfe,
    }
}

/// A new flow with a local endpoint at one end at least.
pub(crate) fn flow(ground: &Ground<'_>, world: &World, rng: &mut Rng) -> Option<Flow> {
    let locals: Vec<EndpointKey> = world
        .endpoints
        .values()
        .filter(|e| e.node == *ground.node && !e.ips.is_empty())
        .map(|e| e.key())
        .collect();
    if locals.is_empty() {
        return None;
    }
    let key = rng.pick(&locals);
    let asked = worldgen::packet(world, key, rng);
    let peer = asked.peer;
    let own = *world.endpoints[key].ips.iter().find(|ip| ip.is_ipv4() == peer.is_ipv4())?;
    if own == peer || !ordinary(peer) {
        return None;
    }
    let local_port = 40_000 + rng.below(3) as u16;
    let (ports, first) = match asked.protocol {
        protocol @ (1 | 58) => {
            let [kind, code] = asked.port.to_be_bytes();
            let (request, reply) = if protocol == 1 { (8, 0) } else { (128, 129) };
            let error = if protocol == 1 { kind == 3 } else { (1..=4).contains(&kind) };
            let kind = if error || rng.one_in(2) { request } else { kind };
            let kind = if kind == 5 && rng.one_in(2) { reply } else { kind };
            let echo = kind == request || kind == reply;
            // An identifier is both ends' port; what is no echo has none.
            let code = if echo && !rng.one_in(8) { 0 } else { code };
            let id = if echo && code == 0 { local_port } else { 0 };
            ((id, id), Some((kind, code)))
        }
        6 | 17 | 132 => ((local_port, asked.port), None),
        _ => ((0, 0), None),
    };
    let (mut origin, mut responder) = (own, peer);
    if rng.one_in(2) && ground.via(&key.vpc, peer, own).is_some() {
        std::mem::swap(&mut origin, &mut responder);
    }
    Some(Flow {
        vpc: key.vpc.clone(),
        protocol: asked.protocol,
        origin: (origin, ports.0),
        responder: (responder, ports.1),
        first,
        sent: 0,
        refused: false,
    })
}

impl Flow {
    /// The same flow in another VPC, when an endpoint there has an end of it.
    pub(crate) fn elsewhere(&self, vpc: &VpcName, ground: &Ground<'_>) -> Option<Self> {
        let local = |ip| matches!(ground.place(vpc, ip), Place::Local(_));
        let there = self.vpc != *vpc && (local(self.origin.0) || local(self.responder.0));
        there.then(|| Self { vpc: vpc.clone(), sent: 0, refused: false, ..self.clone() })
    }

    /// Its two addresses.
    pub(crate) fn ends(&self) -> [IpAddr; 2] {
        [self.origin.0, self.responder.0]
    }

    /// The packet that begins it, and whether the other end can be made to answer.
    pub(crate) fn opening(&self, ground: &Ground<'_>) -> Option<(Probe, bool)> {
        let (src, dst) = (self.origin, self.responder);
        let via = ground.via(&self.vpc, src.0, dst.0)?;
        let shape = match (self.protocol, self.first) {
            (6, _) => Shape::Tcp(tcp::SYN),
            (1 | 58, Some((kind, code))) if src.1 == 0 => Shape::Icmp(kind, code),
            (1 | 58, _) => Shape::Echo { reply: false },
            _ => Shape::Plain,
        };
        let answers = ground.via(&self.vpc, dst.0, src.0).is_some();
        Some((Probe { vpc: self.vpc.clone(), via, protocol: self.protocol, src, dst, shape }, answers))
    }

    /// Its next packet: in either direction, as far as the ends' places allow.
    pub(crate) fn packet(&mut self, ground: &Ground<'_>, rng: &mut Rng) -> Option<Probe> {
        let first = self.sent == 0;
        let reply = !first && rng.one_in(2);
        let towards = |reply: bool| {
            if reply { (self.responder, self.origin) } else { (self.origin, self.responder) }
        };
        let (reply, src, dst, via) = [reply, !reply].into_iter().find_map(|reply| {
            let (src, dst) = towards(reply);
            let via = ground.via(&self.vpc, src.0, dst.0)?;
            // An endpoint may have moved to the other end's address.
            let own = if let Via::Endpoint(key) = &via {
                ground.world.endpoints[key].ips.contains(&dst.0)
            } else {
                false
            };
            (!own).then_some((reply, src, dst, via))
        })?;
        self.sent += 1;
        let v4 = src.0.is_ipv4();
        let mut shape = match (self.protocol, self.first) {
            (6, _) => Shape::Tcp(flags(first, reply, rng)),
            (1 | 58, Some((kind, code))) => {
                let (question, answer) = if v4 { (8, 0) } else { (128, 129) };
                match kind {
                    k if code == 0 && k == question => Shape::Echo { reply: reply != rng.one_in(12) },
                    k if code == 0 && k == answer => Shape::Echo { reply: true },
                    k => Shape::Icmp(k, code),
                }
            }
            _ => Shape::Plain,
        };
        let quotable = !matches!(shape, Shape::Icmp(..));
        if quotable && self.sent > 1 && rng.one_in(14) {
            let code = rng.below(4) as u8;
            shape = Shape::Error(if v4 { 3 } else { 1 }, code);
        }
        Some(Probe { vpc: self.vpc.clone(), via, protocol: self.protocol, src, dst, shape })
    }
}

fn flags(first: bool, reply: bool, rng: &mut Rng) -> u8 {
    use tcp::{ACK, FIN, PSH, RST, SYN};
    let sensible: &[u8] = match (first, reply) {
        (true, _) => &[SYN, SYN, SYN, SYN, SYN, SYN, SYN | ACK, ACK, PSH | ACK, FIN | ACK, RST],
        (false, false) => &[SYN, SYN, ACK, ACK, ACK, PSH | ACK, PSH | ACK, FIN | ACK, RST, RST | ACK],
        (false, true) => {
            &[SYN | ACK, SYN | ACK, SYN | ACK, ACK, ACK, PSH | ACK, PSH | ACK, FIN | ACK, RST | ACK, SYN]
        }
    };
    *rng.pick(sensible)
}

fn at(end: End) -> SocketAddr {
    SocketAddr::new(end.0, end.1)
}

fn build(protocol: u8, src: End, dst: End, shape: Shape) -> Packet {
    let v4 = src.0.is_ipv4();
    match (shape, protocol) {
        (Shape::Tcp(flags), _) => Packet::tcp(at(src), at(dst), flags),
        (Shape::Echo { reply: false }, _) => Packet::echo(src.0, dst.0, src.1, 1, b"echo"),
        (Shape::Echo { reply: true }, _) => {
            let kind = if v4 { icmp::V4_ECHO_REPLY } else { icmp::V6_ECHO_REPLY };
            Packet::icmp(src.0, dst.0, kind, 0, icmp::id_and_sequence(src.1, 1), b"echo")
        }
        (Shape::Icmp(kind, code), _) => Packet::icmp(src.0, dst.0, kind, code, [0; 4], b"odd"),
        (Shape::Error(kind, code), 6) => {
            let quoted = Packet::tcp(at(dst), at(src), tcp::ACK).ip();
            icmp::error(src.0, dst.0, kind, code, 0, &quoted)
        }
        (Shape::Error(kind, code), 1 | 58) => {
            let quoted = Packet::echo(dst.0, src.0, dst.1, 1, b"echo").ip();
            icmp::error(src.0, dst.0, kind, code, 0, &quoted)
        }
        (Shape::Error(kind, code), _) => {
            let quoted = build(protocol, dst, src, Shape::Plain).ip();
            icmp::error(src.0, dst.0, kind, code, 0, &quoted)
        }
        (Shape::Plain, 17) => Packet::udp(at(src), at(dst), b"data"),
        (Shape::Plain, 132) => Packet::sctp_init(at(src), at(dst)),
        (Shape::Plain, other) => Packet::other(src.0, dst.0, other, &[0; 16]),
    }
}

/// The frame of a packet.
pub(crate) fn frame(probe: &Probe, source: Mac, destination: Mac) -> Vec<u8> {
    build(probe.protocol, probe.src, probe.dst, probe.shape).macs(Wire(source.0), Wire(destination.0)).frame()
}
