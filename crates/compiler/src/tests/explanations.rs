//! `explain` says what the entries decide, and why.

use flowloom_model::{Action, Direction, NodeName, Protocol, Rule};

use super::sample::{Sample, by_label, cidr, ip, red, rule};
use super::{seed, worlds};
use crate::worldgen::{self, Rng};
use crate::*;

fn ask(
    sample: &mut Sample,
    source: Party,
    destination: Party,
    port: u16,
) -> Result<Explanation, ExplainError> {
    let plan = sample.compile().plan;
    let query = Query { vpc: red(), source, destination, protocol: 6, port: PortQuery::Port(port) };
    explain(&sample.world, &plan, &query)
}

fn endpoint(name: &str) -> Party {
    Party::Endpoint(name.parse().unwrap())
}

fn sample() -> Sample {
    let rules = vec![
        Rule {
            remote: by_label("app", "web"),
            protocol: Protocol::Tcp,
            ports: vec![(80, 90)],
            ..rule("web", 100, Action::Allow)
        },
        Rule { remote: cidr("10.1.0.5/32"), ..rule("bad", 200, Action::Reject) },
    ];
    Sample::new()
        .endpoint("e", &["10.1.0.10"], &["g"])
        .endpoint("web", &["10.1.0.5"], &[])
        .endpoint("v6", &["fd00:1::6"], &[])
        .label("web", "app", "web")
        .group("g", 1, rules)
}

#[test]
fn names_the_rule_and_says_why_the_others_do_not_match() {
    let answer = ask(&mut sample(), endpoint("web"), endpoint("e"), 85).unwrap();
    assert_eq!((answer.verdict, answer.source.address), (Verdict::Allow, ip("10.1.0.5")));
    let egress = answer.egress.unwrap();
    assert_eq!((egress.verdict, egress.decided_by), (Verdict::Allow, DecidedBy::Default));
    let ingress = answer.ingress.unwrap();
    assert!(
        matches!(&ingress.decided_by, DecidedBy::Rule { rule, tier: 1, priority: 100, .. } if rule.rule.as_str() == "web")
    );
    let why: Vec<&str> = ingress.candidates.iter().map(|c| c.why.as_str()).collect();
    assert_eq!(
        why,
        [
            "the peer's labels match; tcp/85 is in tcp/80-90; decides",
            "10.1.0.5 is in 10.1.0.5/32; any protocol; another rule decides",
        ]
    );
    assert_eq!(
        answer.summary,
        "egress of red/web allows: no rule matches; ingress of red/e allows: rule red/g/web (tier 1, priority 100)"
    );
    let answer = ask(&mut sample(), endpoint("web"), endpoint("e"), 91).unwrap();
    assert_eq!(answer.verdict, Verdict::Reject);
    let why: Vec<String> = answer.ingress.unwrap().candidates.into_iter().map(|c| c.why).collect();
    assert_eq!(why, ["tcp/91 is not tcp/80-90", "10.1.0.5 is in 10.1.0.5/32; any protocol; decides"]);
}

#[test]
fn answers_survive_json() {
    let answer = ask(&mut sample(), endpoint("web"), endpoint("e"), 85).unwrap();
    let text = serde_json::to_string(&answer).unwrap();
    assert_eq!(serde_json::from_str::<Explanation>(&text).unwrap(), answer);
}

#[test]
fn another_nodes_endpoint_is_judged_by_that_nodes_policy() {
    let mut sample = sample();
    sample.edit("e").node = "n2".parse::<NodeName>().unwrap();
    let answer = ask(&mut sample, endpoint("web"), endpoint("e"), 91).unwrap();
    let ingress = answer.ingress.unwrap();
    assert_eq!((ingress.verdict, ingress.local, ingress.slot), (Verdict::Reject, false, None));
    assert!(answer.egress.unwrap().local);
}

#[test]
fn says_what_is_wrong_with_a_question() {
    let error = |source, destination| ask(&mut sample(), source, destination, 80).unwrap_err().to_string();
    assert_eq!(error(endpoint("nope"), endpoint("e")), "endpoint red/nope does not exist");
    assert_eq!(
        error(endpoint("v6"), endpoint("e")),
        "endpoint v6 and endpoint e have no address family in common"
    );
    assert_eq!(
        error(Party::Address(ip("8.8.8.8")), Party::Address(ip("9.9.9.9"))),
        "neither 8.8.8.8 nor 9.9.9.9 is an endpoint of the vpc: no policy decides"
    );
}

#[test]
fn agrees_with_the_oracle_in_random_worlds() {
    let seed = seed();
    let node = worldgen::local_node();
    let mut asked = 0u64;
    for number in 0..worlds(120) {
        let mut rng = Rng::new(seed.wrapping_add(number));
        let world = worldgen::world(&mut rng);
        let plan = compile(&world, &node, &mut Numbers::default()).plan;
        for endpoint in plan.endpoints.values() {
            for _ in 0..6 {
                let packet = worldgen::packet(&world, &endpoint.key, &mut rng);
                let direction = *rng.pick(&[Direction::Egress, Direction::Ingress]);
                let own = endpoint.ips.iter().find(|ip| ip.is_ipv4() == packet.peer.is_ipv4());
                let Some(own) = own.filter(|own| **own != packet.peer) else { continue };
                let (own, peer) = (Party::Address(*own), Party::Address(packet.peer));
                let (source, destination) =
                    if direction == Direction::Egress { (own, peer) } else { (peer, own) };
                let [kind, code] = packet.port.to_be_bytes();
                let port = match packet.protocol {
                    1 | 58 => PortQuery::Icmp { kind, code },
                    _ => PortQuery::Port(packet.port),
                };
                let query = Query {
                    vpc: endpoint.key.vpc.clone(),
                    source,
                    destination,
                    protocol: packet.protocol,
                    port,
                };
                let answer = explain(&world, &plan, &query).unwrap();
                let judged =
                    if direction == Direction::Egress { answer.egress } else { answer.ingress }.unwrap();
                assert_eq!(judged.endpoint, endpoint.key);
                let context = format!("FLOWLOOM_SEED={} {query:?}", seed.wrapping_add(number));
                if oracle::host_passes(&world, &node, &endpoint.key, direction, packet.peer) {
                    assert_eq!(
                        (judged.verdict, &judged.decided_by),
                        (Verdict::Allow, &DecidedBy::AllowLocalhost),
                        "{context}"
                    );
                    continue;
                }
                let expected = oracle::decide(&world, &node, &endpoint.key, direction, packet);
                let rule = match &judged.decided_by {
                    DecidedBy::Rule { rule, .. } => Some(rule.clone()),
                    _ => None,
                };
                assert_eq!((judged.verdict, &rule), (expected.verdict, &expected.rule), "{context}");
                assert_eq!((judged.log, judged.stateful), (expected.log, expected.stateful), "{context}");
                let deciding: Vec<&Candidate> = judged.candidates.iter().filter(|c| c.decides).collect();
                assert!(deciding.iter().all(|c| c.matches && Some(&c.rule) == rule.as_ref()), "{context}");
                assert_eq!(deciding.len(), usize::from(rule.is_some()), "{context}");
                asked += 1;
            }
        }
    }
    assert!(asked > worlds(1000), "{asked}");
}
