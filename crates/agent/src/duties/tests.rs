use flowloom_model::{Format, parse};
use serde_json::json;

use super::*;

/// Routes of `n1`, of a world where `n2` has a subnet of its own with many endpoints, and one of them runs on `n3`; `floating` is no node's.
fn of_direct(endpoints: u8) -> BTreeSet<HostRoute> {
    let endpoint = |name: String, subnet: &str, node: &str, ip: String| json!({"vpc": "default", "name": name, "subnet": subnet, "node": node, "ip": ip});
    let mut all: Vec<_> = (0..endpoints)
        .map(|n| endpoint(format!("pod-{n}"), "two", "n2", format!("10.2.0.{}", 10 + n)))
        .collect();
    all.push(endpoint("moved".into(), "two", "n3", "10.2.0.9".into()));
    all.push(endpoint("loose".into(), "floating", "n2", "10.9.0.9".into()));
    all.push(endpoint("own".into(), "floating", "n1", "10.9.0.10".into()));
    let nodes: Vec<_> =
        (1..=3).map(|n| json!({"name": format!("n{n}"), "address": format!("192.0.2.{n}")})).collect();
    let document = json!({
        "version": 1, "nodes": nodes, "endpoints": all,
        "subnets": [{"vpc": "default", "name": "two", "cidr": "10.2.0.0/24", "node": "n2"},
                    {"vpc": "default", "name": "floating", "cidr": "10.9.0.0/24"}],
    });
    let world = parse(document.to_string().as_bytes(), Format::Json).unwrap().world;
    let config = Config::parse("node: n1\nroutes: direct\n").unwrap();
    routes(&config, &world, &NodePlan::default(), &BTreeMap::new())
}

#[test]
fn every_pod_of_another_node_had_a_host_route_beside_its_nodes_route() {
    let mut shown: Vec<_> = of_direct(200).into_iter().map(|r| (r.destination.to_string(), r.via)).collect();
    let node = |n: u8| Via::Node(format!("192.0.2.{n}").parse().unwrap());
    // What a route of its node does not lead to keeps one of its own.
    let expected = [
        ("10.2.0.0/24".to_owned(), node(2)),
        ("10.2.0.9/32".to_owned(), node(3)),
        ("10.9.0.0/24".to_owned(), Via::Nowhere),
        ("10.9.0.9/32".to_owned(), node(2)),
    ];
    shown.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(shown, expected);
}
