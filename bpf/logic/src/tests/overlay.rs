//! What other nodes send, by tunnel and by uplink.

use flowloom_bpf_abi::{AddressRecord, mark};

use super::*;
use crate::{Tables as _, TunnelKey, from_overlay, from_uplink, to_overlay};

const NODE: [u8; 4] = [198, 51, 100, 12];

fn tunnelled(t: &FakeTables, vni: u32, outer: [u8; 4], data: Vec<u8>) -> Fate {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        from_overlay(f, t, p)
    }
    let frame = FakeFrame::new(data, OVERLAY);
    frame.0.borrow_mut().from_tunnel = Some(TunnelKey { vni, remote: Addr::v4(outer) });
    run(t, hook, frame)
}

fn arrived(t: &FakeTables, data: Vec<u8>) -> Fate {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        from_uplink(f, t, p)
    }
    run(t, hook, FakeFrame::new(data, UPLINK))
}

#[test]
fn the_tunnels_source_must_be_the_node_that_owns_the_inner_source() {
    let t = world();
    for v6 in [false, true] {
        let data = || udp_frame(v6, (REMOTE, 1), (A, 2));
        tunnelled(&t, RED, NODE, data()).delivered_to(RED, A);
        tunnelled(&t, RED, [198, 51, 100, 13], data()).dropped("WrongTunnelSource");
        tunnelled(&t, 777, NODE, data()).dropped("UnknownVni");
        tunnelled(&t, RED, NODE, udp_frame(v6, (B, 1), (A, 2))).dropped("LocalSourceFromOutside");
        // Nobody's address, the world's address.
        tunnelled(&t, RED, NODE, udp_frame(v6, (77, 1), (A, 2))).dropped("WrongTunnelSource");
        tunnelled(&t, RED, NODE, udp_frame(v6, (REMOTE, 1), (88, 2))).dropped("UnknownDestination");
        // The VNI says whose A it is.
        tunnelled(&t, BLUE, NODE, data()).delivered_to(BLUE, A);
    }
    let frame = FakeFrame::new(udp_frame(false, (REMOTE, 1), (A, 2)), OVERLAY);
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        from_overlay(f, t, p)
    }
    run(&t, hook, frame).dropped("WrongTunnelSource");
}

#[test]
fn ingress_is_judged_and_replies_of_what_went_out_come_back() {
    let t = world();
    switch(&t, RED, A, ALLOW, DENY);
    tunnelled(&t, RED, NODE, tcp_frame(false, (REMOTE, 1), (A, 2), SYN)).dropped("PolicyIngress");
    send(&t, RED, A, tcp_frame(false, (A, 5), (REMOTE, 80), SYN)).tunnelled(RED);
    tunnelled(&t, RED, NODE, tcp_frame(false, (REMOTE, 80), (A, 5), SYN | ACK)).delivered_to(RED, A);
    send(&t, RED, A, tcp_frame(false, (A, 5), (REMOTE, 80), ACK)).tunnelled(RED);
    assert_eq!(t.counts(), (1, 0));
    // Revoked at the originator: the reply stops, too.
    switch(&t, RED, A, DENY, DENY);
    tunnelled(&t, RED, NODE, tcp_frame(false, (REMOTE, 80), (A, 5), ACK)).dropped("PolicyEgress");
    send(&t, RED, A, tcp_frame(false, (A, 5), (REMOTE, 80), ACK)).dropped("PolicyEgress");
}

/// An open connection's packets are found by their entry: it knows the tunnel while the generation is the one it was asked in.
#[test]
fn an_open_connection_comes_through_its_own_tunnel_only() {
    for begins_here in [false, true] {
        let t = world();
        let (out, back) = ((A, 5), (REMOTE, 80));
        let there = |flags| send(&t, RED, A, tcp_frame(false, out, back, flags));
        let here = |outer, flags| tunnelled(&t, RED, outer, tcp_frame(false, back, out, flags));
        let order: [u8; 3] = [SYN, SYN | ACK, ACK];
        for (n, flags) in order.into_iter().enumerate() {
            if (n % 2 == 0) == begins_here {
                there(flags).tunnelled(RED);
            } else {
                here(NODE, flags).delivered_to(RED, A);
            }
        }
        there(ACK).tunnelled(RED);
        here(NODE, ACK).delivered_to(RED, A);
        here([198, 51, 100, 13], ACK).dropped("WrongTunnelSource");
        tunnelled(&t, BLUE, [198, 51, 100, 13], tcp_frame(false, back, out, ACK))
            .dropped("WrongTunnelSource");
        // The address moves to another node.
        let moved = PeerRecord {
            identity: identity(RED, REMOTE),
            flags: peer_flags::ENDPOINT | peer_flags::REMOTE,
            tunnel: Addr::v4([198, 51, 100, 13]),
        };
        t.set_peer(key(RED, ip(false, REMOTE), 32), moved);
        let vpc = *(&t).vpc(RED).expect("vpc");
        t.set_vpc(RED, VpcRecord { generation: vpc.generation + 1, ..vpc });
        here(NODE, ACK).dropped("WrongTunnelSource");
        here([198, 51, 100, 13], ACK).delivered_to(RED, A);
        // The policy, too.
        switch(&t, RED, A, DENY, DENY);
        let reason = if begins_here { "PolicyEgress" } else { "PolicyIngress" };
        here([198, 51, 100, 13], ACK).dropped(reason);
    }
}

#[test]
fn a_reject_goes_back_through_the_tunnel_it_came_from() {
    let t = world();
    switch(&t, RED, A, ALLOW, REJECT);
    let fate = tunnelled(&t, RED, NODE, tcp_frame(true, (REMOTE, 1), (A, 2), SYN));
    assert_eq!(fate.reasons, ["PolicyIngress"]);
    assert_eq!(fate.bytes.redirect, Some(Redirect::Out(OVERLAY)));
    assert_eq!(fate.bytes.to_tunnel, Some(TunnelKey { vni: RED, remote: Addr::v4(NODE) }));
    assert_eq!(fate.bytes.mark, mark::JUDGED);
    assert_sound(&fate.bytes.data);
}

#[test]
fn the_hosts_addresses_of_the_default_vpc_are_the_stacks() {
    let t = world();
    let (s, d): (IpAddr, IpAddr) = (ip(false, REMOTE), [10, 1, 0, 1].into());
    let data = || frame(REMOTE, &in_ip(s, d, 6, 64, &tcp((s, 1), (d, 2), SYN | ACK, &[])));
    let fate = tunnelled(&t, DEFAULT, NODE, data());
    fate.to_stack();
    assert!(fate.bytes.for_this_host);
    tunnelled(&t, RED, NODE, data()).dropped("ForeignVpcToHost");
    let own = AddressRecord { endpoint: 0, flags: address_flags::HOST };
    t.addresses.borrow_mut().insert(AddressKey { vpc: RED, addr: addr(d) }, own);
    tunnelled(&t, RED, NODE, data()).dropped("ForeignVpcToHost");
}

#[test]
fn the_hosts_own_packets_to_remote_endpoints_get_their_tunnel() {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        to_overlay(f, t, p)
    }
    let t = world();
    let (s, d): (IpAddr, IpAddr) = ([10, 1, 0, 1].into(), ip(false, REMOTE));
    let packet =
        |d: IpAddr| FakeFrame::new(frame(A, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), b""))), OVERLAY);
    let fate = run(&t, hook, packet(d));
    fate.to_stack();
    assert_eq!(fate.bytes.to_tunnel, Some(TunnelKey { vni: DEFAULT, remote: Addr::v4(NODE) }));
    run(&t, hook, packet(ip(false, B))).dropped("NoRoute");
    run(&t, hook, packet([192, 0, 2, 1].into())).dropped("NoRoute");
    // What a program has wrapped keeps its key.
    let wrapped = packet(d);
    wrapped.0.borrow_mut().mark = mark::JUDGED;
    let fate = run(&t, hook, wrapped);
    fate.to_stack();
    assert_eq!((fate.bytes.to_tunnel, fate.bytes.mark), (None, mark::TUNNELLED));
}

#[test]
fn the_uplink_delivers_what_direct_peers_send_and_leaves_the_rest_to_the_stack() {
    let t = world();
    let direct = PeerRecord {
        identity: identity(DEFAULT, REMOTE),
        flags: peer_flags::ENDPOINT | peer_flags::REMOTE | peer_flags::DIRECT,
        tunnel: Addr::v4(NODE),
    };
    t.set_peer(key(DEFAULT, ip(false, REMOTE), 32), direct);
    let fate = arrived(&t, tcp_frame(false, (REMOTE, 1), (A, 2), SYN));
    assert_eq!(fate.delivered_to(DEFAULT, A).bytes.data[22], 63);
    assert_sound(&fate.bytes.data);
    switch(&t, DEFAULT, A, ALLOW, DENY);
    arrived(&t, tcp_frame(false, (REMOTE, 3), (A, 2), SYN)).dropped("PolicyIngress");
    // A local endpoint's address from outside, whoever it is for.
    arrived(&t, udp_frame(false, (B, 1), (A, 2))).dropped("LocalSourceFromOutside");
    arrived(&t, udp_frame(true, (B, 1), (77, 2))).dropped("LocalSourceFromOutside");
    // Masqueraded and other traffic is the stack's, broken or not.
    let (s, d): (IpAddr, IpAddr) = ([192, 0, 2, 1].into(), ip(false, A));
    arrived(&t, frame(REMOTE, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), b"")))).to_stack();
    let node: IpAddr = [198, 51, 100, 11].into();
    arrived(&t, frame(REMOTE, &in_ip(s, node, 17, 64, &udp((s, 1), (node, 2), b"")))).to_stack();
    arrived(&t, neighbours::arp_request(REMOTE, [198, 51, 100, 12], [198, 51, 100, 11])).to_stack();
    arrived(&t, vec![0; 20]).to_stack();
    let mut odd = tcp_frame(false, (REMOTE, 1), (A, 2), SYN);
    odd[47] = 0;
    arrived(&t, odd).dropped("InvalidHeader");
}

/// The outside of a tunnel's packets to this node is passed by one look; whatever only looks like it is not.
#[test]
fn what_the_tunnel_carries_is_judged_where_it_leaves_it() {
    let t = world();
    let (node4, node6): (IpAddr, IpAddr) = ([198, 51, 100, 11].into(), "fd99::b".parse().expect("address"));
    let config = *(&t).config().expect("config");
    t.set_config(NodeConfig { node4: addr(node4), node6: addr(node6), ..config });
    let other: IpAddr = "fd99::c".parse().expect("address");
    for (s, d) in [([198, 51, 100, 12].into(), node4), (other, node6)] {
        let data = |d: IpAddr, port: u16| {
            frame(REMOTE, &in_ip(s, d, 17, 64, &udp((s, 1), (d, port), b"inner frame")))
        };
        let looked = |data: Vec<u8>| {
            let before = t.asked.get();
            arrived(&t, data).to_stack();
            t.asked.get() - before
        };
        assert_eq!(looked(data(d, 4789)), 0, "{d}");
        assert!(looked(data(d, 4790)) > 0);
        assert!(looked(frame(REMOTE, &in_ip(s, d, 6, 64, &tcp((s, 1), (d, 4789), SYN, &[])))) > 0);
    }
    // Another's address, with the tunnel's port: an endpoint's here.
    let (s, d): (IpAddr, IpAddr) = (ip(false, B), ip(false, A));
    arrived(&t, frame(REMOTE, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 4789), b""))))
        .dropped("LocalSourceFromOutside");
}

#[test]
fn ipv6_packets_with_mapped_addresses_are_nobodys_ipv4() {
    let t = world();
    let (mapped, a): (IpAddr, IpAddr) = ("::ffff:10.1.0.50".parse().expect("address"), ip(true, A));
    let data = || frame(REMOTE, &in_ip(mapped, a, 17, 64, &udp((mapped, 1), (a, 2), b"")));
    tunnelled(&t, RED, NODE, data()).dropped("InvalidAddress");
    let direct = PeerRecord {
        identity: identity(DEFAULT, REMOTE),
        flags: peer_flags::ENDPOINT | peer_flags::REMOTE | peer_flags::DIRECT,
        tunnel: Addr::v4(NODE),
    };
    t.set_peer(key(DEFAULT, ip(false, REMOTE), 32), direct);
    arrived(&t, data()).dropped("InvalidAddress");
    from_host(&t, DEFAULT, A, data()).dropped("InvalidAddress");
}
