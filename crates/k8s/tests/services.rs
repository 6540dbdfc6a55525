//! Services and EndpointSlices as the API has them, and what they become; Pods that are none of ours.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::net::IpAddr;
use std::sync::Arc;

use flowloom_k8s::{
    EndpointSlice, Held, LoadBalancer, Namespace, Node, ObjectName, Options, Pod, Translator,
};
use flowloom_model::BackendState::{NotReady, Ready, Terminating};
use flowloom_model::{BackendState, Protocol, Service};
use serde_json::{Value, json};

fn translator() -> Translator {
    Translator::new(Options { node: "n1".parse().unwrap() }).unwrap()
}

fn put<T: Held>(t: &mut Translator, object: &Value) {
    let meta = &object["metadata"];
    let name = ObjectName::new(meta["namespace"].as_str().unwrap_or(""), meta["name"].as_str().unwrap());
    t.put::<T>(&name, T::decode(&object.to_string()));
}

/// `shop/web` with these fields on top; port `http` 80.
fn web(spec: Value, labels: Value) -> Value {
    let mut service = json!({
        "metadata": {"name": "web", "namespace": "shop", "labels": labels},
        "spec": {"type": "ClusterIP", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"],
                 "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}]},
    });
    for (key, value) in spec.as_object().unwrap() {
        service["spec"][key] = value.clone();
    }
    service
}

/// A slice of `shop/web`; each endpoint is an address and its conditions.
fn slice(name: &str, endpoints: &[(&str, Value)]) -> Value {
    let endpoint = |(address, conditions): &(&str, Value)| json!({"addresses": [address, "10.9.9.9"], "conditions": conditions, "nodeName": "n2"});
    json!({
        "metadata": {"name": name, "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

/// What `shop/web` is in force as; none = nobody's here.
fn made(t: &mut Translator) -> Option<Arc<Service>> {
    let delta = t.delta();
    delta.services.into_iter().find(|((_, name), _)| name.as_str() == "shop.web").and_then(|(_, s)| s)
}

fn of(service: &Value) -> Option<Arc<Service>> {
    let mut t = translator();
    put::<LoadBalancer>(&mut t, service);
    put::<EndpointSlice>(&mut t, &slice("web-1", &[("10.1.2.1", json!({"ready": true}))]));
    made(&mut t)
}

fn states(service: &Service) -> Vec<(String, BackendState)> {
    service.ports[0].backends.iter().map(|((ip, _), b)| (ip.to_string(), b.state)).collect()
}

#[test]
fn a_service_of_another_proxy_or_none_is_left_alone() {
    assert!(of(&web(json!({}), json!({}))).is_some());
    for label in ["service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"] {
        assert_eq!(of(&web(json!({}), json!({ label: "" }))), None, "{label}");
    }
    assert_eq!(of(&web(json!({"clusterIP": "None", "clusterIPs": ["None"]}), json!({}))), None);
    assert_eq!(of(&web(json!({"type": "ExternalName", "externalName": "x.example"}), json!({}))), None);
    // The label may come and go while it is served.
    let mut t = translator();
    let labelled = web(json!({}), json!({"service.kubernetes.io/service-proxy-name": "other"}));
    for (object, served) in
        [(web(json!({}), json!({})), true), (labelled, false), (web(json!({}), json!({})), true)]
    {
        put::<LoadBalancer>(&mut t, &object);
        assert_eq!(made(&mut t).is_some(), served);
    }
    // Slices that another proxy serves have no backends for us.
    let mut foreign = slice("web-2", &[("10.1.2.9", json!({"ready": true}))]);
    foreign["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = "other".into();
    put::<EndpointSlice>(&mut t, &foreign);
    put::<LoadBalancer>(&mut t, &web(json!({"sessionAffinity": "ClientIP"}), json!({})));
    assert_eq!(made(&mut t).unwrap().ports[0].backends.len(), 0);
}

#[test]
fn every_field_of_a_service_is_taken() {
    let mut object = web(
        json!({
            "type": "LoadBalancer", "clusterIPs": ["10.96.0.7", "fd96::7"], "externalIPs": ["198.51.100.9"],
            "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000,
            "loadBalancerSourceRanges": [" 192.0.2.0/24", "2001:db8::1/64"], "sessionAffinity": "ClientIP",
            "ports": [{"name": "http", "port": 80, "nodePort": 30080}, {"name": "dns", "protocol": "UDP", "port": 53},
                      {"name": "sig", "protocol": "SCTP", "port": 9}],
        }),
        json!({}),
    );
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "203.0.113.5"}, {"hostname": "x.example"},
        {"ip": "203.0.113.6", "ipMode": "Proxy"}, {"ip": "203.0.113.7", "ipMode": "VIP"}]}});
    let service = of(&object).unwrap();
    let shown =
        |ips: &std::collections::BTreeSet<IpAddr>| ips.iter().map(IpAddr::to_string).collect::<Vec<_>>();
    assert_eq!(shown(&service.cluster_ips), ["10.96.0.7", "fd96::7"]);
    assert_eq!(shown(&service.external_ips), ["198.51.100.9"]);
    assert_eq!(
        shown(&service.load_balancer_ips),
        ["203.0.113.5", "203.0.113.7"],
        "a proxy's address is its own"
    );
    assert!(service.internal_local && service.external_local);
    assert_eq!((service.affinity, service.health_check_port), (Some(10800), Some(31000)));
    let ranges: Vec<_> = service.source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["192.0.2.0/24", "2001:db8::/64"]);
    let ports: Vec<_> = service.ports.iter().map(|p| (p.protocol, p.port, p.node_port)).collect();
    assert_eq!(
        ports,
        [(Protocol::Tcp, 80, Some(30080)), (Protocol::Udp, 53, None), (Protocol::Sctp, 9, None)]
    );
    let backends: Vec<_> = service.ports.iter().map(|p| p.backends.len()).collect();
    assert_eq!(backends, [1, 0, 0], "a backend is of its port's name and protocol only");
    let with = |seconds: u32| json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}});
    assert_eq!(of(&web(with(30), json!({}))).unwrap().affinity, Some(30));
    let plain = of(&web(json!({}), json!({}))).unwrap();
    assert!(plain.affinity.is_none() && !plain.internal_local && !plain.external_local);
}

/// Conditions as the API reference of EndpointSlice has them; absent `ready` is yes, absent `serving` is as `ready`. With
/// publishNotReadyAddresses the server writes `ready: true`, while a Pod is ending, too.
#[test]
fn conditions_of_endpoints_say_who_takes_connections() {
    let rows = [
        ("10.1.2.1", json!({}), Ready),
        ("10.1.2.2", json!({"ready": null, "serving": null, "terminating": null}), Ready),
        ("10.1.2.3", json!({"ready": false}), NotReady),
        ("10.1.2.4", json!({"ready": false, "serving": true, "terminating": true}), Terminating),
        ("10.1.2.5", json!({"ready": false, "serving": false, "terminating": true}), NotReady),
        ("10.1.2.6", json!({"ready": true, "serving": false, "terminating": true}), Ready),
        ("10.1.2.7", json!({"ready": false, "serving": true, "terminating": false}), NotReady),
    ];
    let mut t = translator();
    put::<LoadBalancer>(&mut t, &web(json!({}), json!({})));
    let endpoints: Vec<_> = rows.iter().map(|(ip, conditions, _)| (*ip, conditions.clone())).collect();
    put::<EndpointSlice>(&mut t, &slice("web-1", &endpoints));
    let expected: Vec<_> = rows.iter().map(|(ip, _, state)| ((*ip).to_owned(), *state)).collect();
    assert_eq!(states(&made(&mut t).unwrap()), expected, "the first address of each, and no other");
}

#[test]
fn an_endpoint_in_two_slices_is_as_good_as_the_better_one_says() {
    let mut t = translator();
    put::<LoadBalancer>(&mut t, &web(json!({}), json!({})));
    put::<EndpointSlice>(&mut t, &slice("a", &[("10.1.2.1", json!({"ready": false}))]));
    put::<EndpointSlice>(&mut t, &slice("b", &[("10.1.2.1", json!({"ready": true}))]));
    assert_eq!(states(&made(&mut t).unwrap()), [("10.1.2.1".to_owned(), Ready)]);
    t.remove::<EndpointSlice>(&ObjectName::new("shop", "b"));
    assert_eq!(states(&made(&mut t).unwrap()), [("10.1.2.1".to_owned(), NotReady)]);
    // A slice that is another Service's from now on takes its endpoints along.
    let mut moved = slice("a", &[("10.1.2.1", json!({}))]);
    moved["metadata"]["labels"]["kubernetes.io/service-name"] = "other".into();
    put::<EndpointSlice>(&mut t, &moved);
    assert_eq!(states(&made(&mut t).unwrap()), []);
    // Names and ports without a number say nothing that could be served.
    let mut names = slice("c", &[("x.example", json!({}))]);
    names["addressType"] = "FQDN".into();
    put::<EndpointSlice>(&mut t, &names);
    let mut portless = slice("d", &[("10.1.2.1", json!({}))]);
    portless["ports"] = json!([{"name": "http", "protocol": "TCP", "port": null}]);
    put::<EndpointSlice>(&mut t, &portless);
    assert_eq!(made(&mut t).map_or(0, |s| s.ports[0].backends.len()), 0);
    assert_eq!(t.faults(), []);
}

fn cluster() -> Translator {
    let mut t = translator();
    for n in [1, 2] {
        put::<Node>(
            &mut t,
            &json!({"metadata": {"name": format!("n{n}")}, "spec": {"podCIDRs": [format!("10.1.{n}.0/24")]},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{n}")}]}}),
        );
    }
    put::<Namespace>(&mut t, &json!({"metadata": {"name": "shop"}}));
    t
}

fn pod(name: &str, node: &str, ip: &str, phase: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop", "uid": name}, "status": {"phase": phase, "podIPs": [{"ip": ip}]},
        "spec": {"nodeName": node, "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 80, "hostPort": 8080}]}]}})
}

#[test]
fn pods_of_the_hosts_network_are_left_alone() {
    let mut t = cluster();
    for (name, node, ip) in [("here", "n1", "192.0.2.1"), ("there", "n2", "192.0.2.2")] {
        let mut host = pod(name, node, ip, "Running");
        host["spec"]["hostNetwork"] = true.into();
        put::<Pod>(&mut t, &host);
    }
    put::<Pod>(&mut t, &pod("own", "n1", "10.1.1.5", "Running"));
    put::<Pod>(&mut t, &pod("other", "n2", "10.1.2.5", "Running"));
    let delta = t.delta();
    let local: Vec<_> = delta.local_pods.iter().map(|(name, p)| (name.name.as_str(), p.is_some())).collect();
    assert_eq!(local, [("own", true)]);
    let remote: Vec<_> =
        delta.endpoints.iter().filter(|(_, e)| e.is_some()).map(|(key, _)| key.name.to_string()).collect();
    assert_eq!(remote, ["shop.other"]);
    assert_eq!(t.faults(), []);
}

/// 95: two Pods stood for one machine that moved, and the end of the old one took the policies of the new.
#[test]
fn a_finished_pod_took_the_address_of_the_one_that_has_it_now() {
    let mut t = cluster();
    put::<Pod>(&mut t, &pod("old", "n2", "10.1.2.5", "Running"));
    let endpoint = |t: &mut Translator, name: &str| {
        t.delta().endpoints.into_iter().find(|(key, _)| key.name.as_str() == name).map(|(_, e)| e.is_some())
    };
    assert_eq!(endpoint(&mut t, "shop.old"), Some(true));
    put::<Pod>(&mut t, &pod("old", "n2", "10.1.2.5", "Succeeded"));
    assert_eq!(endpoint(&mut t, "shop.old"), Some(false));
    put::<Pod>(&mut t, &pod("new", "n2", "10.1.2.5", "Running"));
    assert_eq!(endpoint(&mut t, "shop.new"), Some(true));
    // What is cleaned up late touches the one that lives no more.
    t.remove::<Pod>(&ObjectName::new("shop", "old"));
    assert!(endpoint(&mut t, "shop.new").is_none_or(|there| there));
    assert_eq!(t.faults(), []);
}
