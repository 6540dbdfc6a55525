//! What else container runtimes ask of a node: STATUS, the network configuration, the loopback plugin, capabilities.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result};
use flowloom_datapath::sys::{TcxHook, link_create, link_info, prog_by_id, tcx_chain};
use flowloom_netlink::{Event, Interest, Monitor, Netns};
use flowloom_testkit::{Cmd, Ns, Outcome, PATIENCE, Probe, eventually, temp_dir};
use flowloom_tests_e2e::{Lab, Runtime, netns_path, pods};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

#[test]
fn status_says_whether_an_add_can_be_served_and_why_not() -> Result<()> {
    let mut lab = pods::start()?;
    let of = |subnet: &str| -> Result<Runtime> {
        Ok(Runtime::new(&lab, 0, "1.1.0")?.with("subnet", json!(subnet)))
    };
    let (wide, tiny, typo) = (of("pods")?, of("tiny")?, of("pods")?.with("vpc", json!("rde")));
    wide.call("STATUS", "", "")?.success()?;
    tiny.call("STATUS", "", "")?.success()?;
    let (code, message) = typo.refused("STATUS", "", "")?;
    assert!(code == 50 && message.contains("rde"), "{code} {message}");
    let ns = Ns::new("pod")?;
    tiny.add("pod", &ns)?;
    // An endpoint of the document that waits for its attachment brings its address; without one there is nothing to attach.
    lab.apply(&pods::document(&lab).with("endpoints", json!([])))?;
    let (code, message) = tiny.refused("STATUS", "", "")?;
    assert!(code == 50 && message.contains("default/tiny is full"), "{code} {message}");
    wide.call("STATUS", "", "")?.success()?;
    tiny.call("DEL", "pod", &netns_path(&ns))?.success()?;
    tiny.call("STATUS", "", "")?.success()?;
    assert_eq!(Runtime::new(&lab, 0, "1.0.0")?.refused("STATUS", "", "")?.0, 1);
    lab.agents[0].kill()?;
    let (code, message) = wide.refused("STATUS", "", "")?;
    assert!(code == 50 && message.contains("agent.sock"), "{code} {message}");
    Ok(())
}

/// The first plugin of a list, as a runtime hands it over.
fn first_plugin(list: &Path) -> Result<Value> {
    let list: Value = serde_json::from_slice(&std::fs::read(list)?)?;
    let mut plugin = list["plugins"][0].clone();
    (plugin["cniVersion"], plugin["name"]) = (list["cniVersion"].clone(), list["name"].clone());
    Ok(plugin)
}

#[test]
fn the_agent_keeps_the_runtimes_configuration_while_it_is_ready() -> Result<()> {
    let host = temp_dir("runtime")?;
    let (conf, bin) = (host.path().join("net.d"), host.path().join("bin"));
    let line = format!("cni: {{conf_dir: {}, bin_dir: {}}}", conf.display(), bin.display());
    let mut lab = Lab::builder().nodes(1).config(&line).start()?;
    let list = conf.join("10-flowloom.conflist");
    eventually(PATIENCE, || if list.is_file() { Ok(()) } else { Err("no configuration") });
    lab.apply(&pods::document(&lab))?;
    let mut runtime = Runtime::new(&lab, 0, "1.0.0")?;
    runtime.config = first_plugin(&list)?;
    let ns = Ns::new("pod")?;
    runtime.add("pod", &ns)?;
    // The installed files are those of the build, `loopback` among them.
    let lo = Cmd::new(&[bin.join("loopback").display().to_string()])
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", "pod")
        .env("CNI_NETNS", netns_path(&ns))
        .env("CNI_IFNAME", "lo")
        .input(json!({"cniVersion": "0.3.1", "name": "cni-loopback", "type": "loopback"}).to_string())
        .run()?
        .success()?;
    let result: Value = serde_json::from_str(&lo.stdout)?;
    assert_eq!(
        (&result["cniVersion"], &result["ips"][0]["address"]),
        (&json!("0.3.1"), &json!("127.0.0.1/8"))
    );
    // A restart leaves it: ADDs wait for the seconds without an agent. Its queue is this agent's.
    lab.agents[0].kill()?;
    assert!(list.is_file());
    runtime.call("DEL", "pod", &netns_path(&ns))?.success()?;
    // An agent that runs and cannot serve takes it away, and brings it back when it can.
    let document = std::fs::read(&lab.document)?;
    std::fs::write(&lab.document, "{")?;
    std::fs::remove_file(lab.agents[0].state_dir.join("document.json"))?;
    lab.agents[0].start()?;
    eventually(PATIENCE, || if list.exists() { Err("still there") } else { Ok(()) });
    let client = lab.agents[0].client();
    eventually(PATIENCE, || match client.cni_report() {
        Ok(r) if !r.ready && r.conflist.as_ref().is_some_and(|c| !c.installed) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    std::fs::write(&lab.document, document)?;
    eventually(PATIENCE, || if list.is_file() { Ok(()) } else { Err("not back") });
    assert_eq!(pods::containers(&lab)?.len(), 0, "the DEL that waited is done");
    lab.agents[0].uninstall()?.success()?;
    for dir in [&conf, &bin] {
        assert_eq!(std::fs::read_dir(dir)?.count(), 0, "{} is not empty", dir.display());
    }
    Ok(())
}

#[test]
fn the_runtime_may_ask_for_addresses_and_a_mac_and_not_for_what_is_not_served() -> Result<()> {
    let lab = pods::start()?;
    let asking = |config: Value| -> Result<Runtime> {
        Ok(pods::runtime(&lab, "1.0.0")?.with("runtimeConfig", config))
    };
    let (first, second) = (Ns::new("first")?, Ns::new("second")?);
    let named = json!({"ips": ["10.7.0.77/24"], "mac": "02:00:00:00:00:77", "portMappings": []});
    let result = asking(named.clone())?.add("first", &first)?;
    let ips = pods::addresses(&result)?;
    assert_eq!((ips.len(), ips[0].to_string()), (2, "10.7.0.77".to_owned()));
    let shown = first.exec_ok(&["ip", "-o", "link", "show", "eth0"])?.stdout;
    assert!(shown.contains("02:00:00:00:00:77"), "{shown}");
    let client = lab.workload("default/client")?;
    for ip in ips {
        // Sent once: not even the first packet is lost.
        assert_eq!(Probe::icmp(&client.netns, ip).timeout(PATIENCE).run()?, Outcome::Connected, "{ip}");
    }
    for (config, wanted, needle) in [
        (json!({"ips": ["10.7.0.77"]}), 101, "10.7.0.77"),
        (json!({"ips": ["10.77.0.1"]}), 7, "10.77.0.1"),
        (json!({"mac": "02:00:00:00:00:77"}), 101, "02:00:00:00:00:77"),
        (json!({"portMappings": [{"hostPort": 8080, "containerPort": 80}]}), 7, "cni.port_mappings"),
        (json!({"bandwidth": {"ingressRate": 1000000, "ingressBurst": 1000000}}), 2, "bandwidth"),
    ] {
        let (code, message) = asking(config)?.refused("ADD", "second", &netns_path(&second))?;
        assert!(code == wanted && message.contains(needle), "{code} {message}");
    }
    assert!(pods::inside(&second).is_err());
    // The address is free again for another once its owner is gone.
    asking(named.clone())?.call("DEL", "first", &netns_path(&first))?.success()?;
    asking(named)?.add("second", &second)?;
    Ok(())
}

#[test]
fn requests_are_counted_by_verb_with_errors_and_durations() -> Result<()> {
    let lab = pods::start()?;
    let (runtime, ns) = (pods::runtime(&lab, "1.1.0")?, Ns::new("pod")?);
    runtime.add("pod", &ns)?;
    pods::runtime(&lab, "1.1.0")?.with("vpc", json!("rde")).refused("ADD", "other", &netns_path(&ns))?;
    runtime.call("STATUS", "", "")?.success()?;
    runtime.call("DEL", "pod", &netns_path(&ns))?.success()?;
    let report = lab.agents[0].client().cni_report()?;
    let of = |verb: &str| report.verbs.iter().find(|v| v.verb == verb).context("no such verb");
    let counts: Vec<u64> = ["ADD", "CHECK", "DEL", "GC", "STATUS", "REPLAY"]
        .iter()
        .map(|v| Ok(of(v)?.count))
        .collect::<Result<_>>()?;
    assert_eq!(counts, [2, 0, 1, 0, 1, 0]);
    let add = of("ADD")?;
    assert_eq!((add.errors["NotFound"], add.buckets.iter().sum::<u64>()), (1, 2));
    assert!(add.max_us > 0 && add.quantile_us(1.0) == Some(add.max_us), "{add:?}");
    let shown = lab.flowloom(0, &["cni", "status", "-o", "wide"])?.success()?.stdout;
    assert!(shown.contains("NotFound 1") && shown.contains("REPLAY"), "{shown}");
    Ok(())
}

/// Somebody who puts a program on every new link of flowloom's, as fast as it hears of one. Returns the link of the first.
fn race(node: &Netns, program: &OwnedFd, ready: &Barrier) -> Result<OwnedFd> {
    node.run_in(|| {
        let mut monitor = Monitor::new(&[Interest::Links])?;
        ready.wait();
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let mut fds = [PollFd::new(monitor.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::from(100u16))?;
            for event in monitor.read()? {
                if let Event::LinkChanged(link) = event
                    && link.name.starts_with("fl")
                {
                    return Ok(link_create(program.as_fd(), link.index.0, TcxHook::Ingress)?);
                }
            }
        }
        anyhow::bail!("no link appeared")
    })?
}

/// (program, link) ids at a hook of a device, in order.
fn chain(node: &Netns, ifindex: u32, hook: TcxHook) -> Result<Vec<(u32, u32)>> {
    Ok(node.run_in(|| tcx_chain(ifindex, hook))??.programs)
}

#[test]
fn somebodys_program_on_a_new_device_does_not_run_before_ours_once_add_has_answered() -> Result<()> {
    let lab = pods::start()?;
    let node = &lab.node(0).ns;
    let (runtime, client) = (pods::runtime(&lab, "1.0.0")?, lab.agents[0].client());
    let ifindex = |name: &str| -> Result<u32> {
        Ok(client.endpoint("default", name)?.device.context("no device")?.number)
    };
    // Any program does for somebody's, but the same one twice at a hook is refused: one that a settled device of the document runs at the other.
    let own = ifindex("client")?;
    eventually(PATIENCE, || match chain(node, own, TcxHook::Egress) {
        Ok(list) if list.len() == 1 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let program = prog_by_id(chain(node, own, TcxHook::Egress)?[0].0)?;
    let mut raced = 0;
    for round in 0..6 {
        let (ns, name, ready) = (Ns::new("pod")?, format!("c{round}"), Barrier::new(2));
        let theirs = std::thread::scope(|scope| -> Result<OwnedFd> {
            let racer = scope.spawn(|| race(node, &program, &ready));
            ready.wait();
            runtime.add(&name, &ns)?;
            racer.join().map_err(|_| anyhow::anyhow!("the racer panicked"))?
        })?;
        let (theirs, list) = (link_info(theirs.as_fd())?.id, chain(node, ifindex(&name)?, TcxHook::Ingress)?);
        let place = list.iter().position(|(_, link)| *link == theirs).context("their program is gone")?;
        if place > 0 {
            raced += 1;
        }
        // Whoever came after the answer is overtaken when the device gets its links.
        eventually(PATIENCE, || {
            match chain(node, ifindex(&name).map_err(|e| e.to_string())?, TcxHook::Ingress) {
                Ok(list) if list.len() == 2 && list[1].1 == theirs => Ok(()),
                other => Err(format!("round {round}: {other:?}")),
            }
        });
        runtime.call("DEL", &name, &netns_path(&ns))?.success()?;
    }
    assert!(raced >= 3, "ours were first at the answer in {raced} of 6 rounds");
    Ok(())
}
