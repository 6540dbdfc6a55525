//! A restart with nothing to do does nothing, as seen from outside; what a reboot, another build or a broken document leave is met right; removal leaves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flowloom_netlink::Netns;
use flowloom_testkit::{
    Cmd, Mode, Ns, Outcome, PATIENCE, Probe, Process, TcpFlow, TcpServer, UdpReceiver, UdpSender, eventually,
};
use flowloom_tests_e2e::{Document, Lab, Runtime, netns_path};
use nix::mount::{MntFlags, umount2};
use serde_json::{Value, json};

const OPEN: u16 = 7000;
const SHUT: u16 = 7999;
const MARK: u64 = u64::from_be_bytes(*b"RESTARTS");

fn document(lab: &Lab) -> Document {
    let endpoint = |vpc: &str, name: &str, host: u8| json!({"vpc": vpc, "name": name, "subnet": "app", "node": "n1", "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")], "security_groups": ["g"]});
    let group = |vpc: &str| {
        json!({"vpc": vpc, "name": "g", "default_deny_egress": false, "rules": [
            {"id": "tcp", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": OPEN, "to": OPEN}], "action": "allow"},
            {"id": "udp", "priority": 1, "direction": "ingress", "protocol": "udp", "ports": [{"from": OPEN, "to": OPEN}], "action": "allow"}]})
    };
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with(
            "subnets",
            json!([
                {"vpc": "red", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]},
                {"vpc": "default", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]},
                {"vpc": "default", "name": "pods", "cidr": "10.7.0.0/24", "node": "n1"},
            ]),
        )
        .with(
            "endpoints",
            json!([
                endpoint("red", "a", 10),
                endpoint("red", "b", 20),
                endpoint("default", "a", 10),
                endpoint("default", "b", 20)
            ]),
        )
        .with("security_groups", json!([group("red"), group("default")]))
}

/// Established traffic between `a` and `b` of a VPC; lost nothing when `end` says so.
struct Traffic {
    _server: TcpServer,
    flow: TcpFlow,
    receiver: UdpReceiver,
    sender: UdpSender,
}

impl Traffic {
    fn start(lab: &Lab, vpc: &str) -> Result<Self> {
        let (a, b) = (lab.workload(&format!("{vpc}/a"))?, lab.workload(&format!("{vpc}/b"))?);
        let at = SocketAddr::new(b.ip(4)?, OPEN);
        let server = TcpServer::start(&b.netns, at, Mode::Echo)?;
        let flow = TcpFlow::start(&a.netns, at, Duration::from_millis(1), PATIENCE)?;
        let to = SocketAddr::new(b.ip(6)?, OPEN);
        let receiver = UdpReceiver::start(&b.netns, to)?;
        let sender = UdpSender::start(&a.netns, None, to, Duration::from_millis(1), MARK, 64)?;
        let traffic = Self { _server: server, flow, receiver, sender };
        traffic.goes_on();
        Ok(traffic)
    }

    /// More of both arrives from now on.
    fn goes_on(&self) {
        let (trips, datagrams) = (self.flow.round_trips(), self.receiver.count());
        eventually(PATIENCE, || {
            let now = (self.flow.round_trips(), self.receiver.count());
            if now.0 > trips + 20 && now.1 > datagrams + 20 { Ok(()) } else { Err(format!("{now:?}")) }
        });
    }

    fn end(self) {
        self.goes_on();
        let sent = self.sender.stop();
        eventually(PATIENCE, || {
            let missing = self.receiver.missing(MARK, sent);
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("of {sent} datagrams are lost: {missing:?}"))
            }
        });
        let report = self.flow.stop();
        assert!(report.error.is_none(), "{report:?}");
        // A retransmission of TCP takes 200 ms at least: none was needed.
        assert!(report.longest < Duration::from_millis(200), "{report:?}");
    }
}

/// What the rules say, by packets.
fn assert_enforced(lab: &Lab, when: &str) -> Result<()> {
    for vpc in ["red", "default"] {
        let (a, b) = (lab.workload(&format!("{vpc}/a"))?, lab.workload(&format!("{vpc}/b"))?);
        for family in [4, 6] {
            let shut = SocketAddr::new(b.ip(family)?, SHUT);
            let _closed = TcpServer::start(&b.netns, shut, Mode::Echo)?;
            let open = SocketAddr::new(b.ip(family)?, OPEN);
            // Somebody may listen there already.
            let _open = TcpServer::start(&b.netns, open, Mode::Echo);
            let reached = Probe::tcp(&a.netns, open).timeout(PATIENCE).run()?;
            assert_eq!(reached, Outcome::Connected, "{when}: {vpc} IPv{family}");
            let denied = Probe::tcp(&a.netns, shut).timeout(Duration::from_millis(200)).run()?;
            assert_eq!(denied, Outcome::TimedOut, "{when}: {vpc} IPv{family}");
        }
    }
    Ok(())
}

/// A program that prints what changes, from the moment it is known to listen.
struct Watch {
    process: Process,
    from: usize,
}

impl Watch {
    /// `sign` makes a change that `word` shows.
    fn start(ns: &Netns, argv: &[&str], sign: &dyn Fn() -> Result<()>, word: &str) -> Result<Self> {
        let process = Cmd::new(argv).in_netns(ns)?.spawn()?;
        eventually(PATIENCE, || {
            sign().map_err(|e| e.to_string())?;
            let text = process.stdout().map_err(|e| e.to_string())?;
            if text.contains(word) {
                Ok(())
            } else {
                Err(format!("{} is not listening: {text}", process.command()))
            }
        });
        let mut watch = Self { process, from: 0 };
        watch.from = watch.after_sign(sign, word)?.1;
        Ok(watch)
    }

    /// Everything up to a sign made now, and where the sign's lines end.
    fn after_sign(&self, sign: &dyn Fn() -> Result<()>, word: &str) -> Result<(String, usize)> {
        let before = self.process.stdout()?.matches(word).count();
        sign()?;
        let mut last = usize::MAX;
        let text = eventually(PATIENCE, || {
            let text = self.process.stdout().map_err(|e| e.to_string())?;
            // Two looks of equal length: the sign is printed whole.
            let whole = text.matches(word).count() > before && text.len() == last && text.ends_with('\n');
            last = text.len();
            if whole { Ok(text) } else { Err("the sign does not come".to_owned()) }
        });
        let end = text.len();
        Ok((text.get(self.from..).unwrap_or_default().to_owned(), end))
    }
}

/// bpf(2) commands that change something that others can see.
const WRITES: &[&str] = &[
    "BPF_MAP_UPDATE_ELEM",
    "BPF_MAP_UPDATE_BATCH",
    "BPF_MAP_DELETE_ELEM",
    "BPF_MAP_DELETE_BATCH",
    "BPF_MAP_LOOKUP_AND_DELETE_ELEM",
    "BPF_MAP_LOOKUP_AND_DELETE_BATCH",
    "BPF_MAP_CREATE",
    "BPF_MAP_FREEZE",
    "BPF_PROG_LOAD",
    "BPF_PROG_TEST_RUN",
    "BPF_PROG_ATTACH",
    "BPF_PROG_DETACH",
    "BPF_LINK_CREATE",
    "BPF_LINK_UPDATE",
    "BPF_LINK_DETACH",
    "BPF_OBJ_PIN",
    "BPF_BTF_LOAD",
];

/// Pinned link -> its number in the kernel, and the program in it.
fn links(lab: &Lab) -> Result<BTreeMap<PathBuf, String>> {
    let mut links = BTreeMap::new();
    for path in pins(&lab.agents[0].pin_root)?
        .into_iter()
        .filter(|p| p.components().any(|c| c.as_os_str() == "links"))
    {
        let shown = Cmd::new(&["bpftool", "-j", "link", "show", "pinned", &path.display().to_string()])
            .run()?
            .success()?;
        let link: Value = serde_json::from_str(&shown.stdout)?;
        let link = if link.is_array() { link[0].clone() } else { link };
        ensure!(link["id"].is_u64(), "{}: {}", path.display(), shown.stdout);
        links.insert(path, format!("link {} program {}", link["id"], link["prog_id"]));
    }
    Ok(links)
}

/// Every file below a directory.
fn pins(root: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                left.push(entry.path());
            } else {
                found.insert(entry.path());
            }
        }
    }
    Ok(found)
}

#[test]
fn a_restart_with_nothing_to_do_writes_nothing_as_seen_from_outside() -> Result<()> {
    let mut lab = Lab::builder()
        .nodes(1)
        .config("masquerade: {enabled: true}")
        .config("conntrack: {sweep_seconds: 3600}")
        .start()?;
    lab.apply(&document(&lab))?;
    let pod = Ns::new("pod")?;
    let runtime = Runtime::new(&lab, 0, "1.0.0")?;
    runtime.add("pod", &pod)?;
    let traffic = [Traffic::start(&lab, "red")?, Traffic::start(&lab, "default")?];
    // The links of a device that just came are made in a quiet moment; until then the classic hooks guard it.
    let endpoints = lab.agents[0].client().endpoints()?.endpoints;
    eventually(PATIENCE, || {
        let pins = pins(&lab.agents[0].pin_root).map_err(|e| e.to_string())?;
        let missing: Vec<String> = endpoints
            .iter()
            .filter_map(|e| e.device.as_ref())
            .flat_map(|d| ["from", "to"].map(|way| format!("{way}_endpoint_{}", d.number)))
            .filter(|name| !pins.iter().any(|p| p.ends_with(name)))
            .collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("no {missing:?}")) }
    });
    let before = (links(&lab)?, pins(&lab.agents[0].pin_root)?);
    assert!(before.0.len() >= 10, "too few links to say anything: {:?}", before.0);
    let calls = lab.dir().join("bpf-calls");

    let ns = lab.node(0).ns.try_clone()?;
    let link_sign = || -> Result<()> {
        for verb in [&["add", "flsign", "type", "bridge"][..], &["del", "flsign"]] {
            let argv: Vec<&str> = ["ip", "link"].iter().chain(verb).copied().collect();
            Cmd::new(&argv).in_netns(&ns)?.run()?.success()?;
        }
        Ok(())
    };
    let table_sign = || -> Result<()> {
        for verb in ["add", "delete"] {
            Cmd::new(&["nft", verb, "table", "inet", "flsign"]).in_netns(&ns)?.run()?.success()?;
        }
        Ok(())
    };
    let network = Watch::start(&ns, &["ip", "-ts", "monitor", "all"], &link_sign, "flsign")?;
    let tables = Watch::start(&ns, &["nft", "monitor"], &table_sign, "delete table inet flsign")?;
    // The old agent has seen the signs too; what it does about them is over.
    let client = lab.agents[0].client();
    let mut passes = 0;
    eventually(PATIENCE, || {
        let status = client.status().map_err(|e| e.to_string())?;
        let settled = status.reconcile.passes == passes;
        passes = status.reconcile.passes;
        if settled { Ok(()) } else { Err("passes go on".to_owned()) }
    });

    let agent = &mut lab.agents[0];
    agent.kill()?;
    agent.wrap(&["strace", "-D", "-f", "-e", "trace=bpf", "-o", &calls.display().to_string()]);
    agent.start()?;
    agent.wrap(&[]);
    agent.wait_ready()?;
    lab.wait_enforced()?;

    let seen = network.after_sign(&link_sign, "flsign")?.0;
    let seen: Vec<&str> = seen.split_inclusive('\n').collect();
    // Before the sign of its end; traffic ages the kernel's own neighbours, which are not the agent's.
    let end = seen.iter().position(|l| l.contains("flsign")).unwrap_or(seen.len());
    let foreign = ["REACHABLE", "STALE", "DELAY", "PROBE", "Timestamp"];
    let changes: Vec<&&str> = seen[..end].iter().filter(|l| !foreign.iter().any(|f| l.contains(f))).collect();
    assert!(changes.is_empty(), "the restart changed the network: {changes:?}");
    let seen = tables.after_sign(&table_sign, "add table inet flsign")?.0;
    let seen: Vec<&str> =
        seen.lines().take_while(|l| !l.contains("flsign")).filter(|l| !l.trim().is_empty()).collect();
    assert!(seen.is_empty(), "the restart changed tables: {seen:?}");

    let text = std::fs::read_to_string(&calls)?;
    let all: Vec<&str> = text.lines().filter(|l| l.contains("bpf(")).collect();
    assert!(all.iter().any(|l| l.contains("BPF_OBJ_GET,")), "strace saw nothing of the agent: {text}");
    let writes: Vec<&&str> =
        all.iter().filter(|l| WRITES.iter().any(|w| l.contains(&format!("bpf({w},")))).collect();
    assert!(writes.is_empty(), "of {} calls wrote {}: {writes:#?}", all.len(), writes.len());
    println!("restart: {} bpf(2) calls, none of them writes", all.len());

    assert_eq!((links(&lab)?, pins(&lab.agents[0].pin_root)?), before);
    for traffic in traffic {
        traffic.end();
    }
    assert_enforced(&lab, "after the restart")?;
    runtime.call("DEL", "pod", &netns_path(&pod))?.success()?;
    Ok(())
}

/// What a reboot takes: pins, links, routes, tables, namespaces. What it leaves: files.
fn reboot(lab: &mut Lab) -> Result<()> {
    lab.agents[0].kill()?;
    let agent = &lab.agents[0];
    let netns_dir = agent.config.parent().context("no directory")?.join("netns");
    for entry in std::fs::read_dir(&netns_dir)? {
        let path = entry?.path();
        umount2(&path, MntFlags::MNT_DETACH)?;
        std::fs::remove_file(&path)?;
    }
    let ns = &lab.node(0).ns;
    let shown: Value = serde_json::from_str(&ns.exec_ok(&["ip", "-j", "link"])?.stdout)?;
    for link in shown.as_array().into_iter().flatten() {
        let name = link["ifname"].as_str().context("a link without a name")?;
        if !["lo", lab.node(0).uplink.as_str()].contains(&name) {
            // Its other end may have taken it along.
            ns.exec(&["ip", "link", "del", name])?;
        }
    }
    ns.exec(&["nft", "delete", "table", "inet", "flowloom"])?;
    for pin in pins(&agent.pin_root)? {
        std::fs::remove_file(pin)?;
    }
    let mut dirs = vec![agent.pin_root.clone()];
    while let Some(dir) = dirs.last().cloned() {
        match std::fs::read_dir(&dir)?.next() {
            Some(below) => dirs.push(below?.path()),
            None => {
                std::fs::remove_dir(&dir)?;
                dirs.pop();
            }
        }
    }
    // A reboot also forgets the socket's directory.
    let _ = std::fs::remove_file(&agent.socket);
    Ok(())
}

#[test]
fn after_a_reboot_everything_is_built_again_with_the_same_addresses() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).config("masquerade: {enabled: true}").start()?;
    lab.apply(&document(&lab))?;
    let pod = Ns::new("pod")?;
    let runtime = Runtime::new(&lab, 0, "1.0.0")?;
    runtime.add("pod", &pod)?;
    assert_enforced(&lab, "before")?;
    let what = |lab: &Lab| -> Result<BTreeMap<String, String>> {
        let list = lab.agents[0].client().endpoints()?.endpoints;
        Ok(list
            .into_iter()
            .filter(|e| e.attachment.is_none())
            .map(|e| {
                (
                    format!("{}/{}", e.vpc.name, e.endpoint.name),
                    format!("{:?} {} {:?}", e.ips, e.mac, e.gateways),
                )
            })
            .collect())
    };
    let before = what(&lab)?;
    assert_eq!(before.len(), 4, "{before:?}");
    reboot(&mut lab)?;
    // The pod's namespace is gone as well.
    drop(pod);
    assert!(lab.workload("red/a").is_err());
    lab.agents[0].start()?;
    lab.agents[0].wait_ready()?;
    lab.wait_enforced()?;
    assert_eq!(what(&lab)?, before);
    assert_enforced(&lab, "after the reboot")?;
    // An attachment whose container did not survive holds no address for ever.
    let client = lab.agents[0].client();
    eventually(PATIENCE, || {
        let attached = client
            .endpoints()
            .map_err(|e| e.to_string())?
            .endpoints
            .iter()
            .filter(|e| e.attachment.is_some())
            .count();
        if attached == 0 { Ok(()) } else { Err(format!("{attached} attachments of before the reboot")) }
    });
    runtime.call("DEL", "pod", "")?.success()?;
    let again = Ns::new("pod")?;
    runtime.add("pod-2", &again)?;
    runtime.call("DEL", "pod-2", &netns_path(&again))?.success()?;
    Ok(())
}

#[test]
fn an_agent_of_another_layout_is_refused_and_traffic_goes_on() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    lab.apply(&document(&lab))?;
    let traffic = Traffic::start(&lab, "red")?;
    let version = lab.agents[0].client().status()?.abi_version;
    lab.agents[0].kill()?;
    // The pins in force are those of a newer build: this agent is the other one.
    let root = lab.agents[0].pin_root.clone();
    let (ours, newer) = (root.join(format!("v{version}")), root.join(format!("v{}", version + 1)));
    std::fs::rename(&ours, &newer)?;
    let kept = pins(&root)?;
    lab.agents[0].start()?;
    let status = lab.agents[0]
        .process
        .as_mut()
        .context("not started")?
        .wait_until(std::time::Instant::now() + PATIENCE)?;
    assert!(status.is_some_and(|s| !s.success()), "it runs over foreign pins: {status:?}");
    let said = lab.agents[0].process.as_ref().context("not started")?.stderr()?;
    for word in [format!("{}", version + 1), format!("{version}"), newer.display().to_string()] {
        assert!(said.contains(&word), "the refusal does not say {word}: {said}");
    }
    lab.agents[0].process = None;
    assert_eq!(pins(&root)?, kept, "it touched foreign pins");
    traffic.goes_on();
    // Its own build finds everything as it was.
    if ours.exists() {
        std::fs::remove_dir(&ours)?;
    }
    std::fs::rename(&newer, &ours)?;
    lab.agents[0].start()?;
    lab.agents[0].wait_ready()?;
    traffic.end();
    assert_enforced(&lab, "after the refusal")
}

#[test]
fn a_broken_document_at_the_start_keeps_what_is_in_force() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    lab.apply(&document(&lab))?;
    let traffic = Traffic::start(&lab, "red")?;
    let good = std::fs::read(&lab.document)?;
    lab.agents[0].kill()?;
    std::fs::write(&lab.document, b"{\"version\": 1, \"vpcs\": [")?;
    lab.agents[0].start()?;
    let client = lab.agents[0].client();
    let status = eventually(PATIENCE, || match client.status() {
        Ok(s) if !s.document.error.is_empty() => Ok(s),
        other => Err(format!("{other:?}")),
    });
    assert!(
        status.document.error.contains("desired.json"),
        "which file is broken? {}",
        status.document.error
    );
    traffic.goes_on();
    // The last good document is in force: no workload of it is gone, nothing opened, and the agent serves.
    lab.agents[0].wait_ready()?;
    assert_enforced(&lab, "with a broken document")?;
    let links_before = links(&lab)?;
    assert!(links_before.len() >= 8, "{links_before:?}");
    std::fs::write(&lab.document, &good)?;
    lab.agents[0].wait_ready()?;
    lab.wait_enforced()?;
    assert_eq!(links(&lab)?, links_before);
    traffic.end();
    assert_enforced(&lab, "after the repair")
}

#[test]
fn uninstall_leaves_nothing_behind() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).config("masquerade: {enabled: true}").start()?;
    let pristine = |lab: &Lab| -> Result<Vec<String>> {
        let ns = &lab.node(0).ns;
        let mut lines = Vec::new();
        for argv in [
            &["ip", "-brief", "link"][..],
            &["ip", "-4", "route", "show", "table", "all"],
            &["ip", "-6", "route", "show", "table", "all"],
            &["ip", "-4", "rule"],
            &["ip", "-6", "rule"],
            &["nft", "list", "tables"],
            &["bpftool", "net", "show"],
        ] {
            let shown = ns.exec_ok(argv)?.stdout;
            lines.extend(
                shown
                    .lines()
                    .map(|l| format!("{}: {}", argv[..2].join(" "), l.trim()))
                    .filter(|l| !l.ends_with(": ")),
            );
        }
        Ok(lines)
    };
    lab.apply(&document(&lab))?;
    let pod = Ns::new("pod")?;
    Runtime::new(&lab, 0, "1.0.0")?.add("pod", &pod)?;
    let installed = pristine(&lab)?;
    for word in ["flowloom_vxlan", "inet flowloom", "10.1.0.20"] {
        assert!(
            installed.iter().any(|l| l.contains(word)),
            "{word} is not there to be removed: {installed:#?}"
        );
    }
    let root = lab.agents[0].pin_root.clone();
    assert!(!pins(&root)?.is_empty());
    lab.agents[0].uninstall()?.success()?;
    let left = pristine(&lab)?;
    for line in &left {
        let own =
            ["flowloom", "10.1.0", "10.7.0", "fd10:", "from_endpoint", "from_uplink", "from_overlay", "to_"];
        assert!(!own.iter().any(|w| line.contains(w)), "left behind: {line}");
    }
    let links: Vec<_> = left.iter().filter(|l| l.starts_with("ip -brief")).collect();
    assert_eq!(links.len(), 2, "only lo and the uplink: {links:?}");
    let tables: Vec<_> = left.iter().filter(|l| l.starts_with("nft")).collect();
    assert_eq!(tables, ["nft list: table inet testkit"], "only the test's own table");
    assert!(!root.exists() || pins(&root)?.is_empty(), "pins are left");
    assert!(!lab.agents[0].state_dir.exists(), "state is left");
    assert!(!lab.agents[0].socket.exists(), "the socket is left");
    let netns_dir = lab.agents[0].config.parent().context("no directory")?.join("netns");
    assert!(!netns_dir.exists() || std::fs::read_dir(netns_dir)?.next().is_none(), "namespaces are left");
    let inside = pod.exec_ok(&["ip", "-brief", "link"])?.stdout;
    assert_eq!(inside.lines().count(), 1, "the container keeps an interface: {inside}");
    // Again is fine.
    lab.agents[0].uninstall()?.success()?;
    Ok(())
}
