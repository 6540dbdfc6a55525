//! Connection tracking.

use flowloom_bpf_abi::{QuotaValue, ct_flags, ct_state, policy_flags};

use super::*;

fn handshake(t: &FakeTables, vpc: u32, port: u16) {
    send(t, vpc, A, tcp_frame(false, (A, port), (B, 80), SYN)).delivered_to(vpc, B);
    send(t, vpc, B, tcp_frame(false, (B, 80), (A, port), SYN | ACK)).delivered_to(vpc, A);
    send(t, vpc, A, tcp_frame(false, (A, port), (B, 80), ACK)).delivered_to(vpc, B);
}

#[test]
fn a_handshake_makes_an_established_connection_with_both_decisions() {
    let t = world();
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), SYN)).delivered_to(RED, B);
    assert_eq!(t.counts(), (0, 1));
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), SYN | ACK)).delivered_to(RED, A);
    assert_eq!(t.counts(), (1, 0));
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    let (key, e) = t.connections()[0];
    assert_eq!(
        (key.vpc, key.lo, key.lo_port, key.hi_port),
        (RED, addr(ip(false, A)), 4000u16.to_be_bytes(), [0, 80])
    );
    assert_eq!((e.orig_endpoint, e.reply_endpoint), (id(RED, A), id(RED, B)));
    assert_eq!((e.orig_identity, e.reply_identity), (identity(RED, A), identity(RED, B)));
    assert_eq!(e.state, ct_state::ESTABLISHED);
    assert_eq!(e.packets, [2, 1]);
    for d in e.decision {
        assert_eq!((d.revision, d.generation, d.slot, d.verdict), (1, 1, ALLOW, verdict::ALLOW));
    }
    assert!(e.flags & ct_flags::SEEN_REPLY != 0 && e.flags & ct_flags::COUNTED != 0);
}

#[test]
fn replies_pass_where_nothing_new_may() {
    let t = world();
    switch(&t, RED, A, ALLOW, DENY);
    switch(&t, RED, B, DENY, ALLOW);
    handshake(&t, RED, 4000);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).delivered_to(RED, A);
    send(&t, RED, A, echo_frame(true, A, B, false, 7)).delivered_to(RED, B);
    send(&t, RED, B, echo_frame(true, B, A, true, 7)).delivered_to(RED, A);
    send(&t, RED, B, tcp_frame(false, (B, 5), (A, 6), SYN)).dropped("PolicyEgress");
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 2))).dropped("PolicyEgress");
    // A question of its own with the same identifier is no answer.
    send(&t, RED, B, echo_frame(true, B, A, false, 7)).dropped("PolicyEgress");
    // An answer that nobody asked for is judged as what it is.
    send(&t, RED, B, echo_frame(true, B, A, true, 8)).dropped("PolicyEgress");
}

/// An unasked reply was stored as a connection of its own: the request the other way was then no start, and its answer no answer.
#[test]
fn an_echo_reply_without_its_request_begins_no_connection() {
    for v6 in [false, true] {
        let t = world();
        send(&t, RED, B, echo_frame(v6, B, A, true, 7)).delivered_to(RED, A);
        assert_eq!(t.counts(), (0, 0));
        switch(&t, RED, B, DENY, ALLOW);
        send(&t, RED, A, echo_frame(v6, A, B, false, 7)).delivered_to(RED, B);
        send(&t, RED, B, echo_frame(v6, B, A, true, 7)).delivered_to(RED, A);
        assert_eq!((t.counts(), t.connections()[0].1.packets), ((0, 1), [1, 1]));
    }
}

/// Code 3 was judged when the connection began, code 0 whenever it was judged again.
#[test]
fn an_echo_with_a_code_is_judged_by_its_code_every_time() {
    let t = world();
    let odd = || {
        frame(
            A,
            &in_ip(ip(false, A), ip(false, B), 1, 64, &icmp(ip(false, A), ip(false, B), 8, 3, &[0, 7, 0, 1])),
        )
    };
    t.set_policy(7, &[entry(0, 1, 0x0803, 16, 5, verdict::ALLOW), entry(0, 0, 0, 0, 1, verdict::DROP)]);
    switch(&t, RED, A, 7, ALLOW);
    send(&t, RED, A, odd()).delivered_to(RED, B);
    t.bump(RED);
    send(&t, RED, A, odd()).delivered_to(RED, B);
    assert_eq!(t.counts(), (0, 0));
}

#[test]
fn a_revoked_connection_stops_in_both_directions_whichever_side_speaks_first() {
    for reply_first in [false, true] {
        for change in ["egress rule", "ingress rule", "sender's label", "receiver's label"] {
            let t = world();
            let (a, b) = (identity(RED, A), identity(RED, B));
            t.set_policy(7, &[entry(b, 0, 0, 0, 5, verdict::ALLOW), entry(0, 0, 0, 0, 1, verdict::DROP)]);
            t.set_policy(8, &[entry(a, 0, 0, 0, 5, verdict::ALLOW), entry(0, 0, 0, 0, 1, verdict::DROP)]);
            switch(&t, RED, A, 7, DENY);
            switch(&t, RED, B, DENY, 8);
            handshake(&t, RED, 4000);
            let relabel = |host: u8| {
                let peer = PeerRecord { identity: 9999, flags: peer_flags::ENDPOINT, tunnel: Addr::ZERO };
                t.set_peer(key(RED, ip(false, host), 32), peer);
                t.bump(RED);
            };
            match change {
                "egress rule" => switch(&t, RED, A, DENY, DENY),
                "ingress rule" => switch(&t, RED, B, DENY, DENY),
                "sender's label" => relabel(A),
                _ => relabel(B),
            }
            let reason = if matches!(change, "egress rule" | "receiver's label") {
                "PolicyEgress"
            } else {
                "PolicyIngress"
            };
            let forth = || tcp_frame(false, (A, 4000), (B, 80), ACK);
            let back = || tcp_frame(false, (B, 80), (A, 4000), ACK);
            for i in 0..4 {
                if (i % 2 == 0) == reply_first {
                    send(&t, RED, B, back()).dropped(reason);
                } else {
                    send(&t, RED, A, forth()).dropped(reason);
                }
            }
        }
    }
}

#[test]
fn an_allowed_connection_never_hiccups_over_changes_that_leave_it_allowed() {
    let t = world();
    handshake(&t, RED, 4000);
    for i in 0..6 {
        if i % 2 == 0 {
            switch(&t, RED, A, ALLOW, DENY)
        } else {
            t.bump(RED)
        }
        send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), ACK)).delivered_to(RED, A);
        send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    }
    let e = t.connections()[0].1;
    assert_eq!(e.decision[0].revision, 4);
    assert_eq!(e.decision[1].generation, 4);
}

#[test]
fn a_decision_under_a_slot_that_is_not_the_endpoints_is_stale_whatever_its_revision() {
    let t = world();
    handshake(&t, RED, 4000);
    // What a program sees that reads in the middle of the record's change: the new revision beside the old slot.
    change(&t, RED, A, |r| r.revision = 2);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    change(&t, RED, A, |r| r.egress_slot = DENY);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).dropped("PolicyEgress");
}

#[test]
fn a_new_endpoint_with_the_same_address_inherits_no_decision() {
    let t = world();
    handshake(&t, RED, 4000);
    // Same address, same revision and slot number by chance, another id.
    let record = *crate::Tables::endpoint(&t, id(RED, B)).expect("record");
    t.set_endpoint(500, EndpointRecord { ingress_slot: DENY, ..record });
    t.set_endpoint(id(RED, B), EndpointRecord::default());
    t.addresses
        .borrow_mut()
        .insert(AddressKey { vpc: RED, addr: record.ip4 }, AddressRecord { endpoint: 500, flags: 0 });
    t.devices.borrow_mut().insert(ifindex(RED, B), 500);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).dropped("PolicyIngress");
}

#[test]
fn a_reset_or_a_stray_segment_without_a_connection() {
    let t = world();
    send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), RST)).dropped("ConntrackInvalid");
    send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), RST | ACK)).dropped("ConntrackInvalid");
    // Mid-stream: new in its own direction.
    send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), ACK)).delivered_to(RED, B);
    assert!(t.connections()[0].1.flags & ct_flags::MIDSTREAM != 0);
    switch(&t, RED, B, DENY, ALLOW);
    send(&t, RED, B, tcp_frame(false, (B, 7), (A, 8), ACK)).dropped("PolicyEgress");
}

#[test]
fn connections_end_and_their_ports_begin_anew() {
    let t = world();
    handshake(&t, RED, 4000);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), FIN | ACK)).delivered_to(RED, B);
    assert_eq!(t.connections()[0].1.state, ct_state::CLOSING);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), FIN | ACK)).delivered_to(RED, A);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    assert_eq!(t.connections()[0].1.state, ct_state::CLOSED);
    // The same ports, now from the other side: a new connection with its own decisions.
    switch(&t, RED, A, ALLOW, DENY);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), SYN)).dropped("PolicyIngress");
    switch(&t, RED, A, DENY, ALLOW);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), SYN)).delivered_to(RED, A);
    let e = t.connections()[0].1;
    assert_eq!((e.orig_endpoint, e.reply_endpoint, e.state), (id(RED, B), id(RED, A), ct_state::SYN_SENT));
    assert_eq!(e.flags & ct_flags::ORIG_IS_LO, 0);
    assert_eq!(t.counts(), (0, 1));
}

#[test]
fn what_has_ended_gives_back_its_room_and_its_quota() {
    let t = world();
    t.quotas.borrow_mut().insert((RED, 0), QuotaValue { used: 0, limit: 1 });
    t.quotas.borrow_mut().insert((RED, id(RED, B)), QuotaValue { used: 0, limit: 1 });
    for port in 1..6 {
        handshake(&t, RED, port);
        assert_eq!(t.counts(), (1, usize::from(port) - 1));
        assert_eq!(t.quotas.borrow()[&(RED, 0)].used, 1);
        if port % 2 == 0 {
            send(&t, RED, B, tcp_frame(false, (B, 80), (A, port), RST)).delivered_to(RED, A);
        } else {
            send(&t, RED, B, tcp_frame(false, (B, 80), (A, port), FIN | ACK)).delivered_to(RED, A);
            send(&t, RED, A, tcp_frame(false, (A, port), (B, 80), FIN | ACK)).delivered_to(RED, B);
            send(&t, RED, B, tcp_frame(false, (B, 80), (A, port), ACK)).delivered_to(RED, A);
        }
        assert_eq!(t.counts(), (0, usize::from(port)));
        assert_eq!(t.quotas.borrow()[&(RED, 0)].used, 0);
        assert_eq!(t.quotas.borrow()[&(RED, id(RED, B))].used, 0);
    }
    // Refused: it never counted.
    send(&t, RED, A, tcp_frame(false, (A, 9), (B, 80), SYN)).delivered_to(RED, B);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 9), RST | ACK)).delivered_to(RED, A);
    assert_eq!(t.counts(), (0, 6));
    // A reset that was not believed: the connection counts again with its next answer.
    send(&t, RED, A, tcp_frame(false, (A, 2), (B, 80), ACK)).delivered_to(RED, B);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 2), ACK)).delivered_to(RED, A);
    assert_eq!((t.counts(), t.quotas.borrow()[&(RED, 0)].used), ((1, 5), 1));
}

/// The half-open table keeps an established connection's entry for its end: flushed, nothing of the connection may be left.
#[test]
fn what_is_flushed_leaves_nothing_behind_that_lets_packets_through() {
    let t = world();
    switch(&t, RED, A, ALLOW, DENY);
    switch(&t, RED, B, DENY, ALLOW);
    handshake(&t, RED, 4000);
    t.established.borrow_mut().clear();
    assert!(t.connections().is_empty());
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), ACK)).dropped("PolicyEgress");
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), RST)).dropped("ConntrackInvalid");
    let error = quoting(false, B, A, &tcp_frame(false, (A, 4000), (B, 80), ACK)[14..]);
    send(&t, RED, B, error).dropped("ConntrackInvalid");
    assert!(t.connections().is_empty());
    // The same ports begin anew, where the old entry was.
    handshake(&t, RED, 4000);
    assert_eq!(t.counts(), (1, 0));
    assert_eq!(t.connections()[0].1.packets, [2, 1]);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), RST)).delivered_to(RED, A);
    assert_eq!((t.counts(), t.connections()[0].1.packets), ((0, 1), [2, 2]));
}

#[test]
fn a_reset_that_was_not_believed_ends_nothing() {
    let t = world();
    handshake(&t, RED, 4000);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), RST)).delivered_to(RED, A);
    assert_eq!(t.connections()[0].1.state, ct_state::CLOSED);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    assert_eq!(t.connections()[0].1.state, ct_state::CLOSING);
}

#[test]
fn both_sides_open_at_once() {
    let t = world();
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), SYN)).delivered_to(RED, B);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), SYN)).delivered_to(RED, A);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), SYN | ACK)).delivered_to(RED, B);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), SYN | ACK)).delivered_to(RED, A);
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).delivered_to(RED, B);
    assert_eq!(t.connections()[0].1.state, ct_state::ESTABLISHED);
}

#[test]
fn dead_entries_are_judged_dead_before_anyone_sweeps_them() {
    for (seconds, alive) in [(7_900, true), (8_100, false)] {
        let t = world();
        switch(&t, RED, B, DENY, ALLOW);
        handshake(&t, RED, 4000);
        t.wait(seconds);
        let fate = send(&t, RED, B, tcp_frame(false, (B, 80), (A, 4000), ACK));
        if alive {
            fate.delivered_to(RED, A)
        } else {
            fate.dropped("PolicyEgress")
        };
    }
    let t = world();
    switch(&t, RED, B, DENY, ALLOW);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
    t.wait(31);
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).dropped("PolicyEgress");
}

#[test]
fn quotas_stop_one_vpc_and_leave_the_others_flows_alone() {
    let t = world();
    handshake(&t, BLUE, 1);
    t.quotas.borrow_mut().insert((RED, 0), QuotaValue { used: 0, limit: 2 });
    for port in [1, 2] {
        handshake(&t, RED, port);
    }
    send(&t, RED, A, tcp_frame(false, (A, 3), (B, 80), SYN)).delivered_to(RED, B);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 3), SYN | ACK)).dropped("ConntrackFull");
    // What is open goes on, in both VPCs, and blue opens more.
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 1), ACK)).delivered_to(RED, A);
    send(&t, BLUE, B, tcp_frame(false, (B, 80), (A, 1), ACK)).delivered_to(BLUE, A);
    handshake(&t, BLUE, 2);
    assert_eq!(t.quotas.borrow()[&(RED, 0)].used, 2);
    // The endpoint's own limit gives back what it took from the VPC's.
    t.quotas.borrow_mut().insert((RED, 0), QuotaValue { used: 0, limit: 9 });
    t.quotas.borrow_mut().insert((RED, id(RED, B)), QuotaValue { used: 4, limit: 4 });
    t.quotas.borrow_mut().insert((RED, id(RED, A)), QuotaValue { used: 0, limit: 4 });
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 3), SYN | ACK)).dropped("ConntrackFull");
    assert_eq!(t.quotas.borrow()[&(RED, 0)].used, 0);
    assert_eq!(t.quotas.borrow()[&(RED, id(RED, A))].used, 0);
    // So does a full table.
    t.quotas.borrow_mut().clear();
    t.quotas.borrow_mut().insert((RED, 0), QuotaValue { used: 0, limit: 0 });
    t.capacity.set(t.counts().0);
    send(&t, RED, B, tcp_frame(false, (B, 80), (A, 3), SYN | ACK)).dropped("ConntrackFull");
    assert_eq!(t.quotas.borrow()[&(RED, 0)].used, 0);
}

/// Every question counted as a connection for three minutes: a busy name server had its quota full, and its next clients
/// were dropped, the probe of its own node among them.
#[test]
fn questions_and_their_answers_fill_no_quota() {
    for v6 in [false, true] {
        let t = world();
        switch(&t, RED, B, DENY, ALLOW);
        t.quotas.borrow_mut().insert((RED, id(RED, B)), QuotaValue { used: 0, limit: 1 });
        let used = || t.quotas.borrow()[&(RED, id(RED, B))].used;
        let ask = |port: u16| udp_frame(v6, (A, port), (B, 53));
        let answer = |port: u16| udp_frame(v6, (B, 53), (A, port));
        for port in 1..=20 {
            // Two questions from one socket, as resolvers ask for both families.
            for _ in 0..2 {
                send(&t, RED, A, ask(port)).delivered_to(RED, B);
            }
            for _ in 0..2 {
                send(&t, RED, B, answer(port)).delivered_to(RED, A);
            }
        }
        assert_eq!((t.counts(), used()), ((0, 20), 0));
        // Who goes on speaking has a connection, whichever side it is; the second is one too many.
        t.wait(3);
        send(&t, RED, B, answer(1)).delivered_to(RED, A);
        assert_eq!((t.counts(), used()), ((1, 19), 1));
        send(&t, RED, A, ask(2)).dropped("ConntrackFull");
        t.wait(100);
        send(&t, RED, B, answer(1)).delivered_to(RED, A);
        // A question that nobody goes on with is forgotten sooner.
        send(&t, RED, B, answer(3)).dropped("PolicyEgress");
    }
}

/// A workload with as many connections as its quota allows failed the probes of its node, which ended it.
#[test]
fn the_nodes_own_connections_are_held_to_no_quota() {
    let t = world();
    for key in [(DEFAULT, 0), (DEFAULT, id(DEFAULT, A))] {
        t.quotas.borrow_mut().insert(key, QuotaValue { used: 3, limit: 3 });
    }
    let (gateway, a): (IpAddr, IpAddr) = ([10, 1, 0, 1].into(), ip(false, A));
    let segment = |src: (IpAddr, u16), dst: (IpAddr, u16), flags| {
        frame(A, &in_ip(src.0, dst.0, 6, 64, &tcp(src, dst, flags, &[])))
    };
    let probe = |flags| segment((gateway, 40_000), (a, 8080), flags);
    let reply = |flags| segment((a, 8080), (gateway, 40_000), flags);
    from_host(&t, DEFAULT, A, probe(SYN)).to_stack();
    send(&t, DEFAULT, A, reply(SYN | ACK)).to_stack();
    from_host(&t, DEFAULT, A, probe(ACK)).to_stack();
    assert_eq!(t.counts(), (1, 0));
    send(&t, DEFAULT, A, reply(RST)).to_stack();
    assert_eq!(t.counts(), (0, 1));
    assert!(t.quotas.borrow().values().all(|q| q.used == 3), "{:?}", t.quotas);
}

#[test]
fn vpcs_with_equal_tuples_share_nothing() {
    let t = world();
    switch(&t, BLUE, B, DENY, DENY);
    handshake(&t, RED, 4000);
    send(&t, BLUE, B, tcp_frame(false, (B, 80), (A, 4000), SYN | ACK)).dropped("PolicyEgress");
    send(&t, BLUE, A, tcp_frame(false, (A, 4000), (B, 80), ACK)).dropped("PolicyIngress");
    assert!(t.connections().iter().all(|(k, _)| k.vpc == RED));
}

/// An ICMP error from `from` to `to` that quotes `packet`.
fn quoting(v6: bool, from: u8, to: u8, packet: &[u8]) -> Vec<u8> {
    let (s, d) = (ip(v6, from), ip(v6, to));
    let (kind, code, protocol) = if v6 { (1, 4, 58) } else { (3, 3, 1) };
    frame(from, &in_ip(s, d, protocol, 64, &icmp(s, d, kind, code, &[&[0; 4][..], packet].concat())))
}

#[test]
fn icmp_errors_pass_when_they_quote_a_connection_and_only_then() {
    for v6 in [false, true] {
        let t = world();
        switch(&t, RED, A, ALLOW, DENY);
        switch(&t, RED, B, DENY, ALLOW);
        let sent = udp_frame(v6, (A, 1), (B, 2));
        let error = |packet: &[u8]| quoting(v6, B, A, packet);
        send(&t, RED, B, error(&sent[14..])).dropped("ConntrackInvalid");
        send(&t, RED, A, sent.clone()).delivered_to(RED, B);
        let before = t.connections();
        send(&t, RED, B, error(&sent[14..])).delivered_to(RED, A);
        // It changes nothing of the connection.
        assert_eq!(t.connections(), before);
        // Another port, another tenant, a packet that A never sent, an error about an error.
        send(&t, RED, B, error(&udp_frame(v6, (A, 1), (B, 3))[14..])).dropped("ConntrackInvalid");
        send(&t, BLUE, B, error(&sent[14..])).dropped("ConntrackInvalid");
        send(&t, RED, B, error(&udp_frame(v6, (FAR, 1), (B, 2))[14..])).dropped("ConntrackInvalid");
        send(&t, RED, B, error(&error(&sent[14..])[14..])).dropped("ConntrackInvalid");
        // Revoked: the error stops with its connection.
        switch(&t, RED, B, DENY, DENY);
        send(&t, RED, B, error(&sent[14..])).dropped("PolicyIngress");
    }
    let t = world();
    let echo = echo_frame(false, A, B, false, 5);
    send(&t, RED, A, echo.clone()).delivered_to(RED, B);
    send(&t, RED, B, quoting(false, B, A, &echo[14..])).delivered_to(RED, A);
    let syn = tcp_frame(true, (A, 1), (B, 2), SYN);
    send(&t, RED, A, syn.clone()).delivered_to(RED, B);
    send(&t, RED, B, quoting(true, B, A, &syn[14..])).delivered_to(RED, A);
}

#[test]
fn stateless_rules_keep_nothing_and_their_replies_are_judged_alone() {
    let t = world();
    let mut rule = entry(0, 17, 0, 0, 5, verdict::ALLOW);
    rule.1.flags = policy_flags::STATELESS;
    let closed = entry(0, 0, 0, 0, 1, verdict::DROP);
    t.set_policy(7, &[rule, closed]);
    // Stateless on both sides: no entry, replies need rules of their own.
    switch(&t, RED, A, 7, DENY);
    switch(&t, RED, B, DENY, 7);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
    assert_eq!(t.counts(), (0, 0));
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).dropped("PolicyEgress");
    switch(&t, RED, B, 7, 7);
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).dropped("PolicyIngress");
    switch(&t, RED, A, 7, 7);
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).delivered_to(RED, A);
    // Stateless at the receiver only: the sender's side has its state, the receiver's reply needs a rule.
    let t = world();
    t.set_policy(7, &[rule, closed]);
    switch(&t, RED, A, ALLOW, DENY);
    switch(&t, RED, B, DENY, 7);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
    assert_eq!(t.counts(), (0, 1));
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).dropped("PolicyEgress");
    switch(&t, RED, B, 7, 7);
    send(&t, RED, B, udp_frame(false, (B, 2), (A, 1))).delivered_to(RED, A);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
}

#[test]
fn a_dry_run_changes_nothing() {
    let t = world();
    handshake(&t, RED, 4000);
    let connections = t.connections();
    let traffic = t.traffic.borrow().clone();
    switch(&t, RED, A, DENY, ALLOW);
    t.dry.set(true);
    let frames = [
        tcp_frame(false, (A, 4000), (B, 80), ACK),
        tcp_frame(false, (A, 4001), (B, 80), SYN),
        udp_frame(true, (A, 1), (REMOTE, 2)),
        echo_frame(false, A, FAR, false, 3),
    ];
    for data in frames {
        let _ = send(&t, RED, A, data);
    }
    assert!(!t.steps.borrow().is_empty());
    assert_eq!(t.connections(), connections);
    assert_eq!(*t.traffic.borrow(), traffic);
    assert!(t.drops.borrow().is_empty() && t.events.borrow().is_empty());
}

#[test]
fn what_was_decided_about_an_address_that_nobody_had_is_forgotten_when_somebody_gets_it() {
    let t = world();
    let open = [entry(6, 0, 0, 0, 9, verdict::DROP), entry(0, 0, 0, 0, 1, verdict::ALLOW)];
    t.set_policy(7, &open);
    switch(&t, RED, A, 7, ALLOW);
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
    // B goes: its address is the subnet's again.
    let (address, peer) = (AddressKey { vpc: RED, addr: addr(ip(false, B)) }, key(RED, ip(false, B), 32));
    let own = t.addresses.borrow_mut().remove(&address).expect("address");
    let record = *crate::Tables::endpoint(&t, id(RED, B)).expect("record");
    t.set_endpoint(id(RED, B), EndpointRecord::default());
    t.remove_peer(&peer);
    t.bump(RED);
    for _ in 0..2 {
        send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).dropped("PolicyEgress");
    }
    // Somebody gets it: nobody had it, so no generation is bumped.
    t.set_endpoint(id(RED, B), record);
    t.addresses.borrow_mut().insert(address, own);
    t.set_peer(
        peer,
        PeerRecord { identity: identity(RED, B), flags: peer_flags::ENDPOINT, tunnel: Addr::ZERO },
    );
    send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).delivered_to(RED, B);
}
