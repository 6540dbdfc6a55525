//! Kubernetes as a source: a change costs what it touches and leaves what a look at everything would; Pods and attachments are one endpoint.

use std::collections::BTreeSet;
use std::time::Instant;

use flowloom_compiler::{CompilerCache, compile_with};
use flowloom_datapath::adopt;
use flowloom_k8s::{
    EndpointSlice, LoadBalancer, Namespace, NetworkPolicy, Node as NodeObject, ObjectName, Options, Pod,
    ServiceCidr, Translator, Update,
};
use flowloom_model::EndpointKey;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// A cluster as the API server tells it to one agent.
struct Cluster {
    translator: Translator,
}

fn name_of(object: &Value) -> ObjectName {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    ObjectName::new(text("namespace"), text("name"))
}

impl Cluster {
    fn new() -> Self {
        let mut cluster =
            Self { translator: Translator::new(Options { node: "n1".parse().unwrap() }).unwrap() };
        for n in 1..=3 {
            cluster.put::<NodeObject>(node(n));
        }
        for name in ["a", "b"] {
            cluster.put::<Namespace>(json!({"metadata": {"name": name, "labels": {"team": name}}}));
        }
        cluster
    }

    fn put<T: flowloom_k8s::Held>(&mut self, object: Value) {
        self.translator.put::<T>(&name_of(&object), T::decode(&object.to_string()));
    }

    fn gone<T: flowloom_k8s::Held>(&mut self, object: &Value) {
        self.translator.remove::<T>(&name_of(object));
    }

    fn update(&mut self) -> Update {
        Update {
            heard: Instant::now(),
            delta: self.translator.delta(),
            faults: self.translator.faults(),
            node_addresses: self.translator.node_addresses(),
            own_node: None,
        }
    }
}

fn node(n: u8) -> Value {
    json!({"metadata": {"name": format!("n{n}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
           "spec": {"podCIDR": format!("10.200.{n}.0/24")},
           "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{n}")}]}})
}

fn pod(namespace: &str, name: &str, node: u8, ip: u8, labels: Value) -> Value {
    json!({"metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{namespace}-{name}"), "labels": labels,
                        "creationTimestamp": "2026-01-01T00:00:00Z"},
           "spec": {"nodeName": format!("n{node}"), "serviceAccountName": "default",
                    "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
           "status": {"phase": "Running", "podIPs": [{"ip": format!("10.200.{node}.{ip}")}]}})
}

fn service(namespace: &str, n: u8) -> Value {
    json!({"metadata": {"namespace": namespace, "name": format!("s{n}")},
           "spec": {"type": "NodePort", "clusterIPs": [format!("10.96.0.{n}")],
                    "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30000 + u16::from(n)}]}})
}

fn slice(namespace: &str, n: u8, backends: &[u8]) -> Value {
    let endpoint = |b: &u8| json!({"addresses": [format!("10.200.2.{b}")], "nodeName": "n2", "conditions": {"ready": true}});
    json!({"metadata": {"namespace": namespace, "name": format!("s{n}-x"), "labels": {"kubernetes.io/service-name": format!("s{n}")}},
           "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
           "endpoints": backends.iter().map(endpoint).collect::<Vec<_>>()})
}

fn policy(namespace: &str, n: u8, selects: &str, from: &str, port: u16) -> Value {
    json!({"metadata": {"namespace": namespace, "name": format!("p{n}")},
           "spec": {"podSelector": {"matchLabels": {"app": selects}}, "policyTypes": ["Ingress"],
                    "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": from}}}], "ports": [{"protocol": "TCP", "port": port}]}]}})
}

fn cluster_node() -> Node {
    Node::new(Some("version: 1\n"))
}

impl Node {
    fn cluster_agent(&self) -> Core {
        self.agent_with(|config| config.kubernetes.enabled = true)
    }
}

/// The ADD of a kubelet for a Pod.
fn add_pod(pod: &Value, id: &str) -> v1::CniAddRequest {
    let text = |field: &str| pod["metadata"][field].as_str().unwrap().to_owned();
    let args = [
        ("K8S_POD_NAMESPACE", text("namespace")),
        ("K8S_POD_NAME", text("name")),
        ("K8S_POD_UID", text("uid")),
    ];
    v1::CniAddRequest { args: args.map(|(k, v)| (k.to_owned(), v)).into(), ..add(id) }
}

/// World, plan and maps are what a look at everything would make of it.
fn is_whole(node: &Node, core: &mut Core) {
    let followed = core.world.clone();
    core.rebuild_world();
    assert_eq!(followed, core.world, "the world, followed and put together anew");
    // What is shared decides what is looked at: the next change starts from the one that was followed.
    core.world = followed;
    let (mut numbers, mut cache) = (core.numbers.clone(), CompilerCache::default());
    let scratch = compile_with(&core.world, &core.config.node, core.options, &mut numbers, &mut cache);
    assert_eq!(scratch.plan, core.wanted, "the plan, followed and compiled from the start");
    assert_eq!(scratch.conditions, core.compiled);
    assert_eq!(core.plan, core.effective_plan(), "what is wanted is in force");
    let maps = node.plane.0.lock().unwrap();
    let left = adopt::remaining(&maps.memory.state, &core.plan, &maps.devices);
    let left: Vec<_> = left.iter().filter(|op| !matches!(op, flowloom_compiler::Op::FreeSlots(_))).collect();
    assert!(left.is_empty(), "the maps lack {left:?}");
}

/// One thing that happens to a cluster or its node.
#[derive(Clone, Debug)]
enum Step {
    Pod {
        which: u8,
        node: u8,
        label: u8,
    },
    PodGone(u8),
    Service(u8),
    ServiceGone(u8),
    Slice {
        which: u8,
        backends: Vec<u8>,
    },
    SliceGone(u8),
    Policy {
        which: u8,
        selects: u8,
        from: u8,
        port: u16,
    },
    PolicyGone(u8),
    Team(u8),
    Node(bool),
    Add(u8),
    Del(u8),
    /// The document names what Kubernetes names, too, or does not.
    Document(bool),
    /// The agent hears nothing for now.
    Silence,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..8, 1u8..4, 0u8..3).prop_map(|(which, node, label)| Step::Pod { which, node, label }),
        2 => (0u8..8).prop_map(Step::PodGone),
        3 => (1u8..5).prop_map(Step::Service),
        1 => (1u8..5).prop_map(Step::ServiceGone),
        3 => (1u8..5, proptest::collection::vec(2u8..8, 0..3)).prop_map(|(which, backends)| Step::Slice { which, backends }),
        1 => (1u8..5).prop_map(Step::SliceGone),
        3 => (0u8..3, 0u8..3, 0u8..3, 80u16..83).prop_map(|(which, selects, from, port)| Step::Policy { which, selects, from, port }),
        1 => (0u8..3).prop_map(Step::PolicyGone),
        1 => (0u8..3).prop_map(Step::Team),
        1 => any::<bool>().prop_map(Step::Node),
        3 => (0u8..8).prop_map(Step::Add),
        2 => (0u8..8).prop_map(Step::Del),
        1 => any::<bool>().prop_map(Step::Document),
        4 => Just(Step::Silence),
    ]
}

/// The document with and without names that Kubernetes uses.
fn document(collides: bool) -> String {
    let taken = "
nodes: [{name: n1, address: 192.0.2.1}, {name: n2, address: 192.0.2.2}]
subnets: [{name: own, vpc: default, cidr: 10.77.0.0/24}]
security_groups: [{name: netpol.a.p0, vpc: default, tier: 1, rules: []}]
endpoints: [{name: a.pod-0, vpc: default, subnet: own, node: n2, ip: 10.77.0.5}]
load_balancers: [{name: a.s1, vpc: default, vips: [10.77.1.1], ports: [{protocol: tcp, port: 80}]}]
";
    format!("version: 1\n{}", if collides { taken } else { "" })
}

fn known_pod(which: u8, node: u8, label: u8) -> Value {
    let namespace = if which.is_multiple_of(2) { "a" } else { "b" };
    let mut made =
        pod(namespace, &format!("pod-{which}"), node, 2 + which, json!({"app": format!("app-{label}")}));
    if which == 3 {
        made["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(8080);
    }
    made
}

fn run(steps: &[Step]) {
    let outside = cluster_node();
    let mut cluster = Cluster::new();
    let mut core = outside.cluster_agent();
    assert!(!core.sources_spoke());
    core.kubernetes_changed(vec![cluster.update()]);
    is_whole(&outside, &mut core);
    let mut attached = BTreeSet::new();
    for step in steps {
        match step.clone() {
            Step::Pod { which, node, label } => cluster.put::<Pod>(known_pod(which, node, label)),
            Step::PodGone(which) => cluster.gone::<Pod>(&known_pod(which, 1, 0)),
            Step::Service(n) => cluster.put::<LoadBalancer>(service("a", n)),
            Step::ServiceGone(n) => cluster.gone::<LoadBalancer>(&service("a", n)),
            Step::Slice { which, backends } => cluster.put::<EndpointSlice>(slice("a", which, &backends)),
            Step::SliceGone(which) => cluster.gone::<EndpointSlice>(&slice("a", which, &[])),
            Step::Policy { which, selects, from, port } => {
                let (selects, from) = (format!("app-{selects}"), format!("app-{from}"));
                cluster.put::<NetworkPolicy>(policy("a", which, &selects, &from, port));
            }
            Step::PolicyGone(which) => cluster.gone::<NetworkPolicy>(&policy("a", which, "", "", 1)),
            Step::Team(n) => {
                cluster.put::<Namespace>(
                    json!({"metadata": {"name": "b", "labels": {"team": format!("t{n}")}}}),
                );
            }
            Step::Node(true) => cluster.put::<NodeObject>(node(4)),
            Step::Node(false) => cluster.gone::<NodeObject>(&node(4)),
            Step::Add(which) => {
                // It may be refused: the Pod need not be one of this node.
                let request = add_pod(&known_pod(which, 1, 0), &format!("c{which}"));
                if core.cni_add(&request).is_ok() {
                    attached.insert(which);
                }
                core.refresh_stale();
            }
            Step::Del(which) => {
                if attached.remove(&which) {
                    core.cni_del(&del(&format!("c{which}"))).unwrap();
                    core.refresh_stale();
                }
            }
            Step::Document(collides) => {
                outside.write(&document(collides));
                core.reload();
            }
            Step::Silence => continue,
        }
        if !matches!(step, Step::Add(_) | Step::Del(_) | Step::Document(_)) {
            core.kubernetes_changed(vec![cluster.update()]);
        }
        is_whole(&outside, &mut core);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn what_is_followed_is_what_a_look_at_everything_would_make(steps in proptest::collection::vec(step(), 1..40)) {
        run(&steps);
    }
}

#[test]
fn a_service_touches_no_endpoint_and_a_pod_no_service() {
    let outside = cluster_node();
    let mut cluster = Cluster::new();
    for which in 0..8 {
        cluster.put::<Pod>(known_pod(which, 2, 0));
    }
    cluster.put::<LoadBalancer>(service("a", 1));
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    let (before, writes) = (core.plan.clone(), outside.writes());
    cluster.put::<LoadBalancer>(service("a", 2));
    cluster.put::<EndpointSlice>(slice("a", 2, &[2, 3]));
    core.kubernetes_changed(vec![cluster.update()]);
    assert!(core.plan.ipcache.is_same(&before.ipcache) && core.plan.identities.is_same(&before.identities));
    assert_eq!(core.plan.services.parts().len(), 2);
    assert_eq!(outside.writes().1, writes.1, "the network was written");
    let (before, writes) = (core.plan.clone(), outside.writes());
    cluster.put::<Pod>(known_pod(8, 3, 1));
    core.kubernetes_changed(vec![cluster.update()]);
    assert!(core.plan.services.parts().is_same(before.services.parts()));
    let added = core.plan.ipcache.apart(&before.ipcache).filter(|(_, a, b)| a != b).count();
    assert_eq!((added, outside.writes().1), (1, writes.1));
    assert!(outside.writes().0 - writes.0 <= 2, "{}", outside.writes().0 - writes.0);
    // The same again: nothing.
    let writes = outside.writes();
    cluster.put::<Pod>(known_pod(8, 3, 1));
    core.kubernetes_changed(vec![cluster.update()]);
    assert_eq!(outside.writes(), writes);
}

#[test]
fn a_pod_and_its_attachment_are_one_endpoint() {
    let outside = cluster_node();
    let mut cluster = Cluster::new();
    let web = pod("a", "web", 1, 9, json!({"app": "web"}));
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    // Not shown yet: nobody knows who may talk to it.
    assert_eq!(
        core.pod_for(&"default".parse().unwrap(), &add_pod(&web, "c1").args).unwrap_err().code,
        ErrorCode::NotReady
    );
    cluster.put::<Pod>(web.clone());
    cluster.put::<NetworkPolicy>(policy("a", 0, "web", "db", 80));
    core.kubernetes_changed(vec![cluster.update()]);
    core.cni_add(&add_pod(&web, "c1")).unwrap();
    let key = core.records.keys().next().unwrap().clone();
    assert_eq!(key.to_string(), "default/a.web");
    let of = |core: &Core| core.world.endpoints[&key].clone();
    assert_eq!(of(&core).labels["app"], "web");
    assert_eq!(of(&core).labels["k8s.ns:team"], "a");
    let groups = |core: &Core| of(core).security_groups.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(groups(&core), ["netpol.a.p0"]);
    assert_eq!(of(&core).named_ports.len(), 1);
    // Its labels change, and with them who selects it.
    let mut other = web.clone();
    other["metadata"]["labels"] = json!({"app": "other"});
    cluster.put::<Pod>(other);
    core.kubernetes_changed(vec![cluster.update()]);
    assert_eq!((of(&core).labels["app"].as_str(), groups(&core).len()), ("other", 0));
    // Another life of the name says nothing about this attachment; the last that was known of it stays.
    let mut next = web.clone();
    next["metadata"]["uid"] = json!("another");
    cluster.put::<Pod>(next.clone());
    core.kubernetes_changed(vec![cluster.update()]);
    assert_eq!(of(&core).labels["app"], "other");
    assert_eq!(of(&core).labels["k8s.pod.uid"], "uid-a-web");
    // The object goes before its DEL comes.
    cluster.gone::<Pod>(&next);
    core.kubernetes_changed(vec![cluster.update()]);
    assert_eq!(of(&core).labels["app"], "other");
    core.cni_del(&del("c1")).unwrap();
    assert!(!core.world.endpoints.contains_key(&key));
    is_whole(&outside, &mut core);
}

#[test]
fn a_pod_of_a_node_whose_range_is_refused_hears_why() {
    let outside = cluster_node();
    let mut cluster = Cluster::new();
    let web = pod("a", "web", 1, 9, json!({}));
    cluster.put::<Pod>(web.clone());
    cluster.put::<ServiceCidr>(
        json!({"metadata": {"name": "kubernetes", "creationTimestamp": "2026-01-01T00:00:00Z"},
               "spec": {"cidrs": ["10.200.0.0/22"]}}),
    );
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    let refused = core.cni_add(&add_pod(&web, "c1")).unwrap_err();
    let why = "Node n1: its pod CIDR 10.200.1.0/24 overlaps 10.200.0.0/22, which ServiceCIDR kubernetes gives to Services";
    assert!(refused.message.starts_with(why), "{}", refused.message);
    let told = core.kubernetes_status().faults;
    assert_eq!(told.iter().map(|f| f.reason.as_str()).collect::<Vec<_>>(), ["PodCidrConflict"; 3]);
    is_whole(&outside, &mut core);
}

#[test]
fn ports_of_the_node_come_and_go_with_the_attachment_of_their_pod() {
    let outside = cluster_node();
    let mut cluster = Cluster::new();
    let mut web = pod("a", "web", 1, 9, json!({}));
    web["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(8080);
    cluster.put::<Pod>(web.clone());
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    assert!(core.world.services.is_empty());
    core.cni_add(&add_pod(&web, "c1")).unwrap();
    core.refresh_stale();
    let ports: Vec<u16> = core.plan.services.frontends().map(|(key, _)| key.port).collect();
    assert!(!ports.is_empty() && ports.iter().all(|p| *p == 8080), "{ports:?}");
    is_whole(&outside, &mut core);
    web["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(9090);
    cluster.put::<Pod>(web.clone());
    core.kubernetes_changed(vec![cluster.update()]);
    assert!(core.plan.services.frontends().all(|(key, _)| key.port == 9090));
    core.cni_del(&del("c1")).unwrap();
    core.refresh_stale();
    assert!(core.plan.services.frontends().next().is_none());
    is_whole(&outside, &mut core);
}

#[test]
fn what_the_document_names_too_stays_the_documents_and_is_told() {
    let outside = Node::new(Some(&document(true)));
    let mut cluster = Cluster::new();
    cluster.put::<Pod>(known_pod(0, 2, 0));
    cluster.put::<LoadBalancer>(service("a", 1));
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    let key: EndpointKey = "default/a.pod-0".parse().unwrap();
    let address = |core: &Core| core.world.endpoints[&key].ips[0].to_string();
    assert_eq!(address(&core), "10.77.0.5");
    let hidden = |core: &Core| {
        let faults = core.kubernetes_status().faults;
        faults.into_iter().filter(|f| f.reason == "Hidden").map(|f| f.kind).collect::<Vec<_>>()
    };
    assert_eq!(hidden(&core), ["endpoint", "service"]);
    outside.write(&document(false));
    core.reload();
    assert_eq!(hidden(&core), [""; 0]);
    assert_eq!(address(&core), "10.200.2.2");
    is_whole(&outside, &mut core);
}

#[test]
fn a_cluster_node_without_a_document_has_nothing_to_complain_of() {
    let outside = Node::new(None);
    let mut cluster = Cluster::new();
    let mut core = outside.cluster_agent();
    core.kubernetes_changed(vec![cluster.update()]);
    // As the safety timer does.
    core.reload();
    assert_eq!(core.document_error, "");
    is_whole(&outside, &mut core);
    outside.write(&document(true));
    core.reload();
    assert!(
        core.document_error.is_empty()
            && core.world.endpoints.contains_key(&"default/a.pod-0".parse::<EndpointKey>().unwrap())
    );
    // One that vanishes is another matter.
    fs::remove_file(outside.path()).unwrap();
    core.reload();
    assert!(!core.document_error.is_empty());
    is_whole(&outside, &mut core);
}
