//! Connections, quotas, counters, events, traces.

use std::os::fd::AsFd as _;

use crate::common::*;
use flowloom_bpf_abi::{self as abi, DropReason, ct_flags, ct_state};
use flowloom_compiler::{EndpointId, VpcId};
use flowloom_datapath::conntrack::now_seconds;
use flowloom_datapath::packet::{Frame, Transport};
use flowloom_datapath::trace::{Action, Step};
use flowloom_datapath::{CtFilter, Datapath, DeviceInfo, Hook, TraceRequest, sys};
use flowloom_model::Mac;
use flowloom_testkit::{Bpffs, PATIENCE, eventually};

const TCP: u8 = 6;
const UDP: u8 = 17;

fn key(vpc: u32, port: u16, protocol: u8) -> abi::CtKey {
    abi::CtKey {
        vpc,
        lo: abi::Addr::v4([10, 0, 0, 11]),
        hi: abi::Addr::v4([10, 0, 0, 12]),
        lo_port: port.to_be_bytes(),
        hi_port: 80u16.to_be_bytes(),
        protocol,
        pad: [0; 3],
    }
}

fn tracked(last_seen: u32, state: u8, endpoints: (u32, u32)) -> abi::CtEntry {
    abi::CtEntry {
        last_seen,
        created: last_seen,
        state,
        flags: ct_flags::ORIG_IS_LO | ct_flags::SEEN_REPLY | ct_flags::COUNTED,
        orig_endpoint: endpoints.0,
        reply_endpoint: endpoints.1,
        ..abi::CtEntry::default()
    }
}

#[test]
fn connections_are_listed_and_flushed_by_what_they_are() -> Result {
    let fs = Bpffs::mount()?;
    let datapath = Datapath::open(config(&fs))?;
    let (view, map, now) = (datapath.view(), conntrack(&datapath), now_seconds()?);
    // The same addresses and ports in two VPCs.
    for vpc in [100, 200] {
        for port in 1000..1010 {
            map.set(&key(vpc, port, TCP), &tracked(now, ct_state::ESTABLISHED, (vpc / 100, 0)))?;
        }
        map.set(&key(vpc, 1000, UDP), &tracked(now, ct_state::ESTABLISHED, (0, 9)))?;
    }
    let count = |filter: CtFilter| view.conntrack(&filter, usize::MAX).map(|rows| rows.len());
    let none = CtFilter::default();
    assert_eq!(count(none)?, 22);
    let red = CtFilter { vpc: Some(VpcId(100)), ..none };
    assert_eq!(count(red)?, 11);
    assert!(view.conntrack(&red, usize::MAX)?.iter().all(|r| r.vpc == VpcId(100)));
    assert_eq!(view.conntrack(&none, 5)?.len(), 5);
    assert_eq!(count(CtFilter { port: Some(1000), ..red })?, 2);
    assert_eq!(count(CtFilter { port: Some(1000), protocol: Some(UDP), ..red })?, 1);
    assert_eq!(count(CtFilter { endpoint: Some(EndpointId(9)), ..none })?, 2);

    assert_eq!(view.flush(&CtFilter { port: Some(1003), ..red })?, 1);
    assert_eq!(view.flush_endpoint(EndpointId(9))?, 2);
    assert_eq!(view.flush(&red)?, 9);
    let left = view.conntrack(&none, usize::MAX)?;
    assert_eq!(left.len(), 10);
    assert!(left.iter().all(|r| r.vpc == VpcId(200) && r.protocol == TCP && r.established));
    Ok(())
}

#[test]
fn a_sweep_removes_the_dead_and_says_when_the_next_one_dies() -> Result {
    let fs = Bpffs::mount()?;
    let datapath = Datapath::open(config(&fs))?;
    let (view, map) = (datapath.view(), conntrack(&datapath));
    let now = 100_000;
    let idle = |seconds| now - seconds;
    for (port, protocol, state, seen) in [
        (1, TCP, ct_state::ESTABLISHED, idle(8000)),
        (2, TCP, ct_state::ESTABLISHED, idle(8001)),
        (3, TCP, ct_state::CLOSED, idle(11)),
        (4, UDP, ct_state::ESTABLISHED, idle(100)),
        (5, UDP, ct_state::NEW, idle(31)),
        // Seen after the clock was read.
        (6, UDP, ct_state::NEW, now + 1),
    ] {
        map.set(&key(100, port, protocol), &tracked(seen, state, (0, 0)))?;
    }
    let report = view.sweep(now)?;
    assert_eq!((report.examined, report.removed, report.established), (6, 3, 3));
    assert_eq!((report.next, report.oldest), (Some(1), Some(idle(8000))));
    let ports: Vec<_> = map.entries()?.keys().map(|k| u16::from_be_bytes(k.lo_port)).collect();
    assert_eq!(ports, [1, 4, 6]);
    let report = view.sweep(now + 1)?;
    assert_eq!((report.removed, report.next), (1, Some(31)));
    assert_eq!(view.sweep(now + 100_000)?.removed, 2);
    assert_eq!(view.sweep(now + 100_000)?, flowloom_datapath::SweepReport::default());
    Ok(())
}

#[test]
fn quotas_count_what_is_there_and_get_back_what_goes() -> Result {
    let fs = Bpffs::mount()?;
    let datapath = Datapath::open(config(&fs))?;
    let (view, map, now) = (datapath.view(), conntrack(&datapath), now_seconds()?);
    for port in 0..10 {
        map.set(&key(100, port, TCP), &tracked(now, ct_state::ESTABLISHED, (1, 2)))?;
    }
    let (vpc, e1) = (VpcId(100), Some(EndpointId(1)));
    assert!(view.set_quota(vpc, None, 1000)? && view.set_quota(vpc, e1, 50)?);
    assert!(!view.set_quota(vpc, e1, 50)?, "the same limit is no change");
    let used = |e| view.quota(vpc, e).map(|q| q.map(|q| (q.used, q.limit)));
    assert_eq!((used(None)?, used(e1)?), (Some((10, 1000)), Some((10, 50))));
    assert!(view.set_quota(vpc, e1, 60)?);
    assert_eq!(used(e1)?, Some((10, 60)), "a new limit keeps the count");
    assert!(!view.start_quota(vpc, EndpointId(1), 60)?, "nor does a start change what is there");
    assert!(view.start_quota(vpc, EndpointId(1), 70)? && view.start_quota(vpc, EndpointId(7), 50)?);
    assert_eq!((used(e1)?, used(Some(EndpointId(7)))?), (Some((10, 70)), Some((0, 50))));
    assert!(view.remove_quota(vpc, Some(EndpointId(7)))? && view.set_quota(vpc, e1, 60)?);

    assert_eq!(view.flush(&CtFilter { port: Some(3), ..CtFilter::default() })?, 1);
    assert_eq!((used(None)?, used(e1)?), (Some((9, 1000)), Some((9, 60))));
    assert_eq!(view.named()?.endpoints, [EndpointId(1), EndpointId(2)].into());

    // Never below zero, whatever the count says.
    let quotas = sys::Map::<abi::QuotaKey, abi::QuotaValue>::from_fd(sys::obj_get(
        &datapath.pin_dir().join("maps/fl_quotas"),
    )?)?;
    quotas.set(&abi::QuotaKey { vpc: 100, endpoint: 1 }, &abi::QuotaValue { used: 2, limit: 60 })?;
    assert_eq!(view.flush(&CtFilter::default())?, 9);
    assert_eq!((used(None)?, used(e1)?), (Some((0, 1000)), Some((0, 60))));
    assert!(view.remove_quota(vpc, e1)? && !view.remove_quota(vpc, e1)?);
    assert_eq!(used(e1)?, None);
    Ok(())
}

/// A SYN from the first workload of [`populate`] to the second.
fn syn(device: &DeviceInfo, src: &str, dst: &str, port: u16) -> Result<Vec<u8>> {
    let frame = Frame {
        src_mac: Mac([2, 0, 0, 0, 0, 1]),
        dst_mac: device.mac,
        src: src.parse()?,
        dst: dst.parse()?,
        ttl: 64,
        transport: Transport::new(TCP, false, 40_000, port),
        payload: 0,
    };
    Ok(frame.build()?)
}

fn trace(
    node: &Node,
    datapath: &Datapath,
    device: &DeviceInfo,
    frame: Vec<u8>,
) -> Result<flowloom_datapath::TraceReport> {
    let request = TraceRequest { hook: Hook::FromEndpoint, ifindex: device.ifindex, frame, mark: 0 };
    let view = datapath.view();
    Ok(node.inside(|| view.trace(&request))?)
}

/// Runs the pinned program itself, as a packet would.
fn run(node: &Node, datapath: &Datapath, device: &DeviceInfo, frame: &[u8]) -> Result<Action> {
    let program =
        tree(&datapath.pin_dir().join("programs")).into_iter().find(|p| p.ends_with("from_endpoint"));
    let program = sys::obj_get(&datapath.pin_dir().join("programs").join(program.expect("pinned")))?;
    let context = sys::RunContext { ifindex: device.ifindex, ..Default::default() };
    let result = node.inside(|| sys::test_run(program.as_fd(), frame, &context, 1))?;
    Ok(Action::from_number(result.action))
}

#[test]
fn a_trace_names_the_steps_and_changes_no_map() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    let dump = |d: &Datapath| -> Result<_> {
        let view = d.view();
        let memory: Vec<_> = view.conntrack(&CtFilter::default(), usize::MAX)?;
        Ok((d.read_back()?, memory, view.drops()?, view.traffic_all()?, view.rule_hits()?, view.refused()?))
    };
    let before = dump(&datapath)?;
    let mut events = datapath.view().events()?;

    let good = syn(&devices[0], "10.0.0.11", "10.0.0.12", 80)?;
    let report = trace(&node, &datapath, &devices[0], good)?;
    assert_eq!(report.lost_steps, 0);
    let device = Step::Device { ifindex: devices[0].ifindex, endpoint: Some(EndpointId(1)) };
    assert_eq!(report.steps.first(), Some(&device), "{report:?}");
    assert!(
        report.steps.iter().any(|s| matches!(s, Step::Egress(j) if j.verdict == abi::verdict::ALLOW)),
        "{report:?}"
    );
    assert!(
        report.steps.iter().any(|s| matches!(s, Step::Ingress(j) if j.verdict == abi::verdict::ALLOW)),
        "{report:?}"
    );
    assert!(report.steps.contains(&Step::Local { endpoint: EndpointId(2) }), "{report:?}");
    assert_eq!(report.action, Action::Redirect);

    let spoofed = syn(&devices[0], "10.0.0.99", "10.0.0.12", 80)?;
    let report = trace(&node, &datapath, &devices[0], spoofed)?;
    assert_eq!(
        report.steps.last(),
        Some(&Step::Drop { reason: Ok(DropReason::SpoofedSource) }),
        "{report:?}"
    );
    assert_eq!(report.action, Action::Drop);
    for i in 0..1000 {
        let frame = syn(&devices[0], "10.0.0.11", "10.0.0.12", i)?;
        trace(&node, &datapath, &devices[0], frame)?;
    }
    assert_eq!(dump(&datapath)?, before);
    assert_eq!(events.drain(usize::MAX, |e| panic!("a trace told {e:?}")), 0);
    Ok(())
}

#[test]
fn what_programs_count_and_tell_is_read_with_names() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    let view = datapath.view();
    let mut events = view.events()?;

    let good = syn(&devices[0], "10.0.0.11", "10.0.0.12", 80)?;
    assert_eq!(run(&node, &datapath, &devices[0], &good)?, Action::Redirect);
    let spoofed = syn(&devices[0], "10.0.0.99", "10.0.0.12", 80)?;
    for _ in 0..3 {
        assert_eq!(run(&node, &datapath, &devices[0], &spoofed)?, Action::Drop);
    }

    let rows = view.conntrack(&CtFilter::default(), usize::MAX)?;
    assert_eq!(rows.len(), 1, "{rows:?}");
    let row = rows[0];
    assert_eq!(
        (row.vpc, row.protocol, row.established, row.state),
        (VpcId(100), TCP, false, ct_state::SYN_SENT)
    );
    assert_eq!((row.origin.port, row.responder.port), (40_000, 80));
    assert_eq!((row.origin.endpoint, row.responder.endpoint), (Some(EndpointId(1)), Some(EndpointId(2))));
    assert!(row.egress.is_some_and(|d| d.verdict == abi::verdict::ALLOW && d.revision == 1), "{row:?}");

    let drops = view.drops()?;
    assert_eq!(drops.len(), 1, "{drops:?}");
    assert_eq!(
        (drops[0].endpoint, drops[0].reason, drops[0].packets),
        (Some(EndpointId(1)), Some(DropReason::SpoofedSource), 3)
    );
    assert_eq!(view.traffic(EndpointId(1))?.egress.packets, 1);
    assert_eq!(view.traffic(EndpointId(3))?, flowloom_datapath::counters::Traffic::default());

    let mut seen = Vec::new();
    eventually(PATIENCE, || {
        events.drain(usize::MAX, |e| seen.push((e.kind, e.reason, e.endpoint)));
        let spoofs = seen
            .iter()
            .filter(|e| **e == (abi::event_kind::DROP, DropReason::SpoofedSource as u8, 1))
            .count();
        if spoofs == 3 { Ok(()) } else { Err(format!("{seen:?}")) }
    });
    assert_eq!(events.malformed(), 0);

    view.clear_counters(EndpointId(1))?;
    assert_eq!(view.drops()?, []);
    assert_eq!(view.traffic(EndpointId(1))?, flowloom_datapath::counters::Traffic::default());
    assert_eq!(view.flush_endpoint(EndpointId(2))?, 1);
    assert_eq!(view.conntrack(&CtFilter::default(), usize::MAX)?, []);
    Ok(())
}
