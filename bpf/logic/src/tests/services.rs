//! Services: selection, sockets, and packets on both ways.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use flowloom_bpf_abi::{
    Addr, AffinityKey, BackendKey, BackendRecord, MemberKey, NetnsRecord, RangeKey, ServiceKey,
    ServiceRecord, backend_flags, service_flags, service_scope,
};

use super::*;
use crate::service::{Query, select};
use crate::socket::{self, Answer, Socket};
use crate::{Step, Tables as _};

const VIP: [u8; 4] = [10, 96, 0, 10];

pub(super) fn vip(v6: bool) -> IpAddr {
    if v6 { [0xfd96, 0, 0, 0, 0, 0, 0, 10].into() } else { VIP.into() }
}

fn std_ip(a: &Addr) -> IpAddr {
    if a.is_v4() { a.v4_octets().into() } else { a.0.into() }
}

fn service_key(vpc: u32, ip: IpAddr, protocol: u8, port: u16) -> ServiceKey {
    ServiceKey { vpc, addr: addr(ip), port: port.to_be_bytes(), protocol, scope: service_scope::INSIDE }
}

/// Writes a list, then the frontend that names it.
pub(super) fn serve(
    t: &FakeTables,
    key: ServiceKey,
    service: u32,
    list: u32,
    backends: &[(IpAddr, u16)],
    change: impl FnOnce(&mut ServiceRecord),
) {
    for (index, (ip, port)) in backends.iter().enumerate() {
        let (addr, port) = (addr(*ip), port.to_be_bytes());
        let record = BackendRecord { addr, port, flags: 0, pad: 0 };
        t.backends.borrow_mut().insert(BackendKey { list, index: index as u32 }, record);
        t.members.borrow_mut().insert(MemberKey { list, addr, port, pad: [0; 2] }, 0);
    }
    let list = if backends.is_empty() { 0 } else { list };
    let mut record = ServiceRecord { service, list, count: backends.len() as u32, ..Default::default() };
    change(&mut record);
    let vpc = *t.vpc(key.vpc).expect("vpc");
    t.set_vpc(key.vpc, VpcRecord { flags: vpc.flags | vpc_flags::SERVICES, ..vpc });
    t.services.borrow_mut().insert(key, record);
}

fn forget_list(t: &FakeTables, list: u32) {
    t.backends.borrow_mut().retain(|k, _| k.list != list);
    t.members.borrow_mut().retain(|k, _| k.list != list);
}

/// The service at `VIP`:80 and :53 of a VPC, with the wildcard of its address.
pub(super) fn with_service(v6: bool, vpc: u32, backends: &[(IpAddr, u16)]) -> FakeTables {
    let t = world();
    for (service, protocol, port) in [(1, 6, 80), (2, 17, 53)] {
        serve(&t, service_key(vpc, vip(v6), protocol, port), service, service, backends, |_| ());
    }
    serve(&t, service_key(vpc, vip(v6), 0, 0), 3, 0, &[], |_| ());
    t
}

fn query(key: ServiceKey) -> Query {
    Query { key, client: addr(ip(false, A)), client_known: 1, now: 1000, ..Query::default() }
}

fn ask(t: &FakeTables, key: ServiceKey) -> (Step, Option<(IpAddr, u16)>) {
    let mut q = query(key);
    let step = select(t, &mut q);
    (step, (step == Step::DONE).then(|| (std_ip(&q.backend), u16::from_be_bytes(q.port))))
}

#[test]
fn every_backend_is_chosen_and_nothing_else() {
    let backends: Vec<(IpAddr, u16)> = (1..=5).map(|n| (ip(false, n), 8000 + u16::from(n))).collect();
    let t = with_service(false, RED, &backends);
    let key = service_key(RED, vip(false), 6, 80);
    let chosen: BTreeSet<_> = (0..200).filter_map(|_| ask(&t, key).1).collect();
    assert_eq!(chosen, backends.into_iter().collect());
}

#[test]
fn what_a_service_address_does_not_serve_is_rejected_and_other_addresses_are_none_of_its() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    let no_port = Step::reject(flowloom_bpf_abi::DropReason::ServiceNoPort);
    assert_eq!(ask(&t, service_key(RED, vip(false), 6, 81)).0, no_port);
    assert_eq!(ask(&t, service_key(RED, vip(false), 17, 80)).0, no_port);
    assert_eq!(ask(&t, service_key(BLUE, vip(false), 6, 80)).0, Step::GO);
    assert_eq!(ask(&t, service_key(RED, ip(false, B), 6, 80)).0, Step::GO);
    let outside = ServiceKey { scope: service_scope::OUTSIDE, ..service_key(RED, vip(false), 6, 80) };
    assert_eq!(ask(&t, outside).0, Step::GO);
}

#[test]
fn without_a_backend_a_connection_is_refused_or_dropped_as_the_service_says() {
    let t = world();
    let key = service_key(RED, vip(false), 6, 80);
    serve(&t, key, 1, 0, &[], |_| ());
    assert_eq!(ask(&t, key).0, Step::reject(flowloom_bpf_abi::DropReason::ServiceNoBackend));
    serve(&t, key, 1, 0, &[], |r| r.flags = service_flags::SILENT);
    assert_eq!(ask(&t, key).0, Step::drop(flowloom_bpf_abi::DropReason::ServiceNoBackend));
}

#[test]
fn a_list_that_goes_while_it_is_read_is_looked_for_once_more_and_then_there_is_no_backend() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    let key = service_key(RED, vip(false), 6, 80);
    t.before_backend.set(Some(|t| {
        serve(t, service_key(RED, vip(false), 6, 80), 1, 9, &[(ip(false, FAR), 9090)], |_| ());
        forget_list(t, 1);
    }));
    assert_eq!(ask(&t, key), (Step::DONE, Some((ip(false, FAR), 9090))));
    // A frontend that goes on naming a list that is not there.
    forget_list(&t, 9);
    assert_eq!(ask(&t, key).0, Step::reject(flowloom_bpf_abi::DropReason::ServiceNoBackend));
}

#[test]
fn source_ranges_hold_for_addresses() {
    let t = world();
    let key = service_key(RED, vip(false), 6, 80);
    serve(&t, key, 7, 1, &[(ip(false, B), 8080)], |r| r.flags = service_flags::RANGES);
    assert_eq!(ask(&t, key).0, Step::drop(flowloom_bpf_abi::DropReason::ServiceSourceRange));
    let range = RangeKey { prefixlen: 32 + 96 + 16, service: 7, addr: addr([10, 1, 0, 0].into()) };
    t.ranges.borrow_mut().push(RangeKey { service: 8, ..range });
    assert_eq!(ask(&t, key).0, Step::drop(flowloom_bpf_abi::DropReason::ServiceSourceRange));
    t.ranges.borrow_mut().push(range);
    assert_eq!(ask(&t, key).0, Step::DONE);
    // This host is judged by its node's address and not by a namespace's cookie; without one, by nothing.
    let cookie = || Query { client_known: 0, client: addr(ip(false, 99)), ..query(key) };
    t.ranges.borrow_mut().clear();
    assert_eq!(select(&t, &mut cookie()), Step::DONE);
    let config = *t.config().expect("config");
    t.set_config(NodeConfig { node4: addr(node(false)), node6: addr(node(true)), ..config });
    assert_eq!(select(&t, &mut cookie()), Step::drop(flowloom_bpf_abi::DropReason::ServiceSourceRange));
    t.ranges.borrow_mut().push(RangeKey { addr: addr(node(false)), prefixlen: 160, ..range });
    assert_eq!(select(&t, &mut cookie()), Step::DONE);
    t.set_config(NodeConfig { node4: addr(ip(false, B)), node6: addr(node(true)), ..config });
    assert_eq!(select(&t, &mut cookie()), Step::drop(flowloom_bpf_abi::DropReason::ServiceSourceRange));
}

#[test]
fn a_workload_outside_the_source_ranges_gets_nowhere_by_socket_or_packet() {
    for v6 in [false, true] {
        let t = with_sockets(v6, &[(ip(v6, B), 8080)]);
        for (protocol, port) in [(6, 80), (17, 53)] {
            let key = service_key(RED, vip(v6), protocol, port);
            let list = if protocol == 6 { 1 } else { 2 };
            serve(&t, key, list, list, &[(ip(v6, B), 8080)], |r| r.flags = service_flags::RANGES);
            let range = |host| RangeKey { prefixlen: 160, service: list, addr: addr(ip(v6, host)) };
            let ask = || {
                let call = Call::new(5, protocol, (vip(v6), port));
                let answer =
                    if protocol == 6 { socket::connect(&call, &t) } else { socket::sendmsg(&call, &t) };
                (answer, call.refused.get(), call.to.get())
            };
            let packet = |sport| send(&t, RED, A, to_vip(v6, protocol, (A, sport), port, SYN));
            t.ranges.borrow_mut().push(range(FAR));
            assert_eq!(ask(), (Answer::FAIL, true, (vip(v6), port)));
            packet(4000).dropped("ServiceSourceRange");
            t.ranges.borrow_mut().push(range(A));
            assert_eq!(ask(), (Answer::GO, false, (ip(v6, B), 8080)));
            packet(4001).delivered_to(RED, B);
        }
    }
}

/// What a connection's first packet pays for services: nothing in a VPC that has none, two questions where it is for no service.
#[test]
fn a_vpc_without_services_asks_for_none() {
    let asked = |t: &FakeTables, flags: u8| {
        let before = t.asked.get();
        send(t, RED, A, tcp_frame(false, (A, 7), (B, 80), flags)).delivered_to(RED, B);
        t.asked.get() - before
    };
    let plain = asked(&world(), SYN);
    assert_eq!(asked(&with_service(false, BLUE, &[]), SYN), plain);
    assert_eq!(asked(&with_service(false, RED, &[]), SYN), plain + 2);
}

#[test]
fn a_client_stays_with_its_backend_until_the_timeout_or_the_backends_end() {
    let t = world();
    let key = service_key(RED, vip(false), 6, 80);
    let backends: Vec<(IpAddr, u16)> = (1..=9).map(|n| (ip(false, n), 8080)).collect();
    serve(&t, key, 1, 1, &backends, |r| r.affinity = 100);
    let at = |now: u32| {
        let mut q = Query { now, ..query(key) };
        assert_eq!(select(&t, &mut q), Step::DONE);
        std_ip(&q.backend)
    };
    let first = at(1000);
    // Each new connection counts anew.
    for now in [1050, 1149, 1248] {
        assert_eq!(at(now), first, "at {now}");
    }
    let client = AffinityKey { service: 1, pad: 0, client: addr(ip(false, A)) };
    assert_eq!(t.affinities.borrow()[&client].last_used, 1248);
    // Another list that still has it.
    let fewer: Vec<_> = backends.iter().copied().filter(|(ip, _)| *ip == first).collect();
    serve(&t, key, 1, 2, &[&fewer[..], &backends[..3]].concat(), |r| r.affinity = 100);
    assert_eq!(at(1300), first);
    // One that has not.
    let others: Vec<_> = backends.iter().copied().filter(|(ip, _)| *ip != first).collect();
    serve(&t, key, 1, 3, &others, |r| r.affinity = 100);
    let second = at(1301);
    assert_ne!(second, first);
    serve(&t, key, 1, 1, &backends, |r| r.affinity = 100);
    assert_eq!(at(1302), second);
    let later: BTreeSet<_> = (0..50).map(|n| at(1500 + n * 101)).collect();
    assert!(later.len() > 1, "no timeout: {later:?}");
}

mod property {
    use proptest::prelude::*;

    use super::*;

    /// A frontend of the reference: backends, affinity, whether ranges apply, silent.
    type Frontend = (BTreeSet<u8>, bool, bool);

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Lists are replaced in the order of the plan's changes, and every answer is one that the frontends of that moment allow.
        #[test]
        fn every_answer_is_one_that_the_service_has_then(
            steps in prop::collection::vec(
                (0u16..4, prop::collection::btree_set(1u8..20, 0..5), any::<bool>(), any::<bool>(), 0u32..200), 1..40)
        ) {
            let t = world();
            let mut reference: std::collections::BTreeMap<u16, Frontend> = Default::default();
            let mut last: std::collections::BTreeMap<u16, (IpAddr, u32)> = Default::default();
            let (mut list, mut now) = (0, 1000);
            for (port, hosts, affine, silent, later) in steps {
                list += 1;
                now += later;
                let key = service_key(RED, vip(false), 6, port + 1);
                let backends: Vec<_> = hosts.iter().map(|h| (ip(false, *h), 8080)).collect();
                let old = t.services.borrow().get(&key).map(|r| r.list);
                serve(&t, key, u32::from(port) + 1, list, &backends, |r| {
                    r.affinity = if affine { 100 } else { 0 };
                    r.flags = if silent { service_flags::SILENT } else { 0 };
                });
                if let Some(old) = old { forget_list(&t, old) }
                reference.insert(port, (hosts, affine, silent));
                for asked in 0..4u16 {
                    let mut q = Query { now, ..query(service_key(RED, vip(false), 6, asked + 1)) };
                    let step = select(&t, &mut q);
                    let Some((hosts, affine, silent)) = reference.get(&asked) else {
                        prop_assert_eq!(step, Step::GO);
                        continue;
                    };
                    let none = flowloom_bpf_abi::DropReason::ServiceNoBackend;
                    if hosts.is_empty() {
                        prop_assert_eq!(step, if *silent { Step::drop(none) } else { Step::reject(none) });
                        continue;
                    }
                    prop_assert_eq!(step, Step::DONE);
                    let got = std_ip(&q.backend);
                    prop_assert!(hosts.iter().any(|h| ip(false, *h) == got));
                    if *affine {
                        if let Some((before, at)) = last.get(&asked)
                            && now - at < 100
                            && hosts.iter().any(|h| ip(false, *h) == *before)
                        {
                            prop_assert_eq!(got, *before);
                        }
                        last.insert(asked, (got, now));
                    }
                }
            }
        }
    }
}

// Sockets.

/// A system call of a socket in namespace 77.
#[derive(Clone, Debug)]
struct Call {
    netns: u64,
    cookie: u64,
    protocol: u8,
    to: Cell<(IpAddr, u16)>,
    refused: Cell<bool>,
}

impl Call {
    fn new(cookie: u64, protocol: u8, to: (IpAddr, u16)) -> Self {
        Self { netns: 77, cookie, protocol, to: Cell::new(to), refused: Cell::new(false) }
    }
}

impl Socket for &Call {
    fn netns(self) -> u64 {
        self.netns
    }
    fn cookie(self) -> u64 {
        self.cookie
    }
    fn protocol(self) -> u8 {
        self.protocol
    }
    fn addr(self) -> Addr {
        addr(self.to.get().0)
    }
    fn port(self) -> [u8; 2] {
        self.to.get().1.to_be_bytes()
    }
    fn set(self, addr: &Addr, port: [u8; 2]) {
        self.to.set((std_ip(addr), u16::from_be_bytes(port)));
    }
    fn refuse(self) {
        self.refused.set(true);
    }
}

fn with_sockets(v6: bool, backends: &[(IpAddr, u16)]) -> FakeTables {
    let t = with_service(v6, RED, backends);
    t.namespaces.borrow_mut().insert(77, NetnsRecord { endpoint: id(RED, A), flags: 0 });
    t
}

#[test]
fn a_connected_socket_gets_a_backend_and_shows_the_service() {
    for v6 in [false, true] {
        let t = with_sockets(v6, &[(ip(v6, B), 8080)]);
        let call = Call::new(5, 6, (vip(v6), 80));
        assert_eq!(socket::connect(&call, &t), Answer::GO);
        assert_eq!(call.to.get(), (ip(v6, B), 8080));
        assert_eq!(socket::shown(&call, &t), Answer::GO);
        assert_eq!(call.to.get(), (vip(v6), 80));
        // Another socket that speaks to the same backend by itself.
        let other = Call::new(6, 6, (ip(v6, B), 8080));
        assert_eq!(socket::connect(&other, &t), Answer::GO);
        let _ = socket::shown(&other, &t);
        assert_eq!(other.to.get(), (ip(v6, B), 8080));
    }
}

#[test]
fn sockets_of_unknown_namespaces_and_of_other_vpcs_are_left_alone() {
    let t = with_sockets(false, &[(ip(false, B), 8080)]);
    t.namespaces.borrow_mut().insert(78, NetnsRecord { endpoint: id(BLUE, A), flags: 0 });
    t.namespaces.borrow_mut().insert(79, NetnsRecord { endpoint: 4000, flags: 0 });
    for netns in [76, 78, 79] {
        let call = Call { netns, ..Call::new(5, 6, (vip(false), 80)) };
        assert_eq!(socket::connect(&call, &t), Answer::GO);
        assert_eq!(call.to.get(), (vip(false), 80), "{netns}");
        assert!(!call.refused.get());
    }
}

#[test]
fn this_hosts_sockets_use_the_default_vpcs_services() {
    let t = with_service(false, DEFAULT, &[(ip(false, B), 8080)]);
    t.namespaces.borrow_mut().insert(77, NetnsRecord::default());
    let call = Call::new(5, 6, (vip(false), 80));
    assert_eq!(socket::connect(&call, &t), Answer::GO);
    assert_eq!(call.to.get(), (ip(false, B), 8080));
}

#[test]
fn a_service_without_backends_refuses_connect_and_sendmsg() {
    let t = with_sockets(false, &[]);
    for (protocol, port) in [(6, 80), (17, 53)] {
        let call = Call::new(5, protocol, (vip(false), port));
        let answer = if protocol == 6 { socket::connect(&call, &t) } else { socket::sendmsg(&call, &t) };
        assert_eq!(answer, Answer::FAIL);
        assert!(call.refused.get());
        assert_eq!(call.to.get(), (vip(false), port));
    }
}

#[test]
fn datagrams_of_a_socket_stay_with_one_backend_while_it_is_there() {
    let backends: Vec<(IpAddr, u16)> = (1..=9).map(|n| (ip(false, n), 5353)).collect();
    let t = with_sockets(false, &backends);
    let send = |cookie| {
        let call = Call::new(cookie, 17, (vip(false), 53));
        assert_eq!(socket::sendmsg(&call, &t), Answer::GO);
        let to = call.to.get();
        assert_eq!(socket::shown(&call, &t), Answer::GO);
        assert_eq!(call.to.get(), (vip(false), 53));
        to
    };
    let first = send(1);
    for _ in 0..20 {
        t.wait(100);
        assert_eq!(send(1), first);
    }
    assert!((2..40).map(send).collect::<BTreeSet<_>>().len() > 1);
    let others: Vec<_> = backends.iter().copied().filter(|b| *b != first).collect();
    serve(&t, service_key(RED, vip(false), 17, 53), 2, 8, &others, |_| ());
    assert_ne!(send(1), first);
    // After a silence the socket is as good as a new one.
    let seen: BTreeSet<_> = (0..40)
        .map(|_| {
            t.wait(400);
            send(1)
        })
        .collect();
    assert!(seen.len() > 1);
}

// Packets.

pub(super) fn to_vip(v6: bool, protocol: u8, from: (u8, u16), port: u16, flags: u8) -> Vec<u8> {
    let (s, d) = (ip(v6, from.0), vip(v6));
    let segment = if protocol == 6 {
        tcp((s, from.1), (d, port), flags, b"x")
    } else {
        udp((s, from.1), (d, port), b"question")
    };
    frame(from.0, &in_ip(s, d, protocol, 64, &segment))
}

/// (source, port, destination, port) of a frame whose checksums are right.
#[track_caller]
pub(super) fn tuple(data: &[u8]) -> (IpAddr, u16, IpAddr, u16) {
    assert_sound(data);
    let packet = &data[14..];
    let (s, d, l4): (IpAddr, IpAddr, _) = if packet[0] >> 4 == 4 {
        let a: [u8; 4] = packet[12..16].try_into().expect("four");
        let b: [u8; 4] = packet[16..20].try_into().expect("four");
        (a.into(), b.into(), &packet[usize::from(packet[0] & 15) * 4..])
    } else {
        let a: [u8; 16] = packet[8..24].try_into().expect("sixteen");
        let b: [u8; 16] = packet[24..40].try_into().expect("sixteen");
        (a.into(), b.into(), &packet[40..])
    };
    (s, u16::from_be_bytes([l4[0], l4[1]]), d, u16::from_be_bytes([l4[2], l4[3]]))
}

fn back(v6: bool, protocol: u8, from: (u8, u16), to: (u8, u16), flags: u8) -> Vec<u8> {
    let (s, d) = (ip(v6, from.0), ip(v6, to.0));
    let segment = if protocol == 6 {
        tcp((s, from.1), (d, to.1), flags, b"y")
    } else {
        udp((s, from.1), (d, to.1), b"answer")
    };
    frame(from.0, &in_ip(s, d, protocol, 64, &segment))
}

#[test]
fn a_packet_goes_to_the_backend_and_its_answer_comes_from_the_service() {
    for (v6, protocol, port) in [(false, 6, 80), (true, 6, 80), (false, 17, 53), (true, 17, 53)] {
        let t = with_service(v6, RED, &[(ip(v6, B), 8080)]);
        for flags in [SYN, ACK] {
            let out = send(&t, RED, A, to_vip(v6, protocol, (A, 4000), port, flags));
            out.delivered_to(RED, B);
            assert_eq!(tuple(&out.bytes.data), (ip(v6, A), 4000, ip(v6, B), 8080));
            let reply = if flags == SYN { SYN | ACK } else { ACK };
            let back = send(&t, RED, B, back(v6, protocol, (B, 8080), (A, 4000), reply));
            back.delivered_to(RED, A);
            assert_eq!(tuple(&back.bytes.data), (vip(v6), port, ip(v6, A), 4000));
        }
        let connections = t.connections();
        assert_eq!(connections.len(), 1);
        assert_eq!(connections[0].1.nat_addr, addr(vip(v6)));
        assert_eq!(connections[0].1.rev_nat, if protocol == 6 { 1 } else { 2 });
    }
}

#[test]
fn a_checksum_that_a_device_fills_in_stays_the_pseudo_headers() {
    for v6 in [false, true] {
        let t = with_service(v6, RED, &[(ip(v6, B), 8080)]);
        let mut data = to_vip(v6, 6, (A, 4000), 80, SYN);
        let at = if v6 { 54 } else { 34 } + 16;
        let len = data.len() - at + 16;
        let sum = !checksum(&[&pseudo(ip(v6, A), vip(v6), 6, len)]);
        data[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        let f = FakeFrame::new(data, ifindex(RED, A));
        f.0.borrow_mut().pending = Some(at as u32);
        let out = run(&t, hook_from_endpoint, f);
        out.delivered_to(RED, B);
        let want = !checksum(&[&pseudo(ip(v6, A), ip(v6, B), 6, len)]);
        assert_eq!(out.bytes.data[at..at + 2], want.to_be_bytes());
    }
}

#[test]
fn policy_sees_the_backend_and_a_refused_client_hears_from_the_service() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    t.set_policy(9, &[entry(0, 0, 0, 0, 10, verdict::REJECT), entry(0, 6, 8080, 16, 20, verdict::ALLOW)]);
    switch(&t, RED, A, 9, ALLOW);
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, SYN)).delivered_to(RED, B);
    t.set_policy(9, &[entry(0, 0, 0, 0, 10, verdict::ALLOW), entry(0, 6, 8080, 16, 20, verdict::REJECT)]);
    let out = send(&t, RED, A, to_vip(false, 6, (A, 4001), 80, SYN));
    out.answered("PolicyEgress", RED, A);
    assert_eq!(tuple(&out.bytes.data), (vip(false), 80, ip(false, A), 4001));
    // A flow that never began is not remembered.
    assert!(t.flows.borrow().keys().all(|k| k.sport != 4001u16.to_be_bytes()));
}

#[test]
fn without_a_backend_a_packet_is_answered_by_a_reset_or_port_unreachable() {
    for v6 in [false, true] {
        let t = with_service(v6, RED, &[]);
        let out = send(&t, RED, A, to_vip(v6, 6, (A, 4000), 80, SYN));
        out.answered("ServiceNoBackend", RED, A);
        assert_eq!(tuple(&out.bytes.data), (vip(v6), 80, ip(v6, A), 4000));
        let out = send(&t, RED, A, to_vip(v6, 17, (A, 4000), 53, 0));
        out.answered("ServiceNoBackend", RED, A);
        let icmp = if v6 { 54 } else { 34 };
        assert_eq!(out.bytes.data[icmp..icmp + 2], if v6 { [1, 4] } else { [3, 3] });
        assert_sound(&out.bytes.data);
        send(&t, RED, A, to_vip(v6, 6, (A, 4000), 81, SYN)).answered("ServiceNoPort", RED, A);
    }
}

#[test]
fn a_connection_keeps_its_backend_and_a_new_one_never_gets_one_that_is_gone() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, SYN)).delivered_to(RED, B);
    send(&t, RED, B, back(false, 6, (B, 8080), (A, 4000), SYN | ACK)).delivered_to(RED, A);
    send(&t, RED, A, to_vip(false, 17, (A, 4000), 53, 0)).delivered_to(RED, B);
    for (service, protocol, port) in [(1, 6, 80), (2, 17, 53)] {
        let key = service_key(RED, vip(false), protocol, port);
        serve(&t, key, service, 9 + service, &[(ip(false, FAR), 9090)], |_| ());
    }
    t.wait(1);
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, ACK)).delivered_to(RED, B);
    send(&t, RED, A, to_vip(false, 6, (A, 4001), 80, SYN)).delivered_to(RED, FAR);
    // Datagrams have no connection to lose.
    send(&t, RED, A, to_vip(false, 17, (A, 4000), 53, 0)).delivered_to(RED, FAR);
    // The service goes: so do new connections, the old one stays.
    t.services.borrow_mut().clear();
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, ACK)).delivered_to(RED, B);
    send(&t, RED, A, to_vip(false, 6, (A, 4002), 80, SYN)).dropped("NoRoute");
    let late = with_service(false, RED, &[(ip(false, B), 8080)]);
    send(&late, RED, A, to_vip(false, 6, (A, 4000), 80, ACK)).answered("ServiceConnectionUnknown", RED, A);
}

#[test]
fn one_port_of_a_client_speaks_to_a_backend_in_one_way_only() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    let other: IpAddr = [10, 96, 0, 11].into();
    serve(&t, service_key(RED, other, 6, 80), 5, 5, &[(ip(false, B), 8080)], |_| ());
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, SYN)).delivered_to(RED, B);
    let syn = tcp((ip(false, A), 4000), (other, 80), SYN, &[]);
    let out = send(&t, RED, A, frame(A, &in_ip(ip(false, A), other, 6, 64, &syn)));
    out.answered("ServiceTupleInUse", RED, A);
    assert_eq!(tuple(&out.bytes.data), (other, 80, ip(false, A), 4000));
    send(&t, RED, A, tcp_frame(false, (A, 4000), (B, 8080), SYN)).answered("ServiceTupleInUse", RED, A);
    // And the other way round.
    send(&t, RED, A, tcp_frame(false, (A, 4001), (B, 8080), SYN)).delivered_to(RED, B);
    send(&t, RED, A, to_vip(false, 6, (A, 4001), 80, SYN)).answered("ServiceTupleInUse", RED, A);
}

#[test]
fn tenants_with_the_same_service_address_reach_their_own_backends() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    serve(&t, service_key(BLUE, vip(false), 6, 80), 11, 11, &[(ip(false, FAR), 7070)], |_| ());
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, SYN)).delivered_to(RED, B);
    let out = send(&t, BLUE, A, to_vip(false, 6, (A, 4000), 80, SYN));
    out.delivered_to(BLUE, FAR);
    assert_eq!(tuple(&out.bytes.data), (ip(false, A), 4000, ip(false, FAR), 7070));
    send(&t, DEFAULT, A, to_vip(false, 6, (A, 4000), 80, SYN)).to_stack();
}

#[test]
fn a_client_that_is_its_own_backend_gets_its_answer() {
    for (v6, protocol, port) in [(false, 6, 80), (true, 6, 80), (false, 17, 53), (true, 17, 53)] {
        let t = with_service(v6, RED, &[(ip(v6, A), 8080)]);
        // Whatever the policy: it speaks to itself.
        switch(&t, RED, A, DENY, DENY);
        let gateway: IpAddr = if v6 { [0xfd00, 1, 0, 0, 0, 0, 0, 1].into() } else { [10, 1, 0, 1].into() };
        for flags in [SYN, ACK] {
            let out = send(&t, RED, A, to_vip(v6, protocol, (A, 4000), port, flags));
            out.delivered_to(RED, A);
            assert_eq!(tuple(&out.bytes.data), (gateway, 4000, ip(v6, A), 8080));
            let segment = if protocol == 6 {
                tcp((ip(v6, A), 8080), (gateway, 4000), if flags == SYN { SYN | ACK } else { ACK }, b"z")
            } else {
                udp((ip(v6, A), 8080), (gateway, 4000), b"answer")
            };
            let answer = frame(A, &in_ip(ip(v6, A), gateway, protocol, 64, &segment));
            let out = send(&t, RED, A, answer);
            out.delivered_to(RED, A);
            assert_eq!(tuple(&out.bytes.data), (vip(v6), port, ip(v6, A), 4000));
        }
        assert!(t.connections().is_empty());
    }
}

#[test]
fn an_answer_from_another_node_comes_from_the_service() {
    fn hook(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        crate::from_overlay(f, t, p)
    }
    for v6 in [false, true] {
        let t = with_service(v6, RED, &[(ip(v6, REMOTE), 8080)]);
        let out = send(&t, RED, A, to_vip(v6, 6, (A, 4000), 80, SYN));
        out.tunnelled(RED);
        assert_eq!(tuple(&out.bytes.data), (ip(v6, A), 4000, ip(v6, REMOTE), 8080));
        let f = FakeFrame::new(back(v6, 6, (REMOTE, 8080), (A, 4000), SYN | ACK), OVERLAY);
        f.0.borrow_mut().from_tunnel =
            Some(crate::TunnelKey { vni: RED, remote: Addr::v4([198, 51, 100, 12]) });
        let out = run(&t, hook, f);
        out.delivered_to(RED, A);
        assert_eq!(tuple(&out.bytes.data), (vip(v6), 80, ip(v6, A), 4000));
    }
}

#[test]
fn an_icmp_error_is_about_what_its_receiver_knows() {
    for v6 in [false, true] {
        let t = with_service(v6, RED, &[(ip(v6, B), 5353)]);
        send(&t, RED, A, to_vip(v6, 17, (A, 4000), 53, 0)).delivered_to(RED, B);
        let (kind, code) = if v6 { (1, 4) } else { (3, 3) };
        let protocol = if v6 { 58 } else { 1 };
        // The backend has no such port: the client asked the service.
        let quoted = in_ip(ip(v6, A), ip(v6, B), 17, 64, &udp((ip(v6, A), 4000), (ip(v6, B), 5353), b"q"));
        let message = icmp(ip(v6, B), ip(v6, A), kind, code, &[&[0; 4][..], &quoted].concat());
        let out = send(&t, RED, B, frame(B, &in_ip(ip(v6, B), ip(v6, A), protocol, 64, &message)));
        out.delivered_to(RED, A);
        assert_sound(&out.bytes.data);
        let headers = if v6 { 40 } else { 20 };
        let outer = &out.bytes.data[14..];
        let at = if v6 { 8..24 } else { 12..16 };
        assert_eq!(outer[at.clone()], octets(vip(v6)));
        let inner = &outer[headers + 8..];
        let to = if v6 { 24..40 } else { 16..20 };
        assert_eq!(inner[to.clone()], octets(vip(v6)));
        assert_eq!(inner[headers + 2..headers + 4], 53u16.to_be_bytes());
        if !v6 {
            assert_eq!(checksum(&[&inner[..20]]), 0);
        }
        // The client cannot take the answer: the backend sent it.
        let quoted = in_ip(vip(v6), ip(v6, A), 17, 64, &udp((vip(v6), 53), (ip(v6, A), 4000), b"a"));
        let message = icmp(ip(v6, A), vip(v6), kind, code, &[&[0; 4][..], &quoted].concat());
        let out = send(&t, RED, A, frame(A, &in_ip(ip(v6, A), vip(v6), protocol, 64, &message)));
        out.delivered_to(RED, B);
        assert_sound(&out.bytes.data);
        let outer = &out.bytes.data[14..];
        assert_eq!(outer[to], octets(ip(v6, B)));
        let inner = &outer[headers + 8..];
        assert_eq!(inner[at], octets(ip(v6, B)));
        assert_eq!(inner[headers..headers + 2], 5353u16.to_be_bytes());
        // One about a connection that is none of theirs.
        let quoted = in_ip(vip(v6), ip(v6, A), 17, 64, &udp((vip(v6), 53), (ip(v6, A), 4001), b"a"));
        let message = icmp(ip(v6, A), vip(v6), kind, code, &[&[0; 4][..], &quoted].concat());
        send(&t, RED, A, frame(A, &in_ip(ip(v6, A), vip(v6), protocol, 64, &message)))
            .dropped("ConntrackInvalid");
    }
}

#[test]
fn later_fragments_follow_the_first() {
    let t = with_service(false, RED, &[(ip(false, B), 5353)]);
    let whole = udp((ip(false, A), 4000), (vip(false), 53), &[7; 40]);
    let (first, rest) = whole.split_at(24);
    let one = frame(A, &in_ipv4(ip(false, A), vip(false), 17, 64, 0x2000, first));
    let two = frame(A, &in_ipv4(ip(false, A), vip(false), 17, 64, 3, rest));
    let out = [send(&t, RED, A, one), send(&t, RED, A, two)];
    let mut body = Vec::new();
    for fate in &out {
        fate.delivered_to(RED, B);
        assert_eq!(fate.bytes.data[30..34], octets(ip(false, B)));
        assert_eq!(checksum(&[&fate.bytes.data[14..34]]), 0);
        body.extend_from_slice(&fate.bytes.data[34..]);
    }
    assert_eq!(body[2..4], 5353u16.to_be_bytes());
    let sum = checksum(&[&pseudo(ip(false, A), ip(false, B), 17, body.len()), &body]);
    assert_eq!(sum, 0);
}

// From outside.

const CLIENT: [u8; 4] = [203, 0, 113, 9];
const NODE: [u8; 4] = [198, 51, 100, 11];

pub(super) fn node(v6: bool) -> IpAddr {
    if v6 { [0xfd99, 0, 0, 0, 0, 0, 0, 0x11].into() } else { NODE.into() }
}

pub(super) fn client(v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 0, 0, 0, 0, 0, 9].into() } else { CLIENT.into() }
}

/// The default VPC with a node port 30080 (TCP) and 30053 (UDP) for `backends`, some of which are here.
pub(super) fn with_node_port(v6: bool, backends: &[(IpAddr, u16)], local: bool) -> FakeTables {
    let t = world();
    let host = AddressRecord { endpoint: 0, flags: address_flags::HOST };
    t.addresses.borrow_mut().insert(AddressKey { vpc: DEFAULT, addr: addr(node(v6)) }, host);
    t.set_config(NodeConfig {
        overlay_ifindex: OVERLAY,
        uplink_ifindex: UPLINK,
        overlay_mtu: 1450,
        uplink_mtu: 1500,
        tunnel_port: 4789u16.to_be_bytes(),
        default_vpc: DEFAULT,
        node4: addr(node(false)),
        node6: addr(node(true)),
        ..NodeConfig::default()
    });
    for (service, protocol, port) in [(1, 6, 30_080), (2, 17, 30_053)] {
        let key =
            ServiceKey { scope: service_scope::OUTSIDE, ..service_key(DEFAULT, node(v6), protocol, port) };
        serve(&t, key, service, service, backends, |_| ());
    }
    if local {
        t.backends.borrow_mut().values_mut().for_each(|b| b.flags = backend_flags::LOCAL);
    }
    t
}

pub(super) fn hook_from_uplink(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
    crate::from_uplink(f, t, p)
}

pub(super) fn hook_to_uplink(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
    crate::to_uplink(f, t, p)
}

pub(super) fn hook_from_overlay(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
    crate::from_overlay(f, t, p)
}

pub(super) fn packet(protocol: u8, from: (IpAddr, u16), to: (IpAddr, u16), flags: u8) -> Vec<u8> {
    let segment = if protocol == 6 { tcp(from, to, flags, b"x") } else { udp(from, to, b"x") };
    frame(A, &in_ip(from.0, to.0, protocol, 64, &segment))
}

const CASES: [(bool, u8, u16); 4] =
    [(false, 6, 30_080), (true, 6, 30_080), (false, 17, 30_053), (true, 17, 30_053)];

#[test]
fn a_client_outside_reaches_a_local_backend_as_itself() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(ip(v6, A), 8080)], true);
        for flags in [SYN, ACK] {
            let data = packet(protocol, (client(v6), 5000), (node(v6), port), flags);
            let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
            out.delivered_to(DEFAULT, A);
            assert_eq!(tuple(&out.bytes.data), (client(v6), 5000, ip(v6, A), 8080));
            let answer = if flags == SYN { SYN | ACK } else { ACK };
            let out = send(&t, DEFAULT, A, packet(protocol, (ip(v6, A), 8080), (client(v6), 5000), answer));
            assert_eq!(out.bytes.redirect, Some(Redirect::Neighbour(UPLINK)), "{out:?}");
            assert_eq!(tuple(&out.bytes.data), (node(v6), port, client(v6), 5000));
        }
        // Its policy judges the client.
        switch(&t, DEFAULT, A, ALLOW, DENY);
        let data = packet(protocol, (client(v6), 5001), (node(v6), port), SYN);
        run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK)).dropped("PolicyIngress");
    }
}

#[test]
fn a_backend_of_another_node_sees_this_node_and_its_answer_goes_back_the_same_way() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(ip(v6, REMOTE), 8080)], false);
        let mut ports = BTreeSet::new();
        for cport in [5000, 5001] {
            for flags in [SYN, ACK] {
                let data = packet(protocol, (client(v6), cport), (node(v6), port), flags);
                let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
                out.tunnelled(DEFAULT);
                let (from, nport, to, bport) = tuple(&out.bytes.data);
                assert_eq!((from, to, bport), (node(v6), ip(v6, REMOTE), 8080));
                assert!(nport >= flowloom_bpf_abi::SNAT_PORTS.0);
                ports.insert(nport);
                let back = packet(protocol, (ip(v6, REMOTE), 8080), (node(v6), nport), SYN | ACK);
                let f = FakeFrame::new(back, OVERLAY);
                f.0.borrow_mut().from_tunnel =
                    Some(crate::TunnelKey { vni: DEFAULT, remote: Addr::v4([198, 51, 100, 12]) });
                let out = run(&t, hook_from_overlay, f);
                assert_eq!(out.bytes.redirect, Some(Redirect::Neighbour(UPLINK)), "{out:?}");
                assert_eq!(tuple(&out.bytes.data), (node(v6), port, client(v6), cport));
            }
        }
        assert_eq!(ports.len(), 2);
        assert!(t.connections().is_empty());
        // What no flow stands for is the host's.
        let stray = packet(protocol, (ip(v6, REMOTE), 8080), (node(v6), 60_999), SYN | ACK);
        let f = FakeFrame::new(stray.clone(), OVERLAY);
        f.0.borrow_mut().from_tunnel =
            Some(crate::TunnelKey { vni: DEFAULT, remote: Addr::v4([198, 51, 100, 12]) });
        let out = run(&t, hook_from_overlay, f);
        out.to_stack();
        assert_eq!(out.bytes.data, stray);
    }
}

#[test]
fn this_host_as_a_backend_answers_in_the_services_name() {
    for (v6, protocol, port) in CASES {
        let t = with_node_port(v6, &[(node(v6), 6443)], true);
        let data = packet(protocol, (client(v6), 5000), (node(v6), port), SYN);
        let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
        out.to_stack();
        assert_eq!(tuple(&out.bytes.data), (client(v6), 5000, node(v6), 6443));
        let answer = packet(protocol, (node(v6), 6443), (client(v6), 5000), SYN | ACK);
        let out = run(&t, hook_to_uplink, FakeFrame::new(answer, UPLINK));
        out.to_stack();
        assert_eq!(tuple(&out.bytes.data), (node(v6), port, client(v6), 5000));
        // Another connection of the same server is its own.
        let other = packet(protocol, (node(v6), 6443), (client(v6), 5001), SYN | ACK);
        let out = run(&t, hook_to_uplink, FakeFrame::new(other.clone(), UPLINK));
        out.to_stack();
        assert_eq!(out.bytes.data, other);
    }
}

#[test]
fn a_workload_of_another_node_uses_a_node_port_through_the_tunnel() {
    let from_overlay = |t: &FakeTables, data| {
        let f = FakeFrame::new(data, OVERLAY);
        f.0.borrow_mut().from_tunnel =
            Some(crate::TunnelKey { vni: DEFAULT, remote: Addr::v4([198, 51, 100, 12]) });
        run(t, hook_from_overlay, f)
    };
    fn hook_to_overlay(f: &FakeFrame, t: &FakeTables, p: &mut crate::Packet) -> Verdict {
        crate::to_overlay(f, t, p)
    }
    for (v6, protocol, port) in CASES {
        let asked = packet(protocol, (ip(v6, REMOTE), 5000), (node(v6), port), SYN);
        // A local backend.
        let t = with_node_port(v6, &[(ip(v6, A), 8080)], true);
        let out = from_overlay(&t, asked.clone());
        out.delivered_to(DEFAULT, A);
        assert_eq!(tuple(&out.bytes.data), (ip(v6, REMOTE), 5000, ip(v6, A), 8080));
        let answer = packet(protocol, (ip(v6, A), 8080), (ip(v6, REMOTE), 5000), SYN | ACK);
        let out = send(&t, DEFAULT, A, answer);
        out.tunnelled(DEFAULT);
        assert_eq!(tuple(&out.bytes.data), (node(v6), port, ip(v6, REMOTE), 5000));
        // One on its own node.
        let t = with_node_port(v6, &[(ip(v6, REMOTE), 8080)], false);
        let out = from_overlay(&t, asked.clone());
        out.tunnelled(DEFAULT);
        let (from, nport, to, _) = tuple(&out.bytes.data);
        assert_eq!((from, to), (node(v6), ip(v6, REMOTE)));
        let out = from_overlay(&t, packet(protocol, (ip(v6, REMOTE), 8080), (node(v6), nport), SYN | ACK));
        out.tunnelled(DEFAULT);
        assert_eq!(tuple(&out.bytes.data), (node(v6), port, ip(v6, REMOTE), 5000));
        // This host.
        let t = with_node_port(v6, &[(node(v6), 6443)], true);
        let out = from_overlay(&t, asked.clone());
        out.to_stack();
        // The stack dropped it otherwise: a host-network backend never answered a Pod of another node that used its node port.
        assert!(out.bytes.for_this_host);
        assert_eq!(tuple(&out.bytes.data), (ip(v6, REMOTE), 5000, node(v6), 6443));
        let answer = packet(protocol, (node(v6), 6443), (ip(v6, REMOTE), 5000), SYN | ACK);
        let out = run(&t, hook_to_overlay, FakeFrame::new(answer, OVERLAY));
        out.to_stack();
        assert_eq!(tuple(&out.bytes.data), (node(v6), port, ip(v6, REMOTE), 5000));
    }
}

#[test]
fn a_node_port_without_backends_answers_and_other_ports_are_the_hosts() {
    let t = with_node_port(false, &[], false);
    let data = packet(6, (client(false), 5000), (node(false), 30_080), SYN);
    let out = run(&t, hook_from_uplink, FakeFrame::new(data, UPLINK));
    assert_eq!(
        (out.reasons.as_slice(), out.bytes.redirect),
        (&["ServiceNoBackend"][..], Some(Redirect::Out(UPLINK)))
    );
    assert_eq!(tuple(&out.bytes.data), (node(false), 30_080, client(false), 5000));
    for (protocol, port, flags) in [(6, 22, SYN), (6, 30_080, ACK), (17, 4789, 0), (17, 53, 0)] {
        let data = packet(protocol, (client(false), 5000), (node(false), port), flags);
        let out = run(&t, hook_from_uplink, FakeFrame::new(data.clone(), UPLINK));
        out.to_stack();
        assert_eq!(out.bytes.data, data);
    }
    assert!(t.flows.borrow().is_empty());
}

#[test]
fn a_trace_of_a_service_changes_nothing() {
    let t = with_service(false, RED, &[(ip(false, B), 8080)]);
    t.dry.set(true);
    send(&t, RED, A, to_vip(false, 6, (A, 4000), 80, SYN)).delivered_to(RED, B);
    assert!(t.flows.borrow().is_empty() && t.connections().is_empty());
    let step = flowloom_bpf_abi::trace_step::SERVICE;
    assert!(t.steps.borrow().iter().any(|s| s.kind == step && s.a == 1));
}
