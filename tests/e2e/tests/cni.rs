//! The plugin against a real agent: what a runtime does, and what runtimes have been seen to do wrong.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flowloom_api::v1::{CniAddRequest, CniAttachment, CniNetwork};
use flowloom_testkit::{
    Cmd, Mode, Ns, Outcome, PATIENCE, Probe, TcpServer, UdpReceiver, UdpSender, eventually, never,
};
use flowloom_tests_e2e::pods::{self, WEB, addresses, attached, held, inside, start};
use flowloom_tests_e2e::{Lab, Runtime, Workload, binary, netns_path};
use serde_json::{Value, json};

const SILENCE: Duration = Duration::from_millis(300);
const SHUT: u16 = 81;

fn of_pods(lab: &Lab) -> Result<Runtime> {
    pods::runtime(lab, "1.0.0")
}

#[test]
fn every_version_adds_checks_and_deletes() -> Result<()> {
    let lab = start()?;
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let ns = Ns::new("pod")?;
        let runtime = Runtime::new(&lab, 0, version)?.with("subnet", json!("pods"));
        let path = netns_path(&ns);
        let container = format!("c-{version}");
        let result = runtime.add(&container, &ns)?;
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["ips"][0].get("version").is_some(), version == "0.4.0", "{version}: {result}");
        let shown = inside(&ns)?;
        assert_eq!(addresses(&result)?.len(), 2, "{version}: {result}");
        for ip in addresses(&result)? {
            assert!(shown.contains(&format!(" {ip}/")), "{version}: {ip} is not inside: {shown}");
        }
        // The same again, and something else.
        assert_eq!(runtime.add(&container, &ns)?, result, "{version}: a repeated ADD");
        let other =
            Runtime::new(&lab, 0, version)?.with("subnet", json!("pods")).with("labels", json!({"a": "b"}));
        let (code, message) = other.refused("ADD", &container, &path)?;
        assert_eq!(code, 101, "{version}: {message}");
        assert_eq!(inside(&ns)?, shown, "{version}: a refused ADD touched the first one's interface");
        let check =
            Runtime::new(&lab, 0, version)?.with("subnet", json!("pods")).with("prevResult", result.clone());
        check.call("CHECK", &container, &path)?.success().with_context(|| version.to_owned())?;
        // CHECK sees what is no longer so.
        let ip = addresses(&result)?.first().copied().context("no address")?;
        ns.exec_ok(&["ip", "address", "del", &format!("{ip}/32"), "dev", "eth0"])
            .or_else(|_| ns.exec_ok(&["ip", "address", "del", &format!("{ip}/24"), "dev", "eth0"]))?;
        let (code, message) = check.refused("CHECK", &container, &path)?;
        assert_eq!(code, 102, "{version}: {message}");
        // DEL, and again when everything is gone: interface, container, namespace.
        runtime.call("DEL", &container, &path)?.success()?;
        assert!(inside(&ns).is_err(), "{version}: the interface is left");
        assert_eq!(attached(&lab)?.len(), 0, "{version}");
        runtime.call("DEL", &container, &path)?.success()?;
        let (code, message) = check.refused("CHECK", &container, &path)?;
        assert_eq!(code, 3, "{version}: {message}");
        drop(ns);
        runtime.call("DEL", &container, &path)?.success()?;
        runtime.call("DEL", &container, "")?.success()?;
        runtime.call("DEL", "never-seen", "")?.success()?;
    }
    assert_eq!(held(&lab, "pods")?.len(), 0, "addresses are held by nobody");
    Ok(())
}

#[test]
fn sixteen_adds_at_once_get_sixteen_addresses() -> Result<()> {
    let lab = start()?;
    let runtime = of_pods(&lab)?;
    let pods: Vec<Ns> = (0..16).map(|_| Ns::new("pod")).collect::<Result<_>>()?;
    let results: Vec<Value> = std::thread::scope(|scope| {
        let calls: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(i, ns)| {
                let runtime = &runtime;
                scope.spawn(move || runtime.add(&format!("c{i}"), ns))
            })
            .collect();
        calls
            .into_iter()
            .map(|c| c.join().map_err(|_| anyhow::anyhow!("a call panicked"))?)
            .collect::<Result<_>>()
    })?;
    let distinct: BTreeSet<IpAddr> =
        results.iter().map(addresses).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    assert_eq!(distinct.len(), 32, "{distinct:?}");
    assert_eq!(held(&lab, "pods")?, distinct);
    // Each is one that works: the first reaches every other by both families.
    for result in &results[1..] {
        for ip in addresses(result)? {
            assert_eq!(Probe::icmp(&pods[0], ip).timeout(PATIENCE).run()?, Outcome::Connected, "{ip}");
        }
    }
    std::thread::scope(|scope| {
        let calls: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(i, ns)| {
                let runtime = &runtime;
                scope.spawn(move || runtime.call("DEL", &format!("c{i}"), &netns_path(ns))?.success())
            })
            .collect();
        calls
            .into_iter()
            .try_for_each(|c| c.join().map_err(|_| anyhow::anyhow!("a call panicked"))?.map(drop))
    })?;
    assert_eq!((attached(&lab)?.len(), held(&lab, "pods")?.len()), (0, 0));
    Ok(())
}

#[test]
fn two_attached_workloads_ping_each_other_and_obey_the_group_their_network_names() -> Result<()> {
    let lab = start()?;
    let (plain, web) = (
        of_pods(&lab)?,
        of_pods(&lab)?.with("security_groups", json!(["web"])).with("labels", json!({"app": "shop"})),
    );
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let (of_a, of_b) = (addresses(&plain.add("a", &a)?)?, addresses(&web.add("b", &b)?)?);
    for (ip_a, ip_b) in of_a.into_iter().zip(of_b) {
        let (web, shut, back) =
            (SocketAddr::new(ip_b, WEB), SocketAddr::new(ip_b, SHUT), SocketAddr::new(ip_a, SHUT));
        let _servers = [TcpServer::start(&b, web, Mode::Echo)?, TcpServer::start(&a, back, Mode::Echo)?];
        let closed = TcpServer::start(&b, shut, Mode::Echo)?;
        assert_eq!(Probe::icmp(&a, ip_b).timeout(PATIENCE).run()?, Outcome::Connected, "{ip_a} pings {ip_b}");
        assert_eq!(Probe::icmp(&b, ip_a).timeout(PATIENCE).run()?, Outcome::Connected, "{ip_b} pings {ip_a}");
        assert_eq!(Probe::tcp(&a, web).timeout(PATIENCE).run()?, Outcome::Connected, "{web}");
        assert_eq!(Probe::tcp(&b, back).timeout(PATIENCE).run()?, Outcome::Connected, "{back}");
        assert_eq!(Probe::tcp(&a, shut).timeout(SILENCE).run()?, Outcome::TimedOut, "{shut}");
        assert_eq!(closed.accepted(), 0);
    }
    let info = attached(&lab)?
        .into_iter()
        .find(|e| e.labels.get("app").is_some_and(|v| v == "shop"))
        .context("labels are lost")?;
    assert_eq!(info.security_groups, ["web"]);
    // A group that does not exist attaches nothing.
    let c = Ns::new("c")?;
    let (code, message) =
        of_pods(&lab)?.with("security_groups", json!(["wbe"])).refused("ADD", "c", &netns_path(&c))?;
    assert_eq!(code, 7, "{message}");
    assert!(message.contains("wbe"), "{message}");
    assert!(inside(&c).is_err(), "a refused ADD left an interface");
    Ok(())
}

#[test]
fn add_returns_when_the_policy_is_in_force_and_nothing_passes_before() -> Result<()> {
    let lab = start()?;
    let client = lab.workload("default/client")?;
    let bound = Runtime::new(&lab, 0, "1.0.0")?.arg("FLOWLOOM_ENDPOINT", "db");
    let to: IpAddr = "10.8.0.20".parse()?;
    // They hammer at both ports all the time, before there is anybody to hear it.
    let hammer = |port: u16| {
        UdpSender::start(
            &client.netns,
            None,
            SocketAddr::new(to, port),
            Duration::from_micros(500),
            u64::from(port),
            32,
        )
    };
    let _senders = [hammer(WEB)?, hammer(SHUT)?];
    for round in 0..8 {
        let ns = Ns::new("db")?;
        let any = |port: u16| SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port);
        let (open, shut) = (UdpReceiver::start(&ns, any(WEB))?, UdpReceiver::start(&ns, any(SHUT))?);
        let (web, closed) =
            (TcpServer::start(&ns, any(WEB), Mode::Echo)?, TcpServer::start(&ns, any(SHUT), Mode::Echo)?);
        let container = format!("db-{round}");
        bound.add(&container, &ns)?;
        // No second try: the first probe after the answer is judged, and judged right.
        let reached = Probe::tcp(&client.netns, SocketAddr::new(to, WEB)).timeout(PATIENCE).run()?;
        assert_eq!(reached, Outcome::Connected, "round {round}");
        let denied =
            Probe::tcp(&client.netns, SocketAddr::new(to, SHUT)).timeout(Duration::from_millis(100)).run()?;
        assert_eq!(denied, Outcome::TimedOut, "round {round}");
        eventually(PATIENCE, || {
            if open.count() > 20 { Ok(()) } else { Err(format!("round {round}: {} datagrams", open.count())) }
        });
        assert_eq!((shut.count(), closed.accepted()), (0, 0), "round {round}: something passed");
        eventually(PATIENCE, || if web.accepted() == 1 { Ok(()) } else { Err(web.accepted()) });
        bound.call("DEL", &container, &netns_path(&ns))?.success()?;
    }
    Ok(())
}

#[test]
fn an_endpoint_of_the_document_is_bound_once_and_by_its_name_only() -> Result<()> {
    let lab = start()?;
    let bound = Runtime::new(&lab, 0, "1.0.0")?.arg("FLOWLOOM_ENDPOINT", "db");
    let (first, second) = (Ns::new("db")?, Ns::new("db")?);
    let result = bound.add("one", &first)?;
    let wanted: Vec<IpAddr> = vec!["10.8.0.20".parse()?, "fd10:8::20".parse()?];
    assert_eq!(addresses(&result)?, wanted);
    // Its group of the document is in force.
    let client = lab.workload("default/client")?;
    for (port, expected) in [(WEB, Outcome::Connected), (SHUT, Outcome::TimedOut)] {
        let at = SocketAddr::new(wanted[0], port);
        let _server = TcpServer::start(&first, at, Mode::Echo)?;
        assert_eq!(Probe::tcp(&client.netns, at).timeout(SILENCE).run()?, expected, "port {port}");
    }
    let (code, message) = bound.refused("ADD", "two", &netns_path(&second))?;
    assert_eq!(code, 101, "{message}");
    for (name, expected) in [("dbb", 7), ("client", 101)] {
        let (code, message) = Runtime::new(&lab, 0, "1.0.0")?.arg("FLOWLOOM_ENDPOINT", name).refused(
            "ADD",
            "two",
            &netns_path(&second),
        )?;
        assert_eq!(code, expected, "{name}: {message}");
        assert!(message.contains(name), "{message}");
    }
    assert!(inside(&second).is_err());
    bound.call("DEL", "one", &netns_path(&first))?.success()?;
    assert_eq!(addresses(&bound.add("two", &second)?)?, wanted);
    Ok(())
}

#[test]
fn the_configuration_chooses_the_vpc_and_equal_addresses_do_not_meet() -> Result<()> {
    let lab = start()?;
    let (own, red) = (of_pods(&lab)?, of_pods(&lab)?.with("vpc", json!("red")));
    let pods: Vec<Ns> = (0..4).map(|_| Ns::new("pod")).collect::<Result<_>>()?;
    let of = |runtime: &Runtime, name: &str, ns: &Ns| -> Result<Vec<IpAddr>> {
        addresses(&runtime.add(name, ns)?)
    };
    let (default_a, default_b) = (of(&own, "da", &pods[0])?, of(&own, "db", &pods[1])?);
    let (red_a, red_b) = (of(&red, "ra", &pods[2])?, of(&red, "rb", &pods[3])?);
    assert_eq!((&default_a, &default_b), (&red_a, &red_b), "each VPC hands out its own");
    let vpcs: Vec<String> = attached(&lab)?.into_iter().map(|e| e.vpc.name).collect();
    assert_eq!(vpcs.iter().filter(|v| *v == "red").count(), 2, "{vpcs:?}");
    let at = SocketAddr::new(default_b[0], WEB);
    let (own_server, red_server) =
        (TcpServer::start(&pods[1], at, Mode::Echo)?, TcpServer::start(&pods[3], at, Mode::Echo)?);
    assert_eq!(Probe::tcp(&pods[0], at).timeout(PATIENCE).run()?, Outcome::Connected);
    eventually(PATIENCE, || if own_server.accepted() == 1 { Ok(()) } else { Err(own_server.accepted()) });
    assert_eq!(red_server.accepted(), 0, "it went to the other VPC");
    assert_eq!(Probe::tcp(&pods[2], at).timeout(PATIENCE).run()?, Outcome::Connected);
    eventually(PATIENCE, || if red_server.accepted() == 1 { Ok(()) } else { Err(red_server.accepted()) });
    assert_eq!(own_server.accepted(), 1, "it went to the other VPC");
    let (code, message) =
        of_pods(&lab)?.with("vpc", json!("rde")).refused("ADD", "x", &netns_path(&pods[0]))?;
    assert_eq!(code, 7, "{message}");
    Ok(())
}

#[test]
fn install_writes_the_configuration_when_the_agent_is_ready_and_not_before() -> Result<()> {
    let mut lab = start()?;
    lab.agents[0].kill()?;
    let (bin, conf) = (lab.dir().join("bin"), lab.dir().join("net.d"));
    let argv = |wait: &str| -> Result<Vec<String>> {
        Ok(vec![
            binary("flowloom-cni")?,
            "install".into(),
            "--bin-dir".into(),
            bin.display().to_string(),
            "--conf-dir".into(),
            conf.display().to_string(),
            "--socket".into(),
            lab.agents[0].socket.display().to_string(),
            "--wait".into(),
            wait.into(),
            "--subnet".into(),
            "pods".into(),
        ])
    };
    let lists = |dir: &Path| -> Vec<String> {
        std::fs::read_dir(dir)
            .map(|d| {
                d.flatten()
                    .map(|e| e.file_name().to_string_lossy().into_owned())
                    .filter(|n| n.ends_with("conflist"))
                    .collect()
            })
            .unwrap_or_default()
    };
    let output = Cmd::new(&argv("1")?).run()?;
    assert!(!output.status.success(), "{output:?}");
    assert!(lists(&conf).is_empty(), "a configuration without an agent");
    let mut install = Cmd::new(&argv("60")?).spawn()?;
    // It waits for the agent, and with it the configuration.
    never(Duration::from_millis(300), || {
        if lists(&conf).is_empty() { Ok(()) } else { Err("a configuration without an agent") }
    });
    ensure!(install.status()?.is_none(), "install did not wait: {}", install.stderr()?);
    lab.agents[0].start()?;
    let status = install.wait_until(std::time::Instant::now() + PATIENCE)?;
    assert!(status.is_some_and(|s| s.success()), "{status:?}: {}", install.stderr()?);
    assert!(lab.agents[0].client().health()?.ready, "the configuration came before the agent was ready");
    // What is written works: the installed plugin with the installed configuration.
    let list = std::fs::read_to_string(conf.join(lists(&conf).first().context("no configuration")?))?;
    let list: Value = serde_json::from_str(&list)?;
    let mut plugin = list["plugins"][0].clone();
    plugin["cniVersion"] = list["cniVersion"].clone();
    plugin["name"] = list["name"].clone();
    let ns = Ns::new("pod")?;
    let mut runtime = Runtime::new(&lab, 0, "1.0.0")?;
    runtime.config = plugin;
    runtime.add("pod", &ns)?;
    assert_eq!(attached(&lab)?.len(), 1);
    Ok(())
}

// What users of others have reported, named after what went wrong (docs/field-reports.md).

#[test]
fn an_address_leaked_when_del_named_a_container_nobody_knows() -> Result<()> {
    let lab = start()?;
    let ns = Ns::new("pod")?;
    let pod = of_pods(&lab)?
        .arg("K8S_POD_NAMESPACE", "shop")
        .arg("K8S_POD_NAME", "web-0")
        .arg("K8S_POD_UID", "u-1");
    pod.add("sandbox-1", &ns)?;
    assert_eq!(held(&lab, "pods")?.len(), 2);
    // Another life of the pod is not meant by it.
    let other = of_pods(&lab)?
        .arg("K8S_POD_NAMESPACE", "shop")
        .arg("K8S_POD_NAME", "web-0")
        .arg("K8S_POD_UID", "u-2");
    other.call("DEL", "sandbox-2", "")?.success()?;
    assert_eq!(held(&lab, "pods")?.len(), 2, "DEL of another life of the pod took its addresses");
    pod.call("DEL", "sandbox-2", "")?.success()?;
    assert_eq!((held(&lab, "pods")?.len(), attached(&lab)?.len()), (0, 0));
    Ok(())
}

#[test]
fn a_second_life_of_a_pod_was_taken_for_the_first() -> Result<()> {
    let lab = start()?;
    let life = |uid: &str| -> Result<Runtime> {
        Ok(of_pods(&lab)?
            .arg("K8S_POD_NAMESPACE", "shop")
            .arg("K8S_POD_NAME", "web-0")
            .arg("K8S_POD_UID", uid))
    };
    let (old, new) = (life("u-1")?, life("u-2")?);
    let (first, second) = (Ns::new("first")?, Ns::new("second")?);
    let of_first = addresses(&old.add("sandbox-1", &first)?)?;
    // The new one starts before the old one is gone.
    let of_second = addresses(&new.add("sandbox-2", &second)?)?;
    assert!(of_first.iter().all(|ip| !of_second.contains(ip)), "{of_first:?} {of_second:?}");
    // The same sandbox does not change lives.
    let (code, message) = new.refused("ADD", "sandbox-1", &netns_path(&first))?;
    assert_eq!(code, 101, "{message}");
    old.call("DEL", "sandbox-1", &netns_path(&first))?.success()?;
    assert_eq!(held(&lab, "pods")?, of_second.iter().copied().collect());
    let client = lab.workload("default/client")?;
    assert_eq!(Probe::icmp(&client.netns, of_second[0]).timeout(PATIENCE).run()?, Outcome::Connected);
    assert_eq!(Probe::icmp(&client.netns, of_first[0]).timeout(SILENCE).run()?, Outcome::TimedOut);
    Ok(())
}

#[test]
fn an_endpoint_was_orphaned_when_the_client_gave_up_during_add() -> Result<()> {
    let lab = start()?;
    let runtime = of_pods(&lab)?;
    for round in 0..5u64 {
        let ns = Ns::new("pod")?;
        let container = format!("c{round}");
        let request = CniAddRequest {
            attachment: CniAttachment { container_id: container.clone(), ifname: "eth0".into() },
            netns: netns_path(&ns),
            network: CniNetwork {
                name: "flowloom".into(),
                subnet: Some("pods".into()),
                ..CniNetwork::default()
            },
            args: std::collections::BTreeMap::default(),
            runtime: flowloom_api::v1::CniRuntime::default(),
        };
        let impatient = lab.agents[0].client().with_timeout(Duration::from_micros(500 + 2000 * round));
        let answer = impatient.cni_add(&request);
        // The runtime cleans up what it knows nothing about.
        runtime.call("DEL", &container, &netns_path(&ns))?.success()?;
        // An ADD that was still in the queue may finish after that DEL; the runtime's next one takes it away.
        eventually(PATIENCE, || {
            runtime.call("DEL", &container, "").map_err(|e| e.to_string())?;
            match (attached(&lab), held(&lab, "pods")) {
                (Ok(a), Ok(h)) if a.is_empty() && h.is_empty() => Ok(()),
                other => Err(format!("round {round} after {answer:?}: {other:?}")),
            }
        });
    }
    Ok(())
}

#[test]
fn an_address_was_in_use_already_for_its_own_owner_after_a_restart() -> Result<()> {
    let mut lab = start()?;
    let (runtime, bound) = (of_pods(&lab)?, Runtime::new(&lab, 0, "1.0.0")?.arg("FLOWLOOM_ENDPOINT", "db"));
    let (pod, db) = (Ns::new("pod")?, Ns::new("db")?);
    let before = (runtime.add("pod", &pod)?, bound.add("db", &db)?);
    lab.agents[0].restart()?;
    assert_eq!((runtime.add("pod", &pod)?, bound.add("db", &db)?), before);
    // Restored addresses are taken before anybody else asks.
    let other = Ns::new("other")?;
    let fresh = addresses(&runtime.add("other", &other)?)?;
    assert!(addresses(&before.0)?.iter().all(|ip| !fresh.contains(ip)), "{fresh:?}");
    Ok(())
}

#[test]
fn a_pod_waited_for_ever_though_an_address_was_freed() -> Result<()> {
    let lab = start()?;
    // One usable address beside the gateway.
    let tiny = Runtime::new(&lab, 0, "1.0.0")?.with("subnet", json!("tiny"));
    let (one, two) = (Ns::new("one")?, Ns::new("two")?);
    let first = addresses(&tiny.add("one", &one)?)?;
    let (code, message) = tiny.refused("ADD", "two", &netns_path(&two))?;
    assert_eq!(code, 103, "{message}");
    assert!(message.contains("tiny"), "{message}");
    tiny.call("DEL", "one", &netns_path(&one))?.success()?;
    // No other is free: the one that rests is given out at the runtime's next try.
    assert_eq!(addresses(&tiny.add("two", &two)?)?, first);
    Ok(())
}

#[test]
fn an_address_leaked_because_its_pod_went_while_the_agent_was_down() -> Result<()> {
    let mut lab = start()?;
    let runtime = of_pods(&lab)?;
    let (gone, stays) = (Ns::new("gone")?, Ns::new("stays")?);
    runtime.add("gone", &gone)?;
    let kept: BTreeSet<IpAddr> = addresses(&runtime.add("stays", &stays)?)?.into_iter().collect();
    lab.agents[0].kill()?;
    drop(gone);
    lab.agents[0].start()?;
    lab.agents[0].wait_ready()?;
    eventually(PATIENCE, || match held(&lab, "pods") {
        Ok(held) if held == kept => Ok(()),
        other => Err(format!("{other:?}, not {kept:?}")),
    });
    assert_eq!(attached(&lab)?.len(), 1);
    runtime.call("DEL", "gone", "")?.success()?;
    Ok(())
}

#[test]
fn a_late_del_freed_the_address_of_another_sandbox() -> Result<()> {
    let lab = start()?;
    let tiny = Runtime::new(&lab, 0, "1.0.0")?.with("subnet", json!("tiny"));
    let (one, two, three) = (Ns::new("one")?, Ns::new("two")?, Ns::new("three")?);
    tiny.add("one", &one)?;
    tiny.call("DEL", "one", &netns_path(&one))?.success()?;
    let second = addresses(&tiny.add("two", &two)?)?;
    // The runtime's second DEL of the first one comes late.
    tiny.call("DEL", "one", &netns_path(&one))?.success()?;
    tiny.call("DEL", "one", "")?.success()?;
    assert_eq!(held(&lab, "tiny")?, second.iter().copied().collect());
    let (code, _) = tiny.refused("ADD", "three", &netns_path(&three))?;
    assert_eq!(code, 103, "its address was given out twice");
    let client = lab.workload("default/client")?;
    assert_eq!(Probe::icmp(&client.netns, second[0]).timeout(PATIENCE).run()?, Outcome::Connected);
    Ok(())
}

#[test]
fn a_workload_with_an_address_of_another_nodes_range_lost_its_connections() -> Result<()> {
    let lab = Lab::builder().config("routes: direct").start()?;
    let mut document = lab.empty_document();
    document.add(
        "subnets",
        json!({"vpc": "default", "name": "app", "cidr": "10.1.0.0/24", "cni_ranges": [
        {"node": "n1", "cidr": "10.1.0.0/26"}, {"node": "n2", "cidr": "10.1.0.64/26"}]}),
    );
    document.add("subnets", json!({"vpc": "default", "name": "lent", "cidr": "10.2.0.0/24", "node": "n2"}));
    let endpoint = |name: &str, subnet: &str, node: &str, ip: &str| json!({"vpc": "default", "name": name, "subnet": subnet, "node": node, "ips": [ip]});
    document.add(
        "endpoints",
        json!([
            endpoint("a", "app", "n1", "10.1.0.200"),
            endpoint("far", "app", "n2", "10.1.0.210"),
            // The subnet is the other node's; this workload of it is here.
            endpoint("borrowed", "lent", "n1", "10.2.0.9"),
        ]),
    );
    lab.apply(&document)?;
    let [a, far, borrowed]: [Result<Workload>; 3] =
        ["a", "far", "borrowed"].map(|n| lab.workload(&format!("default/{n}")));
    let (a, far, borrowed) = (a?, far?, borrowed?);
    let at = SocketAddr::new(borrowed.ip(4)?, WEB);
    let _server = TcpServer::start(&borrowed.netns, at, Mode::Echo)?;
    for (who, ns) in [
        ("its neighbour", &a.netns),
        ("the other node's workload", &far.netns),
        ("its host", &*lab.node(0).ns),
        ("the other host", &*lab.node(1).ns),
    ] {
        assert_eq!(Probe::tcp(ns, at).timeout(PATIENCE).run()?, Outcome::Connected, "{who}");
    }
    // Its address is nobody else's to use.
    let absent = SocketAddr::new("10.2.0.10".parse()?, WEB);
    assert_ne!(Probe::tcp(&a.netns, absent).timeout(SILENCE).run()?, Outcome::Connected);
    Ok(())
}
