//! Packets of open connections that the uplink takes out of their tunnel.

use flowloom_bpf_abi::{config_flags, hook, mark};

use super::*;
use crate::{Tables as _, TunnelKey, from_overlay, from_uplink};

const NODE: [u8; 4] = [198, 51, 100, 12];
const HERE: [u8; 4] = [198, 51, 100, 11];
/// Offsets in a tunnel's packet.
const OUTER_IP: usize = 14;
const OUTER_UDP: usize = OUTER_IP + 20;
const VXLAN: usize = OUTER_UDP + 8;
const INNER: usize = VXLAN + 8;

/// [`world`] with the uplink as receiver.
fn receiving() -> FakeTables {
    let t = world();
    configure(&t, |c| {
        c.node4 = Addr::v4(HERE);
        c.flags |= config_flags::RECEIVE_AT_UPLINK;
    });
    t
}

fn configure(t: &FakeTables, change: impl FnOnce(&mut NodeConfig)) {
    let mut config = *t.config().expect("config");
    change(&mut config);
    t.set_config(config);
}

/// A tunnel's packet around a frame.
fn wrap(vni: u32, from: [u8; 4], inner: &[u8]) -> Vec<u8> {
    let v = vni.to_be_bytes();
    let body = [&[8, 0, 0, 0, v[1], v[2], v[3], 0][..], inner].concat();
    let (s, d) = (from.into(), HERE.into());
    let mut datagram = udp((s, 40_000), (d, 4789), &body);
    datagram[6..8].fill(0);
    frame(REMOTE, &in_ip(s, d, 17, 64, &datagram))
}

/// Writes bytes of the outer IPv4 header and makes its checksum right again.
fn outer(data: &mut [u8], at: usize, bytes: &[u8]) {
    data[OUTER_IP + at..OUTER_IP + at + bytes.len()].copy_from_slice(bytes);
    data[OUTER_IP + 10..OUTER_IP + 12].fill(0);
    let sum = checksum(&[&data[OUTER_IP..OUTER_UDP]]);
    data[OUTER_IP + 10..OUTER_IP + 12].copy_from_slice(&sum.to_be_bytes());
}

fn by_uplink(t: &FakeTables, data: Vec<u8>, change: impl FnOnce(&mut Bytes)) -> Fate {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        from_uplink(f, t, p)
    }
    let frame = FakeFrame::new(data, UPLINK);
    change(&mut frame.0.borrow_mut());
    run(t, hook, frame)
}

fn by_device(t: &FakeTables, data: Vec<u8>, gso_size: u32) -> Fate {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        from_overlay(f, t, p)
    }
    let frame = FakeFrame::new(data, OVERLAY);
    frame.0.borrow_mut().from_tunnel = Some(TunnelKey { vni: RED, remote: Addr::v4(NODE) });
    frame.0.borrow_mut().gso_size = gso_size;
    run(t, hook, frame)
}

/// A workload asks one on the other node; what it says comes back.
fn open(t: &FakeTables, v6: bool) {
    let (out, back) = ((A, 5), (REMOTE, 80));
    send(t, RED, A, tcp_frame(v6, out, back, SYN)).tunnelled(RED);
    by_device(t, tcp_frame(v6, back, out, SYN | ACK), 0).delivered_to(RED, A);
    send(t, RED, A, tcp_frame(v6, out, back, ACK)).tunnelled(RED);
}

/// An answer of that connection.
fn answer(v6: bool) -> Vec<u8> {
    tcp_data(v6, (REMOTE, 80), (A, 5), ACK, b"an answer")
}

/// Left as it came, for the stack.
#[track_caller]
fn left(t: &FakeTables, data: Vec<u8>, change: impl FnOnce(&mut Bytes)) {
    let fate = by_uplink(t, data.clone(), change);
    fate.to_stack();
    assert_eq!(fate.bytes.data, data);
    assert_eq!(fate.bytes.redirect, None);
}

#[track_caller]
fn taken(t: &FakeTables, v6: bool) {
    let fate = by_uplink(t, wrap(RED, NODE, &answer(v6)), |_| ());
    fate.delivered_to(RED, A);
    assert_eq!(
        fate.bytes.data[12..],
        answer(v6)[12..],
        "what the tunnel carried, and the hops that it had left"
    );
    assert_sound(&fate.bytes.data);
}

#[test]
fn an_open_connection_is_received_at_the_uplink_as_by_the_tunnels_device() {
    for v6 in [false, true] {
        let t = receiving();
        // Nobody has asked.
        left(&t, wrap(RED, NODE, &answer(v6)), |_| ());
        open(&t, v6);
        let before = t.traffic.borrow()[&id(RED, A)].ingress;
        taken(&t, v6);
        let after = t.traffic.borrow()[&id(RED, A)].ingress;
        assert_eq!([after[0] - before[0], after[1] - before[1]], [1, answer(v6).len() as u64]);
        // Where the checksum is still to be filled in.
        let at = (INNER + 14 + if v6 { 40 } else { 20 } + 16) as u32;
        let fate = by_uplink(&t, wrap(RED, NODE, &answer(v6)), |b| b.pending = Some(at));
        assert_eq!(fate.delivered_to(RED, A).bytes.pending, Some(at - 50));
        // The policy is asked here, too: what it drops goes no further, what it rejects is answered through the tunnel.
        switch(&t, RED, A, DENY, DENY);
        by_uplink(&t, wrap(RED, NODE, &answer(v6)), |_| ()).dropped("PolicyEgress");
        assert_eq!(t.events.borrow().last().map(|e| e.hook), Some(hook::FROM_OVERLAY));
        // A new decision forgets the answers' way: until it is found again, the device receives.
        left(&t, wrap(RED, NODE, &answer(v6)), |_| ());
        by_device(&t, answer(v6), 0).dropped("PolicyEgress");
        let t = receiving();
        open(&t, v6);
        switch(&t, RED, A, REJECT, REJECT);
        let fate = by_uplink(&t, wrap(RED, NODE, &answer(v6)), |_| ());
        assert_eq!(fate.reasons, ["PolicyEgress"]);
        assert_eq!(fate.bytes.redirect, Some(Redirect::Out(OVERLAY)));
        assert_eq!(fate.bytes.to_tunnel, Some(TunnelKey { vni: RED, remote: Addr::v4(NODE) }));
        assert_eq!(fate.bytes.mark, mark::JUDGED);
        assert_sound(&fate.bytes.data);
    }
}

#[test]
fn what_the_uplink_does_not_take_is_left_to_the_device_as_it_came() {
    for v6 in [false, true] {
        let t = receiving();
        open(&t, v6);
        let plain = || wrap(RED, NODE, &answer(v6));
        let odd = |at: usize, bytes: &[u8]| {
            let mut data = plain();
            data[at..at + bytes.len()].copy_from_slice(bytes);
            data
        };
        let of_outer = |at: usize, bytes: &[u8]| {
            let mut data = plain();
            outer(&mut data, at, bytes);
            data
        };
        let mut longer = plain();
        longer.push(0);
        let options = {
            let (s, d) = (NODE.into(), HERE.into());
            let mut packet = in_ip(s, d, 17, 64, &[&[1; 4][..], &plain()[OUTER_UDP..]].concat());
            packet[0] = 0x46;
            packet[10..12].fill(0);
            let sum = checksum(&[&packet[..24]]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            frame(REMOTE, &packet)
        };
        let fragments = |field: u16| of_outer(6, &field.to_be_bytes());
        let total = (plain().len() - 14) as u16;
        for (what, data) in [
            ("another node's tunnel", wrap(RED, [198, 51, 100, 13], &answer(v6))),
            ("another VPC", wrap(BLUE, NODE, &answer(v6))),
            ("no VPC", wrap(777, NODE, &answer(v6))),
            ("another connection", wrap(RED, NODE, &tcp_frame(v6, (REMOTE, 80), (A, 6), ACK))),
            ("a source that is somebody else's", wrap(RED, NODE, &tcp_frame(v6, (77, 80), (A, 5), ACK))),
            ("an echo", wrap(RED, NODE, &echo_frame(v6, REMOTE, A, true, 5))),
            ("a wrong header checksum", odd(OUTER_IP + 10, &[0, 0])),
            ("a checksum of the datagram", odd(OUTER_UDP + 6, &[1, 2])),
            ("a first fragment", fragments(0x2000)),
            ("a later fragment", fragments(1)),
            ("options", options),
            ("another port", odd(OUTER_UDP + 2, &[0x12, 0xb6])),
            ("another address", of_outer(16, &[198, 51, 100, 14])),
            ("a shorter packet than its header says", of_outer(2, &(total + 1).to_be_bytes())),
            ("a longer one", longer),
            ("a shorter datagram", odd(OUTER_UDP + 4, &(total - 21).to_be_bytes())),
            ("no identifier", odd(VXLAN, &[0])),
            ("a flag that nobody knows", odd(VXLAN, &[0x0c])),
            ("reserved bits", odd(VXLAN + 1, &[0, 0, 1])),
            ("a reserved byte", odd(VXLAN + 7, &[1])),
            ("ARP inside", odd(INNER + 12, &[8, 6])),
            ("a tag inside", odd(INNER + 12, &[0x81, 0])),
            ("an inner version of no family", odd(INNER + 14, &[0x75])),
            ("another inner protocol", odd(INNER + 14 + if v6 { 6 } else { 9 }, &[132])),
        ] {
            eprintln!("{what}");
            left(&t, data, |_| ());
        }
        if !v6 {
            eprintln!("inner options, inner fragments");
            left(&t, odd(INNER + 14, &[0x46]), |_| ());
            left(&t, odd(INNER + 14 + 6, &[0x20, 0]), |_| ());
            left(&t, odd(INNER + 14 + 6, &[0, 1]), |_| ());
        }
        left(&t, plain(), |b| b.for_another = true);
        left(&t, plain(), |b| b.tagged = true);
        configure(&t, |c| c.flags = 0);
        left(&t, plain(), |_| ());
        configure(&t, |c| c.flags = config_flags::RECEIVE_AT_UPLINK);
        taken(&t, v6);
        // The answers' way is known in the generation that it was asked in.
        let vpc = *(&t).vpc(RED).expect("vpc");
        t.set_vpc(RED, VpcRecord { generation: vpc.generation + 1, ..vpc });
        left(&t, plain(), |_| ());
        by_device(&t, answer(v6), 0).delivered_to(RED, A);
        send(&t, RED, A, tcp_frame(v6, (A, 5), (REMOTE, 80), ACK)).tunnelled(RED);
        taken(&t, v6);
    }
}

/// What waits in the device's queue is not overtaken by what came later.
#[test]
fn a_direction_that_the_device_has_had_segments_of_stays_with_it() {
    type Step = fn(&FakeTables);
    let first: [Step; 3] = [
        |t| left(t, wrap(RED, NODE, &answer(false)), |b| b.gso_size = 1400),
        // Congestion on the way has to be marked inside.
        |t| {
            let mut marked = wrap(RED, NODE, &answer(false));
            outer(&mut marked, 1, &[3]);
            left(t, marked, |_| ());
        },
        |t| {
            by_device(t, answer(false), 1400).delivered_to(RED, A);
        },
    ];
    for segments in first {
        let t = receiving();
        open(&t, false);
        // A trace changes nothing.
        t.dry.set(true);
        segments(&t);
        t.dry.set(false);
        taken(&t, false);
        segments(&t);
        left(&t, wrap(RED, NODE, &answer(false)), |_| ());
        let entry = t.established.borrow().values().next().expect("entry").value();
        assert_eq!(entry.by_device, [0, 1]);
        // The same ports, another connection.
        by_device(&t, tcp_frame(false, (REMOTE, 80), (A, 5), RST | ACK), 0).delivered_to(RED, A);
        open(&t, false);
        taken(&t, false);
    }
}
