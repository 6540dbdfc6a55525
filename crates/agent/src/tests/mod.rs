//! The core over an outside world in memory.

mod cold;
pub(crate) mod fakes;
mod history;
mod holds;
mod kubernetes;
mod runtimes;
mod services;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use fakes::{FakeNet, FakePlane};
use flowloom_api::v1::{self, CniAttachment, CniNetwork, ErrorCode};
use flowloom_datapath::KernelState;
use flowloom_datapath::realise::{Kind, Realise};

use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::config::Config;
use crate::core::{Command, Core, Handle, Line, NetworkChange, Outside};
use crate::events::EventLog;
use crate::store::Store;

/// A core in memory on a thread of its own, and what serves it; both end with this.
pub(crate) struct Running {
    pub(crate) core: Handle,
    pub(crate) dir: tempfile::TempDir,
    thread: Option<std::thread::JoinHandle<()>>,
    stop: watch::Sender<bool>,
    runtime: Runtime,
}

impl Running {
    /// Node n1 with this document. `serve` gets the core's own directory and starts what is tested,
    /// until its receiver turns true.
    pub(crate) fn start(
        document: &str,
        change: impl FnOnce(&mut Config),
        serve: impl FnOnce(&Runtime, &std::path::Path, Config, Handle, watch::Receiver<bool>),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::for_node("n1".parse().unwrap());
        config.document = dir.path().join("net.yaml");
        config.state_dir = dir.path().join("state");
        change(&mut config);
        fs::write(&config.document, document).unwrap();
        let outside = Outside {
            store: Store::open(&config.state_dir).unwrap(),
            wiring: Box::new(FakeNet::default()),
            plane: Box::new(FakePlane::default()),
        };
        let line = Line::new(&config, Arc::new(EventLog::new(8)));
        let handle = line.handle();
        let core = Core::new(config.clone(), outside, line).unwrap();
        let thread = std::thread::spawn(move || core.run());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (stop, stopped) = watch::channel(false);
        serve(&runtime, dir.path(), config, handle.clone(), stopped);
        Self { core: handle, dir, thread: Some(thread), stop, runtime }
    }

    /// Runs `f` on the core's thread.
    pub(crate) fn ask<T: Send + 'static>(&self, f: impl FnOnce(&mut Core) -> T + Send + 'static) -> T {
        self.runtime.block_on(self.core.ask(f)).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.core.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// One node's outside world; agents come and go on it.
pub(crate) struct Node {
    dir: tempfile::TempDir,
    file: &'static str,
    net: FakeNet,
    plane: FakePlane,
}

const DOCUMENT: &str = "
version: 1
nodes:
  - {name: n1, address: 192.0.2.1}
  - {name: n2, address: 192.0.2.2}
vpcs: [{name: red, vni: 7}]
subnets:
  - {name: s, vpc: red, cidr: 10.0.0.0/24}
  - {name: pods, vpc: default, cidr: 10.244.0.0/24, cni_ranges: [{node: n1, cidr: 10.244.0.128/29}]}
security_groups:
  - name: web
    vpc: red
    tier: 1
    rules: [{id: http, priority: 100, direction: ingress, protocol: tcp, ports: [{from: 80, to: 80}], action: allow}]
  - {name: closed, vpc: default, tier: 1, rules: []}
endpoints:
  - {name: a, vpc: red, subnet: s, node: n1, ip: 10.0.0.2}
  - {name: b, vpc: red, subnet: s, node: n1, ip: 10.0.0.3, security_groups: [web]}
  - {name: c, vpc: red, subnet: s, node: n2, ip: 10.0.0.4}
  - {name: p, vpc: default, subnet: pods, node: n1, ip: 10.244.0.9}
  - {name: bound, vpc: default, subnet: pods, node: n1, ip: 10.244.0.10, cni: true}
";

impl Node {
    pub(crate) fn new(document: Option<&str>) -> Self {
        Self::with("net.yaml", document)
    }

    fn with(file: &'static str, document: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = Self { dir, file, net: FakeNet::default(), plane: FakePlane::default() };
        if let Some(text) = document {
            node.write(text);
        }
        node
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(self.file)
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    /// An agent that has looked at the document once.
    pub(crate) fn agent(&self) -> Core {
        self.agent_with(|_| {})
    }

    /// The same with a configuration of its own.
    fn agent_with(&self, configure: impl FnOnce(&mut Config)) -> Core {
        self.agent_and_handle(configure).0
    }

    /// And how everybody else reaches it.
    fn agent_and_handle(&self, configure: impl FnOnce(&mut Config)) -> (Core, Handle) {
        let mut config = Config::for_node("n1".parse().unwrap());
        configure(&mut config);
        config.document = self.path();
        config.state_dir = self.dir.path().join("state");
        config.netns_dir = self.dir.path().join("netns");
        let outside = Outside {
            store: Store::open(&config.state_dir).unwrap(),
            wiring: Box::new(self.net.clone()),
            plane: Box::new(self.plane.clone()),
        };
        let line = Line::new(&config, Arc::new(EventLog::new(8)));
        let handle = line.handle();
        let mut core = Core::new(config, outside, line).unwrap();
        core.reload();
        while core.tidy() {}
        (core, handle)
    }

    fn state(&self) -> KernelState {
        self.plane.0.lock().unwrap().memory.state.clone()
    }

    /// Everything written so far, maps and network.
    fn writes(&self) -> (u64, u64) {
        (self.plane.0.lock().unwrap().memory.writes(), self.net.0.lock().unwrap().changes)
    }

    fn devices(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.net.0.lock().unwrap().devices.values().map(|s| s.name.clone()).collect();
        names.sort();
        names
    }

    fn records(&self) -> usize {
        fs::read_dir(self.dir.path().join("state/endpoints")).unwrap().count()
    }
}

fn add(id: &str) -> v1::CniAddRequest {
    v1::CniAddRequest {
        attachment: CniAttachment { container_id: id.into(), ifname: "eth0".into() },
        netns: format!("/run/netns/{id}"),
        network: CniNetwork { name: "net".into(), ..CniNetwork::default() },
        args: BTreeMap::new(),
        runtime: v1::CniRuntime::default(),
    }
}

fn del(id: &str) -> v1::CniDelRequest {
    v1::CniDelRequest { attachment: add(id).attachment, netns: None, args: BTreeMap::new() }
}

fn state_of(core: &mut Core, key: &str) -> v1::EndpointState {
    core.endpoint_infos(Some(&key.parse().unwrap())).pop().unwrap().state
}

#[test]
fn local_endpoints_are_wired_guarded_and_in_force_and_a_second_pass_writes_nothing() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    assert_eq!(node.devices(), ["default/p", "red/a", "red/b"]);
    for key in ["red/a", "red/b", "default/p"] {
        assert_eq!(state_of(&mut core, key), v1::EndpointState::Ready, "{key}");
    }
    assert_eq!(state_of(&mut core, "default/bound"), v1::EndpointState::Waiting);
    {
        let (net, maps) = (node.net.0.lock().unwrap(), node.plane.0.lock().unwrap());
        assert_eq!(net.raised, maps.guarded, "a device is on exactly when it is guarded");
    }
    let before = node.writes();
    core.pass();
    assert_eq!(node.writes(), before);
}

#[test]
fn a_restart_with_nothing_changed_writes_nothing() {
    let node = Node::new(Some(DOCUMENT));
    drop(node.agent());
    let numbers = node.dir.path().join("state/numbers-1.json");
    fs::rename(&numbers, numbers.with_file_name("numbers-9.json")).unwrap();
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    let (before, state) = (node.writes(), node.state());
    let files = || {
        let list = fs::read_dir(node.dir.path().join("state")).unwrap();
        let mut names: Vec<_> = list.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        // The disk's thread removes the numbers before the newest when it gets to it.
        let number = |name: &std::ffi::OsString| {
            name.to_str()?.strip_prefix("numbers-")?.strip_suffix(".json")?.parse::<u64>().ok()
        };
        let newest = names.iter().filter_map(number).max();
        assert_eq!(newest, Some(10), "the newest is not the last by text");
        names.retain(|name| number(name).is_none_or(|n| Some(n) == newest));
        names
    };
    let numbers = files();
    let core = node.agent();
    assert!(core.last.errors.is_empty(), "{:?}", core.last.errors);
    assert_eq!((node.writes(), node.state()), (before, state));
    assert_eq!(files(), numbers, "the numbers were written again");
}

#[test]
fn nothing_is_done_before_the_first_document() {
    let node = Node::new(None);
    let mut core = node.agent();
    for text in [None, Some("version: 2\n"), Some("version: 1\nendpoints: [")] {
        if let Some(text) = text {
            node.write(text);
            core.reload();
        }
        assert_eq!(core.cni_add(&add("c1")).unwrap_err().code, ErrorCode::NotReady);
        assert_eq!(core.cni_del(&del("c1")).unwrap_err().code, ErrorCode::NotReady);
        assert_eq!((node.writes(), node.records()), ((0, 0), 0));
        assert!(!core.document_error.is_empty());
    }
    node.write(DOCUMENT);
    core.reload();
    core.cni_add(&add("c1")).unwrap();
}

#[test]
fn the_last_good_document_survives_a_restart() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let digest = core.applied_digest.clone();
    drop(core);
    let before = (node.writes(), node.state());
    for text in [None, Some("version: 2\n"), Some("version: 1\nendpoints: [")] {
        match text {
            None => fs::remove_file(node.path()).unwrap(),
            Some(text) => node.write(text),
        }
        let mut core = node.agent();
        assert_eq!((node.writes(), node.state()), before);
        assert_eq!(core.applied_digest, digest);
        assert!(!core.document_error.is_empty());
        assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Ready);
    }
    // An object that went bad while no agent ran keeps its last good version.
    node.write(&DOCUMENT.replace("ip: 10.0.0.2", "ip: 192.0.2.77"));
    let mut core = node.agent();
    assert_eq!((node.writes(), node.state()), before);
    assert!(core.status().degraded.iter().any(|d| d.name == "red/a"));
}

const JSON: &str = r#"{"version":1,"nodes":[{"name":"n1","address":"192.0.2.1"},{"name":"n2","address":"192.0.2.2"}],
"vpcs":[{"name":"red","vni":7}],"subnets":[{"name":"s","vpc":"red","cidr":"10.0.0.0/24"},
{"name":"pods","vpc":"default","cidr":"10.244.0.0/24","node":"n1"}],
"security_groups":[{"name":"web","vpc":"red","rules":[{"id":"r","priority":5,"direction":"ingress","protocol":"tcp","action":"allow","remote_endpoint_selector":{"role":"client"}}]}],
"endpoints":[{"name":"a","vpc":"red","subnet":"s","node":"n1","ip":"10.0.0.2","security_groups":["web"]},
{"name":"b","vpc":"red","subnet":"s","node":"n1","ip":"10.0.0.3","labels":{"role":"client"}},
{"name":"c","vpc":"red","subnet":"s","node":"n2","ip":"10.0.0.4"}]}"#;

#[test]
fn a_small_edit_leads_where_the_whole_document_leads() {
    let node = Node::with("net.json", Some(JSON));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let mut text = JSON.to_owned();
    for (from, to, writes) in [
        (r#""ip":"10.0.0.4""#, r#""ip":"10.0.0.4","labels":{"role":"client"}"#, true),
        (r#"{"role":"client"}}]}]"#, r#"{"role":"server"}}]}]"#, true),
        (r#""priority":5"#, r#""priority":6"#, true),
        (r#""ip":"10.0.0.3","#, r#""ip":"10.0.0.9","#, true),
        // The datapath knows it by its address.
        (r#""name":"c""#, r#""name":"d""#, false),
        (
            r#",
{"name":"b","vpc":"red","subnet":"s","node":"n1","ip":"10.0.0.9","labels":{"role":"client"}}"#,
            "",
            true,
        ),
        // Says the same in other words.
        (r#""ip":"10.0.0.4","#, r#""ip" : "10.0.0.4","#, false),
    ] {
        assert!(text.contains(from), "{from}");
        text = text.replacen(from, to, 1);
        let (before, generation) = (node.writes(), core.document.as_ref().unwrap().generation);
        node.write(&text);
        core.reload();
        assert!(core.file.edited(), "{to} was read whole");
        while core.tidy() {}
        assert_eq!(node.writes() != before, writes, "{to}");
        assert_eq!(core.document.as_ref().unwrap().generation, generation + 1);
        assert_eq!(core.applied_digest, core.document.as_ref().unwrap().digest);
        // What is wanted now, worked out from the start.
        let (edited, names) = (core.world.clone(), core.address_names.clone());
        let fresh = Node::with("net.json", Some(&text));
        assert_eq!(core.document.as_ref().unwrap().world, fresh.agent().world);
        core.rebuild_world();
        assert_eq!(core.world, edited);
        core.moved = true;
        let before = node.writes();
        core.pass();
        assert_eq!((node.writes(), core.address_names.clone()), (before, names), "{to}");
        let slots = |state: &KernelState| state.policies.len();
        assert_eq!(slots(&node.state()), core.plan.policies.len());
    }
    // A fault is found, and the document read whole.
    node.write(&text.replacen(r#""ip" : "10.0.0.4""#, r#""ip":"10.0.0.2""#, 1));
    core.reload();
    assert!(!core.file.edited());
    assert_eq!(core.status().degraded.len(), 1);
}

#[test]
fn a_rule_change_frees_old_slots_after_it_is_in_force() {
    let node = Node::with("net.json", Some(JSON));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    let toggle = |core: &mut Core, priority: &str| {
        node.write(&JSON.replacen(r#""priority":5"#, priority, 1));
        core.reload();
    };
    toggle(&mut core, r#""priority":6"#);
    assert_eq!((core.unused_slots.len(), node.state().policies.len()), (1, slots + 1));
    // Back before anybody tidied up: what is in force again is not freed.
    toggle(&mut core, r#""priority":5"#);
    while core.tidy() {}
    assert_eq!(node.state().policies.len(), slots);
    assert!(node.state().policies.keys().all(|slot| core.plan.policies.keys().any(|p| p.0 == *slot)));
    let before = node.writes();
    core.pass();
    assert_eq!(node.writes(), before);
}

#[test]
fn the_next_change_does_not_wait_until_the_slots_of_the_last_one_are_freed() {
    let node = Node::with("net.json", Some(JSON));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    for n in 1..=70usize {
        node.write(&JSON.replacen(r#""priority":5"#, &format!(r#""priority":{}"#, n + 5), 1));
        let armed = core.free_at;
        core.reload();
        while core.tidy_at_once() {}
        assert_eq!((core.unused_slots.len(), node.state().policies.len()), (n, slots + n));
        // Each change begins the quiet time anew, until there are many.
        assert!(core.free_at.is_some_and(|at| armed.is_none_or(|armed| (at > armed) == (n <= 64))), "{n}");
    }
    core.free_slots();
    assert_eq!((core.unused_slots.len(), core.free_at, node.state().policies.len()), (0, None, slots));
}

#[test]
fn slots_are_freed_when_nothing_else_comes() {
    let running = Running::start(JSON, |_| {}, |_, _, _, _, _| {});
    let wait = |what: &str, done: fn(&Core) -> bool| {
        let begin = std::time::Instant::now();
        while !running.ask(move |core| done(core)) {
            assert!(begin.elapsed() < std::time::Duration::from_secs(30), "{what}");
            std::thread::park_timeout(std::time::Duration::from_millis(1));
        }
    };
    wait("no document is in force", |core| core.applied_generation > 0);
    running.ask(|core| {
        fs::write(&core.config.document, JSON.replacen(r#""priority":5"#, r#""priority":6"#, 1)).unwrap();
        core.reload();
        assert_eq!(core.unused_slots.len(), 1);
    });
    wait("the slot was not freed", |core| core.unused_slots.is_empty() && core.free_at.is_none());
}

#[test]
fn a_released_address_is_shown_while_it_rests() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    core.cni_del(&del("c1")).unwrap();
    let report = core.ipam_report();
    let pool = report.pools.iter().find(|p| p.allocates).unwrap();
    let resting: Vec<_> =
        pool.used.iter().filter_map(|a| Some((a.endpoint.as_str(), a.cooling_ms?))).collect();
    assert!(matches!(resting[..], [("", 1..=60_000)]), "{resting:?}");
}

#[test]
fn a_broken_document_leaves_the_last_good_one_in_force() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let before = (node.writes(), node.state());
    node.write("version: 1\nendpoints: [");
    core.reload();
    assert_eq!((node.writes(), node.state()), before);
    assert!(core.status().degraded.iter().any(|d| d.kind == "document"));
}

#[test]
fn an_endpoint_that_cannot_be_wired_degrades_alone_and_is_tried_again() {
    let node = Node::new(Some(DOCUMENT));
    node.net.0.lock().unwrap().refuse.insert("red/a".into());
    let mut core = node.agent();
    assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Failed);
    assert_eq!(state_of(&mut core, "red/b"), v1::EndpointState::Ready);
    assert!(core.retry_at.is_some());
    assert_eq!(node.state().endpoints.len(), 2, "no record without a guarded device");
    node.net.0.lock().unwrap().refuse.clear();
    core.pass();
    assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Ready);
    assert!(core.retry_at.is_none());
}

#[test]
fn an_endpoint_that_leaves_the_document_leaves_nothing() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let records = node.records();
    node.write(&DOCUMENT.replace("  - {name: a, vpc: red, subnet: s, node: n1, ip: 10.0.0.2}\n", ""));
    core.reload();
    assert!(!node.devices().contains(&"red/a".to_owned()));
    assert_eq!(node.records(), records - 1);
    let state = node.state();
    assert_eq!((state.endpoints.len(), state.devices.len()), (2, 2));
    let address =
        flowloom_datapath::lower::address_key(flowloom_compiler::VpcId(7), "10.0.0.2".parse().unwrap());
    assert!(!state.addresses.contains_key(&address));
}

#[test]
fn add_repeated_gives_the_same_answer_and_a_different_one_is_refused() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let first = core.cni_add(&add("c1")).unwrap();
    assert_eq!(first.ips[0].address, "10.244.0.128/24");
    let before = node.writes();
    assert_eq!(core.cni_add(&add("c1")).unwrap(), first);
    assert_eq!(node.writes(), before);
    let other = v1::CniAddRequest { netns: "/run/netns/other".into(), ..add("c1") };
    assert_eq!(core.cni_add(&other).unwrap_err().code, ErrorCode::AttachmentConflict);
    assert_eq!(node.writes(), before);
}

#[test]
fn del_removes_all_of_it_and_never_fails_on_what_is_gone() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let (state, devices, records) = (node.state(), node.devices(), node.records());
    let routes = node.net.0.lock().unwrap().routes.clone();
    core.cni_add(&add("c1")).unwrap();
    assert_eq!(node.net.0.lock().unwrap().routes.len(), routes.len() + 1);
    assert_eq!(core.cni_del(&del("c1")).unwrap().removed, vec!["default/c1"]);
    assert!(core.cni_del(&del("c1")).unwrap().removed.is_empty());
    assert!(core.cni_del(&del("never-seen")).unwrap().removed.is_empty());
    let after = node.state();
    // Generations only grow; the rest is as it was.
    assert_eq!(KernelState { vpcs: state.vpcs.clone(), ..after }, state);
    assert_eq!((node.devices(), node.records()), (devices, records));
}

#[test]
fn a_failed_add_leaves_nothing_and_takes_no_address() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let (state, devices, records) = (node.state(), node.devices(), node.records());
    node.net.0.lock().unwrap().refuse.insert("default/c1".into());
    assert_eq!(core.cni_add(&add("c1")).unwrap_err().code, ErrorCode::Realise);
    assert_eq!(KernelState { vpcs: state.vpcs.clone(), ..node.state() }, state);
    assert_eq!((node.devices(), node.records()), (devices, records));
    node.net.0.lock().unwrap().refuse.clear();
    assert_eq!(core.ipam_report().pools.iter().find(|p| p.allocates).unwrap().available, 8);
    core.cni_add(&add("c1")).unwrap();
}

#[test]
fn an_add_whose_intent_cannot_be_written_makes_nothing() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let (state, devices) = (node.state(), node.devices());
    let (records, away) =
        (node.dir.path().join("state/endpoints"), node.dir.path().join("state/endpoints.away"));
    fs::rename(&records, &away).unwrap();
    let refused = core.cni_add_all(&[add("c1"), add("c2")]);
    assert!(refused.iter().all(|r| r.as_ref().is_err_and(|e| e.code == ErrorCode::Realise)), "{refused:?}");
    assert_eq!(KernelState { vpcs: state.vpcs.clone(), ..node.state() }, state);
    assert_eq!(node.devices(), devices);
    fs::rename(&away, &records).unwrap();
    assert!(core.cni_add_all(&[add("c1"), add("c2")]).iter().all(Result::is_ok));
    assert_eq!(core.ipam_report().pools.iter().find(|p| p.allocates).unwrap().available, 6);
}

#[test]
fn a_policy_that_does_not_fit_refuses_the_add_and_keeps_everything_else() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let (state, devices) = (node.state(), node.devices());
    let slots = state.policies.len();
    node.plane.0.lock().unwrap().memory.capacity.insert(Kind::Slots, slots);
    let mut request = add("c1");
    request.network.security_groups = vec!["closed".into()];
    assert!(core.cni_add(&request).is_err());
    assert_eq!(KernelState { vpcs: state.vpcs.clone(), ..node.state() }, state);
    assert_eq!(node.devices(), devices);
    node.plane.0.lock().unwrap().memory.capacity.clear();
    core.cni_add(&request).unwrap();
}

#[test]
fn requests_that_wait_together_are_judged_apart() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    node.net.0.lock().unwrap().refuse.insert("default/c2".into());
    let strange = v1::CniAddRequest { netns: "relative".into(), ..add("c3") };
    let other = v1::CniAddRequest { netns: "/run/netns/other".into(), ..add("c1") };
    let answers = core.cni_add_all(&[add("c1"), add("c2"), strange, add("c1"), other, add("c4")]);
    let codes: Vec<_> = answers.iter().map(|a| a.as_ref().map_err(|e| e.code).err()).collect();
    let (realise, invalid, conflict) =
        (Some(ErrorCode::Realise), Some(ErrorCode::InvalidRequest), Some(ErrorCode::AttachmentConflict));
    assert_eq!(codes, [None, realise, invalid, None, conflict, None]);
    assert_eq!(answers[0], answers[3]);
    assert_eq!(node.devices(), ["default/c1", "default/c4", "default/p", "red/a", "red/b"]);
    assert_eq!(node.state().endpoints.len(), 5);
    assert_eq!(core.ipam_report().pools.iter().find(|p| p.allocates).unwrap().available, 6);
}

#[test]
fn one_request_that_does_not_fit_takes_no_other_with_it() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    node.plane.0.lock().unwrap().memory.capacity.insert(Kind::Slots, slots);
    let mut large = add("c1");
    large.network.security_groups = vec!["closed".into()];
    let answers = core.cni_add_all(&[add("c0"), large, add("c2")]);
    assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(node.devices(), ["default/c0", "default/c2", "default/p", "red/a", "red/b"]);
    assert_eq!(node.state().endpoints.len(), 5);
}

#[test]
fn an_endpoint_that_does_not_fit_holds_up_nobody_else() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    node.plane.0.lock().unwrap().memory.capacity.insert(Kind::Slots, slots);
    // A rule change makes a new slot, which has no room: the old policy stays.
    node.write(&DOCUMENT.replace("from: 80, to: 80", "from: 81, to: 81"));
    core.reload();
    assert_eq!(core.applied_digest, core.document.as_ref().unwrap().digest);
    assert_eq!(state_of(&mut core, "red/b"), v1::EndpointState::Failed);
    assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Ready);
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    // Nor after a restart.
    let mut core = node.agent();
    core.cni_add(&add("c2")).unwrap();
    assert!(core.cni_status(&CniNetwork::default()).ready);
    node.plane.0.lock().unwrap().memory.capacity.clear();
    core.pass();
    assert_eq!(state_of(&mut core, "red/b"), v1::EndpointState::Ready);
}

#[test]
fn exhausted_addresses_are_said_and_come_back() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    for n in 0..8 {
        core.cni_add(&add(&format!("c{n}"))).unwrap();
    }
    assert_eq!(core.cni_add(&add("c8")).unwrap_err().code, ErrorCode::AddressesExhausted);
    core.cni_del(&del("c3")).unwrap();
    assert_eq!(core.cni_add(&add("c8")).unwrap().ips[0].address, "10.244.0.131/24");
}

#[test]
fn an_endpoint_of_the_document_can_be_bound_once() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let bound = |id: &str, name: &str| {
        let mut request = add(id);
        request.args.insert("FLOWLOOM_ENDPOINT".into(), name.into());
        request
    };
    assert_eq!(core.cni_add(&bound("c1", "p")).unwrap_err().code, ErrorCode::Conflict);
    assert_eq!(core.cni_add(&bound("c1", "nobody")).unwrap_err().code, ErrorCode::NotFound);
    let result = core.cni_add(&bound("c1", "bound")).unwrap();
    assert_eq!(
        (result.endpoint.as_str(), result.ips[0].address.as_str()),
        ("default/bound", "10.244.0.10/24")
    );
    assert_eq!(core.cni_add(&bound("c2", "bound")).unwrap_err().code, ErrorCode::InUse);
    core.cni_del(&del("c1")).unwrap();
    assert_eq!(state_of(&mut core, "default/bound"), v1::EndpointState::Waiting);
    core.cni_add(&bound("c2", "bound")).unwrap();
}

#[test]
fn after_a_reboot_the_document_is_rebuilt_and_attachments_are_released() {
    let mut node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    let devices = node.devices().len();
    // Pins, devices and namespaces are gone; files are not.
    (node.net, node.plane) = (FakeNet::default(), FakePlane::default());
    let mut core = node.agent();
    assert_eq!(node.devices().len(), devices - 1);
    assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Ready);
    assert!(core.endpoint_infos(None).iter().all(|e| e.endpoint.name != "c1"));
    assert_eq!(node.records(), devices - 1);
    // Its address is free again, after those that nobody had.
    assert_eq!(core.ipam_report().pools.iter().find(|p| p.allocates).unwrap().available, 8);
    assert_eq!(core.cni_add(&add("c2")).unwrap().ips[0].address, "10.244.0.129/24");
}

#[test]
fn a_device_that_vanishes_is_made_again_or_its_attachment_released() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let device = |name: &str| {
        let net = node.net.0.lock().unwrap();
        net.devices.values().find(|s| s.name == name).unwrap().wire.device().to_owned()
    };
    let gone = [device("default/c1"), device("red/a")];
    gone.iter().for_each(|d| drop(node.net.0.lock().unwrap().devices.remove(d)));
    // A new device has a new index: the record in force must follow.
    node.plane.0.lock().unwrap().generation += 1;
    core.network_changed(&gone.map(NetworkChange::LinkGone));
    assert!(node.devices().contains(&"red/a".to_owned()));
    assert_eq!(state_of(&mut core, "red/a"), v1::EndpointState::Ready);
    assert!(!node.devices().contains(&"default/c1".to_owned()));
    assert!(core.cni_del(&del("c1")).unwrap().removed.is_empty());
    let id = core.plan.endpoints[&"red/a".parse().unwrap()].id;
    let index = core.attached[&"red/a".parse().unwrap()].ifindex;
    assert_eq!(node.state().endpoints[&id.0].ifindex, index);
}

#[test]
fn an_overlay_device_that_vanishes_is_made_again() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    node.net.0.lock().unwrap().node = None;
    core.network_changed(&[NetworkChange::LinkGone("somebody-elses".into())]);
    assert!(node.net.0.lock().unwrap().node.is_none());
    core.network_changed(&[NetworkChange::LinkGone("ov0".into())]);
    assert!(node.net.0.lock().unwrap().node.is_some());
}

#[test]
fn a_name_that_the_document_takes_from_an_attachment_closes_neither_more_nor_less() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let theirs = "  - {name: c1, vpc: default, subnet: pods, node: n1, ip: 10.244.0.20}\n";
    node.write(&format!("{DOCUMENT}{theirs}"));
    core.reload();
    assert_eq!(state_of(&mut core, "default/c1"), v1::EndpointState::Failed);
    assert_eq!(state_of(&mut core, "default/p"), v1::EndpointState::Ready);
    core.cni_del(&del("c1")).unwrap();
    core.pass();
    assert_eq!(state_of(&mut core, "default/c1"), v1::EndpointState::Ready);
}

#[test]
fn a_container_id_nobody_knows_is_found_by_its_pod() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let args: BTreeMap<String, String> =
        [("K8S_POD_NAME", "web"), ("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_UID", "u-1")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into();
    core.cni_add(&v1::CniAddRequest { args: args.clone(), ..add("c1") }).unwrap();
    // Another life of the pod must not be touched.
    let mut other = args.clone();
    other.insert("K8S_POD_UID".into(), "u-2".into());
    assert!(core.cni_del(&v1::CniDelRequest { args: other, ..del("gone") }).unwrap().removed.is_empty());
    let removed = core.cni_del(&v1::CniDelRequest { args, ..del("gone") }).unwrap().removed;
    assert_eq!(removed, vec!["default/shop.web"]);
}

#[test]
fn the_unit_lets_everybody_see_what_the_agent_mounts() {
    let unit = include_str!("../../../../deploy/systemd/flowloom-agent.service");
    for private in
        ["ProtectHome", "ProtectSystem", "PrivateTmp", "PrivateMounts", "PrivateDevices", "ReadOnlyPaths"]
    {
        assert!(!unit.contains(private), "{private} gives the agent mounts of its own");
    }
    assert!(unit.contains("Type=notify") && unit.contains("KillMode=process"));
}
