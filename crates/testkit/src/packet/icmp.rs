//! ICMP and ICMPv6 numbers and errors.

use std::net::IpAddr;

use super::Packet;

/// ICMP echo request.
pub const V4_ECHO: u8 = 8;
/// ICMP echo reply.
pub const V4_ECHO_REPLY: u8 = 0;
/// ICMP destination unreachable.
pub const V4_UNREACHABLE: u8 = 3;
/// ICMP time exceeded.
pub const V4_TIME_EXCEEDED: u8 = 11;
/// Code of [`V4_UNREACHABLE`]: fragmentation needed; the last two bytes of the rest are the MTU.
pub const V4_FRAGMENTATION_NEEDED: u8 = 4;
/// Code of [`V4_UNREACHABLE`]: administratively prohibited.
pub const V4_PROHIBITED: u8 = 13;
/// ICMPv6 destination unreachable.
pub const V6_UNREACHABLE: u8 = 1;
/// Code of [`V6_UNREACHABLE`]: administratively prohibited.
pub const V6_PROHIBITED: u8 = 1;
/// ICMPv6 packet too big; the rest is the MTU.
pub const V6_TOO_BIG: u8 = 2;
/// ICMPv6 time exceeded.
pub const V6_TIME_EXCEEDED: u8 = 3;
/// ICMPv6 echo request.
pub const V6_ECHO: u8 = 128;
/// ICMPv6 echo reply.
pub const V6_ECHO_REPLY: u8 = 129;

/// The four bytes after the checksum of an echo.
#[must_use]
pub fn id_and_sequence(id: u16, sequence: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (id.to_be_bytes(), sequence.to_be_bytes());
    [a, b, c, d]
}

/// An error from `from` to `to` about the IP packet `quoted`.
#[must_use]
pub fn error(from: IpAddr, to: IpAddr, kind: u8, code: u8, rest: u32, quoted: &[u8]) -> Packet {
    Packet::icmp(from, to, kind, code, rest.to_be_bytes(), quoted)
}
