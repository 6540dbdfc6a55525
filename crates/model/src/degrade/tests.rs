//! One bad object, and what stays.

use super::*;
use crate::{ConditionType, Timestamp, conditions};

const BASE: &str = "version: 1
nodes: [{name: n1, address: 192.0.2.1}, {name: n2, address: 192.0.2.2}]
vpcs: [{name: red, vni: 7}, {name: blue, vni: 8}]
subnets:
  - {name: s, vpc: red, cidr: 10.0.0.0/24}
  - {name: s, vpc: blue, cidr: 10.0.0.0/24}
security_groups:
  - {name: web, vpc: red, rules: [{id: r, priority: 5, direction: ingress, action: allow, remote_group: client}]}
  - {name: client, vpc: red}
endpoints:
  - {name: a, vpc: red, subnet: s, node: n1, ip: 10.0.0.10, security_groups: [web]}
  - {name: b, vpc: red, subnet: s, node: n2, ip: 10.0.0.11, security_groups: [client]}
  - {name: c, vpc: red, subnet: s, node: n2, ip: 10.0.0.12}
  - {name: a, vpc: blue, subnet: s, node: n1, ip: 10.0.0.10}
";

fn loaded(text: &str, last: Option<&World>) -> Loaded {
    let l = load(text.as_bytes(), Format::Yaml, None, last).unwrap_or_else(|f| panic!("{f:#?}"));
    // Whatever was wrong: what is left is right.
    let left: Vec<_> = validate(&l.world).into_iter().filter(|f| !f.keeps_object()).collect();
    assert_eq!(left, []);
    l
}

fn endpoints(l: &Loaded) -> Vec<String> {
    l.world.endpoints.keys().map(ToString::to_string).collect()
}

fn bad(l: &Loaded) -> Vec<String> {
    let mut all: Vec<String> = l
        .faults
        .iter()
        .map(|f| format!("{}: {}", f.object.as_ref().map_or(String::new(), ToString::to_string), f.code))
        .collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn a_right_document_is_taken_whole() {
    let l = loaded(BASE, None);
    assert_eq!((l.faults.len(), l.world.endpoints.len()), (0, 4));
}

#[test]
fn a_bad_endpoint_degrades_alone() {
    let l = loaded(&BASE.replace("ip: 10.0.0.12", "ip: 10.0.9.12"), None);
    assert_eq!(endpoints(&l), ["blue/a", "red/a", "red/b"]);
    assert_eq!(bad(&l), ["endpoint red/c: AddressOutsideSubnet"]);
    let all = conditions(&l.faults, 3, Timestamp(9));
    let c = all[&ObjectRef::Endpoint("red/c".parse().unwrap())].find(ConditionType::Accepted).unwrap();
    assert!(c.message.contains("outside subnet red/s"), "{c:?}");
    // The same when it cannot even be read.
    let l = loaded(&BASE.replace("ip: 10.0.0.12", "ip: 10.0.0.300"), None);
    assert_eq!(endpoints(&l), ["blue/a", "red/a", "red/b"]);
}

#[test]
fn what_depends_on_a_bad_object_degrades_with_it_and_neighbours_keep_working() {
    let l = loaded(&BASE.replace("priority: 5", "priority: 99999"), None);
    assert_eq!(endpoints(&l), ["blue/a", "red/b", "red/c"]);
    assert_eq!(bad(&l), ["endpoint red/a: DependencyDegraded", "security group red/web: OutOfRange"]);
    // Through a rule that names the bad group.
    let l = loaded(&BASE.replace("{name: client, vpc: red}", "{name: client, vpc: red, tier: 9}"), None);
    assert_eq!(endpoints(&l), ["blue/a", "red/c"]);
    assert_eq!(
        bad(&l),
        [
            "endpoint red/a: DependencyDegraded",
            "endpoint red/b: DependencyDegraded",
            "security group red/client: OutOfRange",
            "security group red/web: DependencyDegraded"
        ]
    );
    // A VPC takes everything in it along, and nothing of the other.
    let l = loaded(&BASE.replace("vni: 7", "vni: 0"), None);
    assert_eq!(endpoints(&l), ["blue/a"]);
}

#[test]
fn the_last_good_version_of_a_bad_object_stays_in_force() {
    let good = loaded(BASE, None).world;
    let l = loaded(&BASE.replace("priority: 5", "priority: 99999"), Some(&good));
    assert_eq!(l.world, good);
    assert_eq!(bad(&l), ["security group red/web: OutOfRange"]);
    assert!(l.faults[0].message.ends_with("its last good version stays in force"), "{}", l.faults[0]);
    // Its dependants follow the new document meanwhile.
    let text =
        BASE.replace("priority: 5", "priority: 99999").replace("ip: 10.0.0.10, sec", "ip: 10.0.0.20, sec");
    let l = loaded(&text, Some(&good));
    assert_eq!(l.world.endpoints[&"red/a".parse().unwrap()].ips[0].to_string(), "10.0.0.20");
    // What is left out on purpose goes.
    let l = loaded(
        &BASE.replace("  - {name: c, vpc: red, subnet: s, node: n2, ip: 10.0.0.12}\n", ""),
        Some(&good),
    );
    assert_eq!((endpoints(&l).len(), l.faults.len()), (3, 0));
}

#[test]
fn a_newcomer_takes_nothing_from_who_was_there_before() {
    let good = loaded(BASE, None).world;
    for new in ["a0", "z"] {
        let text = format!("{BASE}  - {{name: {new}, vpc: red, subnet: s, node: n2, ip: 10.0.0.11}}\n");
        let l = loaded(&text, Some(&good));
        assert_eq!(l.world, good, "{new}");
        assert_eq!(bad(&l), [format!("endpoint red/{new}: DuplicateAddress")]);
        assert!(l.faults[0].path.contains(new), "{}", l.faults[0]);
    }
    // An endpoint that moves onto another's address stays where it was.
    let l = loaded(&BASE.replace("ip: 10.0.0.10, sec", "ip: 10.0.0.11, sec"), Some(&good));
    assert_eq!(l.world, good);
    let text = BASE.replace("{name: red, vni: 7}", "{name: red, vni: 7}, {name: a, vni: 7}");
    let l = loaded(&text, Some(&good));
    assert_eq!((l.world.vpcs.len(), bad(&l)), (3, vec!["vpc a: DuplicateVni".to_owned()]));
    let text = BASE.replace("subnets:\n", "subnets:\n  - {name: a, vpc: red, cidr: 10.0.0.0/16}\n");
    assert_eq!(loaded(&text, Some(&good)).world, good);
}

#[test]
fn conflicts_three_deep_are_all_resolved() {
    let text = "version: 1\nsubnets:\n  - {name: b, vpc: default, cidr: 10.0.0.0/16}\n  - {name: c, vpc: default, cidr: 10.0.0.0/8}\n  - {name: a, vpc: default, cidr: 10.0.0.0/24}\n  - {name: d, vpc: default, cidr: 10.0.0.0/28}";
    let l = loaded(text, None);
    assert_eq!(l.world.subnets.keys().map(|(_, n)| n.to_string()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(l.faults.len(), 3);
}

#[test]
fn a_document_that_cannot_be_relied_on_as_a_whole_changes_nothing() {
    for text in [
        "",
        "version: 2",
        "{",
        "version: 1\nendpoint: []",
        "version: 1\nendpoints: {}",
        "version: 1\nnodes: [{nmae: x, address: 192.0.2.1}]",
        "version: 1\nnodes: [5]",
        "version: 1\nversion: 1",
    ] {
        assert!(load(text.as_bytes(), Format::Yaml, None, None).is_err(), "{text}");
    }
    let broken = load(BASE.as_bytes(), Format::Yaml, Some(b"<<<<<<< HEAD"), None).unwrap_err();
    assert_eq!((broken.len(), broken[0].path.as_str()), (1, "lock"));
    // A kind of later work is named, and the rest is taken.
    let l = loaded(&format!("{BASE}gateways: [{{name: g}}]\n"), None);
    assert_eq!((l.world.endpoints.len(), bad(&l)), (4, vec![": NotSupportedYet".to_owned()]));
}

#[test]
fn an_endpoint_without_address_waits_and_a_lost_lock_takes_none_away() {
    let text = BASE.replace(", ip: 10.0.0.12", "");
    let l = loaded(&text, None);
    assert_eq!(bad(&l), ["endpoint red/c: AwaitingAddress"]);
    assert_eq!(endpoints(&l).len(), 4);
    let c = conditions(&l.faults, 0, Timestamp(0));
    assert!(c[&ObjectRef::Endpoint("red/c".parse().unwrap())].find(ConditionType::Allocated).is_some());
    let draft = crate::parse(text.as_bytes(), Format::Yaml).unwrap().world;
    let lock = crate::allocate(&draft, &Lock::default(), Timestamp(0)).lock.to_yaml().unwrap();
    let good = load(text.as_bytes(), Format::Yaml, Some(lock.as_bytes()), None).unwrap();
    assert_eq!(good.faults, []);
    let lost = loaded(&text, Some(&good.world));
    assert_eq!((lost.world, lost.faults), (good.world, vec![]));
}

#[test]
fn a_named_port_nobody_defines_leaves_its_group_in_force() {
    let text = BASE
        .replace("action: allow, remote_group: client", "action: allow, protocol: tcp, named_ports: [nope]");
    let l = loaded(&text, None);
    assert_eq!(
        (endpoints(&l).len(), bad(&l)),
        (4, vec!["security group red/web: UndefinedNamedPort".to_owned()])
    );
    let c = conditions(&l.faults, 0, Timestamp(0));
    assert!(c.values().all(|c| c.find(ConditionType::Accepted).is_none()));
}

#[test]
fn a_long_chain_of_groups_degrades_at_once() {
    let mut text = String::from("version: 1\nsecurity_groups:\n");
    for i in 0..3000 {
        text.push_str(&format!("  - {{name: g{i}, vpc: default, rules: [{{id: r, priority: 5, direction: ingress, action: allow, remote_group: g{}}}]}}\n", i + 1));
    }
    let start = std::time::Instant::now();
    let l = loaded(&text, None);
    assert_eq!((l.world.security_groups.len(), l.faults.len()), (0, 3000));
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
