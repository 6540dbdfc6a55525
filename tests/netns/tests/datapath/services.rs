//! Services of a datapath: applied, adopted, ended, removed.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use flowloom_bpf_abi::{self as abi, service_flags};
use flowloom_compiler::{
    BackendPlan, EndedBackend, EndpointId, FrontendKey, FrontendPlan, ListId, NodePlan, Op, Scope, ServiceId,
    VpcId,
};
use flowloom_datapath::{Datapath, SocketHook, uninstall};
use flowloom_netlink::{Diag, Netns};
use flowloom_testkit::Bpffs;
use flowloom_tests_netns::services::own_cgroup;

use crate::common::*;

const VPC: VpcId = VpcId(100);

fn frontend(port: u16, protocol: u8) -> FrontendKey {
    let ip = "10.96.0.10".parse().expect("ip");
    FrontendKey { vpc: VPC, ip, protocol, port, scope: Scope::Inside }
}

fn backend(n: u8) -> BackendPlan {
    BackendPlan { ip: format!("10.0.0.{n}").parse().expect("ip"), port: 8080, local: n < 20 }
}

fn list(n: impl IntoIterator<Item = u8>) -> Arc<[BackendPlan]> {
    n.into_iter().map(backend).collect()
}

fn serve() -> Vec<Op> {
    let plan = |service, list: u32, count| FrontendPlan {
        service: ServiceId(service),
        list: ListId(list),
        count,
        affinity: 0,
        flags: if service == 1 { service_flags::RANGES } else { 0 },
    };
    vec![
        Op::PutLists(vec![(ListId(1), list([11, 12])), (ListId(2), list([30]))]),
        Op::PutRanges(vec![(ServiceId(1), "10.0.0.0/8".parse().expect("net"))]),
        Op::PutFrontends(vec![
            (frontend(80, 6), plan(1, 1, 2)),
            (frontend(53, 17), plan(2, 2, 1)),
            (frontend(0, 0), plan(3, 0, 0)),
        ]),
    ]
}

#[test]
fn services_are_written_read_back_and_removed() -> Result {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let before = datapath.writes();
    let report = datapath.apply(&serve());
    assert!(report.is_clean(), "{:?}", report.failures);
    // One batch for each of members, backends, ranges, frontends.
    assert_eq!(datapath.writes() - before, 4);
    let state = datapath.view().services()?;
    assert_eq!((state.services.len(), state.backends.len(), state.members.len()), (3, 3, 3));
    assert_eq!(state.ranges.len(), 1);
    // A plan that knows none of them takes them away, lists last.
    let ops = datapath.remaining(&NodePlan::default())?;
    let kinds: Vec<&str> = ops
        .iter()
        .map(|op| match op {
            Op::RemoveFrontends(k) if k.len() == 3 => "frontends",
            Op::RemoveRanges(_) => "ranges",
            Op::RemoveLists(l) if l.len() == 2 => "lists",
            _ => "other",
        })
        .collect();
    assert_eq!(kinds, ["frontends", "ranges", "lists"]);
    assert!(datapath.apply(&ops).is_clean());
    assert_eq!(datapath.remaining(&NodePlan::default())?, []);
    assert_eq!(datapath.view().services()?, Default::default());
    Ok(())
}

#[test]
fn programs_of_sockets_and_namespaces_are_adopted_without_a_write_and_uninstalled() -> Result {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let cgroup = own_cgroup()?;
    datapath.attach_cgroup(&cgroup)?;
    datapath.bind_netns(7, None)?;
    datapath.bind_netns(8, Some(EndpointId(1)))?;
    datapath.apply(&serve());
    let (state, ids) = (datapath.read_back()?, tree(&config(&fs).pin_root));
    for hook in SocketHook::ALL {
        assert!(ids.iter().any(|p| p.ends_with(format!("links/{}", hook.name()))), "{ids:?}");
    }
    assert_eq!(datapath.attached()?, []);
    drop(datapath);
    let mut again = Datapath::open(config(&fs))?;
    again.attach_cgroup(&cgroup)?;
    again.bind_netns(7, None)?;
    again.bind_netns(8, Some(EndpointId(1)))?;
    assert_eq!((again.writes(), again.read_back()?), (0, state));
    // The endpoint's next namespace takes the place of the one before.
    again.bind_netns(9, Some(EndpointId(1)))?;
    assert_eq!(again.read_back()?.namespaces.keys().copied().collect::<Vec<_>>(), [7, 9]);
    again.detach_endpoint(EndpointId(1))?;
    assert_eq!(again.read_back()?.namespaces.keys().copied().collect::<Vec<_>>(), [7]);
    drop(again);
    // Another build exchanges the programs in place.
    let mut other = Datapath::open_object(config(&fs), other_build()?)?;
    let before = other.writes();
    other.attach_cgroup(&cgroup)?;
    assert_eq!(other.writes(), before);
    drop(other);
    uninstall(&config(&fs).pin_root)?;
    assert!(!config(&fs).pin_root.exists());
    Ok(())
}

#[test]
fn what_uses_a_backend_that_is_gone_is_found_and_nothing_else() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    populate(&mut node, &mut datapath)?;
    datapath.apply(&serve());
    datapath.attach_cgroup(&own_cgroup()?)?;
    let ns: &Netns = node.peer(1);
    datapath.bind_netns(ns.cookie()?.0, Some(EndpointId(1)))?;
    node.peer(1).exec_ok(&["ip", "addr", "add", "10.0.0.11/8", "dev", "wl1-p"])?;
    node.peer(1).exec_ok(&["ip", "link", "set", "wl1-p", "up"])?;
    node.peer(1).exec_ok(&["ip", "route", "add", "default", "dev", "wl1-p"])?;
    let connect = |to: &str| -> Result<UdpSocket> {
        let to: SocketAddr = to.parse()?;
        let socket = ns.run_in(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(to).map(|()| socket)
        })??;
        Ok(socket)
    };
    let (through, direct) = (connect("10.96.0.10:53")?, connect("10.0.0.30:8080")?);
    let flow = |service, port: u16| {
        let key =
            abi::FlowKey { vpc: VPC.0, dport: port.to_be_bytes(), protocol: 17, ..abi::FlowKey::default() };
        let value = abi::FlowValue {
            addr: backend(30).ip.into(),
            port: backend(30).port.to_be_bytes(),
            service,
            ..abi::FlowValue::default()
        };
        (key, value)
    };
    let flows: flowloom_datapath::sys::Map<abi::FlowKey, abi::FlowValue> = {
        let path = datapath.pin_dir().join("maps").join(abi::map_name::SRV_FLOWS);
        flowloom_datapath::sys::Map::from_fd(flowloom_datapath::sys::obj_get(&path)?)?
    };
    for (key, value) in [flow(2, 53), flow(9, 54)] {
        flows.set(&key, &value)?;
    }
    let mut entry = abi::CtEntry { rev_nat: 2, flags: abi::ct_flags::ORIG_IS_LO, ..abi::CtEntry::default() };
    let mut key = abi::CtKey {
        vpc: VPC.0,
        hi: backend(30).ip.into(),
        hi_port: backend(30).port.to_be_bytes(),
        protocol: 17,
        ..abi::CtKey::default()
    };
    let table = conntrack(&datapath);
    table.set(&key, &entry)?;
    // The same tuple spoken to without a service, and for another.
    for other in [0, 9] {
        key.lo_port = [0, other as u8 + 1];
        entry.rev_nat = other;
        table.set(&key, &entry)?;
    }
    let view = datapath.view();
    let ended = EndedBackend {
        vpc: VPC,
        service: ServiceId(2),
        protocol: 17,
        backend: (backend(30).ip, backend(30).port),
    };
    assert_eq!(view.end_backends(&[EndedBackend { service: ServiceId(3), ..ended }])?, Default::default());
    let found = view.end_backends(&[ended])?;
    assert_eq!(found.connections, 1);
    assert_eq!(table.entries()?.len(), 2);
    assert_eq!(view.service_flows(10)?, [flow(9, 54)]);
    let sockets = Diag::in_netns(ns)?.connected_udp()?;
    let local = |s: &UdpSocket| s.local_addr().expect("address").port();
    let hit: Vec<u16> =
        sockets.iter().filter(|s| found.sockets.contains(&s.cookie)).map(|s| s.local.port()).collect();
    assert_eq!(hit, [local(&through)]);
    assert_ne!(local(&through), local(&direct));
    Ok(())
}
