//! Nodes whose pod CIDRs are in somebody's way are refused aloud; those that were there first stay.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use flowloom_k8s::{Held, LoadBalancer, Node, ObjectName, Options, Translator};
use serde_json::{Value, json};

fn put<T: Held>(t: &mut Translator, object: &Value) {
    let meta = &object["metadata"];
    let name = ObjectName::new(meta["namespace"].as_str().unwrap_or(""), meta["name"].as_str().unwrap());
    t.put::<T>(&name, T::decode(&object.to_string()));
}

/// Born on that day of January, with 192.0.2.N and these pod CIDRs.
fn node(number: u8, day: u8, cidrs: &[&str]) -> Value {
    json!({"metadata": {"name": format!("n{number}"), "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z")},
        "spec": {"podCIDRs": cidrs},
        "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{number}")}]}})
}

/// Nodes whose subnets came (true) and went.
fn subnets(t: &mut Translator) -> Vec<(String, bool)> {
    let delta = t.delta();
    delta.subnets.iter().map(|((_, name), subnet)| (name.to_string(), subnet.is_some())).collect()
}

fn told(t: &Translator) -> Vec<String> {
    t.faults().iter().map(|f| format!("{} {}: {}", f.name.name, f.reason, f.message)).collect()
}

fn row(name: &str, there: bool) -> (String, bool) {
    (format!("node.{name}"), there)
}

#[test]
fn a_pod_cidr_in_the_way_of_nodes_or_services_is_refused_aloud() {
    let mut t = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
    put::<LoadBalancer>(
        &mut t,
        &json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": [{"port": 80}]}}),
    );
    put::<Node>(&mut t, &node(1, 1, &["10.1.1.0/24", "fd01:1::/64"]));
    put::<Node>(&mut t, &node(2, 2, &["10.1.2.0/24"]));
    // Inside the one of an older node, around a node's address, around a Service's, of the same range in its second family, and none yet.
    put::<Node>(&mut t, &node(3, 3, &["10.1.2.128/25"]));
    put::<Node>(&mut t, &node(4, 3, &["192.0.2.0/28"]));
    put::<Node>(&mut t, &node(5, 3, &["10.96.0.0/24"]));
    put::<Node>(&mut t, &node(6, 3, &["10.1.6.0/24", "fd01:1::/64"]));
    put::<Node>(&mut t, &node(7, 3, &[]));
    let expected: Vec<_> = (1..=7).map(|n| row(&format!("n{n}"), n <= 2)).collect();
    assert_eq!(subnets(&mut t), expected);
    let told_now = told(&t);
    assert_eq!(told_now.len(), 5, "{told_now:#?}");
    for (line, parts) in told_now.iter().zip([
        ["n3 PodCidrConflict", "10.1.2.128/25 overlaps 10.1.2.0/24 of node n2"],
        ["n4 PodCidrConflict", "192.0.2.0/28 covers 192.0.2.1, an address of node n1"],
        ["n5 PodCidrConflict", "10.96.0.0/24 covers 10.96.0.7, the address of a Service"],
        ["n6 PodCidrConflict", "fd01:1::/64 overlaps fd01:1::/64 of node n1"],
        ["n7 NoPodCidr", "controller manager allocates them"],
    ]) {
        assert!(parts.iter().all(|p| line.contains(p)), "{line} lacks one of {parts:?}");
    }
    // What was in the way goes.
    t.remove::<Node>(&ObjectName::new("", "n2"));
    let now = subnets(&mut t);
    assert!(now.contains(&row("n2", false)) && now.contains(&row("n3", true)), "{now:?}");
    assert!(told(&t).iter().all(|line| !line.starts_with("n3")), "{:?}", told(&t));
}

#[test]
fn a_node_in_use_stays_when_a_conflict_comes_later() {
    let mut t = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
    put::<Node>(&mut t, &node(2, 2, &["10.96.0.0/24"]));
    assert_eq!(subnets(&mut t), [row("n2", true)]);
    put::<LoadBalancer>(
        &mut t,
        &json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": [{"port": 80}]}}),
    );
    put::<Node>(&mut t, &node(3, 3, &["10.96.0.0/25"]));
    assert_eq!(subnets(&mut t), [row("n2", true), row("n3", false)]);
    let shown = told(&t);
    assert!(shown.len() == 2 && shown.iter().all(|l| l.contains("PodCidrConflict")), "{shown:?}");
    // Nor is an older node given what this one uses: two would have it.
    put::<Node>(&mut t, &node(1, 1, &["10.96.0.64/26"]));
    assert_eq!(subnets(&mut t), [row("n1", false), row("n2", true), row("n3", false)]);
    assert!(told(&t)[0].starts_with("n1 PodCidrConflict"), "{:?}", told(&t));
}
