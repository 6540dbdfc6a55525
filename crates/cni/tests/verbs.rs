//! Each verb against a fake agent: what is asked, what is printed, and what went wrong elsewhere in the field.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod fake_agent;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fake_agent::{FakeAgent, Reply, Request, error, ok};
use flowloom_cni::error::CniError;
use flowloom_cni::sandbox::{Sandbox, SandboxInterface};
use flowloom_cni::{Limits, Outcome, run};
use serde_json::{Value, json};

const NETNS: &str = "/proc/self/ns/net";
const SHORT: Limits = Limits {
    add: Duration::from_secs(5),
    check: Duration::from_secs(5),
    del: Duration::from_secs(5),
    del_absent: Duration::from_millis(100),
    gc: Duration::from_secs(5),
    status: Duration::from_secs(5),
};

/// Namespaces as a table; records what loopback was set to.
#[derive(Default)]
struct Table {
    interfaces: BTreeMap<(String, String), SandboxInterface>,
    loopback: Mutex<Vec<(String, bool)>>,
}

impl Sandbox for Table {
    fn interface(&self, netns: &str, name: &str) -> Result<Option<SandboxInterface>, CniError> {
        Ok(self.interfaces.get(&(netns.to_owned(), name.to_owned())).cloned())
    }
    fn set_loopback(&self, netns: &str, up: bool) -> Result<(), CniError> {
        self.loopback.lock().unwrap().push((netns.to_owned(), up));
        Ok(())
    }
}

fn container(mac: &str, up: bool, addresses: &[&str]) -> Table {
    let interface = SandboxInterface {
        mac: mac.to_owned(),
        up,
        addresses: addresses.iter().map(|a| (*a).to_owned()).collect(),
    };
    Table {
        interfaces: BTreeMap::from([((NETNS.to_owned(), "eth0".to_owned()), interface)]),
        ..Table::default()
    }
}

fn call(
    verb: &str,
    env: &[(&'static str, &str)],
    config: &Value,
    sandbox: &Table,
    limits: &Limits,
) -> Outcome {
    let mut vars = BTreeMap::from([
        ("CNI_COMMAND", verb.to_owned()),
        ("CNI_CONTAINERID", "c1".to_owned()),
        ("CNI_NETNS", NETNS.to_owned()),
        ("CNI_IFNAME", "eth0".to_owned()),
        ("CNI_PATH", "/opt/cni/bin".to_owned()),
    ]);
    for (k, v) in env {
        vars.insert(*k, (*v).to_owned());
    }
    run("/opt/cni/bin/flowloom-cni", &vars, &mut config.to_string().as_bytes(), sandbox, limits)
}

fn simple(verb: &str, config: &Value) -> Outcome {
    call(verb, &[], config, &Table::default(), &SHORT)
}

fn config(agent: &FakeAgent, version: &str) -> Value {
    json!({"cniVersion": version, "name": "net", "type": "flowloom-cni", "socket": agent.socket()})
}

fn failure(outcome: &Outcome) -> (u64, String) {
    assert_eq!(outcome.exit_code, 1, "{outcome:?}");
    let value: Value = serde_json::from_str(&outcome.stdout).unwrap();
    (value["code"].as_u64().unwrap(), value["msg"].as_str().unwrap().to_owned())
}

fn success(outcome: &Outcome) -> Value {
    assert_eq!(outcome.exit_code, 0, "{outcome:?}");
    if outcome.stdout.is_empty() { Value::Null } else { serde_json::from_str(&outcome.stdout).unwrap() }
}

fn made() -> Value {
    json!({
        "endpoint": "default/web", "mtu": 1450, "revision": 3,
        "interfaces": [
            {"name": "fl1", "mac": "02:00:00:00:00:01", "sandbox": ""},
            {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": NETNS},
        ],
        "ips": [
            {"address": "10.0.0.5/24", "gateway": "10.0.0.1", "interface": 1},
            {"address": "fd00::5/64", "gateway": "fd00::1", "interface": 1},
        ],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}, {"dst": "::/0", "gw": "fd00::1"}],
    })
}

#[test]
fn add_asks_for_everything_the_configuration_and_the_arguments_say() {
    let agent = FakeAgent::start(|_| ok(made()));
    let mut conf = config(&agent, "1.0.0");
    conf["vpc"] = json!("blue");
    conf["subnet"] = json!("web");
    conf["security_groups"] = json!(["a"]);
    conf["labels"] = json!({"app": "x"});
    let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u1;FLOWLOOM_ENDPOINT=web;OTHER=1";
    success(&call("ADD", &[("CNI_ARGS", args)], &conf, &Table::default(), &SHORT));
    let expected = Request {
        method: "POST".into(),
        path: "/v1/cni/add".into(),
        query: String::new(),
        body: json!({
            "container_id": "c1", "ifname": "eth0", "netns": NETNS,
            "network": {"name": "net", "vpc": "blue", "subnet": "web", "security_groups": ["a"], "labels": {"app": "x"}},
            "args": {"K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "web-0", "K8S_POD_UID": "u1", "FLOWLOOM_ENDPOINT": "web"},
        }),
    };
    assert_eq!(agent.requests(), [expected]);
}

#[test]
fn results_are_in_the_version_of_the_request() {
    let agent = FakeAgent::start(|_| ok(made()));
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let result = success(&simple("ADD", &config(&agent, version)));
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["ips"][0].get("version").is_some(), version == "0.4.0");
        assert_eq!(result["interfaces"][1].get("mtu").is_some(), version == "1.1.0");
        assert_eq!(result["interfaces"][1]["sandbox"], NETNS);
        assert_eq!(result["ips"][1]["address"], "fd00::5/64");
        assert_eq!(result["ips"][1]["interface"], 1);
        assert_eq!(result["routes"][1], json!({"dst": "::/0", "gw": "fd00::1"}));
    }
}

#[test]
fn version_answers_without_an_agent_and_returns_the_version_it_was_given() {
    for asked in ["0.4.0", "1.0.0", "1.1.0", "9.9.9"] {
        let answer = success(&simple("VERSION", &json!({"cniVersion": asked})));
        assert_eq!(answer, json!({"cniVersion": asked, "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}));
    }
    let vars = BTreeMap::from([("CNI_COMMAND", "VERSION".to_owned())]);
    let empty = run("/opt/cni/bin/flowloom-cni", &vars, &mut &b""[..], &Table::default(), &SHORT);
    assert_eq!(success(&empty)["cniVersion"], "1.1.0");
}

#[test]
fn errors_are_in_the_version_of_the_request_and_name_what_is_wrong() {
    let agent = FakeAgent::start(|_| ok(made()));
    let mut conf = config(&agent, "0.4.0");
    conf["security_group"] = json!(["typo"]);
    let outcome = simple("ADD", &conf);
    assert_eq!(failure(&outcome).0, 2);
    assert!(failure(&outcome).1.contains("security_group") && failure(&outcome).1.contains("typo"));
    assert_eq!(serde_json::from_str::<Value>(&outcome.stdout).unwrap()["cniVersion"], "0.4.0");

    let mut chained = config(&agent, "1.0.0");
    chained["prevResult"] = json!({"cniVersion": "1.0.0", "interfaces": []});
    assert_eq!(failure(&simple("ADD", &chained)).0, 2);

    assert_eq!(failure(&simple("ADD", &json!({"cniVersion": "0.3.1", "name": "n"}))).0, 1);
    assert_eq!(
        failure(&call("ADD", &[("CNI_IFNAME", "a/b")], &config(&agent, "1.0.0"), &Table::default(), &SHORT))
            .0,
        4
    );
    assert_eq!(failure(&simple("REMOVE", &config(&agent, "1.0.0"))).0, 4);
    let vars = BTreeMap::from([("CNI_COMMAND", "ADD".to_owned())]);
    assert_eq!(
        failure(&run("/opt/cni/bin/flowloom-cni", &vars, &mut &b"{"[..], &Table::default(), &SHORT)).0,
        6
    );
    let mut endless = std::io::repeat(b' ');
    assert_eq!(
        failure(&run("/opt/cni/bin/flowloom-cni", &vars, &mut endless, &Table::default(), &SHORT)).0,
        6
    );
    assert_eq!(agent.requests(), [], "nothing may reach the agent before everything is checked");
}

#[test]
fn refusals_of_the_agent_keep_their_meaning() {
    for (status, name, expected) in [
        (400, "InvalidRequest", 7),
        (404, "NotFound", 7),
        (409, "AttachmentConflict", 101),
        (409, "InUse", 101),
        (507, "AddressesExhausted", 103),
        (507, "CapacityExceeded", 100),
        (500, "Realise", 100),
        (500, "SomethingNewer", 100),
    ] {
        let agent = FakeAgent::start(move |_| error(status, name, "subnet default/web says no"));
        let outcome = simple("ADD", &config(&agent, "1.0.0"));
        let (code, message) = failure(&outcome);
        assert_eq!(code, expected, "{name}");
        assert!(message.contains("subnet default/web"), "{message}");
        assert_eq!(agent.requests().len(), 1, "{name} does not pass by itself");
    }
}

// Field reports 3: many ADDs at once, the agent says 429 and the runtime kills the plugin.
#[test]
fn a_busy_or_starting_or_dying_agent_is_asked_again() {
    let n = AtomicU32::new(0);
    let agent = FakeAgent::start(move |_| match n.fetch_add(1, Ordering::Relaxed) {
        0 => error(429, "Busy", "more requests than can be served"),
        1 => error(503, "NotReady", "the first document is not loaded"),
        2 => Reply::HangUp,
        _ => ok(made()),
    });
    assert_eq!(success(&simple("ADD", &config(&agent, "1.0.0")))["ips"][0]["address"], "10.0.0.5/24");
    let requests = agent.requests();
    assert_eq!(requests.len(), 4);
    assert!(
        requests.iter().all(|r| *r == requests[0]),
        "each try must be the same request, or it is not idempotent"
    );
}

#[test]
fn an_agent_that_does_not_come_up_is_try_again_later() {
    let directory = tempfile::tempdir().unwrap();
    let conf =
        json!({"cniVersion": "1.0.0", "name": "n", "type": "t", "socket": directory.path().join("none")});
    let limits = Limits { add: Duration::from_millis(200), ..SHORT };
    let (code, message) = failure(&call("ADD", &[], &conf, &Table::default(), &limits));
    assert_eq!(code, 11);
    assert!(message.contains("none"), "names the socket: {message}");
}

// Field reports 13: the same container and interface got two addresses.
#[test]
fn a_repeated_add_answers_the_same_and_a_different_one_is_refused() {
    let n = AtomicU32::new(0);
    let agent = FakeAgent::start(move |r| {
        if r.body["network"]["vpc"] == "other" {
            return error(409, "AttachmentConflict", "c1/eth0 is attached to default/web already");
        }
        assert!(n.fetch_add(1, Ordering::Relaxed) < 2);
        ok(made())
    });
    let first = simple("ADD", &config(&agent, "1.0.0"));
    assert_eq!(first, simple("ADD", &config(&agent, "1.0.0")));
    let mut other = config(&agent, "1.0.0");
    other["vpc"] = json!("other");
    assert_eq!(failure(&simple("ADD", &other)).0, 101);
}

// Field reports 7 and 27: DEL skipped its work or failed because something was gone already.
#[test]
fn del_succeeds_and_still_tells_the_agent_when_the_namespace_is_gone_or_empty() {
    let agent = FakeAgent::start(|_| ok(json!({"removed": []})));
    for (netns, sent) in [("", Value::Null), ("/run/netns/gone", json!("/run/netns/gone"))] {
        let outcome =
            call("DEL", &[("CNI_NETNS", netns)], &config(&agent, "1.0.0"), &Table::default(), &SHORT);
        assert_eq!((outcome.exit_code, outcome.stdout.as_str()), (0, ""));
        assert_eq!(agent.requests().last().unwrap().body["netns"], sent);
    }
    assert_eq!(agent.paths(), ["/v1/cni/del", "/v1/cni/del"]);
}

#[test]
fn del_of_a_container_nobody_knows_succeeds() {
    let agent = FakeAgent::start(|_| error(404, "NotFound", "no attachment c1/eth0"));
    success(&simple("DEL", &config(&agent, "1.0.0")));
}

// Field reports 1: the address of an ADD that timed out leaked, because DEL came with an id the agent did not know.
#[test]
fn del_names_the_pod_so_that_an_unknown_container_id_can_be_found() {
    let agent = FakeAgent::start(|_| ok(json!({"removed": ["default/shop.web-0"]})));
    let args = [("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u1")];
    success(&call("DEL", &args, &config(&agent, "1.0.0"), &Table::default(), &SHORT));
    let body = &agent.requests()[0].body;
    assert_eq!(
        body["args"],
        json!({"K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "web-0", "K8S_POD_UID": "u1"})
    );
    assert_eq!((&body["container_id"], &body["ifname"]), (&json!("c1"), &json!("eth0")));
}

#[test]
fn del_is_not_stopped_by_a_configuration_that_add_refuses() {
    let agent = FakeAgent::start(|_| ok(json!({"removed": []})));
    let mut conf = config(&agent, "1.0.0");
    conf["name"] = json!("");
    conf["security_group"] = json!(1);
    conf["ipam"] = json!({"type": "host-local"});
    conf["prevResult"] = json!("nonsense");
    assert_eq!(simple("ADD", &conf).exit_code, 1);
    success(&simple("DEL", &conf));
    assert_eq!(agent.paths(), ["/v1/cni/del"]);
}

/// A configuration without an agent, and a directory for its queue.
fn orphan(directory: &tempfile::TempDir) -> Value {
    let (socket, queue) = (directory.path().join("none"), directory.path().join("queue"));
    json!({"cniVersion": "1.0.0", "name": "n", "type": "t", "socket": socket, "queue": queue})
}

#[test]
fn del_without_an_agent_and_a_queue_is_try_again_later_so_that_nothing_leaks() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits { del: Duration::from_millis(200), ..SHORT };
    let outcome = call("DEL", &[], &orphan(&directory), &Table::default(), &limits);
    assert_eq!(failure(&outcome).0, 11);
    let details: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert!(details["details"].as_str().unwrap().contains("queue"), "{details}");
    assert!(!directory.path().join("queue").exists(), "the queue is the agent's to make");
}

#[test]
fn del_without_an_agent_waits_in_the_queue_and_holds_up_no_teardown() {
    let directory = tempfile::tempdir().unwrap();
    let queue = directory.path().join("queue");
    std::fs::create_dir(&queue).unwrap();
    let before = flowloom_cni::clock::now().unwrap();
    let env = [("CNI_NETNS", "/run/netns/gone"), ("CNI_ARGS", "K8S_POD_NAME=web-0;K8S_POD_UID=u")];
    let outcome = call("DEL", &env, &orphan(&directory), &Table::default(), &SHORT);
    assert_eq!((outcome.exit_code, outcome.stdout.as_str()), (0, ""));
    assert!(outcome.note.contains("c1/eth0"), "{}", outcome.note);
    let listed = flowloom_cni::queue::list(&queue).unwrap().entries;
    assert_eq!(listed.len(), 1);
    let entry = flowloom_cni::queue::read(&listed[0]).unwrap();
    assert_eq!(entry.request.attachment.to_string(), "c1/eth0");
    assert_eq!(entry.request.netns.as_deref(), Some("/run/netns/gone"));
    assert_eq!(entry.request.args["K8S_POD_UID"], "u");
    assert_eq!(entry.started.is_after(&before), Some(true));
}

#[test]
fn del_to_an_agent_that_has_no_document_yet_waits_in_the_queue_too() {
    let directory = tempfile::tempdir().unwrap();
    let agent = FakeAgent::start(|_| error(503, "NotReady", "no document"));
    let queue = directory.path().join("queue");
    std::fs::create_dir(&queue).unwrap();
    let mut conf = orphan(&directory);
    conf["socket"] = json!(agent.socket());
    success(&call("DEL", &[], &conf, &Table::default(), &SHORT));
    assert_eq!(flowloom_cni::queue::list(&queue).unwrap().entries.len(), 1);
    // What the agent refuses is the runtime's to repeat.
    let agent = FakeAgent::start(|_| error(500, "Realise", "the kernel keeps it"));
    conf["socket"] = json!(agent.socket());
    conf["queue"] = json!(directory.path());
    assert_eq!(failure(&call("DEL", &[], &conf, &Table::default(), &SHORT)).0, 100);
    assert_eq!(flowloom_cni::queue::list(directory.path()).unwrap().entries.len(), 0);
}

fn check_config(agent: &FakeAgent) -> Value {
    let mut conf = config(agent, "1.0.0");
    conf["prevResult"] = success(&simple("ADD", &conf));
    conf
}

fn checking_agent() -> FakeAgent {
    FakeAgent::start(|r| match r.path.as_str() {
        "/v1/cni/add" => ok(made()),
        _ => ok(json!({"endpoint": "default/web"})),
    })
}

#[test]
fn check_compares_agent_namespace_and_previous_result() {
    let agent = checking_agent();
    let conf = check_config(&agent);
    // The same addresses, spelt differently by another library.
    let good = container("02:00:00:00:00:02", true, &["10.0.0.5/24", "fd00:0::5/64", "fe80::1/64"]);
    let outcome = call("CHECK", &[], &conf, &good, &SHORT);
    assert_eq!((outcome.exit_code, outcome.stdout.as_str()), (0, ""));
    let last = agent.requests().pop().unwrap();
    assert_eq!(last.path, "/v1/cni/check");
    assert_eq!(last.body["addresses"], json!(["10.0.0.5/24", "fd00::5/64"]));

    for (sandbox, needle) in [
        (Table::default(), "gone"),
        (container("02:00:00:00:00:02", false, &["10.0.0.5/24", "fd00::5/64"]), "down"),
        (container("02:00:00:00:00:09", true, &["10.0.0.5/24", "fd00::5/64"]), "02:00:00:00:00:09"),
        (container("02:00:00:00:00:02", true, &["10.0.0.5/24"]), "lacks fd00::5/64"),
        (container("02:00:00:00:00:02", true, &["10.0.0.5/32", "fd00::5/64"]), "lacks 10.0.0.5/24"),
    ] {
        let (code, message) = failure(&call("CHECK", &[], &conf, &sandbox, &SHORT));
        assert_eq!(code, 102);
        assert!(message.contains(needle) && message.contains("default/web"), "{message} lacks {needle}");
    }
}

#[test]
fn check_needs_a_previous_result_that_holds_the_interface() {
    let agent = checking_agent();
    assert_eq!(failure(&simple("CHECK", &config(&agent, "1.0.0"))).0, 7);
    let mut conf = check_config(&agent);
    conf["prevResult"]["interfaces"][1]["sandbox"] = json!("/run/netns/other");
    assert_eq!(failure(&simple("CHECK", &conf)).0, 102);
    conf["prevResult"] = json!({"interfaces": "x"});
    assert_eq!(failure(&simple("CHECK", &conf)).0, 7);
}

#[test]
fn check_of_what_the_agent_does_not_know_or_found_changed() {
    for (status, name, expected) in [(404, "NotFound", 3), (409, "CheckFailed", 102), (500, "Internal", 100)]
    {
        let agent = FakeAgent::start(move |r| match r.path.as_str() {
            "/v1/cni/add" => ok(made()),
            _ => error(status, name, "c1/eth0"),
        });
        let good = container("02:00:00:00:00:02", true, &["10.0.0.5/24", "fd00::5/64"]);
        assert_eq!(failure(&call("CHECK", &[], &check_config(&agent), &good, &SHORT)).0, expected);
    }
}

#[test]
fn status_says_whether_add_can_be_served() {
    let ready = AtomicU32::new(0);
    let agent = FakeAgent::start(move |r| {
        assert_eq!(r.path, "/v1/cni/status");
        let ready = ready.fetch_add(1, Ordering::Relaxed) == 0;
        ok(
            json!({"ready": ready, "message": if ready { "" } else { "no free address" }, "available_addresses": 1}),
        )
    });
    let mut conf = config(&agent, "1.1.0");
    (conf["vpc"], conf["subnet"]) = (json!("blue"), json!("web"));
    success(&simple("STATUS", &conf));
    let asked = agent.requests().pop().unwrap();
    assert_eq!(
        (&asked.body["network"]["vpc"], &asked.body["network"]["subnet"]),
        (&json!("blue"), &json!("web"))
    );
    assert_eq!(failure(&simple("STATUS", &config(&agent, "1.1.0"))), (50, "no free address".to_owned()));
    assert_eq!(failure(&simple("STATUS", &config(&agent, "1.0.0"))).0, 1);
    let directory = tempfile::tempdir().unwrap();
    let conf =
        json!({"cniVersion": "1.1.0", "name": "n", "type": "t", "socket": directory.path().join("none")});
    assert_eq!(failure(&simple("STATUS", &conf)).0, 50);
    let cut_off = FakeAgent::start(|_| {
        ok(
            json!({"ready": false, "limited": true, "message": "the datapath refuses", "available_addresses": 0}),
        )
    });
    assert_eq!(
        failure(&simple("STATUS", &config(&cut_off, "1.1.0"))),
        (51, "the datapath refuses".to_owned())
    );
}

#[test]
fn gc_hands_the_agent_the_list_and_when_it_was_called() {
    let agent = FakeAgent::start(|_| ok(json!({"removed": ["default/old"], "spared": [], "errors": []})));
    let mut conf = config(&agent, "1.1.0");
    conf["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let before = flowloom_cni::clock::now().unwrap();
    let vars = BTreeMap::from([("CNI_COMMAND", "GC".to_owned()), ("CNI_PATH", "/opt/cni/bin".to_owned())]);
    let outcome = run("flowloom-cni", &vars, &mut conf.to_string().as_bytes(), &Table::default(), &SHORT);
    assert_eq!((outcome.exit_code, outcome.stdout.as_str()), (0, ""));
    assert!(outcome.note.contains("default/old"), "{}", outcome.note);
    let asked = agent.requests().pop().unwrap();
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", "/v1/cni/gc"));
    assert_eq!(asked.body["network"], "net");
    assert_eq!(asked.body["valid"], json!([{"container_id": "c1", "ifname": "eth0"}]));
    assert!(asked.body["started"]["ns"].as_u64().unwrap() >= before.ns);
    assert_eq!(failure(&simple("GC", &config(&agent, "1.0.0"))).0, 1);
}

// Field reports 11: a GC that misreads its list deletes everything.
#[test]
fn gc_without_a_list_removes_nothing_and_one_that_is_no_list_is_an_error() {
    let agent = FakeAgent::start(|_| panic!("this GC must not reach the agent"));
    let outcome = simple("GC", &config(&agent, "1.1.0"));
    assert_eq!((outcome.exit_code, outcome.stdout.as_str()), (0, ""));
    assert!(outcome.note.contains("nothing is removed"), "{}", outcome.note);
    let mut conf = config(&agent, "1.1.0");
    for bad in [json!({}), json!("c1"), json!([{"containerId": "c1", "ifname": "eth0"}])] {
        conf["cni.dev/valid-attachments"] = bad;
        assert_eq!(failure(&simple("GC", &conf)).0, 7);
    }
    conf["cni.dev/valid-attachments"] = json!([]);
    conf["subnets"] = json!("typo");
    assert_eq!(failure(&simple("GC", &conf)).0, 2);
}

#[test]
fn gc_tells_what_could_not_be_removed_and_is_asked_again_while_the_agent_starts() {
    let n = AtomicU32::new(0);
    let agent = FakeAgent::start(move |_| match n.fetch_add(1, Ordering::Relaxed) {
        0 => error(503, "NotReady", "no document"),
        _ => ok(json!({"removed": [], "spared": [], "errors": ["endpoint default/x: busy"]})),
    });
    let mut conf = config(&agent, "1.1.0");
    conf["cni.dev/valid-attachments"] = json!([]);
    let outcome = simple("GC", &conf);
    assert_eq!(failure(&outcome).0, 100);
    assert!(outcome.stdout.contains("default/x"), "{}", outcome.stdout);
    let requests = agent.requests();
    assert_eq!(requests[0].body["started"], requests[1].body["started"], "a later try is no newer list");
}

#[test]
fn what_the_runtime_asks_for_reaches_the_agent_typed_and_bandwidth_is_refused() {
    let agent = FakeAgent::start(|_| ok(made()));
    let mut conf = config(&agent, "1.0.0");
    conf["capabilities"] = json!({"portMappings": true, "mac": true});
    conf["runtimeConfig"] = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}],
        "mac": "02:00:00:00:00:07",
    });
    success(&simple("ADD", &conf));
    assert_eq!(
        agent.requests()[0].body["runtime"],
        json!({"port_mappings": [{"host_port": 8080, "container_port": 80, "protocol": "tcp"}], "mac": "02:00:00:00:00:07"})
    );
    conf["runtimeConfig"] = json!({"bandwidth": {"ingressRate": 1000}});
    let (code, message) = failure(&simple("ADD", &conf));
    assert!(code == 2 && message.contains("bandwidth"), "{code} {message}");
}

#[test]
fn loopback_needs_no_agent() {
    let mut table = Table::default();
    let lo = |up| SandboxInterface {
        mac: "00:00:00:00:00:00".into(),
        up,
        addresses: vec!["127.0.0.1/8".into(), "::1/128".into()],
    };
    table.interfaces.insert((NETNS.into(), "lo".into()), lo(true));
    let conf = json!({"cniVersion": "0.4.0", "name": "cni-loopback", "type": "loopback"});
    let env = [("CNI_IFNAME", "lo")];
    let result = success(&call("ADD", &env, &conf, &table, &SHORT));
    assert_eq!(result["ips"][0]["address"], "127.0.0.1/8");
    assert_eq!(result["ips"][1]["version"], "6");
    assert_eq!(result["interfaces"][0]["name"], "lo");
    success(&call("CHECK", &env, &conf, &table, &SHORT));
    success(&call("DEL", &env, &conf, &table, &SHORT));
    success(&call("DEL", &[("CNI_IFNAME", "lo"), ("CNI_NETNS", "")], &conf, &table, &SHORT));
    assert_eq!(*table.loopback.lock().unwrap(), [(NETNS.to_owned(), true), (NETNS.to_owned(), false)]);
    table.interfaces.insert((NETNS.into(), "lo".into()), lo(false));
    assert_eq!(failure(&call("CHECK", &env, &conf, &table, &SHORT)).0, 102);
    let old = json!({"cniVersion": "0.3.1", "name": "cni-loopback", "type": "loopback"});
    let result = success(&call("ADD", &env, &old, &table, &SHORT));
    assert_eq!((&result["cniVersion"], &result["ips"][0]["version"]), (&json!("0.3.1"), &json!("4")));
    assert_eq!(failure(&call("CHECK", &env, &old, &table, &SHORT)).0, 1, "0.3.1 has no CHECK");
    let mut chained = json!({"cniVersion": "1.1.0", "name": "n", "type": "loopback"});
    chained["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]});
    assert_eq!(success(&call("ADD", &env, &chained, &table, &SHORT)), chained["prevResult"]);
    chained["cni.dev/valid-attachments"] = json!([]);
    success(&call("GC", &env, &chained, &table, &SHORT));
    success(&call("STATUS", &env, &chained, &table, &SHORT));
}
