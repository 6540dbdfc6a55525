//! Names of every kind on either side of `explain`, over a core in memory.

use flowloom_api::v1::{ErrorCode, EventFilter, ExplainRequest, Verdict};

use super::*;
use crate::tests::Node;

/// Pods as Kubernetes and the runtime make them, and a VPC that is called as a namespace is.
const DOCUMENT: &str = "
version: 1
nodes: [{name: n1, address: 192.0.2.1}, {name: n2, address: 192.0.2.2}]
vpcs: [{name: red, vni: 7}, {name: prod, vni: 8}]
subnets:
  - {name: pods, vpc: default, cidr: 10.244.0.0/24}
  - {name: r, vpc: red, cidr: 10.0.0.0/24}
  - {name: p, vpc: prod, cidr: 10.0.0.0/24}
security_groups:
  - name: db
    vpc: default
    tier: 1
    rules: [{id: front, priority: 1, direction: ingress, protocol: tcp, ports: [{from: 5432, to: 5432}], remote_cidr: 10.244.0.20/32, action: allow}]
endpoints:
  - {name: shop.front-0, vpc: default, subnet: pods, node: n1, ip: 10.244.0.20, labels: {k8s.pod.namespace: shop, k8s.pod.name: front-0}}
  - {name: shop.db-0, vpc: default, subnet: pods, node: n1, ip: 10.244.0.21, security_groups: [db]}
  - {name: shop.db-1, vpc: default, subnet: pods, node: n2, ip: 10.244.0.22}
  - {name: prod.web, vpc: default, subnet: pods, node: n1, ip: 10.244.0.23}
  - {name: web, vpc: prod, subnet: p, node: n1, ip: 10.0.0.2}
  - {name: a, vpc: red, subnet: r, node: n1, ip: 10.0.0.2}
load_balancers:
  - name: shop.db
    vpc: default
    vip: 10.96.0.9
    ports:
      - {port: 5432, backends: [{ip: 10.244.0.21, port: 5432}, {ip: 10.244.0.22, port: 5432, healthy: false}]}
      - {port: 53, protocol: udp, backends: [{ip: 10.244.0.21, port: 5353}]}
      - {port: 54, protocol: udp}
  - {name: shop.none, vpc: default, vip: 10.96.0.10, ports: [{port: 80}]}
";

fn core(node: &Node) -> Core {
    node.agent()
}

fn explain(
    core: &mut Core,
    from: &str,
    to: &str,
    what: (&str, Option<u16>),
) -> Result<v1::Explanation, ApiError> {
    core.explain(&ExplainRequest {
        vpc: String::new(),
        from: from.into(),
        to: to.into(),
        protocol: what.0.into(),
        port: what.1,
        icmp_type: None,
        icmp_code: None,
        family: None,
    })
}

#[test]
fn a_pod_is_found_by_namespace_and_name_and_a_vpc_of_that_name_comes_first() {
    let node = Node::new(Some(DOCUMENT));
    let core = core(&node);
    let key = |text: &str| Meant::Endpoint(text.parse().unwrap());
    for (side, expected) in [
        ("shop/front-0", "default/shop.front-0"),
        ("pod/shop/front-0", "default/shop.front-0"),
        ("default/shop.front-0", "default/shop.front-0"),
        ("shop.front-0", "default/shop.front-0"),
        ("prod/web", "prod/web"),
        ("pod/prod/web", "default/prod.web"),
        ("red/a", "red/a"),
    ] {
        assert_eq!(core.meant(&side.parse().unwrap(), None).map(|(_, m)| m), Ok(key(expected)), "{side}");
    }
    // The other side's VPC is that of a side without one.
    let sides = core.sides("", "a", "red/10.0.0.9").unwrap();
    assert_eq!((sides.vpc.as_str(), sides.from), ("red", key("red/a")));
    for (vpc, from, to) in [("", "red/a", "shop/front-0"), ("red", "shop/front-0", "svc/shop/db")] {
        let e = core.sides(vpc, from, to).unwrap_err();
        assert!(e.code == ErrorCode::InvalidRequest && e.message.contains("one VPC"), "{e:?}");
    }
}

#[test]
fn what_is_not_there_is_answered_with_what_is_near() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = core(&node);
    for (side, near) in [
        ("shop/frontt-0", "did you mean shop/front-0?"),
        ("red/b", "did you mean red/a?"),
        ("rde/10.0.0.1", "did you mean red?"),
        ("svc/shop/dbb", "did you mean shop/db?"),
        // A Service was meant, and is.
        ("shop/db", "write svc/shop/db"),
    ] {
        let e = core.meant(&side.parse().unwrap(), None).unwrap_err();
        assert!(e.code == ErrorCode::NotFound && e.message.contains(near), "{side}: {}", e.message);
    }
    assert!(core.service("shop", "bd").unwrap_err().message.contains("did you mean shop/db?"));
}

#[test]
fn a_service_is_judged_by_its_backends_in_use() {
    let node = Node::new(Some(DOCUMENT));
    let mut core = core(&node);
    let open = explain(&mut core, "shop/front-0", "svc/shop/db", ("tcp", None)).unwrap();
    let side = open.service.as_ref().unwrap();
    assert_eq!(
        (side.service.as_str(), side.ip.to_string().as_str(), side.port),
        ("shop/db", "10.96.0.9", 5432)
    );
    let backends: Vec<_> = side.backends.iter().map(|b| (b.ip.to_string(), b.used, b.verdict)).collect();
    assert_eq!(
        backends,
        [("10.244.0.21".into(), true, Some(Verdict::Allow)), ("10.244.0.22".into(), false, None)]
    );
    assert_eq!(open.verdict, Verdict::Allow);
    assert_eq!(open.ingress.unwrap().endpoint, "default/shop.db-0");

    let shut = explain(&mut core, "pod/prod/web", "svc/shop/db", ("tcp", Some(5432))).unwrap();
    assert_eq!(shut.verdict, Verdict::Drop);
    assert!(shut.summary.starts_with("svc/shop/db by 0 of 1 backends"), "{}", shut.summary);
    // The port behind the Service is what policies see.
    let dns = explain(&mut core, "shop/front-0", "svc/shop/db", ("udp", Some(53))).unwrap();
    assert_eq!((dns.service.unwrap().backends[0].port, dns.verdict), (5353, Verdict::Drop));
    let none = explain(&mut core, "shop/front-0", "svc/shop/none", ("tcp", None)).unwrap();
    assert_eq!((none.verdict, none.service.unwrap().answer.as_str()), (Verdict::Reject, "refused"));

    let e = explain(&mut core, "shop/front-0", "svc/shop/db", ("udp", None)).unwrap_err();
    assert!(e.message.contains("53, 54"), "{}", e.message);
    let e = explain(&mut core, "shop/front-0", "svc/shop/db", ("tcp", Some(80))).unwrap_err();
    assert!(e.message.contains("5432"), "{}", e.message);
    // As a sender it stands for one of its backends.
    let back = explain(&mut core, "svc/shop/db", "shop/front-0", ("tcp", Some(80))).unwrap();
    assert_eq!(back.egress.unwrap().endpoint, "default/shop.db-0");
}

fn event(src: &str, src_port: u16, dst: &str, dst_port: u16, names: [Option<&str>; 2]) -> v1::Event {
    let named = |n: Option<&str>| n.map(|n| v1::Named::new(n, 0));
    v1::Event {
        seq: 1,
        time_ns: 0,
        kind: v1::EventKind::Verdict,
        verdict: Verdict::Allow,
        reason: None,
        vpc: v1::Named::new("default", 1),
        endpoint: None,
        peer_endpoint: None,
        direction: v1::Direction::Egress,
        hook: String::new(),
        family: 4,
        protocol: "tcp".into(),
        src: src.parse().unwrap(),
        src_port,
        src_endpoint: named(names[0]),
        src_identity: 0,
        dst: dst.parse().unwrap(),
        dst_port,
        dst_endpoint: named(names[1]),
        dst_identity: 0,
        icmp: None,
        tcp_flags: None,
        rule: None,
        len: 60,
        rate_limited: 0,
    }
}

#[test]
fn events_are_found_by_pod_service_and_address_on_the_side_asked_for() {
    let node = Node::new(Some(DOCUMENT));
    let core = core(&node);
    let there = event("10.244.0.20", 40000, "10.244.0.21", 5432, [Some("shop.front-0"), Some("shop.db-0")]);
    let back = event("10.244.0.21", 5432, "10.244.0.20", 40000, [Some("shop.db-0"), Some("shop.front-0")]);
    let asked = event("10.244.0.20", 40000, "10.96.0.9", 5432, [Some("shop.front-0"), None]);
    let other = event("10.244.0.20", 40000, "10.244.0.21", 9, [Some("shop.front-0"), Some("shop.db-0")]);
    let passing = |from: &str, to: &str, either: &str| {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let filter =
            EventFilter { from: some(from), to: some(to), endpoint: some(either), ..EventFilter::default() };
        let passes = core.passes_of(&filter).unwrap();
        [&there, &back, &asked, &other].map(|e| passes.event(e))
    };
    assert_eq!(passing("shop/front-0", "", ""), [true, false, true, true]);
    assert_eq!(passing("", "pod/shop/front-0", ""), [false, true, false, false]);
    assert_eq!(passing("shop/front-0", "svc/shop/db", ""), [true, false, true, false]);
    assert_eq!(passing("", "", "svc/shop/db"), [true, true, true, false]);
    assert_eq!(passing("", "10.244.0.21", ""), [true, false, false, true]);
    assert_eq!(passing("", "red/10.244.0.21", ""), [false; 4]);
    // A bare name is one of any VPC; a Pod may come later.
    assert_eq!(passing("", "", "shop.db-0"), [true, true, false, true]);
    assert_eq!(passing("shop/later-0", "", ""), [false; 4]);
}
