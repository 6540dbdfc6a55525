//! Decisions: precedence, prefixes, the truth table of semantics.md section 3 as compiled entries.

use flowloom_bpf_abi::policy_flags;

use super::*;

/// Whether B lets A's packet in under these ingress entries.
fn passes(entries: &[(PolicyKey, PolicyValue)], data: Vec<u8>) -> bool {
    let t = world();
    t.set_policy(7, entries);
    switch(&t, RED, B, ALLOW, 7);
    send(&t, RED, A, data).bytes.redirect.is_some()
}

fn tcp_to(port: u16) -> Vec<u8> {
    tcp_frame(false, (A, 40_000), (B, port), SYN)
}

#[test]
fn the_higher_precedence_wins_between_exact_and_any_identity() {
    let a = identity(RED, A);
    for (exact, any, expected) in [(20, 10, true), (10, 20, false)] {
        let entries = [entry(a, 0, 0, 0, exact, verdict::ALLOW), entry(0, 0, 0, 0, any, verdict::DROP)];
        assert_eq!(passes(&entries, tcp_to(80)), expected);
    }
    // A deny of any identity on a port beats an older allow of the identity on every port, whatever the prefix lengths say.
    let entries = [entry(a, 6, 80, 16, 10, verdict::ALLOW), entry(0, 0, 0, 0, 20, verdict::DROP)];
    assert!(!passes(&entries, tcp_to(80)));
    // Someone else's entry says nothing.
    assert!(!passes(
        &[entry(a + 1, 0, 0, 0, 9, verdict::ALLOW), entry(0, 0, 0, 0, 1, verdict::DROP)],
        tcp_to(80)
    ));
}

#[test]
fn the_truth_table_as_a_compiler_writes_it() {
    let a = identity(RED, A);
    let (allow, drop) = (verdict::ALLOW, verdict::DROP);
    let default = entry(0, 0, 0, 0, 1, drop);
    // Priority beats specificity; deny first at equal priority; tier beats priority: one deciding entry for the identity.
    assert!(passes(&[entry(a, 0, 0, 0, 300, allow), default], tcp_to(80)));
    assert!(!passes(&[entry(a, 0, 0, 0, 300, drop), default], tcp_to(80)));
    // drop tcp/443 before allow tcp/80-444, as port prefixes.
    let mut entries = vec![default, entry(0, 6, 443, 16, 200, drop)];
    for (port, bits) in [
        (80, 12),
        (96, 11),
        (128, 9),
        (256, 9),
        (384, 11),
        (416, 12),
        (432, 13),
        (440, 15),
        (442, 16),
        (444, 16),
    ] {
        entries.push(entry(0, 6, port, bits, 100, allow));
    }
    for (port, expected) in [
        (79, false),
        (80, true),
        (255, true),
        (256, true),
        (442, true),
        (443, false),
        (444, true),
        (445, false),
    ] {
        assert_eq!(passes(&entries, tcp_to(port)), expected, "{port}");
    }
    // Drop tcp before allow any protocol.
    let entries = [entry(0, 6, 0, 0, 200, drop), entry(0, 0, 0, 0, 100, allow)];
    assert!(!passes(&entries, tcp_to(80)));
    assert!(passes(&entries, udp_frame(false, (A, 1), (B, 80))));
    assert!(passes(&entries, echo_frame(false, A, B, false, 1)));
    // Nothing selects it: open. One group without a rule: closed.
    assert!(passes(&[entry(0, 0, 0, 0, 1, allow)], tcp_to(80)));
    assert!(!passes(&[default], tcp_to(80)));
}

#[test]
fn icmp_is_judged_by_type_and_code_and_each_family_by_its_own_number() {
    let (allow, drop) = (verdict::ALLOW, verdict::DROP);
    for v6 in [false, true] {
        let (protocol, kind) = if v6 { (58, 128u16) } else { (1, 8) };
        let echo = || echo_frame(v6, A, B, false, 1);
        let closed = entry(0, 0, 0, 0, 1, drop);
        assert!(passes(&[entry(0, protocol, kind << 8, 8, 9, allow), closed], echo()));
        assert!(passes(&[entry(0, protocol, kind << 8, 16, 9, allow), closed], echo()));
        assert!(!passes(&[entry(0, protocol, kind << 8 | 1, 16, 9, allow), closed], echo()));
        assert!(!passes(&[entry(0, if v6 { 1 } else { 58 }, kind << 8, 8, 9, allow), closed], echo()));
        // A message of another type rides on no echo's connection.
        let t = world();
        t.set_policy(7, &[entry(0, protocol, kind << 8, 8, 9, allow), closed]);
        switch(&t, RED, B, ALLOW, 7);
        send(&t, RED, A, echo()).delivered_to(RED, B);
        let (s, d) = (ip(v6, A), ip(v6, B));
        let other = icmp(s, d, if v6 { 139 } else { 13 }, 0, &[0, 1, 0, 1, 0, 0, 0, 0]);
        send(&t, RED, A, frame(A, &in_ip(s, d, protocol, 64, &other))).dropped("PolicyIngress");
    }
}

#[test]
fn protocols_without_ports_match_any_protocol_and_their_own_number() {
    let (allow, drop) = (verdict::ALLOW, verdict::DROP);
    let (s, d) = (ip(false, A), ip(false, B));
    let gre = || frame(A, &in_ip(s, d, 47, 64, &[0; 20]));
    assert!(passes(&[entry(0, 0, 0, 0, 1, allow)], gre()));
    assert!(passes(&[entry(0, 47, 0, 0, 2, allow), entry(0, 0, 0, 0, 1, drop)], gre()));
    assert!(!passes(&[entry(0, 6, 0, 0, 2, allow), entry(0, 0, 0, 0, 1, drop)], gre()));
    let sctp = |port: u16| {
        let body = [&[0, 9][..], &port.to_be_bytes(), &[0; 20]].concat();
        frame(A, &in_ip(s, d, 132, 64, &body))
    };
    let rule = [entry(0, 132, 3868, 16, 2, allow), entry(0, 0, 0, 0, 1, drop)];
    assert!(passes(&rule, sctp(3868)));
    assert!(!passes(&rule, sctp(3869)));
}

#[test]
fn both_sides_judge_and_neither_stands_in_for_the_other() {
    let data = || tcp_to(80);
    for (egress, ingress, reason) in
        [(ALLOW, DENY, Some("PolicyIngress")), (DENY, ALLOW, Some("PolicyEgress")), (ALLOW, ALLOW, None)]
    {
        let t = world();
        switch(&t, RED, A, egress, DENY);
        switch(&t, RED, B, DENY, ingress);
        for _ in 0..3 {
            let fate = send(&t, RED, A, data());
            match reason {
                Some(reason) => fate.dropped(reason),
                None => fate.delivered_to(RED, B),
            };
        }
        assert_eq!(t.counts(), (0, usize::from(reason.is_none())));
    }
}

#[test]
fn logged_decisions_and_drops_are_told_once_per_packet_with_their_rule() {
    let t = world();
    let mut rule = entry(0, 0, 0, 0, 77, verdict::ALLOW);
    rule.1.flags = policy_flags::LOG;
    t.set_policy(7, &[rule]);
    switch(&t, RED, B, ALLOW, 7);
    send(&t, RED, A, tcp_to(80)).delivered_to(RED, B);
    let events = t.events.take();
    assert_eq!(events.len(), 1);
    let e = events[0];
    assert_eq!((e.kind, e.rule, e.verdict, e.direction), (1, 77, verdict::ALLOW, 1));
    assert_eq!((e.vpc, e.endpoint, e.peer_endpoint), (RED, id(RED, B), id(RED, A)));
    assert_eq!((e.src_identity, e.dst_identity), (identity(RED, A), identity(RED, B)));
    assert_eq!(
        (e.src, e.dst, e.dport, e.protocol, e.family),
        (addr(ip(false, A)), addr(ip(false, B)), [0, 80], 6, 4)
    );
    assert_eq!(t.hits.borrow()[&77].packets, 1);
    // The connection goes on: no second word about it.
    send(&t, RED, A, tcp_frame(false, (A, 40_000), (B, 80), ACK)).delivered_to(RED, B);
    assert!(t.events.take().is_empty());
    switch(&t, RED, A, DENY, ALLOW);
    send(&t, RED, A, tcp_to(81)).dropped("PolicyEgress");
    let e = t.events.take()[0];
    assert_eq!((e.kind, e.reason, e.verdict, e.direction, e.endpoint), (2, 14, verdict::DROP, 0, id(RED, A)));
}

#[test]
fn events_of_one_endpoint_and_reason_are_limited_and_the_loss_is_told() {
    let t = world();
    let mut config = *crate::Tables::config(&t).expect("config");
    config.event_rate = 3;
    t.set_config(config);
    switch(&t, RED, A, DENY, ALLOW);
    for _ in 0..10 {
        send(&t, RED, A, tcp_to(80)).dropped("PolicyEgress");
    }
    assert_eq!(t.events.take().len(), 3);
    // Another endpoint's, another reason's bucket is its own.
    switch(&t, RED, B, DENY, ALLOW);
    send(&t, RED, B, tcp_frame(false, (B, 1), (A, 2), SYN)).dropped("PolicyEgress");
    send(&t, RED, A, udp_frame(false, (B, 1), (FAR, 2))).dropped("SpoofedSource");
    assert_eq!(t.events.take().len(), 2);
    t.wait(1);
    send(&t, RED, A, tcp_to(80)).dropped("PolicyEgress");
    assert_eq!(t.events.take()[0].lost, 7);
}
