//! Packets byte by byte: right ones with right checksums, and broken ones on request.

pub mod arp;
pub mod checksum;
pub mod icmp;
pub mod nd;
mod sctp;
pub mod vxlan;

use std::net::{IpAddr, SocketAddr};

use flowloom_netlink::Mac;

pub(crate) use sctp::init_body;
pub use sctp::{sctp_chunk, sctp_packet};

/// IP protocol numbers.
#[expect(missing_docs, reason = "the names are the protocols'")]
pub mod ip_protocol {
    pub const HOP_BY_HOP: u8 = 0;
    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const GRE: u8 = 47;
    pub const ICMPV6: u8 = 58;
    pub const DESTINATION_OPTIONS: u8 = 60;
    pub const SCTP: u8 = 132;
}

/// Bits of the TCP flags byte.
#[expect(missing_docs, reason = "the names are the protocol's")]
pub mod tcp_flags {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
    pub const URG: u8 = 32;
}

/// What IP carries.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the headers")]
pub enum Transport {
    Tcp {
        source: u16,
        destination: u16,
        sequence: u32,
        acknowledgement: u32,
        flags: u8,
        window: u16,
        /// Padded to four bytes.
        options: Vec<u8>,
        payload: Vec<u8>,
    },
    Udp {
        source: u16,
        destination: u16,
        payload: Vec<u8>,
    },
    /// ICMP or ICMPv6, by the family of the addresses.
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
        payload: Vec<u8>,
    },
    Sctp {
        source: u16,
        destination: u16,
        tag: u32,
        chunk: u8,
        body: Vec<u8>,
    },
    Other {
        protocol: u8,
        payload: Vec<u8>,
    },
}

/// One thing that is wrong with a packet, applied after everything right was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The IPv4 header checksum is off by one.
    IpChecksum,
    /// The transport checksum is off by one.
    TransportChecksum,
    /// The UDP checksum is zero: legal for IPv4, not for IPv6.
    ZeroUdpChecksum,
    /// Another IP version in the first nibble.
    IpVersion(u8),
    /// Another IPv4 header length, in 32-bit words.
    IpHeaderWords(u8),
    /// Another total length (IPv4) or payload length (IPv6), bytes.
    IpLength(u16),
    /// Another UDP length, bytes.
    UdpLength(u16),
    /// Another TCP data offset, in 32-bit words.
    TcpWords(u8),
    /// The frame ends after this many bytes, Ethernet header included.
    Truncated(usize),
}

/// A packet to be built; every field may be changed before [`Self::frame`].
#[derive(Debug, Clone)]
pub struct Packet {
    /// Ethernet source.
    pub source_mac: Mac,
    /// Ethernet destination.
    pub destination_mac: Mac,
    /// VLAN tags, outermost first: (tag protocol, tag).
    pub vlans: Vec<(u16, u16)>,
    /// IP source.
    pub source: IpAddr,
    /// IP destination, of the same family.
    pub destination: IpAddr,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Type of service or traffic class.
    pub tos: u8,
    /// Identification of fragments (16 bits count for IPv4).
    pub id: u32,
    /// IPv4 "do not fragment".
    pub dont_fragment: bool,
    /// IPv4 options, padded to four bytes.
    pub ip_options: Vec<u8>,
    /// IPv6 extension headers: (kind, body after its first two bytes), padded to eight.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// What it carries.
    pub transport: Transport,
    /// What is wrong with it.
    pub faults: Vec<Fault>,
}

impl Packet {
    fn new(source: IpAddr, destination: IpAddr, transport: Transport) -> Self {
        assert_eq!(source.is_ipv4(), destination.is_ipv4(), "{source} and {destination} are of two families");
        Self {
            source_mac: Mac([2, 0, 0, 0, 0xfe, 1]),
            destination_mac: Mac([2, 0, 0, 0, 0xfe, 2]),
            vlans: Vec::new(),
            source,
            destination,
            ttl: 64,
            tos: 0,
            id: 0x1234,
            dont_fragment: false,
            ip_options: Vec::new(),
            extensions: Vec::new(),
            transport,
            faults: Vec::new(),
        }
    }

    /// TCP with the given [`tcp_flags`]; sequence 1000, acknowledgement 0, window 64,000.
    #[must_use]
    pub fn tcp(from: SocketAddr, to: SocketAddr, flags: u8) -> Self {
        let transport = Transport::Tcp {
            source: from.port(),
            destination: to.port(),
            sequence: 1000,
            acknowledgement: 0,
            flags,
            window: 64_000,
            options: Vec::new(),
            payload: Vec::new(),
        };
        Self::new(from.ip(), to.ip(), transport)
    }

    /// UDP.
    #[must_use]
    pub fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Self {
        let transport =
            Transport::Udp { source: from.port(), destination: to.port(), payload: payload.to_vec() };
        Self::new(from.ip(), to.ip(), transport)
    }

    /// ICMP or ICMPv6, by the family.
    #[must_use]
    pub fn icmp(from: IpAddr, to: IpAddr, kind: u8, code: u8, rest: [u8; 4], payload: &[u8]) -> Self {
        Self::new(from, to, Transport::Icmp { kind, code, rest, payload: payload.to_vec() })
    }

    /// Echo request.
    #[must_use]
    pub fn echo(from: IpAddr, to: IpAddr, id: u16, sequence: u16, payload: &[u8]) -> Self {
        let kind = if from.is_ipv4() { icmp::V4_ECHO } else { icmp::V6_ECHO };
        Self::icmp(from, to, kind, 0, icmp::id_and_sequence(id, sequence), payload)
    }

    /// SCTP INIT.
    #[must_use]
    pub fn sctp_init(from: SocketAddr, to: SocketAddr) -> Self {
        let transport = Transport::Sctp {
            source: from.port(),
            destination: to.port(),
            tag: 0,
            chunk: sctp_chunk::INIT,
            body: init_body(0x0102_0304).to_vec(),
        };
        Self::new(from.ip(), to.ip(), transport)
    }

    /// Any other protocol.
    #[must_use]
    pub fn other(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Self {
        Self::new(from, to, Transport::Other { protocol, payload: payload.to_vec() })
    }

    /// With Ethernet addresses.
    #[must_use]
    pub fn macs(mut self, source: Mac, destination: Mac) -> Self {
        (self.source_mac, self.destination_mac) = (source, destination);
        self
    }

    /// With a TTL or hop limit.
    #[must_use]
    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    /// With a fault.
    #[must_use]
    pub fn fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// With a payload (TCP, UDP, ICMP and other protocols; the body of an SCTP chunk).
    #[must_use]
    pub fn payload(mut self, bytes: &[u8]) -> Self {
        match &mut self.transport {
            Transport::Tcp { payload, .. }
            | Transport::Udp { payload, .. }
            | Transport::Icmp { payload, .. }
            | Transport::Other { payload, .. } => *payload = bytes.to_vec(),
            Transport::Sctp { body, .. } => *body = bytes.to_vec(),
        }
        self
    }

    /// With TCP sequence and acknowledgement numbers.
    ///
    /// # Panics
    /// When it is not TCP.
    #[must_use]
    pub fn sequence(mut self, number: u32, acknowledged: u32) -> Self {
        let Transport::Tcp { sequence, acknowledgement, .. } = &mut self.transport else {
            panic!("{self:?} is not TCP")
        };
        (*sequence, *acknowledgement) = (number, acknowledged);
        self
    }

    /// The whole frame.
    #[must_use]
    pub fn frame(&self) -> Vec<u8> {
        self.in_ethernet(self.ip())
    }

    /// The IP packet.
    #[must_use]
    pub fn ip(&self) -> Vec<u8> {
        self.in_ip(&self.segment(), None)
    }

    /// The same packet in fragments of at most `size` payload bytes (rounded down to eight), as frames in order.
    ///
    /// # Panics
    /// When `size` is below eight.
    #[must_use]
    pub fn fragments(&self, size: usize) -> Vec<Vec<u8>> {
        let size = size / 8 * 8;
        assert!(size > 0, "a fragment carries at least eight bytes");
        let segment = self.segment();
        let count = segment.len().div_ceil(size);
        let part = |(i, bytes): (usize, &[u8])| {
            let offset = u16::try_from(i * size / 8).unwrap_or(u16::MAX);
            self.in_ethernet(self.in_ip(bytes, Some((offset, i + 1 < count))))
        };
        segment.chunks(size).enumerate().map(part).collect()
    }

    fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }

    fn protocol(&self) -> u8 {
        match self.transport {
            Transport::Tcp { .. } => ip_protocol::TCP,
            Transport::Udp { .. } => ip_protocol::UDP,
            Transport::Icmp { .. } if self.source.is_ipv4() => ip_protocol::ICMP,
            Transport::Icmp { .. } => ip_protocol::ICMPV6,
            Transport::Sctp { .. } => ip_protocol::SCTP,
            Transport::Other { protocol, .. } => protocol,
        }
    }

    /// The transport header and payload, checksummed.
    fn segment(&self) -> Vec<u8> {
        let mut b = Vec::new();
        let checksum_at = match &self.transport {
            Transport::Tcp {
                source,
                destination,
                sequence,
                acknowledgement,
                flags,
                window,
                options,
                payload,
            } => {
                let words = 5 + options.len().div_ceil(4);
                let words = self
                    .faults
                    .iter()
                    .find_map(|f| if let Fault::TcpWords(w) = f { Some(*w) } else { None })
                    .unwrap_or(words as u8);
                b.extend(source.to_be_bytes());
                b.extend(destination.to_be_bytes());
                b.extend(sequence.to_be_bytes());
                b.extend(acknowledgement.to_be_bytes());
                b.extend([words << 4, *flags]);
                b.extend(window.to_be_bytes());
                b.extend([0; 4]);
                b.extend(options);
                b.resize(b.len().next_multiple_of(4), 0);
                b.extend(payload);
                Some(16)
            }
            Transport::Udp { source, destination, payload } => {
                let length = self
                    .faults
                    .iter()
                    .find_map(|f| if let Fault::UdpLength(n) = f { Some(*n) } else { None })
                    .unwrap_or((8 + payload.len()) as u16);
                b.extend(source.to_be_bytes());
                b.extend(destination.to_be_bytes());
                b.extend(length.to_be_bytes());
                b.extend([0; 2]);
                b.extend(payload);
                Some(6)
            }
            Transport::Icmp { kind, code, rest, payload } => {
                b.extend([*kind, *code, 0, 0]);
                b.extend(rest);
                b.extend(payload);
                Some(2)
            }
            Transport::Sctp { source, destination, tag, chunk, body } => {
                b = sctp_packet(*source, *destination, *tag, *chunk, body);
                if self.has(Fault::TransportChecksum) {
                    b[8] ^= 1;
                }
                None
            }
            Transport::Other { payload, .. } => {
                b.extend(payload);
                None
            }
        };
        let Some(at) = checksum_at else { return b };
        if self.has(Fault::ZeroUdpChecksum) {
            return b;
        }
        let sum = match self.transport {
            // ICMPv4 has no pseudo header.
            Transport::Icmp { .. } if self.source.is_ipv4() => checksum::internet(&[&b]),
            _ => checksum::transport(self.source, self.destination, self.protocol(), &b),
        };
        let sum = match self.transport {
            // For UDP zero means "none"; its other form is sent.
            Transport::Udp { .. } if sum == 0 => 0xffff,
            _ => sum,
        };
        let sum = if self.has(Fault::TransportChecksum) { sum ^ 1 } else { sum };
        b[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        b
    }

    /// `fragment`: offset in units of eight bytes, and whether more follow.
    fn in_ip(&self, segment: &[u8], fragment: Option<(u16, bool)>) -> Vec<u8> {
        let mut b = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let header = 20 + self.ip_options.len().next_multiple_of(4);
                let mut b = vec![0x40 | (header / 4) as u8, self.tos];
                b.extend(((header + segment.len()) as u16).to_be_bytes());
                b.extend((self.id as u16).to_be_bytes());
                let (offset, more) = fragment.unwrap_or((0, false));
                let flags = (u16::from(self.dont_fragment) << 14) | (u16::from(more) << 13) | offset;
                b.extend(flags.to_be_bytes());
                b.extend([self.ttl, self.protocol(), 0, 0]);
                b.extend(source.octets());
                b.extend(destination.octets());
                b.extend(&self.ip_options);
                b.resize(header, 0);
                b
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut chain: Vec<(u8, Vec<u8>)> = self.extensions.clone();
                if let Some((offset, more)) = fragment {
                    let mut body = ((offset << 3) | u16::from(more)).to_be_bytes().to_vec();
                    body.extend(self.id.to_be_bytes());
                    chain.push((ip_protocol::FRAGMENT, body));
                }
                let mut headers = Vec::new();
                for (i, (kind, body)) in chain.iter().enumerate() {
                    let next = chain.get(i + 1).map_or(self.protocol(), |c| c.0);
                    let length = (2 + body.len()).next_multiple_of(8);
                    let start = headers.len();
                    // The fragment header has a reserved byte where the others have their length.
                    let units = if *kind == ip_protocol::FRAGMENT { 0 } else { (length / 8 - 1) as u8 };
                    headers.extend([next, units]);
                    headers.extend(body);
                    headers.resize(start + length, 0);
                }
                let mut b = vec![0x60 | (self.tos >> 4), self.tos << 4, 0, 0];
                b.extend(((headers.len() + segment.len()) as u16).to_be_bytes());
                b.extend([chain.first().map_or(self.protocol(), |c| c.0), self.ttl]);
                b.extend(source.octets());
                b.extend(destination.octets());
                b.extend(headers);
                b
            }
            _ => unreachable!("checked when it was made"),
        };
        let header = b.len();
        for fault in &self.faults {
            match *fault {
                Fault::IpVersion(v) => b[0] = (b[0] & 0x0f) | (v << 4),
                Fault::IpHeaderWords(w) => b[0] = (b[0] & 0xf0) | (w & 0x0f),
                Fault::IpLength(n) => {
                    let at = if self.source.is_ipv4() { 2 } else { 4 };
                    b[at..at + 2].copy_from_slice(&n.to_be_bytes());
                }
                _ => {}
            }
        }
        if self.source.is_ipv4() {
            let sum = checksum::internet(&[&b[..header]]);
            let sum = if self.has(Fault::IpChecksum) { sum ^ 1 } else { sum };
            b[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        b.extend(segment);
        b
    }

    fn in_ethernet(&self, ip: Vec<u8>) -> Vec<u8> {
        let mut b = Vec::with_capacity(18 + ip.len());
        b.extend(self.destination_mac.0);
        b.extend(self.source_mac.0);
        for (protocol, tag) in &self.vlans {
            b.extend(protocol.to_be_bytes());
            b.extend(tag.to_be_bytes());
        }
        b.extend(if self.source.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] });
        b.extend(ip);
        for fault in &self.faults {
            if let Fault::Truncated(n) = fault {
                b.truncate(*n);
            }
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    use super::*;

    fn pairs() -> [(SocketAddr, SocketAddr); 2] {
        ["10.0.0.1:4000 10.0.0.2:80", "[fd00::1]:4000 [fd00::2]:80"].map(|s| {
            let (a, b) = s.split_once(' ').unwrap();
            (a.parse().unwrap(), b.parse().unwrap())
        })
    }

    /// Another implementation of the formats finds everything where it belongs, and the same checksums.
    #[test]
    fn an_independent_parser_agrees_with_headers_and_checksums() {
        for (from, to) in pairs() {
            for odd in [&b"even"[..], b"odd"] {
                let frames = [
                    Packet::tcp(from, to, tcp_flags::SYN | tcp_flags::ACK)
                        .sequence(7, 9)
                        .payload(odd)
                        .frame(),
                    Packet::udp(from, to, odd).frame(),
                    Packet::echo(from.ip(), to.ip(), 3, 4, odd).frame(),
                ];
                for frame in frames {
                    let p = SlicedPacket::from_ethernet(&frame).unwrap();
                    match p.net.as_ref().unwrap() {
                        NetSlice::Ipv4(h) => {
                            let h = h.header();
                            assert_eq!(h.to_header().calc_header_checksum(), h.header_checksum());
                            assert_eq!(IpAddr::from(h.source_addr()), from.ip());
                        }
                        NetSlice::Ipv6(h) => assert_eq!(IpAddr::from(h.header().destination_addr()), to.ip()),
                        other => panic!("{other:?}"),
                    }
                    match p.transport.unwrap() {
                        TransportSlice::Tcp(t) => {
                            assert_eq!((t.source_port(), t.destination_port()), (from.port(), to.port()));
                            assert!(t.syn() && t.ack() && !t.rst());
                            assert_eq!((t.sequence_number(), t.acknowledgment_number()), (7, 9));
                            assert_eq!(t.payload(), odd);
                            let sum = match p.net.as_ref().unwrap() {
                                NetSlice::Ipv4(h) => {
                                    t.to_header().calc_checksum_ipv4(&h.header().to_header(), odd)
                                }
                                NetSlice::Ipv6(h) => {
                                    t.to_header().calc_checksum_ipv6(&h.header().to_header(), odd)
                                }
                                other => panic!("{other:?}"),
                            };
                            assert_eq!(sum.unwrap(), t.checksum());
                        }
                        TransportSlice::Udp(u) => {
                            assert_eq!((u.source_port(), u.destination_port()), (from.port(), to.port()));
                            assert_eq!(u.payload(), odd);
                            let sum = match p.net.as_ref().unwrap() {
                                NetSlice::Ipv4(h) => {
                                    u.to_header().calc_checksum_ipv4(&h.header().to_header(), odd)
                                }
                                NetSlice::Ipv6(h) => {
                                    u.to_header().calc_checksum_ipv6(&h.header().to_header(), odd)
                                }
                                other => panic!("{other:?}"),
                            };
                            assert_eq!(sum.unwrap(), u.checksum());
                        }
                        TransportSlice::Icmpv4(i) => {
                            let wanted = i.icmp_type().calc_checksum(i.payload());
                            assert_eq!(wanted, i.checksum());
                        }
                        TransportSlice::Icmpv6(i) => {
                            let NetSlice::Ipv6(h) = p.net.as_ref().unwrap() else { panic!() };
                            let h = h.header().to_header();
                            assert!(i.is_checksum_valid(h.source, h.destination));
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn each_fault_is_the_only_difference() {
        let (from, to) = pairs()[0];
        let good = Packet::udp(from, to, b"x");
        let differing = |p: &Packet| {
            let (a, b) = (good.frame(), p.frame());
            (0..a.len()).filter(|i| a.get(*i) != b.get(*i)).collect::<Vec<_>>()
        };
        assert_eq!(differing(&good.clone().fault(Fault::IpChecksum)), [25]);
        assert_eq!(differing(&good.clone().fault(Fault::TransportChecksum)), [41]);
        assert_eq!(differing(&good.clone().fault(Fault::ZeroUdpChecksum)), [40, 41]);
        assert_eq!(good.clone().fault(Fault::Truncated(20)).frame().len(), 20);
    }

    #[test]
    fn fragments_carry_the_whole_segment_once() {
        for (from, to) in pairs() {
            let payload: Vec<u8> = (0..100).collect();
            let p = Packet::udp(from, to, &payload);
            let header = if from.is_ipv4() { 14 + 20 } else { 14 + 40 + 8 };
            let parts = p.fragments(24);
            assert_eq!(parts.len(), 108usize.div_ceil(24));
            let joined: Vec<u8> = parts.iter().flat_map(|f| f[header..].to_vec()).collect();
            assert_eq!(joined, p.segment());
            for (i, f) in parts.iter().enumerate() {
                let field = if from.is_ipv4() { 20 } else { 56 };
                let field = u16::from_be_bytes([f[field], f[field + 1]]);
                let (offset, more) = if from.is_ipv4() {
                    (field & 0x1fff, field & 0x2000 != 0)
                } else {
                    (field >> 3, field & 1 == 1)
                };
                assert_eq!((usize::from(offset), more), (i * 3, i + 1 < parts.len()));
            }
        }
    }

    #[test]
    fn extension_headers_are_chained_and_padded() {
        let (from, to) = pairs()[1];
        let mut p = Packet::udp(from, to, b"x");
        p.extensions = vec![
            (ip_protocol::HOP_BY_HOP, vec![1, 4, 0, 0, 0, 0]),
            (ip_protocol::DESTINATION_OPTIONS, vec![]),
        ];
        let ip = p.ip();
        assert_eq!((ip[6], ip[40], ip[48], ip[49]), (0, 60, 17, 0));
        assert_eq!(ip.len(), 40 + 16 + 9);
    }
}
