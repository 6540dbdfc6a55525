//! ICMP errors about services' connections: each end hears about the addresses and ports that it used itself.

use std::net::IpAddr;

use flowloom_bpf_abi::Addr;

use super::services::{
    client, hook_from_overlay, hook_from_uplink, hook_to_uplink, node, packet, to_vip, tuple, vip,
    with_node_port, with_service,
};
use super::*;

type End = (IpAddr, u16);

/// A router between.
fn router(v6: bool) -> IpAddr {
    if v6 { [0xfd99, 0, 0, 0, 0, 0, 0, 0xfe].into() } else { [198, 51, 100, 254].into() }
}

/// "Too big for 1300" from `from`, about a packet that was sent from `src` to `dst`.
fn too_big(from: IpAddr, protocol: u8, src: End, dst: End) -> Vec<u8> {
    let segment = if protocol == 6 { tcp(src, dst, ACK, b"x") } else { udp(src, dst, b"x") };
    let quoted = in_ip(src.0, dst.0, protocol, 60, &segment);
    let mtu = [0, 0, (1300u16 >> 8) as u8, (1300u16 & 255) as u8];
    let (kind, code, icmp_protocol) = if from.is_ipv4() { (3, 4, 1) } else { (2, 0, 58) };
    let message = icmp(from, src.0, kind, code, &[&mtu[..], &quoted].concat());
    frame(A, &in_ip(from, src.0, icmp_protocol, 64, &message))
}

/// Source and destination of an ICMP error, and of what it quotes; every checksum but the quoted segment's is right, and the MTU is there.
#[track_caller]
fn error(data: &[u8]) -> (IpAddr, IpAddr, End, End) {
    assert_sound(data);
    let outer = &data[14..];
    let header = if outer[0] >> 4 == 4 { 20 } else { 40 };
    let addresses = |packet: &[u8]| -> (IpAddr, IpAddr) {
        if header == 20 {
            let at = |i: usize| <[u8; 4]>::try_from(&packet[i..i + 4]).expect("four").into();
            (at(12), at(16))
        } else {
            let at = |i: usize| <[u8; 16]>::try_from(&packet[i..i + 16]).expect("sixteen").into();
            (at(8), at(24))
        }
    };
    assert_eq!(outer[header + 6..header + 8], 1300u16.to_be_bytes());
    let inner = &outer[header + 8..];
    if header == 20 {
        assert_eq!(checksum(&[&inner[..20]]), 0, "quoted header");
    }
    let (from, to) = addresses(outer);
    let (src, dst) = addresses(inner);
    let port = |i: usize| u16::from_be_bytes([inner[header + i], inner[header + i + 1]]);
    (from, to, (src, port(0)), (dst, port(2)))
}

fn through_tunnel(data: Vec<u8>) -> FakeFrame {
    let f = FakeFrame::new(data, OVERLAY);
    f.0.borrow_mut().from_tunnel =
        Some(crate::TunnelKey { vni: DEFAULT, remote: Addr::v4([198, 51, 100, 12]) });
    f
}

const CASES: [(bool, u8, u16); 4] =
    [(false, 6, 30_080), (true, 6, 30_080), (false, 17, 30_053), (true, 17, 30_053)];

#[test]
fn a_client_behind_this_nodes_address_hears_that_its_packet_was_too_big() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(ip(v6, REMOTE), 8080)], false);
        let asked = packet(protocol, (client(v6), 5000), (node(v6), port), SYN);
        let out = run(&t, hook_from_uplink, FakeFrame::new(asked, UPLINK));
        let own = tuple(&out.bytes.data).1;
        let flows = t.flows.borrow().clone();
        t.wait(5);
        // From the backend's node through the tunnel, from a router on the way without.
        for (from, tunnel) in [(ip(v6, REMOTE), true), (router(v6), false)] {
            let data = too_big(from, protocol, (node(v6), own), (ip(v6, REMOTE), 8080));
            let out = if tunnel {
                run(&t, hook_from_overlay, through_tunnel(data))
            } else {
                run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK))
            };
            assert_eq!(out.bytes.redirect, Some(Redirect::Neighbour(UPLINK)), "{out:?}");
            let expected = (node(v6), client(v6), (client(v6), 5000), (node(v6), port));
            assert_eq!(error(&out.bytes.data), expected);
        }
        // About another port, or another backend: none of the client's business.
        for (sport, dport) in [(own ^ 1, 8080), (own, 8081)] {
            let data = too_big(router(v6), protocol, (node(v6), sport), (ip(v6, REMOTE), dport));
            let out = run(&t, hook_from_uplink, FakeFrame::new(data.clone(), UPLINK));
            out.to_stack();
            assert_eq!(out.bytes.data, data);
        }
        assert_eq!(*t.flows.borrow(), flows, "an error keeps no flow alive");
    }
}

#[test]
fn a_backend_of_another_node_hears_that_its_answer_was_too_big() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(ip(v6, REMOTE), 8080)], false);
        let asked = packet(protocol, (client(v6), 5000), (node(v6), port), SYN);
        let out = run(&t, hook_from_uplink, FakeFrame::new(asked, UPLINK));
        let own = tuple(&out.bytes.data).1;
        let data = too_big(router(v6), protocol, (node(v6), port), (client(v6), 5000));
        let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
        out.tunnelled(DEFAULT);
        // The other node takes nothing from strangers: this one speaks.
        let expected = (node(v6), ip(v6, REMOTE), (ip(v6, REMOTE), 8080), (node(v6), own));
        assert_eq!(error(&out.bytes.data), expected);
        let data = too_big(router(v6), protocol, (node(v6), port), (client(v6), 5001));
        let out = run(&t, hook_from_uplink, FakeFrame::new(data.clone(), UPLINK));
        out.to_stack();
        assert_eq!(out.bytes.data, data);
    }
}

#[test]
fn errors_about_a_local_backend_reach_both_ends() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(ip(v6, A), 8080)], true);
        let asked = packet(protocol, (client(v6), 5000), (node(v6), port), SYN);
        run(&t, hook_from_uplink, FakeFrame::new(asked, UPLINK)).delivered_to(DEFAULT, A);
        let data = too_big(router(v6), protocol, (node(v6), port), (client(v6), 5000));
        let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
        out.delivered_to(DEFAULT, A);
        let expected = (router(v6), ip(v6, A), (ip(v6, A), 8080), (client(v6), 5000));
        assert_eq!(error(&out.bytes.data), expected);
        let data = too_big(ip(v6, A), protocol, (client(v6), 5000), (ip(v6, A), 8080));
        let out = send(&t, DEFAULT, A, data);
        assert_eq!(out.bytes.redirect, Some(Redirect::Neighbour(UPLINK)), "{out:?}");
        let expected = (node(v6), client(v6), (client(v6), 5000), (node(v6), port));
        assert_eq!(error(&out.bytes.data), expected);
    }
}

#[test]
fn this_host_as_a_backend_complains_in_the_services_name() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(node(v6), 6443)], true);
        let asked = packet(protocol, (client(v6), 5000), (node(v6), port), SYN);
        run(&t, hook_from_uplink, FakeFrame::new(asked, UPLINK)).to_stack();
        let data = too_big(node(v6), protocol, (client(v6), 5000), (node(v6), 6443));
        let out = run(&t, hook_to_uplink, FakeFrame::new(data, UPLINK));
        out.to_stack();
        let expected = (node(v6), client(v6), (client(v6), 5000), (node(v6), port));
        assert_eq!(error(&out.bytes.data), expected);
        let data = too_big(router(v6), protocol, (node(v6), port), (client(v6), 5000));
        let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
        out.to_stack();
        let expected = (router(v6), node(v6), (node(v6), 6443), (client(v6), 5000));
        assert_eq!(error(&out.bytes.data), expected);
        // What it says about its own connections stays.
        let data = too_big(node(v6), protocol, (client(v6), 5001), (node(v6), 6443));
        let out = run(&t, hook_to_uplink, FakeFrame::new(data.clone(), UPLINK));
        out.to_stack();
        assert_eq!(out.bytes.data, data);
    }
}

#[test]
fn a_client_that_is_its_own_backend_hears_its_own_errors() {
    for (v6, protocol, port) in [(false, 6, 80), (true, 6, 80), (false, 17, 53), (true, 17, 53)] {
        let t = with_service(v6, RED, &[(ip(v6, A), 8080)]);
        let gateway: IpAddr = if v6 { [0xfd00, 1, 0, 0, 0, 0, 0, 1].into() } else { [10, 1, 0, 1].into() };
        let own = ip(v6, A);
        send(&t, RED, A, to_vip(v6, protocol, (A, 4000), port, SYN)).delivered_to(RED, A);
        // As the backend, about what the gateway seems to have sent.
        let out = send(&t, RED, A, too_big(own, protocol, (gateway, 4000), (own, 8080)));
        out.delivered_to(RED, A);
        assert_eq!(error(&out.bytes.data), (vip(v6), own, (own, 4000), (vip(v6), port)));
        // As the client, about what the service has answered.
        let out = send(&t, RED, A, too_big(own, protocol, (vip(v6), port), (own, 4000)));
        out.delivered_to(RED, A);
        assert_eq!(error(&out.bytes.data), (gateway, own, (own, 8080), (gateway, 4000)));
        // A neighbour that speaks about it, and one about nothing.
        for (host, port_of_client) in [(B, 4000), (A, 4001)] {
            let by = ip(v6, host);
            let as_backend = too_big(by, protocol, (gateway, port_of_client), (own, 8080));
            let as_client = too_big(by, protocol, (vip(v6), port), (own, port_of_client));
            for mut data in [as_backend, as_client] {
                data[..6].copy_from_slice(&host_mac(host));
                data[6..12].copy_from_slice(&mac(host));
                send(&t, RED, host, data).dropped("ConntrackInvalid");
            }
        }
        assert!(t.connections().is_empty());
    }
}

#[test]
fn a_port_of_this_nodes_own_sockets_is_never_taken() {
    let (first, last) = flowloom_bpf_abi::SNAT_PORTS;
    let t = with_node_port(false, &[(ip(false, REMOTE), 8080)], false);
    let ask = |cport: u16, sockets: Vec<u16>| {
        let f = FakeFrame::new(packet(6, (client(false), cport), (node(false), 30_080), SYN), UPLINK);
        f.0.borrow_mut().sockets = sockets;
        run(&t, hook_from_uplink, f)
    };
    let (low, high): (Vec<u16>, Vec<u16>) = (first..=last).partition(|p| p % 8 != 0);
    for cport in 5000..5200 {
        // Seven of eight are in use: eight tries do not always find a free one, and never take another.
        let out = ask(cport, low.clone());
        if out.reasons.is_empty() {
            assert!(high.contains(&tuple(&out.bytes.data).1), "{:?}", tuple(&out.bytes.data));
        } else {
            out.dropped("ServiceTupleInUse");
        }
    }
    let taken = t.flows.borrow().len();
    ask(6000, (first..=last).collect()).dropped("ServiceTupleInUse");
    assert_eq!(t.flows.borrow().len(), taken);
    assert!(taken > 50, "{taken}");
}
