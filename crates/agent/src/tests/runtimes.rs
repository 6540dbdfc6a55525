//! What container runtimes do beside ADD and DEL: GC, DELs that waited, STATUS, what they ask for in `runtimeConfig`.

use flowloom_api::v1::{CniPortMapping, CniRuntime, Moment, PortProtocol};
use flowloom_cni::clock::now;
use flowloom_cni::queue::{self, Entry};

use super::*;
use crate::core::Core;

fn gc(valid: &[&str], started: Moment) -> v1::CniGcRequest {
    v1::CniGcRequest {
        network: "net".into(),
        valid: valid.iter().map(|id| add(id).attachment).collect(),
        started,
    }
}

impl Node {
    fn queue(&self) -> PathBuf {
        self.dir.path().join("state").join(queue::DIRECTORY)
    }

    /// What the plugin does while no agent serves.
    fn enqueue(&self, id: &str, started: Moment) {
        queue::put(&self.queue(), &Entry { request: del(id), started }).unwrap();
    }

    fn waiting(&self) -> usize {
        queue::list(&self.queue()).unwrap().entries.len()
    }
}

/// Everything that an attachment leaves outside the core.
fn footprint(node: &Node, core: &Core) -> (Vec<String>, usize, Vec<String>) {
    let names = core.records.values().filter(|r| r.cni.is_some()).map(|r| r.key.to_string()).collect();
    (node.devices(), node.records(), names)
}

#[test]
fn gc_frees_what_no_valid_attachment_owns_and_nothing_else() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("keep")).unwrap();
    let before = footprint(&node, &core);
    for id in ["old1", "old2"] {
        core.cni_add(&add(id)).unwrap();
    }
    let mut other = add("other");
    other.network.name = "another".into();
    core.cni_add(&other).unwrap();
    let addresses = core.cni_status(&CniNetwork::default()).available_addresses;
    let collected = core.cni_gc(&gc(&["keep", "never-seen"], now().unwrap())).unwrap();
    assert_eq!(collected.removed, ["default/old1", "default/old2"]);
    assert_eq!((collected.spared, collected.errors), (vec![], vec![]));
    assert_eq!(core.cni_status(&CniNetwork::default()).available_addresses, addresses + 2);
    // The same list again writes nothing.
    let writes = node.writes();
    assert_eq!(core.cni_gc(&gc(&["keep"], now().unwrap())).unwrap(), v1::CniCollected::default());
    assert_eq!(node.writes(), writes);
    // The document's endpoints are wired as they were.
    core.cni_del(&v1::CniDelRequest { attachment: other.attachment, ..del("x") }).unwrap();
    assert_eq!(footprint(&node, &core), before);
    // An empty list says that nothing is valid.
    core.cni_gc(&gc(&[], now().unwrap())).unwrap();
    assert_eq!(node.devices(), ["default/p", "red/a", "red/b"]);
}

#[test]
fn gc_leaves_an_add_that_goes_on_or_was_answered_after_the_list_was_made() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let adding = core.desk.adding(&add("c1").attachment);
    core.cni_add(&add("c1")).unwrap();
    // In the kernel, not with the runtime yet.
    let before_answer = now().unwrap();
    assert_eq!(core.cni_gc(&gc(&[], before_answer.clone())).unwrap().spared, ["default/c1"]);
    drop(adding);
    assert_eq!(core.cni_gc(&gc(&[], before_answer)).unwrap().spared, ["default/c1"]);
    assert_eq!(core.cni_gc(&gc(&[], now().unwrap())).unwrap().removed, ["default/c1"]);
}

#[test]
fn gc_of_a_plugin_that_waited_over_a_restart_of_the_agent_spares_the_adds_before_it() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let started = now().unwrap();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    let mut core = node.agent();
    assert_eq!(core.cni_gc(&gc(&[], started)).unwrap().spared, ["default/c1"]);
    assert_eq!(core.cni_gc(&gc(&[], now().unwrap())).unwrap().removed, ["default/c1"]);
}

#[test]
fn gc_before_the_first_document_or_with_an_endless_list_removes_nothing() {
    let node = Node::new(None);
    let mut core = node.agent();
    assert_eq!(core.cni_gc(&gc(&[], now().unwrap())).unwrap_err().code, ErrorCode::NotReady);
    node.write(DOCUMENT);
    core.reload();
    core.cni_add(&add("c1")).unwrap();
    let names: Vec<String> = (0..=v1::MAX_VALID_ATTACHMENTS).map(|n| n.to_string()).collect();
    let endless = gc(&names.iter().map(String::as_str).collect::<Vec<_>>(), now().unwrap());
    assert_eq!(core.cni_gc(&endless).unwrap_err().code, ErrorCode::InvalidRequest);
    assert_eq!(node.records(), 4);
}

#[test]
fn a_bound_endpoint_of_the_document_loses_its_attachment_to_gc_and_stays_itself() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let mut request = add("c1");
    request.args.insert("FLOWLOOM_ENDPOINT".into(), "bound".into());
    core.cni_add(&request).unwrap();
    assert_eq!(core.cni_gc(&gc(&[], now().unwrap())).unwrap().removed, ["default/bound"]);
    assert_eq!(state_of(&mut core, "default/bound"), v1::EndpointState::Waiting);
    core.cni_add(&request).unwrap();
}

#[test]
fn a_del_of_the_queue_is_done_before_anything_else_and_once() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    for id in ["gone", "stays"] {
        core.cni_add(&add(id)).unwrap();
    }
    drop(core);
    node.enqueue("gone", now().unwrap());
    node.enqueue("never-seen", now().unwrap());
    let core = node.agent();
    assert_eq!(node.waiting(), 0);
    assert_eq!(footprint(&node, &core).2, ["default/stays"]);
    let report = core.cni_report();
    assert_eq!((report.queue.replayed, report.queue.outdated, report.queue.unreadable), (2, 1, 0));
    assert_eq!(report.verbs.last().map(|v| (v.verb.as_str(), v.count)), Some(("REPLAY", 2)));
    let before = node.writes();
    drop(core);
    drop(node.agent());
    assert_eq!(node.writes(), before, "nothing is left to do");
}

#[test]
fn an_add_after_a_queued_del_of_the_same_name_finds_nothing_in_its_way() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let first = core.cni_add(&add("c1")).unwrap();
    // Written after the agent had looked, and before it heard of it.
    node.enqueue("c1", now().unwrap());
    let other = v1::CniAddRequest { netns: "/run/netns/second".into(), ..add("c1") };
    let second = core.cni_add(&other).unwrap();
    assert_ne!(first.interfaces[1].sandbox, second.interfaces[1].sandbox);
    assert_eq!(node.waiting(), 0);
    core.replay_now();
    assert_eq!(footprint(&node, &core).2, ["default/c1"]);
}

#[test]
fn a_late_del_of_the_queue_took_the_attachment_that_came_after_it() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let started = now().unwrap();
    core.cni_del(&del("c1")).unwrap();
    core.cni_add(&add("c1")).unwrap();
    // A plugin that was stopped for long writes only now.
    node.enqueue("c1", started);
    core.replay_now();
    assert_eq!(node.waiting(), 0);
    assert_eq!(footprint(&node, &core).2, ["default/c1"]);
    assert_eq!(core.cni_report().queue.outdated, 1);
    // Of another boot: what is here now is newer.
    node.enqueue("c1", Moment { boot: "before".into(), ns: u64::MAX });
    core.replay_now();
    assert_eq!(footprint(&node, &core).2, ["default/c1"]);
    node.enqueue("c1", now().unwrap());
    core.replay_now();
    assert_eq!(footprint(&node, &core).2, Vec::<String>::new());
}

#[test]
fn an_entry_that_cannot_be_read_holds_up_nothing() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("gone")).unwrap();
    drop(core);
    fs::write(node.queue().join("broken@eth0.json"), "{").unwrap();
    node.enqueue("gone", now().unwrap());
    let mut core = node.agent();
    assert_eq!(footprint(&node, &core).2, Vec::<String>::new());
    assert_eq!((core.cni_report().queue.unreadable, node.waiting()), (1, 0));
    core.cni_add(&add("broken")).unwrap();
}

#[test]
fn without_a_document_the_queue_waits() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    fs::remove_file(node.path()).unwrap();
    fs::remove_file(node.dir.path().join("state/document.json")).unwrap();
    node.enqueue("c1", now().unwrap());
    let mut core = node.agent();
    core.replay_now();
    assert_eq!((node.waiting(), node.records()), (1, 4));
    node.write(DOCUMENT);
    core.reload();
    assert_eq!((node.waiting(), node.records()), (0, 3));
}

#[test]
fn a_restart_between_taking_an_entry_and_finishing_it_does_it_again() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    node.enqueue("c1", now().unwrap());
    let entry = queue::list(&node.queue()).unwrap().entries.remove(0);
    queue::take(&entry).unwrap();
    let core = node.agent();
    assert_eq!((node.waiting(), footprint(&node, &core).2.len()), (0, 0));
}

#[test]
fn status_says_why_an_add_cannot_be_served() {
    let node = Node::new(None);
    let mut core = node.agent();
    let network = |vpc: Option<&str>, subnet: Option<&str>, groups: &[&str]| CniNetwork {
        name: "net".into(),
        vpc: vpc.map(str::to_owned),
        subnet: subnet.map(str::to_owned),
        security_groups: groups.iter().map(|g| (*g).to_owned()).collect(),
        ..CniNetwork::default()
    };
    let unready = core.cni_status(&network(None, None, &[]));
    assert!(!unready.ready && !unready.limited && unready.message.contains("not ready"), "{unready:?}");
    node.write(DOCUMENT);
    core.reload();
    // .129-.134 of the range, one of them nobody's but the node's... what the pool says counts.
    let ready = core.cni_status(&network(None, None, &["closed"]));
    assert!(ready.ready && ready.available_addresses > 0, "{ready:?}");
    for (network, needle) in [
        (network(Some("rde"), None, &[]), "vpc rde"),
        (network(None, Some("sbu"), &[]), "default/sbu"),
        (network(None, None, &["clsoed"]), "clsoed"),
        (network(Some("red"), None, &[]), "no subnet of vpc red"),
    ] {
        let status = core.cni_status(&network);
        // The default VPC has an endpoint that brings its own addresses.
        let bound = network.subnet.is_some();
        assert_eq!(status.ready, bound, "{needle}: {status:?}");
        assert!(bound || status.message.contains(needle), "{needle}: {status:?}");
    }
    let mut n = 0;
    while core.cni_status(&CniNetwork::default()).ready {
        core.cni_add(&add(&format!("c{n}"))).unwrap();
        n += 1;
    }
    assert_eq!(n, ready.available_addresses);
    let full = core.cni_status(&CniNetwork::default());
    assert!(full.message.contains("full") && !full.limited, "{full:?}");
    assert_eq!(core.cni_add(&add("more")).unwrap_err().code, ErrorCode::AddressesExhausted);
}

#[test]
fn status_tells_when_what_is_attached_may_be_cut_off() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    drop(core);
    node.plane.0.lock().unwrap().memory.abort_at = Some(0);
    let mut core = node.agent();
    let status = core.cni_status(&CniNetwork::default());
    assert!(!status.ready && status.limited, "{status:?}");
    node.plane.0.lock().unwrap().memory.abort_at = None;
    core.pass();
    assert!(core.cni_status(&CniNetwork::default()).ready);
}

#[test]
fn addresses_and_mac_that_the_runtime_asks_for_are_given_and_kept() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let wanted = CniRuntime {
        ips: vec!["10.244.0.131".parse().unwrap()],
        mac: Some("02:00:00:00:00:77".into()),
        ..CniRuntime::default()
    };
    let request = v1::CniAddRequest { runtime: wanted.clone(), ..add("c1") };
    let result = core.cni_add(&request).unwrap();
    assert_eq!(
        (result.ips[0].address.as_str(), result.interfaces[1].mac.as_str()),
        ("10.244.0.131/24", "02:00:00:00:00:77")
    );
    // Another must not have them, nor may the same attachment ask for others.
    for runtime in [CniRuntime { mac: None, ..wanted.clone() }, CniRuntime { ips: vec![], ..wanted.clone() }]
    {
        let second = v1::CniAddRequest { runtime, ..add("c2") };
        assert_eq!(core.cni_add(&second).unwrap_err().code, ErrorCode::InUse);
    }
    assert_eq!(core.cni_add(&add("c1")).unwrap_err().code, ErrorCode::AttachmentConflict);
    drop(core);
    assert_eq!(node.agent().cni_add(&request).unwrap(), result, "after a restart");
}

#[test]
fn host_ports_are_taken_once_they_are_served_and_by_one_attachment_each() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let port = |host_port, protocol, ip: Option<&str>| CniPortMapping {
        host_port,
        container_port: 80,
        protocol,
        host_ip: ip.map(|ip| ip.parse().unwrap()),
    };
    let with = |id: &str, ports: Vec<CniPortMapping>| v1::CniAddRequest {
        runtime: CniRuntime { port_mappings: ports, ..CniRuntime::default() },
        ..add(id)
    };
    let tcp = |ip| port(8080, PortProtocol::Tcp, ip);
    let refused = core.cni_add(&with("c1", vec![tcp(None)])).unwrap_err();
    assert!(
        refused.code == ErrorCode::InvalidRequest && refused.message.contains("cni.port_mappings"),
        "{refused}"
    );
    assert_eq!(node.records(), 3);
    core.config.cni.port_mappings = true;
    core.cni_add(&with("c1", vec![tcp(Some("192.0.2.1"))])).unwrap();
    let kept = core.endpoint_infos(None).into_iter().find_map(|e| e.attachment).unwrap();
    assert_eq!(kept.runtime.port_mappings, [tcp(Some("192.0.2.1"))]);
    for meets in [tcp(None), tcp(Some("192.0.2.1")), tcp(Some("0.0.0.0"))] {
        assert_eq!(core.cni_add(&with("c2", vec![meets])).unwrap_err().code, ErrorCode::InUse);
    }
    let apart = [
        port(8080, PortProtocol::Udp, None),
        tcp(Some("192.0.2.2")),
        tcp(Some("::")),
        port(8081, PortProtocol::Tcp, None),
    ];
    core.cni_add(&with("c2", apart.to_vec())).unwrap();
}

#[test]
fn an_attachment_keeps_the_pod_that_it_is_of() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let mut request = add("c1");
    for (key, value) in [("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_NAME", "web-0"), ("K8S_POD_UID", "u-1")] {
        request.args.insert(key.into(), value.into());
    }
    core.cni_add(&request).unwrap();
    drop(core);
    let pod = node.agent().endpoint_infos(None).into_iter().find_map(|e| e.attachment?.pod);
    let wanted = v1::CniPod { namespace: "shop".into(), name: "web-0".into(), uid: Some("u-1".into()) };
    assert_eq!(pod, Some(wanted));
}

#[test]
fn a_record_of_an_older_version_is_read() {
    let text = r#"{"key":"default/c1","wire":{"Netns":{"device":"fl1","netns":"/run/netns/c1","interface":"eth0"}},
        "cni":{"attachment":{"container_id":"c1","ifname":"eth0"},"netns":"/run/netns/c1","network":{"name":"net"},"args":{},
        "endpoint":{"subnet":"pods","ips":["10.244.0.129"],"security_groups":[],"labels":{}}}}"#;
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let path = node.dir.path().join("state/endpoints/default_c1.json");
    let now_written: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut old: serde_json::Value = serde_json::from_str(text).unwrap();
    // Device names are the present ones; everything else is as it was written before there was `runtime` and `added`.
    old["wire"] = now_written["wire"].clone();
    old["key"] = now_written["key"].clone();
    drop(core);
    fs::write(&path, old.to_string()).unwrap();
    let mut core = node.agent();
    assert_eq!(core.cni_add(&add("c1")).unwrap().ips[0].address, "10.244.0.129/24");
    node.enqueue("c1", now().unwrap());
    core.replay_now();
    assert_eq!(node.records(), 3);
}

#[test]
fn a_device_on_which_somebody_was_first_gets_its_links_before_the_answer() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    core.cni_add(&add("c1")).unwrap();
    let key: flowloom_model::EndpointKey = "default/c1".parse().unwrap();
    assert!(core.unsettled.contains(&key), "links wait for a quiet moment");
    core.cni_del(&del("c1")).unwrap();
    let device = crate::record::device_name(&key);
    node.plane.0.lock().unwrap().preceded.insert(fakes::index(&device));
    core.cni_add(&add("c1")).unwrap();
    assert!(!core.unsettled.contains(&key));
}
