//! VXLAN (RFC 7348).

use std::net::SocketAddr;

use super::Packet;

/// The header.
#[must_use]
pub fn header(vni: u32) -> [u8; 8] {
    let [_, a, b, c] = vni.to_be_bytes();
    [0x08, 0, 0, 0, a, b, c, 0]
}

/// A frame inside UDP, from one tunnel end to another.
#[must_use]
pub fn encapsulate(from: SocketAddr, to: SocketAddr, vni: u32, frame: &[u8]) -> Packet {
    let mut payload = header(vni).to_vec();
    payload.extend(frame);
    Packet::udp(from, to, &payload)
}

/// VNI and inner frame of a VXLAN datagram.
#[must_use]
pub fn decapsulate(payload: &[u8]) -> Option<(u32, &[u8])> {
    let (header, frame) = payload.split_first_chunk::<8>()?;
    let [flags, _, _, _, a, b, c, _] = *header;
    (flags & 0x08 != 0).then(|| (u32::from_be_bytes([0, a, b, c]), frame))
}
