//! The agent may die: killed before its n-th external write (file, link, route, map) of an operation, for n = 1, 2, 3 ... until the operation finishes. Afterwards
//! the state equals that of a run that was not disturbed, and an established flow has lost nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use flowloom_api::v1::{Status, digest};
use flowloom_datapath::sys::{TcxHook, tcx_chain};
use flowloom_netlink::Netns;
use flowloom_testkit::{Cmd, Mode, Ns, Outcome, Output, PATIENCE, Probe, TcpFlow, TcpServer};
use flowloom_tests_e2e::{Document, Lab, binary};
use serde_json::{Value, json};

const VARIABLE: &str = "FLOWLOOM_TEST_ABORT_AT_WRITE";
/// More writes than any operation here can need: a test that gets here loops.
const MOST: usize = 400;

fn base(lab: &Lab) -> Document {
    let endpoint = |name: &str, host: u8| json!({"vpc": "red", "name": name, "subnet": "app", "node": "n1", "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")], "security_groups": ["g"], "labels": {"role": name}});
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([
            {"vpc": "red", "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]},
            {"vpc": "default", "name": "pods", "cidr": "10.7.0.0/24", "node": "n1"},
        ]))
        .with("endpoints", json!([endpoint("a", 10), endpoint("b", 20)]))
        .with("security_groups", json!([{"vpc": "red", "name": "g", "default_deny_egress": false, "rules": [
            {"id": "flow", "priority": 1, "direction": "ingress", "protocol": "tcp", "ports": [{"from": 7000, "to": 7000}], "action": "allow"}]}]))
}

fn with_rule(lab: &Lab) -> Result<Document> {
    let mut document = base(lab);
    document.rules("red", "g")?.push(json!({"id": "cidr", "priority": 5, "direction": "ingress", "protocol": "tcp", "remote_cidr": "10.1.0.8/29", "ports": [{"from": 8000, "to": 8010}], "action": "allow"}));
    Ok(document)
}

fn with_endpoint(lab: &Lab) -> Document {
    let mut document = base(lab);
    document.add("endpoints", json!({"vpc": "red", "name": "late", "subnet": "app", "node": "n1", "ips": ["10.1.0.30", "fd10:1::30"], "security_groups": ["g"], "labels": {"role": "late"}}));
    document
}

/// What the node holds, by names; numbers that only this run knows are left out.
fn state(lab: &Lab) -> Result<BTreeSet<String>> {
    let client = lab.agents.first().context("no agent")?.client();
    let mut lines = BTreeSet::new();
    for e in client.endpoints()?.endpoints {
        lines.insert(format!(
            "endpoint {}/{} {:?} {:?} {:?} {:?}",
            e.vpc.name,
            e.endpoint.name,
            e.state,
            e.ips,
            e.security_groups,
            e.conditions.iter().map(|c| (&c.kind, c.status, &c.reason)).collect::<Vec<_>>()
        ));
        for slot in client.policy_entries(Some((&e.vpc.name, &e.endpoint.name)))?.slots {
            for entry in slot.entries {
                lines.insert(format!(
                    "entry {}/{} {:?} {} {} {} {:?} {}",
                    e.vpc.name,
                    e.endpoint.name,
                    slot.direction,
                    entry.peer.name,
                    entry.protocol,
                    entry.ports,
                    entry.verdict,
                    entry.rule.name
                ));
            }
        }
    }
    for pool in client.ipam()?.pools {
        for used in pool.used.iter().filter(|u| u.cooling_ms.is_none()) {
            lines.insert(format!("address {} {} of {}", pool.subnet, used.address, used.endpoint));
        }
    }
    let links = lab.node(0).ns.exec_ok(&["ip", "-brief", "link"])?.stdout;
    lines.insert(format!("{} links", links.lines().count()));
    let routes = lab.node(0).ns.exec_ok(&["ip", "route", "show", "table", "all"])?.stdout;
    lines.extend(
        routes
            .lines()
            .map(|r| format!("route {}", r.split_whitespace().take(2).collect::<Vec<_>>().join(" "))),
    );
    Ok(lines)
}

/// Waits until the agent died (true) or enforces what is installed and has tidied up behind it (false).
fn died(lab: &mut Lab) -> Result<bool> {
    let mut lock = lab.document.clone().into_os_string();
    lock.push(".lock.yaml");
    let wanted = digest(&std::fs::read(&lab.document)?, std::fs::read(lock).ok().as_deref());
    let end = Instant::now() + PATIENCE;
    let agent = lab.agents.first_mut().context("no agent")?;
    let client = agent.client();
    while Instant::now() < end {
        if agent.process.as_mut().context("not started")?.status()?.is_some() {
            agent.process = None;
            return Ok(true);
        }
        let finished =
            |s: &Status| s.document.applied_digest == wanted && s.ready && s.reconcile.quiet_work == 0;
        if client.status().is_ok_and(|s| finished(&s)) {
            return Ok(false);
        }
        std::thread::yield_now();
    }
    bail!("neither died nor finished: {:?}", client.status())
}

/// Starts the agent so that it dies before its n-th write.
fn start_doomed(lab: &mut Lab, n: usize) -> Result<()> {
    let agent = lab.agents.first_mut().context("no agent")?;
    agent.kill()?;
    agent.set_variable(VARIABLE, &n.to_string());
    agent.start()?;
    agent.clear_variables();
    Ok(())
}

fn start_whole(lab: &mut Lab) -> Result<()> {
    lab.agents.first_mut().context("no agent")?.restart()?;
    if died(lab)? {
        bail!("it died without being told to")
    }
    Ok(())
}

/// Runs `from` -> `to` with the agent killed at every write.
fn every_write(
    name: &str,
    from: &dyn Fn(&Lab) -> Result<Document>,
    to: &dyn Fn(&Lab) -> Result<Document>,
) -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    lab.apply(&to(&lab)?)?;
    let clean_to = state(&lab)?;
    lab.apply(&from(&lab)?)?;
    let clean_from = state(&lab)?;
    let (a, b) = (lab.workload("red/a")?, lab.workload("red/b")?);
    let at = SocketAddr::new(b.ip(4)?, 7000);
    let _server = TcpServer::start(&b.netns, at, Mode::Echo)?;
    let flow = TcpFlow::start(&a.netns, at, Duration::from_millis(1), PATIENCE)?;
    let denied = SocketAddr::new(b.ip(4)?, 7999);
    let _closed = TcpServer::start(&b.netns, denied, Mode::Echo)?;
    let (mut killed, mut restarting) = (0, 0);
    for n in 1..=MOST {
        start_doomed(&mut lab, n)?;
        let early = died(&mut lab)?;
        if !early {
            lab.install(&to(&lab)?)?;
        }
        let dead = early || died(&mut lab)?;
        // Dead or alive, nothing is open that should not be.
        assert_eq!(
            Probe::tcp(&a.netns, denied).timeout(Duration::from_millis(60)).run()?,
            Outcome::TimedOut,
            "{name}: open after write {n}"
        );
        if early {
            // Killed while it adopted what it found; a place where it may write is enough.
            restarting += 1;
            start_whole(&mut lab)?;
            assert_eq!(state(&lab)?, clean_from, "{name}: restart killed before write {n}");
            continue;
        }
        if !dead {
            assert_eq!(state(&lab)?, clean_to, "{name}: undisturbed");
            break;
        }
        killed += 1;
        start_whole(&mut lab)?;
        assert_eq!(state(&lab)?, clean_to, "{name}: killed before write {n}");
        lab.apply(&from(&lab)?)?;
        assert_eq!(state(&lab)?, clean_from, "{name}: back after write {n}");
        assert!(n < MOST, "{name} needs more than {MOST} writes");
    }
    let report = flow.stop();
    assert!(report.error.is_none(), "{name}: {report:?}");
    println!(
        "{name}: killed at each of {restarting} places of a restart and before each of {killed} writes; an established flow made {} round trips, the longest {:?}",
        report.round_trips, report.longest
    );
    assert!(killed > 0, "{name}: nothing was killed: is the agent built with kill-points?");
    Ok(())
}

#[test]
fn killed_at_every_write_of_a_policy_change() -> Result<()> {
    every_write("policy change", &|lab| Ok(base(lab)), &with_rule)
}

#[test]
fn killed_at_every_write_of_an_endpoint_coming() -> Result<()> {
    every_write("endpoint comes", &|lab| Ok(base(lab)), &|lab| Ok(with_endpoint(lab)))
}

#[test]
fn killed_at_every_write_of_an_endpoint_going() -> Result<()> {
    every_write("endpoint goes", &|lab| Ok(with_endpoint(lab)), &|lab| Ok(base(lab)))
}

/// How many devices of endpoints are switched on, and which of them have nobody to judge what they carry.
fn open_devices(lab: &Lab) -> Result<(usize, Vec<String>)> {
    let ns = &lab.node(0).ns;
    let shown: Value = serde_json::from_str(&ns.exec_ok(&["ip", "-j", "-d", "link"])?.stdout)?;
    let (mut on, mut open) = (0, Vec::new());
    for link in shown.as_array().into_iter().flatten() {
        let name = link["ifname"].as_str().context("a link without a name")?;
        let up = link["flags"].as_array().is_some_and(|flags| flags.iter().any(|f| f == "UP"));
        let alias = link["ifalias"].as_str().unwrap_or_default();
        if !up || !alias.starts_with("flowloom:endpoint:") {
            continue;
        }
        on += 1;
        let index = u32::try_from(link["ifindex"].as_u64().context("a link without a number")?)?;
        for (hook, word) in [(TcxHook::Ingress, "ingress"), (TcxHook::Egress, "egress")] {
            let chain = ns.run_in(|| tcx_chain(index, hook))??;
            let classic = ns.exec(&["tc", "filter", "show", "dev", name, word])?.stdout;
            if chain.programs.is_empty() && !classic.contains("bpf") {
                open.push(format!("{name} {word}"));
            }
        }
    }
    Ok((on, open))
}

/// A start where nothing was: programs load while maps and devices are made. Not every write: each costs two starts.
#[test]
fn killed_while_it_starts_for_the_first_time() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    lab.apply(&base(&lab))?;
    let clean = state(&lab)?;
    let (mut killed, mut seen) = (0, 0);
    for n in (1..=MOST).step_by(9) {
        let agent = lab.agents.first_mut().context("no agent")?;
        agent.uninstall()?.success()?;
        start_doomed(&mut lab, n)?;
        if !died(&mut lab)? {
            assert_eq!(state(&lab)?, clean, "undisturbed");
            break;
        }
        killed += 1;
        let (on, open) = open_devices(&lab)?;
        assert_eq!(open, Vec::<String>::new(), "killed before write {n}");
        seen += on;
        start_whole(&mut lab)?;
        assert_eq!(state(&lab)?, clean, "killed before write {n}");
        assert!(n + 9 <= MOST, "a start needs more than {MOST} writes");
    }
    assert!(killed > 0, "nothing was killed: is the agent built with kill-points?");
    assert!(seen > 0, "no device was ever on");
    Ok(())
}

/// A runtime's call of the plugin on the node.
struct Runtime {
    config: String,
    node: Netns,
}

impl Runtime {
    fn of(lab: &Lab) -> Result<Self> {
        let socket = &lab.agents.first().context("no agent")?.socket;
        let config =
            json!({"cniVersion": "1.0.0", "name": "flowloom", "type": "flowloom-cni", "socket": socket})
                .to_string();
        Ok(Self { config, node: lab.node(0).ns.try_clone()? })
    }

    fn call(&self, verb: &str, ns: &Ns) -> Result<Output> {
        Cmd::new(&[binary("flowloom-cni")?])
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", "c1")
            .env("CNI_NETNS", ns.path())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .input(self.config.as_bytes())
            .in_netns(&self.node)?
            .timeout(Duration::from_secs(90))
            .run()
    }
}

/// ADD or DEL with the agent killed at every write, each repeated as a runtime repeats it.
fn every_write_of_cni(verb: &str) -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    lab.apply(&base(&lab))?;
    let without = state(&lab)?;
    let runtime = Runtime::of(&lab)?;
    let mut killed = 0;
    for n in 1..=MOST {
        let ns = Ns::new("pod")?;
        if verb == "DEL" {
            runtime.call("ADD", &ns)?.success()?;
        }
        start_doomed(&mut lab, n)?;
        if died(&mut lab)? {
            start_whole(&mut lab)?;
            if verb == "DEL" {
                runtime.call("DEL", &ns)?.success()?;
            }
            assert_eq!(state(&lab)?, without, "{verb}: restart killed before write {n}");
            continue;
        }
        // The plugin waits for an agent that comes back: the call and the restart go on side by side.
        let dead = std::thread::scope(|scope| -> Result<bool> {
            let call = scope.spawn(|| runtime.call(verb, &ns));
            let mut dead = false;
            loop {
                // Asked before the agent is looked at: it may die right after its answer.
                let finished = call.is_finished();
                let agent = lab.agents.first_mut().context("no agent")?;
                if agent.process.as_mut().context("not started")?.status()?.is_some() {
                    dead = true;
                    agent.process = None;
                    start_whole(&mut lab)?;
                }
                if finished {
                    break;
                }
                std::thread::yield_now();
            }
            call.join()
                .map_err(|_| anyhow::anyhow!("the call panicked"))??
                .success()
                .with_context(|| format!("{verb} over write {n}"))?;
            Ok(dead)
        })?;
        killed += usize::from(dead);
        if !dead {
            // What follows is not what is counted.
            start_whole(&mut lab)?;
        }
        // The runtime tries again; for an ADD that succeeded already this is a repeated ADD.
        runtime.call(verb, &ns)?.success().with_context(|| format!("{verb} again after write {n}"))?;
        if verb == "ADD" {
            let own = lab.agents.first().context("no agent")?.client().endpoints()?.endpoints;
            let attached = own.iter().filter(|e| e.attachment.is_some()).count();
            assert_eq!(attached, 1, "after write {n}: {own:?}");
            runtime.call("DEL", &ns)?.success()?;
        }
        assert_eq!(state(&lab)?, without, "{verb}: killed before write {n}");
        if !dead {
            println!("{verb}: killed before each of {killed} writes");
            assert!(killed > 0, "nothing was killed: is the agent built with kill-points?");
            return Ok(());
        }
    }
    bail!("{verb} needs more than {MOST} writes")
}

#[test]
fn killed_at_every_write_of_a_cni_add() -> Result<()> {
    every_write_of_cni("ADD")
}

#[test]
fn killed_at_every_write_of_a_cni_del() -> Result<()> {
    every_write_of_cni("DEL")
}
