//! What may be on the wire at all.

use super::*;

#[test]
fn a_frame_cut_anywhere_is_dropped_and_never_read_beyond() {
    for v6 in [false, true] {
        let (s, d) = (ip(v6, A), ip(v6, B));
        let quoted = in_ip(d, s, 17, 64, &udp((d, 7), (s, 9), b"x"));
        let error =
            icmp(s, d, if v6 { 1 } else { 3 }, if v6 { 4 } else { 3 }, &[&[0; 4][..], &quoted].concat());
        let protocol = if v6 { 58 } else { 1 };
        let frames = [
            tcp_data(v6, (A, 1), (B, 2), SYN, b"data"),
            udp_frame(v6, (A, 1), (B, 2)),
            echo_frame(v6, A, B, false, 1),
            frame(A, &in_ip(s, d, protocol, 64, &error)),
            frame(A, &in_ip(s, d, 132, 64, &[0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0])),
        ];
        for data in frames {
            for n in 0..data.len() {
                let t = world();
                send(&t, RED, A, data[..n].to_vec()).dropped("Truncated");
                assert_eq!(t.counts(), (0, 0));
            }
        }
    }
    let arp = neighbours::arp_request(A, [10, 1, 0, A], [10, 1, 0, 1]);
    for n in 0..arp.len() {
        send(&world(), RED, A, arp[..n].to_vec()).dropped("Truncated");
    }
}

#[test]
fn headers_that_contradict_themselves_are_dropped() {
    let good = tcp_frame(false, (A, 1), (B, 2), SYN);
    let edits: [(usize, u8); 5] = [
        (14, 0x55),      // version 5 in an IPv4 frame
        (14, 0x44),      // header of 16 bytes
        (46, 0x40),      // TCP header of 16 bytes
        (47, SYN | FIN), // begins and ends
        (47, 0),         // no flag at all
    ];
    for (at, value) in edits {
        let mut bad = good.clone();
        bad[at] = value;
        send(&world(), RED, A, bad).dropped("InvalidHeader");
    }
    for flags in 0..64u8 {
        let t = world();
        let fate = send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), flags));
        let nonsense = flags & (SYN | ACK | RST) == 0 || (flags & SYN != 0 && flags & (FIN | RST) != 0);
        match (nonsense, flags & RST != 0) {
            (true, _) => fate.dropped("InvalidHeader"),
            (false, true) => fate.dropped("ConntrackInvalid"),
            (false, false) => fate.delivered_to(RED, B),
        };
    }
    send(&world(), RED, A, tcp_frame(false, (A, 0), (B, 2), SYN)).dropped("InvalidHeader");
    send(&world(), RED, A, udp_frame(true, (A, 1), (B, 0))).dropped("InvalidHeader");
}

#[test]
fn vlan_tags_and_unknown_ethertypes_are_dropped() {
    for kind in [[0x81, 0], [0x88, 0xa8], [0x88, 0xcc], [0x06, 0]] {
        let mut data = tcp_frame(false, (A, 1), (B, 2), SYN);
        data[12..14].copy_from_slice(&kind);
        send(&world(), RED, A, data).dropped("UnsupportedEtherType");
    }
    let tagged = FakeFrame::new(tcp_frame(false, (A, 1), (B, 2), SYN), ifindex(RED, A));
    tagged.0.borrow_mut().tagged = true;
    run(&world(), hook_from_endpoint, tagged).dropped("UnsupportedEtherType");
}

#[test]
fn only_the_endpoints_own_addresses_may_be_sources() {
    let t = world();
    for v6 in [false, true] {
        let (s, d) = (ip(v6, FAR), ip(v6, B));
        send(&t, RED, A, frame(A, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), b"")))).dropped("SpoofedSource");
        let mut data = udp_frame(v6, (A, 1), (B, 2));
        data[6..12].copy_from_slice(&mac(B));
        send(&t, RED, A, data.clone()).dropped("SpoofedSource");
        change(&t, RED, A, |r| r.flags &= !endpoint_flags::MAC_PINNED);
        send(&t, RED, A, data).delivered_to(RED, B);
        change(&t, RED, A, |r| r.flags |= endpoint_flags::MAC_PINNED);
    }
    let link_local: IpAddr = "fe80::a".parse().expect("address");
    let d = ip(true, B);
    send(&t, RED, A, frame(A, &in_ip(link_local, d, 17, 64, &udp((link_local, 1), (d, 2), b""))))
        .dropped("LinkLocal");
    let none: IpAddr = "::".parse().expect("address");
    send(&t, RED, A, frame(A, &in_ip(none, d, 17, 64, &udp((none, 1), (d, 2), b""))))
        .dropped("SpoofedSource");
    // An endpoint without IPv6: the unspecified address is still not its own.
    change(&t, RED, A, |r| r.ip6 = Addr::ZERO);
    send(&t, RED, A, frame(A, &in_ip(none, d, 17, 64, &udp((none, 1), (d, 2), b""))))
        .dropped("SpoofedSource");
    // Its own address under another VPC's device is that device's.
    send(&t, BLUE, B, udp_frame(false, (A, 1), (B, 2))).dropped("SpoofedSource");
}

/// Every host says on its own which groups it listens to: counted under a name of its own, and no event.
#[test]
fn reports_of_group_membership_are_no_alarm() {
    let igmp = [0x22, 0, 0xf9, 0xfd, 0, 0, 0, 0];
    let t = world();
    let report = |s: IpAddr, d: IpAddr| {
        if s.is_ipv4() { in_ip(s, d, 2, 1, &igmp) } else { in_ip(s, d, 58, 1, &icmp(s, d, 143, 0, &[0; 4])) }
    };
    let parsed = |a: &str| -> IpAddr { a.parse().expect("address") };
    let cases = [
        (ip(false, A), parsed("224.0.0.22"), "GroupMembership"),
        (ip(true, A), parsed("ff02::16"), "GroupMembership"),
        (parsed("fe80::a"), parsed("ff02::16"), "GroupMembership"),
        (parsed("::"), parsed("ff02::16"), "GroupMembership"),
        // Nobody speaks for another, and no group hears what is for one host.
        (ip(false, B), parsed("224.0.0.22"), "SpoofedSource"),
        (ip(true, B), parsed("ff02::16"), "SpoofedSource"),
        (ip(false, A), parsed("224.0.0.5"), "GroupMembership"),
    ];
    for (s, d, reason) in cases {
        let events = t.events.borrow().len();
        send(&t, RED, A, frame(A, &report(s, d))).dropped(reason);
        assert_eq!(t.events.borrow().len() - events, usize::from(reason != "GroupMembership"), "{s} {d}");
    }
    send(&t, RED, A, frame(A, &report(ip(false, A), ip(false, B)))).delivered_to(RED, B);
    send(&t, RED, A, frame(A, &report(ip(true, A), ip(true, B)))).delivered_to(RED, B);
}

#[test]
fn destinations_that_are_never_forwarded_have_reasons_of_their_own() {
    let cases = [
        ("224.0.0.5", "Multicast"),
        ("239.1.2.3", "Multicast"),
        ("255.255.255.255", "Broadcast"),
        ("10.1.0.255", "Broadcast"),
        ("127.0.0.1", "InvalidAddress"),
        ("0.1.2.3", "InvalidAddress"),
        ("250.0.0.1", "InvalidAddress"),
        ("169.254.3.4", "LinkLocal"),
        ("10.1.0.10", "ToSelf"),
        ("10.1.0.77", "NoRoute"),
        ("192.0.2.1", "NoRoute"),
        ("ff02::5", "Multicast"),
        ("fe80::1", "LinkLocal"),
        ("::1", "InvalidAddress"),
        ("::", "InvalidAddress"),
        ("::ffff:10.1.0.11", "InvalidAddress"),
        ("fd00:1::a", "ToSelf"),
        ("fd00:1::77", "NoRoute"),
    ];
    for (d, reason) in cases {
        let d: IpAddr = d.parse().expect("address");
        let s = ip(d.is_ipv6(), A);
        send(&world(), RED, A, frame(A, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), b"")))).dropped(reason);
    }
}

#[test]
fn udp_to_a_nodes_tunnel_port_never_leaves_a_workload_in_one_piece_or_in_several() {
    let t = world();
    let (s, node): (IpAddr, IpAddr) = (ip(false, A), [198, 51, 100, 12].into());
    let datagram = udp((s, 4789), (node, 4789), &[0; 64]);
    for vpc in [DEFAULT, RED] {
        send(&t, vpc, A, frame(A, &in_ip(s, node, 17, 64, &datagram))).dropped("TunnelFromWorkload");
    }
    send(&t, DEFAULT, A, frame(A, &in_ipv4(s, node, 17, 64, 0x2000, &datagram[..32])))
        .dropped("TunnelFromWorkload");
    send(&t, DEFAULT, A, frame(A, &in_ipv4(s, node, 17, 64, 4, &datagram[32..])))
        .dropped("TunnelFromWorkload");
    // Another port, another address: policy's business.
    let other = udp((s, 4789), (node, 4790), &[0; 64]);
    send(&t, DEFAULT, A, frame(A, &in_ip(s, node, 17, 64, &other))).to_stack();
}

#[test]
fn fragments_follow_their_first_one_and_no_other() {
    let t = world();
    for v6 in [false, true] {
        let (s, d) = (ip(v6, A), ip(v6, B));
        let datagram = udp((s, 5), (d, 6), &[1; 64]);
        let piece = |first: bool| {
            let (part, offset) = if first { (&datagram[..32], 0) } else { (&datagram[32..], 4u16) };
            let packet = if v6 {
                let field = (offset << 3 | u16::from(first)).to_be_bytes();
                let body = [&[17, 0, field[0], field[1], 0, 0, 0, 9][..], part].concat();
                in_ip(s, d, 44, 64, &body)
            } else {
                in_ipv4(s, d, 17, 64, if first { 0x2000 } else { offset }, part)
            };
            frame(A, &packet)
        };
        send(&t, RED, A, piece(false)).dropped("FragmentUnknown");
        send(&t, RED, A, piece(true)).delivered_to(RED, B);
        send(&t, RED, A, piece(false)).delivered_to(RED, B);
        // The same identification in another VPC is another datagram.
        send(&t, BLUE, A, piece(false)).dropped("FragmentUnknown");
        t.wait(40);
        send(&t, RED, A, piece(false)).dropped("FragmentUnknown");
    }
    let (s, d) = (ip(false, A), ip(false, B));
    let overlapping = in_ipv4(s, d, 6, 64, 1, &[0; 16]);
    send(&t, RED, A, frame(A, &overlapping)).dropped("InvalidHeader");
    let tiny = in_ipv4(s, d, 6, 64, 0x2000, &[0; 8]);
    send(&t, RED, A, frame(A, &tiny)).dropped("Truncated");
}

#[test]
fn extension_headers_are_followed_to_the_end_and_not_further() {
    let (s, d) = (ip(true, A), ip(true, B));
    let segment = tcp((s, 1), (d, 2), SYN, &[]);
    let options =
        |next: u8, units: u8| [&[next, units, 1, 4][..], &vec![0; 4 + usize::from(units) * 8]].concat();
    let build = |first: u8, headers: &[Vec<u8>]| {
        frame(A, &in_ip(s, d, first, 64, &[headers.concat(), segment.clone()].concat()))
    };
    let t = world();
    send(&t, RED, A, build(0, &[options(60, 0), options(6, 1)])).delivered_to(RED, B);
    send(
        &t,
        RED,
        A,
        build(60, &vec![options(60, 0); 5].into_iter().chain([options(6, 0)]).collect::<Vec<_>>()),
    )
    .delivered_to(RED, B);
    send(
        &t,
        RED,
        A,
        build(60, &vec![options(60, 0); 7].into_iter().chain([options(6, 0)]).collect::<Vec<_>>()),
    )
    .dropped("InvalidHeader");
    // Hop-by-hop after the start, a routing header of type 0, a length beyond the packet, a jumbo claim.
    send(&t, RED, A, build(60, &[options(0, 0), options(6, 0)])).dropped("InvalidHeader");
    send(&t, RED, A, build(43, &[vec![6, 0, 0, 0, 0, 0, 0, 0]])).dropped("InvalidHeader");
    send(&t, RED, A, build(60, &[vec![6, 200, 1, 4, 0, 0, 0, 0]])).dropped("Truncated");
    let mut jumbo = build(0, &[options(6, 0)]);
    jumbo[18..20].fill(0);
    send(&t, RED, A, jumbo).dropped("InvalidHeader");
}

#[test]
fn unknown_devices_and_endpoints_fail_closed() {
    let t = world();
    let data = udp_frame(false, (A, 1), (B, 2));
    run(&t, hook_from_endpoint, FakeFrame::new(data.clone(), 77)).dropped("UnknownDevice");
    change(&t, RED, A, |r| r.flags = 0);
    send(&t, RED, A, data.clone()).dropped("UnknownEndpoint");
    let t = world();
    switch(&t, RED, A, flowloom_bpf_abi::SLOT_NONE, ALLOW);
    send(&t, RED, A, data.clone()).dropped("NotReady");
    let t = world();
    t.set_policy(9, &[entry(4_000_000, 0, 0, 0, 1, verdict::ALLOW)]);
    switch(&t, RED, A, 9, ALLOW);
    send(&t, RED, A, data).dropped("NoPolicyEntry");
}

#[test]
fn dhcp_goes_to_the_networks_own_server_whatever_the_rules_say() {
    let t = world();
    switch(&t, DEFAULT, A, DENY, DENY);
    let dhcp = |s: IpAddr, d: IpAddr, from: u16, to: u16| {
        frame(A, &in_ip(s, d, 17, 64, &udp((s, from), (d, to), &[1; 240])))
    };
    let parse = |s: &str| -> IpAddr { s.parse().expect("address") };
    send(&t, DEFAULT, A, dhcp(parse("0.0.0.0"), parse("255.255.255.255"), 68, 67)).to_stack();
    send(&t, DEFAULT, A, dhcp(ip(false, A), parse("10.1.0.1"), 68, 67)).to_stack();
    send(&t, DEFAULT, A, dhcp(parse("fe80::a"), parse("ff02::1:2"), 546, 547)).to_stack();
    // No server of its own: another address, another port, another VPC.
    send(&t, DEFAULT, A, dhcp(ip(false, A), ip(false, B), 68, 67)).dropped("PolicyEgress");
    send(&t, DEFAULT, A, dhcp(ip(false, A), parse("10.1.0.1"), 68, 69)).dropped("PolicyEgress");
    send(&t, DEFAULT, A, dhcp(parse("0.0.0.0"), parse("255.255.255.255"), 70, 67)).dropped("SpoofedSource");
    send(&t, RED, A, dhcp(parse("0.0.0.0"), parse("255.255.255.255"), 68, 67)).dropped("ForeignVpcToHost");
    // The answer passes a closed ingress, and only from the gateway.
    let offer =
        |s: IpAddr| frame(A, &in_ip(s, ip(false, A), 17, 64, &udp((s, 67), (ip(false, A), 68), &[2; 240])));
    change(&t, DEFAULT, A, |r| r.flags |= endpoint_flags::JUDGE_HOST);
    from_host(&t, DEFAULT, A, offer(parse("10.1.0.1"))).to_stack();
    from_host(&t, DEFAULT, A, offer(ip(false, B))).dropped("PolicyIngress");
}
