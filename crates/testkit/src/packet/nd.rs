//! Neighbour discovery (RFC 4861), as packets with hop limit 255.

use std::net::Ipv6Addr;

use flowloom_netlink::Mac;

use super::Packet;

/// Router solicitation.
pub const ROUTER_SOLICITATION: u8 = 133;
/// Router advertisement.
pub const ROUTER_ADVERTISEMENT: u8 = 134;
/// Neighbour solicitation.
pub const SOLICITATION: u8 = 135;
/// Neighbour advertisement.
pub const ADVERTISEMENT: u8 = 136;
/// Redirect.
pub const REDIRECT: u8 = 137;
/// All nodes of the link.
pub const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// All routers of the link.
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

const SOURCE_LINK_ADDRESS: u8 = 1;
const TARGET_LINK_ADDRESS: u8 = 2;

/// The group that an address's solicitations go to.
#[must_use]
pub fn solicited_node(target: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = target.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

/// The Ethernet address of an IPv6 group.
#[must_use]
pub fn group_mac(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    Mac([0x33, 0x33, a, b, c, d])
}

fn option(kind: u8, mac: Mac) -> [u8; 8] {
    let [a, b, c, d, e, f] = mac.0;
    [kind, 1, a, b, c, d, e, f]
}

fn packet(from: Ipv6Addr, to: Ipv6Addr, kind: u8, rest: [u8; 4], body: &[u8], mac: Mac) -> Packet {
    let p = Packet::icmp(from.into(), to.into(), kind, 0, rest, body).ttl(255);
    let destination = if to.is_multicast() { group_mac(to) } else { p.destination_mac };
    p.macs(mac, destination)
}

/// "Who has `target`?" From `::` it is a duplicate address probe, which carries no source address option.
#[must_use]
pub fn solicitation(from: Ipv6Addr, target: Ipv6Addr, mac: Mac) -> Packet {
    let mut body = target.octets().to_vec();
    if !from.is_unspecified() {
        body.extend(option(SOURCE_LINK_ADDRESS, mac));
    }
    packet(from, solicited_node(target), SOLICITATION, [0; 4], &body, mac)
}

/// "`target` is at `mac`", solicited and overriding.
#[must_use]
pub fn advertisement(from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr, mac: Mac) -> Packet {
    let mut body = target.octets().to_vec();
    body.extend(option(TARGET_LINK_ADDRESS, mac));
    packet(from, to, ADVERTISEMENT, [0x60, 0, 0, 0], &body, mac)
}

/// "Is there a router?"
#[must_use]
pub fn router_solicitation(from: Ipv6Addr, mac: Mac) -> Packet {
    packet(from, ALL_ROUTERS, ROUTER_SOLICITATION, [0; 4], &option(SOURCE_LINK_ADDRESS, mac), mac)
}

/// "I am a router", for 1800 s, without prefixes.
#[must_use]
pub fn router_advertisement(from: Ipv6Addr, mac: Mac) -> Packet {
    let mut body = vec![0; 8];
    body.extend(option(SOURCE_LINK_ADDRESS, mac));
    packet(from, ALL_NODES, ROUTER_ADVERTISEMENT, [64, 0, 0x07, 0x08], &body, mac)
}

/// "Send what is for `destination` to `target`."
#[must_use]
pub fn redirect(from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr, destination: Ipv6Addr, mac: Mac) -> Packet {
    let mut body = target.octets().to_vec();
    body.extend(destination.octets());
    packet(from, to, REDIRECT, [0; 4], &body, mac)
}
