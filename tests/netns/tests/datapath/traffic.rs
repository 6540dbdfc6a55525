//! Real packets: what is pinned carries them whatever happens to the agent.

use std::net::SocketAddr;
use std::time::Duration;

use crate::common::*;
use flowloom_compiler::EndpointId;
use flowloom_datapath::{CtFilter, Datapath, DeviceInfo};
use flowloom_testkit::{Bpffs, EchoServer, Ns, PATIENCE, TcpFlow, UdpReceiver, UdpSender, eventually};
use flowloom_testkit::{Mode, TcpServer};

/// The workload's side of endpoint `id`.
fn configure(ns: &Ns, device: &DeviceInfo, id: u32) -> Result {
    let name = format!("{}-p", device.name);
    let mac = format!("02:00:00:00:00:{id:02x}");
    ns.exec_ok(&["ip", "link", "set", &name, "address", &mac, "up"])?;
    ns.exec_ok(&["ip", "addr", "add", &format!("10.0.0.1{id}/24"), "dev", &name])?;
    Ok(())
}

#[test]
fn no_packet_is_lost_while_the_agent_dies_and_another_build_takes_over() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    for (id, device) in (1..).zip(&devices) {
        configure(node.peer(id), device, id as u32)?;
    }
    let server: SocketAddr = "10.0.0.12:8000".parse()?;
    let _echo = TcpServer::start(node.peer(2), server, Mode::Echo)?;
    let flow = TcpFlow::start(node.peer(1), server, Duration::from_millis(1), PATIENCE)?;
    let sink: SocketAddr = "10.0.0.12:9000".parse()?;
    let receiver = UdpReceiver::start(node.peer(2), sink)?;
    let sender = UdpSender::start(node.peer(1), None, sink, Duration::from_micros(500), 7, 64)?;
    let trips = |more: u64| {
        let target = flow.round_trips() + more;
        eventually(PATIENCE, || if flow.round_trips() >= target { Ok(()) } else { Err(flow.round_trips()) });
    };
    trips(20);
    let before = pinned_ids(&config(&fs).pin_root);

    drop(datapath);
    trips(20);
    let adopted = Datapath::open(config(&fs))?;
    trips(20);
    drop(adopted);
    let other = Datapath::open_object(config(&fs), other_build()?)?;
    assert!(!other.opened().adopted_programs);
    trips(20);

    let now = pinned_ids(&config(&fs).pin_root);
    let links = |ids: &std::collections::BTreeMap<std::path::PathBuf, u32>| -> Vec<_> {
        ids.iter().filter(|(p, _)| p.iter().any(|c| c == "links")).map(|(p, id)| (p.clone(), *id)).collect()
    };
    assert_eq!(links(&before), links(&now));
    let rows = other.view().conntrack(&CtFilter { port: Some(8000), ..CtFilter::default() }, 10)?;
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert!(rows[0].established && rows[0].responder.packets > 0);
    let report = flow.stop();
    assert_eq!(report.error, None);
    // A retransmission would take 200 ms at least.
    println!("{} round trips, the longest {:?}", report.round_trips, report.longest);
    let sent = sender.stop();
    eventually(PATIENCE, || match receiver.missing(7, sent) {
        lost if lost.is_empty() => Ok(()),
        lost => Err(format!("{} of {sent} lost: {:?}", lost.len(), &lost[..lost.len().min(10)])),
    });
    assert!(other.view().traffic(EndpointId(1))?.egress.packets > sent);
    Ok(())
}

#[test]
fn nothing_passes_before_an_endpoint_has_its_record() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = [node.workload("wl1")?, node.workload("wl2")?];
    for (id, device) in (1..).zip(&devices) {
        node.inside(|| datapath.attach_endpoint(EndpointId(id), device))?;
        configure(node.peer(id as usize), device, id)?;
    }
    let target: SocketAddr = "10.0.0.12:7000".parse()?;
    let echo = EchoServer::start(node.peer(2), target)?;
    // Static neighbours: the datapath does not answer ARP for an endpoint that it does not know.
    let mac = devices[0].mac.to_string();
    node.peer(1).exec_ok(&["ip", "neigh", "replace", "10.0.0.12", "lladdr", &mac, "dev", "wl1-p"])?;
    let sender = UdpSender::start(node.peer(1), None, target, Duration::from_millis(1), 7, 64)?;
    eventually(PATIENCE, || {
        let drops: u64 = datapath.view().drops().map_err(|e| e.to_string())?.iter().map(|d| d.packets).sum();
        if drops >= 50 { Ok(()) } else { Err(format!("{drops} drops")) }
    });
    assert_eq!(echo.received(), 0);
    assert!(datapath.apply(&pair()).is_clean());
    eventually(PATIENCE, || if echo.received() > 10 { Ok(()) } else { Err(echo.received()) });
    assert!(sender.stop() > 0);
    Ok(())
}
