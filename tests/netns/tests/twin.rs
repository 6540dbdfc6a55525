//! Random sequences of packets: the kernel's program and the same logic in memory agree on each of them, and on what is left behind.

use std::net::{IpAddr, SocketAddr};

use flowloom_bpf_abi::{
    self as abi, Addr, address_flags, delivery, endpoint_flags, peer_flags, policy_flags, verdict, vpc_flags,
};
use flowloom_bpf_logic::Verdict;
use flowloom_netlink::Mac;
use flowloom_testkit::{Fault, Packet, icmp};
use flowloom_tests_netns::programs::{Entry, entry};
use flowloom_tests_netns::twin::{Arrival, Hook, Twin};

const VPCS: [u32; 2] = [100, 201];
const HOSTS: [u8; 4] = [10, 11, 12, 50];
/// The last of [`HOSTS`] lives on another node.
const LOCAL: usize = 3;
const PORTS: [u16; 4] = [80, 443, 1024, 40_000];

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// The third host has a subnet of its own.
fn ip(v6: bool, host: u8) -> IpAddr {
    let net = u8::from(host == 12);
    if v6 { [0xfd00, 1, u16::from(net), 0, 0, 0, 0, host.into()].into() } else { [10, 1, net, host].into() }
}

fn id(vpc: usize, host: usize) -> u32 {
    (vpc * 10 + host + 1) as u32
}

fn mac(id: u32) -> [u8; 6] {
    [2, 0, 0, 0, 0, id as u8]
}

fn host_mac(id: u32) -> [u8; 6] {
    [2, 0, 0, 0, 1, id as u8]
}

fn policy(r: &mut Random) -> Vec<Entry> {
    let mut entries =
        vec![entry(0, 0, None, 1, r.of(&[verdict::ALLOW, verdict::ALLOW, verdict::DROP, verdict::REJECT]))];
    for _ in 0..r.below(8) {
        let identity = if r.chance(40) { 0 } else { 300 + r.below(40) as u32 };
        let protocol = r.of(&[0, 1, 6, 6, 17, 58, 132]);
        let port = match protocol {
            1 => Some((r.of(&[0x0800, 0x0300]), r.of(&[8, 16]))),
            58 => Some((r.of(&[0x8000, 0x0100]), r.of(&[8, 16]))),
            0 => None,
            _ if r.chance(30) => None,
            _ => Some((r.of(&PORTS), r.of(&[16, 16, 12, 6]))),
        };
        // The key's bits beyond the prefix are zero, as the kernel's tries have them.
        let port = port.map(|(p, bits)| (p & !(0xffff_u32 >> bits) as u16, bits));
        let v = r.of(&[verdict::ALLOW, verdict::DROP, verdict::REJECT]);
        let mut e = entry(identity, protocol, port, 2 + r.below(1000) as u32, v);
        if r.chance(15) {
            e.1.flags |= policy_flags::STATELESS;
        }
        entries.push(e);
    }
    entries
}

struct World {
    twin: Twin,
    records: Vec<abi::EndpointRecord>,
    next_slot: u32,
}

impl World {
    fn new(dry: bool) -> Self {
        let devices = VPCS.len() * LOCAL;
        let mut twin = if dry { Twin::dry(devices) } else { Twin::new(devices) }.expect("twin");
        twin.configure(abi::NodeConfig {
            overlay_ifindex: 1,
            overlay_mtu: 1450,
            tunnel_port: 4789u16.to_be_bytes(),
            default_vpc: VPCS[0],
            ..abi::NodeConfig::default()
        })
        .expect("config");
        let devices = twin.devices().to_vec();
        let mut records = Vec::new();
        for (v, &vpc) in VPCS.iter().enumerate() {
            let flags = if v == 0 { vpc_flags::DEFAULT } else { 0 };
            twin.vpc(vpc, abi::VpcRecord { vni: vpc, generation: 1, flags, pad: 0 }).expect("vpc");
            for (h, &host) in HOSTS.iter().enumerate() {
                let id = id(v, h);
                let net = u8::from(host == 12);
                for v6 in [false, true] {
                    let bits = if v6 { 128 } else { 32 };
                    let tunnel = if h < LOCAL { Addr::ZERO } else { Addr::v4([198, 51, 100, 12]) };
                    let flags = peer_flags::ENDPOINT | if h < LOCAL { 0 } else { peer_flags::REMOTE };
                    twin.peer(vpc, ip(v6, host), bits, abi::PeerRecord { identity: 300 + id, flags, tunnel })
                        .expect("peer");
                    let gateway: IpAddr = if v6 {
                        [0xfd00, 1, net.into(), 0, 0, 0, 0, 1].into()
                    } else {
                        [10, 1, net, 1].into()
                    };
                    twin.address(vpc, gateway, 0, address_flags::GATEWAY).expect("gateway");
                    if h < LOCAL {
                        twin.address(vpc, ip(v6, host), id, 0).expect("address");
                    }
                }
                if h >= LOCAL {
                    continue;
                }
                let record = abi::EndpointRecord {
                    vpc,
                    identity: 300 + id,
                    ifindex: devices[v * LOCAL + h],
                    revision: 1,
                    egress_slot: 1,
                    ingress_slot: 1,
                    flags: endpoint_flags::VALID | endpoint_flags::MAC_PINNED,
                    delivery: delivery::PEER,
                    plen4: 24,
                    mac: mac(id),
                    host_mac: host_mac(id),
                    plen6: 64,
                    pad: 0,
                    mtu: 1500,
                    ip4: Addr::from(ip(false, host)),
                    ip6: Addr::from(ip(true, host)),
                    gateway4: Addr::v4([10, 1, net, 1]),
                    gateway6: Addr::from(IpAddr::from([0xfd00, 1, u16::from(net), 0, 0, 0, 0, 1])),
                };
                twin.device(record.ifindex, id).expect("device");
                twin.endpoint(id, record).expect("endpoint");
                records.push(record);
            }
        }
        Self { twin, records, next_slot: 1 }
    }

    /// Gives an endpoint two new policies.
    fn change(&mut self, r: &mut Random, which: usize) {
        for direction in 0..2 {
            let slot = self.next_slot;
            self.next_slot += 1;
            self.twin.policy(slot, &policy(r)).expect("policy");
            let record = &mut self.records[which];
            if direction == 0 { record.egress_slot = slot } else { record.ingress_slot = slot }
        }
        self.records[which].revision += 1;
        let (v, h) = (which / LOCAL, which % LOCAL);
        self.twin.endpoint(id(v, h), self.records[which]).expect("endpoint");
    }

    /// One random packet, mostly sensible.
    fn packet(&self, r: &mut Random) -> (Hook, Arrival) {
        let which = r.below(self.records.len());
        let (v, h) = (which / LOCAL, which % LOCAL);
        let v6 = r.chance(50);
        let (from, to) = (HOSTS[h], r.of(&HOSTS));
        let (s, d) = (
            ip(v6, if r.chance(98) { from } else { 77 }),
            if r.chance(95) { ip(v6, to) } else { odd(r, v6) },
        );
        let (sp, dp) = (r.of(&PORTS), r.of(&PORTS));
        let (source, target) = (SocketAddr::new(s, sp), SocketAddr::new(d, dp));
        let mut packet = match r.below(10) {
            0..=3 => Packet::tcp(source, target, r.of(&[2, 2, 18, 16, 16, 24, 17, 17, 4, 1, 0, 41])),
            4..=6 => Packet::udp(source, target, &vec![1; r.below(60)]),
            7 => Packet::echo(s, d, sp, 1, b"echo"),
            8 => {
                let inner = Packet::udp(SocketAddr::new(d, dp), SocketAddr::new(s, sp), b"inner").ip();
                icmp::error(s, d, if v6 { 1 } else { 3 }, if v6 { 4 } else { 3 }, 0, &inner)
            }
            _ => Packet::sctp_init(source, target),
        };
        if r.chance(5) {
            packet = packet.ttl(1);
        }
        if r.chance(6) {
            packet = packet.fault(r.of(&[
                Fault::IpVersion(5),
                Fault::IpHeaderWords(3),
                Fault::IpLength(30),
                Fault::IpLength(60_000),
                Fault::UdpLength(4),
                Fault::TcpWords(2),
                Fault::Truncated(54),
                Fault::Truncated(60),
            ]));
        }
        let own = id(v, h);
        if r.chance(3) {
            packet = packet.payload(&[7; 1460]);
        }
        let mut frame = packet.macs(Mac(mac(own)), Mac(host_mac(own))).frame();
        let ifindex = self.records[which].ifindex;
        if r.chance(8) {
            // From the stack, to the endpoint.
            frame[..12].rotate_left(6);
            let arrived_on = if r.chance(50) { 0 } else { 1 };
            return (Hook::ToEndpoint, Arrival { frame, ifindex, arrived_on, ..Arrival::default() });
        }
        (Hook::FromEndpoint, Arrival { frame, ifindex, ..Arrival::default() })
    }
}

fn odd(r: &mut Random, v6: bool) -> IpAddr {
    let text = if v6 {
        r.of(&["ff02::1", "fe80::1", "fd00:1::1", "fd00:1::77", "2001:db8::1", "::1", "::ffff:10.1.0.11"])
    } else {
        r.of(&[
            "224.0.0.1",
            "10.1.0.1",
            "10.1.0.77",
            "192.0.2.1",
            "255.255.255.255",
            "10.1.0.255",
            "127.0.0.1",
            "169.254.1.1",
        ])
    };
    text.parse().expect("address")
}

#[test]
fn the_kernel_decides_every_packet_as_the_logic_does() {
    let seed = std::env::var("FLOWLOOM_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x00f1_0e10);
    let rounds: usize = std::env::var("FLOWLOOM_ROUNDS").ok().and_then(|s| s.parse().ok()).unwrap_or(40);
    println!("FLOWLOOM_SEED={seed} FLOWLOOM_ROUNDS={rounds}");
    let mut r = Random(seed);
    let mut world = World::new(false);
    world.twin.quota(VPCS[1], 0, 25).expect("quota");
    world.twin.quota(VPCS[0], id(0, 1), 15).expect("quota");
    let mut verdicts = std::collections::BTreeMap::<i32, usize>::new();
    for round in 0..rounds {
        for which in 0..world.records.len() {
            world.change(&mut r, which);
        }
        for step in 0..60 {
            if r.chance(5) {
                let which = r.below(world.records.len());
                world.change(&mut r, which);
            }
            if r.chance(3) {
                world.twin.bump(r.of(&VPCS)).expect("bump");
            }
            let (hook, arrival) = world.packet(&mut r);
            let outcome = match world.twin.run(hook, &arrival) {
                Ok(outcome) => outcome,
                Err(e) => panic!("round {round} step {step}: {e:#}"),
            };
            *verdicts.entry(outcome.verdict.0).or_default() += 1;
            // Some go on as a conversation: what was delivered is answered.
            if outcome.verdict == Verdict::REDIRECT
                && r.chance(60)
                && let Some((hook, arrival)) = reply(&world, &outcome.frame)
                && let Err(e) = world.twin.run(hook, &arrival)
            {
                panic!("round {round} step {step}, reply: {e:#}");
            }
        }
        world.twin.compare().unwrap_or_else(|e| panic!("after round {round}: {e:#}"));
    }
    println!("verdicts {verdicts:?}; drops {:?}", world.twin.fake.dropped());
    let counts = world.twin.fake.counts();
    println!("connections: {counts:?}");
    assert!(counts.0 > 20 && counts.1 > 20, "too few conversations to prove anything: {counts:?}");
    assert!(world.twin.fake.dropped().len() > 12, "too few reasons were met");
}

#[test]
fn a_trace_names_the_same_steps_on_both_sides_and_writes_nothing() {
    let mut r = Random(7);
    let mut world = World::new(true);
    for which in 0..world.records.len() {
        world.change(&mut r, which);
    }
    let mut steps = 0;
    for n in 0..150 {
        let (hook, arrival) = world.packet(&mut r);
        if let Err(e) = world.twin.run(hook, &arrival) {
            panic!("packet {n}: {e:#}\n{:?}", world.twin.compare_steps());
        }
        steps += world.twin.compare_steps().unwrap_or_else(|e| panic!("packet {n}: {e:#}")).len();
    }
    assert!(steps > 300, "{steps} steps");
    world.twin.compare().expect("compare");
    assert_eq!(world.twin.fake.counts(), (0, 0));
    assert!(world.twin.fake.dropped().is_empty());
}

/// The packet that answers a delivered one, when its receiver is local.
fn reply(world: &World, frame: &[u8]) -> Option<(Hook, Arrival)> {
    let (which, record) =
        world.records.iter().enumerate().find(|(_, record)| record.mac[..] == frame[..6])?;
    let _ = which;
    let mut back = frame.to_vec();
    back[..6].copy_from_slice(&record.host_mac);
    back[6..12].copy_from_slice(&record.mac);
    let (addresses, l4, protocol) = match frame[12] {
        0x08 => (26..34, 34, frame[23]),
        _ => (22..54, 54, frame[20]),
    };
    let half = addresses.len() / 2;
    back[addresses].rotate_left(half);
    match protocol {
        6 => {
            back[l4..l4 + 4].rotate_left(2);
            // SYN becomes SYN-ACK.
            back[l4 + 13] = if frame[l4 + 13] == 2 { 18 } else { frame[l4 + 13] };
        }
        17 | 132 => back[l4..l4 + 4].rotate_left(2),
        1 if frame[l4] == 8 => back[l4] = 0,
        58 if frame[l4] == 128 => back[l4] = 129,
        _ => return None,
    }
    Some((Hook::FromEndpoint, Arrival { frame: back, ifindex: record.ifindex, ..Arrival::default() }))
}
