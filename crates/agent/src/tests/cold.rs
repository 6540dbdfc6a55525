//! A start on a node where nothing was in force: what serves first does not wait for what connects the node with others.

use super::*;
use crate::wiring::{HostRoute, Via};

fn loading() -> Node {
    let node = Node::new(Some(DOCUMENT));
    node.plane.0.lock().unwrap().loading = true;
    node
}

#[test]
fn a_start_without_programs_ends_where_every_other_does() {
    let (cold, warm) = (loading(), Node::new(Some(DOCUMENT)));
    let (mut core, handle) = cold.agent_and_handle(|_| {});
    let other = warm.agent();
    assert!(handle.health().ready && core.last.errors.is_empty());
    assert_eq!((cold.state(), cold.devices()), (warm.state(), warm.devices()));
    {
        let (cold_net, warm_net) = (cold.net.0.lock().unwrap(), warm.net.0.lock().unwrap());
        assert_eq!((&cold_net.node, &cold_net.routes), (&warm_net.node, &warm_net.routes));
        assert_eq!((&cold_net.masquerade, &cold_net.raised), (&warm_net.masquerade, &warm_net.raised));
        let mtus = |net: &fakes::Net| net.devices.values().map(|d| d.mtu).collect::<Vec<_>>();
        assert_eq!(mtus(&cold_net), mtus(&warm_net));
        let maps = cold.plane.0.lock().unwrap();
        assert_eq!((&maps.guarded, &maps.linked), (&cold_net.raised, &cold_net.raised));
    }
    assert!(core.unsettled.is_empty() && core.settle_at.is_none());
    drop(other);
    let before = cold.writes();
    core.pass();
    assert_eq!(cold.writes(), before);
}

#[test]
fn the_overlay_device_is_off_until_its_programs_judge_what_leaves_it() {
    let node = Node::new(Some(DOCUMENT));
    node.plane.0.lock().unwrap().unattached = true;
    let mut core = node.agent();
    assert!(core.last.errors.iter().any(|e| e.contains("node programs: ")), "{:?}", core.last.errors);
    {
        let net = node.net.0.lock().unwrap();
        assert!(net.node.as_ref().is_some_and(|n| n.overlay.is_some()));
        assert_eq!(net.open, None);
    }
    node.plane.0.lock().unwrap().unattached = false;
    core.pass();
    assert_eq!(node.net.0.lock().unwrap().open, Some(3));
    let before = node.writes();
    core.pass();
    assert_eq!(node.writes(), before);
}

#[test]
fn a_program_that_is_refused_late_is_named_and_the_node_is_never_ready() {
    let node = loading();
    node.plane.0.lock().unwrap().refused = Some("R5 !read_ok".into());
    // What a life before this one left.
    let old = HostRoute { destination: "10.244.0.9/32".parse().unwrap(), via: Via::Overlay, source: None };
    node.net.0.lock().unwrap().routes.insert(old);
    let (mut core, handle) = node.agent_and_handle(|config| config.masquerade.enabled = true);
    for _ in 0..2 {
        let health = handle.health();
        assert!(!health.ready && core.applied_generation == 0);
        let why = health.waiting_for.join(" ");
        assert!(why.contains("datapath: ") && why.contains("verifying from_overlay: R5 !read_ok"), "{why}");
        assert_eq!(core.cni_add(&add("c1")).unwrap_err().code, ErrorCode::NotReady);
        assert!(core.retry_at.is_some());
        {
            let (net, maps) = (node.net.0.lock().unwrap(), node.plane.0.lock().unwrap());
            // Nothing leads to other nodes or lets them in, what is up is guarded, and what it says outside is said by the node.
            assert_eq!(net.node.as_ref().and_then(|n| n.overlay.clone()), None);
            assert!(net.masquerade.is_some() && net.routes.is_empty());
            assert_eq!(net.raised, maps.guarded);
        }
        core.pass();
    }
    node.plane.0.lock().unwrap().refused = None;
    core.pass();
    assert!(handle.health().ready && core.unloaded.is_empty());
    {
        let net = node.net.0.lock().unwrap();
        assert!(net.node.as_ref().is_some_and(|n| n.overlay.is_some()) && !net.routes.is_empty());
    }
    core.cni_add(&add("c1")).unwrap();
}

#[test]
fn an_endpoint_whose_programs_are_refused_is_never_switched_on() {
    let node = loading();
    let why = Some("R5 !read_ok".to_owned());
    {
        let mut maps = node.plane.0.lock().unwrap();
        (maps.unguarded, maps.refused) = (true, why);
    }
    let (core, handle) = node.agent_and_handle(|_| {});
    assert!(!handle.health().ready && core.attached.is_empty());
    assert!(core.wiring_errors.values().all(|e| e.contains("R5 !read_ok")) && core.wiring_errors.len() == 3);
    assert!(node.net.0.lock().unwrap().raised.is_empty());
    let state = node.state();
    assert!(state.endpoints.is_empty() && !state.peers.is_empty(), "what needs no program is there");
}
