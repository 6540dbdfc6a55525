//! ARP and neighbour discovery.

use super::*;

pub(super) fn arp_request(from: u8, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    [&[0xff; 6][..], &mac(from), &[8, 6], &head, &mac(from), &sender, &[0; 6], &target].concat()
}

#[test]
fn arp_is_answered_for_the_gateway_and_every_address_of_the_subnet_but_its_own() {
    let t = world();
    for target in [1, B, 200] {
        let fate = send(&t, RED, A, arp_request(A, [10, 1, 0, A], [10, 1, 0, target]));
        assert_eq!(fate.bytes.redirect, Some(Redirect::Peer(ifindex(RED, A))), "{target}");
        let expected = [
            &mac(A)[..],
            &host_mac(A),
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
            &host_mac(A),
            &[10, 1, 0, target],
            &mac(A),
            &[10, 1, 0, A],
        ]
        .concat();
        assert_eq!(fate.bytes.data, expected);
    }
    // Its own address (gratuitous), a probe for it, another subnet: silence.
    for (sender, target) in
        [([10, 1, 0, A], [10, 1, 0, A]), ([0; 4], [10, 1, 0, A]), ([10, 1, 0, A], [10, 9, 0, 1])]
    {
        let fate = send(&t, RED, A, arp_request(A, sender, target));
        assert_eq!((fate.verdict, fate.bytes.redirect), (Verdict::DROP, None));
        assert!(fate.reasons.is_empty());
        send(&t, DEFAULT, A, arp_request(A, sender, target)).to_stack();
    }
}

#[test]
fn nobody_speaks_for_anothers_address() {
    let t = world();
    send(&t, RED, A, arp_request(A, [10, 1, 0, B], [10, 1, 0, 1])).dropped("SpoofedNeighbour");
    let mut other_mac = arp_request(A, [10, 1, 0, A], [10, 1, 0, 1]);
    other_mac[22..28].copy_from_slice(&mac(B));
    send(&t, RED, A, other_mac).dropped("SpoofedNeighbour");
    let mut reply = arp_request(A, [10, 1, 0, B], [10, 1, 0, 1]);
    reply[21] = 2;
    send(&t, DEFAULT, A, reply).dropped("SpoofedNeighbour");
    let mut own = arp_request(A, [10, 1, 0, A], [10, 1, 0, 1]);
    own[21] = 2;
    send(&t, DEFAULT, A, own).to_stack();
}

fn nd(from: IpAddr, to: IpAddr, kind: u8, target: Option<IpAddr>, hops: u8) -> Vec<u8> {
    let rest = [vec![0; 4], target.map(octets).unwrap_or_default(), vec![1, 1], mac(A).to_vec()].concat();
    frame(A, &in_ip(from, to, 58, hops, &icmp(from, to, kind, 0, &rest)))
}

#[test]
fn a_solicitation_gets_a_sound_advertisement() {
    let t = world();
    let group: IpAddr = "ff02::1:ff00:1".parse().expect("address");
    let gateway: IpAddr = "fd00:1::1".parse().expect("address");
    for (target, from) in
        [(gateway, ip(true, A)), (ip(true, B), ip(true, A)), (gateway, "fe80::a".parse().expect("address"))]
    {
        let fate = send(&t, RED, A, nd(from, group, 135, Some(target), 255));
        assert_eq!(fate.bytes.redirect, Some(Redirect::Peer(ifindex(RED, A))), "{fate:?}");
        let data = &fate.bytes.data;
        assert_sound(data);
        assert_eq!(data[..12], [mac(A), host_mac(A)].concat());
        assert_eq!(data[21], 255);
        assert_eq!(data[22..38], octets(target)[..]);
        assert_eq!(data[38..54], octets(from)[..]);
        assert_eq!((data[54], data[58]), (136, 0xe0));
        assert_eq!(data[62..78], octets(target)[..]);
        assert_eq!(data[78..86], [&[2, 1][..], &host_mac(A)].concat());
    }
}

#[test]
fn discovery_is_bounded_to_the_endpoints_own_addresses() {
    let t = world();
    let own = ip(true, A);
    let parse = |s: &str| -> IpAddr { s.parse().expect("address") };
    let all = parse("ff02::1");
    // Duplicate address detection of its own address stays unanswered.
    for target in [own, parse("fe80::a")] {
        let fate = send(&t, RED, A, nd(parse("::"), all, 135, Some(target), 255));
        assert_eq!((fate.bytes.redirect, fate.reasons.len()), (None, 0));
    }
    send(&t, DEFAULT, A, nd(own, all, 133, None, 255)).to_stack();
    send(&t, DEFAULT, A, nd(own, all, 136, Some(own), 255)).to_stack();
    send(&t, DEFAULT, A, nd(own, all, 136, Some(ip(true, B)), 255)).dropped("SpoofedNeighbour");
    send(&t, RED, A, nd(ip(true, B), all, 135, Some(parse("fd00:1::1")), 255)).dropped("SpoofedNeighbour");
    send(&t, RED, A, nd(own, all, 134, None, 255)).dropped("RouterAdvertisement");
    send(&t, RED, A, nd(own, all, 137, Some(own), 255)).dropped("RouterAdvertisement");
    // What a router has forwarded is no neighbour's.
    send(&t, RED, A, nd(own, all, 135, Some(parse("fd00:1::1")), 254)).dropped("InvalidHeader");
}
