//! Packets of open connections, taken out of their tunnel where they arrive: the stack's own way through the tunnel's device costs more than all
//! that is asked here. Whatever is not plain is left to that device as it came.

use flowloom_bpf_abi::{Addr, DropReason, hook};

use crate::conntrack::CtCell;
use crate::frame::{Frame, TunnelKey};
use crate::packet::Packet;
use crate::parse::{ETH, IPV4, IPV6, TCP, UDP};
use crate::sum::fold;
use crate::tables::Tables;
use crate::{Step, hooks, track};

/// Bytes in front of the inner Ethernet header: Ethernet, IPv4 without options, UDP, VXLAN (RFC 7348). As many are taken off, from behind the outer
/// Ethernet header, which stays for the inner IP packet.
pub(crate) const OUTSIDE: u32 = ETH + 20 + 8 + 8;
/// VXLAN flags: there is a network identifier, and nothing else.
const VNI_GIVEN: u8 = 8;
/// ECN: congestion experienced (RFC 3168).
const CONGESTED: u8 = 3;

/// The open connection of what [`crate::parse::is_tunnel`] has found to be a tunnel's packet over IPv4, and left in `p.buf` from the ethertype on.
/// The packet is out of its tunnel then, and `p` as at the tunnel's device. `None`: the packet is as it came.
#[inline(never)]
pub(crate) fn opened<F: Frame, T: Tables>(
    f: F,
    t: T,
    p: &mut Packet,
    overlay: u32,
) -> Option<&'static CtCell> {
    let b = p.buf.first::<38>();
    let key = TunnelKey {
        vni: u32::from_be_bytes([0, b[34], b[35], b[36]]),
        remote: Addr::v4([b[14], b[15], b[16], b[17]]),
    };
    let total = u32::from(u16::from_be_bytes([b[4], b[5]]));
    let datagram = u32::from(u16::from_be_bytes([b[26], b[27]]));
    // The stack does not take what the link meant for another, a checksum that is wrong or one that it would have to check.
    if b[30] != VNI_GIVEN
        || [b[31], b[32], b[33], b[37]] != [0; 4]
        || [b[28], b[29]] != [0; 2]
        || !f.is_for_this_host()
    {
        return None;
    }
    let mut sum = 0;
    let mut i = 2;
    while i < 22 {
        sum += u32::from(b[i]) << 8 | u32::from(b[i + 1]);
        i += 2;
    }
    // Segments, and what the stack must mark inside (RFC 6040), go through the device.
    let device = f.gso_size() > 0 || b[3] & CONGESTED == CONGESTED;
    if fold(sum) != 0xffff || (!device && (total + ETH != f.len() || datagram + 20 != total)) {
        return None;
    }
    let v4 = inside(f, p)?;
    p.now = (t.now_ns() / 1_000_000_000) as u32;
    p.tunnel_key = key;
    if hooks::network(t, p, key.vni, DropReason::UnknownVni) != Step::GO {
        return None;
    }
    let open = track::carried(t, p)?;
    // Order: what follows in this direction must not overtake what waits in the device's queue.
    if device {
        track::by_device(t, p, open);
        return None;
    }
    if track::is_by_device(p, open) || !f.unwrap(OUTSIDE, v4) {
        return None;
    }
    p.hook = hook::FROM_OVERLAY;
    p.ifindex = overlay;
    Some(open)
}

/// Addresses, ports and protocol of the inner packet; whether it is IPv4. `None` for anything but TCP and UDP in one piece without options.
#[inline(always)]
fn inside<F: Frame>(f: F, p: &mut Packet) -> Option<bool> {
    // From the ethertype to the ports.
    let b = p.buf.first::<26>();
    if !f.load(OUTSIDE + 12, b) {
        return None;
    }
    let v4 = [b[0], b[1]] == IPV4;
    let protocol;
    if v4 {
        if b[2] != 0x45 || b[8] & 0x3f != 0 || b[9] != 0 {
            return None;
        }
        protocol = b[11];
        p.src = Addr::v4([b[14], b[15], b[16], b[17]]);
        p.dst = Addr::v4([b[18], b[19], b[20], b[21]]);
        p.sport = [b[22], b[23]];
        p.dport = [b[24], b[25]];
    } else {
        if [b[0], b[1]] != IPV6 || b[2] >> 4 != 6 {
            return None;
        }
        // From the next header to the ports.
        let b = p.buf.first::<38>();
        if !f.load(OUTSIDE + ETH + 6, b) {
            return None;
        }
        protocol = b[0];
        p.src = Addr::v6([
            b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15], b[16],
            b[17],
        ]);
        p.dst = Addr::v6([
            b[18], b[19], b[20], b[21], b[22], b[23], b[24], b[25], b[26], b[27], b[28], b[29], b[30], b[31],
            b[32], b[33],
        ]);
        p.sport = [b[34], b[35]];
        p.dport = [b[36], b[37]];
        // In the maps these would be IPv4 addresses.
        if p.src.is_v4() || p.dst.is_v4() {
            return None;
        }
    }
    if protocol != TCP && protocol != UDP {
        return None;
    }
    p.tuple_src = p.src;
    p.tuple_protocol = protocol;
    Some(v4)
}
