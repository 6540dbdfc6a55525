//! The truth table of semantics.md section 3, row by row, IPv4 and IPv6.

use flowloom_model::{Action, DefaultPolicy, Protocol, Rule};

use super::sample::{Sample, cidr, red, rule};
use crate::Verdict::{self, Allow, Drop, Reject};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Peers of the rows in both families: the address, the /8 and the /32 around it, and everything.
const FAMILIES: [[&str; 4]; 2] = [
    ["10.1.2.3", "10.0.0.0/8", "10.1.2.3/32", "0.0.0.0/0"],
    ["fd00:1::2:3", "fd00::/8", "fd00:1::2:3/128", "::/0"],
];

fn to(remote: &str, id: &str, priority: u16, action: Action) -> Rule {
    Rule { remote: cidr(remote), ..rule(id, priority, action) }
}

fn on(protocol: Protocol, ports: &[(u16, u16)], rule: Rule) -> Rule {
    Rule { protocol, ports: ports.to_vec(), ..rule }
}

fn sample(groups: Vec<(u8, Vec<Rule>)>) -> Sample {
    let names: Vec<String> = (0..groups.len()).map(|n| format!("g{n}")).collect();
    let attached: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10", "fd00:1::10"], &attached);
    for (name, (tier, rules)) in names.iter().zip(groups) {
        sample = sample.group(name, tier, rules);
    }
    sample
}

#[test]
fn priority_beats_specificity() {
    for [peer, wide, narrow, _] in FAMILIES {
        let rules = vec![to(wide, "a", 100, Action::Allow), to(narrow, "b", 200, Action::Drop)];
        assert_eq!(sample(vec![(1, rules)]).ingress(peer, TCP, 80), Allow);
    }
}

#[test]
fn deny_first_at_equal_priority() {
    for [peer, wide, narrow, _] in FAMILIES {
        let rules = vec![to(narrow, "a", 100, Action::Allow), to(wide, "b", 100, Action::Drop)];
        assert_eq!(sample(vec![(1, rules)]).ingress(peer, TCP, 80), Drop);
    }
}

#[test]
fn reject_before_drop_at_equal_priority() {
    for [peer, wide, narrow, _] in FAMILIES {
        let rules = vec![to(narrow, "a", 100, Action::Drop), to(wide, "b", 100, Action::Reject)];
        assert_eq!(sample(vec![(1, rules)]).ingress(peer, TCP, 80), Reject);
    }
}

#[test]
fn tier_beats_priority() {
    for [peer, _, narrow, all] in FAMILIES {
        let groups =
            vec![(0, vec![to(all, "a", 16384, Action::Allow)]), (1, vec![to(narrow, "b", 1, Action::Drop)])];
        assert_eq!(sample(groups).ingress(peer, TCP, 80), Allow);
    }
}

#[test]
fn a_port_dropped_inside_an_allowed_range() {
    for [peer, ..] in FAMILIES {
        let rules = vec![
            on(Protocol::Tcp, &[(443, 443)], rule("a", 100, Action::Drop)),
            on(Protocol::Tcp, &[(80, 444)], rule("b", 200, Action::Allow)),
        ];
        let mut sample = sample(vec![(1, rules)]);
        let answers: Vec<Verdict> =
            [79, 80, 442, 443, 444, 445].map(|port| sample.ingress(peer, TCP, port)).into();
        assert_eq!(answers, [Drop, Allow, Allow, Drop, Allow, Drop]);
    }
}

#[test]
fn one_protocol_dropped_before_all_are_allowed() {
    for ([peer, ..], icmp) in FAMILIES.into_iter().zip([1, 58]) {
        let rules = vec![rule("a", 100, Action::Allow), on(Protocol::Tcp, &[], rule("b", 50, Action::Drop))];
        let mut sample = sample(vec![(1, rules)]);
        assert_eq!(sample.ingress(peer, TCP, 80), Drop);
        assert_eq!(sample.ingress(peer, UDP, 80), Allow);
        assert_eq!(sample.ingress(peer, icmp, 0x0800), Allow);
    }
}

#[test]
fn nothing_selects_the_endpoint() {
    for [peer, ..] in FAMILIES {
        let mut open = sample(vec![]);
        assert_eq!((open.ingress(peer, TCP, 80), open.egress(peer, TCP, 80)), (Allow, Allow));
        open.world.vpcs.get_mut(&red()).unwrap().default_policy = DefaultPolicy::Deny;
        assert_eq!((open.ingress(peer, TCP, 80), open.egress(peer, TCP, 80)), (Drop, Drop));
    }
}

#[test]
fn one_group_without_a_rule_for_the_direction() {
    for [peer, ..] in FAMILIES {
        let mut sample = sample(vec![(1, vec![rule("a", 100, Action::Allow)])]);
        assert_eq!((sample.ingress(peer, TCP, 80), sample.egress(peer, TCP, 80)), (Allow, Drop));
    }
}

#[test]
fn isolation_switched_off_by_the_only_group() {
    for [peer, ..] in FAMILIES {
        let mut sample = sample(vec![(1, vec![])]);
        sample.edit_group("g0").default_deny_ingress = Some(false);
        assert_eq!((sample.ingress(peer, TCP, 80), sample.egress(peer, TCP, 80)), (Allow, Drop));
    }
}

#[test]
fn isolation_switched_off_by_one_group_of_two() {
    for [peer, ..] in FAMILIES {
        let mut sample = sample(vec![(1, vec![]), (1, vec![])]);
        sample.edit_group("g0").default_deny_ingress = Some(false);
        assert_eq!(sample.ingress(peer, TCP, 80), Drop);
        sample.edit_group("g1").default_deny_ingress = Some(false);
        assert_eq!(sample.ingress(peer, TCP, 80), Allow);
    }
}

#[test]
fn pass_leaves_the_tier_and_log_allows() {
    for [peer, wide, ..] in FAMILIES {
        let tier0 = vec![to(wide, "a", 1, Action::Pass), rule("b", 2, Action::Drop)];
        let mut sample = sample(vec![(0, tier0), (1, vec![rule("c", 1, Action::Log)])]);
        assert_eq!(sample.ingress(peer, TCP, 80), Allow);
        sample.edit_group("g1").rules.clear();
        assert_eq!(sample.ingress(peer, TCP, 80), Drop);
        let outside = if peer.contains(':') { "2001:db8::1" } else { "8.8.8.8" };
        assert_eq!(sample.ingress(outside, TCP, 80), Drop);
    }
}
