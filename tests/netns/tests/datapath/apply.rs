//! Plans in real maps: round trips, batches, growth, interruption.

use std::os::fd::AsFd as _;

use crate::common::*;
use flowloom_bpf_abi::{self as abi, verdict};
use flowloom_compiler::worldgen::{self, Rng};
use flowloom_compiler::{
    EndpointId, Identity, NodePlan, Numbers, Op, Peer, PolicyEntries, PolicySlot, VpcId, compile, diff,
};
use flowloom_datapath::{Datapath, Delivery, DeviceInfo, lower, sys};
use flowloom_testkit::Bpffs;

#[test]
fn what_is_applied_is_read_back() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    let state = datapath.read_back()?;

    assert_eq!(state.vpcs, [(100, abi::VpcRecord { vni: 100, generation: 1, flags: 0, pad: 0 })].into());
    let address = |ip: [u8; 4]| abi::AddressKey { vpc: 100, addr: abi::Addr::v4(ip) };
    let gateway = abi::AddressRecord { endpoint: 0, flags: abi::address_flags::GATEWAY };
    let of = |endpoint| abi::AddressRecord { endpoint, flags: 0 };
    let want = [
        (address([10, 0, 0, 1]), gateway),
        (address([10, 0, 0, 11]), of(1)),
        (address([10, 0, 0, 12]), of(2)),
    ];
    assert_eq!(state.addresses, want.into());
    let record = |id, ip, device| lower::endpoint_record(&endpoint(id, ip, (1, 2)), device);
    let want = [(1, record(1, "10.0.0.11", &devices[0])?), (2, record(2, "10.0.0.12", &devices[1])?)];
    assert_eq!(state.endpoints, want.into());
    let policy = policy(257, 2, verdict::ALLOW);
    assert_eq!(state.policies, [(1, policy.clone()), (2, policy.clone())].into());
    assert_eq!(state.peers.len(), 2);
    assert_eq!(state.nodes, [(abi::Addr::v4([192, 0, 2, 1]), lower::node_record(&local_node()))].into());
    assert_eq!(state.devices.values().map(|d| d.endpoint).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(datapath.view().policy(PolicySlot(1))?, Some(policy));
    assert_eq!(datapath.view().policy(PolicySlot(9))?, None);
    Ok(())
}

#[test]
fn everything_that_was_put_can_be_removed_and_removing_again_is_fine() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    populate(&mut node, &mut datapath)?;
    let (a, b) = (endpoint(1, "10.0.0.11", (1, 2)), endpoint(2, "10.0.0.12", (1, 2)));
    let nets = [&a, &b].map(|e| (e.vpc, e.ips[0].into()));
    let away = [
        Op::RemoveEndpoint(a),
        Op::RemoveEndpoint(b),
        Op::RemovePeers(nets.into()),
        Op::RemoveEntries {
            slot: PolicySlot(1),
            keys: vec![entry(257, verdict::ALLOW).0, entry(999, verdict::ALLOW).0],
        },
        Op::FreeSlots(vec![PolicySlot(1), PolicySlot(2), PolicySlot(77)]),
        Op::RemoveNode { address: local_node().tunnel, node: local_node() },
        Op::RemoveVpc { id: VpcId(100), vpc: vpc() },
    ];
    for _ in 0..2 {
        let report = datapath.apply(&away);
        assert!(report.is_clean(), "{:?}", report.failures);
        let state = datapath.read_back()?;
        assert_eq!(
            state.endpoints.len() + state.addresses.len() + state.peers.len() + state.policies.len(),
            0
        );
        assert_eq!(state.vpcs.len() + state.nodes.len(), 0);
    }
    Ok(())
}

#[test]
fn a_second_put_of_single_records_writes_nothing() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    populate(&mut node, &mut datapath)?;
    let state = datapath.read_back()?;
    let singles: Vec<Op> =
        pair().into_iter().filter(|o| !matches!(o, Op::PutPeers(_) | Op::PutSlots(_))).collect();
    let report = datapath.apply(&singles);
    assert_eq!((report.writes, report.failures.len()), (0, 0));
    // The generation belongs to the kernel: putting the VPC again never resets it.
    assert!(datapath.apply(&[Op::BumpGeneration(VpcId(100))]).is_clean());
    assert!(datapath.apply(&singles).is_clean());
    assert_eq!(datapath.view().vpc(VpcId(100))?.map(|r| r.generation), Some(2));
    assert_eq!(datapath.read_back()?.endpoints, state.endpoints);
    Ok(())
}

#[test]
fn ten_thousand_peers_go_in_and_out_in_batches() -> Result {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let key =
        |i: u32| (VpcId(5), ipnet::IpNet::from(std::net::IpAddr::from((0x0a00_0000 + i).to_be_bytes())));
    let peer = |i: u32| Peer {
        identity: Identity(256 + i),
        flags: 0,
        tunnel: Some("192.0.2.7".parse().expect("ip")),
    };
    let peers: Vec<_> = (0..10_000).map(|i| (key(i), peer(i))).collect();
    let report = datapath.apply(&[Op::PutPeers(peers.clone())]);
    assert!(report.is_clean());
    assert_eq!(report.writes, 1);
    let state = datapath.read_back()?;
    assert_eq!(state.peers.len(), 10_000);
    for ((vpc, net), peer) in &peers {
        assert_eq!(state.peers[&lower::peer_key(*vpc, *net)], lower::peer_record(peer));
    }
    // Every second one, and as many that never were.
    let odd: Vec<_> = (0..10_000).map(|i| if i % 2 == 0 { key(i) } else { key(i + 100_000) }).collect();
    assert!(datapath.apply(&[Op::RemovePeers(odd)]).is_clean());
    let state = datapath.read_back()?;
    assert_eq!(state.peers.len(), 5_000);
    assert!(state.peers.values().all(|r| r.identity % 2 == 1));
    Ok(())
}

#[test]
fn batches_say_which_entries_were_there() -> Result {
    let fs = Bpffs::mount()?;
    let datapath = Datapath::open(config(&fs))?;
    let map = conntrack(&datapath);
    let key = |i: u32| abi::CtKey { vpc: i, ..Default::default() };
    let keys: Vec<_> = (0..5000).map(key).collect();
    let values = vec![abi::CtEntry::default(); keys.len()];
    assert_eq!(map.set_batch(&keys, &values)?, 2);
    let asked: Vec<_> = [7, 9999, 4999, 7, 0].map(key).into();
    assert_eq!(map.remove_batch(&asked)?, [true, false, true, false, true]);
    assert_eq!(map.entries()?.len(), 4997);
    assert_eq!(map.remove_batch(&[])?, Vec::<bool>::new());
    assert!(!map.insert_new(&key(1), &abi::CtEntry::default())?);
    assert!(map.insert_new(&key(7), &abi::CtEntry::default())?);
    Ok(())
}

#[test]
fn peers_fit_in_place_and_a_full_policy_grows_without_a_gap() -> Result {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let slot = PolicySlot(3);
    let inner_id = |d: &Datapath| -> std::io::Result<Option<u32>> {
        let outer = sys::Map::<u32, u32>::from_fd(sys::obj_get(&d.pin_dir().join("maps/fl_policy"))?)?;
        outer.get(&slot.0)
    };
    assert!(datapath.apply(&[Op::PutSlots(vec![(slot, policy(1000, 40, verdict::DROP))])]).is_clean());
    let first = inner_id(&datapath)?.expect("slot");
    let facts = sys::map_facts(sys::map_by_id(first)?.as_fd())?;
    assert_eq!((facts.max_entries, facts.flags, facts.name.as_str()), (82, 1, "fl_pol_3"));

    let more =
        |from, n| Op::AddEntries { slot, entries: policy(from, n, verdict::ALLOW).split_off(&entry(1, 0).0) };
    assert!(datapath.apply(&[more(2000, 40)]).is_clean());
    assert_eq!(inner_id(&datapath)?, Some(first), "it had room");
    let report = datapath.apply(&[more(3000, 40)]);
    assert!(report.is_clean(), "{:?}", report.failures);
    assert_ne!(inner_id(&datapath)?, Some(first), "a larger map took its place");
    let mut want = policy(1000, 40, verdict::DROP);
    want.extend((2000..2040).chain(3000..3040).map(|i| entry(i, verdict::ALLOW)));
    assert_eq!(datapath.view().policy(slot)?, Some(want));

    // Entries of a slot that is not there are an error, not a silence.
    let report =
        datapath.apply(&[Op::AddEntries { slot: PolicySlot(9), entries: policy(1, 1, verdict::ALLOW) }]);
    assert_eq!(report.failures.len(), 1);
    Ok(())
}

#[test]
fn an_inner_map_that_the_kernel_refuses_leaves_the_old_policy_and_the_other_slots() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    populate(&mut node, &mut datapath)?;
    let before = datapath.read_back()?;
    // A prefix longer than the key is what the kernel refuses here; any refusal of a filling must look the same.
    let mut bad = policy(257, 2, verdict::DROP);
    let (mut key, value) = entry(300, verdict::DROP);
    key.prefixlen = 65;
    bad.insert(key, value);
    let good = policy(257, 1, verdict::ALLOW);
    let mut changed = endpoint(1, "10.0.0.11", (4, 2));
    changed.revision = 2;
    let mut fine = endpoint(2, "10.0.0.12", (5, 2));
    fine.revision = 3;
    let report = datapath.apply(&[
        Op::PutSlots(vec![(PolicySlot(4), bad), (PolicySlot(5), good.clone())]),
        Op::PutEndpoint(changed),
        Op::PutEndpoint(fine),
        Op::FreeSlots(vec![PolicySlot(1)]),
    ]);
    assert_eq!(
        report.failures.iter().map(|f| f.object.to_string()).collect::<Vec<_>>(),
        ["policy slot 4", "endpoint red/e1"]
    );
    assert_eq!(report.deferred, 1);
    let after = datapath.read_back()?;
    assert_eq!(after.endpoints[&1], before.endpoints[&1]);
    assert_eq!(after.policies[&1], before.policies[&1]);
    assert_eq!((after.endpoints[&2].egress_slot, &after.policies[&5]), (5, &good));
    assert!(!after.policies.contains_key(&4));
    Ok(())
}

/// Devices for endpoints that no packet will reach.
fn devices_for(datapath: &mut Datapath, node: &Node, plans: &[&NodePlan]) -> Result {
    for endpoint in plans.iter().flat_map(|p| p.endpoints.values()) {
        if datapath.devices().contains_key(&endpoint.id) {
            continue;
        }
        let name = format!("w{}", endpoint.id);
        node.veth(&name, None)?;
        let device = node.inside(|| DeviceInfo::inspect(&name, flowloom_datapath::Forwarding::Ebpf))?;
        assert_eq!(device.delivery, Delivery::Redirect);
        node.inside(|| datapath.attach_endpoint(endpoint.id, &device))?;
    }
    Ok(())
}

fn plans(seed: u64) -> (NodePlan, NodePlan) {
    let mut rng = Rng::new(seed);
    let mut world = worldgen::world(&mut rng);
    let (mut numbers, local) = (Numbers::default(), worldgen::local_node());
    let before = compile(&world, &local, &mut numbers).plan;
    worldgen::mutate(&mut world, &mut rng);
    (before, compile(&world, &local, &mut numbers).plan)
}

#[test]
fn random_plans_are_applied_adopted_and_taken_away() -> Result {
    let fs = Bpffs::mount()?;
    let node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    for seed in 0..12 {
        let (before, after) = plans(seed);
        devices_for(&mut datapath, &node, &[&before, &after])?;
        for (old, new) in [(&NodePlan::default(), &before), (&before, &after)] {
            let report = datapath.apply(&diff(old, new));
            assert!(report.is_clean(), "seed {seed}: {:?}", report.failures);
            assert_eq!(datapath.remaining(new)?, [], "seed {seed}");
        }
        // A restart with the same plan: nothing to write, nothing changed.
        let state = datapath.read_back()?;
        drop(datapath);
        datapath = Datapath::open(config(&fs))?;
        let report = datapath.sync(&after)?;
        assert_eq!((report.writes, report.is_clean(), datapath.writes()), (0, true, 0), "seed {seed}");
        assert_eq!(datapath.read_back()?, state);
        let report = datapath.apply(&diff(&after, &NodePlan::default()));
        assert!(report.is_clean(), "seed {seed}: {:?}", report.failures);
        for id in datapath.read_back()?.devices.values().map(|d| EndpointId(d.endpoint)) {
            node.inside(|| datapath.detach_endpoint(id))?;
            node.ns.exec_ok(&["ip", "link", "del", &format!("w{id}")])?;
        }
        let config_only = flowloom_datapath::KernelState { config: state.config, ..Default::default() };
        assert_eq!(datapath.read_back()?, config_only, "seed {seed}");
    }
    Ok(())
}

#[test]
fn a_run_ended_before_any_write_is_finished_by_the_next_agent() -> Result {
    let fs = Bpffs::mount()?;
    let node = Node::new()?;
    let (before, after) = (0..200)
        .map(plans)
        .find(|(b, a)| {
            let ops = diff(b, a);
            ops.iter().any(|o| matches!(o, Op::PutSlots(_)))
                && ops.iter().any(|o| matches!(o, Op::PutPeers(_)))
                && ops.len() > 8
        })
        .expect("a change with slots and peers");
    let mut datapath = Datapath::open(config(&fs))?;
    devices_for(&mut datapath, &node, &[&before, &after])?;
    let devices = datapath.devices().clone();
    let ops = diff(&before, &after);
    let mut n = 0;
    loop {
        n += 1;
        assert!(datapath.sync(&before)?.is_clean());
        let stop = datapath.writes() + n;
        datapath.set_write_hook(Some(Box::new(move |w| {
            if w == stop { Err(format!("killed at write {n}")) } else { Ok(()) }
        })));
        let report = datapath.apply(&ops);
        if !report.aborted {
            assert!(report.is_clean() && report.writes < n);
            break;
        }
        assert_eq!(report.writes, n - 1);
        drop(datapath);
        datapath = Datapath::open(config(&fs))?;
        for (id, device) in &devices {
            node.inside(|| datapath.attach_endpoint(*id, device))?;
        }
        assert_eq!(datapath.writes(), 0, "links and devices were there");
        let report = datapath.sync(&after)?;
        assert!(report.is_clean(), "killed at write {n}: {:?}", report.failures);
        assert_eq!(datapath.remaining(&after)?, []);
    }
    println!("{} writes, a kill before each", n - 1);
    assert!(n > 5, "only {n} writes");
    Ok(())
}

#[test]
fn map_memory_is_what_the_kernel_charges() -> Result {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let memory = |d: &Datapath, name: &str| -> Result<u64> {
        Ok(d.view().memory()?.iter().find(|m| m.name == name).expect("map").bytes)
    };
    let per_entry = u64::try_from(std::mem::size_of::<abi::CtEntry>())?;
    assert!(memory(&datapath, abi::map_name::CONNTRACK)? > 8192 * per_entry);
    assert_eq!(memory(&datapath, "fl_policy inner maps")?, 0);
    let large: PolicyEntries = policy(1000, 4000, verdict::ALLOW);
    assert!(datapath.apply(&[Op::PutSlots(vec![(PolicySlot(1), large)])]).is_clean());
    assert!(memory(&datapath, "fl_policy inner maps")? > 4000 * 24);
    // Services' maps were left out of what is reported.
    let told = datapath.view().memory()?;
    let mut missing = abi::map_name::PINNED.iter().filter(|pinned| told.iter().all(|m| m.name != **pinned));
    assert_eq!(missing.next(), None);
    assert_eq!(told.len(), abi::map_name::PINNED.len() + 1, "and the inner maps");
    Ok(())
}
