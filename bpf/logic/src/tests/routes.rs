//! Where packets go: subnets, other nodes, the stack, nowhere.

use flowloom_bpf_abi::{config_flags, delivery, mark};

use super::*;

fn sent_ttl(v6: bool, to: u8, ttl: u8) -> Vec<u8> {
    let (s, d) = (ip(v6, A), ip(v6, to));
    frame(A, &in_ip(s, d, 17, ttl, &udp((s, 1), (d, 2), b"hello")))
}

#[test]
fn a_hop_is_counted_between_subnets_only() {
    for v6 in [false, true] {
        let t = world();
        let at = if v6 { 21 } else { 22 };
        for _ in 0..2 {
            let fate = send(&t, RED, A, sent_ttl(v6, B, 64));
            assert_eq!(fate.delivered_to(RED, B).bytes.data[at], 64);
            let fate = send(&t, RED, A, sent_ttl(v6, FAR, 64));
            assert_eq!(fate.delivered_to(RED, FAR).bytes.data[at], 63);
            assert_sound(&fate.bytes.data);
        }
        send(&t, RED, A, sent_ttl(v6, B, 1)).delivered_to(RED, B);
        for ttl in [0, 1] {
            let fate = send(&t, RED, A, sent_ttl(v6, FAR, ttl));
            fate.answered("TtlExceeded", RED, A);
            assert_sound(&fate.bytes.data);
            assert_eq!(fate.bytes.data[if v6 { 54 } else { 34 }], if v6 { 3 } else { 11 });
        }
    }
}

#[test]
fn packets_larger_than_the_path_get_an_error_with_the_paths_mtu() {
    for v6 in [false, true] {
        let t = world();
        let (s, d) = (ip(v6, A), ip(v6, REMOTE));
        let sized = |size: usize, fragment: u16| {
            let header = if v6 { 40 } else { 20 };
            let datagram = udp((s, 1), (d, 2), &vec![0; size - header - 8]);
            frame(
                A,
                &if v6 { in_ip(s, d, 17, 64, &datagram) } else { in_ipv4(s, d, 17, 64, fragment, &datagram) },
            )
        };
        send(&t, RED, A, sized(1450, 0x4000)).tunnelled(RED);
        let fate = send(&t, RED, A, sized(1451, 0x4000));
        fate.answered("MtuExceeded", RED, A);
        let data = &fate.bytes.data;
        assert_sound(data);
        let icmp = if v6 { 54 } else { 34 };
        assert_eq!(data[icmp..icmp + 2], if v6 { [2, 0] } else { [3, 4] });
        assert_eq!(data[icmp + 6..icmp + 8], 1450u16.to_be_bytes());
        if !v6 {
            send(&t, RED, A, sized(1451, 0)).tunnelled(RED);
        }
        // What will be segmented is as large as its segments.
        let segmented = |segment: u32| {
            let frame = FakeFrame::new(tcp_data(v6, (A, 1), (REMOTE, 2), ACK, &[0; 9000]), ifindex(RED, A));
            frame.0.borrow_mut().gso_size = segment;
            run(&t, hook_from_endpoint, frame)
        };
        let largest = 1450 - if v6 { 60 } else { 40 };
        segmented(largest).tunnelled(RED);
        segmented(largest + 1).answered("MtuExceeded", RED, A);
    }
}

#[test]
fn the_remote_tunnel_is_remembered_by_the_connection_until_the_generation_moves() {
    let t = world();
    let data = || udp_frame(false, (A, 1), (REMOTE, 2));
    send(&t, RED, A, data()).tunnelled(RED);
    // Changed without a bump: the connection still knows the old node.
    let moved = PeerRecord {
        identity: identity(RED, REMOTE),
        flags: peer_flags::ENDPOINT | peer_flags::REMOTE,
        tunnel: Addr::v4([198, 51, 100, 13]),
    };
    t.set_peer(key(RED, ip(false, REMOTE), 32), moved);
    send(&t, RED, A, data()).tunnelled(RED);
    t.bump(RED);
    let fate = send(&t, RED, A, data());
    assert_eq!(fate.bytes.to_tunnel.expect("key").remote, moved.tunnel);
    // It moves here.
    t.remove_peer(&key(RED, ip(false, REMOTE), 32));
    send(&t, RED, A, data());
    t.bump(RED);
    send(&t, RED, A, data()).dropped("NoRoute");
}

#[test]
fn the_world_is_reached_by_the_stack_of_the_default_vpc_only() {
    let t = world();
    let (s, d): (IpAddr, IpAddr) = (ip(false, A), [192, 0, 2, 1].into());
    let data = || frame(A, &in_ip(s, d, 6, 64, &tcp((s, 1), (d, 2), SYN, &[])));
    send(&t, DEFAULT, A, data()).to_stack();
    send(&t, RED, A, data()).dropped("NoRoute");
    let hole = PeerRecord { identity: 3, flags: peer_flags::BLACKHOLE, tunnel: Addr::ZERO };
    t.set_peer(key(DEFAULT, [192, 0, 2, 0].into(), 24), hole);
    let other = || frame(A, &in_ip(s, d, 6, 64, &tcp((s, 3), (d, 2), SYN, &[])));
    send(&t, DEFAULT, A, other()).dropped("Blackhole");
    // Policy is asked before the route.
    switch(&t, DEFAULT, A, DENY, ALLOW);
    send(&t, DEFAULT, A, other()).dropped("PolicyEgress");
}

#[test]
fn direct_peers_are_reached_by_the_uplink_and_a_tap_by_its_own_device() {
    let t = world();
    let direct = PeerRecord {
        identity: identity(DEFAULT, REMOTE),
        flags: peer_flags::ENDPOINT | peer_flags::REMOTE | peer_flags::DIRECT,
        tunnel: Addr::v4([198, 51, 100, 12]),
    };
    t.set_peer(key(DEFAULT, ip(false, REMOTE), 32), direct);
    for _ in 0..2 {
        let fate = send(&t, DEFAULT, A, udp_frame(false, (A, 1), (REMOTE, 2)));
        assert_eq!(fate.bytes.redirect, Some(Redirect::Neighbour(UPLINK)));
    }
    change(&t, RED, B, |r| r.delivery = delivery::REDIRECT);
    let fate = send(&t, RED, A, udp_frame(false, (A, 1), (B, 2)));
    assert_eq!((fate.bytes.redirect, fate.bytes.mark), (Some(Redirect::Out(ifindex(RED, B))), mark::JUDGED));
    let onward = FakeFrame::new(fate.bytes.data, ifindex(RED, B));
    onward.0.borrow_mut().mark = fate.bytes.mark;
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        to_endpoint(f, t, p)
    }
    let fate = run(&t, hook, onward);
    fate.to_stack();
    assert_eq!(fate.bytes.mark, 0);
    // What the stack of the default VPC has for it has no business there.
    from_host(&t, RED, B, udp_frame(false, (A, 1), (B, 2))).dropped("ForeignVpcToHost");
}

#[test]
fn forwarding_by_the_stack_judges_both_sides_all_the_same() {
    let t = world();
    let mut config = *crate::Tables::config(&t).expect("config");
    config.flags |= config_flags::FORWARD_STACK;
    t.set_config(config);
    let through = |data: Vec<u8>, from: u8, to: u8| {
        let fate = send(&t, DEFAULT, from, data);
        if fate.verdict != Verdict::PASS {
            return fate;
        }
        let frame = FakeFrame::new(fate.bytes.data, ifindex(DEFAULT, to));
        frame.0.borrow_mut().arrived_on = ifindex(DEFAULT, from);
        fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
            to_endpoint(f, t, p)
        }
        run(&t, hook, frame)
    };
    switch(&t, DEFAULT, A, ALLOW, DENY);
    switch(&t, DEFAULT, B, DENY, ALLOW);
    through(tcp_frame(false, (A, 1), (B, 2), SYN), A, B).to_stack();
    through(tcp_frame(false, (B, 2), (A, 1), SYN | ACK), B, A).to_stack();
    through(tcp_frame(false, (A, 1), (B, 2), ACK), A, B).to_stack();
    let e = t.connections()[0].1;
    assert_eq!(e.packets, [2, 1]);
    assert_eq!((e.orig_endpoint, e.reply_endpoint), (id(DEFAULT, A), id(DEFAULT, B)));
    switch(&t, DEFAULT, B, DENY, DENY);
    through(tcp_frame(false, (A, 1), (B, 2), ACK), A, B).dropped("PolicyIngress");
    through(tcp_frame(false, (B, 2), (A, 1), ACK), B, A).dropped("PolicyIngress");
    for port in 0..100 {
        through(udp_frame(false, (A, 1000 + port), (B, 2)), A, B).dropped("PolicyIngress");
    }
    // Another VPC's packets never take the stack.
    send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), SYN)).delivered_to(RED, B);
}

#[test]
fn the_host_reaches_its_endpoints_and_is_judged_only_when_asked_for() {
    let t = world();
    switch(&t, DEFAULT, A, DENY, DENY);
    let (gateway, a): (IpAddr, IpAddr) = ([10, 1, 0, 1].into(), ip(false, A));
    let syn = |port: u16| frame(A, &in_ip(gateway, a, 6, 64, &tcp((gateway, port), (a, 80), SYN, &[])));
    from_host(&t, DEFAULT, A, syn(9)).to_stack();
    let answer = frame(A, &in_ip(a, gateway, 6, 64, &tcp((a, 80), (gateway, 9), SYN | ACK, &[])));
    send(&t, DEFAULT, A, answer.clone()).to_stack();
    // Told to judge it: its open connection is asked again, in both directions.
    change(&t, DEFAULT, A, |r| {
        r.flags |= endpoint_flags::JUDGE_HOST;
        r.revision += 1;
    });
    send(&t, DEFAULT, A, answer).dropped("PolicyIngress");
    from_host(&t, DEFAULT, A, syn(9)).dropped("PolicyIngress");
    from_host(&t, DEFAULT, A, syn(10)).dropped("PolicyIngress");
    // What is forwarded is not the host's.
    change(&t, DEFAULT, A, |r| r.flags &= !endpoint_flags::JUDGE_HOST);
    let world_addr: IpAddr = [192, 0, 2, 9].into();
    let frame = FakeFrame::new(
        frame(A, &in_ip(world_addr, a, 6, 64, &tcp((world_addr, 1), (a, 80), SYN, &[]))),
        ifindex(DEFAULT, A),
    );
    frame.0.borrow_mut().arrived_on = UPLINK;
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        to_endpoint(f, t, p)
    }
    run(&t, hook, frame).dropped("PolicyIngress");
}
