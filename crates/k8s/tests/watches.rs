//! The source against an API server that is slow, cut, forgetful and wrong: nothing goes that should stay, and all converges.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use flowloom_k8s::{
    EndpointSlice, Kind, LoadBalancer, Namespace, NetworkPolicy, Node, ObjectFault, Options, Pod,
    ServiceCidr, SourceStatus, Translator, Update, run,
};
use serde_json::{Value, json};
use support::{Server, Trouble};
use tokio::sync::mpsc;

const PATHS: [&str; 7] = [
    Node::PATH,
    Namespace::PATH,
    Pod::PATH,
    LoadBalancer::PATH,
    EndpointSlice::PATH,
    NetworkPolicy::PATH,
    ServiceCidr::PATH,
];

fn pod(name: &str, ip: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop", "uid": name}, "spec": {"nodeName": "n2"},
        "status": {"phase": "Running", "podIPs": [{"ip": ip}]}})
}

/// The sum of all updates.
struct Seen {
    updates: mpsc::UnboundedReceiver<Update>,
    endpoints: BTreeSet<String>,
    /// Everything that ever went.
    gone: BTreeSet<String>,
    groups: BTreeSet<String>,
    subnets: BTreeSet<String>,
    faults: Vec<ObjectFault>,
    status: SourceStatus,
}

impl Seen {
    async fn start(server: &Server) -> Self {
        let (sender, updates) = mpsc::unbounded_channel();
        let status = SourceStatus::default();
        let translator = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
        let client = server.client().await;
        tokio::spawn(run(client, translator, status.clone(), move |u| sender.send(u).is_ok()));
        Self {
            updates,
            endpoints: BTreeSet::new(),
            gone: BTreeSet::new(),
            groups: BTreeSet::new(),
            subnets: BTreeSet::new(),
            faults: Vec::new(),
            status,
        }
    }

    fn take(&mut self, update: Update) {
        for (key, value) in update.delta.endpoints {
            let name = key.name.to_string();
            if value.is_some() {
                self.endpoints.insert(name);
            } else if self.endpoints.remove(&name) {
                self.gone.insert(name);
            }
        }
        for ((_, name), value) in update.delta.security_groups {
            if value.is_some() {
                self.groups.insert(name.to_string())
            } else {
                self.groups.remove(&name.to_string())
            };
        }
        for ((_, name), value) in update.delta.subnets {
            if value.is_some() {
                self.subnets.insert(name.to_string())
            } else {
                self.subnets.remove(&name.to_string())
            };
        }
        self.faults = update.faults;
    }

    /// Takes updates until they add up to what is wanted.
    async fn until(&mut self, what: &str, reached: impl Fn(&Self) -> bool) {
        let whole = async {
            while !reached(self) {
                let update = self.updates.recv().await.expect("the source goes on");
                self.take(update);
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), whole).await.is_err() {
            panic!(
                "{what}: {:?}, faults {:?}, status {:#?}",
                self.endpoints,
                self.faults,
                self.status.kinds()
            );
        }
    }

    async fn until_pods(&mut self, pods: &[&str]) {
        let wanted: BTreeSet<String> = pods.iter().map(|p| format!("shop.{p}")).collect();
        self.until("pods", move |s| s.endpoints == wanted).await;
    }
}

async fn shop() -> Server {
    let server = Server::start().await;
    server.put(
        Node::PATH,
        json!({"metadata": {"name": "n2"}, "spec": {"podCIDRs": ["10.1.2.0/24"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]}}),
    );
    server.put(Namespace::PATH, json!({"metadata": {"name": "shop", "labels": {"a": "b"}}}));
    for n in 1..=5 {
        server.put(Pod::PATH, pod(&format!("p{n}"), &format!("10.1.2.{n}")));
    }
    server
}

#[tokio::test]
async fn nothing_is_said_before_every_first_list_is_complete() {
    let server = shop().await;
    server.trouble(
        NetworkPolicy::PATH,
        &[Trouble::Status(500, 0), Trouble::Status(503, 0), Trouble::Status(429, 1)],
    );
    let mut seen = Seen::start(&server).await;
    let first = seen.updates.recv().await.unwrap();
    assert!(server.requests(NetworkPolicy::PATH).len() >= 4, "the failing kind had its list");
    seen.take(first);
    assert_eq!(seen.endpoints.len(), 5, "the first update has everything");
    let kinds = seen.status.kinds();
    assert!(kinds.values().all(|k| k.listed && k.error.is_none()), "{kinds:#?}");
    assert_eq!(kinds["NetworkPolicy"].failures, 3);
}

#[tokio::test]
async fn a_watch_cut_within_an_object_goes_on_where_it_was() {
    let server = shop().await;
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    // The next watch sends one event and half of another.
    server.trouble(Pod::PATH, &[Trouble::CutAfter(1)]);
    server.hang_up();
    server.put(Pod::PATH, pod("p6", "10.1.2.6"));
    server.put(Pod::PATH, pod("p7", "10.1.2.7"));
    server.remove(Pod::PATH, "shop", "p1");
    seen.until_pods(&["p2", "p3", "p4", "p5", "p6", "p7"]).await;
    assert_eq!(seen.gone, BTreeSet::from(["shop.p1".to_owned()]));
    assert_eq!(seen.status.kinds()["Pod"].lists, 1, "no list was needed");
}

#[tokio::test]
async fn a_forgotten_version_is_listed_again_and_only_what_went_is_gone() {
    let server = shop().await;
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    // While nobody watches: one goes, one comes; and the new list is cut before it is whole.
    server.trouble(Pod::PATH, &[Trouble::Status(410, 0), Trouble::CutAfter(2), Trouble::CutAfter(0)]);
    server.hang_up();
    server.remove(Pod::PATH, "shop", "p3");
    server.put(Pod::PATH, pod("p8", "10.1.2.8"));
    server.compact();
    seen.until_pods(&["p1", "p2", "p4", "p5", "p8"]).await;
    assert_eq!(seen.gone, BTreeSet::from(["shop.p3".to_owned()]));
    assert_eq!(seen.status.kinds()["Pod"].lists, 2);
}

#[tokio::test]
async fn a_bookmark_that_is_behind_plays_nothing_again() {
    let server = shop().await;
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    let before = server.version();
    server.trouble(Pod::PATH, &[Trouble::Bookmark(before)]);
    server.put(Pod::PATH, pod("p6", "10.1.2.6"));
    server.remove(Pod::PATH, "shop", "p6");
    let asked = server.requests(Pod::PATH).len();
    server.hang_up();
    server.put(Pod::PATH, pod("p7", "10.1.2.7"));
    // The watch with the bookmark, and the one after it.
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5", "p7"]).await;
    let next = async {
        loop {
            if let Some(next) = server.requests(Pod::PATH).get(asked + 1) {
                return next.clone();
            }
            tokio::task::yield_now().await;
        }
    };
    let next = tokio::time::timeout(Duration::from_secs(20), next).await.expect("the watch goes on");
    let from = next.split("resourceVersion=").nth(1).and_then(|v| v.split('&').next()).unwrap();
    assert!(from.parse::<u64>().unwrap() > before, "from version {before} again: {next}");
}

#[tokio::test]
async fn error_events_of_any_code_lose_nothing() {
    let server = shop().await;
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    server
        .trouble(Pod::PATH, &[Trouble::ErrorEvent(500), Trouble::ErrorEvent(410), Trouble::ErrorEvent(504)]);
    server.hang_up();
    server.put(Pod::PATH, pod("p6", "10.1.2.6"));
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5", "p6"]).await;
    assert!(seen.gone.is_empty());
}

#[tokio::test]
async fn a_server_that_streams_no_lists_is_asked_for_pages() {
    let server = shop().await;
    server.without_streaming_lists();
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    let pages = server.requests(Pod::PATH).iter().filter(|r| r.contains("limit=")).count();
    assert_eq!(pages, 3, "five objects, two a page");
    server.put(Pod::PATH, pod("p6", "10.1.2.6"));
    server.remove(Pod::PATH, "shop", "p2");
    seen.until_pods(&["p1", "p3", "p4", "p5", "p6"]).await;
}

#[tokio::test]
async fn a_malformed_object_of_each_kind_leaves_its_neighbours_and_is_named() {
    let server = shop().await;
    for path in PATHS {
        let mut bad = json!({"metadata": {"name": "bad", "labels": 5}, "spec": 5});
        if ![Node::PATH, Namespace::PATH, ServiceCidr::PATH].contains(&path) {
            bad["metadata"]["namespace"] = "shop".into();
        }
        server.put(path, bad);
    }
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    let named: BTreeMap<&str, String> = seen.faults.iter().map(|f| (f.kind, f.to_string())).collect();
    for kind in ["Node", "Namespace", "Pod", "Service", "EndpointSlice", "NetworkPolicy", "ServiceCIDR"] {
        let text = named.get(kind).unwrap_or_else(|| panic!("{kind} is not named: {named:#?}"));
        assert!(
            text.contains("bad") && (text.contains("metadata.labels") || text.contains("spec")),
            "{text}"
        );
    }
    // A good object that turns bad keeps its last good version; a bad one that turns good is taken.
    server
        .put(Pod::PATH, json!({"metadata": {"name": "p1", "namespace": "shop"}, "status": {"podIPs": "x"}}));
    server.put(Pod::PATH, pod("bad", "10.1.2.99"));
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5", "bad"]).await;
    seen.until("the fault of p1", |s| {
        s.faults.iter().any(|f| f.name.name == "p1" && f.message.contains("last good version"))
    })
    .await;
    assert!(seen.gone.is_empty());
}

fn node(name: &str, third: u8, created: &str) -> Value {
    json!({"metadata": {"name": name, "creationTimestamp": created},
        "spec": {"podCIDRs": [format!("10.1.{third}.0/24")]},
        "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{third}")}]}})
}

fn service_cidr(name: &str, cidr: &str, created: &str) -> Value {
    json!({"metadata": {"name": name, "creationTimestamp": created}, "spec": {"cidrs": [cidr]}})
}

#[tokio::test]
async fn a_node_in_the_way_of_a_service_cidr_is_refused_aloud_unless_it_was_there_first() {
    let server = Server::start().await;
    let (first, then, last) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z");
    server.put(ServiceCidr::PATH, service_cidr("kubernetes", "10.1.2.128/25", first));
    for (name, third) in [("n2", 2), ("n3", 3), ("n4", 4)] {
        server.put(Node::PATH, node(name, third, then));
    }
    let mut seen = Seen::start(&server).await;
    let told = |s: &Seen| {
        let faults = s.faults.iter().filter(|f| f.kind == "Node");
        faults.map(|f| format!("{} {}: {}", f.name, f.reason, f.message)).collect::<Vec<_>>()
    };
    let subnets = |s: &Seen| s.subnets.iter().cloned().collect::<Vec<_>>();
    seen.until("the first update", |s| !s.subnets.is_empty()).await;
    assert_eq!(subnets(&seen), ["node.n3", "node.n4"]);
    let refused = "n2 PodCidrConflict: its pod CIDR 10.1.2.0/24 overlaps 10.1.2.128/25, which ServiceCIDR kubernetes gives to Services";
    assert_eq!(told(&seen), [refused]);
    // A range that somebody adds later is told and takes no running node away, not even from an agent that starts anew.
    server.put(ServiceCidr::PATH, service_cidr("more", "10.1.3.0/24", last));
    for _ in 0..2 {
        seen.until("the younger range", |s| told(s).len() == 2).await;
        assert!(told(&seen)[1].ends_with("the node is older and keeps it: give Services another range"));
        assert_eq!(subnets(&seen), ["node.n3", "node.n4"]);
        seen = Seen::start(&server).await;
    }
    // An address of a node is no better, and a range that goes frees what was in its way.
    server.put(ServiceCidr::PATH, service_cidr("hosts", "192.0.2.4/32", first));
    server.remove(ServiceCidr::PATH, "", "kubernetes");
    seen.until("a free range", |s| s.subnets.contains("node.n2") && told(s).len() == 2).await;
    let conflict = "n4 NodeAddressConflict: its address 192.0.2.4 is in 192.0.2.4/32";
    assert!(told(&seen)[1].starts_with(conflict), "{:?}", told(&seen));
}

#[tokio::test]
async fn a_server_that_shows_no_service_cidrs_keeps_nobody_waiting_and_is_not_asked_again_at_once() {
    for code in [404, 403] {
        let server = shop().await;
        server.trouble(ServiceCidr::PATH, &[Trouble::Status(code, 0)]);
        let mut seen = Seen::start(&server).await;
        seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
        server.put(Pod::PATH, pod("p6", "10.1.2.6"));
        seen.until_pods(&["p1", "p2", "p3", "p4", "p5", "p6"]).await;
        let kind = &seen.status.kinds()["ServiceCIDR"];
        assert!(kind.optional && !kind.listed && kind.failures == 0, "{kind:#?}");
        assert!(kind.error.as_ref().is_some_and(|e| e.contains(&code.to_string())), "{kind:#?}");
        assert!(seen.faults.is_empty(), "{:?}", seen.faults);
        assert_eq!(server.requests(ServiceCidr::PATH).len(), 1);
    }
    // One that fails for another reason keeps nobody waiting either, and is asked again soon.
    let server = shop().await;
    server.trouble(ServiceCidr::PATH, &[Trouble::Status(500, 0)]);
    let mut seen = Seen::start(&server).await;
    seen.until_pods(&["p1", "p2", "p3", "p4", "p5"]).await;
    seen.until("its list", |s| s.status.kinds()["ServiceCIDR"].listed).await;
}
