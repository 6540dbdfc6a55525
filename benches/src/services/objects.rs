//! The cluster's objects: Services of two endpoints each. Some of them are served by this node's two backends; the others' addresses lead nowhere.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};

use crate::k8s::server::Server;

const NODES: &str = "/api/v1/nodes";
const NAMESPACES: &str = "/api/v1/namespaces";
const SERVICES: &str = "/api/v1/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const RANGES: &str = "/apis/networking.k8s.io/v1/servicecidrs";

/// Pods of this node.
pub(super) const PODS: &str = "10.7.0.0/24";
/// Their gateway.
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 1);
/// Who asks.
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 10);
/// Who answers.
pub(super) const BACKENDS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 7, 0, 20), Ipv4Addr::new(10, 7, 0, 21)];
/// Where backends listen.
pub(super) const TARGET: u16 = 8080;
/// At most so many Services answer.
const LIVE: usize = 16;

/// Where a Service is.
pub(super) fn vip(at: usize) -> SocketAddr {
    (Ipv4Addr::new(10, 96, (at / 250) as u8, 1 + (at % 250) as u8), 80).into()
}

/// Two addresses that no other Service has.
pub(super) fn far(at: usize) -> [Ipv4Addr; 2] {
    [2 * at, 2 * at + 1].map(|n| Ipv4Addr::new(10, 128, 1 + (n / 250) as u8, 1 + (n % 250) as u8))
}

/// The Services of `services` that answer, in the order of their names: spread over all, the first and the last among them.
pub(super) fn live(services: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..LIVE).map(|i| i * services.saturating_sub(1) / (LIVE - 1)).collect();
    all.dedup();
    all
}

fn name(at: usize) -> String {
    format!("s{at:05}")
}

fn meta(at: usize) -> Value {
    json!({"namespace": format!("team-{}", at / 100), "name": name(at), "uid": format!("0f0e0d0c-0000-4000-8000-{at:012}"),
           "creationTimestamp": "2026-01-01T00:00:00Z"})
}

fn service(at: usize) -> Value {
    let ip = vip(at).ip();
    json!({"metadata": meta(at),
           "spec": {"type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
                    "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
                    "ports": [{"name": "http", "protocol": "TCP", "port": vip(at).port(), "targetPort": TARGET}]}})
}

fn slice(at: usize, addresses: [Ipv4Addr; 2], node: &str) -> Value {
    let mut metadata = meta(at);
    metadata["name"] = format!("{}-abcde", name(at)).into();
    metadata["labels"] = json!({"kubernetes.io/service-name": name(at)});
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|a| json!({"addresses": [a], "nodeName": node, "conditions": {"ready": true, "serving": true, "terminating": false}}))
        .collect();
    json!({"metadata": metadata, "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": TARGET}], "endpoints": endpoints})
}

/// Puts the node `n1` and its Services there.
pub(super) fn fill(server: &Server, node: Ipv4Addr, services: usize) {
    server.put(RANGES, json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}));
    server.put(
        NODES,
        json!({"metadata": {"name": "n1", "uid": "n1", "creationTimestamp": "2026-01-01T00:00:00Z"},
               "spec": {"podCIDR": "10.8.0.0/24", "podCIDRs": ["10.8.0.0/24"]},
               "status": {"addresses": [{"type": "InternalIP", "address": node}],
                          "conditions": [{"type": "NetworkUnavailable", "status": "False", "reason": "FlowloomIsUp"}]}}),
    );
    for team in 0..=services / 100 {
        let name = format!("team-{team}");
        let labels = json!({"kubernetes.io/metadata.name": name});
        server.put(NAMESPACES, json!({"metadata": {"name": name, "labels": labels}}));
    }
    let live = live(services);
    for at in 0..services {
        if live.contains(&at) {
            server.put(SLICES, slice(at, BACKENDS, "n1"));
        } else {
            server.put(SLICES, slice(at, far(at), "n2"));
        }
        server.put(SERVICES, service(at));
    }
    // Of the Service that comes and goes: one object changes at a time.
    server.put(SLICES, slice(services, BACKENDS, "n1"));
}

/// One more Service that answers.
pub(super) fn add(server: &Server, at: usize) {
    server.put(SERVICES, service(at));
}

/// And gone.
pub(super) fn remove(server: &Server, at: usize) {
    server.remove(SERVICES, service(at));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_service_has_addresses_of_its_own() {
        let all: BTreeSet<_> = (0..=10_000).map(vip).collect();
        assert_eq!(all.len(), 10_001);
        let backends: BTreeSet<_> = (0..=10_000).flat_map(far).collect();
        assert_eq!(backends.len(), 20_002);
        assert!(BACKENDS.iter().chain([&CLIENT, &GATEWAY]).all(|a| !backends.contains(a)));
    }

    #[test]
    fn the_first_and_the_last_service_answer() {
        assert_eq!(live(1), [0]);
        let many = live(10_000);
        assert_eq!((many.len(), many[0], many[15]), (LIVE, 0, 9_999));
        assert!(many.is_sorted());
    }
}
