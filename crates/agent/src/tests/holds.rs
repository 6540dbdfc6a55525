//! Quarantine, freeze and rollback.

use flowloom_api::v1::{ChangeSource, Condition, HoldRequest, QuarantineRequest};
use flowloom_bpf_abi::verdict;
use flowloom_datapath::realise::Kind;

use super::*;

fn quarantine(core: &mut Core, vpc: &str, name: &str) -> Result<v1::PolicyHold, v1::ApiError> {
    core.quarantine(&QuarantineRequest {
        vpc: vpc.into(),
        endpoint: name.into(),
        ingress: true,
        egress: true,
        reason: "ticket".into(),
    })
}

fn request(vpc: &str, name: &str) -> HoldRequest {
    HoldRequest { vpc: vpc.into(), endpoint: name.into(), reason: String::new() }
}

/// Verdicts that the maps hold for an endpoint: egress, ingress.
fn verdicts(node: &Node, core: &Core, key: &str) -> [Vec<u8>; 2] {
    let id = core.plan.endpoints[&key.parse().unwrap()].id.0;
    let state = node.state();
    let record = &state.endpoints[&id];
    [record.egress_slot, record.ingress_slot]
        .map(|slot| state.policies[&slot].values().map(|value| value.verdict).collect())
}

fn is_closed(node: &Node, core: &Core, key: &str) -> bool {
    verdicts(node, core, key) == [vec![verdict::DROP], vec![verdict::DROP]]
}

fn conditions(core: &mut Core, key: &str) -> Vec<Condition> {
    core.endpoint_infos(Some(&key.parse().unwrap())).pop().unwrap().conditions
}

/// The document with the rule of group `web` for another port.
fn port(n: u16) -> String {
    DOCUMENT.replace("from: 80, to: 80", &format!("from: {n}, to: {n}"))
}

/// An ADD for a Pod.
fn add_pod(id: &str, uid: &str) -> v1::CniAddRequest {
    let args = [("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_NAME", "web-0"), ("K8S_POD_UID", uid)];
    v1::CniAddRequest { args: args.map(|(k, v)| (k.to_owned(), v.to_owned())).into(), ..add(id) }
}

#[test]
fn quarantine_was_overwritten_by_the_next_reconcile() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let neighbour = core.plan.endpoints[&"red/a".parse().unwrap()].clone();
    let held = quarantine(&mut core, "red", "b").unwrap();
    assert!(held.revision > held.previous_revision && held.quarantine.is_some(), "{held:?}");
    assert!(is_closed(&node, &core, "red/b"));
    assert_eq!(core.plan.endpoints[&"red/a".parse().unwrap()], neighbour);
    node.write(&port(81));
    core.reload();
    core.pass();
    assert!(is_closed(&node, &core, "red/b"));
    drop(core);
    let mut core = node.agent();
    assert!(is_closed(&node, &core, "red/b"));
    let [condition] = &conditions(&mut core, "red/b")[..] else { panic!("one condition") };
    assert!(condition.status && condition.kind == "Quarantined", "{condition:?}");
    assert!(condition.message.contains("ingress and egress (ticket)"), "{condition:?}");
    let told = core
        .explain(&v1::ExplainRequest {
            vpc: "red".into(),
            from: "a".into(),
            to: "b".into(),
            protocol: "tcp".into(),
            port: Some(81),
            icmp_type: None,
            icmp_code: None,
            family: None,
        })
        .unwrap();
    assert_eq!(told.verdict, v1::Verdict::Drop);
    assert!(told.summary.contains("ingress of red/b drops: it is in quarantine"), "{told:?}");
    let released = core.release(&request("red", "b")).unwrap();
    assert!(released.quarantine.is_none() && released.revision > held.revision, "{released:?}");
    assert_eq!(conditions(&mut core, "red/b"), []);
    assert!(!is_closed(&node, &core, "red/b"));
    drop(core);
    assert!(!is_closed(&node, &node.agent(), "red/b"), "nor does it come back");
}

#[test]
fn freeze_detached_enforcement() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let before = (verdicts(&node, &core, "red/b"), node.state());
    let held = core.freeze(&request("red", "b")).unwrap();
    assert_eq!(held.revision, held.previous_revision);
    assert_eq!((verdicts(&node, &core, "red/b"), node.state()), before, "nothing changes in the kernel");
    node.write(&port(81));
    core.reload();
    drop(core);
    let mut core = node.agent();
    assert_eq!((verdicts(&node, &core, "red/b"), node.state()), before);
    let [condition] = &conditions(&mut core, "red/b")[..] else { panic!("one condition") };
    assert_eq!(condition.kind, "Frozen");
    assert!(condition.message.contains("withheld: changed red/web/http"), "{condition:?}");
    assert!(node.plane.0.lock().unwrap().guarded.len() >= 3, "its programs are where they were");
    // What is worse comes first, and what was frozen comes back after it.
    assert!(quarantine(&mut core, "red", "b").unwrap().frozen.is_some());
    assert!(is_closed(&node, &core, "red/b"));
    let left = core.release(&request("red", "b")).unwrap();
    assert!(left.quarantine.is_none() && left.frozen.is_some(), "{left:?}");
    assert_eq!(verdicts(&node, &core, "red/b"), before.0);
    let released = core.release(&request("red", "b")).unwrap();
    assert!(released.frozen.is_none());
    let slot = core.plan.endpoints[&"red/b".parse().unwrap()].ingress_slot;
    let ports: Vec<u16> =
        core.plan.entries(slot).keys().map(|k| u16::from_be_bytes(k.port)).filter(|p| *p != 0).collect();
    assert_eq!(ports, [81]);
}

#[test]
fn what_an_operator_did_is_recorded_also_where_no_entry_changed() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    quarantine(&mut core, "red", "b").unwrap();
    quarantine(&mut core, "red", "b").unwrap();
    core.release(&request("red", "b")).unwrap();
    core.freeze(&request("red", "b")).unwrap();
    drop(core);
    let mut core = node.agent();
    let name = ("red".to_owned(), "b".to_owned());
    let changes = core.policy_history(Some(&name), None).unwrap().changes;
    let said: Vec<_> = changes
        .iter()
        .filter_map(|c| match &c.source {
            ChangeSource::Operator { action, reason } => {
                Some((action.as_str(), reason.as_str(), c.directions.len(), c.error.as_str()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(
        said,
        [
            ("quarantine", "ticket", 1, ""),
            ("quarantine", "ticket", 0, ""),
            ("release from quarantine", "", 1, ""),
            ("freeze", "", 0, ""),
        ]
    );
}

#[test]
fn what_cannot_be_held_is_said_and_changes_nothing() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let before = (node.writes(), node.state());
    let code = |e: v1::ApiError| e.code;
    let unknown = quarantine(&mut core, "red", "bb").unwrap_err();
    assert_eq!(unknown.code, ErrorCode::NotFound);
    assert!(unknown.message.contains("red/b"), "{unknown}");
    assert_eq!(quarantine(&mut core, "red", "c").map_err(code), Err(ErrorCode::NotFound), "another node's");
    assert_eq!(core.release(&request("red", "b")).map_err(code), Err(ErrorCode::Conflict));
    let directionless = QuarantineRequest {
        vpc: "red".into(),
        endpoint: "b".into(),
        ingress: false,
        egress: false,
        reason: String::new(),
    };
    assert_eq!(core.quarantine(&directionless).map_err(code), Err(ErrorCode::InvalidRequest));
    assert_eq!(
        core.freeze(&request("default", "bound")).map_err(code),
        Err(ErrorCode::Conflict),
        "no policy yet"
    );
    let wordy = HoldRequest { reason: "x".repeat(1025), ..request("red", "b") };
    assert_eq!(core.freeze(&wordy).map_err(code), Err(ErrorCode::InvalidRequest));
    assert_eq!((node.writes(), node.state()), before);
    core.freeze(&request("red", "b")).unwrap();
    let twice = core.freeze(&request("red", "b")).unwrap_err();
    assert!(twice.code == ErrorCode::Conflict && twice.message.contains("already"), "{twice}");
    quarantine(&mut core, "red", "a").unwrap();
    assert_eq!(core.freeze(&request("red", "a")).map_err(code), Err(ErrorCode::Conflict));
}

#[test]
fn a_quarantine_that_does_not_fit_is_an_error_and_tried_again() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    node.plane.0.lock().unwrap().memory.capacity.insert(Kind::Slots, slots);
    let refused = quarantine(&mut core, "red", "b").unwrap_err();
    assert!(refused.message.contains("kept and tried again"), "{refused}");
    assert!(!is_closed(&node, &core, "red/b"));
    node.plane.0.lock().unwrap().memory.capacity.clear();
    core.pass();
    assert!(is_closed(&node, &core, "red/b"));
}

#[test]
fn a_quarantine_stays_with_a_name_of_the_document_and_ends_with_the_life_of_a_pod_or_container() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    // An endpoint of the document, before it is there and over two lives of its device.
    assert_eq!(quarantine(&mut core, "default", "bound").unwrap().revision, 0);
    for id in ["c1", "c2"] {
        let mut bound = add(id);
        bound.args.insert("FLOWLOOM_ENDPOINT".into(), "bound".into());
        core.cni_add(&bound).unwrap();
        assert!(is_closed(&node, &core, "default/bound"), "{id}");
        core.cni_del(&del(id)).unwrap();
    }
    // A container: the next one of that name is another.
    core.cni_add(&add("c3")).unwrap();
    quarantine(&mut core, "default", "c3").unwrap();
    drop(core);
    let mut core = node.agent();
    assert!(is_closed(&node, &core, "default/c3"));
    core.cni_del(&del("c3")).unwrap();
    core.pass();
    core.cni_add(&add("c3")).unwrap();
    assert!(!is_closed(&node, &core, "default/c3"));
    // A Pod: a new sandbox of it is not, a new Pod of that name is.
    for (id, uid, closed) in [("p1", "u1", false), ("p2", "u1", true), ("p3", "u2", false)] {
        core.cni_add(&add_pod(id, uid)).unwrap();
        assert_eq!(is_closed(&node, &core, "default/shop.web-0"), closed, "{id}");
        if id == "p1" {
            quarantine(&mut core, "shop", "web-0").unwrap();
        }
        core.cni_del(&del(id)).unwrap();
    }
    assert_eq!(core.release(&request("shop", "web-0")).unwrap_err().code, ErrorCode::NotFound);
}

fn rollback(core: &mut Core, revision: u32) -> Result<v1::PolicyHold, v1::ApiError> {
    core.rollback(&v1::RollbackRequest {
        vpc: "red".into(),
        endpoint: "b".into(),
        revision,
        reason: "outage".into(),
    })
}

/// The ports that red/b is open for.
fn open_ports(core: &Core) -> Vec<u16> {
    let slot = core.plan.endpoints[&"red/b".parse().unwrap()].ingress_slot;
    core.plan.entries(slot).keys().map(|k| u16::from_be_bytes(k.port)).filter(|p| *p != 0).collect()
}

#[test]
fn a_rollback_goes_back_to_rules_of_a_revision_over_a_restart() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let revision = |core: &Core| core.plan.endpoints[&"red/b".parse().unwrap()].revision;
    let first = revision(&core);
    for n in [81, 82] {
        node.write(&port(n));
        core.reload();
    }
    drop(core);
    let mut core = node.agent();
    assert_eq!(open_ports(&core), [82]);
    let held = rollback(&mut core, first).unwrap();
    assert_eq!((open_ports(&core), held.revision), (vec![80], revision(&core)));
    assert!(
        held.frozen
            .is_some_and(|f| f.rolled_back && f.revision == first && f.withheld == "changed red/web/http")
    );
    node.write(&port(83));
    core.reload();
    drop(core);
    let mut core = node.agent();
    assert_eq!(open_ports(&core), [80]);
    let [condition] = &conditions(&mut core, "red/b")[..] else { panic!("one condition") };
    assert!(
        condition.reason == "Rollback" && condition.message.contains("are in force again (outage)"),
        "{condition:?}"
    );
    let unknown = rollback(&mut core, 9999).unwrap_err();
    assert!(
        unknown.code == ErrorCode::Conflict && unknown.message.contains(&format!("{first}, ")),
        "{unknown}"
    );
    assert_eq!(open_ports(&core), [80]);
    quarantine(&mut core, "red", "b").unwrap();
    assert_eq!(rollback(&mut core, first).unwrap_err().code, ErrorCode::Conflict);
    core.release(&request("red", "b")).unwrap();
    core.release(&request("red", "b")).unwrap();
    assert_eq!(open_ports(&core), [83]);
}

#[test]
fn the_last_revisions_are_kept_and_their_file_is_bounded() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let key = "red/b".parse().unwrap();
    let mut revisions = vec![core.plan.endpoints[&key].revision];
    for n in 1..=20 {
        node.write(&port(1000 + n));
        core.reload();
        revisions.push(core.plan.endpoints[&key].revision);
        while core.tidy() {}
    }
    let kept = &revisions[revisions.len() - crate::revisions::KEPT..];
    assert_eq!(core.history.revisions.kept(&key), kept);
    let path = node.dir.path().join("state").join(crate::revisions::FILE);
    let text = fs::read_to_string(&path).unwrap();
    drop(core);
    // As after a long life: much that nobody needs, and a line that a crash cut.
    fs::write(&path, format!("{}{}{}", "{\"old\":0}\n".repeat(120_000), text, "{\"policy\":")).unwrap();
    let mut core = node.agent();
    assert_eq!(core.history.revisions.kept(&key), kept);
    node.write(&port(2000));
    core.reload();
    while core.tidy() {}
    assert!(fs::metadata(&path).unwrap().len() < 100_000);
    rollback(&mut core, kept[2]).unwrap();
    assert_eq!(open_ports(&core), [1000 + 15]);
    drop(core);
    assert_eq!(open_ports(&node.agent()), [1000 + 15]);
}

#[test]
fn a_revision_that_could_not_be_kept_is_no_way_back_and_its_rules_are_kept_with_the_next_that_has_them() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    while core.tidy() {}
    let key = "red/b".parse().unwrap();
    let first = core.plan.endpoints[&key].revision;
    let path = node.dir.path().join("state").join(crate::revisions::FILE);
    let aside = path.with_extension("aside");
    fs::rename(&path, &aside).unwrap();
    // No file can be written there.
    fs::create_dir(&path).unwrap();
    node.write(&port(81));
    core.reload();
    while core.tidy() {}
    assert_eq!(core.history.revisions.kept(&key), [first]);
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    let mut change = |n| {
        node.write(&port(n));
        core.reload();
        while core.tidy() {}
        core.plan.endpoints[&key].revision
    };
    let (closed, again, last) = (change(80), change(81), change(82));
    assert_eq!(core.history.revisions.kept(&key), [first, closed, again, last]);
    for (revision, port) in [(again, 81), (closed, 80)] {
        rollback(&mut core, revision).unwrap();
        assert_eq!(open_ports(&core), [port]);
    }
}
