//! What users of comparable systems have reported about policy, each test named after what went wrong.

use std::collections::BTreeSet;

use flowloom_model::{
    Action, AllowLocalhost, DefaultPolicy, Direction, Endpoint, Entity, Protocol, Remote, Rule,
    SecurityGroup, Selector, Subnet, Vni, Vpc, VpcName,
};

use super::sample::*;
use crate::Verdict::{Allow, Drop};
use crate::*;

const TCP: u8 = 6;
const UDP: u8 = 17;

fn with_remote(remote: Remote, rule: Rule) -> Rule {
    Rule { remote, ..rule }
}

fn tcp(ports: &[(u16, u16)], rule: Rule) -> Rule {
    Rule { protocol: Protocol::Tcp, ports: ports.to_vec(), ..rule }
}

fn outgoing(rule: Rule) -> Rule {
    Rule { direction: Direction::Egress, ..rule }
}

/// Row 49.
#[test]
fn an_exception_was_carved_out_of_label_peers_too() {
    let rules = vec![
        with_remote(by_label("app", "web"), rule("peers", 100, Action::Allow)),
        with_remote(except("0.0.0.0/0", &["10.1.0.5/32"]), rule("block", 100, Action::Allow)),
    ];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("peer", &["10.1.0.5"], &[])
        .endpoint("other", &["10.1.0.6"], &[])
        .label("peer", "app", "web")
        .group("g", 1, rules);
    assert_eq!(
        sample.ingress("10.1.0.5", TCP, 80),
        Allow,
        "the label rule matches inside of the other's exception"
    );
    assert_eq!(sample.ingress("10.1.0.6", TCP, 80), Allow);
    sample.edit("peer").labels.clear();
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Drop, "the exception holds for its own CIDR");
}

/// Row 51.
#[test]
fn an_unknown_named_port_became_port_zero_or_every_port() {
    let named =
        Rule { named_ports: vec!["web".parse().unwrap()], ..tcp(&[], rule("in", 100, Action::Allow)) };
    let rules = vec![named.clone(), outgoing(Rule { id: "out".parse().unwrap(), ..named })];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("peer", &["10.1.0.5"], &[])
        .group("g", 1, rules);
    for port in [0, 1, 80, 65535] {
        assert_eq!(sample.ingress("10.1.0.5", TCP, port), Drop);
        assert_eq!(sample.egress("10.1.0.5", TCP, port), Drop);
    }
    let mut sample = sample.port("e", "web", Protocol::Tcp, 8080).port("peer", "web", Protocol::Tcp, 9090);
    assert_eq!((sample.ingress("10.1.0.5", TCP, 8080), sample.ingress("10.1.0.5", TCP, 9090)), (Allow, Drop));
    assert_eq!((sample.egress("10.1.0.5", TCP, 9090), sample.egress("10.1.0.5", TCP, 8080)), (Allow, Drop));
    assert_eq!(sample.egress("10.1.0.7", TCP, 9090), Drop, "nobody lives there, so it defines no port");
}

/// Row 51: an exception outside of its CIDR, which the document's validation refuses.
#[test]
fn an_exception_outside_of_its_cidr_changes_nothing() {
    let rules = vec![with_remote(except("10.1.0.0/24", &["10.2.0.0/16"]), rule("r", 100, Action::Allow))];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules);
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Allow);
    assert_eq!(sample.ingress("10.2.0.5", TCP, 80), Drop);
}

/// Row 53.
#[test]
fn egress_stayed_open_because_the_peers_matched_nothing() {
    let rules = vec![outgoing(with_remote(by_label("app", "nobody"), rule("r", 100, Action::Allow)))];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules);
    assert_eq!(sample.egress("10.1.0.5", TCP, 80), Drop);
    assert_eq!(sample.egress("8.8.8.8", TCP, 80), Drop);
}

/// Row 53's sibling: an empty selector in a security group selects nothing, and opens nothing.
#[test]
fn an_empty_selector_selected_everyone() {
    let rules = vec![with_remote(Remote::Selector(Selector::default()), rule("r", 100, Action::Allow))];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("peer", &["10.1.0.5"], &[])
        .label("peer", "app", "web")
        .group("g", 1, rules);
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Drop);
}

/// Row 55.
#[test]
fn a_renamed_rule_lost_its_entries() {
    let rules = vec![
        with_remote(cidr("10.1.0.5/32"), rule("old-name", 100, Action::Drop)),
        rule("open", 200, Action::Allow),
    ];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules);
    let before = sample.compile().plan;
    sample.edit_group("g").rules[0].id = "new-name".parse().unwrap();
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Drop);
    let after = sample.compile().plan;
    let ops = diff(&before, &after);
    let position = |find: &dyn Fn(&Op) -> bool| ops.iter().position(find).unwrap();
    let put = position(&|op| matches!(op, Op::PutSlots(_)));
    let switch = position(&|op| matches!(op, Op::PutEndpoint(_)));
    let free = position(&|op| matches!(op, Op::FreeSlots(_)));
    assert!(put < switch && switch < free, "made before it breaks: {ops:#?}");
    assert!(after.rules.values().any(|r| r.rule.as_str() == "new-name"));
    assert!(!after.rules.values().any(|r| r.rule.as_str() == "old-name"));
}

/// Row 57.
#[test]
fn a_family_the_endpoint_lacks_became_a_rule_for_everything() {
    let rules = vec![
        with_remote(cidr("2001:db8::/32"), rule("v6", 100, Action::Allow)),
        with_remote(cidr("::/0"), rule("v6-all", 100, Action::Allow)),
    ];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules);
    for peer in ["8.8.8.8", "10.1.0.5", "0.0.0.1"] {
        assert_eq!(sample.ingress(peer, TCP, 80), Drop, "{peer}");
    }
    let plan = sample.compile().plan;
    let endpoint = &plan.endpoints[&key("e")];
    assert_eq!(endpoint.ips, [ip("10.1.0.10")]);
    assert_eq!(endpoint.gateways, [ip("10.1.0.1")], "no gateway of a family it lacks");
    assert_eq!(endpoint.subnets, [net("10.1.0.0/16")]);
}

/// Row 59.
#[test]
fn an_optional_field_unset_on_one_side_hid_the_change() {
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, vec![]);
    let before = sample.compile().plan;
    sample.edit_group("g").default_deny_ingress = Some(false);
    let after = sample.compile().plan;
    let switched = diff(&before, &after).into_iter().find_map(|op| match op {
        Op::PutEndpoint(endpoint) => Some(endpoint),
        _ => None,
    });
    assert_ne!(switched.map(|e| e.ingress_slot), Some(before.endpoints[&key("e")].ingress_slot));
    sample.edit("e").mac = Some("02:00:00:00:00:07".parse().unwrap());
    let pinned = sample.compile().plan;
    assert!(matches!(&diff(&after, &pinned)[..], [Op::PutEndpoint(e)] if e.mac_pinned));
    sample.edit("e").mac = None;
    let derived = sample.compile().plan;
    assert!(matches!(&diff(&pinned, &derived)[..], [Op::PutEndpoint(e)] if !e.mac_pinned));
}

/// Row 61.
#[test]
fn a_narrow_allow_beat_a_wider_deny() {
    let rules = vec![
        outgoing(with_remote(cidr("0.0.0.0/0"), rule("deny", 100, Action::Drop))),
        outgoing(with_remote(cidr("1.1.1.1/32"), rule("allow", 100, Action::Allow))),
    ];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules.clone());
    assert_eq!(sample.egress("1.1.1.1", TCP, 80), Drop);
    let world = Remote::Entities([Entity::World].into());
    sample.edit_group("g").rules[0].remote = world;
    assert_eq!(sample.egress("1.1.1.1", TCP, 80), Drop, "by entity, too");
}

/// Row 63.
#[test]
fn a_deny_of_one_peer_lost_against_an_allow_for_anyone_on_a_port() {
    let rules = vec![
        with_remote(by_label("app", "bad"), rule("deny", 100, Action::Drop)),
        tcp(&[(80, 80)], rule("allow", 100, Action::Allow)),
    ];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("bad", &["10.1.0.5"], &[])
        .endpoint("good", &["10.1.0.6"], &[])
        .label("bad", "app", "bad")
        .label("good", "app", "good")
        .group("g", 1, rules);
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Drop);
    assert_eq!(sample.ingress("10.1.0.6", TCP, 80), Allow);
    // And the other way round: the exact identity's longer match allows, anyone's shorter one denies.
    sample.edit_group("g").rules = vec![
        tcp(&[(80, 80)], with_remote(by_label("app", "bad"), rule("allow", 100, Action::Allow))),
        rule("deny", 100, Action::Drop),
    ];
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Drop);
}

/// Row 65: the ports of a peer are part of its identity, so entries and ports are never apart; a restart has both.
#[test]
fn named_ports_were_missing_after_a_restart() {
    let named =
        Rule { named_ports: vec!["web".parse().unwrap()], ..tcp(&[], rule("out", 100, Action::Allow)) };
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("peer", &["10.1.0.5"], &[])
        .port("peer", "web", Protocol::Tcp, 9090)
        .group("g", 1, vec![outgoing(named)]);
    let before = sample.compile().plan;
    let stored = serde_json::to_string(&sample.numbers).unwrap();
    sample.numbers = serde_json::from_str(&stored).unwrap();
    let after = sample.compile().plan;
    assert_eq!(diff(&before, &after), []);
    assert_eq!(sample.egress("10.1.0.5", TCP, 9090), Allow);
}

/// Row 85.
#[test]
fn ingress_and_egress_rules_shared_an_index() {
    let rules = vec![
        tcp(&[(80, 80)], rule("in", 100, Action::Allow)),
        outgoing(tcp(&[(443, 443)], rule("out", 100, Action::Allow))),
    ];
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, rules);
    assert_eq!((sample.ingress("10.1.0.5", TCP, 80), sample.ingress("10.1.0.5", TCP, 443)), (Allow, Drop));
    assert_eq!((sample.egress("10.1.0.5", TCP, 80), sample.egress("10.1.0.5", TCP, 443)), (Drop, Allow));
    let plan = sample.compile().plan;
    let endpoint = &plan.endpoints[&key("e")];
    assert_ne!(endpoint.egress_slot, endpoint.ingress_slot);
    let ids: BTreeSet<&RuleId> = plan.rules.keys().collect();
    assert_eq!(ids.len(), 2, "each rule has a number of its own");
}

/// Row 87.
#[test]
fn a_named_port_took_the_wrong_protocol() {
    let named = Rule { named_ports: vec!["dns".parse().unwrap()], ..rule("r", 100, Action::Allow) };
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .port("e", "dns", Protocol::Udp, 53)
        .group("g", 1, vec![named]);
    assert_eq!((sample.ingress("10.1.0.5", UDP, 53), sample.ingress("10.1.0.5", TCP, 53)), (Allow, Drop));
    sample.edit_group("g").rules[0].protocol = Protocol::Tcp;
    assert_eq!((sample.ingress("10.1.0.5", UDP, 53), sample.ingress("10.1.0.5", TCP, 53)), (Drop, Drop));
}

/// Row 91.
#[test]
fn one_bad_object_stopped_its_neighbours() {
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("no-address", &[], &["g"])
        .endpoint("outside", &["172.16.0.1"], &["g"])
        .endpoint("same-address", &["10.1.0.10"], &["g"])
        .endpoint("gateway", &["10.1.0.1"], &["g"])
        .endpoint("unknown-group", &["10.1.0.20"], &["nope"])
        .endpoint("unknown-subnet", &["10.1.0.21"], &["g"])
        .endpoint("unknown-node", &["10.1.0.22"], &["g"])
        .group(
            "g",
            1,
            vec![
                tcp(&[(80, 80)], rule("good", 100, Action::Allow)),
                with_remote(Remote::CidrGroup("nope".parse().unwrap()), rule("bad-allow", 1, Action::Allow)),
            ],
        );
    sample.edit("unknown-subnet").subnet = "nope".parse().unwrap();
    sample.edit("unknown-node").node = "nope".parse().unwrap();
    let blue: VpcName = "blue".parse().unwrap();
    sample
        .world
        .vpcs
        .insert(blue.clone(), Vpc { name: blue.clone(), vni: None, default_policy: DefaultPolicy::Allow });
    let Compilation { plan, conditions } = sample.compile();
    let has = |name: &str, reason| {
        let object = ObjectRef::Endpoint { endpoint: key(name) };
        assert!(
            conditions.iter().any(|c| c.object == object && c.reason == reason),
            "{name}: {conditions:#?}"
        );
    };
    has("no-address", ConditionReason::NotAllocated);
    has("outside", ConditionReason::Invalid);
    has("same-address", ConditionReason::Conflict);
    has("gateway", ConditionReason::Conflict);
    has("unknown-group", ConditionReason::DanglingReference);
    has("unknown-subnet", ConditionReason::DanglingReference);
    has("unknown-node", ConditionReason::DanglingReference);
    assert!(conditions.iter().any(|c| c.object == ObjectRef::Vpc { vpc: blue.clone() }));
    assert!(
        conditions
            .iter()
            .any(|c| matches!(&c.object, ObjectRef::Rule { rule, .. } if rule.as_str() == "bad-allow"))
    );
    let names: Vec<&str> = plan.endpoints.keys().map(|k| k.name.as_str()).collect();
    assert_eq!(names, ["e", "unknown-group"], "what is whole works, what is not is left out");
    assert_eq!(sample.ingress("10.1.0.5", TCP, 80), Allow);
    assert_eq!(sample.ingress("10.1.0.5", TCP, 81), Drop);
    assert_eq!(
        sample.verdict("unknown-group", Direction::Ingress, "10.1.0.5", TCP, 80),
        Drop,
        "fails closed"
    );
}

/// Row 93.
#[test]
fn the_host_could_not_reach_its_own_endpoints() {
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &["g"]).group("g", 1, vec![]);
    let ask = |sample: &mut Sample| {
        let plan = sample.compile().plan;
        let query = Query {
            vpc: red(),
            source: Party::Address(ip("10.1.0.1")),
            destination: Party::Endpoint("e".parse().unwrap()),
            protocol: TCP,
            port: PortQuery::Port(80),
        };
        let ingress = explain(&sample.world, &plan, &query).unwrap().ingress.unwrap();
        (ingress.verdict, ingress.decided_by, plan.endpoints[&key("e")].judge_host)
    };
    assert_eq!(ask(&mut sample), (Drop, DecidedBy::Default, true));
    sample.edit("e").allow_localhost = AllowLocalhost::Always;
    assert_eq!(ask(&mut sample), (Allow, DecidedBy::AllowLocalhost, false));
}

/// A CIDR means addresses, workloads included (semantics.md section 2).
#[test]
fn a_cidr_did_not_match_workloads() {
    let rules = vec![with_remote(cidr("10.1.0.0/24"), rule("r", 100, Action::Allow))];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("in", &["10.1.0.5"], &[])
        .endpoint("out", &["10.1.1.5"], &[])
        .group("g", 1, rules);
    assert_eq!((sample.ingress("10.1.0.5", TCP, 80), sample.ingress("10.1.1.5", TCP, 80)), (Allow, Drop));
    assert_eq!(sample.ingress("10.1.0.1", TCP, 80), Allow, "the gateway's address, too");
}

/// Two VPCs with the same addresses never meet in an identity, a slot or an ipcache entry.
#[test]
fn two_tenants_with_the_same_addresses_shared_numbers() {
    let rules = vec![with_remote(cidr("10.1.0.5/32"), rule("r", 100, Action::Allow))];
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("peer", &["10.1.0.5"], &["g"])
        .group("g", 1, rules);
    let blue: VpcName = "blue".parse().unwrap();
    let mut world = sample.world.clone();
    world.vpcs.insert(
        blue.clone(),
        Vpc { name: blue.clone(), vni: Vni::new(8), default_policy: DefaultPolicy::Allow },
    );
    for subnet in sample.world.subnets.values() {
        let subnet = Subnet { vpc: blue.clone(), ..subnet.clone() };
        world.subnets.insert((blue.clone(), subnet.name.clone()), subnet);
    }
    for endpoint in sample.world.endpoints.values() {
        let endpoint = Endpoint { vpc: blue.clone(), ..(**endpoint).clone() };
        world.endpoints.insert(endpoint.key(), endpoint.into());
    }
    for group in sample.world.security_groups.values() {
        let group = SecurityGroup { vpc: blue.clone(), ..group.clone() };
        world.security_groups.insert((blue.clone(), group.name.clone()), group);
    }
    sample.world = world;
    let plan = sample.compile().plan;
    let of = |vpc: u32| -> (BTreeSet<Identity>, BTreeSet<PolicySlot>) {
        let peers = plan.ipcache.iter().filter(|((id, _), _)| id.0 == vpc).map(|(_, p)| p.identity);
        let slots =
            plan.endpoints.values().filter(|e| e.vpc.0 == vpc).flat_map(|e| [e.egress_slot, e.ingress_slot]);
        (peers.filter(|i| i.0 >= 256).collect(), slots.collect())
    };
    let (red, blue) = (of(7), of(8));
    assert!(!red.0.is_empty() && !blue.0.is_empty());
    assert!(red.0.is_disjoint(&blue.0) && red.1.is_disjoint(&blue.1), "{red:?} {blue:?}");
}
