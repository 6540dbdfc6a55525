//! Every command against a fake agent: what is asked, what is shown, how the process exits.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../../cni/tests/fake_agent/mod.rs"]
mod fake_agent;

use std::path::Path;

use assert_cmd::Command;
use fake_agent::{FakeAgent, Reply, error, ok};
use serde_json::{Value, json};

struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn flowloom(socket: &Path, line: &str) -> Ran {
    let output = Command::cargo_bin("flowloom")
        .unwrap()
        .env("FLOWLOOM_SOCKET", socket)
        .env_remove("NO_COLOR")
        .args(line.split_whitespace())
        .output()
        .unwrap();
    Ran {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn named(name: &str, number: u32) -> Value {
    json!({"name": name, "number": number})
}

fn endpoint(vpc: &str, name: &str, ip: &str) -> Value {
    json!({
        "vpc": named(vpc, 100), "endpoint": named(name, 7), "state": "ready", "source": "document", "subnet": "web",
        "ips": [ip], "gateways": ["10.0.0.1"], "mac": "02:00:00:00:00:05", "device": named("fl7", 12), "delivery": "peer",
        "netns": null, "interface": "eth0", "identity": 300, "labels": {"app": "shop"}, "security_groups": ["front"],
        "egress_slot": 3, "ingress_slot": 4, "revision": 9,
        "traffic": {"egress_packets": 10, "egress_bytes": 2048, "ingress_packets": 0, "ingress_bytes": 0},
        "attachment": {"container_id": "c1", "ifname": "eth0", "netns": "/run/netns/c1", "network": "net"},
        "conditions": [{"type": "Ready", "status": false, "reason": "AwaitingVni", "message": "run apply", "observed_generation": 2, "last_transition_ms": 1000}],
    })
}

fn judgement(direction: &str, verdict: &str, kernel: &str) -> Value {
    json!({
        "endpoint": "red/web-1", "local": true, "direction": direction, "verdict": verdict,
        "rule": named("red/front/no-db", 5), "why": "tcp to port 5432 of labels app=db",
        "peer": {"address": "10.0.0.9", "identity": 301, "endpoint": "red/db", "labels": {"app": "db"}, "cidrs": ["10.0.0.0/8"]},
        "kernel": {"verdict": kernel, "rule": named("red/front/no-db", 5), "slot": 3, "identity": 301},
        "considered": [
            {"rule": "red/front/web", "tier": 1, "priority": 50, "action": "allow", "matched": false, "why": "port 80 is not 5432"},
            {"rule": "red/front/no-db", "tier": 1, "priority": 100, "action": verdict, "matched": true, "why": "app=db"},
        ],
    })
}

fn service() -> Value {
    json!({
        "vpc": named("default", 1), "name": "shop.front", "cluster_ips": ["10.96.0.7"], "external_ips": [], "load_balancer_ips": ["198.51.100.1"],
        "affinity_seconds": 10800, "internal_local": false, "external_local": true, "source_ranges": ["192.0.2.0/24"], "health_check_port": 31000,
        "ports": [{"name": "http", "protocol": "tcp", "port": 80, "node_port": 30080, "host_addresses": [], "backends": 2, "ready": 1, "number": 5}],
        "conditions": [],
    })
}

fn event(verdict: &str, reason: Option<&str>) -> Value {
    json!({
        "type": "event", "seq": 1, "time_ns": 1_796_017_469_012_000_000_u64, "kind": if reason.is_some() { "drop" } else { "verdict" },
        "verdict": verdict, "reason": reason, "vpc": named("red", 100), "endpoint": named("web-1", 7), "peer_endpoint": null,
        "direction": "egress", "hook": "from_endpoint", "family": 6, "protocol": "tcp",
        "src": "fd00::5", "src_port": 40000, "src_endpoint": named("web-1", 7), "src_identity": 300,
        "dst": "fd00::9", "dst_port": 5432, "dst_endpoint": null, "dst_identity": 2,
        "icmp": null, "tcp_flags": "S", "rule": named("red/front/no-db", 5), "len": 74, "rate_limited": 3,
    })
}

fn status(degraded: bool) -> Value {
    json!({
        "node": "n1", "version": "0.1.0", "abi_version": 1, "started_ms": 1000, "ready": true, "forwarding": "ebpf",
        "document": {"path": "/etc/flowloom/desired.yaml", "generation": 3, "applied_generation": 3, "loaded_ms": 1_796_017_469_000_u64, "error": ""},
        "reconcile": {"passes": 4, "last_writes": 0, "total_writes": 99, "last_duration_us": 1500, "errors": []},
        "endpoints": {"total": 3, "ready": 2, "waiting": 1, "failed": 0},
        "conntrack": {"established": 5, "capacity": 131_072, "swept": 7},
        "events": {"read": 8, "lost": 0, "streams": 1},
        "degraded": if degraded {
            json!([{"kind": "vpc", "name": "blue", "conditions": [{"type": "Ready", "status": false, "reason": "AwaitingVni",
                "message": "run flowloom apply", "observed_generation": 3, "last_transition_ms": 0}]}])
        } else { json!([]) },
    })
}

fn answers(r: &fake_agent::Request) -> Reply {
    match r.path.as_str() {
        "/v1/health" => ok(json!({"ready": true, "node": "n1", "version": "0.2.0", "waiting_for": []})),
        "/v1/status" => ok(status(true)),
        "/v1/endpoints" => ok(
            json!({"endpoints": [endpoint("red", "web-1", "10.0.0.5"), endpoint("blue", "web-1", "10.0.0.5")]}),
        ),
        "/v1/endpoints/red/web-1" => ok(endpoint("red", "web-1", "10.0.0.5")),
        "/v1/kubernetes" => ok(json!({
            "enabled": true, "server": "https://192.0.2.9:6443/", "synced": false, "local_pods": 4, "updates": 12, "applied_us": 900,
            "kinds": [
                {"kind": "Pod", "listed": true, "objects": 40, "refused": 1, "heard_ms": null, "changed_ms": null, "lists": 2, "failures": 3, "error": ""},
                {"kind": "Node", "listed": false, "objects": 0, "refused": 0, "heard_ms": null, "changed_ms": null, "lists": 0, "failures": 7, "error": "the server answered 403"},
                {"kind": "ServiceCIDR", "listed": false, "objects": 0, "refused": 0, "heard_ms": null, "changed_ms": null, "lists": 0, "failures": 0, "error": "404", "optional": true},
            ],
            "faults": [{"kind": "Pod", "name": "shop/bad", "reason": "Refused", "message": "metadata.labels: invalid type"}],
        })),
        "/v1/ipam" => ok(json!({"pools": [
            {"vpc": "red", "subnet": "web", "cidr": "10.0.0.0/24", "gateway": "10.0.0.1", "allocates": true, "capacity": 253, "available": 252, "used": [
                {"address": "10.0.0.5", "endpoint": "red/web-1", "attachment": "c1/eth0", "cooling_ms": null},
                {"address": "10.0.0.6", "endpoint": "", "attachment": "", "cooling_ms": 59_001},
            ]},
            {"vpc": "blue", "subnet": "six", "cidr": "fd00::/64", "gateway": null, "allocates": false, "capacity": u64::MAX, "available": u64::MAX, "used": []},
        ]})),
        "/v1/identities" => ok(json!({"identities": [
            {"identity": 2, "vpc": "", "reserved": "world", "endpoint": false, "labels": {}, "security_groups": [], "cidrs": [], "endpoints": []},
            {"identity": 300, "vpc": "red", "reserved": null, "endpoint": true, "labels": {"app": "shop"}, "security_groups": ["front"], "cidrs": ["10.0.0.0/8"],
             "endpoints": ["red/a", "red/b", "red/c", "red/d"]},
        ]})),
        "/v1/policy/entries" => ok(
            json!({"slots": [{"slot": 3, "direction": "egress", "endpoints": ["red/web-1"], "held": {"red/web-1": "freeze"}, "entries": [
                {"peer": named("app=db", 301), "protocol": "tcp", "ports": "5432", "verdict": "drop", "rule": named("red/front/no-db", 5), "precedence": 77, "log": true, "stateless": true},
                {"peer": named("any", 0), "protocol": "any", "ports": "any", "verdict": "allow", "rule": named("default", 0), "precedence": 1, "log": false, "stateless": false},
            ]}]}),
        ),
        "/v1/services" => ok(json!({"services": [service()]})),
        "/v1/services/shop/front" => ok(service()),
        "/v1/services/shop/front/explain" => ok(json!({
            "service": service(), "node": "n1", "zone": "east", "here": true, "frontends": [{
                "kind": "cluster-ip", "scope": "inside", "ip": "10.96.0.7", "protocol": "tcp", "port": 80, "service_port": 80,
                "taken_by": null, "local_policy": false, "source_ranges": [], "answer": "backend", "backends": [
                    {"ip": "10.1.0.1", "port": 8080, "node": "n1", "local": true, "endpoint": "shop.front-0", "zones": ["east"], "nodes": [],
                     "used": true, "reason": "ready", "why": "ready"},
                    {"ip": "10.1.0.2", "port": 8080, "node": "n2", "local": false, "endpoint": null, "zones": ["west"], "nodes": [],
                     "used": false, "reason": "other-zone", "why": "meant for another zone (topology hints)"},
                ],
            }, {
                "kind": "load-balancer", "scope": "outside", "ip": "198.51.100.1", "protocol": "tcp", "port": 80, "service_port": 80,
                "taken_by": null, "local_policy": true, "source_ranges": ["192.0.2.0/24"], "answer": "silence", "backends": [],
            }],
        })),
        "/v1/policy/rules" => {
            ok(json!({"rules": [{"rule": named("red/front/no-db", 5), "hits": 12, "bytes": 888}]}))
        }
        "/v1/policy/quarantine" => {
            ok(json!({"endpoint": "red/web-1", "previous_revision": 9, "revision": 10,
            "quarantine": {"ingress": true, "egress": false, "reason": "t", "since_ms": 1}}))
        }
        "/v1/policy/freeze" => ok(json!({"endpoint": "red/web-1", "previous_revision": 9, "revision": 9,
            "frozen": {"revision": 9, "reason": "", "since_ms": 1, "withheld": "gone red/front/no-db"}})),
        "/v1/policy/rollback" => ok(json!({"endpoint": "red/web-1", "previous_revision": 9, "revision": 10,
            "frozen": {"revision": 8, "reason": "", "since_ms": 1, "withheld": "", "rolled_back": true}})),
        "/v1/policy/release" => ok(json!({"endpoint": "red/web-1", "previous_revision": 10, "revision": 0})),
        "/v1/policy/history" => ok(json!({"capacity": 2000, "changes": [
            {"number": 7, "time_ms": 1_796_017_469_000_u64, "endpoint": "red/web-1", "source": {"kind": "cni", "container_id": "c1", "ifname": "eth0"},
             "previous_revision": 0, "attempted_revision": 8, "directions": [{"direction": "egress", "slot": 3}, {"direction": "ingress", "slot": 4}], "error": ""},
            {"number": 8, "time_ms": 1_796_017_470_000_u64, "endpoint": "red/web-1", "source": {"kind": "document", "generation": 4, "digest": "ab12"},
             "previous_revision": 8, "attempted_revision": 9, "directions": [{"direction": "ingress", "slot": 5, "entries": {"added": 3, "updated": 1, "removed": 2}}],
             "error": "policy slot 5: no room"},
        ]})),
        "/v1/policy/wait" => ok(json!({"generation": 3, "revision": 9, "waited_us": 1500})),
        "/v1/conntrack" if r.method == "DELETE" => ok(json!({"removed": 4})),
        "/v1/conntrack" => ok(json!({"truncated": true, "connections": [{
            "vpc": named("red", 100), "protocol": "tcp", "src": "10.0.0.5", "src_port": 40000, "dst": "10.0.0.9", "dst_port": 80,
            "src_endpoint": named("web-1", 7), "dst_endpoint": null, "state": "established", "established": true, "flags": ["seen-reply"],
            "age_s": 192, "idle_s": 5, "expires_s": 7995, "packets": [3, 2], "bytes": [300, 2048],
            "egress": {"verdict": "allow", "rule": named("red/front/web", 4), "revision": 9, "generation": 1}, "ingress": null,
        }]})),
        "/v1/drops" => ok(
            json!({"drops": [{"vpc": named("red", 100), "endpoint": named("web-1", 7), "direction": "egress",
            "reason": named("SpoofedSource", 8), "text": "source address or MAC is not the endpoint's", "packets": 2, "bytes": 120}]}),
        ),
        "/v1/events" => Reply::Lines(vec![
            event("allow", None),
            event("drop", Some("PolicyEgress")),
            json!({"type": "lost", "count": 4}),
        ]),
        _ => error(404, "NotFound", "no endpoint red/none on this node"),
    }
}

fn agent() -> FakeAgent {
    FakeAgent::start(answers)
}

/// Runs, expects success without remarks, returns stdout and the one request.
fn asked(line: &str) -> (String, fake_agent::Request) {
    let agent = agent();
    let ran = flowloom(&agent.socket(), line);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{line}");
    let mut requests = agent.requests();
    assert_eq!(requests.len(), 1, "{line}");
    (ran.out, requests.remove(0))
}

#[test]
fn endpoint_list_and_get() {
    let (out, _) = asked("endpoint list");
    assert_eq!(
        out,
        "\
VPC   NAME   STATE  ADDRESSES  GROUPS  SOURCE    REV
red   web-1  ready  10.0.0.5   front   document  9
blue  web-1  ready  10.0.0.5   front   document  9
"
    );
    let (out, _) = asked("endpoint list --vpc blue -o wide");
    assert_eq!(out.lines().count(), 2);
    assert!(out.contains("fl7") && out.contains("app=shop") && out.contains("02:00:00:00:00:05"), "{out}");
    let (out, request) = asked("endpoint get red/web-1");
    assert_eq!(request.path, "/v1/endpoints/red/web-1");
    for part in [
        "red/web-1",
        "fl7 (ifindex 12), delivery peer",
        "c1/eth0",
        "10 packets, 2.0 KiB",
        "AwaitingVni",
        "run apply",
    ] {
        assert!(out.contains(part), "{out} lacks {part}");
    }
    let (_, request) = asked("endpoint get web-1 --vpc red");
    assert_eq!(request.path, "/v1/endpoints/red/web-1");
}

#[test]
fn every_format_carries_the_same_answer() {
    let (json_text, _) = asked("endpoint list -o json");
    let value: Value = serde_json::from_str(&json_text).unwrap();
    assert_eq!(value["endpoints"][0], endpoint("red", "web-1", "10.0.0.5"));
    let (yaml, _) = asked("endpoint list -o yaml");
    assert!(yaml.contains("name: web-1") && yaml.contains("egress_bytes: 2048"), "{yaml}");
    for command in [
        "status",
        "ipam",
        "identity list",
        "policy entries",
        "policy rules",
        "policy wait",
        "policy history",
        "drops",
        "endpoint get red/web-1",
        "service list",
        "service get shop/front",
        "service explain shop/front",
    ] {
        let (text, _) = asked(&format!("{command} -o json"));
        assert!(serde_json::from_str::<Value>(&text).is_ok(), "{command}");
        assert!(asked(&format!("{command} -o yaml")).0.contains(": "), "{command}");
        assert!(
            !asked(&format!("{command} -o table")).0.contains('\u{1b}'),
            "{command}: colours into a pipe"
        );
        assert!(!asked(&format!("{command} --color always")).0.is_empty(), "{command}");
    }
    assert!(asked("endpoint list --color always").0.contains("\u{1b}["));
}

#[test]
fn services_and_why_a_backend_is_used_or_not() {
    let (out, _) = asked("service list");
    assert_eq!(
        out,
        "\
VPC      NAME        ADDRESSES  PORTS         READY
default  shop.front  10.96.0.7  80:30080/tcp  1/2
"
    );
    assert_eq!(asked("svc ls --vpc red").1.query, "vpc=red");
    let (out, _) = asked("service list -o wide");
    assert!(out.contains("internal cluster, external local") && out.contains("10800s"), "{out}");
    let (out, _) = asked("service get svc/shop/front");
    assert!(out.contains("192.0.2.0/24") && out.contains("31000"), "{out}");
    let (out, request) = asked("service explain shop/front");
    assert_eq!(request.path, "/v1/services/shop/front/explain");
    assert_eq!(
        out,
        "\
default/shop.front on node n1, zone east

10.96.0.7 80/tcp from inside (cluster-ip): 1 of 2 backends
  BACKEND        NODE  USED  WHY
  10.1.0.1:8080  n1    yes   ready
  10.1.0.2:8080  n2    no    meant for another zone (topology hints)

198.51.100.1 80/tcp from outside (load-balancer, traffic policy Local, only from 192.0.2.0/24): dropped: no backend here, other nodes have some
"
    );
    let agent = agent();
    let ran = flowloom(&agent.socket(), "service get red/web --vpc blue");
    assert_eq!(ran.code, 2, "{}", ran.err);
}

#[test]
fn what_is_watched_of_kubernetes_and_which_objects_are_refused_and_why() {
    let (out, request) = asked("k8s status");
    assert_eq!(request.path, "/v1/kubernetes");
    let rows: Vec<_> = out.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for row in [
        "server: https://192.0.2.9:6443/",
        "first lists: waiting",
        "pods here: 4",
        "Pod 40 1 never never watching",
        "Node 0 0 never never the server answered 403",
        "ServiceCIDR 0 0 never never not shown",
        "Pod shop/bad Refused metadata.labels: invalid type",
    ] {
        assert!(rows.iter().any(|r| r == row), "{row} is not in\n{out}");
    }
    let shown: Value = serde_json::from_str(&asked("k8s status -o json").0).unwrap();
    assert_eq!(shown["faults"][0]["name"], "shop/bad");
    // An agent that asks no API server says so, and how to change it.
    let agent = FakeAgent::start(|_| {
        ok(
            json!({"enabled": false, "server": "", "synced": false, "kinds": [], "faults": [], "local_pods": 0}),
        )
    });
    let ran = flowloom(&agent.socket(), "k8s status");
    assert!(ran.code == 1 && ran.err.contains("kubernetes.enabled"), "{} {}", ran.code, ran.err);
}

#[test]
fn status_ipam_and_identities() {
    let (out, _) = asked("status");
    for part in [
        "n1",
        "ready",
        "generation 3 of 3",
        "2026-11-30T05:44:29Z",
        "3 (2 ready, 1 waiting, 0 failed)",
        "AwaitingVni",
    ] {
        assert!(out.contains(part), "{out} lacks {part}");
    }
    let (out, _) = asked("ipam");
    assert_eq!(
        out,
        "\
VPC   SUBNET  RANGE        GATEWAY   ALLOCATES  CAPACITY  AVAILABLE
red   web     10.0.0.0/24  10.0.0.1  yes        253       252
blue  six     fd00::/64    -         no         2^64+     2^64+
"
    );
    let (out, _) = asked("ipam --addresses --vpc red -o wide");
    assert!(out.contains("c1/eth0") && out.contains("free in 1m0s"), "{out}");
    let (out, _) = asked("identity list --vpc red");
    assert!(out.contains("world") && out.contains("red/a,red/b,red/c and 1 more"), "{out}");
    assert!(asked("identity list -o wide").0.contains("red/d"));
}

#[test]
fn policy_entries_rules_and_wait() {
    let (out, request) = asked("policy entries red/web-1");
    assert_eq!(request.query, "vpc=red&endpoint=web-1");
    assert_eq!(
        out,
        "\
slot 3 (egress) of red/web-1 (freeze): 2 entries
PEER    PROTOCOL  PORTS  VERDICT  RULE             FLAGS
app=db  tcp       5432   drop     red/front/no-db  log,stateless
any     any       any    allow    default          -
"
    );
    let (out, request) = asked("policy rules --vpc red");
    assert_eq!(
        (request.query.as_str(), out.contains("red/front/no-db  12    888 B")),
        ("vpc=red", true),
        "{out}"
    );
    let (out, request) = asked("policy quarantine red/web-1 --ingress --reason t");
    assert_eq!(out, "red/web-1 is in quarantine: nothing passes in ingress (revision 10)\n");
    assert_eq!(
        request.body,
        json!({"vpc": "red", "endpoint": "web-1", "ingress": true, "egress": false, "reason": "t"})
    );
    let (_, request) = asked("policy quarantine red/web-1");
    assert_eq!(
        (&request.body["ingress"], &request.body["egress"]),
        (&json!(true), &json!(true)),
        "no direction is both"
    );
    let (out, _) = asked("policy freeze web-1 --vpc red");
    assert_eq!(
        out,
        "red/web-1 is frozen: the rules of revision 9 stay in force (revision 9)\nwithheld: gone red/front/no-db\n"
    );
    let (out, request) = asked("policy rollback red/web-1 --to 8");
    assert_eq!(out, "red/web-1 is rolled back: the rules of revision 8 are in force again (revision 10)\n");
    assert_eq!(request.body, json!({"vpc": "red", "endpoint": "web-1", "revision": 8, "reason": ""}));
    let (out, _) = asked("policy release red/web-1");
    assert_eq!(out, "red/web-1 is released: what its sources say is in force (it is not wired now)\n");
    let (out, request) = asked("policy history red/web-1 --last 5");
    assert_eq!(
        out,
        "\
TIME                  ENDPOINT   WHO         REVISION  ENTRIES           RESULT
2026-11-30T05:44:29Z  red/web-1  cni         8         -                 in force
2026-11-30T05:44:30Z  red/web-1  document 4  8 -> 9    ingress +3 ~1 -2  refused: policy slot 5: no room
"
    );
    let mut query: Vec<_> = request.query.split('&').collect();
    query.sort_unstable();
    assert_eq!(query, ["endpoint=web-1", "last=5", "vpc=red"]);
    let (out, _) = asked("policy history -o wide");
    assert!(out.contains("egress 3, ingress 4") && out.contains("container c1, interface eth0"), "{out}");
    assert!(out.contains("digest ab12"), "{out}");
    let (out, request) = asked("policy wait red/web-1 --revision 9 --generation 3 --timeout 1500ms");
    assert_eq!(out, "in force: document generation 3, revision 9 (waited 1.5ms)\n");
    let mut query: Vec<_> = request.query.split('&').collect();
    query.sort_unstable();
    assert_eq!(query, ["endpoint=web-1", "generation=3", "revision=9", "timeout_ms=1500", "vpc=red"]);
}

#[test]
fn a_wait_that_ends_too_early_is_exit_code_5() {
    let agent = FakeAgent::start(|_| error(504, "Timeout", "generation 4 is not in force after 10 ms"));
    let ran = flowloom(&agent.socket(), "policy wait --generation 4 --timeout 10ms");
    assert_eq!((ran.code, ran.out.as_str()), (5, ""));
    assert!(ran.err.contains("generation 4"), "{}", ran.err);
}

#[test]
fn explain_answers_by_exit_code_names_rules_and_shows_where_the_kernel_differs() {
    for (verdict, code) in [("allow", 0), ("drop", 4), ("reject", 4)] {
        let agent = FakeAgent::start(move |_| {
            ok(
                json!({"verdict": verdict, "summary": "web-1 to db", "egress": judgement("egress", verdict, "allow"), "ingress": null}),
            )
        });
        let ran = flowloom(&agent.socket(), "policy explain red/web-1 10.0.0.9 tcp/5432");
        assert_eq!((ran.code, ran.err.as_str()), (code, ""));
        assert!(ran.out.starts_with(&verdict.to_uppercase()), "{}", ran.out);
        for part in ["red/front/no-db", "port 80 is not 5432", "labels app=db", "slot 3", "100"] {
            assert!(ran.out.contains(part), "{} lacks {part}", ran.out);
        }
        assert_eq!(ran.out.contains("DIFFERS"), verdict != "allow", "{}", ran.out);
        assert_eq!(
            agent.requests()[0].body,
            json!({"vpc": "", "from": "red/web-1", "to": "10.0.0.9", "protocol": "tcp", "port": 5432,
                   "icmp_type": null, "icmp_code": null, "family": null})
        );
    }
}

#[test]
fn explain_and_trace_show_the_backends_of_a_service() {
    let service = |verdict: &str| {
        json!({"service": "shop/db", "kind": "cluster-ip", "ip": "10.96.0.7", "port": 5432, "answer": "backend", "backends": [
            {"ip": "10.1.0.1", "port": 5432, "node": "n1", "endpoint": "shop/db-0", "used": true, "why": "ready", "verdict": verdict},
            {"ip": "fd00::2", "port": 5432, "node": "n2", "endpoint": null, "used": false, "why": "not ready"},
        ]})
    };
    let agent = FakeAgent::start(move |r| match r.path.as_str() {
        "/v1/trace" => ok(json!({
            "outcome": "delivered", "verdict": "allow", "reason": null, "summary": "x", "packet": "p", "src": "10.1.0.9", "dst": "10.96.0.7",
            "steps": [], "duration_ns": 900, "service": service("allow"),
        })),
        _ => ok(
            json!({"verdict": "drop", "summary": "svc/shop/db by 0 of 1 backends", "egress": null, "ingress": null, "service": service("drop")}),
        ),
    });
    let ran = flowloom(&agent.socket(), "policy explain shop/front-0 svc/shop/db tcp/5432");
    assert_eq!((ran.code, ran.err.as_str()), (4, ""));
    assert_eq!(
        ran.out,
        "\
DROP  svc/shop/db by 0 of 1 backends

svc/shop/db is 10.96.0.7:5432 (cluster-ip): 1 backend in use
  BACKEND         ENDPOINT   NODE  USED  POLICY  WHY
  10.1.0.1:5432   shop/db-0  n1    yes   drop    ready
  [fd00::2]:5432  -          n2    no    -       not ready
"
    );
    let ran = flowloom(&agent.socket(), "trace shop/front-0 svc/shop/db tcp/5432");
    assert!(ran.code == 0 && ran.out.contains("svc/shop/db is 10.96.0.7:5432"), "{}", ran.out);
}

#[test]
fn explain_and_trace_take_names_and_addresses_on_either_side() {
    for (line, vpc, from, to) in [
        ("red/web-1 red/db", "", "red/web-1", "red/db"),
        ("red/FD00:0::5 db", "", "red/fd00::5", "db"),
        ("web-1 red/10.0.0.9", "", "web-1", "red/10.0.0.9"),
        ("web-1 db --vpc red", "red", "web-1", "db"),
        ("web-1 db", "", "web-1", "db"),
        ("shop/front-0 svc/shop/db", "", "shop/front-0", "svc/shop/db"),
        ("service/shop/front pod/prod/db-0", "", "svc/shop/front", "pod/prod/db-0"),
    ] {
        let agent = FakeAgent::start(|_| error(404, "NotFound", "no"));
        assert_eq!(flowloom(&agent.socket(), &format!("policy explain {line} icmp/3/4 --family 6")).code, 1);
        assert_eq!(
            flowloom(&agent.socket(), &format!("trace {line} udp/53 --src-port 99 --payload 10")).code,
            1
        );
        let bodies: Vec<_> = agent.requests().into_iter().map(|r| r.body).collect();
        for body in &bodies {
            assert_eq!(
                (&body["vpc"], &body["from"], &body["to"]),
                (&json!(vpc), &json!(from), &json!(to)),
                "{line}"
            );
        }
        assert_eq!(
            (&bodies[0]["icmp_type"], &bodies[0]["icmp_code"], &bodies[0]["family"]),
            (&json!(3), &json!(4), &json!(6))
        );
        assert_eq!(
            (&bodies[1]["src_port"], &bodies[1]["port"], &bodies[1]["payload"]),
            (&json!(99), &json!(53), &json!(10))
        );
    }
}

#[test]
fn a_packet_may_be_said_in_words() {
    let agent = FakeAgent::start(|_| error(404, "NotFound", "no"));
    for line in ["policy explain a b --protocol TCP --port 8080", "trace a b --protocol tcp --port 8080"] {
        assert_eq!(flowloom(&agent.socket(), line).code, 1, "{line}");
    }
    assert_eq!(flowloom(&agent.socket(), "policy explain a b --protocol icmp").code, 1);
    let asked: Vec<_> =
        agent.requests().into_iter().map(|r| (r.body["protocol"].clone(), r.body["port"].clone())).collect();
    assert_eq!(
        asked,
        [(json!("tcp"), json!(8080)), (json!("tcp"), json!(8080)), (json!("icmp"), Value::Null)]
    );
}

#[test]
fn trace_names_each_step_and_answers_by_exit_code() {
    for (outcome, verdict, code) in
        [("delivered", "allow", 0), ("dropped", "drop", 4), ("answered", "reject", 4)]
    {
        let agent = FakeAgent::start(move |_| {
            ok(json!({
                "outcome": outcome, "verdict": verdict, "reason": if code == 4 { json!("PolicyEgress") } else { Value::Null },
                "summary": "the rule red/front/no-db decides", "packet": "tcp 10.0.0.5:40000 -> 10.0.0.9:5432 [S]",
                "src": "10.0.0.5", "dst": "10.0.0.9", "duration_ns": 900,
                "steps": [
                    {"step": "device", "text": "fl7 belongs to red/web-1", "numbers": [12, 7, 0]},
                    {"step": "egress", "text": format!("egress policy: {verdict} by red/front/no-db"), "verdict": verdict, "rule": named("red/front/no-db", 5), "numbers": [2, 5, 301]},
                ],
            }))
        });
        let ran = flowloom(&agent.socket(), "trace red/web-1 red/db tcp/5432 --flags sa --ingress");
        assert_eq!(ran.code, code);
        assert!(ran.out.contains("  1  device  fl7 belongs to red/web-1\n"), "{}", ran.out);
        assert!(
            ran.out.contains(&format!("  2  egress  egress policy: {verdict} by red/front/no-db\n")),
            "{}",
            ran.out
        );
        assert_eq!(ran.out.contains("DROPPED (PolicyEgress): the rule"), outcome == "dropped", "{}", ran.out);
        let body = &agent.requests()[0].body;
        assert_eq!((&body["tcp_flags"], &body["direction"]), (&json!("SA"), &json!("ingress")));
        let wide = flowloom(&agent.socket(), "trace red/web-1 red/db tcp/5432 -o wide");
        assert!(wide.out.contains("[2 5 301]") && wide.out.contains("900 ns"), "{}", wide.out);
    }
}

#[test]
fn observe_shows_names_and_passes_its_filters_on() {
    let (out, request) =
        asked("observe --vpc red --endpoint web-1 --verdict drop --reason policyegress --last 5");
    let mut query: Vec<_> = request.query.split('&').collect();
    query.sort_unstable();
    assert_eq!(query, ["endpoint=web-1", "last=5", "reason=PolicyEgress", "verdict=drop", "vpc=red"]);
    assert_eq!(
        out,
        "\
05:44:29.012 allow  red        web-1 [fd00::5]:40000 -> [fd00::9]:5432 tcp[S] egress decided by red/front/no-db
05:44:29.012 drop   red        web-1 [fd00::5]:40000 -> [fd00::9]:5432 tcp[S] egress PolicyEgress by red/front/no-db
-- 4 events lost: this reader is too slow
"
    );
    let (out, _) = asked("observe -o json");
    let lines: Vec<Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        lines,
        [event("allow", None), event("drop", Some("PolicyEgress")), json!({"type": "lost", "count": 4})]
    );
    assert_eq!(asked("observe -o yaml").0.matches("---\n").count(), 3);
    assert!(asked("observe -o wide").0.contains("(3 not reported)"));
    let (_, request) = asked("observe --endpoint red/web-1 --from shop/front-0 --to svc/shop/db");
    assert_eq!(request.query, "endpoint=red%2Fweb-1&from=shop%2Ffront-0&to=svc%2Fshop%2Fdb");
}

// A device nobody owns was shown as packets of VPC #0 between unspecified addresses.
#[test]
fn what_is_not_ip_or_nobodys_is_said_so_and_a_spoofer_is_named() {
    let agent = FakeAgent::start(|_| {
        let mut stranger = event("drop", Some("UnknownDevice"));
        (stranger["vpc"], stranger["family"], stranger["rule"]) = (named("", 0), json!(0), Value::Null);
        (stranger["endpoint"], stranger["src_endpoint"]) = (Value::Null, Value::Null);
        let mut spoofed = event("drop", Some("SpoofedSource"));
        (spoofed["src_endpoint"], spoofed["rule"]) = (Value::Null, Value::Null);
        Reply::Lines(vec![stranger, spoofed])
    });
    let out = flowloom(&agent.socket(), "observe").out;
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[0], "05:44:29.012 drop   -          (not IP) egress UnknownDevice");
    assert!(lines[1].ends_with("egress SpoofedSource at web-1"), "{}", lines[1]);
}

#[test]
fn a_followed_stream_that_the_agent_ends_is_exit_code_3() {
    let agent = agent();
    let ran = flowloom(&agent.socket(), "observe --follow");
    assert_eq!(ran.code, 3);
    assert_eq!(ran.out.lines().count(), 3);
    assert_eq!(agent.requests()[0].query, "follow=true");
}

#[test]
fn conntrack_list_and_flush() {
    let agent = agent();
    let ran = flowloom(
        &agent.socket(),
        "ct list --endpoint red/web-1 --protocol TCP --port 80 --address 10.0.0.9 --limit 1",
    );
    assert_eq!(ran.code, 0);
    assert!(
        ran.out.contains("web-1 10.0.0.5:40000  10.0.0.9:80  established  allow   -        5s    2h13m"),
        "{}",
        ran.out
    );
    assert!(ran.err.contains("--limit"), "a cut list says so: {}", ran.err);
    let mut query: Vec<_> = agent.requests()[0].query.split('&').map(str::to_owned).collect();
    query.sort_unstable();
    assert_eq!(
        query,
        ["address=10.0.0.9", "endpoint=web-1", "limit=1", "port=80", "protocol=tcp", "vpc=red"]
    );

    let (out, request) = asked("ct flush --vpc red");
    assert_eq!((out.as_str(), request.method.as_str()), ("4 connections forgotten\n", "DELETE"));
    let (_, request) = asked("ct flush --all");
    assert_eq!(request.query, "");
}

// A typing mistake must not forget every connection of the node.
#[test]
fn a_flush_without_a_word_about_what_is_refused() {
    let agent = agent();
    for line in ["ct flush", "ct flush --all --vpc red"] {
        let ran = flowloom(&agent.socket(), line);
        assert_eq!(ran.code, 2, "{line}");
    }
    assert_eq!(agent.requests(), []);
}

#[test]
fn drops_with_their_meaning() {
    let (out, request) = asked("drops --endpoint red/web-1 --reason spoofedsource -o wide");
    assert!(out.contains("SpoofedSource") && out.contains("source address or MAC"), "{out}");
    assert!(request.query.contains("reason=SpoofedSource"));
}

#[test]
fn version_and_completion() {
    let (out, _) = asked("version");
    assert!(out.contains("0.2.0") && out.contains("n1"), "{out}");
    let none = Path::new("/nowhere/agent.sock");
    let ran = flowloom(none, "version --client -o json");
    assert_eq!((ran.code, serde_json::from_str::<Value>(&ran.out).unwrap()["agent"].is_null()), (0, true));
    let ran = flowloom(none, "version");
    assert!(ran.code == 3 && ran.out.contains("flowloom:"), "{}", ran.out);
    for shell in ["bash", "zsh", "fish"] {
        let ran = flowloom(none, &format!("completion {shell}"));
        assert_eq!(ran.code, 0);
        assert!(ran.out.contains("explain") && ran.out.contains("flush"), "{shell}");
    }
}

#[test]
fn an_agent_that_is_not_there_or_starting_is_exit_code_3_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("none.sock");
    for line in ["status", "endpoint list", "trace a b tcp/1", "observe", "ct list", "policy wait"] {
        let ran = flowloom(&socket, line);
        assert_eq!((ran.code, ran.out.as_str()), (3, ""), "{line}");
        assert!(ran.err.contains("none.sock"), "{line}: {}", ran.err);
    }
    let agent = FakeAgent::start(|_| error(503, "NotReady", "the first document is not loaded"));
    let ran = flowloom(&agent.socket(), "ipam");
    assert!(ran.code == 3 && ran.err.contains("first document"), "{}", ran.err);
    let dying = FakeAgent::start(|_| Reply::HangUp);
    assert_eq!(flowloom(&dying.socket(), "status").code, 3);
}

#[test]
fn status_waits_for_an_agent_that_starts() {
    let n = std::sync::atomic::AtomicU32::new(0);
    let agent = FakeAgent::start(move |r| {
        let ready = n.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 3;
        if r.path == "/v1/health" && !ready {
            return ok(json!({"ready": false, "node": "n1", "version": "0", "waiting_for": ["document"]}));
        }
        answers(r)
    });
    assert_eq!(flowloom(&agent.socket(), "status --wait 10s").code, 0);
    let never = FakeAgent::start(|_| {
        ok(json!({"ready": false, "node": "n1", "version": "0", "waiting_for": ["document"]}))
    });
    let ran = flowloom(&never.socket(), "status --wait 100ms");
    assert!(ran.code == 5 && ran.err.contains("document"), "{}", ran.err);
}

#[test]
fn what_does_not_exist_is_exit_code_1_with_the_agents_words() {
    let agent = agent();
    let ran = flowloom(&agent.socket(), "endpoint get red/none");
    assert_eq!((ran.code, ran.out.as_str()), (1, ""));
    assert_eq!(ran.err, "error: no endpoint red/none on this node [NotFound]\n");
}

// `flowloom observe | head` ended with an error once the reader had enough.
#[test]
fn a_reader_that_went_away_is_no_error() {
    let agent = agent();
    for line in ["endpoint list", "observe", "completion bash"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_flowloom"))
            .env("FLOWLOOM_SOCKET", agent.socket())
            .args(line.split_whitespace())
            .stdout(writer)
            .output()
            .unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{line}");
    }
}

#[test]
fn a_wrong_command_line_is_exit_code_2_and_asks_nothing() {
    let agent = agent();
    for line in [
        "nonsense",
        "endpoint get",
        "endpoint get 10.0.0.1",
        "endpoint get Red/web",
        "policy explain red/a svc/shop/ tcp/80",
        "endpoint get svc/shop/front",
        "policy explain red/a 10.0.0.256 tcp/80",
        "policy explain a b tcp",
        "policy explain a b",
        "policy explain a b --port 80",
        "policy explain a b --protocol tcp",
        "policy explain a b --protocol icmp --port 300",
        "policy explain a b tcp/80 --protocol tcp",
        "policy explain a b tcp/80 --port 80",
        "policy explain a b tcp/80 --family 5",
        "policy wait --revision 1",
        "policy entries --vpc red",
        "trace a b tcp/0",
        "trace a b icmp/8",
        "trace a b udp/53 --flags S",
        "observe --verdict maybe",
        "observe --reason Because",
        "observe --from 10.0.0.256",
        "observe --for 1s",
        "drops --reason Because",
        "ct list --protocol web",
        "status -o xml",
        "status --wait soon",
    ] {
        let ran = flowloom(&agent.socket(), line);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{line}");
        assert!(!ran.err.is_empty(), "{line}");
    }
    assert_eq!(agent.requests(), []);
}
