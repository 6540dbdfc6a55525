//! Bytes at random: nothing panics, nothing is read or written beyond, and what is passed on is never what no rule lets through.

use super::*;
use crate::{TunnelKey, from_overlay, from_uplink, to_overlay};

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[test]
fn mutated_frames_at_every_hook() {
    let mut r = Random(0x5eed);
    let seeds: Vec<Vec<u8>> = [false, true]
        .into_iter()
        .flat_map(|v6| {
            let (s, d) = (ip(v6, A), ip(v6, B));
            let protocol = if v6 { 58 } else { 1 };
            let quoted = in_ip(d, s, 6, 64, &tcp((d, 7), (s, 9), ACK, b"x"));
            let error =
                icmp(s, d, if v6 { 2 } else { 3 }, if v6 { 0 } else { 4 }, &[&[0; 4][..], &quoted].concat());
            let extended =
                in_ip(s, d, 60, 64, &[&[17, 0, 1, 4, 0, 0, 0, 0][..], &udp((s, 1), (d, 2), b"y")].concat());
            vec![
                tcp_data(v6, (A, 1), (B, 2), SYN, b"data"),
                tcp_frame(v6, (A, 1), (FAR, 2), ACK),
                udp_frame(v6, (A, 1), (REMOTE, 2)),
                udp_frame(v6, (REMOTE, 1), (A, 2)),
                echo_frame(v6, A, B, false, 1),
                frame(A, &in_ip(s, d, protocol, 1, &error)),
                frame(A, &extended),
                neighbours::arp_request(A, [10, 1, 0, A], [10, 1, 0, 1]),
            ]
        })
        .collect();
    let t = world();
    switch(&t, RED, B, REJECT, REJECT);
    for _ in 0..30_000 {
        let mut data = seeds[r.below(seeds.len())].clone();
        for _ in 0..r.below(4) {
            let at = r.below(data.len());
            data[at] = r.below(256) as u8;
        }
        if r.below(4) == 0 {
            data.truncate(r.below(data.len() + 1));
        }
        let hook: fn(&FakeFrame, &FakeTables, &mut crate::Packet) -> Verdict = match r.below(5) {
            0 | 1 => |f, t, p| from_endpoint(f, t, p),
            2 => |f, t, p| to_endpoint(f, t, p),
            3 => |f, t, p| from_overlay(f, t, p),
            _ if r.below(2) == 0 => |f, t, p| from_uplink(f, t, p),
            _ => |f, t, p| to_overlay(f, t, p),
        };
        let frame = FakeFrame::new(data, ifindex([RED, DEFAULT][r.below(2)], [A, B][r.below(2)]));
        {
            let mut bytes = frame.0.borrow_mut();
            bytes.from_tunnel = Some(TunnelKey { vni: RED, remote: Addr::v4([198, 51, 100, 12]) });
            bytes.arrived_on = r.below(2) as u32;
            bytes.gso_size = [0, 0, 0, 1400][r.below(4)];
            bytes.pending = [None, Some(50)][r.below(2)];
        }
        let before = frame.bytes().data.len();
        let fate = run(&t, hook, frame);
        assert!(!fate.reasons.contains(&"InternalError"), "{fate:?}");
        // An answer adds a header at most.
        assert!(fate.bytes.data.len() <= before + 48, "{fate:?}");
        assert!([Verdict::PASS, Verdict::DROP, Verdict::REDIRECT].contains(&fate.verdict));
        // B of red lets nothing in.
        assert_ne!(
            (fate.bytes.redirect, fate.reasons.is_empty()),
            (Some(Redirect::Peer(ifindex(RED, B))), true)
        );
    }
}
