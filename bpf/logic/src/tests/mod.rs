//! A small world in memory, packets by hand, and checks that know nothing of the code under test.

mod answers;
mod connections;
mod guards;
mod neighbours;
mod noise;
mod overlay;
mod policies;
mod receive;
mod routes;
mod service_errors;
mod services;
mod sums;

use std::net::IpAddr;

use flowloom_bpf_abi::{
    Addr, AddressKey, AddressRecord, EndpointRecord, NodeConfig, PeerKey, PeerRecord, PolicyKey, PolicyValue,
    VpcRecord, address_flags, delivery, endpoint_flags, peer_flags, verdict, vpc_flags,
};

use crate::fake::{Bytes, FakeFrame, FakeTables, Redirect};
use crate::{Verdict, from_endpoint, to_endpoint};

pub(super) const RED: u32 = 201;
pub(super) const BLUE: u32 = 202;
pub(super) const DEFAULT: u32 = 100;
pub(super) const ALLOW: u32 = 1;
pub(super) const DENY: u32 = 2;
pub(super) const REJECT: u32 = 3;
pub(super) const OVERLAY: u32 = 90;
pub(super) const UPLINK: u32 = 91;

pub(super) const A: u8 = 10;
pub(super) const B: u8 = 11;
/// Another subnet than A and B.
pub(super) const FAR: u8 = 12;
/// On another node.
pub(super) const REMOTE: u8 = 50;

/// 10.1.net.host or its IPv6 counterpart. FAR lives in subnet 1, all others in 0.
pub(super) fn ip(v6: bool, host: u8) -> IpAddr {
    let net = u8::from(host == FAR);
    if v6 { [0xfd00, 1, net.into(), 0, 0, 0, 0, host.into()].into() } else { [10, 1, net, host].into() }
}

pub(super) fn mac(host: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, host]
}

pub(super) fn host_mac(host: u8) -> [u8; 6] {
    [2, 0, 0, 0, 1, host]
}

pub(super) fn ifindex(vpc: u32, host: u8) -> u32 {
    1000 * (vpc - 99) + u32::from(host)
}

pub(super) fn id(vpc: u32, host: u8) -> u32 {
    (vpc - 99) * 20 + u32::from(host)
}

pub(super) fn identity(vpc: u32, host: u8) -> u32 {
    1000 + id(vpc, host)
}

pub(super) fn key(vpc: u32, ip: IpAddr, bits: u32) -> PeerKey {
    PeerKey { prefixlen: 32 + bits + if ip.is_ipv4() { 96 } else { 0 }, vpc, addr: addr(ip) }
}

pub(super) fn addr(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(a) => Addr::v4(a.octets()),
        IpAddr::V6(a) => Addr::v6(a.octets()),
    }
}

/// An entry of a policy for `identity` (0 = any), protocol (0 = any) and port prefix.
pub(super) fn entry(
    identity: u32,
    protocol: u8,
    port: u16,
    bits: u32,
    precedence: u32,
    verdict: u8,
) -> (PolicyKey, PolicyValue) {
    let prefixlen = if protocol == 0 { 32 } else { 40 + bits };
    (
        PolicyKey { prefixlen, identity, protocol, port: port.to_be_bytes(), pad: 0 },
        PolicyValue { precedence, rule: precedence, verdict, flags: 0, pad: [0; 2] },
    )
}

/// Three VPCs with the same addresses: A, B and FAR local, REMOTE behind 198.51.100.12.
pub(super) fn world() -> FakeTables {
    let t = FakeTables::default();
    t.now_ns.set(1_000_000_000_000);
    t.set_config(NodeConfig {
        overlay_ifindex: OVERLAY,
        uplink_ifindex: UPLINK,
        overlay_mtu: 1450,
        uplink_mtu: 1500,
        tunnel_port: 4789u16.to_be_bytes(),
        default_vpc: DEFAULT,
        ..NodeConfig::default()
    });
    t.nodes.borrow_mut().push(Addr::v4([198, 51, 100, 12]));
    for (slot, v) in [(ALLOW, verdict::ALLOW), (DENY, verdict::DROP), (REJECT, verdict::REJECT)] {
        t.set_policy(slot, &[entry(0, 0, 0, 0, 10, v)]);
    }
    for vpc in [DEFAULT, RED, BLUE] {
        let flags = if vpc == DEFAULT { vpc_flags::DEFAULT } else { 0 };
        t.set_vpc(vpc, VpcRecord { vni: vpc, generation: 1, flags, pad: 0 });
        for host in [A, B, FAR] {
            let record = EndpointRecord {
                vpc,
                identity: identity(vpc, host),
                ifindex: ifindex(vpc, host),
                revision: 1,
                egress_slot: ALLOW,
                ingress_slot: ALLOW,
                flags: endpoint_flags::VALID | endpoint_flags::MAC_PINNED,
                delivery: delivery::PEER,
                plen4: 24,
                mac: mac(host),
                host_mac: host_mac(host),
                plen6: 64,
                pad: 0,
                mtu: 1500,
                ip4: addr(ip(false, host)),
                ip6: addr(ip(true, host)),
                gateway4: Addr::v4([10, 1, u8::from(host == FAR), 1]),
                gateway6: addr([0xfd00, 1, u16::from(host == FAR), 0, 0, 0, 0, 1].into()),
            };
            t.set_endpoint(id(vpc, host), record);
            t.devices.borrow_mut().insert(ifindex(vpc, host), id(vpc, host));
            for v6 in [false, true] {
                let bits = if v6 { 128 } else { 32 };
                let own = AddressRecord { endpoint: id(vpc, host), flags: 0 };
                t.addresses.borrow_mut().insert(AddressKey { vpc, addr: addr(ip(v6, host)) }, own);
                let gateway = if v6 { record.gateway6 } else { record.gateway4 };
                let flags = address_flags::GATEWAY | if vpc == DEFAULT { address_flags::HOST } else { 0 };
                t.addresses
                    .borrow_mut()
                    .insert(AddressKey { vpc, addr: gateway }, AddressRecord { endpoint: 0, flags });
                t.set_peer(
                    key(vpc, ip(v6, host), bits),
                    PeerRecord {
                        identity: identity(vpc, host),
                        flags: peer_flags::ENDPOINT,
                        tunnel: Addr::ZERO,
                    },
                );
                let remote = PeerRecord {
                    identity: identity(vpc, REMOTE),
                    flags: peer_flags::ENDPOINT | peer_flags::REMOTE,
                    tunnel: Addr::v4([198, 51, 100, 12]),
                };
                t.set_peer(key(vpc, ip(v6, REMOTE), bits), remote);
            }
        }
        let unassigned = PeerRecord { identity: 6, flags: peer_flags::UNASSIGNED, tunnel: Addr::ZERO };
        t.set_peer(key(vpc, [10, 1, 0, 0].into(), 16), unassigned);
        t.set_peer(key(vpc, [0xfd00, 1, 0, 0, 0, 0, 0, 0].into(), 32), unassigned);
        let world = if vpc == DEFAULT { peer_flags::STACK } else { 0 };
        t.set_peer(
            key(vpc, [0, 0, 0, 0].into(), 0),
            PeerRecord { identity: 3, flags: world, tunnel: Addr::ZERO },
        );
        t.set_peer(
            key(vpc, [0u16; 8].into(), 0),
            PeerRecord { identity: 4, flags: world, tunnel: Addr::ZERO },
        );
    }
    t
}

/// Changes the slots of an endpoint.
pub(super) fn switch(t: &FakeTables, vpc: u32, host: u8, egress: u32, ingress: u32) {
    change(t, vpc, host, |r| {
        r.egress_slot = egress;
        r.ingress_slot = ingress;
        r.revision += 1;
    });
}

pub(super) fn change(t: &FakeTables, vpc: u32, host: u8, f: impl FnOnce(&mut EndpointRecord)) {
    use crate::Tables as _;
    let mut record = *t.endpoint(id(vpc, host)).expect("endpoint");
    f(&mut record);
    t.set_endpoint(id(vpc, host), record);
}

/// What became of a packet.
#[derive(Debug)]
pub(super) struct Fate {
    pub(super) verdict: Verdict,
    pub(super) bytes: Bytes,
    /// Reasons of the drops that this packet caused.
    pub(super) reasons: Vec<&'static str>,
}

impl Fate {
    #[track_caller]
    pub(super) fn delivered_to(&self, vpc: u32, host: u8) -> &Self {
        assert_eq!(self.bytes.redirect, Some(Redirect::Peer(ifindex(vpc, host))), "{self:?}");
        assert_eq!(self.verdict, Verdict::REDIRECT);
        assert!(self.reasons.is_empty(), "{self:?}");
        assert_eq!(self.bytes.data[..6], mac(host));
        assert!(self.bytes.for_this_host);
        self
    }

    #[track_caller]
    pub(super) fn dropped(&self, reason: &str) -> &Self {
        assert_eq!(self.reasons, [reason], "{self:?}");
        assert_eq!(self.verdict, Verdict::DROP, "{self:?}");
        assert_eq!(self.bytes.redirect, None, "{self:?}");
        self
    }

    /// Dropped, and something was sent back to the sender.
    #[track_caller]
    pub(super) fn answered(&self, reason: &str, vpc: u32, host: u8) -> &Self {
        assert_eq!(self.reasons, [reason], "{self:?}");
        assert_eq!(self.bytes.redirect, Some(Redirect::Peer(ifindex(vpc, host))), "{self:?}");
        self
    }

    #[track_caller]
    pub(super) fn to_stack(&self) -> &Self {
        assert_eq!(self.verdict, Verdict::PASS, "{self:?}");
        assert!(self.reasons.is_empty(), "{self:?}");
        self
    }

    #[track_caller]
    pub(super) fn tunnelled(&self, vpc: u32) -> &Self {
        assert_eq!(self.bytes.redirect, Some(Redirect::Out(OVERLAY)), "{self:?}");
        let key = self.bytes.to_tunnel.expect("tunnel key");
        assert_eq!((key.vni, key.remote), (vpc, Addr::v4([198, 51, 100, 12])));
        self
    }
}

pub(super) fn run(
    t: &FakeTables,
    hook: fn(&FakeFrame, &FakeTables, &mut crate::Packet) -> Verdict,
    frame: FakeFrame,
) -> Fate {
    let before = t.dropped();
    let verdict = t.run(hook, &frame);
    let mut reasons = Vec::new();
    for (name, count) in t.dropped() {
        for _ in before.get(name).copied().unwrap_or(0)..count {
            reasons.push(name);
        }
    }
    Fate { verdict, bytes: frame.bytes(), reasons }
}

pub(super) fn hook_from_endpoint(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
    from_endpoint(f, t, p)
}

/// Sends a frame out of a workload.
pub(super) fn send(t: &FakeTables, vpc: u32, host: u8, data: Vec<u8>) -> Fate {
    run(t, hook_from_endpoint, FakeFrame::new(data, ifindex(vpc, host)))
}

/// Hands a frame of the host's own stack to a workload's device.
pub(super) fn from_host(t: &FakeTables, vpc: u32, host: u8, data: Vec<u8>) -> Fate {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        to_endpoint(f, t, p)
    }
    run(t, hook, FakeFrame::new(data, ifindex(vpc, host)))
}

// Packets.

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 16;

/// One's complement sum, written apart from the code under test.
pub(super) fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes: Vec<u8> = parts.concat();
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) * 256 + pair.get(1).copied().map_or(0, u64::from);
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

pub(super) fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

pub(super) fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Vec<u8> {
    [octets(src), octets(dst), vec![0, protocol], (len as u16).to_be_bytes().to_vec()].concat()
}

pub(super) fn tcp(src: (IpAddr, u16), dst: (IpAddr, u16), flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut segment = [
        &src.1.to_be_bytes()[..],
        &dst.1.to_be_bytes(),
        &1000u32.to_be_bytes(),
        &(if flags & ACK != 0 { 5000u32 } else { 0 }).to_be_bytes(),
        &[0x50, flags, 0xff, 0xff, 0, 0, 0, 0],
        payload,
    ]
    .concat();
    let sum = checksum(&[&pseudo(src.0, dst.0, 6, segment.len()), &segment]);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment
}

pub(super) fn udp(src: (IpAddr, u16), dst: (IpAddr, u16), payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let mut datagram =
        [&src.1.to_be_bytes()[..], &dst.1.to_be_bytes(), &len.to_be_bytes(), &[0, 0], payload].concat();
    let sum = checksum(&[&pseudo(src.0, dst.0, 17, datagram.len()), &datagram]);
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    datagram
}

/// An ICMP or ICMPv6 message.
pub(super) fn icmp(src: IpAddr, dst: IpAddr, kind: u8, code: u8, rest: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, code, 0, 0][..], rest].concat();
    let sum = if src.is_ipv4() {
        checksum(&[&message])
    } else {
        checksum(&[&pseudo(src, dst, 58, message.len()), &message])
    };
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

pub(super) fn in_ip(src: IpAddr, dst: IpAddr, protocol: u8, ttl: u8, payload: &[u8]) -> Vec<u8> {
    if src.is_ipv4() {
        in_ipv4(src, dst, protocol, ttl, 0x4000, payload)
    } else {
        let len = (payload.len() as u16).to_be_bytes();
        [&[0x60, 0, 0, 0, len[0], len[1], protocol, ttl][..], &octets(src), &octets(dst), payload].concat()
    }
}

pub(super) fn in_ipv4(
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    ttl: u8,
    fragment: u16,
    payload: &[u8],
) -> Vec<u8> {
    let len = ((20 + payload.len()) as u16).to_be_bytes();
    let f = fragment.to_be_bytes();
    let mut header = [
        &[0x45, 0, len[0], len[1], 0x12, 0x34, f[0], f[1], ttl, protocol, 0, 0][..],
        &octets(src),
        &octets(dst),
    ]
    .concat();
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    [header, payload.to_vec()].concat()
}

/// From a workload to its gateway's MAC.
pub(super) fn frame(host: u8, packet: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&host_mac(host)[..], &mac(host), &kind, packet].concat()
}

pub(super) fn tcp_frame(v6: bool, from: (u8, u16), to: (u8, u16), flags: u8) -> Vec<u8> {
    tcp_data(v6, from, to, flags, &[])
}

pub(super) fn tcp_data(v6: bool, from: (u8, u16), to: (u8, u16), flags: u8, payload: &[u8]) -> Vec<u8> {
    let (s, d) = (ip(v6, from.0), ip(v6, to.0));
    frame(from.0, &in_ip(s, d, 6, 64, &tcp((s, from.1), (d, to.1), flags, payload)))
}

pub(super) fn udp_frame(v6: bool, from: (u8, u16), to: (u8, u16)) -> Vec<u8> {
    let (s, d) = (ip(v6, from.0), ip(v6, to.0));
    frame(from.0, &in_ip(s, d, 17, 64, &udp((s, from.1), (d, to.1), b"hello")))
}

pub(super) fn echo_frame(v6: bool, from: u8, to: u8, reply: bool, id: u16) -> Vec<u8> {
    let (s, d) = (ip(v6, from), ip(v6, to));
    let kind = match (v6, reply) {
        (false, false) => 8,
        (false, true) => 0,
        (true, false) => 128,
        (true, true) => 129,
    };
    let id = id.to_be_bytes();
    frame(from, &in_ip(s, d, if v6 { 58 } else { 1 }, 64, &icmp(s, d, kind, 0, &[id[0], id[1], 0, 1, 9, 9])))
}

/// Checks every checksum of a frame and that its lengths agree.
#[track_caller]
pub(super) fn assert_sound(data: &[u8]) {
    let packet = &data[14..];
    if data[12..14] == [8, 0] {
        let header = usize::from(packet[0] & 15) * 4;
        assert_eq!(checksum(&[&packet[..header]]), 0, "IPv4 header checksum");
        assert_eq!(usize::from(u16::from_be_bytes([packet[2], packet[3]])), packet.len(), "length");
        let (s, d): ([u8; 4], [u8; 4]) =
            (packet[12..16].try_into().expect("four"), packet[16..20].try_into().expect("four"));
        let body = &packet[header..];
        let sum = match packet[9] {
            1 => checksum(&[body]),
            p => checksum(&[&pseudo(s.into(), d.into(), p, body.len()), body]),
        };
        assert_eq!(sum, 0, "transport checksum");
    } else {
        assert_eq!(usize::from(u16::from_be_bytes([packet[4], packet[5]])) + 40, packet.len(), "length");
        let (s, d): ([u8; 16], [u8; 16]) =
            (packet[8..24].try_into().expect("sixteen"), packet[24..40].try_into().expect("sixteen"));
        let body = &packet[40..];
        assert_eq!(
            checksum(&[&pseudo(s.into(), d.into(), packet[6], body.len()), body]),
            0,
            "transport checksum"
        );
    }
}
