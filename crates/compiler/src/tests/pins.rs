//! Endpoints that are held at a policy of their own.

use std::sync::Arc;

use flowloom_model::{Action, Direction, Protocol, Rule};

use super::sample::{Sample, by_label, cidr, here, ip, key, red, rule};
use crate::*;

/// `e` and `f` let tcp/80 in from label app=web; `w` has it.
fn sample() -> Sample {
    let web =
        Rule { remote: by_label("app", "web"), protocol: Protocol::Tcp, ..rule("web", 100, Action::Allow) };
    Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("f", &["10.1.0.11"], &["g"])
        .endpoint("w", &["10.1.0.20"], &[])
        .label("w", "app", "web")
        .group("g", 1, vec![web])
}

fn compiled(sample: &mut Sample, pins: &Pins, cache: &mut CompilerCache) -> NodePlan {
    compile_pinned(&sample.world, pins, &here(), CompileOptions::default(), &mut sample.numbers, cache).plan
}

fn lets_in(plan: &NodePlan, endpoint: &str, peer: &str) -> bool {
    let record = &plan.endpoints[&key(endpoint)];
    let (_, found) = plan.peer(record.vpc, ip(peer)).unwrap();
    lookup(&plan.entries(record.ingress_slot), found.identity, 6, 80).unwrap().verdict == 1
}

fn quarantine() -> Pins {
    let deny = Arc::new(PolicySpec::deny_all(red(), Direction::Ingress));
    [(key("e"), Held { egress: None, ingress: Some(deny) })].into()
}

/// What `e` is judged by now, noted down and read again.
fn frozen(plan: &NodePlan) -> Pins {
    let record = &plan.endpoints[&key("e")];
    let of = |slot| Some(plan.policies[&slot].spec().clone());
    let held = Held { egress: of(record.egress_slot), ingress: of(record.ingress_slot) };
    let stored: Held = serde_json::from_str(&serde_json::to_string(&held).unwrap()).unwrap();
    assert_eq!(stored, held);
    [(key("e"), stored)].into()
}

#[test]
fn quarantine_was_overwritten_by_the_next_change_of_rules() {
    let (mut sample, mut cache) = (sample(), CompilerCache::default());
    let open = compiled(&mut sample, &Pins::new(), &mut cache);
    assert!(lets_in(&open, "e", "10.1.0.20") && lets_in(&open, "f", "10.1.0.20"));
    let closed = compiled(&mut sample, &quarantine(), &mut cache);
    assert!(!lets_in(&closed, "e", "10.1.0.20"));
    assert_eq!(closed.endpoints[&key("f")], open.endpoints[&key("f")], "its neighbour is as it was");
    assert_eq!(closed.endpoints[&key("e")].egress_slot, open.endpoints[&key("e")].egress_slot);
    assert!(closed.endpoints[&key("e")].revision > open.endpoints[&key("e")].revision);

    sample.edit_group("g").rules.push(rule("all", 50, Action::Allow));
    let changed = compiled(&mut sample, &quarantine(), &mut cache);
    assert!(!lets_in(&changed, "e", "10.1.0.20") && lets_in(&changed, "f", "10.1.0.9"));
    let released = compiled(&mut sample, &Pins::new(), &mut cache);
    assert!(lets_in(&released, "e", "10.1.0.9"), "what the rules say by now");
}

#[test]
fn a_frozen_endpoint_keeps_rules_that_the_world_has_no_longer_and_still_knows_new_peers() {
    let (mut sample, mut cache) = (sample(), CompilerCache::default());
    let pins = frozen(&compiled(&mut sample, &Pins::new(), &mut cache));
    // Nobody else asks for the label, and the rule's number would be free.
    sample.edit_group("g").rules =
        vec![Rule { remote: cidr("192.0.2.9/32"), ..rule("other", 1, Action::Drop) }];
    let mut sample = sample.endpoint("x", &["10.1.0.21"], &[]).label("x", "app", "web");
    let plan = compiled(&mut sample, &pins, &mut cache);
    for (peer, passes) in [("10.1.0.20", true), ("10.1.0.21", true), ("10.1.0.11", false)] {
        assert_eq!(lets_in(&plan, "e", peer), passes, "{peer}");
        assert!(!lets_in(&plan, "f", peer), "{peer}");
    }
    let names: Vec<String> = plan.rules.values().map(ToString::to_string).collect();
    assert!(
        names.contains(&"red/g/web".to_owned()) && names.contains(&"red/g/other".to_owned()),
        "{names:?}"
    );
    let wanted = world_spec(&sample.world, &key("e"), Direction::Ingress).unwrap();
    assert_eq!(wanted.rules.iter().map(|r| r.name.rule.as_str()).collect::<Vec<_>>(), ["other"]);
    assert!(!lets_in(&compiled(&mut sample, &Pins::new(), &mut cache), "e", "10.1.0.20"));
}

#[test]
fn a_policy_noted_long_ago_gets_numbers_that_are_its_own_today() {
    let (mut sample, mut cache) = (sample(), CompilerCache::default());
    let pins = frozen(&compiled(&mut sample, &Pins::new(), &mut cache));
    sample.edit_group("g").rules.clear();
    compiled(&mut sample, &Pins::new(), &mut cache);
    sample.numbers = Numbers::default();
    sample.edit_group("g").rules = vec![rule("another", 7, Action::Drop)];
    compiled(&mut sample, &Pins::new(), &mut cache);
    let plan = compiled(&mut sample, &pins, &mut cache);
    let policy = &plan.policies[&plan.endpoints[&key("e")].ingress_slot];
    let held = &policy.spec().rules[0];
    assert_eq!((held.name.rule.as_str(), plan.rules[&held.id].rule.as_str()), ("web", "web"));
}

#[test]
fn what_is_held_leads_to_the_same_plan_from_the_last_one_and_from_the_start() {
    let (mut sample, mut cache) = (sample(), CompilerCache::default());
    let open = compiled(&mut sample, &Pins::new(), &mut cache);
    for pins in [quarantine(), frozen(&open), Pins::new()] {
        sample.edit_group("g").rules.push(Rule {
            remote: by_label("app", "web"),
            ..rule(&format!("r{}", cache.resumed()), 300, Action::Allow)
        });
        let before = cache.resumed();
        let resumed = compiled(&mut sample, &pins, &mut cache);
        assert_eq!(cache.resumed(), before + 1, "it started from the last one");
        assert_eq!(compiled(&mut sample, &pins, &mut CompilerCache::default()), resumed);
    }
}

#[test]
fn a_plan_says_which_revision_and_slots_each_endpoint_was_decided_with() {
    let mut sample = sample();
    let plan = compiled(&mut sample, &quarantine(), &mut CompilerCache::default());
    let stored: Numbers = serde_json::from_str(&serde_json::to_string(&sample.numbers).unwrap()).unwrap();
    let mut decided: Vec<_> = stored.decided().map(|(key, r, slots)| ((**key).clone(), r, slots)).collect();
    decided.sort();
    let expected: Vec<_> = plan
        .endpoints
        .iter()
        .map(|(key, e)| (key.clone(), e.revision, [e.egress_slot, e.ingress_slot]))
        .collect();
    assert_eq!(decided, expected);
}
