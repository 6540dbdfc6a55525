//! The record of changes of policies.

use flowloom_api::v1::{ChangeSource, Direction, EntryCounts, PolicyChange};
use flowloom_datapath::realise::Kind;

use super::*;
use crate::history::FILE;

fn changes_of(core: &mut Core, name: &str) -> Vec<PolicyChange> {
    core.policy_history(Some(&("red".to_owned(), name.to_owned())), None).unwrap().changes
}

/// The document with the rule of group `web` for another port.
fn port(n: u16) -> String {
    DOCUMENT.replace("from: 80, to: 80", &format!("from: {n}, to: {n}"))
}

#[test]
fn each_change_says_who_what_and_from_which_revision_to_which() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let first = changes_of(&mut core, "b");
    assert_eq!(first.len(), 1);
    assert_eq!((first[0].previous_revision, first[0].error.as_str()), (0, ""));
    assert_eq!(first[0].directions.iter().filter_map(|d| d.entries).count(), 0, "nothing to compare with");
    node.write(&port(81));
    core.reload();
    core.pass();
    let changes = changes_of(&mut core, "b");
    assert_eq!(changes.len(), 2, "{changes:?}");
    let change = &changes[1];
    let (generation, digest) = (2, core.document.as_ref().unwrap().digest.clone());
    assert_eq!(change.source, ChangeSource::Document { generation, digest });
    assert_eq!(change.previous_revision, first[0].attempted_revision);
    assert_eq!(change.attempted_revision, core.plan.endpoints[&"red/b".parse().unwrap()].revision);
    let entries = Some(EntryCounts { added: 1, updated: 0, removed: 1 });
    let directions: Vec<_> = change.directions.iter().map(|d| (d.direction, d.entries)).collect();
    assert_eq!(directions, [(Direction::Ingress, entries)]);
    assert_eq!(changes_of(&mut core, "a").len(), 1, "no other endpoint has a change");
    core.cni_add(&add("c1")).unwrap();
    let all = core.policy_history(None, Some(1)).unwrap().changes;
    assert_eq!(all[0].source, ChangeSource::Cni { container_id: "c1".into(), ifname: "eth0".into() });
    let numbers: Vec<u64> =
        core.policy_history(None, None).unwrap().changes.iter().map(|c| c.number).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    let unknown = core.policy_history(Some(&("red".into(), "bb".into())), None).unwrap_err();
    assert_eq!(unknown.code, ErrorCode::NotFound);
    assert!(unknown.message.contains("red/b"), "{unknown}");
}

#[test]
fn a_change_of_peers_is_none_and_a_restart_adds_none() {
    let node = Node::with("net.json", Some(JSON));
    let mut core = node.agent();
    node.write(&JSON.replacen(r#""role":"client"}},"#, r#""role":"server"}},"#, 1));
    core.reload();
    let before = core.policy_history(None, None).unwrap();
    assert_eq!(before.changes.len(), 2, "the first policy of each, {before:?}");
    drop(core);
    let mut core = node.agent();
    assert_eq!(core.policy_history(None, None).unwrap(), before);
    node.write(&JSON.replacen(r#""priority":5"#, r#""priority":6"#, 1));
    core.reload();
    drop(core);
    // The line was not written: the agent died first.
    let mut core = node.agent();
    let changes = changes_of(&mut core, "a");
    let last = changes.last().unwrap();
    assert!(
        changes.len() == 2 && matches!(last.source, ChangeSource::Document { generation: 1, .. }),
        "{last:?}"
    );
    assert_eq!(last.previous_revision, changes[0].attempted_revision);
    drop(core);
    assert_eq!(changes_of(&mut node.agent(), "a"), changes);
}

#[test]
fn a_change_that_does_not_fit_is_recorded_once_with_its_error_and_again_when_it_fits() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let slots = node.state().policies.len();
    node.plane.0.lock().unwrap().memory.capacity.insert(Kind::Slots, slots);
    node.write(&port(81));
    core.reload();
    core.pass();
    let changes = changes_of(&mut core, "b");
    assert_eq!(changes.len(), 2, "{changes:?}");
    assert!(!changes[1].error.is_empty() && changes[1].previous_revision == changes[0].attempted_revision);
    node.plane.0.lock().unwrap().memory.capacity.clear();
    core.pass();
    let after = changes_of(&mut core, "b");
    assert_eq!(after.len(), 3, "{after:?}");
    assert_eq!(after[..2], changes[..]);
    assert_eq!((after[2].error.as_str(), &after[2].source), ("", &ChangeSource::Agent));
    let revisions = |c: &PolicyChange| (c.previous_revision, c.attempted_revision);
    assert_eq!(revisions(&after[2]), revisions(&after[1]));
}

#[test]
fn the_record_is_bounded_in_memory_and_on_disk_and_reads_over_a_line_that_was_cut() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = node.agent();
    let most = usize::try_from(core.policy_history(None, None).unwrap().capacity).unwrap();
    let path = node.dir.path().join("state").join(FILE);
    let lines = || fs::read_to_string(&path).unwrap().lines().count();
    let line = fs::read_to_string(&path).unwrap().lines().next().unwrap().to_owned();
    drop(core);
    fs::write(&path, format!("{}\n{}", format!("{line}\n").repeat(2 * most), &line[..40])).unwrap();
    core = node.agent();
    assert_eq!(core.policy_history(None, None).unwrap().changes.len(), most);
    node.write(&port(81));
    core.reload();
    assert_eq!(core.policy_history(None, None).unwrap().changes.len(), most);
    assert_eq!(lines(), most);
    node.write(&port(82));
    core.reload();
    while core.tidy() {}
    assert_eq!(lines(), most + 1);
}
