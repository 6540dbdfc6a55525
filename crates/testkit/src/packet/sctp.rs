//! SCTP (RFC 9260): enough for policy, which looks at ports.

use super::checksum;

/// Chunk types.
#[expect(missing_docs, reason = "the names are the protocol's")]
pub mod sctp_chunk {
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const ABORT: u8 = 6;
}

/// A packet with one chunk and a right CRC.
#[must_use]
pub fn sctp_packet(source: u16, destination: u16, tag: u32, chunk: u8, body: &[u8]) -> Vec<u8> {
    let mut b = Vec::new();
    b.extend(source.to_be_bytes());
    b.extend(destination.to_be_bytes());
    b.extend(tag.to_be_bytes());
    b.extend([0; 4]);
    b.extend([chunk, 0]);
    b.extend(((4 + body.len()) as u16).to_be_bytes());
    b.extend(body);
    b.resize(b.len().next_multiple_of(4), 0);
    // Sent in little endian (RFC 9260 appendix A).
    let crc = checksum::crc32c(&b).to_le_bytes();
    b[8..12].copy_from_slice(&crc);
    b
}

/// Body of an INIT: tag, window, streams, first number.
pub(crate) fn init_body(tag: u32) -> [u8; 16] {
    let mut b = [0; 16];
    b[..4].copy_from_slice(&tag.to_be_bytes());
    b[4..8].copy_from_slice(&65_536u32.to_be_bytes());
    b[9] = 1;
    b[11] = 1;
    b[15] = 1;
    b
}
