//! Packets that programs make, byte for byte.

use super::*;

fn rejecting() -> FakeTables {
    let t = world();
    switch(&t, RED, B, ALLOW, REJECT);
    t
}

#[test]
fn a_rejected_syn_gets_a_reset_that_acknowledges_it() {
    for v6 in [false, true] {
        for payload in [&b""[..], b"early"] {
            let fate = send(&rejecting(), RED, A, tcp_data(v6, (A, 4000), (B, 80), SYN, payload));
            fate.answered("PolicyIngress", RED, A);
            let data = &fate.bytes.data;
            assert_sound(data);
            let l4 = if v6 { 54 } else { 34 };
            assert_eq!(data.len(), l4 + 20);
            assert_eq!(data[..12], [mac(A), host_mac(A)].concat());
            let (s, d) = if v6 { (22..38, 38..54) } else { (26..30, 30..34) };
            assert_eq!(data[s], octets(ip(v6, B))[..]);
            assert_eq!(data[d], octets(ip(v6, A))[..]);
            let ack = 1001 + payload.len() as u32;
            let expected = [
                &80u16.to_be_bytes()[..],
                &4000u16.to_be_bytes(),
                &[0; 4],
                &ack.to_be_bytes(),
                &[0x50, RST | ACK, 0, 0],
            ]
            .concat();
            assert_eq!(data[l4..l4 + 16], expected);
        }
    }
}

#[test]
fn a_rejected_segment_gets_a_reset_at_the_number_it_acknowledged() {
    let fate = send(&rejecting(), RED, A, tcp_data(false, (A, 4000), (B, 80), ACK, b"x"));
    fate.answered("PolicyIngress", RED, A);
    assert_sound(&fate.bytes.data);
    assert_eq!(fate.bytes.data[38..48], [&5000u32.to_be_bytes()[..], &[0; 4], &[0x50, RST]].concat());
}

#[test]
fn a_reset_of_a_segment_with_options_and_an_offloaded_checksum_is_right_after_the_device() {
    // IPv4 options stay in place; the device sums from the transport header on and writes into the field.
    let (s, d) = (ip(false, A), ip(false, B));
    let segment = tcp((s, 1), (d, 2), SYN, &[]);
    let mut packet = in_ipv4(s, d, 6, 64, 0x4000, &[&[1, 1, 1, 0][..], &segment].concat());
    packet[0] = 0x46;
    packet[10..12].fill(0);
    let sum = checksum(&[&packet[..24]]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let frame = FakeFrame::new(frame(A, &packet), ifindex(RED, A));
    frame.0.borrow_mut().pending = Some(38 + 16);
    let mut fate = run(&rejecting(), hook_from_endpoint, frame);
    fate.answered("PolicyIngress", RED, A);
    let data = &mut fate.bytes.data;
    assert_eq!(data.len(), 38 + 20);
    let filled = checksum(&[&data[38..]]);
    data[54..56].copy_from_slice(&filled.to_be_bytes());
    assert_sound(data);
}

#[test]
fn anything_else_rejected_is_prohibited_by_an_icmp_error_that_quotes_it() {
    for v6 in [false, true] {
        for payload in [0usize, 1, 40] {
            let (s, d) = (ip(v6, A), ip(v6, B));
            let original = in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), &vec![7; payload]));
            let fate = send(&rejecting(), RED, A, frame(A, &original));
            fate.answered("PolicyIngress", RED, A);
            let data = &fate.bytes.data;
            assert_sound(data);
            let header = if v6 { 40 } else { 20 };
            let icmp = 14 + header;
            assert_eq!(data[icmp..icmp + 2], if v6 { [1, 1] } else { [3, 13] });
            // The gateway speaks, to the sender, and shows the start of what it refused.
            let gateway: IpAddr = if v6 { "fd00:1::1" } else { "10.1.0.1" }.parse().expect("address");
            let (from, to) = if v6 { (22..38, 38..54) } else { (26..30, 30..34) };
            assert_eq!(data[from], octets(gateway)[..]);
            assert_eq!(data[to], octets(s)[..]);
            let quote = &data[icmp + 8..];
            let shown = (header + 8 + payload).min(header + 20) & !3;
            assert_eq!(quote, &original[..shown]);
        }
    }
}

#[test]
fn an_error_that_quotes_an_offloaded_checksum_is_right_after_the_device() {
    for v6 in [false, true] {
        let (s, d) = (ip(v6, A), ip(v6, B));
        let mut segment = udp((s, 1), (d, 2), &[3; 40]);
        // What the stack leaves for the device: the pseudo header's sum.
        let sum = !checksum(&[&pseudo(s, d, 17, segment.len())]);
        segment[6..8].copy_from_slice(&sum.to_be_bytes());
        let l4 = if v6 { 54 } else { 34 };
        let frame = FakeFrame::new(frame(A, &in_ip(s, d, 17, 64, &segment)), ifindex(RED, A));
        frame.0.borrow_mut().pending = Some(l4 + 6);
        let mut fate = run(&rejecting(), hook_from_endpoint, frame);
        fate.answered("PolicyIngress", RED, A);
        let field = fate.bytes.pending.expect("pending") as usize;
        let data = &mut fate.bytes.data;
        let filled = checksum(&[&data[field - 6..]]);
        data[field..field + 2].copy_from_slice(&filled.to_be_bytes());
        assert_sound(data);
    }
}

#[test]
fn nothing_is_answered_to_resets_errors_and_groups() {
    let t = rejecting();
    send(&t, RED, A, tcp_frame(false, (A, 1), (B, 2), RST)).dropped("PolicyIngress");
    let mut group = udp_frame(false, (A, 1), (B, 2));
    group[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 1]);
    send(&t, RED, A, group).dropped("PolicyIngress");
    let (s, d) = (ip(false, A), ip(false, B));
    // An error within a connection that is now rejected.
    let t = world();
    let sent = udp_frame(false, (A, 1), (B, 2));
    send(&t, RED, A, sent.clone()).delivered_to(RED, B);
    switch(&t, RED, B, ALLOW, REJECT);
    let error = icmp(d, s, 3, 3, &[&[0; 4][..], &sent[14..]].concat());
    send(&t, RED, B, frame(B, &in_ip(d, s, 1, 64, &error))).dropped("PolicyIngress");
}

#[test]
fn answers_are_limited_per_endpoint() {
    let t = rejecting();
    let mut config = *crate::Tables::config(&t).expect("config");
    config.answer_rate = 2;
    t.set_config(config);
    let answered = (0..5)
        .filter(|_| send(&t, RED, A, udp_frame(false, (A, 1), (B, 2))).bytes.redirect.is_some())
        .count();
    assert_eq!(answered, 2);
    assert_eq!(t.dropped()["PolicyIngress"], 5);
}

#[test]
fn the_gateway_answers_echo_where_policy_lets_it_be_asked() {
    let t = world();
    for v6 in [false, true] {
        let (s, d): (IpAddr, IpAddr) =
            (ip(v6, A), if v6 { "fd00:1::1" } else { "10.1.0.1" }.parse().expect("address"));
        let request = icmp(s, d, if v6 { 128 } else { 8 }, 0, &[0, 9, 0, 1, 5, 6, 7]);
        let protocol = if v6 { 58 } else { 1 };
        let fate = send(&t, RED, A, frame(A, &in_ip(s, d, protocol, 64, &request)));
        assert_eq!(fate.bytes.redirect, Some(Redirect::Peer(ifindex(RED, A))), "{fate:?}");
        assert_sound(&fate.bytes.data);
        let reply = icmp(d, s, if v6 { 129 } else { 0 }, 0, &[0, 9, 0, 1, 5, 6, 7]);
        let l4 = if v6 { 54 } else { 34 };
        assert_eq!(fate.bytes.data[l4..], reply);
        // Another question to it leads nowhere; in the default VPC the stack answers.
        send(&t, RED, A, frame(A, &in_ip(s, d, 17, 64, &udp((s, 1), (d, 2), b""))))
            .dropped("ForeignVpcToHost");
        send(&t, DEFAULT, A, frame(A, &in_ip(s, d, protocol, 64, &request))).to_stack();
        switch(&t, RED, A, DENY, ALLOW);
        send(&t, RED, A, frame(A, &in_ip(s, d, protocol, 64, &request))).dropped("PolicyEgress");
        switch(&t, RED, A, ALLOW, ALLOW);
    }
}

#[test]
fn a_reject_of_the_hosts_packet_goes_back_through_the_stack_under_a_mark() {
    let t = world();
    change(&t, DEFAULT, A, |r| r.flags |= endpoint_flags::JUDGE_HOST);
    switch(&t, DEFAULT, A, ALLOW, REJECT);
    let (gateway, a): (IpAddr, IpAddr) = ([10, 1, 0, 1].into(), ip(false, A));
    let mut data = frame(A, &in_ip(gateway, a, 6, 64, &tcp((gateway, 9), (a, 80), SYN, &[])));
    data[..6].copy_from_slice(&mac(A));
    data[6..12].copy_from_slice(&host_mac(A));
    let fate = from_host(&t, DEFAULT, A, data);
    assert_eq!(fate.reasons, ["PolicyIngress"]);
    assert_eq!(fate.bytes.redirect, Some(Redirect::In(ifindex(DEFAULT, A))));
    assert_eq!(fate.bytes.data[..12], [host_mac(A), mac(A)].concat());
    assert_sound(&fate.bytes.data);
    // from_endpoint lets it through, and takes the mark off.
    let again = FakeFrame::new(fate.bytes.data, ifindex(DEFAULT, A));
    again.0.borrow_mut().mark = fate.bytes.mark;
    let fate = run(&t, hook_from_endpoint, again);
    fate.to_stack();
    assert_eq!(fate.bytes.mark, 0);
    // Without the mark it is a workload's packet like any other.
    let (s, d) = (ip(false, A), gateway);
    send(&t, DEFAULT, A, frame(A, &in_ip(s, d, 6, 64, &tcp((s, 80), (d, 9), RST | ACK, &[]))))
        .dropped("ConntrackInvalid");
}

/// A first fragment has its transport header, so who sent it can be told; a later one has not.
#[test]
fn a_rejected_first_fragment_is_answered() {
    let (s, d) = (ip(false, A), ip(false, B));
    let segment = tcp((s, 4000), (d, 80), SYN, &[]);
    let first = |protocol, payload: &[u8]| frame(A, &in_ipv4(s, d, protocol, 64, 0x2000, payload));
    let fate = send(&rejecting(), RED, A, first(6, &[&segment[..], &[7; 12]].concat()));
    fate.answered("PolicyIngress", RED, A);
    assert_sound(&fate.bytes.data);
    // The answer itself is no fragment.
    assert_eq!(fate.bytes.data[20..22], [0x40, 0]);
    assert_eq!(fate.bytes.data[47], RST | ACK);
    let datagram = udp((s, 1), (d, 2), &[7; 40]);
    let fate = send(&rejecting(), RED, A, first(17, &datagram[..32]));
    fate.answered("PolicyIngress", RED, A);
    assert_eq!(fate.bytes.data[34..36], [3, 13]);
    assert_eq!(fate.bytes.data[42 + 6..42 + 8], [0x20, 0], "quoted as it came");
    let later = frame(A, &in_ipv4(s, d, 17, 64, 0x2004, &[7; 16]));
    let t = rejecting();
    send(&t, RED, A, first(17, &datagram[..32]));
    send(&t, RED, A, later).dropped("PolicyIngress");
    // IPv6: an error, but no reset, which the fragment's own header would make one of.
    let (s, d) = (ip(true, A), ip(true, B));
    let fragment = |next: u8, payload: &[u8]| {
        frame(A, &in_ip(s, d, 44, 64, &[&[next, 0, 0, 1, 0, 0, 0, 9][..], payload].concat()))
    };
    let fate = send(&rejecting(), RED, A, fragment(17, &udp((s, 1), (d, 2), &[7; 40])[..32]));
    fate.answered("PolicyIngress", RED, A);
    assert_eq!(fate.bytes.data[54..56], [1, 1]);
    let segment = [&tcp((s, 4000), (d, 80), SYN, &[])[..], &[7; 12]].concat();
    send(&rejecting(), RED, A, fragment(6, &segment)).dropped("PolicyIngress");
}
