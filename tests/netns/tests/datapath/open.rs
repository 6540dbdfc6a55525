//! Opening, adopting, attaching, leaving: what is pinned outlives its agent, and nothing else stays.

use std::fs;
use std::os::fd::AsFd as _;

use crate::common::*;
use flowloom_bpf_abi::map_name::PINNED;
use flowloom_compiler::EndpointId;
use flowloom_datapath::{
    Config, Datapath, Delivery, DeviceInfo, Error, Forwarding, Hook, NodeSettings, Problem, SocketHook, sys,
    uninstall,
};
use flowloom_testkit::{Bpffs, PATIENCE, eventually, temp_dir};

#[test]
fn opening_again_writes_nothing_and_keeps_every_object() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut first = Datapath::open(config(&fs))?;
    assert!(first.writes() > 0 && !first.opened().adopted_programs);
    let devices = populate(&mut node, &mut first)?;
    let settings = NodeSettings { uplink_mtu: 1500, default_vpc: 7, ..NodeSettings::default() };
    assert!(first.set_node(&settings)? && !first.set_node(&settings)?);
    let (state, ids) = (first.read_back()?, pinned_ids(&config(&fs).pin_root));
    assert_eq!(ids.len(), PINNED.len() + Hook::ALL.len() + SocketHook::ALL.len() + 4, "{ids:?}");
    drop(first);

    // Its links run while nobody holds them.
    let chain = node.inside(|| sys::tcx_chain(devices[0].ifindex, sys::TcxHook::Ingress))?;
    assert_eq!(chain.programs.len(), 1);

    let mut again = Datapath::open(config(&fs))?;
    assert_eq!(again.writes(), 0);
    assert!(again.opened().adopted_programs);
    assert_eq!(again.opened().adopted_maps, PINNED.len());
    for (id, device) in (1..).zip(&devices) {
        node.inside(|| again.attach_endpoint(EndpointId(id), device))?;
    }
    assert!(!again.set_node(&settings)?);
    assert_eq!(again.writes(), 0);
    assert_eq!(again.read_back()?, state);
    assert_eq!(pinned_ids(&config(&fs).pin_root), ids);
    assert_eq!(node.inside(|| again.audit())?, []);
    Ok(())
}

#[test]
fn a_pinned_map_of_another_size_is_refused_and_left_alone() -> Result {
    let fs = Bpffs::mount()?;
    drop(Datapath::open(config(&fs))?);
    let ids = pinned_ids(&config(&fs).pin_root);
    let larger = Config { conntrack_entries: 16_384, ..config(&fs) };
    let error = Datapath::open(larger).expect_err("another size");
    assert!(matches!(error, Error::PinMismatch { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("fl_conntrack") && text.contains("max entries 8192, expected 16384"), "{text}");
    assert_eq!(pinned_ids(&config(&fs).pin_root), ids);
    // With the old size it still opens.
    assert_eq!(Datapath::open(config(&fs))?.writes(), 0);
    Ok(())
}

#[test]
fn pins_of_another_abi_version_are_refused_and_left_alone() -> Result {
    let fs = Bpffs::mount()?;
    let open = Datapath::open(config(&fs))?;
    let newer = config(&fs).pin_root.join("v999/maps");
    fs::create_dir_all(&newer)?;
    let map = sys::obj_get(&open.pin_dir().join("maps/fl_vpcs"))?;
    sys::obj_pin(map.as_fd(), &newer.join("fl_vpcs"))?;
    drop(open);
    let before = tree(&config(&fs).pin_root);
    let error = Datapath::open(config(&fs)).expect_err("another version");
    assert!(matches!(error, Error::ForeignAbi { .. }), "{error}");
    assert!(error.to_string().contains("999"), "{error}");
    assert_eq!(tree(&config(&fs).pin_root), before);
    // Its removal is ours too.
    uninstall(&config(&fs).pin_root)?;
    assert_eq!(tree(&config(&fs).pin_root), Vec::<std::path::PathBuf>::new());
    Ok(())
}

#[test]
fn what_is_not_ours_in_the_pin_directory_is_refused() -> Result {
    let fs = Bpffs::mount()?;
    let open = Datapath::open(config(&fs))?;
    let maps = open.pin_dir().join("maps");
    let stranger = maps.join("not_ours");
    sys::obj_pin(sys::obj_get(&maps.join("fl_vpcs"))?.as_fd(), &stranger)?;
    drop(open);
    let error = Datapath::open(config(&fs)).expect_err("a stranger");
    assert!(error.to_string().contains("not_ours"), "{error}");
    fs::remove_file(&stranger)?;

    // A pin reached through a symbolic link could be anything.
    fs::rename(maps.join("fl_vpcs"), config(&fs).pin_root.join("moved"))
        .or_else(|_| fs::remove_file(maps.join("fl_vpcs")))?;
    std::os::unix::fs::symlink("/sys/fs/bpf/elsewhere", maps.join("fl_vpcs"))?;
    let error = Datapath::open(config(&fs)).expect_err("a link");
    assert!(matches!(error, Error::ForeignPin { .. }), "{error}");
    Ok(())
}

#[test]
fn a_map_that_only_a_newer_build_knows_stops_no_downgrade() -> Result {
    let fs = Bpffs::mount()?;
    let open = Datapath::open(config(&fs))?;
    let maps = open.pin_dir().join("maps");
    sys::obj_pin(sys::obj_get(&maps.join("fl_vpcs"))?.as_fd(), &maps.join("fl_from_later"))?;
    drop(open);
    let again = Datapath::open(config(&fs))?;
    assert_eq!((again.writes(), again.opened().adopted_maps), (0, PINNED.len()));
    drop(again);
    uninstall(&config(&fs).pin_root)?;
    assert!(!config(&fs).pin_root.exists());
    Ok(())
}

#[test]
fn a_device_that_went_is_detached_without_complaint() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    populate(&mut node, &mut datapath)?;
    node.ns.exec_ok(&["ip", "link", "del", "wl1"])?;
    let dead: Vec<_> = node.inside(|| datapath.audit())?.into_iter().map(|f| f.problem).collect();
    assert_eq!(dead, [Problem::Dead, Problem::Dead]);
    node.inside(|| datapath.detach_endpoint(EndpointId(1)))?;
    assert_eq!(node.inside(|| datapath.audit())?, []);
    assert_eq!(datapath.attached()?.len(), 2);
    assert_eq!(datapath.read_back()?.devices.len(), 1);
    Ok(())
}

#[test]
fn two_agents_never_share_pins() -> Result {
    let fs = Bpffs::mount()?;
    let first = Datapath::open(config(&fs))?;
    let error = Datapath::open(config(&fs)).expect_err("a second one");
    assert!(error.to_string().contains("another process"), "{error}");
    drop(first);
    Datapath::open(config(&fs))?;
    Ok(())
}

#[test]
fn another_build_exchanges_the_programs_inside_the_same_links() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut old = Datapath::open(config(&fs))?;
    populate(&mut node, &mut old)?;
    let (links, state) = (old.attached()?, old.read_back()?);
    drop(old);

    let new = Datapath::open_object(config(&fs), other_build()?)?;
    assert!(!new.opened().adopted_programs);
    let now = new.attached()?;
    assert_eq!(now.len(), 4);
    for (was, is) in links.iter().zip(&now) {
        assert_eq!((was.hook, was.ifindex, was.link_id), (is.hook, is.ifindex, is.link_id));
        assert_ne!(was.prog_id, is.prog_id);
    }
    assert_eq!(new.read_back()?, state);
    assert_eq!(node.inside(|| new.audit())?, []);
    let builds = fs::read_dir(new.pin_dir().join("programs"))?.count();
    assert_eq!(builds, 1, "the old build's programs stayed pinned");
    Ok(())
}

#[test]
fn programs_pinned_in_part_are_loaded_anew() -> Result {
    let fs = Bpffs::mount()?;
    let open = Datapath::open(config(&fs))?;
    let programs = tree(&open.pin_dir().join("programs"));
    let victim = open.pin_dir().join("programs").join(&programs[0]);
    drop(open);
    fs::remove_file(victim)?;
    let again = Datapath::open(config(&fs))?;
    assert!(!again.opened().adopted_programs);
    assert_eq!(tree(&again.pin_dir().join("programs")), programs);
    Ok(())
}

#[test]
fn maps_that_vanished_are_made_again_and_the_programs_with_them() -> Result {
    let fs = Bpffs::mount()?;
    let open = Datapath::open(config(&fs))?;
    let vpcs = open.pin_dir().join("maps/fl_vpcs");
    drop(open);
    fs::remove_file(&vpcs)?;
    let again = Datapath::open(config(&fs))?;
    // Adopting the pinned programs would have left them with a map that nobody can write.
    assert!(!again.opened().adopted_programs);
    assert!(vpcs.exists());
    Ok(())
}

#[test]
fn programs_that_use_another_map_than_the_pinned_one_are_not_adopted() -> Result {
    let (fs, elsewhere) = (Bpffs::mount()?, Bpffs::mount()?);
    let open = Datapath::open(config(&fs))?;
    let vpcs = open.pin_dir().join("maps/fl_vpcs");
    drop(open);
    // As after a kill between making the map anew and loading the programs.
    let other = Datapath::open(config(&elsewhere))?;
    fs::remove_file(&vpcs)?;
    sys::obj_pin(sys::obj_get(&other.pin_dir().join("maps/fl_vpcs"))?.as_fd(), &vpcs)?;
    let again = Datapath::open(config(&fs))?;
    assert_eq!((again.opened().adopted_maps, again.opened().adopted_programs), (PINNED.len(), false));
    drop(again);
    assert_eq!(Datapath::open(config(&fs))?.writes(), 0);
    Ok(())
}

#[test]
fn a_program_put_in_front_of_ours_is_found_by_the_audit() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    assert_eq!(node.inside(|| datapath.audit())?, []);
    // The same hook's other program of the object serves as the stranger.
    let stranger = tree(&datapath.pin_dir().join("programs"));
    let stranger = stranger.iter().find(|p| p.ends_with("to_uplink")).expect("pinned");
    let program = sys::obj_get(&datapath.pin_dir().join("programs").join(stranger))?;
    let id = sys::prog_facts(program.as_fd())?.id;
    let link =
        node.inside(|| sys::link_create(program.as_fd(), devices[1].ifindex, sys::TcxHook::Ingress))?;
    let found = node.inside(|| datapath.audit())?;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].hook, found[0].ifindex), (Hook::FromEndpoint, devices[1].ifindex));
    assert_eq!(found[0].problem, Problem::NotFirst(vec![id]));
    drop(link);
    Ok(())
}

#[test]
fn ours_goes_in_front_of_what_was_there() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let device = node.workload("wl1")?;
    let programs = tree(&datapath.pin_dir().join("programs"));
    let stranger = programs.iter().find(|p| p.ends_with("to_uplink")).expect("pinned");
    let program = sys::obj_get(&datapath.pin_dir().join("programs").join(stranger))?;
    let _link = node.inside(|| sys::link_create(program.as_fd(), device.ifindex, sys::TcxHook::Ingress))?;
    node.inside(|| datapath.attach_endpoint(EndpointId(1), &device))?;
    assert_eq!(node.inside(|| datapath.audit())?, []);
    assert_eq!(node.inside(|| sys::tcx_chain(device.ifindex, sys::TcxHook::Ingress))?.programs.len(), 2);
    Ok(())
}

#[test]
fn links_of_devices_that_went_are_forgotten_when_opening() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    drop(datapath);
    node.ns.exec_ok(&["ip", "link", "del", "wl1"])?;
    let again = Datapath::open(config(&fs))?;
    assert_eq!(again.writes(), 2);
    let left: Vec<_> = again.attached()?.iter().map(|a| a.ifindex).collect();
    assert_eq!(left, [devices[1].ifindex; 2]);
    Ok(())
}

#[test]
fn an_endpoint_that_moves_to_another_device_leaves_the_old_one() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let (old, new) = (node.workload("wl1")?, node.workload("wl2")?);
    node.inside(|| datapath.attach_endpoint(EndpointId(1), &old))?;
    node.inside(|| datapath.attach_endpoint(EndpointId(1), &new))?;
    assert_eq!(datapath.read_back()?.devices.keys().copied().collect::<Vec<_>>(), [new.ifindex]);
    assert_eq!(datapath.attached()?.iter().map(|a| a.ifindex).collect::<Vec<_>>(), [new.ifindex; 2]);
    node.inside(|| datapath.detach_endpoint(EndpointId(1)))?;
    node.inside(|| datapath.detach_endpoint(EndpointId(1)))?;
    assert_eq!(datapath.attached()?, []);
    assert!(datapath.read_back()?.devices.is_empty());
    Ok(())
}

#[test]
fn delivery_is_found_at_the_device() -> Result {
    let mut node = Node::new()?;
    assert_eq!(node.workload("wl1")?.delivery, Delivery::Peer);
    node.veth("same", None)?;
    let inspect = |mode| node.inside(|| DeviceInfo::inspect("same", mode));
    let same = inspect(Forwarding::Ebpf)?;
    assert_eq!((same.delivery, same.mtu), (Delivery::Redirect, 1450));
    assert_eq!(inspect(Forwarding::Stack)?.delivery, Delivery::Stack);
    node.ns.exec_ok(&["ip", "tuntap", "add", "tap1", "mode", "tap"])?;
    assert_eq!(node.inside(|| DeviceInfo::inspect("tap1", Forwarding::Ebpf))?.delivery, Delivery::Redirect);
    Ok(())
}

#[test]
fn uninstall_leaves_nothing_and_may_be_repeated() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut datapath = Datapath::open(config(&fs))?;
    let devices = populate(&mut node, &mut datapath)?;
    let vpcs = sys::map_facts(sys::obj_get(&datapath.pin_dir().join("maps/fl_vpcs"))?.as_fd())?.id;
    drop(datapath);
    let root = config(&fs).pin_root;
    uninstall(&root)?;
    assert!(!root.exists());
    for hook in [sys::TcxHook::Ingress, sys::TcxHook::Egress] {
        assert_eq!(node.inside(|| sys::tcx_chain(devices[0].ifindex, hook))?.programs, []);
    }
    // The kernel frees programs and maps a moment after their last reference went.
    eventually(PATIENCE, || match sys::map_by_id(vpcs) {
        Ok(_) => Err("the map lives"),
        Err(_) => Ok(()),
    });
    uninstall(&root)?;
    Ok(())
}

#[test]
fn a_bpffs_is_mounted_where_there_is_none() -> Result {
    let dir = temp_dir("pins")?;
    let root = dir.path().join("fl");
    let open = Datapath::open(Config {
        pin_root: root.clone(),
        conntrack_entries: 4096,
        conntrack_new_entries: 4096,
        ..Config::default()
    });
    let unmount = || nix::mount::umount2(&root, nix::mount::MntFlags::MNT_DETACH);
    let opened = open.map(|o| o.pin_dir().join("maps/fl_vpcs").exists());
    unmount()?;
    assert!(opened?);
    Ok(())
}
