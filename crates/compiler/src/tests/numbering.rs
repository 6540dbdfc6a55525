//! Numbers: stable, stored, not handed out twice.

use flowloom_model::Action;

use super::sample::{Sample, cidr, ip, key, net, rule};
use crate::*;

fn sample() -> Sample {
    let rules = vec![flowloom_model::Rule { remote: cidr("10.1.0.5/32"), ..rule("r", 100, Action::Allow) }];
    Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("f", &["10.1.0.11"], &["g"])
        .group("g", 1, rules)
}

#[test]
fn a_second_compilation_changes_nothing() {
    let mut sample = sample();
    let first = sample.compile();
    let numbers = sample.numbers.clone();
    let second = sample.compile();
    assert_eq!((first.plan, numbers), (second.plan, sample.numbers));
}

#[test]
fn numbers_survive_storage() {
    let mut sample = sample();
    let before = sample.compile().plan;
    let stored: Numbers = serde_json::from_str(&serde_json::to_string(&sample.numbers).unwrap()).unwrap();
    assert_eq!(stored, sample.numbers);
    sample.numbers = stored;
    assert_eq!(sample.compile().plan, before);
}

#[test]
fn equal_policies_share_a_slot_and_the_spec_is_kept() {
    let mut sample = sample();
    let plan = sample.compile().plan;
    let (e, f) = (&plan.endpoints[&key("e")], &plan.endpoints[&key("f")]);
    assert_eq!((e.egress_slot, e.ingress_slot), (f.egress_slot, f.ingress_slot));
    assert_ne!(e.revision, f.revision);
    assert_eq!(sample.numbers.spec(e.ingress_slot), Some(plan.policies[&e.ingress_slot].spec()));
}

#[test]
fn a_retired_number_comes_back_for_the_same_fact_only() {
    let mut sample = sample();
    let old = sample.compile().plan.endpoints[&key("f")].clone();
    let endpoint = sample.world.endpoints.remove(&key("f")).unwrap();
    let _ = sample.compile();
    assert!(sample.numbers.retained() > 0);
    let mut sample = sample.endpoint("g", &["10.1.0.12"], &[]);
    assert_ne!(sample.compile().plan.endpoints[&key("g")].id, old.id, "round robin, and still retained");
    sample.world.endpoints.insert(key("f"), endpoint.clone());
    let back = sample.compile().plan.endpoints[&key("f")].clone();
    assert_eq!(back.id, old.id);
    sample.world.endpoints.remove(&key("f"));
    let _ = sample.compile();
    sample.numbers.release_before(sample.numbers.epoch());
    assert_eq!(sample.numbers.retained(), 0);
    sample.world.endpoints.insert(key("f"), endpoint);
    let anew = sample.compile().plan.endpoints[&key("f")].clone();
    assert!(anew.id != old.id && anew.revision > old.revision, "{anew:?} {old:?}");
}

#[test]
fn revisions_grow_with_slots_only() {
    let mut sample = sample();
    let one = sample.compile().plan.endpoints[&key("e")].clone();
    sample.edit("f").labels.insert("app".to_owned(), "web".to_owned());
    let two = sample.compile().plan.endpoints[&key("e")].clone();
    assert_eq!(one, two, "a peer's label is no change of this endpoint's policy");
    sample.edit_group("g").rules[0].priority = 7;
    let three = sample.compile().plan.endpoints[&key("e")].clone();
    assert!(three.revision > two.revision && three.ingress_slot != two.ingress_slot);
    assert_eq!(three.egress_slot, two.egress_slot, "the other direction keeps its slot");
    sample.edit_group("g").rules[0].priority = 100;
    let four = sample.compile().plan.endpoints[&key("e")].clone();
    assert!(four.revision > three.revision, "a revision never comes back");
    assert_eq!(four.ingress_slot, one.ingress_slot, "the same facts, the same number");
}

/// It came back with the revision it had, and its VPC with generation 1: connections of the time before were current.
#[test]
fn an_endpoint_that_comes_back_has_a_new_revision() {
    let mut sample = sample();
    let before = sample.compile().plan;
    let endpoint = sample.world.endpoints.remove(&key("e")).unwrap();
    sample.compile();
    sample.world.endpoints.insert(key("e"), endpoint);
    let after = sample.compile().plan;
    let (before, after) = (&before.endpoints[&key("e")], &after.endpoints[&key("e")]);
    assert_eq!((before.id, before.egress_slot), (after.id, after.egress_slot));
    assert!(after.revision > before.revision, "{} after {}", after.revision, before.revision);
}

#[test]
fn every_endpoint_number_in_use_is_a_condition_for_the_next() {
    let mut sample = Sample::new();
    for n in 0..4096u32 {
        let address = format!("10.1.{}.{}", 1 + n / 256, n % 256);
        sample = sample.endpoint(&format!("e{n}"), &[&address], &[]);
    }
    let compilation = sample.compile();
    assert_eq!(compilation.plan.endpoints.len(), 4095);
    assert_eq!(compilation.conditions.len(), 1);
    assert_eq!(compilation.conditions[0].reason, ConditionReason::OutOfNumbers);
    let ids: std::collections::BTreeSet<u32> = compilation.plan.endpoints.values().map(|e| e.id.0).collect();
    assert_eq!((ids.first(), ids.last()), (Some(&1), Some(&4095)));
}

#[test]
fn labels_no_rule_asks_for_split_no_identity() {
    let mut sample = sample().label("e", "pod", "a").label("f", "pod", "b");
    let plan = sample.compile().plan;
    assert_eq!(plan.endpoints[&key("e")].identity, plan.endpoints[&key("f")].identity);
    let same = |rule: flowloom_model::Remote| {
        let mut sample = super::sample::Sample { world: sample.world.clone(), numbers: Numbers::default() };
        sample.edit_group("g").rules[0].remote = rule;
        let plan = sample.compile().plan;
        plan.endpoints[&key("e")].identity == plan.endpoints[&key("f")].identity
    };
    assert!(same(super::sample::by_label("app", "web")));
    assert!(!same(super::sample::by_label("pod", "a")));
    assert!(!same(cidr("10.1.0.11/32")), "an address that a rule names is a fact");
}

#[test]
fn every_address_of_a_dual_stack_endpoint_has_its_own_facts() {
    let rules = vec![flowloom_model::Rule { remote: cidr("fd00:1::/64"), ..rule("r", 100, Action::Allow) }];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10", "fd00:1::10"], &["g"]).group("g", 1, rules);
    let plan = sample.compile().plan;
    let cidrs = |s: &str| {
        let (_, peer) = plan.peer(VpcId(7), ip(s)).unwrap();
        plan.identities[&peer.identity].cidrs.clone()
    };
    assert_eq!(cidrs("10.1.0.10"), [].into());
    assert_eq!(cidrs("fd00:1::10"), [net("fd00:1::/64")].into());
}
