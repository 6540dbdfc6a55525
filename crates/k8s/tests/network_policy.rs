//! NetworkPolicy as the API reference says it, walked slowly over the JSON objects, against what the compiled entries decide.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_compiler::{
    DecidedBy, Explanation, Numbers, Party, PortQuery, Query, Verdict, compile, explain,
};
use flowloom_k8s::slices::{Join, Limits, Packer, PublishedSlice, Step, Workload, WorkloadSliceSpec};
use flowloom_k8s::{
    EndpointSlice, Happening, Held, Kind, LoadBalancer, Namespace, NetworkPolicy, Node, ObjectName, Options,
    Peers, Pod, Translator,
};
use flowloom_model::{
    AllowLocalhost, Attachment, DEFAULT_VNI, DEFAULT_VPC, DefaultPolicy, Endpoint, NodeName, SharedMap, Vpc,
    VpcName, World,
};
use ipnet::IpNet;
use serde_json::{Value, json};

/// Numbers from a seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}

const KEYS: [&str; 2] = ["app", "tier"];
const VALUES: [&str; 3] = ["a", "b", "c"];
const PORTS: [u16; 4] = [80, 81, 443, 9000];
const NAMES: [&str; 2] = ["web", "api"];
const PROTOCOLS: [(&str, u8); 3] = [("TCP", 6), ("UDP", 17), ("SCTP", 132)];

fn labels(d: &mut Dice) -> Value {
    let mut map = serde_json::Map::new();
    for key in KEYS {
        if !d.one_in(3) {
            map.insert(key.into(), (*d.pick(&VALUES)).into());
        }
    }
    map.into()
}

fn selector(d: &mut Dice) -> Value {
    let mut out = json!({});
    if d.one_in(4) {
        return out;
    }
    if !d.one_in(3) {
        let key = *d.pick(&KEYS);
        out["matchLabels"] = json!({ key: *d.pick(&VALUES) });
    }
    if d.one_in(2) {
        let operator = *d.pick(&["In", "NotIn", "Exists", "DoesNotExist"]);
        let mut expression = json!({"key": *d.pick(&KEYS), "operator": operator});
        if operator.ends_with("In") {
            expression["values"] = json!([*d.pick(&VALUES), *d.pick(&VALUES)]);
        }
        out["matchExpressions"] = json!([expression]);
    }
    out
}

fn block(d: &mut Dice) -> Value {
    let mut pick = |list: &[&str]| d.pick(list).to_string();
    match pick(&["4", "6", "0"]).as_str() {
        "4" => {
            let cidr = pick(&["10.1.0.0/16", "10.1.1.0/24", "10.1.1.2/32", "192.0.2.0/24", "10.0.0.0/8"]);
            let except = match cidr.as_str() {
                "10.0.0.0/8" => json!(["10.1.1.0/24", "10.1.2.3/32"]),
                "10.1.0.0/16" => json!(["10.1.1.3/32"]),
                "10.1.1.0/24" => json!(["10.1.1.2/31"]),
                _ => json!([]),
            };
            json!({"cidr": cidr, "except": except})
        }
        "6" => json!({"cidr": "fd01:1::/48", "except": ["fd01:1:0:1::2/127"]}),
        _ => json!({"cidr": pick(&["0.0.0.0/0", "::/0"])}),
    }
}

fn peers(d: &mut Dice, field: &str, rule: &mut Value) {
    if d.one_in(4) {
        if d.one_in(2) {
            rule[field] = json!([]);
        }
        return;
    }
    let count = 1 + d.below(2);
    let list: Vec<Value> = (0..count)
        .map(|_| match d.below(4) {
            0 => json!({"podSelector": selector(d)}),
            1 => json!({"namespaceSelector": selector(d)}),
            2 => json!({"podSelector": selector(d), "namespaceSelector": selector(d)}),
            _ => json!({"ipBlock": block(d)}),
        })
        .collect();
    rule[field] = list.into();
}

fn ports(d: &mut Dice, rule: &mut Value) {
    if d.one_in(3) {
        return;
    }
    let count = d.below(3);
    let list: Vec<Value> = (0..count)
        .map(|_| {
            let mut port = json!({});
            if !d.one_in(3) {
                port["protocol"] = d.pick(&PROTOCOLS).0.into();
            }
            match d.below(4) {
                0 => {}
                1 => port["port"] = (*d.pick(&NAMES)).into(),
                2 => {
                    port["port"] = 80.into();
                    port["endPort"] = (*d.pick(&[80, 81, 8000])).into();
                }
                _ => port["port"] = (*d.pick(&PORTS)).into(),
            }
            port
        })
        .collect();
    rule["ports"] = list.into();
}

fn policy(d: &mut Dice, name: u64, namespace: &str) -> Value {
    let mut spec = json!({"podSelector": selector(d)});
    for (field, peers_field) in [("ingress", "from"), ("egress", "to")] {
        if d.one_in(3) {
            continue;
        }
        let count = d.below(3);
        let rules: Vec<Value> = (0..count)
            .map(|_| {
                let mut rule = json!({});
                peers(d, peers_field, &mut rule);
                ports(d, &mut rule);
                rule
            })
            .collect();
        spec[field] = rules.into();
    }
    match d.below(4) {
        0 => spec["policyTypes"] = json!(["Ingress"]),
        1 => spec["policyTypes"] = json!(["Egress"]),
        2 => spec["policyTypes"] = json!(["Ingress", "Egress"]),
        _ => {}
    }
    json!({"metadata": {"name": format!("p{name}"), "namespace": namespace}, "spec": spec})
}

struct Cluster {
    namespaces: Vec<Value>,
    pods: Vec<Value>,
    policies: Vec<Value>,
}

fn cluster(d: &mut Dice) -> Cluster {
    let namespaces: Vec<Value> =
        (0..3).map(|i| json!({"metadata": {"name": format!("ns{i}"), "labels": labels(d)}})).collect();
    let pods = (0..7_u64)
        .map(|i| {
            let node = 1 + i % 2;
            let ports: Vec<Value> = NAMES
                .iter()
                .filter_map(|name| {
                    if d.one_in(3) {
                        return None;
                    }
                    let (port, protocol) = (*d.pick(&PORTS), d.pick(&PROTOCOLS).0);
                    Some(json!({"name": name, "containerPort": port, "protocol": protocol}))
                })
                .collect();
            json!({
                "metadata": {"name": format!("pod{i}"), "namespace": format!("ns{}", d.below(3)), "uid": format!("u{i}"),
                    "labels": labels(d)},
                "spec": {"nodeName": format!("n{node}"), "containers": [{"ports": ports}]},
                "status": {"phase": "Running", "podIPs": [{"ip": format!("10.1.{node}.{}", 2 + i / 2)},
                    {"ip": format!("fd01:1:0:{node}::{}", 2 + i / 2)}]},
            })
        })
        .collect();
    let policies = (0..1 + d.below(4)).map(|i| policy(d, i, &format!("ns{}", i % 3))).collect();
    Cluster { namespaces, pods, policies }
}

// The oracle: the API reference, sentence by sentence, over JSON.

fn strings(v: &Value) -> BTreeMap<String, String> {
    v.as_object().into_iter().flatten().map(|(k, v)| (k.clone(), v.as_str().unwrap().into())).collect()
}

fn selects(selector: &Value, labels: &Value) -> bool {
    let labels = strings(labels);
    strings(&selector["matchLabels"]).iter().all(|(k, v)| labels.get(k) == Some(v))
        && selector["matchExpressions"].as_array().into_iter().flatten().all(|e| {
            let value = labels.get(e["key"].as_str().unwrap()).cloned();
            let among = |v: &String| e["values"].as_array().unwrap().iter().any(|x| x == v);
            match e["operator"].as_str().unwrap() {
                "In" => value.is_some_and(|v| among(&v)),
                "NotIn" => !value.is_some_and(|v| among(&v)),
                "Exists" => value.is_some(),
                _ => value.is_none(),
            }
        })
}

fn isolates(policy: &Value, direction: &str) -> bool {
    let types: Vec<&str> =
        policy["spec"]["policyTypes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !types.is_empty() {
        return types.contains(&direction);
    }
    direction == "Ingress" || policy["spec"]["egress"].as_array().is_some_and(|r| !r.is_empty())
}

struct Side<'a> {
    ip: IpAddr,
    pod: Option<&'a Value>,
}

fn peer_matches(c: &Cluster, policy: &Value, peer: &Value, other: &Side<'_>) -> bool {
    if let Some(block) = peer.get("ipBlock") {
        let net = |v: &Value| v.as_str().unwrap().parse::<IpNet>().unwrap();
        return net(&block["cidr"]).contains(&other.ip)
            && !block["except"].as_array().into_iter().flatten().any(|e| net(e).contains(&other.ip));
    }
    let Some(pod) = other.pod else { return false };
    let namespace = match peer.get("namespaceSelector") {
        None => pod["metadata"]["namespace"] == policy["metadata"]["namespace"],
        Some(s) => {
            let of = |n: &&Value| n["metadata"]["name"] == pod["metadata"]["namespace"];
            selects(s, &c.namespaces.iter().find(of).unwrap()["metadata"]["labels"])
        }
    };
    namespace && peer.get("podSelector").is_none_or(|s| selects(s, &pod["metadata"]["labels"]))
}

fn port_matches(entry: &Value, protocol: u8, port: u16, destination: &Side<'_>) -> bool {
    let word = entry["protocol"].as_str().unwrap_or("TCP");
    if PROTOCOLS.iter().find(|p| p.0 == word).unwrap().1 != protocol {
        return false;
    }
    match &entry["port"] {
        Value::Null => true,
        Value::String(name) => destination.pod.is_some_and(|pod| {
            pod["spec"]["containers"][0]["ports"]
                .as_array()
                .unwrap()
                .iter()
                .any(|p| p["name"] == *name && p["protocol"] == word && p["containerPort"] == port)
        }),
        number => {
            let first = number.as_u64().unwrap();
            let last = entry["endPort"].as_u64().unwrap_or(first);
            (first..=last).contains(&u64::from(port))
        }
    }
}

fn allows(c: &Cluster, direction: &str, own: &Side<'_>, other: &Side<'_>, protocol: u8, port: u16) -> bool {
    let Some(pod) = own.pod else { return true };
    let (rules, peers) = if direction == "Ingress" { ("ingress", "from") } else { ("egress", "to") };
    let destination = if direction == "Ingress" { own } else { other };
    let applying: Vec<&Value> = c
        .policies
        .iter()
        .filter(|p| {
            p["metadata"]["namespace"] == pod["metadata"]["namespace"]
                && selects(&p["spec"]["podSelector"], &pod["metadata"]["labels"])
                && isolates(p, direction)
        })
        .collect();
    applying.is_empty()
        || applying.iter().any(|policy| {
            policy["spec"][rules].as_array().into_iter().flatten().any(|rule| {
                let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
                let (from, ports) = (list(&rule[peers]), list(&rule["ports"]));
                (from.is_empty() || from.iter().any(|p| peer_matches(c, policy, p, other)))
                    && (ports.is_empty()
                        || ports.iter().any(|p| port_matches(p, protocol, port, destination)))
            })
        })
}

// The same cluster through the source.

type Told<T> = Vec<(ObjectName, Result<T, String>)>;

fn told<T: Kind>(list: &[Value]) -> Told<T> {
    let named = |v: &Value| {
        let text = |key: &str| v["metadata"][key].as_str().unwrap_or_default().to_owned();
        (ObjectName::new(text("namespace"), text("name")), T::decode(&v.to_string()))
    };
    list.iter().map(named).collect()
}

fn put<T: Held>(t: &mut Translator, list: &[Value]) {
    t.replace::<T>(told(list));
}

/// What a node hears of Pods that are not its own: what the controller publishes of them, as JSON.
fn by_slices(all: Told<Pod>, local: &NodeName) -> Told<Pod> {
    let mut packer = Packer::new(Limits { workloads: 3, ..Limits::default() });
    for (name, pod) in &all {
        packer.upsert(Workload::of(name, pod.as_ref().unwrap()).unwrap());
    }
    let read = |name: &str| {
        let json = serde_json::to_string(&packer.content(name, 1, 1).unwrap()).unwrap();
        let spec: WorkloadSliceSpec = serde_json::from_str(&json).unwrap();
        (ObjectName::new("", name), Ok(PublishedSlice { uid: name.into(), version: "1".into(), spec }))
    };
    let slices = packer.slices().map(read).collect();
    let mut join = Join::new(local.clone());
    let own = all.into_iter().filter(|(_, pod)| pod.as_ref().unwrap().node.as_ref() == Some(local)).collect();
    assert_eq!(join.local(Happening::Listed(own)), []);
    let mut steps = join.slices(Happening::Listed(slices));
    let Some(Step::Replace(all)) = steps.pop() else { panic!("{steps:?}") };
    all
}

fn world(c: &Cluster, local: &str, peers: Peers) -> World {
    let node: NodeName = local.parse().unwrap();
    let mut t = Translator::new(Options { node: node.clone() }).unwrap();
    let nodes: Vec<Value> = (1..=2)
        .map(|i| {
            json!({"metadata": {"name": format!("n{i}")},
                "spec": {"podCIDRs": [format!("10.1.{i}.0/24"), format!("fd01:1:0:{i}::/64")]},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{i}")},
                    {"type": "InternalIP", "address": format!("2001:db8::{i}")}]}})
        })
        .collect();
    put::<Node>(&mut t, &nodes);
    put::<Namespace>(&mut t, &c.namespaces);
    t.replace::<Pod>(match peers {
        Peers::Pods => told(&c.pods),
        Peers::Slices => by_slices(told(&c.pods), &node),
    });
    put::<LoadBalancer>(&mut t, &[]);
    put::<EndpointSlice>(&mut t, &[]);
    assert_eq!(t.waiting_for(), ["NetworkPolicy"]);
    put::<NetworkPolicy>(&mut t, &c.policies);
    assert!(t.waiting_for().is_empty());
    let delta = t.delta();
    assert!(t.faults().is_empty(), "{:?}", t.faults());
    let vpc: VpcName = DEFAULT_VPC.parse().unwrap();
    let mut world = World::default();
    world.vpcs.insert(
        vpc.clone(),
        Vpc { name: vpc.clone(), vni: Some(DEFAULT_VNI), default_policy: DefaultPolicy::Allow },
    );
    fn some<K: Ord + Clone, V: Clone>(changes: flowloom_k8s::Changes<K, V>) -> SharedMap<K, V> {
        changes.into_iter().filter_map(|(k, v)| Some((k, v?))).collect()
    }
    world.nodes = some(delta.nodes);
    world.subnets = some(delta.subnets);
    world.security_groups = some(delta.security_groups);
    world.endpoints = some(delta.endpoints);
    // As the agent joins an attachment and its Pod.
    for (name, pod) in some(delta.local_pods) {
        let object = t.cache::<Pod>().object(&name).unwrap();
        let endpoint = Endpoint {
            vpc: vpc.clone(),
            name: pod.key.name.clone(),
            subnet: format!("node.{local}").parse().unwrap(),
            ips: object.ips.clone(),
            mac: None,
            node: node.clone(),
            security_groups: pod.security_groups,
            labels: pod.labels,
            named_ports: pod.named_ports,
            attachment: Attachment::Cni,
            allow_localhost: AllowLocalhost::default(),
        };
        world.endpoints.insert(pod.key, endpoint.into());
    }
    assert_eq!(world.endpoints.len(), c.pods.len());
    world
}

fn ip_of(pod: &Value, family: usize) -> IpAddr {
    pod["status"]["podIPs"][family]["ip"].as_str().unwrap().parse().unwrap()
}

fn check(seed: u64, peers: Peers) -> u64 {
    let d = &mut Dice(seed);
    let c = cluster(d);
    let world = world(&c, "n1", peers);
    let mut numbers = Numbers::default();
    let compiled = compile(&world, &"n1".parse().unwrap(), &mut numbers);
    assert!(compiled.conditions.is_empty(), "seed {seed}: {:?}", compiled.conditions);
    let mut asked = 0;
    for _ in 0..60 {
        let family = usize::try_from(d.below(2)).unwrap();
        let outside: [IpAddr; 2] = [
            (*d.pick(&["192.0.2.77", "203.0.113.9", "10.1.1.77"])).parse().unwrap(),
            "2001:db8:9::1".parse().unwrap(),
        ];
        let side = |d: &mut Dice| {
            let pod = (!d.one_in(5)).then(|| d.pick(&c.pods));
            Side { ip: pod.map_or(outside[family], |p| ip_of(p, family)), pod }
        };
        let (source, destination) = (side(d), side(d));
        if (source.pod.is_none() && destination.pod.is_none()) || source.ip == destination.ip {
            continue;
        }
        let (protocol, port) = if d.one_in(8) {
            (if family == 0 { 1 } else { 58 }, 0)
        } else {
            (d.pick(&PROTOCOLS).1, *d.pick(&PORTS))
        };
        let want = allows(&c, "Egress", &source, &destination, protocol, port)
            && allows(&c, "Ingress", &destination, &source, protocol, port);
        let query = Query {
            vpc: DEFAULT_VPC.parse().unwrap(),
            source: Party::Address(source.ip),
            destination: Party::Address(destination.ip),
            protocol,
            port: match protocol {
                1 => PortQuery::Icmp { kind: 8, code: 0 },
                58 => PortQuery::Icmp { kind: 128, code: 0 },
                _ => PortQuery::Port(port),
            },
        };
        let got = explain(&world, &compiled.plan, &query).unwrap();
        assert_eq!(
            got.verdict == Verdict::Allow,
            want,
            "seed {seed}: {} -> {} protocol {protocol} port {port}\n{:#?}\n{}",
            source.ip,
            destination.ip,
            got,
            serde_json::to_string_pretty(&c.policies).unwrap()
        );
        asked += 1;
    }
    asked
}

#[test]
fn compiled_policies_decide_as_the_api_reference_says() {
    let asked: u64 = (0..2000).map(|seed| check(seed, Peers::Pods)).sum();
    assert!(asked > 60_000, "only {asked} questions were asked");
}

#[test]
fn they_decide_the_same_where_other_nodes_pods_come_from_slices() {
    let asked: u64 = (2000..2300).map(|seed| check(seed, Peers::Slices)).sum();
    assert!(asked > 9_000, "only {asked} questions were asked");
}

/// The node that is asked watches neither that Pod nor decides for it, and still has to say what that Pod's node does.
#[test]
fn explain_tells_what_the_policy_of_a_pod_decides_that_came_by_slice() {
    let pod = |name: &str, node: u8| {
        json!({"metadata": {"name": name, "namespace": "shop", "uid": name, "labels": {"app": name}},
            "spec": {"nodeName": format!("n{node}"), "containers": [{"ports": [{"name": "web", "containerPort": 80, "protocol": "TCP"}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": format!("10.1.{node}.2")}]}})
    };
    let c = Cluster {
        namespaces: vec![json!({"metadata": {"name": "shop", "labels": {}}})],
        pods: vec![pod("front", 1), pod("db", 2)],
        policies: vec![json!({"metadata": {"name": "closed", "namespace": "shop"},
            "spec": {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "front"}}}], "ports": [{"protocol": "TCP", "port": "web"}]}]}})],
    };
    let world = world(&c, "n1", Peers::Slices);
    let mut numbers = Numbers::default();
    let compiled = compile(&world, &"n1".parse().unwrap(), &mut numbers);
    let ask = |port: u16| -> Explanation {
        let [source, destination] = ["10.1.1.2", "10.1.2.2"].map(|ip| Party::Address(ip.parse().unwrap()));
        let vpc = DEFAULT_VPC.parse().unwrap();
        let query = Query { vpc, source, destination, protocol: 6, port: PortQuery::Port(port) };
        explain(&world, &compiled.plan, &query).unwrap()
    };
    let (passes, stops) = (ask(80), ask(81));
    assert_eq!((passes.verdict, stops.verdict), (Verdict::Allow, Verdict::Drop));
    let [passes, stops] = [passes, stops].map(|e| e.ingress.unwrap());
    assert!(!passes.local && passes.endpoint.name.as_str() == "shop.db", "{passes:?}");
    let DecidedBy::Rule { rule, .. } = &passes.decided_by else { panic!("{passes:?}") };
    assert!(rule.to_string().contains("netpol.shop.closed"), "{rule}");
    assert_eq!(stops.decided_by, DecidedBy::Default, "no rule of it allows the port");
}

/// A policy that is not understood opens nothing, and its neighbours stay.
#[test]
fn a_malformed_policy_keeps_its_last_good_version() {
    let mut t = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
    let name = ObjectName::new("a", "p");
    let good =
        r#"{"metadata":{"name":"p","namespace":"a"},"spec":{"podSelector":{},"policyTypes":["Ingress"]}}"#;
    t.put::<NetworkPolicy>(&name, NetworkPolicy::decode(good));
    assert_eq!(t.delta().security_groups.len(), 1);
    t.put::<NetworkPolicy>(&name, NetworkPolicy::decode(r#"{"spec":{"podSelector":{"matchLabels":7}}}"#));
    let delta = t.delta();
    assert!(delta.security_groups.values().all(Option::is_some), "it is still there");
    let fault = &t.faults()[0];
    assert!(fault.message.contains("matchLabels") && fault.message.contains("last good"), "{fault}");
    t.put::<NetworkPolicy>(&name, NetworkPolicy::decode(good));
    assert!(t.faults().is_empty());
}

/// Whoever wrote it wanted its Pods isolated; what it would have opened nobody knows.
#[test]
fn a_policy_that_never_was_good_isolates_the_pods_it_selects_and_is_told() {
    let mut t = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
    let namespace = ObjectName::new("", "a");
    t.put::<Namespace>(&namespace, Namespace::decode(r#"{"metadata":{"name":"a"}}"#));
    let pod = json!({"metadata": {"name": "web", "namespace": "a", "uid": "u", "labels": {"app": "web"}}, "spec": {"nodeName": "n1"}});
    t.put::<Pod>(&ObjectName::new("a", "web"), Pod::decode(&pod.to_string()));
    let policy = |protocol: &str| {
        json!({"metadata": {"name": "p", "namespace": "a"},
            "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"ports": [{"protocol": protocol, "port": 80}]}]}})
        .to_string()
    };
    let (name, broken) = (ObjectName::new("a", "p"), policy("IPX"));
    let reason = NetworkPolicy::decode(&broken).unwrap_err();
    let salvaged = || Ok(NetworkPolicy::salvage(&broken, &reason).unwrap());
    t.put::<NetworkPolicy>(&name, salvaged());
    let delta = t.delta();
    let group = delta.security_groups.values().next().unwrap().as_ref().unwrap();
    assert_eq!(
        (group.default_deny_ingress, group.default_deny_egress, group.rules.len()),
        (None, Some(false), 0)
    );
    assert_eq!(delta.local_pods.values().next().unwrap().as_ref().unwrap().security_groups.len(), 1);
    let fault = &t.faults()[0];
    assert!(fault.message.contains("protocol") && fault.message.contains("isolated"), "{fault}");
    t.put::<NetworkPolicy>(&name, NetworkPolicy::decode(&policy("TCP")));
    assert!(t.faults().is_empty());
    assert_eq!(t.delta().security_groups.values().next().unwrap().as_ref().unwrap().rules.len(), 1);
    // Now there is a good version to stay with.
    t.put::<NetworkPolicy>(&name, salvaged());
    assert!(t.faults()[0].message.contains("last good"));
    let group = t.delta().security_groups.into_values().next().unwrap().unwrap();
    assert_eq!(group.rules.len(), 1);
}
