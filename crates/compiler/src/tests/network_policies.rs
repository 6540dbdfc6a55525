//! NetworkPolicies as the Kubernetes source translates them: one group per policy, allow rules of one priority, peers by Pod labels and by
//! labels of their namespace.

use flowloom_model::{Action, Direction, Expression, Operator, Protocol, Remote, Rule, Selector};

use super::sample::{Sample, rule};
use crate::*;

const NAMESPACE: &str = "k8s.ns:kubernetes.io/metadata.name";
const TCP: u8 = 6;

fn selected(labels: &[(&str, String)], expressions: Vec<Expression>) -> Remote {
    let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    Remote::Selector(Selector { labels, expressions })
}

#[test]
fn hundreds_of_policies_on_one_pod_each_let_in_whom_they_name() {
    const POLICIES: u16 = 400;
    let name = |n: u16| format!("netpol.shop.p{n}");
    let names: Vec<String> = (0..POLICIES).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut sample = Sample::new().endpoint("e", &["10.1.0.10"], &names);
    for n in 0..POLICIES {
        let remote =
            selected(&[(NAMESPACE, format!("ns{}", n % 20)), ("app", format!("a{}", n % 10))], Vec::new());
        let allow = Rule {
            direction: Direction::Ingress,
            protocol: Protocol::Tcp,
            remote,
            ports: vec![(1000 + n, 1000 + n)],
            ..rule("r0", 1000, Action::Allow)
        };
        sample = sample.group(&name(n), 1, vec![allow]);
        sample.edit_group(&name(n)).default_deny_egress = Some(false);
    }
    for peer in 0..40 {
        let (at, called) = (format!("10.1.1.{peer}"), format!("peer-{peer}"));
        sample = sample
            .endpoint(&called, &[&at], &[])
            .label(&called, NAMESPACE, &format!("ns{}", peer % 20))
            .label(&called, "app", &format!("a{}", peer % 10));
    }
    // Peer 3 is app a3 of ns3: policies 3, 23, 43 ... name it, 13 (ns13) and 4 do not.
    for (port, verdict) in [
        (1003, Verdict::Allow),
        (1023, Verdict::Allow),
        (1383, Verdict::Allow),
        (1013, Verdict::Drop),
        (1004, Verdict::Drop),
    ] {
        assert_eq!(sample.ingress("10.1.1.3", TCP, port), verdict, "port {port}");
    }
    assert_eq!(sample.ingress("203.0.113.9", TCP, 1003), Verdict::Drop);
    assert_eq!(sample.egress("10.1.1.3", TCP, 1004), Verdict::Allow, "no policy isolates egress");
}

#[test]
fn namespaces_are_selected_by_their_labels_and_by_being_there() {
    let exists =
        |key: &str, operator| vec![Expression { key: key.to_owned(), operator, values: Default::default() }];
    let any_namespace = selected(&[], exists("k8s.pod.namespace", Operator::Exists));
    let untrusted = Expression {
        key: NAMESPACE.to_owned(),
        operator: Operator::NotIn,
        values: ["kube-system".to_owned(), "shop".to_owned()].into(),
    };
    let others = selected(&[("k8s.ns:team", "blue".to_owned())], vec![untrusted]);
    let rules = |remote: Remote, port: u16| Rule {
        protocol: Protocol::Tcp,
        remote,
        ports: vec![(port, port)],
        ..rule(&format!("r{port}"), 1000, Action::Allow)
    };
    let mut sample = Sample::new()
        .endpoint("e", &["10.1.0.10"], &["netpol.shop.p"])
        .group("netpol.shop.p", 1, vec![rules(any_namespace, 80), rules(others, 443)])
        .endpoint("pod", &["10.1.1.1"], &[])
        .label("pod", "k8s.pod.namespace", "shop")
        .label("pod", NAMESPACE, "shop")
        .label("pod", "k8s.ns:team", "blue")
        .endpoint("blue", &["10.1.1.2"], &[])
        .label("blue", "k8s.pod.namespace", "other")
        .label("blue", NAMESPACE, "other")
        .label("blue", "k8s.ns:team", "blue")
        .endpoint("vm", &["10.1.1.3"], &[]);
    let mut at = |peer: &str, port| sample.ingress(peer, TCP, port);
    assert_eq!((at("10.1.1.1", 80), at("10.1.1.1", 443)), (Verdict::Allow, Verdict::Drop));
    assert_eq!((at("10.1.1.2", 80), at("10.1.1.2", 443)), (Verdict::Allow, Verdict::Allow));
    assert_eq!((at("10.1.1.3", 80), at("10.1.1.3", 443)), (Verdict::Drop, Verdict::Drop));
    assert_eq!(at("203.0.113.9", 80), Verdict::Drop, "the world is in no namespace");
}
