//! Frames taken apart, for assertions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use flowloom_netlink::Mac;

use crate::packet::{checksum, ip_protocol};

/// What a frame says. Lengths come from the headers, so that padding of short frames is not taken for payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parsed {
    /// Ethernet source.
    pub source_mac: Mac,
    /// Ethernet destination.
    pub destination_mac: Mac,
    /// IP source.
    pub source: IpAddr,
    /// IP destination.
    pub destination: IpAddr,
    /// Protocol after IPv6 extension headers.
    pub protocol: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Fragment: identification, offset in bytes, more follow.
    pub fragment: Option<(u32, usize, bool)>,
    /// Source port of TCP, UDP and SCTP, 0 otherwise and in later fragments.
    pub source_port: u16,
    /// Destination port likewise.
    pub destination_port: u16,
    /// TCP flags.
    pub tcp_flags: u8,
    /// TCP sequence and acknowledgement.
    pub tcp_numbers: (u32, u32),
    /// ICMP type and code.
    pub icmp: (u8, u8),
    /// The four bytes after the checksum of ICMP.
    pub icmp_rest: [u8; 4],
    /// What follows the transport header (for ICMP errors: the quoted packet).
    pub payload: Vec<u8>,
    /// The IPv4 header's checksum is right (always true for IPv6).
    pub ip_checksum_ok: bool,
    /// The transport checksum is right; `None` in fragments and where there is none. On a link with offloads, what the
    /// stack sends is unfinished and shows `Some(false)`.
    pub transport_checksum_ok: Option<bool>,
}

impl Parsed {
    /// `None` when it is not IP, or too short for what it claims.
    #[must_use]
    pub fn from_frame(frame: &[u8]) -> Option<Self> {
        let mac = |at: usize| frame.get(at..at + 6)?.first_chunk::<6>().map(|m| Mac(*m));
        let (destination_mac, source_mac) = (mac(0)?, mac(6)?);
        let mut at = 12;
        let mut kind = u16_at(frame, at)?;
        while matches!(kind, 0x8100 | 0x88a8) {
            at += 4;
            kind = u16_at(frame, at)?;
        }
        let ip = frame.get(at + 2..)?;
        let mut p = match kind {
            0x0800 => Self::from_ip(ip)?,
            0x86dd => Self::from_ip(ip)?,
            _ => return None,
        };
        (p.source_mac, p.destination_mac) = (source_mac, destination_mac);
        Some(p)
    }

    /// From an IP packet (the MACs are zero); for quoted packets and tunnels.
    #[must_use]
    pub fn from_ip(ip: &[u8]) -> Option<Self> {
        let mut p = Self {
            source_mac: Mac([0; 6]),
            destination_mac: Mac([0; 6]),
            source: Ipv4Addr::UNSPECIFIED.into(),
            destination: Ipv4Addr::UNSPECIFIED.into(),
            protocol: 0,
            ttl: 0,
            fragment: None,
            source_port: 0,
            destination_port: 0,
            tcp_flags: 0,
            tcp_numbers: (0, 0),
            icmp: (0, 0),
            icmp_rest: [0; 4],
            payload: Vec::new(),
            ip_checksum_ok: true,
            transport_checksum_ok: None,
        };
        let segment = match ip.first()? >> 4 {
            4 => p.ipv4(ip)?,
            6 => p.ipv6(ip)?,
            _ => return None,
        };
        p.transport(segment);
        Some(p)
    }

    fn ipv4<'a>(&mut self, ip: &'a [u8]) -> Option<&'a [u8]> {
        let header = usize::from(ip[0] & 15) * 4;
        let head = ip.get(..header).filter(|h| h.len() >= 20)?;
        self.source = Ipv4Addr::from(*head[12..].first_chunk::<4>()?).into();
        self.destination = Ipv4Addr::from(*head[16..].first_chunk::<4>()?).into();
        (self.ttl, self.protocol) = (head[8], head[9]);
        let field = u16_at(head, 6)?;
        let (offset, more) = (usize::from(field & 0x1fff) * 8, field & 0x2000 != 0);
        if offset > 0 || more {
            self.fragment = Some((u32::from(u16_at(head, 4)?), offset, more));
        }
        self.ip_checksum_ok = checksum::internet(&[head]) == 0;
        let total = usize::from(u16_at(head, 2)?);
        // A quoted packet is shorter than its header says.
        ip.get(header..total.clamp(header, ip.len()))
    }

    fn ipv6<'a>(&mut self, ip: &'a [u8]) -> Option<&'a [u8]> {
        let head = ip.get(..40)?;
        self.source = Ipv6Addr::from(*head[8..].first_chunk::<16>()?).into();
        self.destination = Ipv6Addr::from(*head[24..].first_chunk::<16>()?).into();
        (self.protocol, self.ttl) = (head[6], head[7]);
        let end = (40 + usize::from(u16_at(head, 4)?)).min(ip.len());
        let mut at = 40;
        loop {
            let length = match self.protocol {
                ip_protocol::HOP_BY_HOP | ip_protocol::ROUTING | ip_protocol::DESTINATION_OPTIONS => {
                    (usize::from(*ip.get(at + 1)?) + 1) * 8
                }
                ip_protocol::FRAGMENT => {
                    let field = u16_at(ip, at + 2)?;
                    let id = u32::from_be_bytes(*ip.get(at + 4..)?.first_chunk::<4>()?);
                    self.fragment = Some((id, usize::from(field & 0xfff8), field & 1 == 1));
                    8
                }
                _ => return ip.get(at..end),
            };
            self.protocol = *ip.get(at)?;
            at += length;
        }
    }

    fn transport(&mut self, segment: &[u8]) {
        if self.fragment.is_some_and(|(_, offset, _)| offset > 0) {
            self.payload = segment.to_vec();
            return;
        }
        let whole = self.fragment.is_none();
        let (s, d, protocol) = (self.source, self.destination, self.protocol);
        let checked = |ok: bool| whole.then_some(ok);
        let word = |at: usize| u16_at(segment, at).unwrap_or(0);
        let long = |at: usize| (u32::from(word(at)) << 16) | u32::from(word(at + 2));
        let mut header = 0;
        match protocol {
            ip_protocol::TCP => {
                (self.source_port, self.destination_port) = (word(0), word(2));
                self.tcp_numbers = (long(4), long(8));
                self.tcp_flags = segment.get(13).copied().unwrap_or(0);
                header = usize::from(segment.get(12).copied().unwrap_or(0) >> 4) * 4;
                self.transport_checksum_ok = checked(checksum::transport(s, d, protocol, segment) == 0);
            }
            ip_protocol::UDP => {
                (self.source_port, self.destination_port) = (word(0), word(2));
                header = 8;
                self.transport_checksum_ok = match word(6) {
                    0 => None,
                    _ => checked(checksum::transport(s, d, protocol, segment) == 0),
                };
            }
            ip_protocol::SCTP => {
                (self.source_port, self.destination_port) = (word(0), word(2));
                header = 12;
                if let Some(sent) = segment.get(8..12) {
                    let mut zeroed = segment.to_vec();
                    zeroed[8..12].fill(0);
                    self.transport_checksum_ok = checked(checksum::crc32c(&zeroed).to_le_bytes() == *sent);
                }
            }
            ip_protocol::ICMP | ip_protocol::ICMPV6 => {
                if let Some([kind, code, _, _, rest @ ..]) = segment.first_chunk::<8>() {
                    self.icmp = (*kind, *code);
                    self.icmp_rest = *rest;
                }
                header = 8;
                let sum = if protocol == ip_protocol::ICMP {
                    checksum::internet(&[segment])
                } else {
                    checksum::transport(s, d, protocol, segment)
                };
                self.transport_checksum_ok = checked(sum == 0);
            }
            _ => {}
        }
        self.payload = segment.get(header..).unwrap_or_default().to_vec();
    }
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    b.get(at..)?.first_chunk::<2>().map(|w| u16::from_be_bytes(*w))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Fault, Packet, icmp, nd, tcp_flags, vxlan};

    #[test]
    fn what_is_built_is_what_is_parsed() {
        for (a, b) in [("10.0.0.1:5", "10.0.0.2:80"), ("[fd00::1]:5", "[fd00::2]:80")] {
            let (a, b): (std::net::SocketAddr, std::net::SocketAddr) =
                (a.parse().unwrap(), b.parse().unwrap());
            let tcp = Packet::tcp(a, b, tcp_flags::SYN).payload(b"hello").ttl(9);
            let p = Parsed::from_frame(&tcp.frame()).unwrap();
            assert_eq!((p.source, p.destination, p.ttl), (a.ip(), b.ip(), 9));
            assert_eq!((p.source_port, p.destination_port, p.tcp_flags), (5, 80, tcp_flags::SYN));
            assert_eq!(
                (p.payload.as_slice(), p.ip_checksum_ok, p.transport_checksum_ok),
                (&b"hello"[..], true, Some(true))
            );
            let bad = Parsed::from_frame(&tcp.clone().fault(Fault::TransportChecksum).frame()).unwrap();
            assert_eq!(bad.transport_checksum_ok, Some(false));
            let sctp = Parsed::from_frame(&Packet::sctp_init(a, b).frame()).unwrap();
            assert_eq!(
                (sctp.source_port, sctp.destination_port, sctp.transport_checksum_ok),
                (5, 80, Some(true))
            );
            let parts = Packet::udp(a, b, &[7; 40]).fragments(24);
            let second = Parsed::from_frame(&parts[1]).unwrap();
            assert_eq!((second.fragment, second.source_port), (Some((0x1234, 24, false)), 0));
            let error = icmp::error(b.ip(), a.ip(), icmp::V4_UNREACHABLE, 13, 0, &tcp.ip()[..28]);
            let e = Parsed::from_frame(&error.frame()).unwrap();
            assert_eq!((e.icmp, e.transport_checksum_ok), ((3, 13), Some(true)));
            let inner = tcp.frame();
            let outer = Parsed::from_frame(&vxlan::encapsulate(a, b, 77, &inner).frame()).unwrap();
            assert_eq!(vxlan::decapsulate(&outer.payload), Some((77, &inner[..])));
        }
    }

    #[test]
    fn neighbour_discovery_goes_to_the_group_with_hop_limit_255() {
        let target: Ipv6Addr = "fd00::12:3456".parse().unwrap();
        let frame = nd::solicitation("fd00::1".parse().unwrap(), target, Mac([2, 0, 0, 0, 0, 1])).frame();
        let p = Parsed::from_frame(&frame).unwrap();
        assert_eq!(p.destination, "ff02::1:ff12:3456".parse::<IpAddr>().unwrap());
        assert_eq!(
            (p.destination_mac, p.ttl, p.icmp.0),
            (Mac([0x33, 0x33, 0xff, 0x12, 0x34, 0x56]), 255, nd::SOLICITATION)
        );
        assert_eq!(p.transport_checksum_ok, Some(true));
    }

    #[test]
    fn any_prefix_of_a_frame_is_parsed_or_refused_without_a_panic() {
        let a = "[fd00::1]:5".parse().unwrap();
        let mut p = Packet::tcp(a, a, tcp_flags::ACK).payload(b"abc");
        p.extensions = vec![(0, vec![]), (60, vec![1; 14])];
        for frame in [p.frame(), Packet::sctp_init(a, a).frame()] {
            for n in 0..=frame.len() {
                let _ = Parsed::from_frame(&frame[..n]);
            }
        }
    }
}
