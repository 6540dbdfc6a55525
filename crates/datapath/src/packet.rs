//! Frames for traces and probes: what a workload would send, from the numbers a person knows.

use std::net::IpAddr;

use flowloom_model::Mac;

use crate::error::{Error, Result};

/// TCP flags byte (RFC 9293 section 3.1).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// Start of a connection.
    pub const SYN: u8 = 2;
    /// Abort.
    pub const RST: u8 = 4;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 16;
}

/// Layer 4 of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// TCP.
    Tcp {
        /// Source port.
        source: u16,
        /// Destination port.
        destination: u16,
        /// Flags byte.
        flags: u8,
    },
    /// UDP.
    Udp {
        /// Source port.
        source: u16,
        /// Destination port.
        destination: u16,
    },
    /// SCTP INIT.
    Sctp {
        /// Source port.
        source: u16,
        /// Destination port.
        destination: u16,
    },
    /// ICMP or ICMPv6, by the addresses' family.
    Icmp {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
        /// Identifier of an echo.
        id: u16,
    },
    /// Any other protocol: eight zero bytes.
    Other(u8),
}

impl Transport {
    /// From a protocol number and ports, as people type them. TCP is a SYN, ICMP an echo request.
    #[must_use]
    pub fn new(protocol: u8, v6: bool, source: u16, destination: u16) -> Self {
        match protocol {
            6 => Self::Tcp { source, destination, flags: tcp_flags::SYN },
            17 => Self::Udp { source, destination },
            132 => Self::Sctp { source, destination },
            1 if !v6 => Self::Icmp { kind: 8, code: 0, id: source },
            58 if v6 => Self::Icmp { kind: 128, code: 0, id: source },
            other => Self::Other(other),
        }
    }

    fn number(self, v6: bool) -> u8 {
        match self {
            Self::Tcp { .. } => 6,
            Self::Udp { .. } => 17,
            Self::Sctp { .. } => 132,
            Self::Icmp { .. } => {
                if v6 {
                    58
                } else {
                    1
                }
            }
            Self::Other(n) => n,
        }
    }
}

/// A frame's description.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Source MAC.
    pub src_mac: Mac,
    /// Destination MAC.
    pub dst_mac: Mac,
    /// Source address.
    pub src: IpAddr,
    /// Destination address, same family.
    pub dst: IpAddr,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Layer 4.
    pub transport: Transport,
    /// Bytes after layer 4's header.
    pub payload: usize,
}

const ETHERNET: usize = 14;

impl Frame {
    /// The bytes on the wire, checksums filled in.
    ///
    /// # Errors
    /// When the families differ or the packet would be longer than an IP packet can be.
    pub fn build(&self) -> Result<Vec<u8>> {
        let invalid = |detail: &str| Error::Invalid {
            object: format!("packet {} -> {}", self.src, self.dst),
            detail: detail.to_owned(),
        };
        let v6 = self.src.is_ipv6();
        if v6 != self.dst.is_ipv6() {
            return Err(invalid("source and destination are of different families"));
        }
        let mut segment = self.segment();
        let checksum_at = match self.transport {
            Transport::Tcp { .. } => Some(16),
            Transport::Udp { .. } => Some(6),
            Transport::Icmp { .. } => Some(2),
            Transport::Sctp { .. } | Transport::Other(_) => None,
        };
        let header = if v6 { 40 } else { 20 };
        let total = segment.len() + header;
        let length = u16::try_from(if v6 { segment.len() } else { total })
            .map_err(|_| invalid("longer than 65535 bytes"))?;
        let protocol = self.transport.number(v6);
        if let Some(at) = checksum_at {
            let pseudo = if protocol == 1 { 0 } else { self.pseudo_header(segment.len(), protocol) };
            let mut sum = fold(pseudo + words(&segment));
            if protocol == 17 && sum == 0 {
                sum = 0xffff;
            }
            segment[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        if let Transport::Sctp { .. } = self.transport {
            let crc = crc32c(&segment);
            segment[8..12].copy_from_slice(&crc.to_le_bytes());
        }
        let mut out = Vec::with_capacity(ETHERNET + total);
        out.extend_from_slice(&self.dst_mac.0);
        out.extend_from_slice(&self.src_mac.0);
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                out.extend_from_slice(&[0x08, 0x00]);
                let mut ip = [0u8; 20];
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&length.to_be_bytes());
                ip[6] = 0x40; // do not fragment: what a path-MTU discovering sender sets
                ip[8] = self.ttl;
                ip[9] = protocol;
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                let sum = fold(words(&ip));
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                out.extend_from_slice(&ip);
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                out.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&[protocol, self.ttl]);
                out.extend_from_slice(&src.octets());
                out.extend_from_slice(&dst.octets());
            }
            _ => return Err(invalid("source and destination are of different families")),
        }
        out.extend_from_slice(&segment);
        Ok(out)
    }

    /// Layer 4 and the payload, checksum zero.
    fn segment(&self) -> Vec<u8> {
        let mut s = Vec::with_capacity(32 + self.payload);
        let ports = |s: &mut Vec<u8>, a: u16, b: u16| {
            s.extend_from_slice(&a.to_be_bytes());
            s.extend_from_slice(&b.to_be_bytes());
        };
        match self.transport {
            Transport::Tcp { source, destination, flags } => {
                ports(&mut s, source, destination);
                s.extend_from_slice(&[0; 8]);
                s.extend_from_slice(&[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
            }
            Transport::Udp { source, destination } => {
                ports(&mut s, source, destination);
                // An over-long datagram is refused by the caller before this matters.
                s.extend_from_slice(&((8 + self.payload) as u16).to_be_bytes());
                s.extend_from_slice(&[0, 0]);
            }
            Transport::Sctp { source, destination } => {
                ports(&mut s, source, destination);
                s.extend_from_slice(&[0; 8]);
                // INIT (RFC 9260 section 3.3.2): tag 1, window 64 KiB, one stream each way.
                s.extend_from_slice(&[1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
            }
            Transport::Icmp { kind, code, id } => {
                s.extend_from_slice(&[kind, code, 0, 0]);
                ports(&mut s, id, 1);
            }
            Transport::Other(_) => s.extend_from_slice(&[0; 8]),
        }
        s.resize(s.len() + self.payload, 0);
        s
    }

    fn pseudo_header(&self, len: usize, protocol: u8) -> u64 {
        let addresses = match (self.src, self.dst) {
            (IpAddr::V4(a), IpAddr::V4(b)) => words(&a.octets()) + words(&b.octets()),
            (a, b) => {
                let octets = |ip| match ip {
                    IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
                    IpAddr::V6(a) => a.octets(),
                };
                words(&octets(a)) + words(&octets(b))
            }
        };
        addresses + len as u64 + u64::from(protocol)
    }
}

/// Sum of big-endian 16-bit words (RFC 1071).
fn words(b: &[u8]) -> u64 {
    b.chunks(2).map(|c| u64::from(u16::from_be_bytes([c[0], c.get(1).copied().unwrap_or(0)]))).sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

/// CRC32c (RFC 9260 appendix A), bit by bit: frames are small and few.
fn crc32c(b: &[u8]) -> u32 {
    !b.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| (c >> 1) ^ (0x82f6_3b78 & (c & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(src: &str, dst: &str, transport: Transport, payload: usize) -> Frame {
        Frame {
            src_mac: "02:00:00:00:00:01".parse().unwrap(),
            dst_mac: "02:00:00:00:00:02".parse().unwrap(),
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            ttl: 64,
            transport,
            payload,
        }
    }

    /// A right checksum makes the sum over everything, itself included, all ones.
    fn sums_up(f: &Frame, bytes: &[u8]) -> bool {
        let v6 = f.src.is_ipv6();
        let l4 = &bytes[ETHERNET + if v6 { 40 } else { 20 }..];
        let protocol = f.transport.number(v6);
        let pseudo = if protocol == 1 { 0 } else { f.pseudo_header(l4.len(), protocol) };
        fold(pseudo + words(l4)) == 0 && (v6 || fold(words(&bytes[ETHERNET..ETHERNET + 20])) == 0)
    }

    #[test]
    fn checksums_are_right_in_both_families() {
        for (src, dst) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for payload in [0, 1, 7, 100] {
                for protocol in [1, 6, 17, 58] {
                    let v6 = src.contains(':');
                    if (protocol == 1 && v6) || (protocol == 58 && !v6) {
                        continue;
                    }
                    let f = frame(src, dst, Transport::new(protocol, v6, 40000, 80), payload);
                    let bytes = f.build().unwrap();
                    assert!(sums_up(&f, &bytes), "{f:?}");
                }
            }
        }
    }

    #[test]
    fn crc32c_matches_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn fields_are_where_the_rfcs_put_them() {
        let bytes = frame("10.0.0.1", "10.0.0.2", Transport::new(6, false, 40000, 443), 0).build().unwrap();
        assert_eq!(bytes.len(), 54);
        assert_eq!(&bytes[0..6], &[2, 0, 0, 0, 0, 2]);
        assert_eq!(&bytes[12..14], &[8, 0]);
        assert_eq!(&bytes[16..18], &[0, 40]);
        assert_eq!(&bytes[26..34], &[10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(&bytes[34..38], &[0x9c, 0x40, 0x01, 0xbb]);
        assert_eq!(bytes[47], tcp_flags::SYN);
        let bytes = frame("fd00::1", "fd00::2", Transport::new(17, true, 1, 53), 4).build().unwrap();
        assert_eq!(&bytes[12..14], &[0x86, 0xdd]);
        assert_eq!(&bytes[18..22], &[0, 12, 17, 64]);
        assert_eq!(&bytes[54..60], &[0, 1, 0, 53, 0, 12]);
    }

    #[test]
    fn mixed_families_and_giants_are_refused() {
        let mixed = frame("10.0.0.1", "fd00::2", Transport::new(17, false, 1, 53), 0).build().unwrap_err();
        assert!(mixed.to_string().contains("families"), "{mixed}");
        let giant =
            frame("10.0.0.1", "10.0.0.2", Transport::new(17, false, 1, 53), 65_508).build().unwrap_err();
        assert!(giant.to_string().contains("65535"), "{giant}");
    }
}
