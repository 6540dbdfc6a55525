//! Checksums of the Internet protocols (RFC 1071, RFC 8200 section 8.1) and of SCTP (RFC 9260 appendix A).

use std::net::IpAddr;

/// Ones' complement sum of all parts as one byte string; every part but the last has an even length.
#[must_use]
pub fn internet(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// With the pseudo header of the addresses' family. 0 over a segment that carries its checksum means: it is right.
#[must_use]
pub fn transport(source: IpAddr, destination: IpAddr, protocol: u8, segment: &[u8]) -> u16 {
    let length = segment.len() as u32;
    let mut pseudo = Vec::with_capacity(40);
    match (source, destination) {
        (IpAddr::V4(s), IpAddr::V4(d)) => {
            pseudo.extend(s.octets());
            pseudo.extend(d.octets());
            pseudo.extend([0, protocol]);
            pseudo.extend((length as u16).to_be_bytes());
        }
        (IpAddr::V6(s), IpAddr::V6(d)) => {
            pseudo.extend(s.octets());
            pseudo.extend(d.octets());
            pseudo.extend(length.to_be_bytes());
            pseudo.extend([0, 0, 0, protocol]);
        }
        _ => panic!("{source} and {destination} are of two families"),
    }
    internet(&[&pseudo, segment])
}

/// CRC-32C (Castagnoli), bit by bit.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values() {
        // RFC 1071 section 3, and the check value of CRC-32C.
        assert_eq!(internet(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), !0xddf2);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
