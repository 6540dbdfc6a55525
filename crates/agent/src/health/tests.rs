//! Real sockets over a core in memory.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use flowloom_k8s::Update;
use flowloom_model::{Backend, BackendState, Protocol, Service, ServicePort};

use super::*;
use crate::config::Config;
use crate::core::Command;
use crate::tests::Running;

const DOCUMENT: &str = "
version: 1
nodes: [{name: n1, address: 192.0.2.1}, {name: n2, address: 192.0.2.2}]
subnets: [{name: pods, vpc: default, cidr: 10.244.0.0/24}]
";

struct Served {
    running: Running,
    health: u16,
    mode: u16,
}

/// A port that was free just now.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap().local_addr().unwrap().port()
}

impl Served {
    fn start() -> Self {
        let (health, mode) = (free_port(), free_port());
        let change = |config: &mut Config| {
            config.kubernetes.enabled = true;
            config.kubernetes.health_address = format!("[::]:{health}");
            config.kubernetes.proxy_mode_address = format!("127.0.0.1:{mode}");
        };
        let running = Running::start(DOCUMENT, change, |runtime, _, config, core, stopped| {
            runtime.spawn(run(config.kubernetes, core, stopped));
        });
        Self { running, health, mode }
    }

    /// What Kubernetes says of the Service `shop/front`; none = it is gone.
    fn says(&self, service: Option<Service>, taints: &[&str]) {
        let own = flowloom_k8s::Node {
            internal: Vec::new(),
            pod_cidrs: Vec::new(),
            zone: String::new(),
            taints: taints.iter().map(|t| ((*t).to_owned(), String::new(), String::new())).collect(),
            network_unavailable: None,
            created: String::new(),
        };
        let key = ("default".parse().unwrap(), "shop.front".parse().unwrap());
        let mut delta = flowloom_k8s::Delta::default();
        delta.services.insert(key, service.map(Arc::new));
        let update = Update {
            heard: std::time::Instant::now(),
            delta,
            faults: Vec::new(),
            node_addresses: Vec::new(),
            own_node: Some(Arc::new(own)),
        };
        self.running.core.send(Command::Kubernetes(Box::new(update)));
    }
}

/// A load balancer with policy Local: ready backends on n1, then on n2.
fn service(port: u16, here: u8, there: u8) -> Service {
    let backend = |node: &str| Backend {
        node: Some(node.parse().unwrap()),
        state: BackendState::Ready,
        zones: Default::default(),
        nodes: Default::default(),
    };
    let backends = (0..here)
        .map(|n| (format!("10.244.0.{}", 10 + n), backend("n1")))
        .chain((0..there).map(|n| (format!("10.244.0.{}", 100 + n), backend("n2"))))
        .map(|(ip, b)| ((ip.parse().unwrap(), 8080), b))
        .collect();
    Service {
        vpc: "default".parse().unwrap(),
        name: "shop.front".parse().unwrap(),
        ports: vec![ServicePort {
            name: None,
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
            host_addresses: Default::default(),
            backends,
        }],
        cluster_ips: ["10.96.0.7".parse().unwrap()].into(),
        external_ips: Default::default(),
        load_balancer_ips: Default::default(),
        affinity: None,
        internal_local: false,
        external_local: true,
        source_ranges: Vec::new(),
        health_check_port: Some(port),
    }
}

/// Status, head and body; `None` while nobody listens.
fn ask(host: &str, port: u16, path: &str) -> Option<(u16, String, String)> {
    let mut stream = TcpStream::connect((host, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    // Ends only because the connection is given back after an answer.
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, head.to_ascii_lowercase(), body.to_owned()))
}

fn json(body: &str) -> serde_json::Value {
    serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}"))
}

fn eventually<T>(what: &str, f: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

#[test]
fn a_node_is_healthy_once_everything_is_in_force_and_leaves_when_the_cluster_says_so() {
    let served = Served::start();
    let (status, _, body) = eventually("a listener", || ask("127.0.0.1", served.health, "/healthz"));
    assert_eq!(status, 503, "the API server has not spoken: {body}");
    assert!(json(&body)["lastUpdated"].is_null(), "{body}");

    served.says(None, &[]);
    for host in ["127.0.0.1", "::1"] {
        let (_, head, body) =
            eventually("200", || ask(host, served.health, "/healthz").filter(|(status, ..)| *status == 200));
        assert!(head.starts_with("http/1.1 200 ok") && head.contains("connection: close"), "{head}");
        let body = json(&body);
        for key in ["lastUpdated", "currentTime"] {
            assert!(body[key].as_str().is_some_and(|t| t.ends_with('Z')), "{key}: {body}");
        }
        assert_eq!(body["nodeEligible"], true);
    }
    assert_eq!(ask("127.0.0.1", served.health, "/metrics").unwrap().0, 404);

    served.says(None, &["node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler"]);
    let (_, _, body) =
        eventually("503", || ask("127.0.0.1", served.health, "/healthz").filter(|(s, ..)| *s == 503));
    assert_eq!(json(&body)["nodeEligible"], false);
    // It serves all the same: nobody is to restart the agent.
    assert_eq!(ask("127.0.0.1", served.health, "/livez").unwrap().0, 200);
}

#[test]
fn a_health_check_port_follows_its_service_and_the_backends_of_this_node() {
    let served = Served::start();
    let port = free_port();
    served.says(Some(service(port, 2, 1)), &[]);
    let of = |local: usize| {
        let (status, head, body) = eventually(&format!("{local} local backends"), || {
            ask("127.0.0.1", port, "/any/path").filter(|(.., body)| json(body)["localEndpoints"] == local)
        });
        assert!(head.contains(&format!("x-load-balancing-endpoint-weight: {local}")), "{head}");
        let expected = serde_json::json!({
            "service": {"namespace": "shop", "name": "front"},
            "localEndpoints": local,
            "serviceProxyHealthy": true,
        });
        assert_eq!(json(&body), expected);
        status
    };
    assert_eq!(of(2), 200);
    served.says(Some(service(port, 0, 3)), &[]);
    assert_eq!(of(0), 503, "backends of other nodes do not count");
    served.says(Some(service(port, 1, 0)), &[]);
    assert_eq!(of(1), 200);

    let other = free_port();
    served.says(Some(service(other, 1, 0)), &[]);
    eventually("its new port", || ask("::1", other, "/"));
    eventually("its old port to be given back", || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok());
    served.says(None, &[]);
    eventually("its port to be given back", || TcpListener::bind((Ipv4Addr::UNSPECIFIED, other)).ok());
}

#[test]
fn a_health_check_port_that_another_process_has_is_served_once_it_is_free() {
    let served = Served::start();
    let taken = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    served.says(Some(service(port, 1, 0)), &[]);
    // The others are not held up.
    eventually("200", || ask("127.0.0.1", served.health, "/healthz").filter(|(status, ..)| *status == 200));
    let told = || served.running.ask(|core| core.complaints());
    let complaint =
        eventually("a condition", || told().into_iter().find(|c| c.reason == "HealthCheckPortTaken"));
    assert_eq!((complaint.kind.as_str(), complaint.name.as_str()), ("service", "default/shop.front"));
    assert!(complaint.message.contains(&port.to_string()), "{complaint:?}");
    drop(taken);
    let (status, ..) = eventually("the port", || ask("127.0.0.1", port, "/healthz"));
    assert_eq!(status, 200);
    eventually("no condition", || told().is_empty().then_some(()));
}

#[test]
fn nobody_is_told_that_another_program_serves_services_here() {
    let served = Served::start();
    let (status, _, body) = eventually("a listener", || ask("127.0.0.1", served.mode, "/proxyMode"));
    assert_eq!((status, body.as_str()), (200, "flowloom"));
}

#[test]
fn clients_that_say_nothing_do_not_keep_a_balancer_from_its_answer() {
    let served = Served::start();
    served.says(None, &[]);
    eventually("200", || ask("127.0.0.1", served.health, "/healthz").filter(|(status, ..)| *status == 200));
    let idle: Vec<TcpStream> =
        (0..LIMITS.connections).map(|_| TcpStream::connect(("127.0.0.1", served.health)).unwrap()).collect();
    let (status, ..) = ask("127.0.0.1", served.health, "/healthz").expect("an answer once they were cut off");
    assert_eq!(status, 200);
    drop(idle);
}
