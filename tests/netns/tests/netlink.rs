//! flowloom-netlink against the kernel: what is written arrives, a second pass writes nothing, what is gone may be
//! deleted, and what is not ours stays.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use flowloom_netlink::sysctl::{self, Key, Scope, Setting};
use flowloom_netlink::{
    Address, Batch, Error, Event, Handle, IfIndex, Interest, LinkChange, LinkName, Mac, Monitor, Neighbour,
    Netns, PROTOCOL, Route, RouteKind, RouteTable, Rule, RuleFamily, VethEnd, VethPair, VethSpec, VxlanSpec,
};
use flowloom_testkit::{Capture, Ns, PATIENCE, Packet, RawSender, connect, eventually, temp_dir};
use ipnet::IpNet;

fn name(s: &str) -> LinkName {
    LinkName::new(s).unwrap()
}

fn net(s: &str) -> IpNet {
    s.parse().unwrap()
}

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

const NEAR_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const FAR_MAC: Mac = Mac([2, 0, 0, 0, 0, 2]);

fn pair(handle: &mut Handle, far: &Netns) -> Result<VethPair> {
    let (near_name, far_name) = (name("fltest0"), name("eth0"));
    let spec = VethSpec {
        near: VethEnd { name: &near_name, mac: Some(NEAR_MAC) },
        far: VethEnd { name: &far_name, mac: Some(FAR_MAC) },
        far_netns: Some(far),
        mtu: 1422,
        alias: Some("flowloom:test/a"),
        near_addr_gen_none: true,
        near_up: true,
        queues: None,
    };
    Ok(handle.create_veth(&spec)?)
}

#[test]
fn a_veth_pair_is_made_as_asked_with_its_far_end_in_the_other_namespace() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let (mut ha, mut hb) = (a.handle()?, b.handle()?);
    let made = pair(&mut ha, &b)?;
    assert_eq!(made.near_mac, Some(NEAR_MAC));
    let near = ha.expect_link(&name("fltest0"))?;
    assert_eq!((near.index, near.mac, near.mtu, near.up), (made.near, Some(NEAR_MAC), 1422, true));
    assert_eq!(
        (near.kind.as_deref(), near.peer, near.peer_netns.is_some()),
        (Some("veth"), Some(made.far), true)
    );
    assert_eq!(near.alias.as_deref(), Some("flowloom:test/a"));
    assert!(near.is_ours());
    assert_eq!(near.addr_gen_none, Some(true));
    let far = hb.expect_link(&name("eth0"))?;
    assert_eq!((far.index, far.mac, far.mtu, far.up), (made.far, Some(FAR_MAC), 1422, false));
    hb.change_link(made.far, &LinkChange::up())?;
    // The near end has no link-local address, which it would have had if it went up first.
    eventually(PATIENCE, || match ha.link_by_index(made.near) {
        Ok(Some(l)) if l.carrier => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(ha.addresses(Some(made.near))?, []);
    // Taken names are refused and leave nothing behind.
    let before = (ha.links()?.len(), hb.links()?.len());
    let refused = pair(&mut ha, &b).unwrap_err().to_string();
    assert!(refused.contains("fltest0") && refused.contains("EEXIST"), "{refused}");
    assert_eq!((ha.links()?.len(), hb.links()?.len()), before);
    // Deleting takes both ends, and is a success when it is done already.
    assert!(ha.delete_link(made.near)?);
    assert!(!ha.delete_link(made.near)?);
    assert_eq!(hb.link(&name("eth0"))?, None);
    assert!(!ha.delete_our_link(&name("fltest0"))?);
    Ok(())
}

#[test]
fn several_links_are_deleted_together_and_no_other_with_them() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut h = a.handle()?;
    let mut made = Vec::new();
    for i in 0..20 {
        made.push(connect(&a, &name(&format!("fl{i}")), &b, &name(&format!("fl{i}")), 1500)?.near);
    }
    let (gone, stay) = made.split_at(15);
    h.delete_link(gone[3])?;
    assert_eq!(h.delete_links(gone)?, 14);
    assert_eq!(h.delete_links(gone)?, 0);
    assert_eq!(h.delete_links(&[])?, 0);
    let left: Vec<_> = h.links()?.into_iter().map(|l| l.index).filter(|i| *i != IfIndex::LOOPBACK).collect();
    assert_eq!(left, stay);
    // Loopback cannot be deleted, and nothing else is then.
    let refused = h.delete_links(&[stay[0], IfIndex::LOOPBACK]);
    assert!(refused.is_err());
    assert!(h.link_by_index(stay[0])?.is_some());
    Ok(())
}

#[test]
fn a_second_pass_over_links_addresses_routes_neighbours_rules_and_sysctls_writes_nothing() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut h = a.handle()?;
    let made = pair(&mut h, &b)?;
    let link = LinkChange {
        mtu: Some(1300),
        alias: Some("flowloom:other".into()),
        mac: Some(Mac([2, 0, 0, 0, 0, 9])),
        ..LinkChange::up()
    };
    let addresses = ["10.7.0.1/24", "fd07::1/64"].map(|n| Address::new(made.near, net(n)));
    let routes = [
        Route::on_link(net("10.8.0.0/16"), made.near),
        Route { mtu: Some(1280), ..Route::via(net("10.9.0.0/16"), ip("10.7.0.2"), made.near) },
        Route { onlink: true, ..Route::via(net("10.10.0.0/16"), ip("192.0.2.1"), made.near) },
        Route { table: RouteTable(70_001), metric: Some(7), ..Route::default_via(ip("10.7.0.2"), made.near) },
        Route { kind: RouteKind::Blackhole, link: None, ..Route::on_link(net("10.11.0.0/16"), made.near) },
        Route::on_link(net("fd08::/64"), made.near),
        Route { mtu: Some(1280), ..Route::via(net("fd09::/64"), ip("fd07::2"), made.near) },
        Route { kind: RouteKind::Unreachable, link: None, ..Route::on_link(net("fd0a::/64"), made.near) },
        Route::default_via(ip("fd07::2"), made.near),
    ];
    let neighbours = ["10.7.0.2", "fd07::2"].map(|i| Neighbour { link: made.near, ip: ip(i), mac: FAR_MAC });
    let rule = |family, from: &str| Rule {
        family,
        priority: 99,
        from: Some(net(from)),
        to: None,
        mark: Some((0x10, 0xff)),
        input: Some(name("lo")),
        table: RouteTable(70_001),
    };
    let rules = [rule(RuleFamily::V4, "10.7.0.0/24"), rule(RuleFamily::V6, "fd07::/64")];
    let settings = [
        Setting::link(&name("fltest0"), Key::RpFilter, 2),
        Setting::link(&name("fltest0"), Key::AcceptRa, 0),
        Setting { scope: Scope::All, key: Key::Forwarding4, value: 1 },
    ];
    let mut pass = || -> Result<[usize; 6]> {
        let mut n = [0; 6];
        n[0] += usize::from(h.ensure_link(made.near, &link)?);
        for a in &addresses {
            n[1] += usize::from(h.ensure_address(a)?);
        }
        for r in &routes {
            n[2] += usize::from(h.ensure_route(r)?);
        }
        for x in &neighbours {
            n[3] += usize::from(h.ensure_neighbour(x)?);
        }
        for r in &rules {
            n[4] += usize::from(h.ensure_rule(r)?);
        }
        n[5] += h.ensure_sysctls(&settings)?;
        Ok(n)
    };
    // The kernel's own notifications, not our counters, say whether the second pass wrote.
    let mut monitor = Monitor::in_netns(&a, &[Interest::Links, Interest::Addresses, Interest::Routes])?;
    assert_eq!(pass()?, [1, 2, 9, 2, 2, 3]);
    // A worker of the kernel tells of an IPv6 address last, and on a busy machine after the next pass had begun.
    let mut seen = Vec::new();
    eventually(PATIENCE, || {
        seen.extend(monitor.read().map_err(|e| e.to_string())?);
        let own = |e: &Event| matches!(e, Event::RouteChanged(r) if r.destination == net("fd07::1/128"));
        if seen.iter().any(own) { Ok(()) } else { Err(format!("{seen:?}")) }
    });
    assert_eq!(pass()?, [0; 6]);
    assert_eq!(monitor.read()?, []);

    assert_eq!(h.sync_routes(&routes, |_| true)?.writes(), 0);
    assert_eq!(monitor.read()?, []);
    assert_eq!(h.our_routes()?.len(), routes.len());
    assert_eq!(h.our_rules()?, rules);
    for (r, x) in rules.iter().zip(&neighbours) {
        assert!(h.delete_rule(r)?);
        assert!(!h.delete_rule(r)?);
        assert!(h.delete_neighbour(x.link, x.ip)?);
        assert!(!h.delete_neighbour(x.link, x.ip)?);
    }
    assert_eq!(h.our_rules()?, []);
    for r in &routes {
        assert!(h.delete_route(r)?, "{r:?}");
        assert!(!h.delete_route(r)?, "{r:?}");
    }
    for x in &addresses {
        assert!(h.delete_address(x)?);
        assert!(!h.delete_address(x)?);
    }
    assert_eq!(h.addresses(Some(made.near))?, []);
    Ok(())
}

#[test]
fn somebody_elses_route_is_neither_replaced_nor_removed() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut h = a.handle()?;
    let made = pair(&mut h, &b)?;
    let theirs = Route { protocol: 4, ..Route::on_link(net("10.8.0.0/16"), made.near) };
    assert!(h.ensure_route(&theirs)?);
    let ours = Route { protocol: PROTOCOL, mtu: Some(1300), ..theirs };
    assert!(matches!(h.ensure_route(&ours), Err(Error::NotOurs { .. })));
    assert!(!h.delete_route(&ours)?);
    assert_eq!(h.sync_routes(&[], |_| true)?.writes(), 0);
    assert!(h.routes(true, Some(4))?.contains(&theirs));
    // Of our own, a changed one is replaced and a dropped one removed; nothing else is touched.
    let wanted = Route::on_link(net("10.20.0.0/16"), made.near);
    let stale = Route::on_link(net("10.21.0.0/16"), made.near);
    h.ensure_route(&wanted)?;
    h.ensure_route(&stale)?;
    let changed = Route { mtu: Some(1200), ..wanted };
    let new = Route::on_link(net("fd21::/64"), made.near);
    let c = h.sync_routes(&[changed, new], |_| true)?;
    assert_eq!((c.added, c.replaced, c.removed), (1, 1, 1));
    assert_eq!(h.our_routes()?, [changed, new]);
    assert!(h.routes(true, Some(4))?.contains(&theirs));
    Ok(())
}

#[test]
fn a_foreign_link_with_our_name_is_refused_and_kept() -> Result<()> {
    let a = Ns::new("a")?;
    let mut h = a.handle()?;
    h.create_bridge(&name("flvx"))?;
    let spec =
        VxlanSpec { name: name("flvx"), port: 8472, mtu: 1450, mac: None, alias: "flowloom:overlay".into() };
    assert!(matches!(h.ensure_vxlan(&spec), Err(Error::NotOurs { .. })));
    assert!(matches!(h.delete_our_link(&name("flvx")), Err(Error::NotOurs { .. })));
    assert_eq!(h.expect_link(&name("flvx"))?.kind.as_deref(), Some("bridge"));
    Ok(())
}

#[test]
fn the_overlay_device_is_adopted_when_equal_and_replaced_when_its_port_differs() -> Result<()> {
    let a = Ns::new("a")?;
    let mut h = a.handle()?;
    let spec = VxlanSpec {
        name: name("flvx"),
        port: 8472,
        mtu: 1450,
        mac: Some(Mac([2, 1, 1, 1, 1, 1])),
        alias: "flowloom:overlay".into(),
    };
    let first = h.ensure_vxlan(&spec)?;
    let info = first.link.vxlan.unwrap();
    assert_eq!((info.port, info.collect_metadata, info.learning), (8472, true, false));
    assert_eq!((first.wrote, first.link.mtu, first.link.mac), (true, 1450, spec.mac));
    // What leaves the tunnel is not the stack's before there are programs to judge it.
    assert!(!first.link.up);
    h.change_link(first.link.index, &LinkChange::up())?;
    assert_eq!(h.addresses(Some(first.link.index))?, []);
    let mut monitor = Monitor::in_netns(&a, &[Interest::Links, Interest::Addresses])?;
    let second = h.ensure_vxlan(&spec)?;
    assert_eq!((second.wrote, second.link.index), (false, first.link.index));
    assert_eq!(monitor.read()?, []);
    // Something else changed it: repaired in place, and on or off as it was.
    h.change_link(first.link.index, &LinkChange { mtu: Some(1400), ..LinkChange::default() })?;
    let repaired = h.ensure_vxlan(&spec)?;
    assert_eq!((repaired.wrote, repaired.link.up, repaired.link.mtu), (true, true, 1450));
    assert_eq!(repaired.link.index, first.link.index);
    let other = h.ensure_vxlan(&VxlanSpec { port: 4790, ..spec.clone() })?;
    assert!(other.wrote && other.link.index != first.link.index);
    assert_eq!(other.link.vxlan.unwrap().port, 4790);
    assert!(h.delete_our_link(&spec.name)?);
    Ok(())
}

#[test]
fn a_workload_is_set_up_by_one_batch_and_can_speak() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let (mut ha, mut hb) = (a.handle()?, b.handle()?);
    let made = pair(&mut ha, &b)?;
    let gateway = ip("169.254.1.1");
    let batch = Batch::new()
        .link(made.far, &LinkChange::up())
        .address(&Address { noprefixroute: true, ..Address::new(made.far, net("10.7.0.5/32")) })
        .address(&Address { noprefixroute: true, ..Address::new(made.far, net("fd07::5/128")) })
        .neighbour(&Neighbour { link: made.far, ip: gateway, mac: NEAR_MAC })
        .route(&Route::on_link(net("169.254.1.1/32"), made.far))
        .route(&Route::default_via(gateway, made.far))
        .route(&Route { onlink: true, ..Route::default_via(ip("fe80::1"), made.far) });
    assert_eq!(hb.apply(batch)?, 7);
    assert!(hb.addresses(Some(made.far))?.iter().any(|x| x.nodad && x.net == net("fd07::5/128")));
    ha.ensure_address(&Address::new(made.near, net("169.254.1.1/32")))?;
    ha.ensure_route(&Route::on_link(net("10.7.0.5/32"), made.near))?;
    b.exec_ok(&["ping", "-c1", "-W2", "169.254.1.1"])?;
    // A refused request is named, and the others of the batch were still handled.
    let bad = Batch::new()
        .route(&Route::via(net("10.99.0.0/16"), ip("203.0.113.1"), made.far))
        .address(&Address::new(made.far, net("10.7.0.6/32")));
    let text = hb.apply(bad).unwrap_err().to_string();
    assert!(text.contains("10.99.0.0/16") && text.contains("ENETUNREACH"), "{text}");
    assert_eq!(hb.addresses(Some(made.far))?.iter().filter(|x| x.net == net("10.7.0.6/32")).count(), 1);
    Ok(())
}

#[test]
fn a_workloads_first_packet_was_swallowed_before_the_kernel_had_noticed_the_carrier() -> Result<()> {
    let near = Ns::new("near")?;
    let mut here = near.handle()?;
    let frame = Packet::udp("10.1.0.1:1".parse()?, "10.1.0.2:2".parse()?, b"first").frame();
    for round in 0..40 {
        let far = Ns::new("far")?;
        let (near_name, far_name) = (name("fltest0"), name("eth0"));
        let made = here.create_veth(&VethSpec {
            near: VethEnd { name: &near_name, mac: Some(NEAR_MAC) },
            far: VethEnd { name: &far_name, mac: Some(FAR_MAC) },
            far_netns: Some(&far),
            mtu: 1422,
            alias: None,
            near_addr_gen_none: true,
            near_up: false,
            queues: Some(1),
        })?;
        far.handle()?.apply(Batch::new().link(made.far, &LinkChange::up()))?;
        let (sender, seen) = (RawSender::open(&far, &far_name)?, Capture::start(&near, &near_name)?);
        here.ensure_link(made.near, &LinkChange::up())?;
        here.settle_peer(made.near)?;
        sender.send(&frame)?;
        eventually(PATIENCE, || {
            let came = seen.frames().iter().any(|f| f.bytes == frame);
            if came { Ok(()) } else { Err(format!("round {round}: {} other frames", seen.count())) }
        });
        here.delete_link(made.near)?;
    }
    Ok(())
}

#[test]
fn a_long_batch_loses_no_answer() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut h = a.handle()?;
    let made = pair(&mut h, &b)?;
    let many: Vec<Route> = (0..2000u16)
        .map(|i| {
            let [hi, lo] = i.to_be_bytes();
            Route::on_link(IpNet::new(IpAddr::from([10, 50 + hi, lo, 0]), 24).unwrap(), made.near)
        })
        .collect();
    let batch = many.iter().fold(Batch::new(), |b, r| b.route(r));
    assert_eq!(h.apply(batch)?, many.len());
    assert_eq!(h.our_routes()?.len(), many.len());
    assert_eq!(h.sync_routes(&many[..10], |_| true)?.removed, many.len() - 10);
    Ok(())
}

#[test]
fn the_monitor_tells_changes_and_says_when_it_lost_some() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut monitor = Monitor::in_netns(&a, &[Interest::Links, Interest::Addresses, Interest::Routes])?;
    assert!(!monitor.wait(Duration::ZERO)?);
    let mut h = a.handle()?;
    let made = pair(&mut h, &b)?;
    let address = Address::new(made.near, net("10.7.0.1/24"));
    h.ensure_address(&address)?;
    h.delete_link(made.near)?;
    assert!(monitor.wait(PATIENCE)?);
    let mut events = Vec::new();
    eventually(PATIENCE, || {
        events.extend(monitor.read().map_err(|e| e.to_string())?);
        let gone = |e: &Event| matches!(e, Event::LinkRemoved(l) if l.index == made.near);
        if events.iter().any(gone) { Ok(()) } else { Err(format!("{events:?}")) }
    });
    assert!(events.iter().any(|e| matches!(e, Event::LinkChanged(l) if l.name == "fltest0")));
    assert!(events.contains(&Event::AddressChanged(address)));
    assert!(events.contains(&Event::AddressRemoved(address)));
    assert!(
        events.iter().any(|e| matches!(e, Event::RouteChanged(r) if r.destination == net("10.7.0.0/24")))
    );
    assert!(!events.contains(&Event::Lost));

    // A reader that sleeps through more than the buffer holds is told so, and hears what comes later.
    let made = pair(&mut h, &b)?;
    let many: Vec<Route> = (0..1000u16)
        .map(|i| {
            Route::on_link(
                IpNet::from(IpAddr::from([10, 60, i.to_be_bytes()[0], i.to_be_bytes()[1]])),
                made.near,
            )
        })
        .collect();
    for _ in 0..20 {
        h.apply(many.iter().fold(Batch::new(), |b, r| b.route(r)))?;
        h.sync_routes(&[], |_| true)?;
    }
    assert!(monitor.read()?.contains(&Event::Lost));
    let late = Address::new(made.near, net("10.250.0.1/32"));
    h.ensure_address(&late)?;
    assert!(monitor.read()?.contains(&Event::AddressChanged(late)));
    Ok(())
}

#[test]
fn a_listing_is_whole_while_others_change_it() -> Result<()> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let mut h = a.handle()?;
    let made = pair(&mut h, &b)?;
    let stay: Vec<Route> = (0..1500u16)
        .map(|i| {
            Route::on_link(
                IpNet::from(IpAddr::from([10, 60, i.to_be_bytes()[0], i.to_be_bytes()[1]])),
                made.near,
            )
        })
        .collect();
    h.apply(stay.iter().fold(Batch::new(), |b, r| b.route(r)))?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut other = a.handle()?;
    std::thread::scope(|s| -> Result<()> {
        let churn = s.spawn(|| -> Result<()> {
            let comes_and_goes = Route::on_link(net("10.61.0.0/16"), made.near);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                other.ensure_route(&comes_and_goes)?;
                other.delete_route(&comes_and_goes)?;
            }
            Ok(())
        });
        let lists: Vec<_> = (0..30).map(|_| h.routes(true, Some(PROTOCOL))).collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        churn.join().unwrap()?;
        for list in lists {
            // Either the whole list, or a typed refusal to call a moving one whole.
            match list {
                Ok(list) => assert_eq!(stay.iter().filter(|r| !list.contains(r)).count(), 0),
                Err(e) => assert!(matches!(e, Error::Unsettled { .. }), "{e}"),
            }
        }
        Ok(())
    })
}

#[test]
fn entering_a_namespace_never_moves_the_caller() -> Result<()> {
    let before = Netns::current()?.id()?;
    let a = Ns::new("a")?;
    assert_ne!(a.id()?, before);
    assert_eq!(a.run_in(|| Netns::current()?.id())??, a.id()?);
    let panicked = std::panic::catch_unwind(|| a.run_in(|| panic!("inside")));
    assert!(panicked.is_err());
    assert_eq!(Netns::current()?.id()?, before);
    let (cookie, other) = (a.cookie()?, Ns::new("b")?.cookie()?);
    assert_eq!(a.cookie()?, cookie);
    assert_ne!(cookie, other);
    assert_eq!(Handle::in_netns(&a)?.netns_cookie()?, cookie, "a handle is in its namespace");
    // The sysctls read are those of the namespace that was entered.
    let here = || sysctl::read(&Scope::All, Key::AcceptDad);
    assert_eq!(a.run_in(here)??, 0);
    Ok(())
}

#[test]
fn a_namespace_in_a_configured_directory_comes_and_goes_and_a_leftover_file_is_not_taken_for_one()
-> Result<()> {
    flowloom_testkit::require_root();
    let dir = temp_dir("netns")?;
    let made = Netns::create(dir.path(), "w1")?;
    let again = Netns::open(made.path())?;
    assert_eq!(again.id()?, made.id()?);
    assert_eq!(Netns::create(dir.path(), "w1").unwrap_err().errno(), Some(nix::errno::Errno::EEXIST));
    for bad in ["", "..", "a/b"] {
        assert!(Netns::create(dir.path(), bad).is_err(), "{bad:?}");
    }
    assert!(Netns::remove(made.path())?);
    assert!(!Netns::remove(made.path())?);
    assert!(matches!(Netns::open(made.path()), Err(Error::Missing { .. })));
    // A reboot leaves the file without its mount.
    std::fs::write(made.path(), "")?;
    assert!(matches!(Netns::open(made.path()), Err(Error::NotANetns { .. })));
    assert!(matches!(Netns::open("/proc/self/ns/mnt"), Err(Error::NotANetns { .. })));
    assert!(Netns::remove(made.path())?);
    assert!(matches!(Netns::of_pid(u32::MAX), Err(Error::Missing { .. })));
    assert_eq!(Netns::of_pid(std::process::id())?.id()?, Netns::current()?.id()?);
    Ok(())
}

#[test]
fn a_link_whose_maker_died_before_it_was_named_was_taken_for_somebody_elses() -> Result<()> {
    let node = Ns::new("node")?;
    let (near, far) = (LinkName::new("ours")?, LinkName::new("far")?);
    let alias = format!("{}test", flowloom_netlink::ALIAS_PREFIX);
    let mut handle = node.handle()?;
    let spec = VethSpec {
        near: VethEnd { name: &near, mac: None },
        far: VethEnd { name: &far, mac: None },
        far_netns: None,
        mtu: 1500,
        alias: Some(&alias),
        near_addr_gen_none: false,
        near_up: false,
        queues: None,
    };
    handle.create_veth(&spec)?;
    // What the kernel holds between the two requests of the creation.
    node.exec_ok(&["ip", "link", "set", "ours", "alias", ""])?;
    let link = handle.expect_link(&near)?;
    assert!(link.alias.is_none() && link.is_ours(), "{link:?}");
    assert!(!handle.expect_link(&far)?.is_ours());
    assert!(handle.delete_our_link(&near)?);
    Ok(())
}
