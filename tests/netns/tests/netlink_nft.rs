//! The nftables table: written once, compared afterwards, repaired after drift, removed without a trace, and packets
//! that leave the node really carry its address.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::time::Duration;

use anyhow::Result;
use flowloom_netlink::nft::{Masquerade, Nft};
use flowloom_netlink::{Error, LinkName, Route};
use flowloom_testkit::{
    Cmd, EchoServer, Mode, Netfilter, Ns, Outcome, PATIENCE, Probe, TcpClient, TcpServer, Topology,
};
use ipnet::IpNet;

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|n| n.parse().unwrap()).collect()
}

fn variants() -> Vec<Masquerade> {
    let link = |s: &str| LinkName::new(s).unwrap();
    vec![
        Masquerade::default(),
        Masquerade { sources: nets(&["10.0.0.0/8"]), ..Masquerade::default() },
        Masquerade {
            sources: nets(&["10.1.0.0/16", "10.2.3.4/32", "fd00:1::/48", "fd00:2::7/128"]),
            except: nets(&["10.1.0.0/16", "10.1.9.0/24", "192.0.2.0/25", "192.0.2.128/25", "fd00::/16"]),
            uplinks: vec![link("uplink")],
        },
        Masquerade {
            sources: nets(&["0.0.0.0/0", "::/0"]),
            except: nets(&["10.0.1.0/24", "10.0.2.0/23", "10.0.0.0/24"]),
            uplinks: vec![link("uplink"), link("eth1"), link("eth0")],
        },
    ]
}

#[test]
fn a_second_pass_writes_nothing_whatever_the_table_holds() -> Result<()> {
    let ns = Ns::new("nft")?;
    let nft = Nft::new(Nft::TABLE)?.in_netns(ns.try_clone()?);
    for wanted in variants() {
        assert!(!nft.is_current(&wanted)?, "{wanted:?}");
        assert!(nft.ensure(&wanted)?, "{wanted:?}");
        let before = ns.exec_ok(&["nft", "-a", "list", "ruleset"])?.stdout;
        assert!(!nft.ensure(&wanted)?, "{wanted:?}: {before}");
        // Handles grow with every write, so equal handles are nft's own word for "nothing was written".
        assert_eq!(ns.exec_ok(&["nft", "-a", "list", "ruleset"])?.stdout, before);
    }
    assert!(nft.remove()?);
    assert!(!nft.remove()?);
    assert_eq!(ns.exec_ok(&["nft", "list", "ruleset"])?.stdout, "");
    Ok(())
}

#[test]
fn drift_is_found_and_repaired_and_other_tables_are_left_alone() -> Result<()> {
    let ns = Ns::new("nft")?;
    let nft = Nft::new("flowloom_b")?.in_netns(ns.try_clone()?);
    let wanted = &variants()[2];
    Cmd::new(&["nft", "-f", "-"])
        .in_netns(&ns)?
        .input("table inet flowloom { chain x { counter accept; }; }\n")
        .run()?
        .success()?;
    let foreign = ns.exec_ok(&["nft", "-a", "list", "table", "inet", "flowloom"])?.stdout;
    nft.ensure(wanted)?;
    for damage in [
        "add element inet flowloom_b except4 { 198.51.100.0/24 }",
        "delete element inet flowloom_b sources4 { 10.2.3.4 }",
        "flush chain inet flowloom_b postrouting",
        "insert rule inet flowloom_b postrouting accept",
        "add chain inet flowloom_b more",
        "delete table inet flowloom_b",
    ] {
        Cmd::new(&["nft", "-f", "-"]).in_netns(&ns)?.input(damage).run()?.success()?;
        assert!(!nft.is_current(wanted)?, "{damage}");
        assert!(nft.ensure(wanted)?, "{damage}");
        assert!(nft.is_current(wanted)?, "{damage}");
    }
    nft.remove()?;
    assert_eq!(ns.exec_ok(&["nft", "-a", "list", "table", "inet", "flowloom"])?.stdout, foreign);
    Ok(())
}

#[test]
fn odd_table_names_and_a_failing_nft_are_errors_that_change_nothing() -> Result<()> {
    let ns = Ns::new("nft")?;
    let nft = Nft::new("flowloom")?.in_netns(ns.try_clone()?);
    nft.ensure(&variants()[1])?;
    for bad in ["", "flow loom", "a; flush ruleset", "9a", "a{"] {
        assert!(matches!(Nft::new(bad), Err(Error::Nft { .. })), "{bad:?}");
    }
    let text = Nft::new("flowloom")?.program("false").in_netns(ns.try_clone()?).ensure(&variants()[2]);
    assert!(matches!(text, Err(Error::Nft { .. })));
    assert!(nft.is_current(&variants()[1])?);
    let missing = Nft::new("flowloom")?.program("/no/such/nft").in_netns(ns.try_clone()?);
    let text = missing.ensure(&variants()[1]).unwrap_err().to_string();
    assert!(text.contains("/no/such/nft") && text.contains("install nftables"), "{text}");
    Ok(())
}

#[test]
fn what_leaves_the_node_carries_its_address_and_what_is_excepted_does_not() -> Result<()> {
    let lab = Topology::builder().nodes(1).external().netfilter(Netfilter::ForwardDrop).build()?;
    let (node, world) = (&lab.nodes[0], lab.external.as_ref().unwrap());
    let own = nets(&["10.7.0.5/24", "fd07::5/64"]);
    let gateways = ["10.7.0.1".parse()?, "fd07::1".parse()?];
    let workload = node.plain_workload("w", &LinkName::new("flw")?, &own, &gateways)?;
    for net in &own {
        node.exempt_from_netfilter(net.trunc())?;
    }
    let nft = Nft::new(Nft::TABLE)?.in_netns(node.ns.try_clone()?);
    let sources: Vec<IpNet> = own.iter().map(IpNet::trunc).collect();
    for (world_ip, node_ip, own) in
        [(world.ip4.into(), node.ip4.into(), own[0]), (world.ip6.into(), node.ip6.into(), own[1])]
    {
        let server = TcpServer::start(&world.ns, std::net::SocketAddr::new(world_ip, 0), Mode::Echo)?;
        let echo = EchoServer::start(&world.ns, std::net::SocketAddr::new(world_ip, 0))?;
        nft.remove()?;
        // The world knows no way back to the workload, so without masquerade nothing comes.
        assert_eq!(
            Probe::tcp(&workload, server.addr()).timeout(Duration::from_millis(300)).run()?,
            Outcome::TimedOut
        );
        nft.ensure(&Masquerade { sources: sources.clone(), ..Masquerade::default() })?;
        assert_eq!(Probe::udp(&workload, echo.addr()).timeout(PATIENCE).run()?, Outcome::Connected);
        let mut client = TcpClient::connect(&workload, server.addr(), PATIENCE)?;
        client.round_trip(b"hello", PATIENCE)?;
        assert_eq!(server.peers().last().map(std::net::SocketAddr::ip), Some(node_ip));
        // Excepted: the source stays; the world is taught the way back.
        nft.ensure(&Masquerade {
            sources: sources.clone(),
            except: vec![IpNet::from(world_ip)],
            uplinks: vec![],
        })?;
        let index = world.ns.handle()?.expect_link(&LinkName::new("eth0")?)?.index;
        world.ns.handle()?.ensure_route(&Route::via(own.trunc(), node_ip, index))?;
        let mut client = TcpClient::connect(&workload, server.addr(), PATIENCE)?;
        client.round_trip(b"again", PATIENCE)?;
        assert_eq!(server.peers().last().map(std::net::SocketAddr::ip), Some(own.addr()));
    }
    Ok(())
}
